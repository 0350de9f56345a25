"""Test the snapshot routes and the lineage route."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.memory_gateway import MemoryGateway, create_sandbox
from tests.support.waiting import wait_until


@pytest.fixture
def snapshot_id(api: httpx.Client) -> str:
    """The id of the snapshot `s1` of a new sandbox `one`."""
    create_sandbox(api, name="one")
    created_id: str = api.post("/sandboxes/one/snapshots", json={"name": "s1"}).json()["snapshotID"]
    return created_id


def test_one_fork_returns_a_sandbox_and_several_return_a_list(api: httpx.Client, snapshot_id: str) -> None:
    single_response = api.post(f"/snapshots/{snapshot_id}/fork", json={})
    assert single_response.status_code == 201 and single_response.json()["forkedFrom"] == snapshot_id
    assert single_response.json()["parentSandboxID"] == api.get("/sandboxes/one").json()["sandboxID"]
    forks = api.post("/snapshots/s1/fork", json={"count": 3, "metadata": {"g": "1"}, "concurrency": 2}).json()
    assert len(forks["sandboxes"]) == 3 and forks["errors"] == []
    assert len(api.get("/sandboxes?metadata=g%3D1").json()) == 3
    assert api.get("/snapshots/s1").json()["forks"] == 4


def test_responses_say_why_the_memory_of_a_snapshot_cannot_be_restored(
    api: httpx.Client, snapshot_id: str, memory_gateway: MemoryGateway
) -> None:
    template_id = api.get("/snapshots/s1").json()["templateID"]
    problems = memory_gateway.host.memory_problems
    routes = ("/snapshots/s1", f"/snapshots/{template_id}", f"/templates/{template_id}")
    assert [api.get(route).json()["memoryProblem"] for route in routes] == ["", "", ""]
    try:
        problems[snapshot_id] = problems[template_id] = "/memory is not mounted"
        assert [api.get(route).json()["memoryProblem"] for route in routes] == ["/memory is not mounted"] * 3
        (listed_snapshot,) = (each for each in api.get("/snapshots").json() if each["snapshotID"] == snapshot_id)
        assert listed_snapshot["memoryProblem"] == "/memory is not mounted"
    finally:
        problems.clear()


def test_resizing_a_fork_needs_a_cold_start(api: httpx.Client, snapshot_id: str) -> None:
    warm_response = api.post("/snapshots/s1/fork", json={"memoryMB": 512})
    assert warm_response.status_code == 400 and warm_response.json()["kind"] == "unsupported"
    cold_response = api.post("/snapshots/s1/fork", json={"memoryMB": 512, "coldStart": True})
    assert cold_response.status_code == 201 and cold_response.json()["memoryMB"] == 512


def test_a_snapshot_with_a_retention_rule_removes_older_ones(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for name in ("old", "new"):
        response = api.post("/sandboxes/one/snapshots", json={"name": name, "retention": {"keepLast": 1}})
        assert response.json()["retention"] == {"keepLast": 1, "keepDaily": None, "maxAge": None}
    wait_until(lambda: api.get("/snapshots/old").status_code == 404, 20)
    assert api.get("/snapshots/new").status_code == 200


@pytest.mark.parametrize("rule", [{}, {"keepLast": 0}, {"keepDaily": -1}, {"maxAge": 0}])
def test_an_invalid_retention_rule_is_refused(api: httpx.Client, rule: dict[str, int]) -> None:
    create_sandbox(api, name="one")
    response = api.post("/sandboxes/one/snapshots", json={"retention": rule})
    assert response.status_code == 400 and "retention" in response.json()["message"]


def test_a_sandbox_can_be_created_from_a_snapshot(api: httpx.Client, snapshot_id: str) -> None:
    assert api.post("/sandboxes", json={"templateID": "s1"}).json()["forkedFrom"] == snapshot_id


def test_the_snapshot_list_is_filtered(api: httpx.Client, snapshot_id: str) -> None:
    def list_ids(**params: str) -> list[str]:
        return [item["snapshotID"] for item in api.get("/snapshots", params=params).json()]

    sandbox = api.get("/sandboxes/one").json()
    assert list_ids() == [snapshot_id], "templates are not in the list"
    assert list_ids(sandboxID="one") == list_ids(sandboxID=sandbox["sandboxID"]) == list_ids(name="s1") == [snapshot_id]
    assert list_ids(templateID="base") == list_ids(templateID=sandbox["templateID"]) == [snapshot_id]
    assert list_ids(sandboxID="other") == list_ids(name="other") == list_ids(templateID="other") == []
    assert api.get("/snapshots/base").json()["kind"] == "template"


@pytest.mark.parametrize(
    "route", ["/snapshots/s1/fork", "/snapshots/base/fork", "/sandboxes/one/clone", "/sandboxes/one/fork"]
)
def test_a_single_fork_takes_a_name(api: httpx.Client, snapshot_id: str, route: str) -> None:
    response = api.post(route, json={"name": "single"})
    assert response.status_code == 201, response.text
    assert len(api.get("/sandboxes", params={"name": "single"}).json()) == 1


def test_a_name_is_accepted_with_a_count_of_one(api: httpx.Client, snapshot_id: str) -> None:
    forks = api.post("/snapshots/s1/fork", json={"name": "single", "count": 1}).json()
    assert [sandbox["name"] for sandbox in forks["sandboxes"]] == ["single"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a", "count": 2}, "'name' is for a single sandbox, but 'count' is 2: use 'names'"),
        ({"name": "a", "names": ["b", "c"]}, "omit 'name'"),
        ({"count": 3, "names": ["b", "c"]}, "'count' is 3, but there are 2 names"),
        ({"names": ["b", "b"]}, "use each name only once"),
    ],
)
def test_conflicting_names_for_forks_are_refused(
    api: httpx.Client, snapshot_id: str, body: dict[str, Any], words: str
) -> None:
    response = api.post("/snapshots/s1/fork", json=body)
    assert response.status_code == 400 and words in response.json()["message"]
    assert len(api.get("/sandboxes").json()) == 1


def test_deleting_a_snapshot_in_use_lists_its_users(api: httpx.Client, snapshot_id: str) -> None:
    fork_id = api.post("/snapshots/s1/fork").json()["sandboxID"]
    response = api.delete("/snapshots/s1")
    assert response.status_code == 409
    assert response.json()["kind"] == "in_use" and response.json()["blockers"] == [fork_id]
    details = response.json()["details"]
    assert details["resource"] == "snapshot" and details["overrides"] == ["when=unused"]
    assert [(user["kind"], user["id"]) for user in details["users"]] == [("sandbox", fork_id)]
    hidden_response = api.delete("/snapshots/s1?when=unused")
    assert hidden_response.status_code == 202
    assert hidden_response.json() == {"snapshotID": snapshot_id, "status": "hidden", "blockers": [fork_id]}
    assert api.get("/snapshots/s1").status_code == 404
    assert api.delete("/snapshots/s1?when=later").status_code == 400


def test_snapshots_can_be_deleted_as_templates(api: httpx.Client, snapshot_id: str) -> None:
    assert api.delete(f"/templates/{snapshot_id}").status_code == 204
    response = api.delete(f"/templates/{snapshot_id}")
    assert (
        response.status_code == 404
        and "template" in response.json()["message"]
        and snapshot_id in response.json()["message"]
    )


def test_a_snapshot_in_use_can_be_deleted_as_a_template(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot_id: str
) -> None:
    """E2B's and CubeSandbox's clients expect this deletion to succeed. Other deletions fail and name every user."""
    fork_ids = [api.post("/snapshots/s1/fork").json()["sandboxID"] for _ in range(2)]
    sandbox_id = api.get("/sandboxes/one").json()["sandboxID"]
    user_ids_by_route = {
        f"/snapshots/{snapshot_id}": fork_ids,
        f"/v1/snapshots/{snapshot_id}": fork_ids,
        "/templates/base": [sandbox_id],
    }
    for route, ids in user_ids_by_route.items():
        response = api.delete(route)
        assert response.status_code == 409 and all(id in response.text for id in ids), route
    response = api.delete(f"/templates/{snapshot_id}")
    assert response.status_code == 202 and {*response.json()["blockers"]} == {*fork_ids}
    assert api.get("/snapshots").json() == [] and api.delete(f"/templates/{snapshot_id}").status_code == 404
    assert api.post("/sandboxes/one/snapshots", json={"name": "s1"}).status_code == 201, "the name is free"
    for fork_id in fork_ids:
        assert snapshot_id in memory_gateway.engine.index.snapshots
        api.delete(f"/sandboxes/{fork_id}").raise_for_status()
    api.delete("/sandboxes/one").raise_for_status()
    wait_until(lambda: snapshot_id not in memory_gateway.engine.index.snapshots, 20)


def test_a_name_in_use_is_a_conflict(api: httpx.Client, snapshot_id: str) -> None:
    response = api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    assert response.status_code == 409
    assert response.json()["kind"] == "name_taken" and response.json()["blockers"] == [snapshot_id]


def test_the_lineage_contains_all_descendants(api: httpx.Client, snapshot_id: str) -> None:
    fork_id = api.post("/snapshots/s1/fork").json()["sandboxID"]
    (template,) = api.get("/lineage").json()
    sandbox = template["children"][0]
    assert "base" in template["names"] and sandbox["names"] == ["one"]
    assert sandbox["children"][0]["id"] == snapshot_id and sandbox["children"][0]["children"][0]["id"] == fork_id
    assert api.get("/lineage", params={"root": "s1"}).json()[0]["id"] == snapshot_id
    assert api.get("/lineage", params={"root": "nothing"}).status_code == 404
    nodes = api.get("/lineage", params={"flat": True, "root": "base"}).json()
    ids = [template["id"], sandbox["id"], snapshot_id, fork_id]
    expected_nodes = [(id, parent, depth) for depth, (id, parent) in enumerate(zip(ids, ["", *ids], strict=False))]
    assert [(node["id"], node["parent"], node["depth"]) for node in nodes] == expected_nodes
    assert api.get("/lineage", params={"flat": True, "root": "nothing"}).status_code == 404
