"""All errors have the same shape."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway

ERROR_FIELDS = {"code", "message", "error", "kind", "blockers"}


def check_refusal(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) - {"details"} == ERROR_FIELDS and body["code"] == status and body["kind"] == kind
    assert body["message"] == body["error"]
    message: str = body["message"]
    return message


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        (b"{bad", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"", "needs a body"),
        (b"null", "must be a JSON object"),
        (b'{"templateID": 5}', "templateID"),
        (b"{}", "templateID: this field is required"),
        (b"\xff\xfe", "JSON"),
        (b'{"templateID": "base", "timeout": NaN}', "timeout"),
        (b'{"templateID": "base", "timeout": 1e400}', "timeout"),
        (b'{"templateID": "base", "cpuCount": 1' + b"0" * 300 + b"}", "cpuCount"),
        (b"[" * 100_000, "JSON"),
        (b'{"templateID": "base", "metadata": {"\\ud800": 1}}', "metadata"),
        (b'{"templateID": "\\ud800"}', "templateID"),
    ],
)
def test_invalid_bodies_are_refused(api: httpx.Client, content: bytes, expected_text: str) -> None:
    response = api.post("/sandboxes", content=content, headers={"Content-Type": "application/json"})
    message = check_refusal(response, 400, "invalid")
    assert expected_text in message and len(message) < 400


def test_a_form_is_refused(api: httpx.Client) -> None:
    message = check_refusal(api.post("/sandboxes", data={"templateID": "base"}), 400, "invalid")
    assert "application/json" in message


@pytest.mark.parametrize(
    "body",
    [
        {"memoryMB": -5},
        {"cpuCount": 0},
        {"diskSizeMB": 1 << 40},
        {"timeout": -2},
        {"timeout": "soon"},
        {"timeout": True},
        {"cpuCount": True},
        {"memoryMB": "512"},
        {"name": "n" * 10_000},
        {"name": "../etc"},
        {"name": ""},
        {"metadata": {"a": {"b": 1}}},
        {"metadata": "a=b"},
        {"envVars": {"A": 1}},
        {"network": {"allowOut": "10.0.0.0/8"}},
        {"lifecycle": {"onTimeout": "sleep"}},
    ],
)
def test_validation_errors_name_the_field_and_shorten_the_value(api: httpx.Client, body: dict[str, Any]) -> None:
    message = check_refusal(api.post("/sandboxes", json={"templateID": "base", **body}), 400, "invalid")
    assert message.startswith(next(iter(body))) and len(message) < 400
    assert api.get("/sandboxes").json() == []


def test_errors_beyond_the_limit_are_counted(api: httpx.Client) -> None:
    body = {"templateID": "base", "metadata": {f"k{number}": number for number in range(50)}}
    assert "and 44 more" in check_refusal(api.post("/sandboxes", json=body), 400, "invalid")


def test_unknown_routes_and_methods_are_refused(api: httpx.Client) -> None:
    assert "GET /nowhere not found" in check_refusal(api.get("/nowhere"), 404, "not_found")
    response = api.put("/sandboxes")
    assert "accepts" in check_refusal(response, 405, "invalid") and response.headers["allow"]
    assert len(check_refusal(api.get("/" + "x" * 5000), 404, "not_found")) < 300


def test_long_references_are_refused(api: httpx.Client) -> None:
    for route in ("/sandboxes/", "/snapshots/", "/templates/"):
        assert len(check_refusal(api.get(route + "x" * 10_000), 400, "invalid")) < 300
    check_refusal(api.get("/sandboxes/" + "x" * 100), 404, "not_found")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_oversized_bodies_are_refused(api: httpx.Client, is_chunked: bool) -> None:
    data = b'{"templateID": "' + b"x" * (5 << 20) + b'"}'
    content: Any = (data[start : start + 65536] for start in range(0, len(data), 65536)) if is_chunked else data
    response = api.post("/sandboxes", content=content, headers={"Content-Type": "application/json"})
    assert "4 MiB" in check_refusal(response, 413, "invalid")


def test_an_internal_error_has_an_incident_id_and_no_traceback(
    memory_gateway: MemoryGateway, api: httpx.Client
) -> None:
    def fail_unexpectedly(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    original_walk = memory_gateway.engine.sandboxes.walk
    memory_gateway.engine.sandboxes.walk = fail_unexpectedly  # type: ignore[method-assign]
    try:
        message = check_refusal(api.get("/sandboxes"), 500, "internal")
    finally:
        memory_gateway.engine.sandboxes.walk = original_walk  # type: ignore[method-assign]
    assert "incident" in message and "secret" not in message and "Zero" not in message


def test_malformed_requests_do_not_affect_other_clients(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    for data in (b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000, b"POST / HTTP/1.1\r\nHo"):
        with socket.create_connection(("127.0.0.1", memory_gateway.port), timeout=5) as connection:
            connection.sendall(data)
    with memory_gateway.client(ADMIN_KEY) as client:
        assert client.get("/sandboxes").status_code == 200


@pytest.mark.parametrize(
    ("route", "resource", "parent"),
    [
        ("/sandboxes/nothing", "sandbox", ""),
        ("/templates/nothing", "template", ""),
        ("/templates/base/builds/nothing/status", "build", None),
        ("/volumes/nothing", "volume", ""),
        ("/volumes/nothing/snapshots", "volume", ""),
        ("/lineage?root=nothing", "sandbox", ""),
    ],
)
def test_not_found_details_name_the_resource(api: httpx.Client, route: str, resource: str, parent: str | None) -> None:
    body = api.get(route).json()
    assert body["kind"] == "not_found" and body["details"]["resource"] == resource
    assert parent is None or body["details"]["parent"] == parent


def test_not_found_details_name_the_parent(api: httpx.Client) -> None:
    api.post("/volumes", json={"name": "data"})
    api.post("/sandboxes", json={"templateID": "base", "name": "one"})
    body = api.delete("/volumes/data/snapshots/never").json()
    assert body["details"] == {"resource": "volume_snapshot", "parent": "data"}
    assert api.delete("/sandboxes/one/volumes/data").json()["details"] == {"resource": "mount", "parent": "one"}


def test_an_error_without_details_omits_the_field(api: httpx.Client) -> None:
    assert set(api.post("/templates", json={}).json()) == ERROR_FIELDS
