"""Routes of sandboxes, through a served gateway."""

from __future__ import annotations

import base64
import threading
import time
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.native.shapes import ENVD_VERSION
from tests.api.inside import eventually
from tests.api.memory_gateway import READ_KEY, MemoryGateway


def create_sandbox(api: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = api.post("/sandboxes", json={"templateID": "base", **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def run_command(api: httpx.Client, ref: str, *args: str, **more: Any) -> dict[str, Any]:
    answer = api.post(f"/sandboxes/{ref}/exec", json={"args": args, **more})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_create_returns_the_fields_of_all_dialects(api: httpx.Client) -> None:
    made = create_sandbox(api, name="one", metadata={"team": "red"}, timeout=300, envVars={"A": "1"}, mcp={}, iam=None)
    assert made["name"] == "one" and made["state"] == "running" and made["alias"] == "base"
    assert made["metadata"] == {"team": "red"} and made["envdVersion"] == ENVD_VERSION and made["envdAccessToken"]
    end = datetime.fromisoformat(made["endAt"])
    assert 200 < (end - datetime.now(UTC)).total_seconds() <= 300


@pytest.mark.parametrize("timeout", [-1, None])
def test_a_sandbox_without_timeout_has_an_end_date(api: httpx.Client, timeout: int | None) -> None:
    assert create_sandbox(api, timeout=timeout)["endAt"].startswith("9999-")


def test_both_versions_of_a_route_give_the_same_answer(api: httpx.Client) -> None:
    made = api.post("/v2/sandboxes", json={"templateID": "base", "name": "two"}).json()
    listed = api.get("/v2/sandboxes").json()
    assert [item["sandboxID"] for item in listed] == [made["sandboxID"]]
    assert api.post("/v2/sandboxes/two/connect", json={}).json()["sandboxID"] == made["sandboxID"]


def test_lifecycle_options_in_every_spelling(api: httpx.Client) -> None:
    said = create_sandbox(api, lifecycle={"onTimeout": "pause", "autoResume": True})
    assert said["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
    assert create_sandbox(api, autoPause=True, autoResume={"enabled": True})["lifecycle"] == said["lifecycle"]
    assert create_sandbox(api)["lifecycle"] == {"onTimeout": "kill", "autoResume": False}


def test_network_options_in_every_spelling(api: httpx.Client) -> None:
    assert create_sandbox(api, allow_internet_access=False)["network"]["allowInternetAccess"] is False
    made = create_sandbox(api, network={"allowOut": ["10.0.0.1"], "denyOut": ["0.0.0.0/0"]})
    assert made["network"] == {
        "allowInternetAccess": True,
        "allowOut": ["10.0.0.1"],
        "denyOut": ["0.0.0.0/0"],
        "allowPublicTraffic": False,
    }
    ref = made["sandboxID"]
    assert api.put(f"/sandboxes/{ref}/network", json={"allow_internet_access": False}).status_code == 204
    assert api.get(f"/sandboxes/{ref}").json()["network"] == {
        "allowInternetAccess": False,
        "allowOut": [],
        "denyOut": [],
        "allowPublicTraffic": False,
    }


@pytest.mark.parametrize(
    "body",
    [
        {"network": {"rules": {"api.example.com": []}}},
        {"network": {"egressProxy": {"address": "10.0.0.1:1080"}}},
        {"network": {"maskRequestHost": "${PORT}.example.com"}},
        {"network": {"httpsPorts": [443]}},
        {"iam": {"tokens": {"a": {"audience": "b"}}}},
        {"autoPause": True, "autoPauseMemory": False},
    ],
)
def test_unsupported_options_are_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    answer = api.post("/sandboxes", json={"templateID": "base", **body})
    assert answer.status_code == 400 and "not supported, because" in answer.json()["message"]
    assert api.get("/sandboxes").json() == []


def test_a_failed_removal_does_not_block_others(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire = memory_gateway.engine.sandboxes.expire

    async def fail_for_one(ref: str) -> None:
        if memory_gateway.engine.sandboxes.get(ref).name == "stuck":
            raise ValueError(ref)
        await expire(ref)

    monkeypatch.setattr(memory_gateway.engine.sandboxes, "expire", fail_for_one)
    create_sandbox(api, name="stuck", timeout=0, autoPause=True)
    create_sandbox(api, name="mortal", timeout=0)
    eventually(lambda: [each["name"] for each in api.get("/sandboxes").json()] == ["stuck"])
    monkeypatch.undo()
    eventually(lambda: api.get("/sandboxes/stuck").json()["state"] == "paused")


def test_an_idempotency_key_creates_one_sandbox(api: httpx.Client) -> None:
    first, second = (
        api.post("/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k1"}).json() for _ in "ab"
    )
    assert first["sandboxID"] == second["sandboxID"]
    assert len(api.get("/sandboxes").json()) == 1


@pytest.mark.parametrize("route", ["/sandboxes/one/clone", "/sandboxes/one/fork", "/snapshots/base/fork"])
def test_an_idempotency_key_creates_siblings_once(api: httpx.Client, route: str) -> None:
    create_sandbox(api, name="one")
    body, headers = {"names": ["a", "b"]}, {"Idempotency-Key": f"k {route}"}
    for gone in ("", "b"):
        if gone:
            api.delete(f"/sandboxes/{gone}").raise_for_status()
        answer = api.post(route, json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        assert len(answer.json() if route.endswith("one/fork") else answer.json()["sandboxes"]) == (1 if gone else 2)
    assert api.post(route, json=body, headers=headers).status_code == 201
    assert len(api.get("/sandboxes").json()) == 2


def test_list_filters(api: httpx.Client) -> None:
    one = create_sandbox(api, name="one", metadata={"team": "red", "odd": "a b&c"})
    create_sandbox(api, name="two", metadata={"team": "blue"}, paused=True)

    def names(**params: str) -> list[str]:
        answer = api.get("/sandboxes", params=params)
        assert answer.status_code == 200, answer.text
        return [item["name"] for item in answer.json()]

    assert names() == ["one", "two"] and names(order="desc") == ["two", "one"]
    assert names(name="two") == ["two"] and names(state="paused") == ["two"]
    assert names(state="running,paused") == ["one", "two"]
    assert names(metadata="team=red") == ["one"] and names(metadata="team=red&odd=a+b%26c") == ["one"]
    assert names(metadata="odd=a%2520b%2526c") == ["one"], "one client encodes twice"
    assert names(template="base") == ["one", "two"] and names(template="other") == []
    assert names(snapshotID=one["forkedFrom"]) == ["one", "two"]
    assert names(startedAfter="2100-01-01T00:00:00Z") == []
    assert api.get("/sandboxes", params={"state": "dead"}).status_code == 400


def test_tokens_are_hidden_in_lists_and_from_readers(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    assert "envdAccessToken" not in api.get("/sandboxes").json()[0]
    with memory_gateway.client(READ_KEY) as reader:
        assert "envdAccessToken" not in reader.get("/sandboxes/one").json()
    assert "envdAccessToken" in api.get("/sandboxes/one").json()


def test_divergence_is_reported_for_one_sandbox(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    assert api.get("/sandboxes/one").json()["diverged"] is False
    run_command(api, "one", "write", "k", "v")
    assert api.get("/sandboxes/one").json()["diverged"] is True
    assert "diverged" not in api.get("/sandboxes").json()[0]
    assert api.get("/sandboxes?diverged=true").json()[0]["diverged"] is True


def test_exec_passes_all_options_and_results(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    told = run_command(api, "one", "env", env={"A": "1"}, cwd="/srv", user="nobody")
    assert '"cwd": "/srv"' in told["stdout"] and '"user": "nobody"' in told["stdout"]
    assert run_command(api, "one", "exit", "7") == {
        "exitCode": 7,
        "stdout": "",
        "stderr": "leaving\n",
        "timedOut": False,
    }
    assert run_command(api, "one", "cat", stdin=base64.b64encode(b"in\n").decode())["stdout"] == "in\n"
    assert api.post("/sandboxes/one/exec", json={"args": ["cat"], "stdin": "%"}).status_code == 400


def test_pause_and_resume(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "v")
    assert api.post("/sandboxes/one/pause").status_code == 204
    again = api.post("/sandboxes/one/pause")
    assert again.status_code == 409 and again.json()["kind"] == "conflict"
    paused = api.get("/sandboxes/one").json()
    assert paused["state"] == "paused" and "address" not in paused
    resumed = api.post("/sandboxes/one/resume", json={"timeout": 60})
    assert resumed.status_code == 201 and resumed.json()["state"] == "running"
    assert run_command(api, "one", "read", "k")["stdout"] == "v"
    assert api.post("/sandboxes/one/resume").status_code == 409


def test_connect_resumes_and_never_shortens(api: httpx.Client) -> None:
    create_sandbox(api, name="one", timeout=1000)
    end = api.get("/sandboxes/one").json()["endAt"]
    assert api.post("/sandboxes/one/connect", json={"timeout": 10}).json()["endAt"] == end
    assert api.post("/sandboxes/one/connect").json()["endAt"] == end
    assert api.post("/sandboxes/one/connect", json={"timeout": 5000}).json()["endAt"] > end
    assert api.post("/sandboxes/one/connect", json={"timeout": -1}).json()["endAt"].startswith("9999-")
    assert api.post("/sandboxes/one/connect", json={"timeout": 0}).status_code == 400
    api.post("/sandboxes/one/pause")
    assert api.post("/sandboxes/one/connect").json()["state"] == "running"


def test_timeouts_and_patches(api: httpx.Client) -> None:
    made = create_sandbox(api, name="one", metadata={"a": "1"})
    assert api.post("/sandboxes/one/timeout", json={"timeout": 100}).status_code == 204
    assert not api.get("/sandboxes/one").json()["endAt"].startswith("9999-")
    changed = api.patch("/sandboxes/one", json={"name": "uno", "metadata": {"b": "2"}, "timeout": None}).json()
    assert changed["name"] == "uno" and changed["metadata"] == {"b": "2"} and changed["endAt"].startswith("9999-")
    assert changed["sandboxID"] == made["sandboxID"]
    assert api.patch("/sandboxes/uno", json={}).json()["metadata"] == {"b": "2"}


def test_snapshot_rollback_and_promote(api: httpx.Client) -> None:
    source = create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "before")
    taken = api.post("/sandboxes/one/snapshots", json={"name": "s1", "description": "first"})
    assert taken.status_code == 201 and taken.json()["pauseMs"] == 6.25
    run_command(api, "one", "write", "k", "after")
    back = api.post("/sandboxes/one/rollback", json={"snapshotID": "s1"})
    assert back.status_code == 200
    assert back.json() | {"operationID": ""} == {
        "sandboxID": source["sandboxID"],
        "snapshotID": taken.json()["snapshotID"],
        "operationID": "",
        "status": "READY",
    }
    assert run_command(api, "one", "read", "k")["stdout"] == "before"
    fork = api.post("/snapshots/s1/fork").json()
    run_command(api, fork["sandboxID"], "write", "k", "won")
    promoted = api.post(f"/sandboxes/{fork['sandboxID']}/promote")
    assert promoted.status_code == 200 and promoted.json()["sandboxID"] == source["sandboxID"]
    assert run_command(api, "one", "read", "k")["stdout"] == "won"


def test_memory_options_in_both_spellings(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for word in (False, "none"):
        taken = api.post("/sandboxes/one/snapshots", json={"memory": word})
        assert taken.status_code == 201 and taken.json()["memory"] == "none", taken.text
    for word in (True, "auto"):
        assert api.post("/sandboxes/one/snapshots", json={"memory": word}).json()["memory"] == "incremental"
    assert api.post("/sandboxes/one/snapshots", json={"memory": "some"}).status_code == 400


def test_clone_and_fork_of_a_running_sandbox(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "v")
    made = api.post("/sandboxes/one/clone", json={"names": ["a", "b"]})
    assert made.status_code == 201 and made.json()["errors"] == []
    assert [run_command(api, name, "read", "k")["stdout"] for name in ("a", "b")] == ["v", "v"]
    forked = api.post("/sandboxes/one/fork", json={"count": 2, "timeout": 300})
    assert forked.status_code == 201 and [set(each) for each in forked.json()] == [{"sandbox"}, {"sandbox"}]
    memory_gateway.host.failing = {"d"}
    mixed = api.post("/sandboxes/one/fork", json={"names": ["c", "d"], "atomic": False}).json()
    assert mixed[0]["sandbox"]["name"] == "c"
    assert mixed[1]["error"] == {
        "name": "d",
        "code": 500,
        "kind": "backend_failed",
        "message": "no machine for d",
    }
    refused = api.post("/sandboxes/one/clone", json={"names": ["e", "d"]})
    assert refused.status_code == 500 and refused.json()["kind"] == "backend_failed"
    assert {item["name"] for item in api.get("/sandboxes").json()} >= {"one", "a", "b", "c"}
    assert api.get("/sandboxes/e").status_code == 404


@pytest.mark.parametrize("body", [{"count": 0}, {"count": 1001}, {"names": []}, {"names": ["a", "a"]}])
def test_impossible_numbers_of_forks(api: httpx.Client, body: dict[str, Any]) -> None:
    create_sandbox(api, name="one")
    assert api.post("/sandboxes/one/clone", json=body).status_code == 400


def test_kill_and_missing(api: httpx.Client) -> None:
    made = create_sandbox(api, name="one")
    assert api.delete("/sandboxes/one").status_code == 204
    missing = api.get(f"/sandboxes/{made['sandboxID']}")
    assert missing.status_code == 404
    assert "not found" in missing.json()["message"] and made["sandboxID"] in missing.json()["message"]
    assert "template" not in missing.json()["message"]


def test_usage(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    assert api.get("/sandboxes/one/usage").json() == {"diskBytes": 200_000, "memoryBytes": 3 << 20}


@pytest.mark.parametrize(
    ("end", "status", "kind", "what"),
    [
        (("DELETE", "/sandboxes/box", None), 410, "gone", "deleted during the request"),
        (("POST", "/sandboxes/box/pause", {}), 409, "conflict", "paused during the request"),
        (("POST", "/sandboxes/box/pause", {"memory": False}), 409, "conflict", "paused during the request"),
        (("POST", "/sandboxes/box/rollback", {"snapshot": "mark"}), 409, "conflict", "rolled back"),
    ],
)
@pytest.mark.parametrize("path", ["/sandboxes/box/exec", "/v1/sandboxes/box/exec"])
def test_a_command_in_a_removed_sandbox_fails_with_a_reason(
    memory_gateway: MemoryGateway, api: httpx.Client, end: Any, status: int, kind: str, what: str, path: str
) -> None:
    api.post("/sandboxes", json={"templateID": "base", "name": "box"}).raise_for_status()
    api.post("/sandboxes/box/snapshots", json={"name": "mark"}).raise_for_status()
    answers: list[httpx.Response] = []

    def run_command() -> None:
        with memory_gateway.client() as own:
            answers.append(own.post(path, json={"args": ["sleep", "30"]}))

    thread = threading.Thread(target=run_command)
    thread.start()
    machine = memory_gateway.machine("box")
    deadline = time.monotonic() + 30
    while not machine.connections:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    method, target, body = end
    api.request(method, target, json=body).raise_for_status()
    thread.join(30)
    (answer,) = answers
    assert (answer.status_code, answer.json()["kind"]) == (status, kind), answer.text
    assert what in answer.json()["message"]
