"""The creation order of objects, kept sorted so that a listing can start at any object without sorting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from datetime import datetime

Key = tuple[datetime, str]
"""The creation time and the id. All lists are sorted by this key."""


class CreationOrder:
    """The keys of objects, oldest first. Adding the newest key does not move the other keys."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = sorted(keys)

    def copy(self) -> CreationOrder:
        copy = CreationOrder()
        copy._keys = self._keys.copy()
        return copy

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key) -> None:
        insort(self._keys, key)

    def discard(self, key: Key) -> None:
        position = bisect_left(self._keys, key)
        if position < len(self._keys) and self._keys[position] == key:
            del self._keys[position]

    def walk(self, after: Key | None = None, *, backwards: bool = False) -> Iterator[Key]:
        """Yield the keys from oldest to newest, or the reverse if ``backwards``, starting after the key ``after``.

        The order must not change before the iterator is exhausted.
        """
        if backwards:
            end = len(self._keys) if after is None else bisect_left(self._keys, after)
            positions = range(end - 1, -1, -1)
        else:
            start = 0 if after is None else bisect_right(self._keys, after)
            positions = range(start, len(self._keys))
        return (self._keys[position] for position in positions)
