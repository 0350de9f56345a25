"""Test the sandbox routes of a running gateway."""

from __future__ import annotations

import base64
import threading
import time
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from e2b.api.client.models import SandboxMetric

from sandbox_gateway.api.native.shapes import ENVD_VERSION
from tests.support.guest_services import wait_until
from tests.support.memory_gateway import READ_KEY, MemoryGateway, create_sandbox, run_command


def test_create_returns_the_fields_of_all_dialects(api: httpx.Client) -> None:
    sandbox = create_sandbox(
        api, name="one", metadata={"team": "red"}, timeout=300, envVars={"A": "1"}, mcp={}, iam=None
    )
    assert sandbox["name"] == "one" and sandbox["state"] == "running" and sandbox["alias"] == "base"
    assert (
        sandbox["metadata"] == {"team": "red"} and sandbox["envdVersion"] == ENVD_VERSION and sandbox["envdAccessToken"]
    )
    end = datetime.fromisoformat(sandbox["endAt"])
    assert 200 < (end - datetime.now(UTC)).total_seconds() <= 300


@pytest.mark.parametrize("timeout", [-1, None])
def test_a_sandbox_without_timeout_ends_in_the_year_9999(api: httpx.Client, timeout: int | None) -> None:
    assert create_sandbox(api, timeout=timeout)["endAt"].startswith("9999-")


def test_both_versions_of_a_route_return_the_same_sandbox(api: httpx.Client) -> None:
    sandbox = api.post("/v2/sandboxes", json={"templateID": "base", "name": "two"}).json()
    sandboxes = api.get("/v2/sandboxes").json()
    assert [item["sandboxID"] for item in sandboxes] == [sandbox["sandboxID"]]
    assert api.post("/v2/sandboxes/two/connect", json={}).json()["sandboxID"] == sandbox["sandboxID"]


def test_lifecycle_options_are_accepted_in_every_spelling(api: httpx.Client) -> None:
    sandbox = create_sandbox(api, lifecycle={"onTimeout": "pause", "autoResume": True})
    assert sandbox["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
    assert create_sandbox(api, autoPause=True, autoResume={"enabled": True})["lifecycle"] == sandbox["lifecycle"]
    assert create_sandbox(api)["lifecycle"] == {"onTimeout": "kill", "autoResume": False}


def test_invalid_policies_are_refused_even_if_the_sandbox_is_paused(api: httpx.Client) -> None:
    sandbox = create_sandbox(api, paused=True)
    ref, running_ref = sandbox["sandboxID"], create_sandbox(api)["sandboxID"]
    for network in ({"allowOut": ["localhost"]}, {"allowOut": ["api.example.com"]}, {"denyOut": ["api.example.com"]}):
        for response in (
            api.put(f"/sandboxes/{ref}/network", json=network),
            api.post("/sandboxes", json={"templateID": "base", "network": network}),
            api.post(f"/sandboxes/{running_ref}/clone", json={"network": network}),
        ):
            assert response.status_code == 400 and response.json()["kind"] == "invalid", response.text
    assert api.get(f"/sandboxes/{ref}").json()["network"] == sandbox["network"]
    names = {"allowOut": ["api.example.com", "*.example.org"], "denyOut": ["0.0.0.0/0"]}
    assert api.put(f"/sandboxes/{ref}/network", json=names).status_code == 204
    assert api.get(f"/sandboxes/{ref}").json()["network"]["allowOut"] == names["allowOut"]


def test_network_options_are_accepted_in_every_spelling(api: httpx.Client) -> None:
    assert create_sandbox(api, allow_internet_access=False)["network"]["allowInternetAccess"] is False
    sandbox = create_sandbox(api, network={"allowOut": ["10.0.0.1"], "denyOut": ["0.0.0.0/0"]})
    assert sandbox["network"] == {
        "allowInternetAccess": True,
        "allowOut": ["10.0.0.1"],
        "denyOut": ["0.0.0.0/0"],
        "allowPublicTraffic": False,
    }
    ref = sandbox["sandboxID"]
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
        {"network": {"httpsPorts": [443]}},
        {"iam": {"tokens": {"a": {"audience": "b"}}}},
        {"autoPause": True, "autoPauseMemory": False},
    ],
)
def test_unsupported_options_are_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    response = api.post("/sandboxes", json={"templateID": "base", **body})
    assert response.status_code == 400 and "not supported, because" in response.json()["message"]
    assert api.get("/sandboxes").json() == []


