"""Routes of snapshots and the lineage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.test_sandboxes import create_sandbox
from tests.support.waiting import eventually


@pytest.fixture
def taken(api: httpx.Client) -> str:
    """A snapshot named s1 of a sandbox named one; returns its id."""
    create_sandbox(api, name="one")
    snapshot: str = api.post("/sandboxes/one/snapshots", json={"name": "s1"}).json()["snapshotID"]
    return snapshot


def test_one_fork_returns_a_sandbox_and_several_a_list(api: httpx.Client, taken: str) -> None:
    one = api.post(f"/snapshots/{taken}/fork", json={})
    assert one.status_code == 201 and one.json()["forkedFrom"] == taken
    assert one.json()["parentSandboxID"] == api.get("/sandboxes/one").json()["sandboxID"]
    many = api.post("/snapshots/s1/fork", json={"count": 3, "metadata": {"g": "1"}, "concurrency": 2}).json()
    assert len(many["sandboxes"]) == 3 and many["errors"] == []
    assert len(api.get("/sandboxes?metadata=g%3D1").json()) == 3
    assert api.get("/snapshots/s1").json()["forks"] == 4


def test_forks_of_another_size(api: httpx.Client, taken: str) -> None:
    refused = api.post("/snapshots/s1/fork", json={"memoryMB": 512})
    assert refused.status_code == 400 and refused.json()["kind"] == "unsupported"
    cold = api.post("/snapshots/s1/fork", json={"memoryMB": 512, "coldStart": True})
    assert cold.status_code == 201 and cold.json()["memoryMB"] == 512


def test_a_snapshot_with_a_retention_rule_removes_older_ones(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for name in ("old", "new"):
        taken = api.post("/sandboxes/one/snapshots", json={"name": name, "retention": {"keepLast": 1}})
        assert taken.json()["retention"] == {"keepLast": 1, "keepDaily": None, "maxAge": None}
    eventually(lambda: api.get("/snapshots/old").status_code == 404, 20)
    assert api.get("/snapshots/new").status_code == 200


@pytest.mark.parametrize("rule", [{}, {"keepLast": 0}, {"keepDaily": -1}, {"maxAge": 0}])
def test_an_invalid_retention_rule_is_refused(api: httpx.Client, rule: dict[str, int]) -> None:
    create_sandbox(api, name="one")
    refused = api.post("/sandboxes/one/snapshots", json={"retention": rule})
    assert refused.status_code == 400 and "retention" in refused.json()["message"]


def test_a_sandbox_can_be_created_from_a_snapshot(api: httpx.Client, taken: str) -> None:
    assert api.post("/sandboxes", json={"templateID": "s1"}).json()["forkedFrom"] == taken


def test_list_filters(api: httpx.Client, taken: str) -> None:
    def ids(**params: str) -> list[str]:
        return [item["snapshotID"] for item in api.get("/snapshots", params=params).json()]

    sandbox = api.get("/sandboxes/one").json()
    assert ids() == [taken], "templates are not in the list"
    assert ids(sandboxID="one") == ids(sandboxID=sandbox["sandboxID"]) == ids(name="s1") == [taken]
    assert ids(templateID="base") == ids(templateID=sandbox["templateID"]) == [taken]
    assert ids(sandboxID="other") == ids(name="other") == ids(templateID="other") == []
    assert api.get("/snapshots/base").json()["kind"] == "template"


@pytest.mark.parametrize(
    "route", ["/snapshots/s1/fork", "/snapshots/base/fork", "/sandboxes/one/clone", "/sandboxes/one/fork"]
)
def test_a_single_fork_takes_a_name(api: httpx.Client, taken: str, route: str) -> None:
    answer = api.post(route, json={"name": "single"})
    assert answer.status_code == 201, answer.text
    assert len(api.get("/sandboxes", params={"name": "single"}).json()) == 1


def test_a_count_of_one_keeps_the_name(api: httpx.Client, taken: str) -> None:
    made = api.post("/snapshots/s1/fork", json={"name": "single", "count": 1}).json()
    assert [sandbox["name"] for sandbox in made["sandboxes"]] == ["single"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a", "count": 2}, "name is for a single sandbox, but count is 2: use names"),
        ({"name": "a", "names": ["b", "c"]}, "leave name out"),
        ({"count": 3, "names": ["b", "c"]}, "count is 3, but there are 2 names"),
        ({"names": ["b", "b"]}, "each name can be used only once"),
    ],
)
def test_conflicting_names_for_forks(api: httpx.Client, taken: str, body: dict[str, Any], words: str) -> None:
    answer = api.post("/snapshots/s1/fork", json=body)
    assert answer.status_code == 400 and words in answer.json()["message"]
    assert len(api.get("/sandboxes").json()) == 1


def test_delete_names_every_blocker(api: httpx.Client, taken: str) -> None:
    fork = api.post("/snapshots/s1/fork").json()["sandboxID"]
    refused = api.delete("/snapshots/s1")
    assert refused.status_code == 409
    assert refused.json()["kind"] == "in_use" and refused.json()["blockers"] == [fork]
    details = refused.json()["details"]
    assert details["resource"] == "snapshot" and details["overrides"] == ["when=unused"]
    assert [(user["kind"], user["id"]) for user in details["users"]] == [("sandbox", fork)]
    hidden = api.delete("/snapshots/s1?when=unused")
    assert hidden.status_code == 202
    assert hidden.json() == {"snapshotID": taken, "status": "hidden", "blockers": [fork]}
    assert api.get("/snapshots/s1").status_code == 404
    assert api.delete("/snapshots/s1?when=later").status_code == 400


def test_snapshots_can_be_deleted_as_templates(api: httpx.Client, taken: str) -> None:
    assert api.delete(f"/templates/{taken}").status_code == 204
    missing = api.delete(f"/templates/{taken}")
    assert missing.status_code == 404 and "template" in missing.json()["message"] and taken in missing.json()["message"]


def test_a_taken_name_is_a_conflict(api: httpx.Client, taken: str) -> None:
    answer = api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    assert answer.status_code == 409
    assert answer.json()["kind"] == "name_taken" and answer.json()["blockers"] == [taken]


def test_lineage(api: httpx.Client, taken: str) -> None:
    fork = api.post("/snapshots/s1/fork").json()["sandboxID"]
    (template,) = api.get("/lineage").json()
    sandbox = template["children"][0]
    assert "base" in template["names"] and sandbox["names"] == ["one"]
    assert sandbox["children"][0]["id"] == taken and sandbox["children"][0]["children"][0]["id"] == fork
    assert api.get("/lineage", params={"root": "s1"}).json()[0]["id"] == taken
    assert api.get("/lineage", params={"root": "nothing"}).status_code == 404
