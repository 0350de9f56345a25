"""Every field that a published client can send is honoured, refused, or ignored for a documented reason.

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
from sandbox_gateway.api.forkd import routes as forkd
from sandbox_gateway.api.native import sandboxes, snapshots, templates, volumes
from sandbox_gateway.api.unknown_fields import fields_of, find_refusal, find_refused_fields, model_in
from tests.sdk import fields
from tests.sdk.fields import ClientRequest, Fields
from tests.support.session import REPOSITORY

_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_fields.py"
_IMAGES = "templates are built with `POST /templates` (templates.md)"
_SECRETS = "there are no secrets: use `envVars`"
_TAGS = "templates have names, but no tags"
_ONE_PAGE = "the response is complete: it has no pages"


@dataclass(frozen=True)
class Client:
    """A published client, and what the gateway does not support of its requests.

    ``missing``: routes that the gateway does not have (404 or 405). ``ignored_query``: the ignored query parameters of
    each request, with reasons.
    """

    page: str
    title: str
    requests: Callable[[], list[ClientRequest]]
    missing: dict[str, str] = field(default_factory=dict)
    ignored_query: dict[str, dict[str, str]] = field(default_factory=dict)


CLIENTS = (
    Client(
        "e2b",
        "e2b 2.63.0",
        fields.list_e2b_requests,
        {
            "GET /default-templates": "there are none",
            "GET /v2/templates": "use `GET /templates`",
            "GET /sandboxes/metrics": "query each sandbox",
            "GET /sandboxes/{}/logs": "no logs are stored",
            "GET /v2/sandboxes/{}/logs": "no logs are stored",
            **dict.fromkeys(
                (
                    "GET /secrets",
                    "POST /secrets",
                    "DELETE /secrets/{}",
                    "GET /secrets/{}",
                    "POST /secrets/{}",
                ),
                _SECRETS,
            ),
            **dict.fromkeys(
                (
                    "DELETE /templates/tags",
                    "POST /templates/tags",
                    "GET /templates/{}/tags",
                    "GET /templates/{}/tags/count",
                    "GET /templates/{}/tags/exists",
                    "GET /templates/{}/tags/groups",
                    "GET /templates/{}/tags/{}/assignments",
                ),
                _TAGS,
            ),
            **dict.fromkeys(
                (
                    "GET /templates/{}/files/{}",
                    "PATCH /templates/{}",
                    "PATCH /v2/templates/{}",
                    "POST /v2/templates/{}/builds/{}",
                    "POST /v3/templates",
                ),
                _IMAGES,
            ),
        },
        {
            "GET /templates": {"teamID": "there are no teams"},
            "GET /templates/{}": dict.fromkeys(("limit", "nextToken"), "the response has no builds"),
            "GET /templates/{}/builds/{}/status": {"level": "lines of a build have no level"},
            "GET /templates/{}/builds/{}/logs": {
                **dict.fromkeys(("level", "source"), "lines of a build have neither level nor source"),
                **dict.fromkeys(("cursor", "direction", "limit"), _ONE_PAGE),
            },
        },
    ),
    Client(
        "cubesandbox",
        "cubesandbox 0.7.3",
        fields.list_cubesandbox_requests,
        {"POST /templates/{}": _IMAGES},
        {"GET /templates/{}": dict.fromkeys(("limit", "nextToken"), "the response has no builds")},
    ),
    Client("forkd", "forkd 0.5.3", fields.list_forkd_requests),
)
ROUTES = {
    f"{method} {re.sub(r'{[^}]*}', '{}', route.path)}": route
    for router in (app._health, *(module.router for module in (sandboxes, snapshots, templates, volumes, forkd)))
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
}


@dataclass(frozen=True)
class Row:
    """A field of a request, or a request without a route, and whether and why the gateway supports it."""

    request: str
    field: str
    support: str
    reason: str = ""


def list_rows(client: Client) -> Iterator[Row]:
    """Yield one row per field. Raises AssertionError if a field is unknown."""
    for request in client.requests():
        name = str(request)
        if name in client.missing:
            yield Row(name, "", "no route", client.missing[name])
            continue
        assert name in ROUTES, f"{name} of {client.title} has no route: add it, or document that it is missing"
        yield from _query_rows(client, request, ROUTES[name])
        if request.body:
            body = ROUTES[name].body_field
            model = model_in(body.field_info.annotation) if body else None
            assert model is not None, f"{name} of {client.title} has a body, but the route does not"
            yield from _body_rows(name, model, request.body)


def _query_rows(client: Client, request: ClientRequest, route: APIRoute) -> Iterator[Row]:
    parameter_names = {parameter.alias for parameter in route.dependant.query_params}
    ignored = client.ignored_query.get(str(request), {})
    for parameter in sorted(request.query):
        if parameter in ignored:
            assert parameter not in parameter_names
            yield Row(str(request), f"?{parameter}", "ignored", ignored[parameter])
            continue
        assert parameter in parameter_names, f"{request} of {client.title}: the parameter {parameter} is ignored"
        yield Row(str(request), f"?{parameter}", "honoured")


def _body_rows(request: str, model: type[Body], body: Fields, prefix: str = "") -> Iterator[Row]:
    for name, nested in body.items():
        path = f"{prefix}{name}"
        if (refusal := find_refusal(model, name)) is not None:
            yield Row(request, path, "refused", refusal.reason)
        elif name in model.ignored:
            yield Row(request, path, "ignored", model.ignored[name])
        else:
            model_fields = fields_of(model)
            assert name in model_fields, f"{request}: the field {path} is new: honour, refuse or ignore it"
            nested_model = model_fields[name]
            if nested and nested_model is not None:
                yield from _body_rows(request, nested_model, nested, f"{path}.")
            else:
                yield Row(request, path, "honoured")


def render_table(client: Client) -> str:
    lines = [f"### {client.title}", "", "| request | field | | |", "|---|---|---|---|"]
    for request, rows in groupby(list_rows(client), lambda row: row.request):
        rows = list(rows)
        honoured = ", ".join(f"`{row.field}`" for row in rows if row.support == "honoured")
        cells = [(honoured, "honoured", "")] if honoured else []
        others = sorted((row.support, row.reason) for row in rows if row.support != "honoured")
        for support, reason in dict.fromkeys(others):
            names = [f"`{row.field}`" for row in rows if (row.support, row.reason) == (support, reason) and row.field]
            cells.append((", ".join(names), support, reason))
        if not (request in ROUTES and ROUTES[request].include_in_schema):
            # tests/unit/test_docs.py expects every route written as `METHOD /path` in the OpenAPI document.
            request = request.replace(" ", "` `")
        lines += [f"| `{request}` | {names} | {support} | {reason} |" for names, support, reason in cells]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_every_field_of_every_request_is_known(client: Client) -> None:
    rows = list(list_rows(client))
    assert len([row for row in rows if row.support == "honoured"]) >= 8
    requests = {str(request): request for request in client.requests()}
    assert set(client.missing) <= requests.keys() - ROUTES.keys()
    for name, parameters in client.ignored_query.items():
        assert parameters.keys() <= requests[name].query


def test_requests_are_found_in_the_sources_of_the_clients() -> None:
    """The other tests would pass without checking anything if the search found no requests."""
    cube, e2b = ({str(each): each for each in client.requests()} for client in (CLIENTS[1], CLIENTS[0]))
    assert {"image", "cpu", "memory", "env", "command", "name"} <= cube["POST /templates"].body.keys()
    assert cube["POST /sandboxes"].body["volumeMounts"].keys() == {"name", "path", "readOnly"}
    assert "allowOut" in cube["PUT /sandboxes/{}/network"].body
    assert cube["GET /snapshots"].query == {"sandboxID", "limit", "nextToken"}
    assert "maskRequestHost" in e2b["POST /v2/sandboxes"].body["network"]
    assert e2b["GET /sandboxes/{}/metrics"].query == {"start", "end"}
    (execute,) = [each for each in fields.list_code_interpreter_requests() if each.route == "/execute"]
    assert {"code", "context_id", "language", "env_vars"} <= execute.body.keys()


def test_the_agent_reads_every_field_of_the_code_interpreter() -> None:
    source = "\n".join(path.read_text() for path in (REPOSITORY / "gateway/src/sandbox_agent/interpreter").glob("*.py"))
    for request in fields.list_code_interpreter_requests():
        for name in request.body:
            assert f'"{name}"' in source, f"{request}: the agent does not read {name}"


def list_models(model: type[Body]) -> Iterator[type[Body]]:
    yield model
    for nested in fields_of(model).values():
        if nested is not None:
            yield from list_models(nested)


MODELS = sorted(
    {
        model
        for route in ROUTES.values()
        if route.body_field and (top := model_in(route.body_field.field_info.annotation))
        for model in list_models(top)
    },
    key=lambda model: model.__name__,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_refused_and_ignored_fields_belong_to_a_client(model: type[Body]) -> None:
    """A model must not list fields that clients no longer send. They should be treated like any unknown field."""
    sent_names = {name for client in CLIENTS for request in client.requests() for name in _all_names(request.body)}
    assert {*model.refused, *model.ignored} <= sent_names | {"kernel"}
    assert not (model.refused.keys() & model.ignored.keys()) and not model.refused.keys() & fields_of(model).keys()
    for name, refusal in model.refused.items():
        (refused,) = find_refused_fields(model, {name: "value"})
        assert str(refused).startswith(f"{name}: not supported, because ")
        assert ": " in refusal.reason, "the sentence must say what to do"
        assert list(find_refused_fields(model, {name: None})) == []


def _all_names(body: Fields) -> Iterator[str]:
    for name, nested in body.items():
        yield name
        yield from _all_names(nested)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_the_page_contains_the_generated_table(client: Client) -> None:
    path = REPOSITORY / "docs" / f"{client.page}.md"
    text = path.read_text()
    start_marker, end_marker = "<!-- fields: made by tests/sdk/test_fields.py -->", "<!-- end of fields -->"
    assert start_marker in text
    table = f"{start_marker}\n\n{render_table(client)}\n\n{end_marker}"
    expected = re.sub(f"{start_marker}.*{end_marker}", lambda _: table, text, flags=re.DOTALL)
    if os.environ.get("GROVE_WRITE_DOCS"):
        path.write_text(expected)
    assert path.read_text() == expected, f"generate the page again: {_COMMAND}"
