"""Test plan sessions with an in-memory host: later requests see what earlier ones would do, and nothing happens."""

from __future__ import annotations

import contextlib
import gc
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine.plans import sessions
from sandbox_gateway.records import PLANNED_PREFIX
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.waiting import wait_until

PLANNED_ID = re.compile(rf"{PLANNED_PREFIX}[0-9a-f]{{4}}")


@pytest.fixture
def run() -> str:
    """The name of a run."""
    return f"run {secrets.token_hex(8)}"


@pytest.fixture
def start_plan(memory_gateway: MemoryGateway, run: str) -> Iterator[Callable[[str | None], httpx.Client]]:
    """A function that opens a plan session with a key, and returns a client whose requests belong to it."""
    with contextlib.ExitStack() as stack:

        def open_session(key: str | None) -> httpx.Client:
            client, plan_client = (stack.enter_context(memory_gateway.client(key)) for _ in range(2))
            response = client.post("/plans", json={"run": run})
            assert response.status_code == 200, response.text
            plan_path = f"/plans/{response.json()['planID']}"
            stack.callback(client.delete, plan_path)
            plan_client.base_url = plan_client.base_url.copy_with(path=plan_path)
            return plan_client

        yield open_session


@pytest.fixture
def plan(start_plan: Callable[[str | None], httpx.Client]) -> httpx.Client:
    """A client whose requests belong to a plan session."""
    return start_plan(None)


def get_plan_id(client: httpx.Client) -> str:
    return client.base_url.path.strip("/").rpartition("/")[2]


def list_all_objects(client: httpx.Client) -> dict[str, Any]:
    return {
        path: client.get(path).json() for path in ("/sandboxes", "/snapshots", "/volumes", "/templates", "/lineage")
    }


def test_later_requests_see_what_earlier_ones_planned(
    api: httpx.Client, sandbox: dict[str, Any], plan: httpx.Client, memory_gateway: MemoryGateway
) -> None:
    everything_before, fork_count = list_all_objects(api), memory_gateway.host.fork_count
    response = plan.post("/sandboxes/one/snapshots", json={"name": "mark"})
    assert response.status_code == 201, response.text
    snapshot = response.json()
    response = plan.post("/snapshots/mark/fork", json={"names": ["a", "b", "c"]})
    assert response.status_code == 201, response.text
    forks = response.json()["sandboxes"]
    assert [each["name"] for each in forks] == ["a", "b", "c"]
    assert plan.post("/sandboxes/one/rollback", json={"snapshotID": "mark"}).is_success
    assert plan.get("/sandboxes/one").json()["snapshotID"] == snapshot["snapshotID"]
    refusal = plan.delete("/snapshots/mark")
    assert (refusal.status_code, refusal.json()["kind"]) == (409, "in_use"), refusal.text
    assert plan.delete("/sandboxes/b").status_code == 204
    assert {each["name"] for each in plan.get("/sandboxes").json()} == {"one", "a", "c"}
    assert all(PLANNED_ID.fullmatch(each["sandboxID"]) for each in forks), (
        "planned ids can be distinguished from real ones"
    )
    assert list_all_objects(api) == everything_before
    assert memory_gateway.host.fork_count == fork_count
    assert plan.post("/sandboxes/one/pause").is_success and plan.post("/sandboxes/a/pause").is_success
    assert plan.get("/sandboxes/a").json()["state"] == "paused"
    assert plan.post("/sandboxes/a/resume", json={}).is_success
    assert plan.get("/sandboxes/a").json()["state"] == "running"
    assert list_all_objects(api) == everything_before


