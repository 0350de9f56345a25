"""Test the prewarm routes with an in-memory host."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.waiting import wait_until


@pytest.fixture
def snapshot_name(api: httpx.Client, sandbox: dict[str, Any]) -> str:
    """The name of a snapshot of the sandbox."""
    response = api.post(f"/sandboxes/{sandbox['sandboxID']}/snapshots", json={"name": "mark"})
    assert response.status_code == 201, response.text
    assert response.json()["prewarm"] == {"target": 0, "ready": 0}
    return "mark"


def wait_until_ready(api: httpx.Client, ref: str, count: int) -> None:
    wait_until(lambda: api.get(f"/snapshots/{ref}").json()["prewarm"]["ready"] == count)


def test_forks_are_kept_ready_and_claimed(api: httpx.Client, snapshot_name: str) -> None:
    response = api.post(f"/snapshots/{snapshot_name}/prewarm", json={"count": 2})
    assert (response.status_code, response.json()["target"]) == (200, 2)
    wait_until_ready(api, snapshot_name, 2)
    metrics = api.get("/metrics").text
    assert 'sandbox_gateway_prewarmed_forks{state="ready"} 2.0' in metrics
    claim_count_before = _count_claims(metrics)
    assert api.post(f"/snapshots/{snapshot_name}/fork", json={"name": "claimed"}).status_code == 201
    assert _count_claims(api.get("/metrics").text) == claim_count_before + 1
    wait_until_ready(api, snapshot_name, 2)
    assert [each["name"] for each in api.get("/sandboxes").json()] == ["one", "claimed"], "a fork is not a sandbox yet"
    assert api.post(f"/snapshots/{snapshot_name}/prewarm", json={"count": 0}).json()["target"] == 0
    wait_until_ready(api, snapshot_name, 0)


def _count_claims(metrics: str) -> float:
    (line,) = (
        line for line in metrics.splitlines() if line.startswith('sandbox_gateway_starts_total{how="prewarmed"} ')
    )
    return float(line.split()[1])


def test_a_capture_can_request_prewarmed_forks(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    route = f"/sandboxes/{sandbox['sandboxID']}/snapshots"
    assert api.post(route, json={"name": "warm", "prewarm": 1}).json()["prewarm"]["target"] == 1
    wait_until_ready(api, "warm", 1)
    refusal = api.post(route, json={"name": "cold", "prewarm": 1, "memory": "none"})
    assert (refusal.status_code, refusal.json()["kind"]) == (400, "unsupported"), refusal.text
    assert [each["names"] for each in api.get("/snapshots").json()] == [["warm"]]
    api.post("/snapshots/warm/prewarm", json={"count": 0})
    wait_until_ready(api, "warm", 0)


def test_a_template_shows_its_ready_forks(api: httpx.Client) -> None:
    api.post("/snapshots/base/prewarm", json={"count": 1})
    wait_until(lambda: api.get("/templates/base").json()["prewarm"] == {"target": 1, "ready": 1})
    api.post("/snapshots/base/prewarm", json={"count": 0})
    wait_until(lambda: api.get("/templates/base").json()["prewarm"] == {"target": 0, "ready": 0})


@pytest.mark.parametrize("body", [{}, {"count": -1}, {"count": "2"}, {"count": 65}, {"count": True}, {"count": 1.5}])
def test_an_invalid_count_is_refused(api: httpx.Client, snapshot_name: str, body: dict[str, Any]) -> None:
    response = api.post(f"/snapshots/{snapshot_name}/prewarm", json=body)
    assert (response.status_code, response.json()["kind"]) == (400, "invalid"), response.text


def test_a_missing_snapshot_is_not_found(api: httpx.Client) -> None:
    assert api.post("/snapshots/none/prewarm", json={"count": 1}).status_code == 404


def test_a_build_can_request_prewarmed_forks(api: httpx.Client) -> None:
    build_response = api.post("/templates", json={"name": "warm", "setup": ["touch /warm"], "prewarm": 1})
    assert build_response.status_code == 202, build_response.text
    wait_until(lambda: api.get("/templates/warm").json().get("prewarm") == {"target": 1, "ready": 1})
    assert "prewarm" not in api.get("/templates/warm").json()["recipe"]
    recipe = {"name": "warm", "setup": ["touch /warm"]}
    assert api.post("/templates", json=recipe).status_code == 200
    assert api.get("/templates/warm").json()["prewarm"]["target"] == 1, "an absent count changes nothing"
    assert api.post("/templates", json={**recipe, "prewarm": 0}).status_code == 200
    wait_until(lambda: api.get("/templates/warm").json()["prewarm"] == {"target": 0, "ready": 0})
    api.delete("/templates/warm")


def test_a_build_with_an_excessive_count_is_refused_up_front(api: httpx.Client) -> None:
    response = api.post("/templates", json={"name": "many", "prewarm": 65})
    assert response.status_code == 400 and "prewarm.maximum" in response.json()["message"]
    assert api.get("/templates/many").status_code == 404


def test_metrics_count_how_machines_were_started(api: httpx.Client, snapshot_name: str) -> None:
    def count_starts() -> dict[str, float]:
        lines = [line for line in api.get("/metrics").text.splitlines() if line.startswith("sandbox_gateway_starts_")]
        return {
            start_kind: float(line.split()[1])
            for line in lines
            for start_kind in ("prewarmed", "memory", "boot")
            if start_kind in line
        }

    start_counts_before = count_starts()
    api.post(f"/snapshots/{snapshot_name}/fork", json={})
    api.post(f"/snapshots/{snapshot_name}/fork", json={"coldStart": True})
    api.post(f"/snapshots/{snapshot_name}/prewarm", json={"count": 1})
    wait_until_ready(api, snapshot_name, 1)
    api.post(f"/snapshots/{snapshot_name}/fork", json={})
    api.post(f"/snapshots/{snapshot_name}/prewarm", json={"count": 0})
    wait_until_ready(api, snapshot_name, 0)
    assert {start_kind: count - start_counts_before[start_kind] for start_kind, count in count_starts().items()} == {
        "prewarmed": 1,
        "memory": 1,
        "boot": 1,
    }
