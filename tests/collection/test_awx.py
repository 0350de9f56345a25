"""Test playbooks/awx by declaring all resources in a test double of AWX and running its jobs with ansible-runner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.collection import agents, awx_collection, awx_survey
from tests.collection.awx_server import ENCRYPTED_PLACEHOLDER, MODULES_BY_ENDPOINT, TOKEN, Awx, RefusedRequest, served
from tests.collection.recipes import (
    TIMEOUT_SECONDS,
    PlaybookRunner,
    check_refusal,
    check_success,
    load_plays_by_playbook,
    run_playbook,
)
from tests.freebsd_shim.harness import created_shim
from tests.support import pools, session
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.roles import make_environment, play

PLAYBOOKS_DIRECTORY = session.REPOSITORY / "playbooks"
AWX_VARIABLES = yaml.safe_load((PLAYBOOKS_DIRECTORY / "awx" / "vars" / "job_templates.yml").read_text())
JOB_TEMPLATES, WORKFLOW = AWX_VARIABLES["awx_job_templates"], AWX_VARIABLES["awx_workflow"]
JOB_NAMES_BY_PLAYBOOK = {template["playbook"]: template["name"] for template in JOB_TEMPLATES}


@dataclass
class Declaration:
    """The test double of AWX, and the play of docs/awx.md that declares all resources in it.

    ``first_output`` is the output of the first run.
    """

    awx: Awx
    url: str
    gateway: MemoryGateway
    scratch: Path
    first_output: str = ""

    def declare(self, *options: str, **variables: Any) -> tuple[bool, str]:
        """Run the play. Returns whether it failed, and its output."""
        documented_play = load_plays_by_playbook()["grove.sandbox.awx.declare"]
        play_variables = {
            **documented_play["vars"],
            "awx_gateway_url": self.gateway.url,
            "awx_machine_credential": "Root of the hosts",
            "awx_hosts": {"here": {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}},
            **variables,
        }
        playbook = self.scratch / "declare.yml"
        playbook.write_text(json.dumps([{**documented_play, "vars": play_variables}]))
        run = run_playbook(
            self.scratch,
            str(playbook),
            *options,
            ANSIBLE_COLLECTIONS_PATH=f"{session.COLLECTIONS}:{awx_collection.unpack_collection()}",
            CONTROLLER_HOST=self.url,
            CONTROLLER_OAUTH_TOKEN=TOKEN,
            SANDBOX_GATEWAY_TOKEN=ADMIN_KEY,
        )
        return run.failed, run.output


@pytest.fixture(scope="module")
def declaration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Declaration]:
    awx = Awx(session.REPOSITORY)
    with agents.running_gateway(tmp_path_factory.mktemp("agents")) as gateway, served(awx) as url:
        declaration = Declaration(awx, url, gateway, tmp_path_factory.mktemp("awx"))
        failed, declaration.first_output = declaration.declare()
        assert not failed, declaration.first_output
        yield declaration


def count_changes(output: str) -> int:
    match = re.search(r"changed=(\d+) .*failed=0", output)
    assert match, output
    return int(match[1])


# --- the declaration -------------------------------------------------------------------------------------------------


def test_the_declaration_creates_all_objects(declaration: Declaration) -> None:
    assert count_changes(declaration.first_output) >= 9, declaration.first_output
    created_names = {
        endpoint: {item.get("name", item.get("identifier")) for item in table.values()}
        for endpoint, table in declaration.awx.tables.items()
    }
    assert created_names["job_templates"] == {template["name"] for template in JOB_TEMPLATES}
    assert created_names["workflow_job_templates"] == {WORKFLOW["name"]}
    assert created_names["workflow_job_template_nodes"] == {"plan", "approve", "apply"}
    assert created_names["workflow_approval_templates"] == {"Approve the plan"}
    assert created_names["inventories"] == {"Sandboxes", "Sandbox hosts"} and created_names["hosts"] == {"here"}
    assert created_names["schedules"] == {"Every night"} and created_names["execution_environments"] == {"Sandboxes"}
    credential = declaration.awx.find_by_name("credentials", "Sandbox gateway")
    assert credential["inputs"] == {"url": declaration.gateway.url, "token": ADMIN_KEY}
    assert ADMIN_KEY not in declaration.first_output


def test_a_second_declaration_corrects_only_differences(declaration: Declaration) -> None:
    awx = declaration.awx
    template = awx.find_by_name("job_templates", "Build a template")
    awx.surveys[template["id"]]["spec"][0]["required"] = False
    awx.tables["job_templates"][template["id"]]["description"] = "by hand"
    awx.attached_credential_ids[template["id"]].clear()
    awx.writes.clear()
    failed, output = declaration.declare("--diff", awx_gateway_token="another-key-0123456789", awx_new_token=True)
    assert not failed and count_changes(output) == 2, output
    credential, path = awx.find_by_name("credentials", "Sandbox gateway"), f"/api/v2/job_templates/{template['id']}/"
    assert awx.writes == [
        ("PATCH", f"/api/v2/credentials/{credential['id']}/"),
        *[("PATCH", path), ("POST", f"{path}credentials/"), ("POST", f"{path}survey_spec/")],
    ]
    assert credential["inputs"]["token"] == "another-key-0123456789"
    credential["inputs"]["token"] = ADMIN_KEY


@pytest.mark.parametrize("missing_variable", ["awx_image", "awx_gateway_url"])
def test_missing_variables_are_reported(declaration: Declaration, missing_variable: str) -> None:
    declaration.awx.writes.clear()
    failed, output = declaration.declare(
        **{missing_variable: "unix:///a/socket" if missing_variable == "awx_gateway_url" else ""}
    )
    assert failed and "Set awx_project_url to a Git repository" in output
    assert declaration.awx.writes == []


# --- the AWX double refuses invalid requests -------------------------------------------------------------------------

REFUSED_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unknown field": ("POST", "organizations", {"name": "a", "colour": "red"}),
    "option of the module": ("POST", "organizations", {"name": "a", "state": "present"}),
    "name taken": ("POST", "organizations", {"name": "Default"}),
    "no name": ("POST", "organizations", {"description": "a"}),
    "wrong type": ("POST", "organizations", {"name": "a", "max_hosts": "many"}),
    "missing object": ("POST", "inventories", {"name": "a", "organization": 4096}),
    "invalid choice": ("POST", "execution_environments", {"name": "a", "image": "b", "pull": "often"}),
    "mapping instead of text": ("POST", "hosts", {"name": "a", "inventory": "Sandboxes", "variables": {"a": 1}}),
    "kind of credential": ("POST", "credential_types", {"name": "a", "kind": "ssh"}),
    "key of inputs": ("POST", "credential_types", {"name": "a", "kind": "cloud", "inputs": {"fields": [{"id": "a"}]}}),
    "injected name": (
        "POST",
        "credential_types",
        {"name": "a", "kind": "cloud", "injectors": {"env": {"ANSIBLE_A": "b"}}},
    ),
    "injected value": (
        "POST",
        "credential_types",
        {"name": "a", "kind": "cloud", "injectors": {"env": {"A": "{{ b }}"}}},
    ),
    "unknown input": ("POST", "credentials", {"name": "a", "credential_type": "Sandbox gateway", "inputs": {"b": "c"}}),
    "playbook": ("PATCH", "job_templates/Build a template", {"playbook": "playbooks/none.yml"}),
    "source": ("PATCH", "inventory_sources/Gateway", {"source_path": "none.yml"}),
    "machine's credential": ("PATCH", "inventory_sources/Gateway", {"credential": "Root of the hosts"}),
    "rrule": ("PATCH", "schedules/Every night", {"rrule": "every night"}),
    "two nodes with one identifier": (
        "POST",
        "workflow_job_template_nodes",
        {"identifier": "plan", "workflow_job_template": "Plan, approve and apply"},
    ),
    "prompt that the job template does not have": (
        "PATCH",
        "workflow_job_template_nodes/plan",
        {"job_type": "run"},
    ),
    "cycle of nodes": ("POST", "workflow_job_template_nodes/apply/success_nodes", {"id": "plan"}),
    "field of an approval": (
        "POST",
        "workflow_job_template_nodes/approve/create_approval_template",
        {"name": "a", "colour": "red"},
    ),
    "links after a failure": ("GET", "workflow_job_template_nodes/plan/failure_nodes", {}),
    "answers of a schedule": ("PATCH", "schedules/Every night", {"extra_data": {"nightly_memory": "much"}}),
    "survey without items": (
        "POST",
        "job_templates/Build a template/survey_spec",
        {"name": "", "description": "", "spec": []},
    ),
    "filter": ("GET", "projects?colour=red", {}),
    "path": ("GET", "colours", {}),
}


@pytest.mark.parametrize("case", REFUSED_REQUESTS)
def test_the_awx_double_refuses_invalid_requests(declaration: Declaration, case: str) -> None:
    method, location, body = REFUSED_REQUESTS[case]
    awx = declaration.awx
    endpoint, _, remainder = location.partition("/")
    name, _, subresource = remainder.partition("/")
    segments = [endpoint, str(awx.find_by_name(endpoint, name)["id"]), subresource] if name else [location]
    reference_endpoints = {
        "inventory": "inventories",
        "credential_type": "credential_types",
        "credential": "credentials",
        "workflow_job_template": "workflow_job_templates",
        "id": "workflow_job_template_nodes",
    }
    resolved_body = {
        key: awx.find_by_name(reference_endpoints[key], value)["id"] if key in reference_endpoints else value
        for key, value in body.items()
    }
    path, query, query_text = f"/api/v2/{'/'.join(filter(None, segments))}".partition("?")
    write_count_before = len(awx.writes)
    status, output = awx.handle_request(method, f"{path}/{query}{query_text}", resolved_body, TOKEN)
    assert status in (400, 404) and output and len(awx.writes) == write_count_before, output


def test_the_awx_double_requires_a_token_and_hides_secrets(declaration: Declaration) -> None:
    assert declaration.awx.handle_request("GET", "/api/v2/projects/", None, "wrong")[0] == 401
    status, credentials = declaration.awx.handle_request(
        "GET", "/api/v2/credentials/?name=Sandbox+gateway", None, TOKEN
    )
    assert status == 200 and credentials["results"][0]["inputs"] == {
        "url": declaration.gateway.url,
        "token": ENCRYPTED_PLACEHOLDER,
    }


def test_the_awx_double_has_the_fields_of_the_modules() -> None:
    for endpoint, module in MODULES_BY_ENDPOINT.items():
        assert awx_collection.read_module_options(module).keys() & {"name", "identifier"}, endpoint


# --- surveys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", JOB_TEMPLATES, ids=lambda template: template["name"])
def test_surveys_ask_only_for_variables_of_the_playbook(template: dict[str, Any]) -> None:
    survey = {"name": template["name"], "description": template["description"], "spec": template["survey"]}
    assert awx_survey.find_problem(survey) == ""
    playbook_text = (PLAYBOOKS_DIRECTORY / f"{template['playbook']}.yml").read_text()
    for variables_file in {*re.findall(r"vars_files: \[(.+)\]", playbook_text)}:
        playbook_text += (PLAYBOOKS_DIRECTORY / variables_file).read_text()
    role_specs_text = "".join(
        path.read_text() for path in (session.REPOSITORY / "roles").glob("*/meta/argument_specs.yml")
    )
    for question in template["survey"]:
        name = question["variable"]
        assert re.search(
            rf"\b{name}\b", role_specs_text if name.startswith(("fleet_", "kvm_", "jail_")) else playbook_text
        ), name
        assert question["question_description"], name


REQUIRED_ANSWERS: dict[str, dict[str, Any]] = {
    "install_host": {},
    "install_fleet": {},
    "drain_host": {"drain_hosts": "h1"},
    "build_template": {"build_name": "web"},
    "nightly_snapshots": {},
    "roll_back": {"rollback_sandbox": "web", "rollback_snapshot": "before"},
    "fork_and_test": {"fork_source": "web"},
    "plan": {"plan_sandbox": "shop", "plan_variants": "small large"},
}
"""The answers that each job requires."""
INVALID_ANSWERS = [
    ("install_host", {"install_kind": "cloud"}, "one of the choices"),
    ("install_host", {"kvm_xfs_host_loop_size_mb": "64 GB"}, "to be integer"),
    ("install_fleet", {"install_hosts": ""}, "too small"),
    ("drain_host", {"drain_state": "empty"}, "one of the choices"),
    ("build_template", {"build_memory_mb": 1}, "too small"),
    ("build_template", {"build_name": "a" * 65}, "too large"),
    ("nightly_snapshots", {"nightly_keep_daily": 0}, "too small"),
    ("nightly_snapshots", {"nightly_when_changed": True}, "one of the choices"),
    ("roll_back", {"rollback_when": "often"}, "one of the choices"),
    ("fork_and_test", {"fork_source": ""}, "too small"),
    ("fork_and_test", {"fork_best": "best"}, "one of the choices"),
    ("plan", {"plan_volume_mb": 1}, "too small"),
]


@pytest.mark.parametrize("template", JOB_TEMPLATES, ids=lambda template: template["name"])
def test_a_job_needs_only_its_required_answers(declaration: Declaration, template: dict[str, Any]) -> None:
    required_answers = REQUIRED_ANSWERS[template["playbook"]]
    declaration.awx.launch(template["name"], required_answers)
    for missing in required_answers:
        incomplete_answers = {name: answer for name, answer in required_answers.items() if name != missing}
        with pytest.raises(RefusedRequest, match=f"'{missing}' value missing"):
            declaration.awx.launch(template["name"], incomplete_answers)


@pytest.mark.parametrize(("playbook", "answer", "message"), INVALID_ANSWERS)
def test_an_invalid_answer_prevents_the_launch(
    declaration: Declaration, playbook: str, answer: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedRequest, match=message):
        declaration.awx.launch(JOB_NAMES_BY_PLAYBOOK[playbook], {**REQUIRED_ANSWERS[playbook], **answer})


# --- jobs ------------------------------------------------------------------------------------------------------------

Launch = Callable[..., str]
Artifacts = dict[str, Any]


@pytest.fixture
def run_job(declaration: Declaration, tmp_path: Path) -> Iterator[Callable[..., tuple[str, Artifacts]]]:
    """A function that runs a job with ansible-runner, as AWX would. Returns its output and its artifacts."""

    def run_job(
        job: dict[str, Any],
        *options: str,
        command_prefix: tuple[str, ...] = (),
        should_fail: bool = False,
        format_variables: Callable[[Any], str] = json.dumps,
    ) -> tuple[str, Artifacts]:
        playbook = Path(job["playbook"]).stem
        directory = tmp_path / playbook
        for name in ("env", "inventory", "project"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "env" / "extravars").write_text(format_variables(job["extra_vars"]))
        (directory / "env" / "envvars").write_text(json.dumps({**job["env"], "ANSIBLE_HOME": str(directory / "home")}))
        (directory / "env" / "cmdline").write_text(
            " ".join([*options, *(["--check"] if job["job_type"] == "check" else [])])
        )
        # ansible-runner starts in this directory, as in the checkout of the project.
        shutil.copy(session.REPOSITORY / "ansible.cfg", directory / "project")
        if job["inventory"] == "Sandboxes":
            source_path = declaration.awx.find_by_name("inventory_sources", "Gateway")["source_path"]
            (directory / "inventory" / "sandboxes.yml").write_text((session.REPOSITORY / source_path).read_text())
        else:
            (directory / "inventory" / "hosts.json").write_text(json.dumps({"all": {"hosts": job["hosts"]}}))
        program = Path(sys.executable).with_name("ansible-runner")
        result = subprocess.run(
            [*command_prefix, str(program), "run", str(directory), "-p", f"grove.sandbox.{playbook}"],
            env={name: value for name, value in make_environment(directory).items() if not name.startswith("SANDBOX_")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        (exit_code_file,) = (directory / "artifacts").glob("*/rc")
        assert int(exit_code_file.read_text()) == result.returncode
        assert ADMIN_KEY not in result.stdout
        assert (result.returncode != 0) is should_fail, result.stdout + result.stderr
        events = [json.loads(path.read_text()) for path in (directory / "artifacts").glob("*/job_events/*.json")]
        (stats,) = [event["event_data"] for event in events if event["event"] == "playbook_on_stats"]
        for path in (directory / "artifacts").iterdir():
            path.rename(directory / path.name)
        return result.stdout, stats["artifact_data"]

    yield run_job
    declaration.gateway.clear()


@pytest.fixture
def launch(declaration: Declaration, run_job: Callable[..., tuple[str, Artifacts]]) -> Launch:
    """A function that launches and runs a job, and returns its output."""

    def launch(playbook: str, *options: str, command_prefix: tuple[str, ...] = (), **answers: Any) -> str:
        job = declaration.awx.launch(JOB_NAMES_BY_PLAYBOOK[playbook], {**REQUIRED_ANSWERS[playbook], **answers})
        assert job["playbook"] == f"playbooks/{playbook}.yml"
        output, _ = run_job(job, *options, command_prefix=command_prefix)
        return output

    return launch


def create_sandbox(declaration: Declaration, name: str, **metadata: str) -> None:
    with declaration.gateway.client() as api:
        response = api.post("/sandboxes", json={"templateID": "base", "name": name, "metadata": metadata})
        assert response.status_code == 201, response.text


def test_the_inventory_lists_the_sandboxes(declaration: Declaration, launch: Launch) -> None:
    create_sandbox(declaration, "web")
    source_file = session.REPOSITORY / declaration.awx.find_by_name("inventory_sources", "Gateway")["source_path"]
    env = declaration.awx.launch("Nightly snapshots", {})["env"]
    assert env == {"SANDBOX_GATEWAY_URL": declaration.gateway.url, "SANDBOX_GATEWAY_TOKEN": ADMIN_KEY}
    program = Path(sys.executable).with_name("ansible-inventory")
    result = subprocess.run(
        [str(program), "-i", str(source_file), "--list", "--export"],
        env={**os.environ, **make_environment(declaration.scratch), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(result.stdout)["template_base"]["hosts"] == ["web"] and ADMIN_KEY not in result.stdout


def test_the_build_job_builds_a_template(declaration: Declaration, launch: Launch) -> None:
    assert "web was built" in launch("build_template", build_packages="curl", build_setup="true\ntrue\n")
    with declaration.gateway.client() as api:
        recipe = api.get("/templates/web").json()["recipe"]
        assert (recipe["packages"], recipe["setup"], recipe["memoryMB"]) == (["curl"], ["true", "true"], 256)
        api.delete("/templates/web").raise_for_status()


def test_the_rollback_job_restores_a_snapshot_of_the_nightly_job(declaration: Declaration, launch: Launch) -> None:
    """The nightly job uses the schedule's survey answers. The rollback job runs in check mode first."""
    create_sandbox(declaration, "web", team="blue")
    create_sandbox(declaration, "other")
    answers = declaration.awx.find_by_name("schedules", "Every night")["extra_data"]
    launch("nightly_snapshots", **answers, nightly_when_changed="no")
    with declaration.gateway.client() as api:
        (snapshot,) = api.get("/snapshots").json()
        assert re.fullmatch(r"web-\d{4}-\d\d-\d\d", snapshot["names"][0])
        rollback_answers = {
            "rollback_snapshot": snapshot["names"][0],
            "rollback_when": "broken",
            "rollback_backup_name": "kept",
        }
        sandbox_before = api.get("/sandboxes/web").json()
        marker = declaration.scratch / "repaired"
        probe = f"test -e {marker} || ! touch {marker}"
        assert '"kept_as": "kept"' in launch("roll_back", "--check", **rollback_answers, rollback_probe="false")
        assert api.get("/sandboxes/web").json()["startedAt"] == sandbox_before["startedAt"]
        launch("roll_back", **rollback_answers, rollback_probe=probe)
        assert api.get("/snapshots/kept").json()["sourceSandboxID"] == sandbox_before["sandboxID"]