def test_templates_and_volumes_are_planned(
    api: httpx.Client, start_plan: Callable[[str | None], httpx.Client], sandbox: dict[str, Any]
) -> None:
    api.post("/volumes", json={"name": "data", "sizeMB": 100})
    plan = start_plan(None)
    everything_before = list_all_objects(api)
    build = plan.post("/templates", json={"name": "web", "setup": ["true"], "readyProbe": "true"}).json()
    plan.get(f"/templates/{build['templateID']}/builds/{build['buildID']}/logs", params={"follow": True})
    assert plan.post("/sandboxes", json={"templateID": "web", "name": "two"}).status_code == 201
    assert plan.patch("/volumes/data", json={"sizeMB": 200}).json()["sizeMB"] == 200
    assert plan.post("/volumes/data/snapshots", json={"name": "v1"}).status_code == 201
    assert plan.post("/volumes", json={"name": "copy", "fromSnapshot": "data@v1", "sizeMB": 200}).status_code == 201
    assert plan.post("/sandboxes/two/volumes", json={"name": "copy", "path": "/mnt"}).status_code == 201
    refusal = plan.delete("/volumes/copy")
    assert (refusal.status_code, refusal.json()["kind"]) == (409, "in_use")
    assert plan.get("/volumes/data").json()["sizeMB"] == 200
    assert list_all_objects(api) == everything_before
    assert api.delete("/volumes/data").status_code == 204


def test_values_that_only_a_run_can_determine_are_omitted(sandbox: dict[str, Any], plan: httpx.Client) -> None:
    assert plan.get("/sandboxes/one").json()["address"] == sandbox["address"]
    fork = plan.post("/sandboxes/one/clone", json={"name": "a"}).json()
    assert "address" not in fork
    assert plan.get("/sandboxes/a", params={"diverged": True}).json().get("diverged") is None


def test_the_dataset_of_a_volume_that_is_rolled_back_is_unknown(
    api: httpx.Client, memory_gateway: MemoryGateway, start_plan: Callable[[str | None], httpx.Client]
) -> None:
    """A jail host may create a new one."""
    api.post("/volumes", json={"name": "data", "sizeMB": 64}).raise_for_status()
    api.post("/volumes/data/snapshots", json={"name": "one"}).raise_for_status()
    volume = memory_gateway.engine.volumes.get("data")
    volume.host["dataset"] = "tank/data"
    plan = start_plan(None)
    assert plan.get("/volumes/data").json()["dataset"] == "tank/data"
    plan.post("/volumes/data/rollback", json={"snapshot": "one"}).raise_for_status()
    assert plan.get("/volumes/data").json().get("dataset") is None
    assert api.get("/volumes/data").json()["dataset"] == "tank/data"


def test_a_session_changes_no_metrics_except_those_of_requests(
    api: httpx.Client, sandbox: dict[str, Any], plan: httpx.Client
) -> None:
    def read_metrics() -> list[str]:
        lines = api.get("/metrics").text.splitlines()
        # The connections and the free memory of the host differ between any two moments.
        changing_names = (
            "sandbox_gateway_request_",
            "sandbox_gateway_connections",
            "sandbox_gateway_host_",
            "process_",
        )
        return [line for line in lines if not line.startswith((*changing_names, "python_", "#"))]

    assert api.post("/sandboxes/one/snapshots", json={"name": "real"}).status_code == 201
    metrics_before = read_metrics()
    assert any(line.startswith("sandbox_gateway_pause_seconds_count") for line in metrics_before), metrics_before
    for path, body in (
        ("/sandboxes/one/snapshots", {"name": "mark"}),
        ("/sandboxes/one/fork", {"names": ["a", "b"]}),
        ("/sandboxes/one/rollback", {"snapshot": "mark"}),
        ("/sandboxes/one/pause", {}),
    ):
        assert plan.post(path, json=body).is_success
    assert read_metrics() == metrics_before


def test_all_tasks_of_a_run_share_a_session_but_different_runs_do_not(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], plan: httpx.Client, run: str
) -> None:
    plan.post("/sandboxes/one/snapshots", json={"name": "mark"})
    with memory_gateway.client() as client:
        assert client.post("/plans", json={"run": run}).json()["planID"] == get_plan_id(plan)
        other_id = client.post("/plans", json={"run": f"another {run}"}).json()["planID"]
        assert len(client.get("/plans").json()) == 2
        assert client.get(f"/plans/{get_plan_id(plan)}/snapshots/mark").status_code == 200
        assert client.get(f"/plans/{other_id}/snapshots/mark").status_code == 404
        client.delete(f"/plans/{other_id}")


