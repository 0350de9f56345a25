"""Test that every field that a published client can send is honoured, refused, or ignored for a documented reason.

``GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_fields.py`` writes the tables of fields to docs/.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from types import ModuleType

import cubesandbox
import e2b
import e2b_code_interpreter
import forkd
import pytest
from fastapi.routing import APIRoute

from sandbox_gateway.api import app
from sandbox_gateway.api.body import Body
from sandbox_gateway.api.client_requests import IGNORED_PARAMETERS, UNSUPPORTED_REQUESTS
from sandbox_gateway.api.forkd import routes as forkd_routes
from sandbox_gateway.api.native import sandboxes, snapshots, templates, volumes
from sandbox_gateway.api.unknown_fields import find_model, find_refusal, find_refused_fields, get_fields
from tests.sdk import fields
from tests.sdk.request_scanner import ClientRequest, Fields
from tests.support.session import REPOSITORY

_UPDATE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_fields.py"
_VOLUME_FILES_REASON = "refused: mount the volume in a sandbox instead"


@dataclass(frozen=True)
class Client:
    """A published client, and the parts of its requests that the gateway does not support.

    ``missing_routes``: requests for which the gateway has no route. ``ignored_query``: the ignored query
    parameters of each request, with reasons.
    """

    page: str
    distribution: str
    list_requests: Callable[[], list[ClientRequest]]
    missing_routes: dict[str, str] = field(default_factory=dict)
    ignored_query: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name and the version of the installed distribution."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"


CLIENTS = (
    Client(
        "e2b",
        "e2b",
        fields.list_e2b_requests,
        {
            **UNSUPPORTED_REQUESTS,
            **dict.fromkeys(
                (
                    "DELETE /volumecontent/{}/path",
                    "GET /volumecontent/{}/dir",
                    "GET /volumecontent/{}/file",
                    "GET /volumecontent/{}/path",
                    "PATCH /volumecontent/{}/path",
                    "POST /volumecontent/{}/dir",
                    "PUT /volumecontent/{}/file",
                ),
                _VOLUME_FILES_REASON,
            ),
        },
        IGNORED_PARAMETERS,
    ),
    Client("e2b", "e2b-code-interpreter", fields.list_code_interpreter_requests),
    Client(
        "cubesandbox",
        "cubesandbox",
        fields.list_cubesandbox_requests,
        {},
        {"GET /templates/{}": IGNORED_PARAMETERS["GET /templates/{}"]},
    ),
    Client("forkd", "forkd", fields.list_forkd_requests),
)
_MODULES = (sandboxes, snapshots, templates, volumes, forkd_routes)
ROUTES = {
    f"{method} {re.sub(r'{[^}]*}', '{}', route.path)}": route
    for router in (app._health_router, *(module.router for module in _MODULES))
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
}
AGENT_DIRECTORY = REPOSITORY / "gateway/src/sandbox_agent"
_AGENT_NODES = [node for path in AGENT_DIRECTORY.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
AGENT_NAMES = {node.value for node in _AGENT_NODES if isinstance(node, ast.Constant) and isinstance(node.value, str)}
"""All texts in the agent's source. The agent does not ignore a field that is one of these."""
AGENT_IGNORED_FIELDS = {"keepalive": "the connection needs no messages to stay open"}
_VARIABLES_FIELD = "envs"
"""A field whose own fields are the names of environment variables."""


def _find_agent_routes() -> set[str]:
    """Return the routes in the dictionaries of the agent's source, which contain lists of routes by path."""
    return {
        f"{method} {path.value}"
        for node in _AGENT_NODES
        if isinstance(node, ast.Dict)
        for path, routes in zip(node.keys, node.values, strict=True)
        if isinstance(path, ast.Constant) and str(path.value).startswith("/") and isinstance(routes, ast.List)
        for route in routes.elts
        for method in re.findall(r"'(GET|DELETE)'", ast.unparse(route)) or ["POST"]
    }


AGENT_ROUTES = _find_agent_routes()


@dataclass(frozen=True)
class Row:
    """A row of the table: a field (or a request without a route), how the gateway supports it, and why."""

    request: str
    field: str
    support: str
    reason: str = ""


