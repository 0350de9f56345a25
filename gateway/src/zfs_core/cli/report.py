"""Collect the changes of a command, and make them unless `lzc` runs in check mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zfs_core.cli.failures import Kind, describe
from zfs_core.exceptions import DatasetNotFound, ZFSError
from zfs_core.listing import find_types, lzc_exists
from zfs_core.properties import get_props


@dataclass
class Report:
    """The result of a command.

    ``check``: whether changes are only predicted. ``assumed_names``: names that the prediction assumes to exist.
    """

    check: bool = False
    assumed_names: frozenset[str] = frozenset()
    changes: list[dict[str, object]] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    results: dict[str, object] = field(default_factory=dict)

    def exists(self, name: str) -> bool:
        return name in self.assumed_names or lzc_exists(name)

    def find(self, names: Iterable[str]) -> set[str]:
        """Return the names that exist."""
        wanted_names = set(names)
        return (wanted_names & self.assumed_names) | find_types(wanted_names - self.assumed_names).keys()

    def change(self, action: str, name: str, function: Callable[[], object], **details: object) -> None:
        """Make a change and record it. In check mode, only record it."""
        self.change_all(action, [name], function, **details)

    def change_all(self, action: str, names: Iterable[str], function: Callable[[], object], **details: object) -> None:
        """Make one change that affects several names, and record it for each."""
        self.apply_changes_together([{"action": action, "name": name, **details} for name in names], function)

    def apply_changes_together(self, changes: list[dict[str, object]], function: Callable[[], object]) -> None:
        """Make several changes with one function, and record them. If it fails, record the changes that were made."""
        if not self.check:
            try:
                function()
            except Exception as error:
                self.changes += _find_made_changes(changes, error)
                raise
        self.changes += changes

    def keep(self, *names: str) -> None:
        """Record that names are already in the desired state."""
        self.unchanged += names

    def as_json(self) -> dict[str, object]:
        result: dict[str, object] = {"changed": bool(self.changes)}
        if self.check:
            result["check"] = True
        if self.changes or self.unchanged:
            result |= {"changes": self.changes, "unchanged": self.unchanged}
        return result | self.results


_CREATING_ACTIONS = frozenset(("bookmark", "clone", "create", "receive", "rename", "snapshot"))


def _find_made_changes(changes: list[dict[str, object]], error: Exception) -> list[dict[str, object]]:
    """Return the changes that were made although the function that makes them raised ``error``.

    Detects only changes that create names, destroy them, or mark them to be destroyed.
    """
    # A name that the function found to exist was created by someone else.
    is_conflict = isinstance(error, ZFSError) and describe(error).kind is Kind.EXISTS
    try:
        found_names = find_types(str(change["name"]) for change in changes)
        marked_names = _find_marked_snapshots(
            str(change["name"]) for change in changes if change["action"] == "defer" and change["name"] in found_names
        )
    except ZFSError:
        return []
    return [
        change
        for change in changes
        if (change["action"] in ("destroy", "defer") and change["name"] not in found_names)
        or (change["action"] == "defer" and change["name"] in marked_names)
        or (change["action"] in _CREATING_ACTIONS and change["name"] in found_names and not is_conflict)
    ]


def _find_marked_snapshots(names: Iterable[str]) -> set[str]:
    """Return the snapshots that ZFS destroys when their last hold and clone are gone."""
    marked_names: set[str] = set()
    for name in names:
        # Its last hold or clone may go at any time, and the snapshot with it.
        with contextlib.suppress(DatasetNotFound):
            if get_props([name], ["defer_destroy"])[name]["defer_destroy"].is_on:
                marked_names.add(name)
    return marked_names