def test_the_fork_and_test_job_promotes_a_variant(declaration: Declaration, launch: Launch, tmp_path: Path) -> None:
    create_sandbox(declaration, "web")
    variants_text = f"one: cp /etc/passwd {tmp_path}/one\ntwo: cp /dev/null {tmp_path}/two\n"
    output = launch(
        "fork_and_test", fork_variants=variants_text, fork_test=f"stat -c %s {tmp_path}/$(ls {tmp_path} | grep one)"
    )
    assert re.search("web continues from web-try-(one|two)", output), output


# --- the workflow ----------------------------------------------------------------------------------------------------

WORKFLOW_ANSWERS = {**REQUIRED_ANSWERS["plan"], "plan_winner": "large"}
RunNode = Callable[..., tuple[str, Artifacts]]


class _UnsafeDumper(yaml.SafeDumper):
    """Writes strings as AWX writes them in the file of a job's variables, so that they are not templates."""

    def represent_data(self, data: Any) -> yaml.Node:
        return self.represent_scalar("!unsafe", data) if isinstance(data, str) else super().represent_data(data)


def format_extra_vars(variables: dict[str, Any]) -> str:
    return "".join(yaml.dump({key: value}, Dumper=_UnsafeDumper) for key, value in variables.items())


@pytest.fixture(scope="module")
def memory_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    """A gateway without agents, because agents that are processes of this machine cannot mount volumes."""
    gateway = MemoryGateway(tmp_path_factory.mktemp("memory"))
    gateway.build_template("base")
    yield gateway
    gateway.end()