def test_a_failed_expiry_does_not_block_other_expiries(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_expire = memory_gateway.engine.sandboxes.expire

    async def expire_unless_stuck(ref: str) -> None:
        if memory_gateway.engine.sandboxes.get(ref).name == "stuck":
            raise ValueError(ref)
        await original_expire(ref)

    monkeypatch.setattr(memory_gateway.engine.sandboxes, "expire", expire_unless_stuck)
    create_sandbox(api, name="stuck", timeout=0, autoPause=True)
    create_sandbox(api, name="mortal", timeout=0)
    wait_until(lambda: [each["name"] for each in api.get("/sandboxes").json()] == ["stuck"])
    monkeypatch.undo()
    wait_until(lambda: api.get("/sandboxes/stuck").json()["state"] == "paused")


def test_an_idempotency_key_creates_one_sandbox(api: httpx.Client) -> None:
    first_sandbox, second_sandbox = (
        api.post("/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k1"}).json() for _ in "ab"
    )
    assert first_sandbox["sandboxID"] == second_sandbox["sandboxID"]
    assert len(api.get("/sandboxes").json()) == 1


@pytest.mark.parametrize("route", ["/sandboxes/one/clone", "/sandboxes/one/fork", "/snapshots/base/fork"])
def test_repeating_an_idempotency_key_creates_no_new_siblings(api: httpx.Client, route: str) -> None:
    create_sandbox(api, name="one")
    body, headers = {"names": ["a", "b"]}, {"Idempotency-Key": f"k {route}"}
    for removed_name in ("", "b"):
        if removed_name:
            api.delete(f"/sandboxes/{removed_name}").raise_for_status()
        response = api.post(route, json=body, headers=headers)
        assert response.status_code == 201, response.text
        assert len(response.json() if route.endswith("one/fork") else response.json()["sandboxes"]) == (
            1 if removed_name else 2
        )
    assert api.post(route, json=body, headers=headers).status_code == 201
    assert len(api.get("/sandboxes").json()) == 2


def test_the_sandbox_list_is_filtered(api: httpx.Client) -> None:
    sandbox = create_sandbox(api, name="one", metadata={"team": "red", "odd": "a b&c"})
    create_sandbox(api, name="two", metadata={"team": "blue"}, paused=True)

    def list_names(**params: str) -> list[str]:
        response = api.get("/sandboxes", params=params)
        assert response.status_code == 200, response.text
        return [item["name"] for item in response.json()]

    assert list_names() == ["one", "two"] and list_names(order="desc") == ["two", "one"]
    assert list_names(name="two") == ["two"] and list_names(state="paused") == ["two"]
    assert list_names(state="running,paused") == ["one", "two"]
    assert list_names(metadata="team=red") == ["one"] and list_names(metadata="team=red&odd=a+b%26c") == ["one"]
    assert list_names(metadata="odd=a%2520b%2526c") == ["one"], "one client encodes twice"
    assert list_names(template="base") == ["one", "two"] and list_names(template="other") == []
    assert list_names(snapshotID=sandbox["forkedFrom"]) == ["one", "two"]
    assert list_names(startedAfter="2100-01-01T00:00:00Z") == []
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