def test_a_run_cannot_continue_after_its_session_has_ended(
    memory_gateway: MemoryGateway, plan: httpx.Client, run: str
) -> None:
    with memory_gateway.client() as client:
        assert client.delete(f"/plans/{get_plan_id(plan)}").status_code == 204
        response = client.post("/plans", json={"run": run})
    assert (response.status_code, response.json()["kind"]) == (410, "gone"), response.text


def test_a_key_with_any_scope_can_plan_and_sees_no_tokens(
    sandbox: dict[str, Any], start_plan: Callable[[str | None], httpx.Client], api: httpx.Client
) -> None:
    reader = start_plan(READ_KEY)
    assert reader.get("/sandboxes/one").json().get("envdAccessToken") is None
    fork = reader.post("/sandboxes/one/clone", json={"name": "a"})
    assert fork.status_code == 201, fork.text
    assert fork.json().get("envdAccessToken") is None
    assert api.get("/sandboxes/a").status_code == 404


@pytest.mark.parametrize("key", [ADMIN_KEY, EXEC_KEY])
def test_a_session_belongs_to_its_key(
    start_plan: Callable[[str | None], httpx.Client], memory_gateway: MemoryGateway, key: str
) -> None:
    plan_id = get_plan_id(start_plan(READ_KEY))
    with memory_gateway.client(key) as other:
        assert other.get(f"/plans/{plan_id}").status_code == 404
        assert other.delete(f"/plans/{plan_id}").status_code == 404
        assert other.get("/plans").json() == []
        response = other.get(f"/plans/{plan_id}/sandboxes")
        assert (response.status_code, response.json()["kind"]) == (404, "not_found")
        assert "Start the check-mode run again" in response.json()["message"]
    with memory_gateway.client(READ_KEY) as owner:
        assert owner.get(f"/plans/{plan_id}").json()["planID"] == plan_id
        assert owner.get(f"/plans/{plan_id}/sandboxes").json() == []


