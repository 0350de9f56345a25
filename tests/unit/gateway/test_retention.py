"""The snapshots that a retention rule removes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.retention import find_surplus
from sandbox_gateway.records import Retention, Snapshot

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


def taken(hours_ago: float, rule: Retention | None, source: str = "a" * 12) -> Snapshot:
    return Snapshot(source_sandbox=source, created_at=NOON - timedelta(hours=hours_ago), retention=rule)


def given_up(rule: Retention, *hours_ago: float) -> list[float]:
    snapshots = [taken(hours, rule) for hours in hours_ago]
    return sorted((NOON - each.created_at).total_seconds() / 3600 for each in find_surplus(snapshots, NOON))


def test_the_last_so_many_stay() -> None:
    assert given_up(Retention(keep_last=2), 1, 2, 3, 4) == [3, 4]
    assert given_up(Retention(keep_last=9), 1, 2, 3) == []


def test_the_newest_of_each_day_stays() -> None:
    assert given_up(Retention(keep_daily=2), 1, 2, 13, 20, 40) == [2, 20, 40]


def test_what_any_of_two_rules_wants_stays() -> None:
    assert given_up(Retention(keep_last=2, keep_daily=3), 1, 2, 3, 13, 14, 40) == [3, 14]


def test_what_is_too_old_goes_though_a_rule_wants_it() -> None:
    assert given_up(Retention(max_age=3 * 3600), 1, 2, 4) == [4]
    assert given_up(Retention(max_age=4 * 3600), 1, 2, 4) == [], "it is as old as it may be"
    assert given_up(Retention(keep_last=3, max_age=1.5 * 3600), 1, 2, 3, 4) == [2, 3, 4]


def test_the_newest_stays_however_old_it_is() -> None:
    assert given_up(Retention(max_age=1), 500, 600) == [600]


def test_what_was_taken_without_a_rule_stays() -> None:
    by_hand, ruled = taken(50, None), taken(1, Retention(keep_last=1))
    assert find_surplus([by_hand, ruled], NOON) == []


def test_the_newest_rule_is_that_of_all_and_each_sandbox_has_its_own() -> None:
    strict, lax = Retention(keep_last=1), Retention(keep_last=5)
    mine = [taken(3, strict), taken(2, strict), taken(1, lax)]
    theirs = [taken(5, lax, "b" * 12), taken(4, lax, "b" * 12), taken(3, strict, "b" * 12)]
    assert find_surplus(mine, NOON) == []
    assert find_surplus([*mine, *theirs], NOON) == theirs[:2]


rules = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 5),
    keep_daily=st.none() | st.integers(1, 5),
    max_age=st.none() | st.floats(1, 1e6),
)


@given(rules, st.lists(st.floats(0, 500), min_size=1, max_size=20))
def test_a_rule_applied_twice_gives_up_nothing_more_and_never_all(rule: Retention, hours: list[float]) -> None:
    snapshots = [taken(each, rule) for each in hours]
    gone = find_surplus(snapshots, NOON)
    left = [each for each in snapshots if each not in gone]
    assert left
    assert find_surplus(left, NOON) == []