@pytest.fixture
def gateway(memory_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield memory_gateway
    memory_gateway.clear()


@pytest.fixture
def run_node(run_job: Callable[..., tuple[str, Artifacts]], gateway: MemoryGateway) -> RunNode:
    """A function that runs a job of a workflow, with its variables in AWX's format."""

    def run_node(job: dict[str, Any], *, should_fail: bool = False) -> tuple[str, Artifacts]:
        job = {**job, "env": {**job["env"], "SANDBOX_GATEWAY_URL": gateway.url}}
        output, artifacts = run_job(job, should_fail=should_fail, format_variables=format_extra_vars)
        return " ".join(output.split()), artifacts

    return run_node


def list_names(gateway: MemoryGateway) -> dict[str, set[str]]:
    with gateway.client() as api:
        return {
            "sandboxes": {each["name"] for each in api.get("/sandboxes").json()},
            "snapshots": {name for each in api.get("/snapshots").json() for name in each["names"]},
            "volumes": {each["name"] for each in api.get("/volumes").json()},
        }


NO_OBJECTS: dict[str, set[str]] = {"sandboxes": set(), "snapshots": set(), "volumes": set()}


def test_the_workflow_does_exactly_what_the_approved_plan_says(
    declaration: Declaration, run_node: RunNode, gateway: MemoryGateway
) -> None:
    steps = declaration.awx.run_workflow(WORKFLOW["name"], WORKFLOW_ANSWERS)
    output, artifacts = run_node(next(steps))
    assert list_names(gateway) == NO_OBJECTS
    last_lines = output.split("PLAY RECAP", 1)[1]
    assert "+ shop Create the sandbox (plan.yml:" in last_lines and "Plan: 7 to create" in last_lines, last_lines
    with gateway.client(ADMIN_KEY) as api:
        assert api.get("/plans").json() == [], "the callback has not ended the session of the job"
    plan = json.loads(artifacts["grove_sandbox_plan"])
    assert plan["playbooks"] == ["plan.yml"] and plan["problems"] == []
    assert steps.send(artifacts) == {"approval": "Approve the plan"}
    apply_job = steps.send({})
    assert apply_job["job_type"] == "run"
    output, artifacts = run_node(apply_job)
    assert count_changes(output) == 11 and artifacts == {}
    assert list_names(gateway) == {
        "sandboxes": {"shop"},
        "snapshots": {"shop-large", "shop-before-large"},
        "volumes": {"shop-data"},
    }
    with pytest.raises(StopIteration):
        steps.send(artifacts)


def test_the_workflow_refuses_changes_after_the_approval(
    declaration: Declaration, run_node: RunNode, gateway: MemoryGateway
) -> None:
    steps = declaration.awx.run_workflow(WORKFLOW["name"], WORKFLOW_ANSWERS)
    _, artifacts = run_node(next(steps))
    steps.send(artifacts)
    apply_job = steps.send({})
    with gateway.client() as api:
        api.post("/sandboxes", json={"templateID": "base", "name": "shop"}).raise_for_status()
    output, _ = run_node(apply_job, should_fail=True)
    assert "sandbox 'shop' did not exist when the plan was made" in output
    # The tasks before the refused one were part of the plan.
    assert list_names(gateway) == {"sandboxes": {"shop"}, "snapshots": set(), "volumes": {"shop-data"}}


def test_the_job_that_applies_a_plan_does_nothing_without_one(
    declaration: Declaration, run_node: RunNode, gateway: MemoryGateway
) -> None:
    output, _ = run_node(declaration.awx.launch(WORKFLOW["apply"], WORKFLOW_ANSWERS), should_fail=True)
    assert "grove_sandbox_plan is empty, so there is no plan to apply" in output
    assert list_names(gateway) == NO_OBJECTS


# --- hosts -----------------------------------------------------------------------------------------------------------


class Host:
    """A stand-in for a managed host, with its own directory and role variables. All hosts share one installation."""

    def __init__(self, install_root: Path, kind: str) -> None:
        self.root, self.network = install_root / kind, session.allocate_network()
        self.root.mkdir(parents=True)
        self.socket = self.root / "gw.sock"
        self.gateway_config = {
            "host": {"cache_root": str(session.get_cache_dir())},
            "network": {**self.network, "pool": 1},
        }
        self.variables: dict[str, Any] = {
            "gateway_install_dir": str(install_root / "install"),
            "gateway_link_dir": str(install_root / "bin"),
            "gateway_config_dir": str(self.root / "etc"),
            "gateway_state_root": str(self.root / "state"),
            "gateway_socket": str(self.socket),
            "gateway_socket_group": "",
            "gateway_supervisor": "none",
            "gateway_log_file": str(self.root / "gateway.log"),
            "gateway_pid_file": str(self.root / "gateway.pid"),
        }

    def request(self, route: str) -> Any:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://gateway") as client:
            return client.get(route).raise_for_status().json()

    def read_config(self) -> dict[str, Any]:
        return tomllib.loads((self.root / "etc" / "config.toml").read_text())

    def remove(self, role: str, **options: Any) -> None:
        """Remove the installation. ``options`` are role variables and, if needed, ``command_prefix``."""
        command_prefix = options.pop("command_prefix", ())
        for each in ("gateway", role):
            removal_options = {f"{each}_state": "absent", f"{each}_remove_data": True}
            run = play(
                each,
                {**self.variables, **options, **removal_options},
                directory=self.root,
                command_prefix=command_prefix,
            )
            assert not run.failed, run.output


@pytest.fixture(scope="module")
def install_root(requires_root: None) -> Iterator[Path]:
    path = session.get_run_dir() / "install"
    (path / "bin").mkdir(parents=True)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def linux_host(install_root: Path) -> Iterator[Host]:
    host = Host(install_root, "kvm_xfs")
    host.variables |= {
        "kvm_xfs_host_state_root": str(host.root / "state"),
        "kvm_xfs_host_min_free_mb": 100,
        "kvm_xfs_host_fstab": False,
        "kvm_xfs_host_sysctl_file": str(host.root / "sysctl.conf"),
        "kvm_xfs_host_facts_dir": str(host.root / "facts"),
        "kvm_xfs_host_accelerator_override": "tcg",
    }
    yield host
    host.remove("kvm_xfs_host")


@pytest.mark.in_order
@pytest.mark.slow
def test_the_install_job_for_a_kvm_host_is_idempotent(linux_host: Host, launch: Launch, tmp_path: Path) -> None:
    """After the play of docs/recipes.md has installed the host, a job with the same answers changes nothing."""
    inventory_file = tmp_path / "hosts.yml"
    host_variables = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    inventory_file.write_text(json.dumps({"sandbox_hosts": {"hosts": {"here": host_variables}}}))
    playbook_runner = PlaybookRunner(tmp_path, inventory=str(inventory_file))
    page_variables = load_plays_by_playbook()["grove.sandbox.install_host"]["vars"]
    config_variables = {
        "install_gateway_config": {**page_variables["install_gateway_config"], **linux_host.gateway_config}
    }
    size_variables = {"kvm_xfs_host_loop_size_mb": 2048}
    options = {**linux_host.variables, **config_variables, **size_variables}
    check_refusal(
        playbook_runner.run_documented_play("install_host", **options, gateway_config={}), "in install_gateway_config"
    )
    check_run = playbook_runner.run_documented_play("install_host", "--check", **options)
    assert check_success(check_run) and check_run.changed_task_count > 3 and not (linux_host.root / "state").exists()
    check_success(playbook_runner.run_documented_play("install_host", **options))
    assert linux_host.request("/health")["status"] == "ok"
    config = linux_host.read_config()
    assert config["kvm_xfs"] == {"accelerator": "tcg"} and config["limits"] == {"sandboxes": 50}
    assert count_changes(launch("install_host", **linux_host.variables, **config_variables, **size_variables)) == 0


def test_the_fleet_job_checks_its_answers_against_the_inventory(
    declaration: Declaration, run_job: Callable[..., tuple[str, Artifacts]], tmp_path: Path
) -> None:
    """tests/roles/test_fleet.py runs the playbook on three hosts."""
    answers = {"fleet_registry_host": "elsewhere", "kvm_xfs_host_state_root": str(tmp_path / "state")}
    job = declaration.awx.launch(JOB_NAMES_BY_PLAYBOOK["install_fleet"], answers)
    output, _ = run_job(job, "--check", should_fail=True)
    assert "fleet_registry_host (elsewhere)" in " ".join(output.split())
    assert not (tmp_path / "state").exists()


@pytest.fixture
def freebsd_host(linux_host: Host, install_root: Path, tmp_path: Path) -> Iterator[tuple[Host, tuple[str, ...]]]:
    """A host with test doubles of FreeBSD's commands, and the command prefix that runs a command on this host."""
    with pools.pool(f"t{session.get_run_id()}i", session.get_run_dir()) as pool, created_shim(tmp_path) as shim:
        host = Host(install_root, "jail_zfs")
        search_path = f"{shim.environ['PATH']}:{Path(sys.executable).parent}"
        command_prefix = (
            "/usr/bin/nsenter",
            f"--net=/proc/{shim.namespace_pid}/ns/net",
            "/usr/bin/env",
            f"PATH={search_path}",
        )
        command_prefix += (f"FREEBSD_SHIM_STATE={shim.state}",)
        host.variables |= {
            "jail_zfs_host_dataset": f"{pool.name}/sandboxes",
            **{f"jail_zfs_host_{name}": value for name, value in host.network.items()},
            "jail_zfs_host_lzc_path": str(host.root / "lzc"),
            "jail_zfs_host_pf_conf": str(host.root / "pf.conf"),
            "jail_zfs_host_loader_conf": str(host.root / "loader.conf"),
            "jail_zfs_host_sysctl_conf": str(host.root / "sysctl.conf"),
        }
        yield host, command_prefix
        host.remove(
            "jail_zfs_host",
            command_prefix=command_prefix,
            gateway_install_dir=str(host.root / "none"),
            gateway_link_dir="",
        )


@pytest.mark.in_order
@pytest.mark.slow
def test_the_install_job_installs_a_jail_host(freebsd_host: tuple[Host, tuple[str, ...]], launch: Launch) -> None:
    """The job uses the packages that the previous test downloaded, because this host has no access to the internet."""
    host, command_prefix = freebsd_host
    config_variables = {
        "install_gateway_config": {"host": {"cache_root": str(session.get_cache_dir())}, "network": {"pool": 1}}
    }
    options = {**host.variables, **config_variables, "install_kind": "jail_zfs"}
    launch("install_host", command_prefix=command_prefix, **options)
    assert host.request("/health")["status"] == "ok"
    config = host.read_config()
    assert config["host"]["kind"] == "jail_zfs" and config["network"] == {**host.network, "pool": 1}
    assert config["jail_zfs"] == {"dataset": host.variables["jail_zfs_host_dataset"]}
