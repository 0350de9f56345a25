"""Find the full names of the snapshots of sandboxes and templates, by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sandbox_gateway import zfs
from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset

R = TypeVar("R")


class SnapshotNames:
    """The names of snapshots. A snapshot's full name changes when the dataset of its sandbox is retired."""

    def __init__(self, root: RootDataset) -> None:
        self._root = root
        self._names: dict[str, str] = {}

    def load(self, names: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._names = dict(names)

    def add(self, snapshot_id: str, name: str) -> None:
        with self._root.index_lock:
            self._names[snapshot_id] = name

    def remove(self, snapshot_id: str) -> None:
        with self._root.index_lock:
            self._names.pop(snapshot_id, None)

    def move(self, old: str, new: str) -> None:
        """Record that the dataset ``old`` was renamed to ``new``."""
        with self._root.index_lock:
            for snapshot_id, name in self._names.items():
                if name.startswith(f"{old}@"):
                    self._names[snapshot_id] = new + name.removeprefix(old)

    def find(self, snapshot_id: str) -> str:
        """Return the current ``dataset@snapshot``. Raises NotFound."""
        with self._root.index_lock:
            try:
                return self._names[snapshot_id]
            except KeyError:
                raise NotFound("snapshot", snapshot_id) from None

    def use(self, snapshot_id: str, action: Callable[[str], R]) -> R:
        """Call ``action`` with the snapshot's full name, and again if it was renamed meanwhile. Raises NotFound."""
        while True:
            name = self.find(snapshot_id)
            try:
                return action(name)
            except zfs.exceptions.DatasetNotFound:
                with self._root.tree_lock, self._root.index_lock:
                    if self._names.get(snapshot_id) != name:
                        continue
                    if zfs.lzc_exists(name):
                        raise
                    del self._names[snapshot_id]
                    raise NotFound("snapshot", snapshot_id) from None
