"""Full names of the snapshots of sandboxes and templates, by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sandbox_gateway import zfs
from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset

R = TypeVar("R")


class SnapshotPlaces:
    """The names of snapshots. A snapshot's full name changes when the dataset of its sandbox is retired."""

    def __init__(self, root: RootDataset) -> None:
        self._root = root
        self._places: dict[str, str] = {}

    def load(self, places: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._places = dict(places)

    def add(self, snapshot_id: str, name: str) -> None:
        with self._root.index_lock:
            self._places[snapshot_id] = name

    def drop(self, snapshot_id: str) -> None:
        with self._root.index_lock:
            self._places.pop(snapshot_id, None)

    def move(self, old: str, new: str) -> None:
        """Record that the dataset ``old`` was renamed to ``new``."""
        with self._root.index_lock:
            for snapshot_id, place in self._places.items():
                if place.startswith(f"{old}@"):
                    self._places[snapshot_id] = new + place.removeprefix(old)

    def find(self, snapshot_id: str) -> str:
        """Return the current ``dataset@snapshot``. Raises NotFound."""
        with self._root.index_lock:
            try:
                return self._places[snapshot_id]
            except KeyError:
                raise NotFound("snapshot", snapshot_id) from None

    def use(self, snapshot_id: str, action: Callable[[str], R]) -> R:
        """Call ``action`` with the snapshot's full name, and again if it was renamed meanwhile. Raises NotFound."""
        while True:
            place = self.find(snapshot_id)
            try:
                return action(place)
            except zfs.exceptions.DatasetNotFound:
                with self._root.tree_lock, self._root.index_lock:
                    if self._places.get(snapshot_id) != place:
                        continue
                    if zfs.lzc_exists(place):
                        raise
                    del self._places[snapshot_id]
                    raise NotFound("snapshot", snapshot_id) from None
