"""Groups of ids that are cheap to copy, because plan sessions copy the index."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class IdGroups:
    """Ids in named groups, in the order in which they were added. A group exists while it contains ids.

    A copy shares all groups with the original. Either of them copies a group before it changes it.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, None]] = {}
        self._unshared_groups: set[str] = set()
        """The groups that no copy shares."""

    def copy(self) -> IdGroups:
        copy = IdGroups()
        copy._groups = self._groups.copy()
        self._unshared_groups = set()
        return copy

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the groups."""
        return iter(self._groups)

    def __getitem__(self, group: str) -> Collection[str]:
        """Return the ids in a group, which may be empty."""
        return self._groups.get(group, {}).keys()

    def add(self, group: str, id: str) -> None:
        self._unshare(group)[id] = None

    def discard(self, group: str, id: str) -> None:
        ids = self._unshare(group)
        ids.pop(id, None)
        if not ids:
            del self._groups[group]

    def _unshare(self, group: str) -> dict[str, None]:
        if group not in self._unshared_groups:
            self._unshared_groups.add(group)
            self._groups[group] = self._groups.get(group, {}).copy()
        return self._groups.setdefault(group, {})
