"""Test that the comparison of plans and runs finds differences, and accepts unknown values only where it may."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.plan_comparison import Counts, PlanComparison
from tests.collection.plays import PlayChecks

OPENED_AT, EARLIER_TIME, LATER_TIME = "2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z", "2026-01-02T00:00:01Z"
PLANNED_ID, OTHER_PLANNED_ID, REAL_ID, OTHER_REAL_ID = (
    "known-after-apply-0001",
    "known-after-apply-0002",
    "a" * 12,
    "b" * 12,
)


def make_result(**fields: Any) -> dict[str, Any]:
    return {"changed": True, "outcomes": [], "sandboxes": [fields]}


@pytest.fixture
def comparison() -> PlanComparison:
    return PlanComparison(OPENED_AT, Counts(), Counts())


@pytest.mark.parametrize(
    ("planned_fields", "actual_fields"),
    [
        ({"id": PLANNED_ID, "parent": PLANNED_ID}, {"id": REAL_ID, "parent": REAL_ID}),
        ({"message": f"sandbox {PLANNED_ID} is in use"}, {"message": f"sandbox {REAL_ID} is in use"}),
        ({PLANNED_ID: 1}, {REAL_ID: 1}),
        ({"id": REAL_ID}, {"id": REAL_ID}),
        ({"address": None, "started_at": None}, {"address": "10.0.0.1", "started_at": LATER_TIME}),
        ({"state": "running", "diverged": None}, {"state": "running", "diverged": True}),
        ({"timeout": 3600}, {"timeout": 3599}),
    ],
)
def test_equal_and_unknown_values_are_accepted(
    comparison: PlanComparison, planned_fields: dict[str, Any], actual_fields: dict[str, Any]
) -> None:
    comparison.check_result(make_result(**planned_fields), make_result(**actual_fields), "task")


@pytest.mark.parametrize(
    ("planned_fields", "actual_fields"),
    [
        ({"id": PLANNED_ID, "parent": PLANNED_ID}, {"id": REAL_ID, "parent": OTHER_REAL_ID}),
        ({"id": PLANNED_ID, "parent": OTHER_PLANNED_ID}, {"id": REAL_ID, "parent": REAL_ID}),
        ({"id": REAL_ID, "parent": PLANNED_ID}, {"id": REAL_ID, "parent": REAL_ID}),
        ({"id": PLANNED_ID}, {"id": ""}),
        ({"message": f"sandbox {PLANNED_ID} is in use"}, {"message": f"sandbox {REAL_ID} is gone"}),
        ({PLANNED_ID: 1, "id": PLANNED_ID}, {REAL_ID: 1, "id": OTHER_REAL_ID}),
        ({"id": REAL_ID}, {"id": OTHER_REAL_ID}),
        ({"name": None}, {"name": "box"}),
        ({"cpus": 1}, {"cpus": 2}),
        ({"cpus": 1}, {}),
        ({}, {"cpus": 1}),
        ({"used_mb": 1}, {"used_mb": 2}),
        ({"state": "paused", "diverged": None}, {"state": "paused", "diverged": True}),
        ({"state": "running", "diverged": False}, {"state": "running", "diverged": True}),
        ({"started_at": EARLIER_TIME}, {"started_at": LATER_TIME}),
        ({"timeout": 3600}, {"timeout": 7200}),
    ],
)
def test_differences_are_found(
    comparison: PlanComparison, planned_fields: dict[str, Any], actual_fields: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError):
        comparison.check_result(make_result(**planned_fields), make_result(**actual_fields), "task")


def test_all_checks_of_a_play_use_the_same_ids(comparison: PlanComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.collection.plan_comparison._SETTLE_TIMEOUT_SECONDS", 0)
    comparison.check_result(make_result(id=PLANNED_ID), make_result(id=REAL_ID), "task")
    comparison.check_state(lambda: make_state(PLANNED_ID, "full"), lambda: make_state(REAL_ID, "incremental"))
    for actual_state in (make_state(OTHER_REAL_ID, "full"), make_state(REAL_ID, "none"), {"snapshots": []}):
        with pytest.raises(AssertionError):
            comparison.check_state(
                lambda: make_state(PLANNED_ID, "full"), lambda actual_state=actual_state: actual_state
            )


def test_values_are_counted_by_key() -> None:
    results, states = Counts(), Counts()
    comparison = PlanComparison(OPENED_AT, results, states)
    comparison.check_result(
        make_result(id=PLANNED_ID, cpus=1, address=None), make_result(id=REAL_ID, cpus=1, address="x"), "task"
    )
    comparison.check_state(lambda: make_state(PLANNED_ID, "full"), lambda: make_state(REAL_ID, "incremental"))
    assert dict(results.unknown) == {"ids": 1, "address": 1}
    assert results.known["cpus"] == 1 and results.unknown_share == pytest.approx(2 / (2 + results.known.total()))
    assert dict(states.unknown) == {"ids": 1, "memory": 1}


EXISTING_SANDBOX = {"sandboxID": REAL_ID, "createdAt": EARLIER_TIME, "startedAt": EARLIER_TIME, "address": "10.0.0.1"}
EXISTING_SNAPSHOT = {
    "snapshotID": REAL_ID,
    "createdAt": EARLIER_TIME,
    "memory": "full",
    "pauseMs": 5,
    "prewarm": {"target": 1, "ready": 0},
}
NEW_SNAPSHOT = {**EXISTING_SNAPSHOT, "snapshotID": PLANNED_ID, "createdAt": LATER_TIME}
VOLUME = {"name": "data", "createdAt": EARLIER_TIME, "usedMB": 1, "dataset": "pool/data"}


@pytest.mark.parametrize(
    ("planned", "changes"),
    [
        (EXISTING_SNAPSHOT, {"prewarm": {"target": 1, "ready": 1}}),
        (
            NEW_SNAPSHOT,
            {"snapshotID": REAL_ID, "memory": "incremental", "pauseMs": 6, "prewarm": {"target": 1, "ready": 1}},
        ),
        ({**EXISTING_SANDBOX, "startedAt": LATER_TIME}, {"address": "10.0.0.2"}),
        ({**VOLUME, "createdAt": LATER_TIME}, {"usedMB": 2, "dataset": "pool/other"}),
    ],
)
def test_values_of_new_objects_may_differ_from_the_session(
    comparison: PlanComparison, planned: dict[str, Any], changes: dict[str, Any]
) -> None:
    comparison.check_state(lambda: {"objects": [planned]}, lambda: {"objects": [{**planned, **changes}]})


@pytest.mark.parametrize(
    ("planned", "changes"),
    [
        (EXISTING_SNAPSHOT, {"memory": "incremental"}),
        (EXISTING_SNAPSHOT, {"pauseMs": 6}),
        (
            {**NEW_SNAPSHOT, "prewarm": {"target": 0, "ready": 0}},
            {"snapshotID": REAL_ID, "prewarm": {"target": 0, "ready": 1}},
        ),
        (NEW_SNAPSHOT, {"snapshotID": REAL_ID, "memory": "none"}),
        ({**NEW_SNAPSHOT, "memory": "none"}, {"snapshotID": REAL_ID, "memory": "full"}),
        (EXISTING_SANDBOX, {"address": "10.0.0.2"}),
        ({**EXISTING_SANDBOX, "startedAt": LATER_TIME, "usedMB": 1}, {"usedMB": 2}),
        (VOLUME, {"usedMB": 2}),
        (VOLUME, {"dataset": "pool/other"}),
    ],
)
def test_known_values_must_match_the_session(
    comparison: PlanComparison,
    monkeypatch: pytest.MonkeyPatch,
    planned: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr("tests.collection.plan_comparison._SETTLE_TIMEOUT_SECONDS", 0)
    with pytest.raises(AssertionError):
        comparison.check_state(lambda: {"objects": [planned]}, lambda: {"objects": [{**planned, **changes}]})


@pytest.mark.parametrize(
    ("partial_count", "play_count", "is_enough"),
    [(0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False), (2, 3, True), (3, 20, False), (5, 100, True)],
)
def test_few_plays_may_be_compared_only_in_part(partial_count: int, play_count: int, is_enough: bool) -> None:
    checks = PlayChecks()
    checks.partial_count, checks.play_count = partial_count, play_count
    if is_enough:
        checks.check_shares()
    else:
        with pytest.raises(AssertionError, match=f"{partial_count} in part"):
            checks.check_shares()


def make_state(id: str, memory: str) -> dict[str, list[dict[str, Any]]]:
    return {"snapshots": [{"snapshotID": id, "names": ["s"], "memory": memory, "generation": 1}]}
