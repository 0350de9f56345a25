"""Manage snapshots of volumes.

A snapshot from which another volume was made cannot be removed, and neither can its volume: the other volume shares its
blocks, so hiding it would free nothing, and ``promote`` would move snapshots from one volume to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from sandbox_gateway import zfs
from sandbox_gateway.errors import NotFound, UsedOutside
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, encode, volume_snapshot_head
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.translation import translate_errors
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.records import VolumeSnapshot

R = TypeVar("R")


class VolumeSnapshots:
    """Manages snapshots of volumes in ZFS. Methods block, are thread-safe, and raise GatewayError or ZFSError."""

    def __init__(self, root: RootDataset, datasets: VolumeDatasets) -> None:
        self._root = root
        self._datasets = datasets
        self._names: dict[str, str] = {}
        """Full name of each snapshot, by its id."""

    def load(self, names: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._names = dict(names)

    def add(self, names: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._names |= names

    def drop_names(self, names: Iterable[str]) -> None:
        with self._root.index_lock:
            for snapshot_id, name in list(self._names.items()):
                if name in names:
                    del self._names[snapshot_id]

    def use(self, snapshot_id: str, action: Callable[[str], R]) -> R:
        """Call ``action`` with the snapshot's full name. Raises NotFound if the snapshot does not exist."""
        with self._root.index_lock:
            place = self._names.get(snapshot_id, "")
        try:
            if place:
                return action(place)
        except zfs.exceptions.DatasetNotFound:
            with self._root.index_lock:
                self._names.pop(snapshot_id, None)
        raise NotFound("volume snapshot", snapshot_id, resource="volume_snapshot")

    # ---- taking ----

    @translate_errors
    def capture(self, record: VolumeSnapshot) -> None:
        """Snapshot a volume and save the record with it."""
        names, props = self.describe([record])
        zfs.lzc_snapshot(names.values(), props)
        self.add(names)

    def describe(self, records: Sequence[VolumeSnapshot]) -> tuple[dict[str, str], dict[str, str]]:
        """Return ``({id: full name}, {property: value})`` for snapshots to be taken."""
        names = {record.id: f"{self._datasets.current(record.volume)}@{record.id}" for record in records}
        return names, {volume_snapshot_head(record.id): encode(record, 1)[HEAD] for record in records}

    # ---- removing ----

    @translate_errors
    def destroy(self, snapshot_id: str, *, deferred: bool = False) -> None:
        """Remove a volume's snapshot.

        Unless ``deferred``, raises UsedOutside, with all names, if volumes were made from it. A rollback of its own
        volume is not an obstacle: the snapshot is then hidden, and ZFS removes it with its last clone.
        """
        with self._root.tree_lock:
            self.use(snapshot_id, lambda name: self._destroy(name, deferred))
            with self._root.index_lock:
                name = self._names.pop(snapshot_id)
            self._datasets.destroy_if_unused(name.partition("@")[0])

    def _destroy(self, name: str, deferred: bool) -> None:
        if not zfs.lzc_exists(name):
            raise zfs.exceptions.SnapshotNotFound(name)
        try:
            zfs.lzc_destroy_snaps([name], False)
        except zfs.exceptions.SnapshotDestructionFailure as failure:
            reason = failure.errors[0]
            if not isinstance(reason, zfs.exceptions.SnapshotIsHeld | zfs.exceptions.SnapshotIsCloned):
                raise
            if not deferred:
                self.check_no_volumes_made([name])
                if isinstance(reason, zfs.exceptions.SnapshotIsHeld):
                    raise UsedOutside({"hold": {name: name}}, "Release it first (`zfs release`).") from None
            zfs.lzc_destroy_snaps([name], True)

    def check_no_volumes_made(self, names: Sequence[str]) -> None:
        """Raise UsedOutside if a dataset of another volume is a clone of a snapshot in ``names``."""
        if not names:
            return
        clones: dict[str, str] = {}
        facts = zfs.get_props(zfs.list_datasets(self._root.dataset.partition("/")[0]), ["origin"])
        for clone, props in facts.items():
            origin = props["origin"].value
            if origin in names and self._datasets.owner(clone) != self._datasets.owner(origin.partition("@")[0]):
                clones.update([self._datasets.identify(clone)])
        if clones:
            raise UsedOutside({"ZFS clone": clones}, "Remove them first.")

    def check_all_ours(self, names: Sequence[str]) -> None:
        """Raise UsedOutside if a snapshot in ``names`` is held, or was taken by another tool."""
        if not names:
            return
        held = {name for name, facts in zfs.get_props(names, ["userrefs"]).items() if facts["userrefs"].number}
        ours = set(self._names.values())
        # hidden snapshots are no longer in the index, but ZFS destroys them with their last clone
        deferred = zfs.get_props(names, ["defer_destroy"])
        hidden = {name for name, facts in deferred.items() if facts["defer_destroy"].is_on}
        foreign = set(names) - ours - hidden - held
        if held or foreign:
            users = {
                "hold": {name: name for name in sorted(held)},
                "foreign snapshot": {name: name for name in sorted(foreign)},
            }
            raise UsedOutside(users, "Release or destroy them first (`zfs release`, `zfs destroy`).")
