"""A client with a key tries to fill the memory with large records, on the host or in plan sessions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.native.requests import MAX_COMMAND_LENGTH, MAX_SETUP_BYTES, MAX_STORED_BYTES
from sandbox_gateway.engine.plans import sessions
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, OTHER_EXEC_KEY, READ_KEY, MemoryGateway

MAX_REQUEST_COUNT = 1500
SESSION_BYTES = 256 << 10
PAIRS = {f"key-{number}": "" for number in range(1000)}
"""Metadata that is small in a request, but takes much more memory in each record."""
GROWING_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sandboxes with metadata": ("POST", "/sandboxes", {"templateID": "base", "metadata": {"notes": "x" * 30_000}}),
    "sandboxes with variables": ("POST", "/sandboxes", {"templateID": "base", "envVars": {"NOTES": "x" * 30_000}}),
    "other metadata": ("PATCH", "/sandboxes/one", {"metadata": {"notes": "x" * 30_000}}),
    "forks with metadata": ("POST", "/sandboxes/one/clone", {"metadata": PAIRS}),
    "snapshots with descriptions": ("POST", "/sandboxes/one/snapshots", {"description": "x" * 4096}),
    "names of a template": ("PUT", "/templates/base/alias", {"alias": "name-{}"}),
    "template builds": ("POST", "/templates", {"name": "name-{}", "setup": ["x" * 20_000]}),
    "volumes": ("POST", "/volumes", {"name": "name-{}"}),
}
"""Requests that make a plan session larger; `{}` stands for a number."""


@contextlib.contextmanager
def opened_plan(memory_gateway: MemoryGateway, key: str) -> Iterator[httpx.Client]:
    """Open a plan session, and yield a client whose requests belong to it."""
    with memory_gateway.client(key) as client, memory_gateway.client(key) as plan:
        response = client.post("/plans", json={"run": f"attack {secrets.token_hex(8)}"})
        assert response.status_code == 200, response.text
        plan_path = f"/plans/{response.json()['planID']}"
        plan.base_url = plan.base_url.copy_with(path=plan_path)
        try:
            yield plan
        finally:
            client.delete(plan_path)


def fill_session(plan: httpx.Client, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send requests until one of them is refused, and return its response."""
    for number in range(MAX_REQUEST_COUNT):
        numbered_body = {key: value.format(number) if value == "name-{}" else value for key, value in body.items()}
        response = plan.request(method, path, json=numbered_body)
        if response.status_code >= 400:
            return response
    raise AssertionError(f"{MAX_REQUEST_COUNT} requests were accepted")


def check_over_quota(response: httpx.Response, *texts: str) -> None:
    check_refusal(response, 413, "over_quota", texts)


def check_busy(response: httpx.Response, *texts: str) -> None:
    """Check a refusal that other sessions cause. The client may repeat the request once one of them has closed."""
    check_refusal(response, 429, "busy", texts)
    assert response.headers["Retry-After"]