def list_rows(client: Client) -> Iterator[Row]:
    """Yield one row per field. Raises AssertionError if a field is unknown."""
    for request in client.list_requests():
        name = str(request)
        if name in client.missing_routes:
            yield Row(name, "", "no route", client.missing_routes[name])
            continue
        if name in AGENT_ROUTES - ROUTES.keys():
            yield from _list_agent_rows(request)
            continue
        assert name in ROUTES, f"{name} of {client.title} has no route: add it, or document that it is missing"
        yield from _list_query_rows(client, request, ROUTES[name])
        if request.body:
            body = ROUTES[name].body_field
            model = find_model(body.field_info.annotation) if body else None
            assert model is not None, f"{name} of {client.title} has a body, but the route does not"
            yield from _list_body_rows(name, model, request.body)


def _list_agent_rows(request: ClientRequest) -> Iterator[Row]:
    names = [(f"?{name}", name) for name in sorted(request.query)]
    names += [(path, path.rpartition(".")[2]) for path in _list_paths(request.body)]
    if not names:
        yield Row(str(request), "", "honoured")
    for path, name in names:
        if name in AGENT_IGNORED_FIELDS:
            yield Row(str(request), path, "ignored", AGENT_IGNORED_FIELDS[name])
        else:
            assert name in AGENT_NAMES, f"{request}: the agent does not read {path}"
            yield Row(str(request), path, "honoured")