def test_exec_forwards_all_options_and_results(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    result = run_command(api, "one", "env", env={"A": "1"}, cwd="/srv", user="nobody")
    assert '"cwd": "/srv"' in result["stdout"] and '"user": "nobody"' in result["stdout"]
    assert run_command(api, "one", "exit", "7") == {
        "exitCode": 7,
        "stdout": "",
        "stderr": "leaving\n",
        "timedOut": False,
    }
    assert run_command(api, "one", "cat", stdin=base64.b64encode(b"in\n").decode())["stdout"] == "in\n"
    assert api.post("/sandboxes/one/exec", json={"args": ["cat"], "stdin": "%"}).status_code == 400


def test_a_sandbox_is_paused_and_resumed(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "v")
    assert api.post("/sandboxes/one/pause").status_code == 204
    second_response = api.post("/sandboxes/one/pause")
    assert second_response.status_code == 409 and second_response.json()["kind"] == "conflict"
    sandbox = api.get("/sandboxes/one").json()
    assert sandbox["state"] == "paused" and "address" not in sandbox
    response = api.post("/sandboxes/one/resume", json={"timeout": 60})
    assert response.status_code == 201 and response.json()["state"] == "running"
    assert run_command(api, "one", "read", "k")["stdout"] == "v"
    assert api.post("/sandboxes/one/resume").status_code == 409


def test_connect_resumes_a_sandbox_and_never_shortens_its_lifetime(api: httpx.Client) -> None:
    create_sandbox(api, name="one", timeout=1000)
    end = api.get("/sandboxes/one").json()["endAt"]
    assert api.post("/sandboxes/one/connect", json={"timeout": 10}).json()["endAt"] == end
    assert api.post("/sandboxes/one/connect").json()["endAt"] == end
    assert api.post("/sandboxes/one/connect", json={"timeout": 5000}).json()["endAt"] > end
    assert api.post("/sandboxes/one/connect", json={"timeout": -1}).json()["endAt"].startswith("9999-")
    assert api.post("/sandboxes/one/connect", json={"timeout": 0}).status_code == 400
    api.post("/sandboxes/one/pause")
    assert api.post("/sandboxes/one/connect").json()["state"] == "running"


def test_timeout_name_and_metadata_can_be_changed(api: httpx.Client) -> None:
    created_sandbox = create_sandbox(api, name="one", metadata={"a": "1"})
    assert api.post("/sandboxes/one/timeout", json={"timeout": 100}).status_code == 204
    assert not api.get("/sandboxes/one").json()["endAt"].startswith("9999-")
    patched_sandbox = api.patch("/sandboxes/one", json={"name": "uno", "metadata": {"b": "2"}, "timeout": None}).json()
    assert (
        patched_sandbox["name"] == "uno"
        and patched_sandbox["metadata"] == {"b": "2"}
        and patched_sandbox["endAt"].startswith("9999-")
    )
    assert patched_sandbox["sandboxID"] == created_sandbox["sandboxID"]
    assert api.patch("/sandboxes/uno", json={}).json()["metadata"] == {"b": "2"}


def test_rollback_and_promote_restore_the_captured_state(api: httpx.Client) -> None:
    source = create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "before")
    capture_response = api.post("/sandboxes/one/snapshots", json={"name": "s1", "description": "first"})
    assert capture_response.status_code == 201 and capture_response.json()["pauseMs"] == 6.25
    run_command(api, "one", "write", "k", "after")
    rollback_response = api.post("/sandboxes/one/rollback", json={"snapshotID": "s1"})
    assert rollback_response.status_code == 200
    assert rollback_response.json() | {"operationID": ""} == {
        "sandboxID": source["sandboxID"],
        "snapshotID": capture_response.json()["snapshotID"],
        "operationID": "",
        "status": "READY",
    }
    assert run_command(api, "one", "read", "k")["stdout"] == "before"
    fork = api.post("/snapshots/s1/fork").json()
    run_command(api, fork["sandboxID"], "write", "k", "won")
    promotion_response = api.post(f"/sandboxes/{fork['sandboxID']}/promote")
    assert promotion_response.status_code == 200 and promotion_response.json()["sandboxID"] == source["sandboxID"]
    assert run_command(api, "one", "read", "k")["stdout"] == "won"


