"""Test runs that apply a plan: the generations that they see do not count their own changes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import httpx
import pytest

from sandbox_gateway.engine import own_changes
from sandbox_gateway.engine.own_changes import OwnChanges
from sandbox_gateway.engine.plans import applied_runs as runs_module
from sandbox_gateway.errors import Busy, Gone
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway


@pytest.fixture
def run(memory_gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client whose requests belong to a run that applies a plan."""
    with memory_gateway.client() as client:
        response = client.post("/applied-runs", json={"run": f"run {secrets.token_hex(8)}"})
        assert response.status_code == 200, response.text
        path = f"/applied-runs/{response.json()['runID']}"
        client.base_url = client.base_url.copy_with(path=path)
        yield client
    with memory_gateway.client() as client:
        client.delete(path)


def read_generation(client: httpx.Client, path: str) -> int:
    response = client.get(path)
    assert response.status_code == 200, response.text
    number: int = response.json()["generation"]
    return number


def test_a_run_sees_only_the_changes_of_other_clients(api: httpx.Client, sandbox: object, run: httpx.Client) -> None:
    before = read_generation(api, "/sandboxes/one")
    assert run.patch("/sandboxes/one", json={"metadata": {"a": "1"}}).is_success
    assert run.post("/sandboxes/one/snapshots", json={"name": "mark"}).is_success
    assert read_generation(run, "/sandboxes/one") == before < read_generation(api, "/sandboxes/one")
    assert api.patch("/sandboxes/one", json={"metadata": {"a": "2"}}).is_success
    assert run.patch("/sandboxes/one", json={"metadata": {"a": "3"}}).is_success
    assert read_generation(run, "/sandboxes/one") == before + 1
    assert run.post("/volumes", json={"name": "data", "sizeMB": 64}).is_success
    assert run.patch("/volumes/data", json={"sizeMB": 128}).is_success
    assert (read_generation(run, "/volumes/data"), read_generation(api, "/volumes/data")) == (0, 1)
    assert [client.get("/volumes/data").json()["ownChanges"] for client in (run, api)] == [1, 0]


def test_the_tasks_that_a_request_starts_belong_to_the_run(api: httpx.Client, run: httpx.Client) -> None:
    build = run.post("/templates", json={"name": "web", "packages": ["git"]}).json()
    run.get(f"/templates/web/builds/{build['buildID']}/logs", params={"follow": True})
    assert read_generation(run, "/templates/web") == 0 < read_generation(api, "/templates/web")


def test_a_plan_session_sees_the_same_generations_as_the_run(
    api: httpx.Client, sandbox: object, run: httpx.Client
) -> None:
    plan_id = api.post("/plans", json={"run": secrets.token_hex(8)}).json()["planID"]
    for prefix, client in ((f"/plans/{plan_id}", api), ("", run)):
        for path, body in (("snapshots", {"name": "mark"}), ("rollback", {"snapshotID": "mark"})):
            assert client.post(f"{prefix}/sandboxes/one/{path}", json=body).is_success
    for path in ("/sandboxes/one", "/snapshots/mark"):
        assert read_generation(api, f"/plans/{plan_id}{path}") == read_generation(run, path)
    api.delete(f"/plans/{plan_id}")


def test_a_finished_run_cannot_continue(memory_gateway: MemoryGateway, sandbox: object, run: httpx.Client) -> None:
    path = run.base_url.path.rstrip("/")
    with memory_gateway.client(ADMIN_KEY) as other_client:
        assert other_client.get(f"{path}/sandboxes/one").status_code == 410, "it belongs to another key"
    with memory_gateway.client() as client:
        assert path.endswith(client.get("/applied-runs").json()[0]["runID"])
        assert client.delete(path).status_code == 204
        assert client.get("/applied-runs").json() == []
    response = run.patch("/sandboxes/one", json={"metadata": {"a": "1"}})
    assert response.status_code == 410 and "Make a new plan" in response.json()["message"]


def test_a_change_after_the_read_is_not_counted() -> None:
    """A request reads a record, waits for the agent, and then describes the record, which has changed since."""
    changes = OwnChanges()
    changes.add("a", 3, 4, ["a"])
    changes.add("a", 6, 8, ["a"])
    assert [changes.count("a", generation) for generation in (3, 4, 6, 7, 8, 9)] == [0, 1, 1, 2, 3, 3]


def test_a_runs_counted_changes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_changes, "_MAX_SPANS", 3)
    changes = OwnChanges()
    for number in range(10_000):
        changes.add(f"removed {number}", 0, 1, ["kept"])
        changes.add("kept", 2 * number, 2 * number + 1, ["kept"])
        assert len(changes) <= 1002
    assert changes.count("kept", 100_000) == 3


def test_the_number_of_runs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_scenario() -> None:
        applied_runs = runs_module.AppliedRuns()
        first_run = applied_runs.open("a", "1")
        assert applied_runs.open("a", "1") is first_run
        applied_runs.open("a", "2")
        with pytest.raises(Busy, match="limit of 2 applied runs for the key 'a'"):
            applied_runs.open("a", "3")
        applied_runs.open("b", "1")
        with pytest.raises(Busy, match="limit of 3 applied runs for this gateway"):
            applied_runs.open("c", "1")
        monkeypatch.setattr(runs_module, "MIN_IDLE_SECONDS", 0.0)
        applied_runs.get("a", first_run.id)
        applied_runs.open("c", "1")
        assert [len(applied_runs.list(owner)) for owner in "abc"] == [1, 1, 1]
        assert applied_runs.list("a") == [first_run], "the least recently used run has ended"
        with pytest.raises(Gone, match="make a new plan"):
            applied_runs.open("a", "2")
        monkeypatch.setattr(runs_module, "IDLE_SECONDS", 0.0)
        with pytest.raises(Gone, match="Make a new plan"):
            applied_runs.get("a", first_run.id)

    monkeypatch.setattr(runs_module, "MAX_RUNS", 3)
    monkeypatch.setattr(runs_module, "MAX_RUNS_PER_KEY", 2)
    asyncio.run(run_scenario())
