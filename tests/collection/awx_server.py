"""A test double for AWX with the parts of ``/api/v2`` that are needed to run declare.yml and to launch its jobs.

It rejects invalid requests. It accepts only fields for which the modules of awx.awx have options, with the same types
and choices. Referenced objects must exist, names must be unique, and surveys and credential types must follow AWX's
rules. The playbooks of a project are read from a local directory. Stored secrets are never returned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jinja2

from tests.collection import awx_collection, awx_survey

TOKEN = "an-oauth-token-of-awx"
ENCRYPTED_PLACEHOLDER = "$encrypted$"
MODULES_BY_ENDPOINT = {
    "organizations": "organization",
    "execution_environments": "execution_environment",
    "credential_types": "credential_type",
    "credentials": "credential",
    "projects": "project",
    "inventories": "inventory",
    "inventory_sources": "inventory_source",
    "hosts": "host",
    "job_templates": "job_template",
    "schedules": "schedule",
    "workflow_job_templates": "workflow_job_template",
    "workflow_job_template_nodes": "workflow_job_template_node",
}
"""The module of awx.awx that writes to each endpoint."""
APPROVALS = "workflow_approval_templates"
"""The endpoint of the approvals that workflows wait for. The module of nodes writes to it."""
UNIFIED_ENDPOINTS = ("job_templates", "workflow_job_templates", "projects", "inventory_sources")
"""The endpoints whose objects ``unified_job_templates`` lists too."""
NODES = "workflow_job_template_nodes"
MODULE_ONLY_OPTIONS = {
    "state",
    "new_name",
    "copy_from",
    "wait",
    "interval",
    "update_project",
    "update_secrets",
    "survey_spec",
    "destroy_current_nodes",
    "approval_node",
    "lookup_organization",
}
"""Options of the modules that are not fields of the API."""
REFERENCE_FIELDS = {
    "organization": "organizations",
    "execution_environment": "execution_environments",
    "default_environment": "execution_environments",
    "credential_type": "credential_types",
    "credential": "credentials",
    "project": "projects",
    "source_project": "projects",
    "inventory": "inventories",
    "unified_job_template": "job_templates",
    "workflow_job_template": "workflow_job_templates",
}
"""Fields that contain the id of another object, with the endpoint of that object."""
REQUIRED_FIELDS = {
    "organizations": ("name",),
    "execution_environments": ("name", "image"),
    "credential_types": ("name", "kind"),
    "credentials": ("name", "credential_type"),
    "projects": ("name", "scm_type", "scm_url"),
    "inventories": ("name", "organization"),
    "inventory_sources": ("name", "inventory", "source"),
    "hosts": ("name", "inventory"),
    "job_templates": ("name", "inventory", "project", "playbook"),
    "schedules": ("name", "rrule", "unified_job_template"),
    "workflow_job_templates": ("name",),
    NODES: ("identifier", "workflow_job_template"),
    APPROVALS: ("name",),
}
NULLABLE_FIELDS = {"host_filter"}
"""Text fields that are null if they are not set. Other text fields are empty."""
FIELDS_UNIQUE_WITH_NAME = ("organization", "inventory", "credential_type", "unified_job_template")
"""Fields that must be unique together with the name."""
PROMPTS = {
    "extra_data": "ask_variables_on_launch",
    "job_tags": "ask_tags_on_launch",
    **{
        field: f"ask_{field}_on_launch"
        for field in (
            *("inventory", "scm_branch", "job_type", "skip_tags", "limit", "diff_mode", "verbosity"),
            *("execution_environment", "forks", "job_slice_count", "timeout"),
        )
    },
}
"""The fields of a node that are answers to prompts, and the field with which a job template allows each answer."""
TEXT_MAPPING_FIELDS = ("variables", "extra_vars", "source_vars")
"""Fields that contain a mapping as text, in JSON or YAML."""
RRULE_PATTERN = re.compile(
    r"DTSTART:\d{8}T\d{6}Z RRULE:FREQ=(MINUTELY|HOURLY|DAILY|WEEKLY|MONTHLY|YEARLY)(;\w+=[\w,+-]+)+"
)
INPUT_KEYS = {
    "id",
    "label",
    "type",
    "secret",
    "help_text",
    "format",
    "multiline",
    "choices",
    "default",
    "ask_at_runtime",
}


class RefusedRequest(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.status, self.body = status, body


def make_validation_error(field: str, message: str) -> RefusedRequest:
    return RefusedRequest(400, {field: [message]})


class Awx:
    """The state of AWX.

    ``tree`` is the directory that serves as the contents of every project. ``writes`` lists all changes to the state,
    as (method, path).
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.tables: dict[str, dict[int, dict[str, Any]]] = {
            endpoint: {} for endpoint in (*MODULES_BY_ENDPOINT, APPROVALS)
        }
        self.surveys: dict[int, dict[str, Any]] = {}
        self.attached_credential_ids: dict[int, list[int]] = {}
        """The ids of the credentials of each job template."""
        self.next_node_ids: dict[int, list[int]] = {}
        """The ids of the nodes that start after each node, if it succeeds."""
        self.updates: dict[int, int] = {}
        """How often clients have requested an update of each project."""
        self.writes: list[tuple[str, str]] = []
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        # The objects of a new installation of AWX, and a credential that was created by hand.
        self._store("organizations", {"name": "Default"})
        machine_credential_type = self._store(
            "credential_types", {"name": "Machine", "kind": "ssh", "managed": True, "inputs": {"fields": []}}
        )
        self._store(
            "credentials", {"name": "Root of the hosts", "credential_type": machine_credential_type["id"], "inputs": {}}
        )

    # Requests

    def handle_request(self, method: str, target: str, body: Any, token: str) -> tuple[int, Any]:
        url = urlsplit(target)
        with self._lock:
            try:
                if token != TOKEN:
                    raise RefusedRequest(401, {"detail": "Authentication credentials were not provided."})
                segments = url.path.strip("/").split("/")
                if segments[:2] != ["api", "v2"] or not url.path.endswith("/"):
                    raise RefusedRequest(404, {"detail": "Not found."})
                status, data = self._route(method, segments[2:], dict(parse_qsl(url.query)), body)
            except RefusedRequest as refused:
                return refused.status, refused.body
            if method != "GET":
                self.writes.append((method, url.path))
            return status, data

    def _route(self, method: str, segments: list[str], query: dict[str, str], body: Any) -> tuple[int, Any]:
        match (method, *segments):
            case ("GET", "unified_job_templates"):
                return 200, self._list_page("job_templates", query, UNIFIED_ENDPOINTS)
            case ("GET", "project_updates", item_id):
                return 200, self._update_project(int(item_id))
            case ("GET", endpoint) if endpoint in MODULES_BY_ENDPOINT:
                return 200, self._list_page(endpoint, query)
            case ("POST", endpoint) if endpoint in MODULES_BY_ENDPOINT:
                return 201, self._render_item(endpoint, self._write_item(endpoint, None, body))
            case ("GET", endpoint, item_id) if endpoint in MODULES_BY_ENDPOINT:
                return 200, self._render_item(endpoint, self._find_item(endpoint, item_id))
            case ("PATCH", endpoint, item_id) if endpoint in MODULES_BY_ENDPOINT:
                return 200, self._render_item(
                    endpoint, self._write_item(endpoint, self._find_item(endpoint, item_id), body)
                )
            case (_, "job_templates" | "workflow_job_templates" as endpoint, item_id, "survey_spec"):
                return 200, self._handle_survey(method, self._find_item(endpoint, item_id)["id"], body)
            case (_, "job_templates", item_id, "credentials"):
                return self._handle_credentials(method, self._find_item("job_templates", item_id)["id"], body)
            case (_, "workflow_job_template_nodes", item_id, "success_nodes"):
                return self._handle_next_nodes(method, self._find_item(NODES, item_id), body)
            case ("POST", "workflow_job_template_nodes", item_id, "create_approval_template"):
                approval = self._write_item(APPROVALS, None, body)
                self._find_item(NODES, item_id)["unified_job_template"] = approval["id"]
                return 201, self._render_item(APPROVALS, approval)
            case ("GET", "workflow_approval_templates", item_id):
                return 200, self._render_item(APPROVALS, self._find_item(APPROVALS, item_id))
            case ("PATCH", "workflow_approval_templates", item_id):
                approval = self._write_item(APPROVALS, self._find_item(APPROVALS, item_id), body)
                return 200, self._render_item(APPROVALS, approval)
        raise RefusedRequest(404, {"detail": "Not found."})

    def _find_item(self, endpoint: str, item_id: Any) -> dict[str, Any]:
        item = self.tables[endpoint].get(int(item_id))
        if item is None:
            raise RefusedRequest(404, {"detail": "Not found."})
        return item

    def _list_page(self, endpoint: str, query: dict[str, str], other_endpoints: tuple[str, ...] = ()) -> dict[str, Any]:
        unknown_fields = query.keys() - {"id", *self.get_writable_fields(endpoint)}
        if unknown_fields:
            raise RefusedRequest(400, {"detail": f"{endpoint} has no field {', '.join(sorted(unknown_fields))}"})
        items = [
            self._render_item(each, item)
            for each in other_endpoints or (endpoint,)
            for item in self.tables[each].values()
            if all(str(item.get(key)) == value for key, value in query.items())
        ]
        return {"count": len(items), "next": None, "previous": None, "results": items}

    def _render_item(self, endpoint: str, item: dict[str, Any]) -> dict[str, Any]:
        url = f"/api/v2/{endpoint}/{item['id']}/"
        related_urls = {}
        if endpoint in ("job_templates", "workflow_job_templates"):
            related_urls["survey_spec"] = f"{url}survey_spec/"
        if endpoint == NODES and item["unified_job_template"] is not None:
            template_endpoint = APPROVALS if item["unified_job_template"] in self.tables[APPROVALS] else "job_templates"
            related_urls["unified_job_template"] = f"/api/v2/{template_endpoint}/{item['unified_job_template']}/"
        data = {
            **item,
            "type": MODULES_BY_ENDPOINT.get(endpoint, "workflow_approval_template"),
            "url": url,
            "related": related_urls,
            "summary_fields": {},
        }
        if endpoint == "projects":
            data["scm_revision"] = "" if self.updates[item["id"]] < 2 else "0" * 40
            if self.updates[item["id"]] < 2:
                data["summary_fields"] = {"current_update": {"id": item["id"]}}
        if endpoint == "credentials":
            secret_inputs = self._find_secret_inputs(item)
            data["inputs"] = {
                key: ENCRYPTED_PLACEHOLDER if key in secret_inputs else value for key, value in item["inputs"].items()
            }
        return data

    # Writable fields

    def get_writable_fields(self, endpoint: str) -> dict[str, dict[str, Any]]:
        """Return the writable fields with their types, taken from the options of the corresponding module."""
        if endpoint == APPROVALS:
            approval_fields: dict[str, dict[str, Any]] = awx_collection.read_module_options(MODULES_BY_ENDPOINT[NODES])[
                "approval_node"
            ]["suboptions"]
            return approval_fields
        fields = {
            name: option
            for name, option in awx_collection.read_module_options(MODULES_BY_ENDPOINT[endpoint]).items()
            if name not in MODULE_ONLY_OPTIONS and option.get("type", "str") != "list"
        }
        if endpoint == NODES:
            # The module finds the workflow in this organization, and sends the type of a node with its fields.
            del fields["organization"]
            fields["type"] = {"type": "str", "choices": [MODULES_BY_ENDPOINT[NODES]]}
        return {**fields, "managed": {"type": "bool"}} if endpoint == "credential_types" else fields

    def _write_item(self, endpoint: str, old_item: dict[str, Any] | None, body: Any) -> dict[str, Any]:
        fields = self.get_writable_fields(endpoint)
        if not isinstance(body, dict):
            raise RefusedRequest(400, {"detail": "JSON parse error"})
        for name, value in body.items():
            if name not in fields:
                raise make_validation_error(name, "AWX has no such field")
            self._check_value(name, value, fields[name])
        empty_values = {"bool": False, "int": 0, "dict": {}, "str": ""}
        defaults = {name: empty_values.get(each.get("type", "str"), "") for name, each in fields.items()}
        defaults |= dict.fromkeys(fields.keys() & (REFERENCE_FIELDS.keys() | NULLABLE_FIELDS))
        new_item = {
            **(old_item or defaults),
            **{name: defaults[name] if value is None else value for name, value in body.items()},
        }
        if endpoint == "credentials" and old_item:
            new_item["inputs"] = {
                k: old_item["inputs"].get(k) if v == ENCRYPTED_PLACEHOLDER else v for k, v in new_item["inputs"].items()
            }
        for name in REQUIRED_FIELDS[endpoint]:
            if new_item[name] in ("", None):
                raise make_validation_error(name, "This field is required.")
        unique_fields = [name for name in ("name", *FIELDS_UNIQUE_WITH_NAME) if name in fields]
        if endpoint == NODES:
            unique_fields = ["identifier", "workflow_job_template"]
        elif endpoint == APPROVALS:
            # Approvals of different workflows can have the same name.
            unique_fields = ["id"]
        for item in self.tables[endpoint].values():
            if item is not old_item and all(item.get(name) == new_item.get(name) for name in unique_fields):
                raise RefusedRequest(
                    400,
                    {"__all__": [f"{endpoint}: an object with these {', '.join(unique_fields)} already exists."]},
                )
        check = getattr(self, f"_check_{endpoint}", None)
        if check:
            check(new_item)
        return self._store(endpoint, new_item)

    def _store(self, endpoint: str, item: dict[str, Any]) -> dict[str, Any]:
        item = {**item, "id": item.get("id") or next(self._ids)}
        if endpoint == "projects":
            self.updates[item["id"]] = 0
        self.tables[endpoint][item["id"]] = item
        return item

    def _check_value(self, name: str, value: Any, option: dict[str, Any]) -> None:
        if value is None:
            return
        if name in REFERENCE_FIELDS:
            if not isinstance(value, int) or value not in self.tables[REFERENCE_FIELDS[name]]:
                raise make_validation_error(name, f'Invalid pk "{value}" - object does not exist.')
            return
        if name in TEXT_MAPPING_FIELDS:
            if not isinstance(value, str) or not isinstance(json.loads(value), dict):
                raise make_validation_error(name, "Cannot parse as JSON: the text of a mapping is required")
            return
        expected_type = {"bool": bool, "int": int, "dict": dict}.get(option.get("type", "str"), str)
        if not isinstance(value, expected_type) or (expected_type is int and isinstance(value, bool)):
            raise make_validation_error(name, f"Not a valid {expected_type.__name__}: {value!r}")
        if option.get("choices") and value not in (*option["choices"], ""):
            raise make_validation_error(name, f'"{value}" is not a valid choice.')

    def _check_credential_types(self, item: dict[str, Any]) -> None:
        if item["kind"] not in ("cloud", "net") and not item.get("managed"):
            raise make_validation_error("kind", "Must be 'cloud' or 'net'")
        inputs, injectors = item["inputs"], item["injectors"]
        field_ids = [field.get("id") for field in inputs.get("fields", [])]
        malformed_fields = [
            field for field in inputs.get("fields", []) if field.keys() - INPUT_KEYS or not field.get("label")
        ]
        if (
            inputs.keys() - {"fields", "required"}
            or malformed_fields
            or not set(inputs.get("required", [])) <= set(field_ids)
        ):
            raise make_validation_error("inputs", "Additional properties are not allowed")
        if injectors.keys() - {"env", "extra_vars", "file"}:
            raise make_validation_error("injectors", "Additional properties are not allowed")
        for name, text in injectors.get("env", {}).items():
            if not re.fullmatch(r"[a-zA-Z_]\w*", name) or name.startswith("ANSIBLE_"):
                raise make_validation_error(
                    "injectors", f"Environment variable {name} is not allowed to be used in credentials."
                )
            self._substitute(text, dict.fromkeys(field_ids, "EXAMPLE"))

    def _substitute(self, text: str, inputs: dict[str, Any]) -> str:
        try:
            return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text).render(inputs)
        except jinja2.UndefinedError as error:
            raise make_validation_error("injectors", f"uses an undefined field ({error})") from None

    def _find_credential_type(self, credential: dict[str, Any]) -> dict[str, Any]:
        return self.tables["credential_types"][credential["credential_type"]]

    def _find_secret_inputs(self, credential: dict[str, Any]) -> set[str]:
        return {
            field["id"] for field in self._find_credential_type(credential)["inputs"]["fields"] if field.get("secret")
        }

    def _check_credentials(self, item: dict[str, Any]) -> None:
        inputs = self._find_credential_type(item)["inputs"]
        unknown_inputs = item["inputs"].keys() - {field["id"] for field in inputs["fields"]}
        missing_inputs = [name for name in inputs.get("required", []) if not item["inputs"].get(name)]
        if unknown_inputs or missing_inputs:
            raise make_validation_error("inputs", f"unknown: {sorted(unknown_inputs)}; required: {missing_inputs}")

    def _check_inventory_sources(self, item: dict[str, Any]) -> None:
        if item["source"] == "scm" and not item["source_project"]:
            raise make_validation_error("source_project", "Project required for scm type sources.")
        if not (self.tree / item["source_path"]).is_file():
            raise make_validation_error("source_path", "the project has no such file")
        if (
            item["credential"]
            and self._find_credential_type(self.tables["credentials"][item["credential"]])["kind"] != "cloud"
        ):
            raise make_validation_error(
                "credential", "Credentials of type machine, source control, insights and vault are disallowed"
            )

    def _check_job_templates(self, item: dict[str, Any]) -> None:
        if self.updates[item["project"]] < 2:
            raise make_validation_error("playbook", "the project has not been updated yet")
        playbooks = {str(path.relative_to(self.tree)) for path in self.tree.glob("playbooks/*.yml")}
        if item["playbook"] not in playbooks:
            raise make_validation_error("playbook", "Playbook not found for project.")

    def _check_workflow_job_template_nodes(self, item: dict[str, Any]) -> None:
        template = self.tables["job_templates"].get(item["unified_job_template"], {})
        for field, permission in PROMPTS.items():
            if item[field] and not template.get(permission):
                raise make_validation_error(field, "Field is not configured to prompt on launch.")

    def _check_schedules(self, item: dict[str, Any]) -> None:
        if not RRULE_PATTERN.fullmatch(item["rrule"]):
            raise make_validation_error("rrule", "DTSTART and one RRULE are required.")
        problems = self._check_answers(self.tables["job_templates"][item["unified_job_template"]], item["extra_data"])
        if problems:
            raise RefusedRequest(400, {"variables_needed_to_start": problems})

    def _check_answers(self, template: dict[str, Any], answers: dict[str, Any]) -> list[str]:
        allow_other_variables = template["ask_variables_on_launch"]
        survey = self.surveys[template["id"]]
        return awx_survey.check_answers(
            survey,
            {**awx_survey.collect_default_answers(survey), **answers},
            allow_other_variables=allow_other_variables,
        )

    def _handle_survey(self, method: str, template_id: int, body: Any) -> Any:
        if method == "POST":
            if problem := awx_survey.find_problem(body):
                raise RefusedRequest(400, {"error": problem})
            self.surveys[template_id] = body
        return self.surveys.get(template_id, {})

    def _handle_credentials(self, method: str, template_id: int, body: Any) -> tuple[int, Any]:
        attached_credential_ids = self.attached_credential_ids.setdefault(template_id, [])
        if method == "GET":
            credentials = [
                self._render_item("credentials", self.tables["credentials"][item_id])
                for item_id in attached_credential_ids
            ]
            return 200, {"count": len(credentials), "next": None, "previous": None, "results": credentials}
        if body.keys() - {"id", "disassociate"}:
            raise make_validation_error("id", "unknown keys")
        credential = self._find_item("credentials", body["id"])
        if body.get("disassociate"):
            attached_credential_ids.remove(credential["id"])
            return 204, None
        if credential["credential_type"] in [
            self.tables["credentials"][each]["credential_type"] for each in attached_credential_ids
        ]:
            raise RefusedRequest(400, {"error": "Cannot assign multiple credentials of one type."})
        attached_credential_ids.append(credential["id"])
        return 204, None

    def _handle_next_nodes(self, method: str, node: dict[str, Any], body: Any) -> tuple[int, Any]:
        next_ids = self.next_node_ids.setdefault(node["id"], [])
        if method == "GET":
            nodes = [self._render_item(NODES, self.tables[NODES][item_id]) for item_id in next_ids]
            return 200, {"count": len(nodes), "next": None, "previous": None, "results": nodes}
        if body.keys() - {"id", "disassociate"}:
            raise make_validation_error("id", "unknown keys")
        next_node = self._find_item(NODES, body["id"])
        if body.get("disassociate"):
            next_ids.remove(next_node["id"])
            return 204, None
        if next_node["workflow_job_template"] != node["workflow_job_template"]:
            raise RefusedRequest(400, {"Error": "The nodes belong to different workflows."})
        if node["id"] in self._list_descendants(next_node["id"]):
            raise RefusedRequest(400, {"Error": "Cycle detected."})
        next_ids.append(next_node["id"])
        return 204, None

    def _list_descendants(self, node_id: int) -> set[int]:
        """Return the ids of a node and of all nodes that start after it."""
        return {node_id}.union(*(self._list_descendants(next_id) for next_id in self.next_node_ids.get(node_id, [])))

    def _update_project(self, project_id: int) -> dict[str, Any]:
        self._find_item("projects", project_id)
        self.updates[project_id] += 1
        return {"id": project_id, "status": "successful" if self.updates[project_id] > 1 else "running"}

    # Launching jobs

    def find_by_name(self, endpoint: str, name: str) -> dict[str, Any]:
        key = "identifier" if endpoint == NODES else "name"
        (item,) = [item for item in self.tables[endpoint].values() if item[key] == name]
        return item

    def launch(self, name: str, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a new job. Raises RefusedRequest if its survey rejects an answer."""
        template = self.find_by_name("job_templates", name)
        self._require_valid_answers(template, answers)
        env = {}
        for item_id in self.attached_credential_ids.get(template["id"], []):
            credential = self.tables["credentials"][item_id]
            for variable, text in self._find_credential_type(credential).get("injectors", {}).get("env", {}).items():
                env[variable] = self._substitute(text, credential["inputs"])
        inventory = self.tables["inventories"][template["inventory"]]
        return {
            "playbook": template["playbook"],
            "job_type": template["job_type"],
            "extra_vars": {
                **json.loads(template["extra_vars"] or "{}"),
                **awx_survey.collect_default_answers(self.surveys[template["id"]]),
                **answers,
            },
            "env": env,
            "inventory": inventory["name"],
            "hosts": {
                host["name"]: json.loads(host["variables"])
                for host in self.tables["hosts"].values()
                if host["inventory"] == inventory["id"]
            },
        }

    def _require_valid_answers(self, template: dict[str, Any], answers: dict[str, Any]) -> None:
        problems = self._check_answers(template, answers)
        if problems:
            raise RefusedRequest(400, {"variables_needed_to_start": problems})

    def run_workflow(self, name: str, answers: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        """Yield the settings of each job or approval of a workflow, in order, and receive the artifacts of each.

        Send no artifacts, and close the generator, if a job fails or an approval is denied. As in AWX, jobs receive the
        artifacts of all nodes before them, and the answers to the survey of the workflow, which have precedence.
        """
        workflow = self.find_by_name("workflow_job_templates", name)
        self._require_valid_answers(workflow, answers)
        answers = {**awx_survey.collect_default_answers(self.surveys[workflow["id"]]), **answers}
        nodes = {
            key: node for key, node in self.tables[NODES].items() if node["workflow_job_template"] == workflow["id"]
        }
        followers = {next_id for node_id in nodes for next_id in self.next_node_ids.get(node_id, [])}
        next_ids = [node_id for node_id in nodes if node_id not in followers]
        artifacts: dict[str, Any] = {}
        while next_ids:
            (node_id,) = next_ids
            template_id = nodes[node_id]["unified_job_template"]
            if template_id in self.tables[APPROVALS]:
                step = {"approval": self.tables[APPROVALS][template_id]["name"]}
            else:
                step = self.launch(self.tables["job_templates"][template_id]["name"], {**artifacts, **answers})
            artifacts |= yield step
            next_ids = self.next_node_ids.get(node_id, [])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for the client to acknowledge the headers
    awx: Awx

    def _serve(self) -> None:
        raw_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, data = self.awx.handle_request(
            self.command, self.path, json.loads(raw_body) if raw_body else None, token
        )
        payload = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("X-API-Product-Name", "AWX")
        self.send_header("X-API-Product-Version", "24.6.1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@contextlib.contextmanager
def served(awx: Awx) -> Iterator[str]:
    """Serve ``awx`` on a loopback port. Yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"awx": awx}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
