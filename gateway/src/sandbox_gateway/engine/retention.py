"""Find snapshots that a retention rule no longer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

from sandbox_gateway.engine.index import Index, sort_oldest_first
from sandbox_gateway.records import Snapshot


class Surplus:
    """The snapshots that no retention rule keeps. A rule is applied again only if its result may have changed."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._ids: dict[str, list[str]] = {}
        """The surplus of each series, oldest first."""
        self._next_changes: dict[str, datetime] = {}
        """When a snapshot of a series exceeds its maximum age."""

    def find(self, current_time: datetime) -> list[str]:
        """Return the ids of the snapshots that no rule keeps."""
        aged_series = {source for source, time in self._next_changes.items() if time <= current_time}
        for source in self._index.changed_series | aged_series:
            snapshots = self._index.list_grouped_snapshots(self._index.series[source])
            self._ids[source] = [each.id for each in find_surplus(snapshots, current_time)]
            if next_change := find_next_change(snapshots, current_time):
                self._next_changes[source] = next_change
            else:
                self._next_changes.pop(source, None)
            if not self._ids[source]:
                del self._ids[source]
        self._index.changed_series.clear()
        return [id for ids in self._ids.values() for id in ids]


def find_surplus(snapshots: Iterable[Snapshot], current_time: datetime) -> list[Snapshot]:
    """Return the snapshots that no rule keeps, oldest first.

    All snapshots of a sandbox that were taken with a retention rule form one series, to which the rule of the newest
    snapshot applies. Snapshots without a rule are not part of the series.
    """
    series: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        if snapshot.retention is not None:
            series.setdefault(snapshot.source_sandbox, []).append(snapshot)
    surplus = [each for members in series.values() for each in _find_series_surplus(members, current_time)]
    return sorted(surplus, key=lambda each: each.created_at)


def find_next_change(snapshots: Sequence[Snapshot], current_time: datetime) -> datetime | None:
    """Return the next time at which a snapshot exceeds its maximum age, or None if there is none.

    Until then, the result of ``find_surplus`` changes only if the snapshots change.
    """
    newest_by_source: dict[str, Snapshot] = {}
    for snapshot in snapshots:
        if snapshot.retention is not None:
            newest_so_far = newest_by_source.setdefault(snapshot.source_sandbox, snapshot)
            newest_by_source[snapshot.source_sandbox] = max(
                newest_so_far, snapshot, key=lambda each: (each.created_at, each.id)
            )
    max_ages = {
        source: timedelta(seconds=each.retention.max_age)
        for source, each in newest_by_source.items()
        if each.retention is not None and each.retention.max_age is not None
    }
    expiry_times = (
        snapshot.created_at + max_ages[snapshot.source_sandbox]
        for snapshot in snapshots
        if snapshot.retention is not None and snapshot.source_sandbox in max_ages
    )
    return min((time for time in expiry_times if time >= current_time), default=None)


def _find_series_surplus(members: list[Snapshot], current_time: datetime) -> list[Snapshot]:
    snapshots_newest_first = sort_oldest_first(members)[::-1]
    newest_snapshot = snapshots_newest_first[0]
    rule = newest_snapshot.retention
    assert rule is not None
    kept_ids = {newest_snapshot.id}
    if rule.keep_last is None and rule.keep_daily is None:
        kept_ids |= {each.id for each in members}
    kept_ids |= {each.id for each in snapshots_newest_first[: rule.keep_last or 0]}
    days: dict[date, str] = {}
    for each in snapshots_newest_first:
        days.setdefault(each.created_at.date(), each.id)
    kept_ids |= set(list(days.values())[: rule.keep_daily or 0])
    if rule.max_age is not None:
        old_ids = {each.id for each in members if (current_time - each.created_at).total_seconds() > rule.max_age}
        kept_ids -= old_ids - {newest_snapshot.id}
    return [each for each in members if each.id not in kept_ids]
