"""Clients with read or exec keys attack every route of the control plane."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from sandbox_gateway.api.access.auth import OPEN_PATHS
from sandbox_gateway.recipes import Recipe
from tests.security.routes import (
    METHODS,
    OVERRIDE_HEADERS,
    READ_METHODS,
    SAMPLED_SPELLINGS,
    SPELLINGS,
    Caller,
    Target,
    list_routes,
)
from tests.support.linux_images import refuse_images
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.samples import mark_slow_except

READ_HEADERS, EXEC_HEADERS = {"X-API-Key": READ_KEY}, {"X-API-Key": EXEC_KEY}
REQUEST_BODY = json.dumps({"args": ["write", "stolen", "1"], "code": "1", "name": "new", "templateID": "base"}).encode()
"""A valid body for `exec` and `eval`, and for creating a sandbox."""
ADMIN_ROUTES = (
    "/snapshots/{ref}/export",
    "/volumes/{ref}/snapshots/{snapshot}/export",
    "/templates/{ref}/files/{digest}",
    "/interrupted-imports",
    "/artifacts",
)
"""The only GETs that a key of scope read may not send.

They return files with all secrets of a guest, a URL for uploads, tokens for exports, and data that only the gateway's
credentials can read.
"""
PLANS_PATH = "/plans"
"""Every key may open plan sessions, because they change nothing."""
RUNS_PATH = "/applied-runs"
"""Every key may open runs that apply plans, because their requests need the usual scopes."""
EXEC_ROUTE_PATTERN = re.compile(r"/sandboxes/[^/]+/exec|/v1/sandboxes/[^/]+/(exec|eval|ping)")
"""Routes to which a key of scope exec may POST, according to docs/api.md."""


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The shared target. Checks that the attack has changed nothing except files inside sandboxes."""
    state_before = shared_target.read_state()
    shared_target.agent_calls.clear()
    yield shared_target
    for machine in shared_target.gateway.host.machines.values():
        machine.state.pop("stolen", None)
    assert shared_target.read_state() == state_before and shared_target.events == []


def send_attack(
    target: Target, caller: Caller, method: str, request_target: str, is_allowed: bool, **headers: str
) -> None:
    """Send a request and check the response's status. ``is_allowed``: whether the key's scope permits the request."""
    status, body = caller.request(method, request_target, REQUEST_BODY, **headers)
    details = f"{method} {request_target} {headers}: {status} {body[:200]}"
    path = decode_path(request_target)
    if is_allowed or path in OPEN_PATHS or path.startswith((PLANS_PATH, RUNS_PATH)):
        assert status < 500, details
    else:
        # 400: the server itself rejected an invalid request.
        assert status in (400, 403), details


def decode_path(request_target: str) -> str:
    return unquote(request_target.partition("?")[0])


@pytest.mark.parametrize("spelling", mark_slow_except(SAMPLED_SPELLINGS, SPELLINGS))
def test_a_read_key_cannot_change_or_run_anything(target: Target, spelling: str) -> None:
    caller = Caller(target.gateway, READ_HEADERS)
    for route in list_routes(target):
        for method in METHODS if spelling == "unchanged" else {route.method, "POST"}:
            send_attack(target, caller, method, SPELLINGS[spelling](route.path), method in READ_METHODS)
    caller.close()
    assert set(target.agent_calls) <= {"/sync"}, "only a query for divergence may reach agents"


@pytest.mark.parametrize("key", [READ_KEY, EXEC_KEY], ids=["read", "exec"])
def test_no_spelling_of_the_path_exports_a_snapshot(target: Target, key: str) -> None:
    """An export is the only response to this path whose length is unknown."""
    path = "/snapshots/taken/export"
    admin, caller = Caller(target.gateway, {"X-API-Key": ADMIN_KEY}), Caller(target.gateway, {"X-API-Key": key})
    assert admin.request("GET", path) == (200, "")
    for spelling in SPELLINGS.values():
        status, body = caller.request("GET", spelling(path))
        assert status != 200 or body, spelling(path)
    caller.close()
    admin.close()


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "unknown"])
def test_a_plan_session_changes_nothing(target: Target, is_open: bool) -> None:
    """A read-only key may send every request inside a plan session, so no route may ignore the session."""
    caller = Caller(target.gateway, READ_HEADERS)
    _, body = caller.request("POST", PLANS_PATH, json.dumps({"run": f"an attack on every route, {is_open}"}).encode())
    open_id = json.loads(body)["planID"]
    plan_path = f"{PLANS_PATH}/{open_id if is_open else 'f' * 32}"
    for route in list_routes(target):
        if not route.template.startswith((PLANS_PATH, "/applied-runs")):  # These never act on the host.
            for request_body in (REQUEST_BODY, b"{}"):
                status, body = caller.request(route.method, plan_path + route.path, request_body)
                assert status < 500, f"{route}: {body}"
                assert is_open or status in (400, 404) or route.method == "GET", f"{route}: {status} {body}"
                assert not any(secret in body for secret in target.secrets), route
    caller.request("DELETE", f"{PLANS_PATH}/{open_id}")
    caller.close()
    assert set(target.agent_calls) <= {"/sync"}, "only a query for divergence may reach agents"