def test_no_route_acts_on_the_host_if_the_session_is_unknown(
    api: httpx.Client, memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    """A read-only key may send every request inside a plan session, so no route may ignore the session."""
    routes = [
        (method.upper(), re.sub(r"\{[^}]*\}", "one", path))
        for path, item in api.get("/openapi.json").json()["paths"].items()
        for method in item
        if method != "get" and not path.startswith("/plans")
    ]
    assert len(routes) > 30
    everything_before = list_all_objects(api)
    with memory_gateway.client(READ_KEY) as reader:
        for method, path in routes:
            response = reader.request(method, f"/plans/{'0' * 32}{path}", json={})
            assert response.status_code in (400, 404), (method, path, response.text)
    assert list_all_objects(api) == everything_before


@pytest.mark.parametrize("route", ["/sandboxes/one/exec", "/v1/sandboxes/one/exec", "/v1/sandboxes/one/eval"])
def test_commands_are_refused(sandbox: dict[str, Any], plan: httpx.Client, route: str) -> None:
    response = plan.post(route, json={"args": ["write", "k", "v"], "code": "1"})
    assert (response.status_code, response.json()["kind"]) == (400, "unsupported"), response.text


def test_the_number_of_sessions_is_limited(
    memory_gateway: MemoryGateway, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_gateway.client(READ_KEY) as client:
        ids = [
            client.post("/plans", json={"run": f"{run} {number}"}).json()["planID"]
            for number in range(sessions.MAX_SESSIONS_PER_KEY)
        ]
        response = client.post("/plans", json={"run": f"{run} more"})
        assert (response.status_code, response.json()["kind"]) == (429, "busy"), response.text
        assert "wait until another check-mode run has finished" in response.json()["message"]
        assert response.headers["Retry-After"]
        monkeypatch.setattr(sessions, "MIN_IDLE_SECONDS", 0.0)
        assert client.get(f"/plans/{ids[0]}").status_code == 200
        new_id = client.post("/plans", json={"run": f"{run} more"}).json()["planID"]
        open_ids = {each["planID"] for each in client.get("/plans").json()}
        assert open_ids == {new_id, ids[0], *ids[2:]}, "the least recently used session has ended"
        for each in open_ids:
            client.delete(f"/plans/{each}")
        assert client.get("/plans").json() == []


def test_the_size_of_a_session_is_limited(
    sandbox: dict[str, Any], plan: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_IDS", 2)
    assert plan.post("/sandboxes/one/snapshots", json={"name": "s1"}).status_code == 201
    assert plan.post("/sandboxes/one/snapshots", json={"name": "s2"}).status_code == 201
    response = plan.post("/sandboxes/one/snapshots", json={"name": "s3"})
    assert (response.status_code, response.json()["kind"]) == (413, "over_quota"), response.text


def test_idle_sessions_end(memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "IDLE_SECONDS", 0.2)
    with memory_gateway.client() as client:
        plan_id = client.post("/plans", json={"run": "an-idle-run-of-a-play"}).json()["planID"]
        assert client.get(f"/plans/{plan_id}").status_code == 200
        time.sleep(0.5)
        assert client.get(f"/plans/{plan_id}").status_code == 404


def test_a_thousand_concurrent_sessions_are_limited_and_do_not_affect_others(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_references: list[weakref.ref[sessions.PlanSession]] = []
    peak_session_count = 0
    original_open = sessions.PlanSessions.open

    def open_session(self: sessions.PlanSessions, owner: str, run: str) -> sessions.PlanSession:
        nonlocal peak_session_count
        session = original_open(self, owner, run)
        peak_session_count = max(peak_session_count, len(self._sessions))
        session_references.append(weakref.ref(session))
        return session

    def open_many_sessions(key: str | None, number: int) -> list[httpx.Response]:
        with memory_gateway.client(key) as client:
            return [client.post("/plans", json={"run": f"{run} {number} {each}"}) for each in range(50)]

    monkeypatch.setattr(sessions.PlanSessions, "open", open_session)
    keys = (EXEC_KEY, READ_KEY, None)
    with memory_gateway.client(ADMIN_KEY) as other_client, ThreadPoolExecutor(20) as pool:
        plan_path = f"/plans/{other_client.post('/plans', json={'run': run}).json()['planID']}"
        assert other_client.post(f"{plan_path}/sandboxes/one/snapshots", json={"name": "mark"}).status_code == 201
        for min_idle_seconds in (sessions.MIN_IDLE_SECONDS, 0.0):  # with 0, each new session ends another one
            monkeypatch.setattr(sessions, "MIN_IDLE_SECONDS", min_idle_seconds)
            futures = [
                pool.submit(open_many_sessions, keys[number % len(keys)], number + 20 * (not min_idle_seconds))
                for number in range(20)
            ]
            count = 0
            while not all(future.done() for future in futures) or not count:
                count += 1
                name = f"new-{count}-{min_idle_seconds:.0f}"
                assert other_client.post("/sandboxes", json={"templateID": "base", "name": name}).status_code == 201
                assert other_client.delete(f"/sandboxes/{name}").status_code == 204
            responses = [response for future in futures for response in future.result()]
            assert len(responses) == 1000 and peak_session_count == sessions.MAX_SESSIONS
            refusals = [response for response in responses if response.status_code != 200]
            assert bool(refusals) is bool(min_idle_seconds)
            for refusal in refusals:
                assert (refusal.status_code, refusal.json()["kind"]) == (429, "busy"), refusal.text
                assert re.match(r"the limit of \d+ plan sessions for (the key|this gateway)", refusal.json()["message"])
                assert refusal.headers["Retry-After"]
            assert other_client.get(f"{plan_path}/snapshots/mark").status_code == 200
    assert len(session_references) > 1000
    for key in keys:
        with memory_gateway.client(key) as client:
            for each in client.get("/plans").json()[::2]:
                assert client.delete(f"/plans/{each['planID']}").status_code == 204
    monkeypatch.setattr(sessions, "IDLE_SECONDS", 0.0)
    with memory_gateway.client() as client:
        assert client.get("/plans").json() == []

    def is_freed() -> bool:
        gc.collect()
        # The event loop keeps cancelled timers, with the contexts of their requests, until they are due.
        return sum(reference() is not None for reference in session_references) < 5

    wait_until(is_freed, seconds=60)


@pytest.mark.parametrize("body", [{}, {"run": "short"}, {"run": "x" * 129}, {"run": 7}])
def test_an_invalid_run_is_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    assert api.post("/plans", json=body).status_code == 400
