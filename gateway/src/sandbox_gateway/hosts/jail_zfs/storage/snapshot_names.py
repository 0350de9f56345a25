"""Map the ids of snapshots to their full names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import zfs_core

from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset

R = TypeVar("R")


class SnapshotNames:
    """The full names of the snapshots of sandboxes or volumes. ``noun`` is the word for a snapshot in error messages.

    The name of a sandbox's snapshot changes when the sandbox's dataset is retired.
    """

    def __init__(self, root: RootDataset, noun: str) -> None:
        self._root = root
        self._noun = noun
        self._names: dict[str, str] = {}

    def load(self, names: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._names = dict(names)

    def add(self, names: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._names |= names

    def remove(self, snapshot_id: str) -> None:
        with self._root.index_lock:
            self._names.pop(snapshot_id, None)

    def remove_names(self, names: Collection[str]) -> None:
        """Remove the snapshots that have these full names."""
        with self._root.index_lock:
            self._names = {snapshot_id: name for snapshot_id, name in self._names.items() if name not in names}

    def rename_dataset(self, old_name: str, new_name: str) -> None:
        """Record that the dataset ``old_name`` was renamed to ``new_name``."""
        with self._root.index_lock:
            for snapshot_id, name in self._names.items():
                if name.startswith(f"{old_name}@"):
                    self._names[snapshot_id] = new_name + name.removeprefix(old_name)

    def list_all(self) -> set[str]:
        """Return the full names of all snapshots."""
        with self._root.index_lock:
            return set(self._names.values())

    def find_ids(self) -> dict[str, str]:
        """Return the ids of all snapshots by their full names."""
        with self._root.index_lock:
            return {name: snapshot_id for snapshot_id, name in self._names.items()}

    def find(self, snapshot_id: str) -> str:
        """Return the current full name of a snapshot, ``dataset@snapshot``. Raises NotFound."""
        with self._root.index_lock:
            try:
                return self._names[snapshot_id]
            except KeyError:
                raise self._create_not_found_error(snapshot_id) from None

    def call_with_name(self, snapshot_id: str, action: Callable[[str], R]) -> R:
        """Call ``action`` with the snapshot's full name, and again if the snapshot is renamed during the call.

        Raises NotFound if the snapshot does not exist.
        """
        while True:
            name = self.find(snapshot_id)
            try:
                return action(name)
            except zfs_core.exceptions.DatasetNotFound:
                with self._root.tree_locked():
                    with self._root.index_lock:
                        if self._names.get(snapshot_id) != name:
                            continue
                    if zfs_core.lzc_exists(name):
                        raise
                    self.remove(snapshot_id)
                    raise self._create_not_found_error(snapshot_id) from None

    def _create_not_found_error(self, snapshot_id: str) -> NotFound:
        return NotFound(self._noun, snapshot_id, resource=self._noun.replace(" ", "_"))