def test_an_applied_run_gives_no_rights(target: Target) -> None:
    """A path under a run gives a key no more rights, whether the run exists or not. Even `/health` needs a key."""
    for headers in (READ_HEADERS, EXEC_HEADERS, {}):
        caller = Caller(target.gateway, headers)
        status, body = caller.request("POST", RUNS_PATH, json.dumps({"run": "an attack on every route"}).encode())
        assert status == (200 if headers else 401)
        run_ids = ["f" * 32, *([json.loads(body)["runID"]] if headers else [])]
        for run_id in run_ids:
            for route in list_routes(target):
                if route.template.startswith((PLANS_PATH, RUNS_PATH)):
                    continue
                is_exec_route = headers == EXEC_HEADERS and EXEC_ROUTE_PATTERN.fullmatch(route.path)
                status, body = caller.request(route.method, f"{RUNS_PATH}/{run_id}{route.path}", REQUEST_BODY)
                details = f"{headers} {route}: {status} {body[:200]}"
                if not headers:
                    assert status == 401, details
                elif route.method not in READ_METHODS and not is_exec_route:
                    assert status in (400, 403), details
                else:
                    assert status < 500 and not (headers == READ_HEADERS and any(x in body for x in target.secrets)), (
                        details
                    )
        for run_id in run_ids[1:]:
            assert caller.request("DELETE", f"{RUNS_PATH}/{run_id}")[0] == 204
        caller.close()


def test_a_read_key_cannot_read_secrets(target: Target) -> None:
    caller = Caller(target.gateway, READ_HEADERS)
    for route in list_routes(target):
        for query in ("", "?limit=1000&diverged=true", "?secret=true&token=true"):
            if route.method == "GET":
                status, body = caller.request("GET", route.path + query)
                special_statuses = {
                    "/plans/{id}": (404,),
                    "/transfers/{transfer}": (404,),
                    **dict.fromkeys(ADMIN_ROUTES, (403,)),
                }
                expected_statuses = special_statuses.get(route.template, (200, 400))
                assert status in expected_statuses, f"{route}: {body}"
                assert not any(secret in body for secret in target.secrets), route
    caller.close()


@pytest.mark.parametrize("header", OVERRIDE_HEADERS[:6], ids=lambda header: "=".join(next(iter(header.items()))))
@pytest.mark.parametrize("key_headers", [READ_HEADERS, EXEC_HEADERS], ids=["read", "exec"])
def test_headers_do_not_change_the_method(target: Target, key_headers: dict[str, str], header: dict[str, str]) -> None:
    caller = Caller(target.gateway, key_headers)
    for route in list_routes(target):
        for method in {"GET", "DELETE", route.method} - ({"POST"} if key_headers is EXEC_HEADERS else set()):
            send_attack(target, caller, method, route.path, method in READ_METHODS, **header)
    caller.close()


@pytest.mark.parametrize("spelling", mark_slow_except(SAMPLED_SPELLINGS, SPELLINGS))
def test_an_exec_key_can_only_run_programs(target: Target, spelling: str) -> None:
    caller = Caller(target.gateway, EXEC_HEADERS)
    for route in list_routes(target):
        for method in METHODS if spelling == "unchanged" else {route.method, "POST"}:
            request_target = SPELLINGS[spelling](route.path)
            is_exec_route = bool(EXEC_ROUTE_PATTERN.fullmatch(decode_path(request_target)))
            is_allowed = method in READ_METHODS or (method == "POST" and is_exec_route)
            send_attack(target, caller, method, request_target, is_allowed)
    caller.close()
    assert set(target.agent_calls) <= {"/sync", "/exec", "/eval", "/health"}
    if spelling == "unchanged":
        assert {"/exec", "/eval", "/health"} <= set(target.agent_calls), "allowed requests did not reach agents"