def check_refusal(response: httpx.Response, status: int, kind: str, texts: tuple[str, ...]) -> None:
    assert (response.status_code, response.json()["kind"]) == (status, kind), response.text
    for text in texts:
        assert text in response.json()["message"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("growth", GROWING_REQUESTS)
def test_memory_for_a_plan_session_is_limited(
    memory_gateway: MemoryGateway, growth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_BYTES_PER_SESSION", SESSION_BYTES)
    with opened_plan(memory_gateway, READ_KEY) as plan, opened_plan(memory_gateway, READ_KEY) as other:
        check_over_quota(fill_session(plan, *GROWING_REQUESTS[growth]), "split the play")
        # The session can still be read, and other sessions can still change.
        assert plan.get("/sandboxes/one").status_code == plan.get("/templates/base").status_code == 200
        assert other.delete("/sandboxes/one").status_code == 204


def test_forks_that_do_not_fit_into_a_plan_session_are_not_created(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single small request would create a hundred records that take 130 KiB each."""
    monkeypatch.setattr(sessions, "MAX_BYTES_PER_SESSION", 8 << 20)
    with opened_plan(memory_gateway, READ_KEY) as plan:
        check_over_quota(plan.post("/sandboxes/one/clone", json={"count": 100, "metadata": PAIRS}), "8 MiB")
        assert [each["sandboxID"] for each in plan.get("/sandboxes").json()] == [sandbox["sandboxID"]]


@pytest.mark.usefixtures("sandbox")
def test_memory_for_all_plan_sessions_is_limited(
    memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = ("POST", "/sandboxes", {"templateID": "base", "metadata": {"notes": "x" * 2000}})
    monkeypatch.setattr(sessions, "MAX_BYTES_PER_SESSION", SESSION_BYTES)
    monkeypatch.setattr(sessions, "MAX_BYTES_PER_KEY", 2 * SESSION_BYTES)
    monkeypatch.setattr(sessions, "MAX_BYTES", 4 * SESSION_BYTES)
    with contextlib.ExitStack() as stack:

        def fill_next(key: str) -> tuple[httpx.Client, httpx.Response]:
            plan = stack.enter_context(opened_plan(memory_gateway, key))
            return plan, fill_session(plan, *growth)

        first_plan, refusal = fill_next(READ_KEY)
        check_over_quota(refusal, "split the play")
        fill_next(READ_KEY)
        check_busy(fill_next(READ_KEY)[1], "the plan sessions of the key 'looker'", "DELETE /plans/{id}")
        for key in (EXEC_KEY, OTHER_EXEC_KEY):
            for _ in range(3):
                _, refusal = fill_next(key)
        check_busy(refusal, "the plan sessions of this gateway")
        # An idle session ends if a new one needs its share of the limit.
        monkeypatch.setattr(sessions, "MIN_IDLE_SECONDS", 0.0)
        with opened_plan(memory_gateway, ADMIN_KEY) as plan:
            check_over_quota(fill_session(plan, *growth), "split the play")
        assert first_plan.get("/sandboxes").status_code == 404


LONG_FIELDS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "metadata": ("POST", "/sandboxes", {"metadata": {"notes": "x" * (MAX_STORED_BYTES - 5)}}, "metadata"),
    "many metadata": ("POST", "/sandboxes", {"metadata": {f"{n:04}": "ü" * 30 for n in range(1000)}}, "metadata"),
    "new metadata": ("PATCH", "/sandboxes/one", {"metadata": {"notes": "x" * (MAX_STORED_BYTES - 5)}}, "metadata"),
    "variables": ("POST", "/sandboxes", {"envVars": {"NOTES": "x" * (MAX_STORED_BYTES - 5)}}, "envVars"),
    "variables of forks": (
        "POST",
        "/sandboxes/one/clone",
        {"envVars": {"NOTES": "x" * (MAX_STORED_BYTES - 5)}},
        "envVars",
    ),
    "set-up commands": ("POST", "/templates", {"setup": ["x" * (MAX_SETUP_BYTES // 4)] * 4}, "setup"),
    "a start command": ("POST", "/templates", {"startCommand": "x" * MAX_COMMAND_LENGTH}, "startCommand"),
    "a readiness probe": ("POST", "/templates", {"readyProbe": "x" * MAX_COMMAND_LENGTH}, "readyProbe"),
    "a mirror": ("POST", "/templates", {"mirror": "x" * 4096}, "mirror"),
    "a template's description": ("POST", "/templates", {"description": "x" * 4096}, "description"),
    "a snapshot's description": ("POST", "/sandboxes/one/snapshots", {"description": "x" * 4096}, "description"),
}
"""Requests with a field whose length is the maximum or slightly less."""


def lengthen(value: Any) -> Any:
    """Return a copy of a field's value that is slightly longer."""
    if isinstance(value, dict):
        return {key: lengthen(item) for key, item in value.items()}
    return [*value[:-1], value[-1] + "x"] if isinstance(value, list) else value + "x" * (1 + len(value) // 10)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("case", LONG_FIELDS)
def test_long_values_are_refused(memory_gateway: MemoryGateway, case: str) -> None:
    method, path, fields, name = LONG_FIELDS[case]
    required_fields = {"/sandboxes": {"templateID": "base"}, "/templates": {"name": "long"}}.get(path, {})
    with opened_plan(memory_gateway, READ_KEY) as plan, memory_gateway.client(ADMIN_KEY) as client:
        too_long_body = required_fields | {name: lengthen(fields[name])}
        for each in (plan, client):
            response = each.request(method, path, json=too_long_body)
            assert (response.status_code, response.json()["kind"]) == (400, "invalid"), response.text
            assert name in response.json()["message"] and "at most" in response.json()["message"]
            assert len(response.content) < 1000, "the response does not quote the value"
        assert plan.request(method, path, json=required_fields | fields).status_code < 300


def test_large_records_of_older_gateways_can_be_read_and_changed(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    metadata = {"notes": "x" * (3 * MAX_STORED_BYTES)}
    memory_gateway.set_metadata(sandbox["sandboxID"], metadata)
    assert api.get("/sandboxes/one").json()["metadata"] == metadata
    assert api.patch("/sandboxes/one", json={"name": "renamed", "timeout": 60}).json()["metadata"] == metadata
    assert api.post("/sandboxes/renamed/snapshots", json={"name": "taken"}).status_code == 201
    assert api.patch("/sandboxes/renamed", json={"metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}