def _list_paths(body: Fields, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the innermost fields."""
    for name, nested in body.items():
        if nested and name != _VARIABLES_FIELD:
            yield from _list_paths(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _list_query_rows(client: Client, request: ClientRequest, route: APIRoute) -> Iterator[Row]:
    parameter_names = {parameter.alias for parameter in route.dependant.query_params}
    ignored_parameters = client.ignored_query.get(str(request), {})
    for parameter in sorted(request.query):
        if parameter in ignored_parameters:
            assert parameter not in parameter_names
            yield Row(str(request), f"?{parameter}", "ignored", ignored_parameters[parameter])
            continue
        assert parameter in parameter_names, f"{request} of {client.title}: the parameter {parameter} is ignored"
        yield Row(str(request), f"?{parameter}", "honoured")


def _list_body_rows(request: str, model: type[Body], body: Fields, prefix: str = "") -> Iterator[Row]:
    for name, nested in body.items():
        path = f"{prefix}{name}"
        if (refusal := find_refusal(model, name)) is not None:
            yield Row(request, path, "refused", refusal.reason)
        elif name in model.ignored_fields:
            yield Row(request, path, "ignored", model.ignored_fields[name])
        else:
            model_fields = get_fields(model)
            assert name in model_fields, f"{request}: the field {path} is new: honour, refuse or ignore it"
            nested_model = model_fields[name]
            if nested and nested_model is not None:
                yield from _list_body_rows(request, nested_model, nested, f"{path}.")
            else:
                yield Row(request, path, "honoured")


def render_table(client: Client) -> str:
    lines = [f"### {client.title}", "", "| request | field | | |", "|---|---|---|---|"]
    for request, rows in groupby(list_rows(client), lambda row: row.request):
        rows = list(rows)
        honoured_rows = [row for row in rows if row.support == "honoured"]
        honoured_fields = ", ".join(f"`{row.field}`" for row in honoured_rows if row.field)
        row_cells = [(honoured_fields, "honoured", "")] if honoured_rows else []
        other_results = sorted((row.support, row.reason) for row in rows if row.support != "honoured")
        for support, reason in dict.fromkeys(other_results):
            names = [f"`{row.field}`" for row in rows if (row.support, row.reason) == (support, reason) and row.field]
            row_cells.append((", ".join(names), support, reason))
        if not (request in ROUTES and ROUTES[request].include_in_schema):
            # tests/unit/test_docs.py expects `METHOD /path` in one code span to be a route of the OpenAPI document.
            request = request.replace(" ", "` `")
        lines += [f"| `{request}` | {names} | {support} | {reason} |" for names, support, reason in row_cells]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.distribution)
def test_every_field_of_every_request_is_known(client: Client) -> None:
    rows = list(list_rows(client))
    assert len([row for row in rows if row.support == "honoured"]) >= 5
    requests = {str(request): request for request in client.list_requests()}
    assert set(client.missing_routes) <= requests.keys() - ROUTES.keys()
    for name, parameters in client.ignored_query.items():
        assert parameters.keys() <= requests[name].query


def test_requests_are_found_in_the_sources_of_the_clients() -> None:
    """The other tests would pass without checking anything if the search found no requests."""
    e2b_requests, code_requests, cube_requests, _ = (
        {str(each): each for each in client.list_requests()} for client in CLIENTS
    )
    assert {"image", "cpu", "memory", "env", "command", "name"} <= cube_requests["POST /templates"].body.keys()
    assert cube_requests["POST /sandboxes"].body["volumeMounts"].keys() == {"name", "path", "readOnly"}
    assert "allowOut" in cube_requests["PUT /sandboxes/{}/network"].body
    assert cube_requests["GET /snapshots"].query == {"sandboxID", "limit", "nextToken"}
    assert "maskRequestHost" in e2b_requests["POST /v2/sandboxes"].body["network"]
    assert e2b_requests["GET /sandboxes/{}/metrics"].query == {"start", "end"}
    assert e2b_requests["POST /files"].query == {"path", "username"}
    assert "cwd" in e2b_requests["POST /process.Process/Start"].body["process"]
    assert cube_requests["POST /filesystem.Filesystem/Move"].body.keys() == {"source", "destination"}
    assert "code" in cube_requests["POST /execute"].body
    assert code_requests["POST /execute"].body.keys() == {"code", "context_id", "language", "env_vars"}


@pytest.mark.parametrize("package", [e2b, e2b_code_interpreter, cubesandbox, forkd], ids=lambda each: each.__name__)
def test_every_request_in_the_sources_is_understood(package: ModuleType) -> None:
    assert fields.scan(package).problems == [], "change the scanner, or permit the request in tests/sdk/fields.py"


@pytest.mark.parametrize(
    ("package", "libraries"),
    [
        (
            e2b,
            "attrs connectrpc dateutil e2b_dockerfile_utils httpx packaging protobuf pyqwest rich typing_extensions "
            "wcmatch",
        ),
        (e2b_code_interpreter, "e2b httpx"),
        (cubesandbox, "httpx requests"),
        # `Sandbox` uses a socket to talk to the command `forkd`, which the collection contains.
        (forkd, "socket"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_clients_use_only_libraries_that_the_scanner_knows(package: ModuleType, libraries: str) -> None:
    """The scanner finds no requests of other libraries. `connectrpc` sends those of the generated services."""
    assert fields.list_imported_libraries(package) == set(libraries.split())


def list_models(model: type[Body]) -> Iterator[type[Body]]:
    yield model
    for nested in get_fields(model).values():
        if nested is not None:
            yield from list_models(nested)


MODELS = sorted(
    {
        model
        for route in ROUTES.values()
        if route.body_field and (top_model := find_model(route.body_field.field_info.annotation))
        for model in list_models(top_model)
    },
    key=lambda model: model.__name__,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_refused_and_ignored_fields_are_sent_by_a_client(model: type[Body]) -> None:
    """A model must not list fields that clients no longer send, because these should be treated as unknown fields."""
    sent_names = {
        name for client in CLIENTS for request in client.list_requests() for name in _list_names(request.body)
    }
    assert {*model.refused_fields, *model.ignored_fields} <= sent_names | {"kernel"}
    assert (
        not (model.refused_fields.keys() & model.ignored_fields.keys())
        and not model.refused_fields.keys() & get_fields(model).keys()
    )
    for name, refusal in model.refused_fields.items():
        (refused,) = find_refused_fields(model, {name: "value"})
        assert str(refused).startswith(f"{name}: not supported, because ")
        assert ": " in refusal.reason, "the sentence must say what to do"
        assert list(find_refused_fields(model, {name: None})) == []


def _list_names(body: Fields) -> Iterator[str]:
    for name, nested in body.items():
        yield name
        yield from _list_names(nested)


@pytest.mark.parametrize("page", sorted({client.page for client in CLIENTS}))
def test_the_page_contains_the_generated_tables(page: str) -> None:
    path = REPOSITORY / "docs" / f"{page}.md"
    text = path.read_text()
    start_marker, end_marker = "<!-- fields: made by tests/sdk/test_fields.py -->", "<!-- end of fields -->"
    assert start_marker in text
    tables_text = "\n\n".join(render_table(client) for client in CLIENTS if client.page == page)
    tables_text = f"{start_marker}\n\n{tables_text}\n\n{end_marker}"
    expected_text = re.sub(f"{start_marker}.*{end_marker}", lambda _: tables_text, text, flags=re.DOTALL)
    if os.environ.get("GROVE_WRITE_DOCS"):
        path.write_text(expected_text)
    assert path.read_text() == expected_text, f"generate the page again: {_UPDATE_COMMAND}"