def test_two_keys_do_not_combine_their_rights(target: Target) -> None:
    caller = Caller(target.gateway, READ_HEADERS | {"Authorization": f"Bearer {EXEC_KEY}"})
    assert caller.request("DELETE", "/sandboxes/one")[0] == 403
    assert caller.request("POST", "/sandboxes/one/exec", REQUEST_BODY)[0] == 200
    caller.close()


@pytest.mark.parametrize("key", [READ_KEY, EXEC_KEY])
def test_a_plan_session_reads_no_files_of_the_host_and_contacts_no_registry(
    memory_gateway: MemoryGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Responses that differ would show which files exist and which ports are open; /dev/zero would never end."""
    read_sources = []
    original_compute_digest = memory_gateway.host.compute_source_digest

    async def record_read(recipe: Recipe) -> str:
        read_sources.append(recipe.path or recipe.image)
        return await original_compute_digest(recipe)

    monkeypatch.setattr(memory_gateway.host, "compute_source_digest", record_read)
    (tmp_path / "existing").touch()
    sources: list[dict[str, Any]] = [
        {"from": "rootfs", "path": str(tmp_path / "existing")},
        {"from": "rootfs", "path": str(tmp_path / "missing")},
        {"image": f"oci-archive:{tmp_path}/missing"},
        {"image": "10.0.0.5:22/x"},
    ]
    with memory_gateway.client(key) as client:
        plan_path = f"/plans/{client.post('/plans', json={'run': secrets.token_hex()}).json()['planID']}"
        for source in sources:
            assert client.post(f"{plan_path}/templates", json={"name": "web", **source}).status_code == 202
            announced_build = client.post(f"{plan_path}/v3/templates", json={"name": "web"}).json()
            path = f"{plan_path}/v2/templates/{announced_build['templateID']}/builds/{announced_build['buildID']}"
            body = {"fromImage": source.get("image", "app")}
            assert client.post(path, json=body).status_code == 202
        client.delete(plan_path)
    assert read_sources == []


def test_a_plan_session_predicts_builds_from_the_last_digest_of_their_source(
    memory_gateway: MemoryGateway, tmp_path: Path
) -> None:
    """Only an administrator's session reads the source."""
    tarball = tmp_path / "rootfs.tar"
    body = {"name": "web", "from": "rootfs", "path": str(tarball)}

    def predict_build(key: str, path: str = "/templates") -> int:
        with memory_gateway.client(key) as client:
            plan_path = f"/plans/{client.post('/plans', json={'run': secrets.token_hex()}).json()['planID']}"
            client.get(f"{plan_path}/templates")
            responses = [_build_template(client, plan_path + path, body) for _ in range(2)]
            assert responses[1] in (responses[0], 200), "the session remembers its own builds"
            client.delete(plan_path)
        return responses[0]

    assert (predict_build(ADMIN_KEY), predict_build(READ_KEY)) == (400, 202)
    tarball.write_bytes(b"one")
    assert (predict_build(ADMIN_KEY), predict_build(READ_KEY)) == (202, 202)
    with memory_gateway.client() as client:
        assert _build_template(client, "/templates", body) == 202
    assert (predict_build(ADMIN_KEY), predict_build(READ_KEY)) == (200, 200)
    tarball.write_bytes(b"two")
    assert (predict_build(ADMIN_KEY), predict_build(READ_KEY)) == (202, 200)
    assert (predict_build(ADMIN_KEY, "/templates/web"), predict_build(READ_KEY, "/templates/web")) == (202, 200)


def _build_template(client: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """Request a build and wait until it has finished. Returns the status of the response."""
    response = client.post(path, json=body if path.endswith("/templates") else None)
    if response.status_code == 202:
        build = response.json()
        root = path.partition("/templates")[0]
        route = f"{root}/templates/{build['templateID']}/builds/{build['buildID']}"
        client.get(f"{route}/logs", params={"follow": True})
        assert client.get(f"{root}/templates/web").json()["outdated"] is False
    return response.status_code


def test_a_plan_session_refuses_a_recipe_for_another_kind_of_host(
    memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gateway.host, "check_recipe", refuse_images)
    with memory_gateway.client(READ_KEY) as client:
        plan_path = f"/plans/{client.post('/plans', json={'run': secrets.token_hex()}).json()['planID']}"
        response = client.post(f"{plan_path}/templates", json={"name": "web", "image": "app:1"})
        client.delete(plan_path)
    assert "a jail host cannot build templates from images" in response.json()["message"]
