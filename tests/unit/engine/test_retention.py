"""Test which snapshots a retention rule removes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.retention import Surplus, find_next_change, find_surplus
from sandbox_gateway.records import Retention, Snapshot

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


def make_snapshot(hours_ago: float, rule: Retention | None, source: str = "a" * 12) -> Snapshot:
    return Snapshot(source_sandbox=source, created_at=NOON - timedelta(hours=hours_ago), retention=rule)


def find_removed_ages(rule: Retention, *hours_ago: float) -> list[float]:
    snapshots = [make_snapshot(hours, rule) for hours in hours_ago]
    return sorted((NOON - each.created_at).total_seconds() / 3600 for each in find_surplus(snapshots, NOON))


def test_keep_last_keeps_the_newest() -> None:
    assert find_removed_ages(Retention(keep_last=2), 1, 2, 3, 4) == [3, 4]
    assert find_removed_ages(Retention(keep_last=9), 1, 2, 3) == []


def test_keep_daily_keeps_the_newest_of_each_day() -> None:
    assert find_removed_ages(Retention(keep_daily=2), 1, 2, 13, 20, 40) == [2, 20, 40]


def test_a_snapshot_that_either_rule_keeps_is_kept() -> None:
    assert find_removed_ages(Retention(keep_last=2, keep_daily=3), 1, 2, 3, 13, 14, 40) == [3, 14]


def test_max_age_removes_snapshots_that_other_rules_keep() -> None:
    assert find_removed_ages(Retention(max_age=3 * 3600), 1, 2, 4) == [4]
    assert find_removed_ages(Retention(max_age=4 * 3600), 1, 2, 4) == [], "its age equals the limit"
    assert find_removed_ages(Retention(keep_last=3, max_age=1.5 * 3600), 1, 2, 3, 4) == [2, 3, 4]


def test_the_newest_snapshot_is_never_removed() -> None:
    assert find_removed_ages(Retention(max_age=1), 500, 600) == [600]


def test_snapshots_without_a_rule_are_kept() -> None:
    snapshot_without_rule, snapshot_with_rule = make_snapshot(50, None), make_snapshot(1, Retention(keep_last=1))
    assert find_surplus([snapshot_without_rule, snapshot_with_rule], NOON) == []


def test_the_newest_rule_applies_for_each_sandbox() -> None:
    strict_rule, lax_rule = Retention(keep_last=1), Retention(keep_last=5)
    first_series = [make_snapshot(3, strict_rule), make_snapshot(2, strict_rule), make_snapshot(1, lax_rule)]
    second_series = [
        make_snapshot(5, lax_rule, "b" * 12),
        make_snapshot(4, lax_rule, "b" * 12),
        make_snapshot(3, strict_rule, "b" * 12),
    ]
    assert find_surplus(first_series, NOON) == []
    assert find_surplus([*first_series, *second_series], NOON) == second_series[:2]


rules = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 5),
    keep_daily=st.none() | st.integers(1, 5),
    max_age=st.none() | st.floats(1, 1e6),
)


@given(rules, st.lists(st.floats(0, 500), min_size=1, max_size=20))
def test_rules_are_idempotent_and_never_remove_everything(rule: Retention, hours: list[float]) -> None:
    snapshots = [make_snapshot(each, rule) for each in hours]
    surplus_snapshots = find_surplus(snapshots, NOON)
    remaining_snapshots = [each for each in snapshots if each not in surplus_snapshots]
    assert remaining_snapshots
    assert find_surplus(remaining_snapshots, NOON) == []


@given(
    ages=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    max_age=st.integers(1, 100),
    hours_later=st.integers(0, 120),
)
def test_the_surplus_stays_the_same_until_the_next_change(ages: list[int], max_age: int, hours_later: int) -> None:
    rule = Retention(max_age=max_age * 3600)
    snapshots = [make_snapshot(hours, rule, source) for hours in ages for source in ("a" * 12, "b" * 12)]
    next_change, later_time = find_next_change(snapshots, NOON), NOON + timedelta(hours=hours_later)
    if next_change is None or later_time < next_change:
        assert find_surplus(snapshots, later_time) == find_surplus(snapshots, NOON)


def test_the_next_change_is_the_earliest_end_of_a_maximum_age() -> None:
    rule = Retention(max_age=3 * 3600)
    snapshots = [make_snapshot(hours, rule) for hours in (5, 2, 1)]
    assert find_next_change(snapshots, NOON) == NOON + timedelta(hours=1)
    snapshots_without_max_age = [make_snapshot(5, None), make_snapshot(1, Retention(keep_last=1), "b" * 12)]
    assert find_next_change(snapshots_without_max_age, NOON) is None


def test_rules_are_applied_again_when_a_series_changes_or_a_snapshot_is_too_old() -> None:
    index = Index()
    surplus = Surplus(index)
    first_snapshot, second_snapshot = (make_snapshot(hours, Retention(max_age=3 * 3600)) for hours in (2, 1))
    other_snapshot = make_snapshot(1, Retention(keep_last=1), "b" * 12)
    for snapshot in (first_snapshot, second_snapshot, other_snapshot):
        index.put(snapshot)
    assert surplus.find(NOON) == []
    index.put(make_snapshot(0, Retention(keep_last=1), "b" * 12))
    assert surplus.find(NOON) == [other_snapshot.id]
    assert surplus.find(NOON + timedelta(hours=1.5)) == [other_snapshot.id, first_snapshot.id]
    index.remove(other_snapshot.id)
    index.remove(first_snapshot.id)
    assert surplus.find(NOON + timedelta(hours=1.5)) == []
    assert surplus.find(NOON + timedelta(days=1)) == [], "the newest snapshot is kept"