def test_memory_options_are_accepted_in_both_spellings(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for spelling in (False, "none"):
        response = api.post("/sandboxes/one/snapshots", json={"memory": spelling})
        assert response.status_code == 201 and response.json()["memory"] == "none", response.text
    for spelling in (True, "auto"):
        assert api.post("/sandboxes/one/snapshots", json={"memory": spelling}).json()["memory"] == "incremental"
    assert api.post("/sandboxes/one/snapshots", json={"memory": "some"}).status_code == 400


def test_a_running_sandbox_is_cloned_and_forked(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    run_command(api, "one", "write", "k", "v")
    clone_response = api.post("/sandboxes/one/clone", json={"names": ["a", "b"]})
    assert clone_response.status_code == 201 and clone_response.json()["errors"] == []
    assert [run_command(api, name, "read", "k")["stdout"] for name in ("a", "b")] == ["v", "v"]
    fork_response = api.post("/sandboxes/one/fork", json={"count": 2, "timeout": 300})
    assert fork_response.status_code == 201 and [set(each) for each in fork_response.json()] == [
        {"sandbox"},
        {"sandbox"},
    ]
    memory_gateway.host.failing_names = {"d"}
    results = api.post("/sandboxes/one/fork", json={"names": ["c", "d"], "atomic": False}).json()
    assert results[0]["sandbox"]["name"] == "c"
    assert results[1]["error"] == {
        "name": "d",
        "code": 500,
        "kind": "backend_failed",
        "message": "no machine for d",
    }
    response = api.post("/sandboxes/one/clone", json={"names": ["e", "d"]})
    assert response.status_code == 500 and response.json()["kind"] == "backend_failed"
    assert {item["name"] for item in api.get("/sandboxes").json()} >= {"one", "a", "b", "c"}
    assert api.get("/sandboxes/e").status_code == 404


@pytest.mark.parametrize("body", [{"count": 0}, {"count": 1001}, {"names": []}, {"names": ["a", "a"]}])
def test_invalid_counts_and_names_of_clones_are_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    create_sandbox(api, name="one")
    assert api.post("/sandboxes/one/clone", json=body).status_code == 400


def test_a_removed_sandbox_is_not_found(api: httpx.Client) -> None:
    sandbox = create_sandbox(api, name="one")
    assert api.delete("/sandboxes/one").status_code == 204
    response = api.get(f"/sandboxes/{sandbox['sandboxID']}")
    assert response.status_code == 404
    assert "not found" in response.json()["message"] and sandbox["sandboxID"] in response.json()["message"]
    assert "template" not in response.json()["message"]


def test_usage_is_reported(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    assert api.get("/sandboxes/one/usage").json() == {"diskBytes": 200_000, "memoryBytes": 3 << 20}


@pytest.mark.parametrize(
    ("interruption", "status", "kind", "reason"),
    [
        (("DELETE", "/sandboxes/box", None), 410, "gone", "deleted during the request"),
        (("POST", "/sandboxes/box/pause", {}), 409, "conflict", "paused during the request"),
        (("POST", "/sandboxes/box/pause", {"memory": False}), 409, "conflict", "paused during the request"),
        (("POST", "/sandboxes/box/rollback", {"snapshot": "mark"}), 409, "conflict", "rolled back"),
    ],
)
@pytest.mark.parametrize("path", ["/sandboxes/box/exec", "/v1/sandboxes/box/exec"])
def test_an_interrupted_command_fails_with_a_reason(
    memory_gateway: MemoryGateway, api: httpx.Client, interruption: Any, status: int, kind: str, reason: str, path: str
) -> None:
    api.post("/sandboxes", json={"templateID": "base", "name": "box"}).raise_for_status()
    api.post("/sandboxes/box/snapshots", json={"name": "mark"}).raise_for_status()
    responses: list[httpx.Response] = []

    def send_command() -> None:
        with memory_gateway.client() as client:
            responses.append(client.post(path, json={"args": ["sleep", "30"]}))

    thread = threading.Thread(target=send_command)
    thread.start()
    machine = memory_gateway.machine("box")
    deadline = time.monotonic() + 30
    while not machine.connection_count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    method, target, body = interruption
    api.request(method, target, json=body).raise_for_status()
    thread.join(30)
    (response,) = responses
    assert (response.status_code, response.json()["kind"]) == (status, kind), response.text
    assert reason in response.json()["message"]


def test_a_refresh_only_extends_the_lifetime(api: httpx.Client) -> None:
    create_sandbox(api, name="one", timeout=600)
    end = api.get("/sandboxes/one").json()["endAt"]
    for body in (None, {"duration": 60}):
        assert api.post("/sandboxes/one/refreshes", json=body).status_code == 204
        assert api.get("/sandboxes/one").json()["endAt"] == end
    assert api.post("/sandboxes/one/refreshes", json={"duration": 1200}).status_code == 204
    assert api.get("/sandboxes/one").json()["endAt"] > end
    assert api.post("/sandboxes/one/refreshes", json={"duration": 3601}).status_code == 400
    assert api.post("/sandboxes/none/refreshes", json={"duration": 1}).status_code == 404


def test_metrics_have_the_format_that_e2b_expects(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    sandbox = create_sandbox(api, name="one")
    (sample,) = api.get("/sandboxes/one/metrics").json()
    metric = SandboxMetric.from_dict(sample)
    network_rates = dict.fromkeys(("receivedBytesPerSecond", "sentBytesPerSecond"))
    assert metric.additional_properties == network_rates and metric.timestamp_unix == int(metric.timestamp.timestamp())
    assert metric.cpu_count == sandbox["cpuCount"] and metric.cpu_used_pct == 10.0 / sandbox["cpuCount"]
    assert (metric.mem_used, metric.mem_total, metric.mem_cache) == (3 << 20, sandbox["memoryMB"] << 20, None)
    assert (metric.disk_used, metric.disk_total) == (200_000, sandbox["diskSizeMB"] << 20)
    sampled_at = metric.timestamp_unix
    for query, count in (
        (f"start={sampled_at}&end={sampled_at}", 1),
        (f"end={sampled_at - 1}", 0),
        (f"start={sampled_at + 60}", 0),
    ):
        assert len(api.get(f"/sandboxes/one/metrics?{query}").json()) == count, query
    for query, words in (("start=2&end=1", "is after 'end'"), ("start=x", "start"), ("end=-1", "end")):
        response = api.get(f"/sandboxes/one/metrics?{query}")
        assert response.status_code == 400 and words in response.json()["message"]
    assert api.get("/sandboxes/none/metrics").status_code == 404
    with memory_gateway.client(READ_KEY) as reader:
        assert len(reader.get("/sandboxes/one/metrics").json()) == 1
    create_sandbox(api, name="two")
    api.get("/sandboxes/two/metrics")
    lines = api.get("/metrics").text.splitlines()
    assert (
        "sandbox_gateway_used_memory_bytes 6.291456e+06" in lines
        and "sandbox_gateway_used_disk_bytes 400000.0" in lines
        and "sandbox_gateway_received_bytes_per_second 0.0" in lines
    )
    assert [line for line in lines if line.startswith("sandbox_gateway_used_cpus ")] == [
        "sandbox_gateway_used_cpus 0.2"
    ]
    assert not [line for line in lines if sandbox["sandboxID"] in line]
