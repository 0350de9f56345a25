"""Clients whose key has too small a scope (read, exec) at every route of the control plane."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from sandbox_gateway.api.access.auth import OPEN_PATHS
from tests.api.memory_gateway import EXEC_KEY, READ_KEY
from tests.security.routes import OVERRIDES, READING, SPELLINGS, VERBS, Caller, Target, all_routes

READER, RUNNER = {"X-API-Key": READ_KEY}, {"X-API-Key": EXEC_KEY}
BODY = json.dumps({"args": ["write", "stolen", "1"], "code": "1", "name": "new", "templateID": "base"}).encode()
"""Valid for `exec` and `eval`, and for creating a sandbox."""
EXECUTES = re.compile(r"/sandboxes/[^/]+/exec|/v1/sandboxes/[^/]+/(exec|eval|ping)")
"""Routes to which a key of scope exec may POST, according to docs/api.md."""


@pytest.fixture
def target(attacked: Target) -> Iterator[Target]:
    """Only programs may write inside; otherwise attacks must not change anything on it, so all of them share it."""
    before = attacked.state()
    attacked.agent_calls.clear()
    yield attacked
    for machine in attacked.gateway.host.machines.values():
        machine.state.pop("stolen", None)
    assert attacked.state() == before and attacked.events == []


def send_attack(there: Target, caller: Caller, method: str, spelled: str, allowed: bool, **headers: str) -> None:
    """``allowed``: the scope suffices for this method and path."""
    status, body = caller.ask(method, spelled, BODY, **headers)
    told = f"{method} {spelled} {headers}: {status} {body[:200]}"
    if allowed or path_of(spelled) in OPEN_PATHS:
        assert status < 500, told
    else:
        # 400: the server itself rejected an invalid request.
        assert status in (400, 403), told


def path_of(spelled: str) -> str:
    return unquote(spelled.partition("?")[0])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_read_key_cannot_change_or_run_anything(target: Target, spelling: str) -> None:
    caller = Caller(target.gateway, READER)
    for route in all_routes(target):
        for verb in VERBS if spelling == "as it is" else {route.method, "POST"}:
            send_attack(target, caller, verb, SPELLINGS[spelling](route.path), verb in READING)
    caller.close()
    assert set(target.agent_calls) <= {"/sync"}, "to see whether a sandbox diverged its agent is asked to write back"


def test_a_read_key_sees_no_secret(target: Target) -> None:
    caller = Caller(target.gateway, READER)
    for route in all_routes(target):
        for query in ("", "?limit=1000&diverged=true", "?secret=true&token=true"):
            if route.method == "GET":
                status, body = caller.ask("GET", route.path + query)
                assert status in (200, 400), f"{route}: {body}"
                assert not any(secret in body for secret in target.secrets), route
    caller.close()


@pytest.mark.parametrize("header", OVERRIDES[:6], ids=lambda header: "=".join(next(iter(header.items()))))
@pytest.mark.parametrize("key", [READER, RUNNER], ids=["read", "exec"])
def test_no_header_changes_the_method(target: Target, key: dict[str, str], header: dict[str, str]) -> None:
    caller = Caller(target.gateway, key)
    for route in all_routes(target):
        for verb in {"GET", "DELETE", route.method} - ({"POST"} if key is RUNNER else set()):
            send_attack(target, caller, verb, route.path, verb in READING, **header)
    caller.close()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_exec_key_can_only_run_programs(target: Target, spelling: str) -> None:
    caller = Caller(target.gateway, RUNNER)
    for route in all_routes(target):
        for verb in VERBS if spelling == "as it is" else {route.method, "POST"}:
            spelled = SPELLINGS[spelling](route.path)
            may = verb in READING or (verb == "POST" and bool(EXECUTES.fullmatch(path_of(spelled))))
            send_attack(target, caller, verb, spelled, may)
    caller.close()
    assert set(target.agent_calls) <= {"/sync", "/exec", "/eval", "/health"}
    if spelling == "as it is":
        assert {"/exec", "/eval", "/health"} <= set(target.agent_calls), "the attack is one: these are let through"


def test_two_keys_have_only_the_rights_of_the_better_one(target: Target) -> None:
    caller = Caller(target.gateway, READER | {"Authorization": f"Bearer {EXEC_KEY}"})
    assert caller.ask("DELETE", "/sandboxes/one")[0] == 403
    assert caller.ask("POST", "/sandboxes/one/exec", BODY)[0] == 200
    caller.close()
