"""Test that every field that a published client can send is honoured, refused, or ignored for a documented reason.

``GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_fields.py`` writes the tables of fields to docs/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from fastapi.routing import APIRoute

from sandbox_gateway.api import app
from sandbox_gateway.api.body import Body
from sandbox_gateway.api.client_requests import IGNORED_PARAMETERS, UNSUPPORTED_REQUESTS
from sandbox_gateway.api.forkd import routes as forkd
from sandbox_gateway.api.native import sandboxes, snapshots, templates, volumes
from sandbox_gateway.api.unknown_fields import find_model, find_refusal, find_refused_fields, get_fields
from tests.sdk import fields
from tests.sdk.fields import ClientRequest, Fields
from tests.support.session import REPOSITORY

_UPDATE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_fields.py"


@dataclass(frozen=True)
class Client:
    """A published client, and the parts of its requests that the gateway does not support.

    ``missing_routes``: requests for which the gateway has no route. ``ignored_query``: the ignored query
    parameters of each request, with reasons.
    """

    page: str
    title: str
    list_requests: Callable[[], list[ClientRequest]]
    missing_routes: dict[str, str] = field(default_factory=dict)
    ignored_query: dict[str, dict[str, str]] = field(default_factory=dict)


CLIENTS = (
    Client(
        "e2b",
        "e2b 2.63.0",
        fields.list_e2b_requests,
        UNSUPPORTED_REQUESTS,
        IGNORED_PARAMETERS,
    ),
    Client(
        "cubesandbox",
        "cubesandbox 0.7.3",
        fields.list_cubesandbox_requests,
        {},
        {"GET /templates/{}": IGNORED_PARAMETERS["GET /templates/{}"]},
    ),
    Client("forkd", "forkd 0.5.3", fields.list_forkd_requests),
)
ROUTES = {
    f"{method} {re.sub(r'{[^}]*}', '{}', route.path)}": route
    for router in (app._health_router, *(module.router for module in (sandboxes, snapshots, templates, volumes, forkd)))
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
}


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
        assert name in ROUTES, f"{name} of {client.title} has no route: add it, or document that it is missing"
        yield from _list_query_rows(client, request, ROUTES[name])
        if request.body:
            body = ROUTES[name].body_field
            model = find_model(body.field_info.annotation) if body else None
            assert model is not None, f"{name} of {client.title} has a body, but the route does not"
            yield from _list_body_rows(name, model, request.body)


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
        honoured_fields = ", ".join(f"`{row.field}`" for row in rows if row.support == "honoured")
        row_cells = [(honoured_fields, "honoured", "")] if honoured_fields else []
        other_results = sorted((row.support, row.reason) for row in rows if row.support != "honoured")
        for support, reason in dict.fromkeys(other_results):
            names = [f"`{row.field}`" for row in rows if (row.support, row.reason) == (support, reason) and row.field]
            row_cells.append((", ".join(names), support, reason))
        if not (request in ROUTES and ROUTES[request].include_in_schema):
            # tests/unit/test_docs.py expects `METHOD /path` in one code span to be a route of the OpenAPI document.
            request = request.replace(" ", "` `")
        lines += [f"| `{request}` | {names} | {support} | {reason} |" for names, support, reason in row_cells]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_every_field_of_every_request_is_known(client: Client) -> None:
    rows = list(list_rows(client))
    assert len([row for row in rows if row.support == "honoured"]) >= 8
    requests = {str(request): request for request in client.list_requests()}
    assert set(client.missing_routes) <= requests.keys() - ROUTES.keys()
    for name, parameters in client.ignored_query.items():
        assert parameters.keys() <= requests[name].query


def test_requests_are_found_in_the_sources_of_the_clients() -> None:
    """The other tests would pass without checking anything if the search found no requests."""
    e2b_requests, cube_requests = ({str(each): each for each in client.list_requests()} for client in CLIENTS[:2])
    assert {"image", "cpu", "memory", "env", "command", "name"} <= cube_requests["POST /templates"].body.keys()
    assert cube_requests["POST /sandboxes"].body["volumeMounts"].keys() == {"name", "path", "readOnly"}
    assert "allowOut" in cube_requests["PUT /sandboxes/{}/network"].body
    assert cube_requests["GET /snapshots"].query == {"sandboxID", "limit", "nextToken"}
    assert "maskRequestHost" in e2b_requests["POST /v2/sandboxes"].body["network"]
    assert e2b_requests["GET /sandboxes/{}/metrics"].query == {"start", "end"}
    (execute_request,) = [each for each in fields.list_code_interpreter_requests() if each.route == "/execute"]
    assert {"code", "context_id", "language", "env_vars"} <= execute_request.body.keys()


def test_the_agent_reads_every_field_of_the_code_interpreter() -> None:
    source = "\n".join(path.read_text() for path in (REPOSITORY / "gateway/src/sandbox_agent/interpreter").glob("*.py"))
    for request in fields.list_code_interpreter_requests():
        for name in request.body:
            assert f'"{name}"' in source, f"{request}: the agent does not read {name}"


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


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_the_page_contains_the_generated_table(client: Client) -> None:
    path = REPOSITORY / "docs" / f"{client.page}.md"
    text = path.read_text()
    start_marker, end_marker = "<!-- fields: made by tests/sdk/test_fields.py -->", "<!-- end of fields -->"
    assert start_marker in text
    table = f"{start_marker}\n\n{render_table(client)}\n\n{end_marker}"
    expected_text = re.sub(f"{start_marker}.*{end_marker}", lambda _: table, text, flags=re.DOTALL)
    if os.environ.get("GROVE_WRITE_DOCS"):
        path.write_text(expected_text)
    assert path.read_text() == expected_text, f"generate the page again: {_UPDATE_COMMAND}"
