"""Volumes in ZFS.

::

    <root>/volumes/<id>         a volume, mounted; refquota is its size; it exists when its record is written
    <root>/volumes/<id>@<sid>   a snapshot of it, with its record
    <root>/volumes/<id>.<n>     what the volume is since its nth rollback: a clone of the snapshot. What it was before
                                is kept unmounted, without a record, for as long as it has snapshots

A rollback renames nothing (zfs-fuse often cannot): of two datasets that bear the volume's record, the one that was
written last is the volume. A snapshot from which another volume was made is not removed, nor is its volume: their
blocks are the other's too, so nothing would be gained by hiding them, and ``promote`` would give the snapshots that
somebody made of one volume to another.

Functions block; they may be called from several threads. They raise GatewayError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from sandbox_gateway.errors import GatewayError, InUse, NotFound
from sandbox_gateway.hosts.jail_zfs import zfs
from sandbox_gateway.hosts.jail_zfs.storage_base import StorageBase
from sandbox_gateway.hosts.jail_zfs.storage_errors import translating
from sandbox_gateway.hosts.jail_zfs.storage_scan import VOLUMES, is_retired
from sandbox_gateway.hosts.jail_zfs.volume_scan import DOOMED, VolumeFindings, volume_key
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, decode, encode, volume_snapshot_head
from sandbox_gateway.records import Volume, VolumeSnapshot

R = TypeVar("R")


class VolumeStorage(StorageBase):
    """The volumes below the root dataset."""

    def __init__(self, root_dataset: str) -> None:
        super().__init__(root_dataset)
        self._volumes: dict[str, str] = {}
        """Dataset of each volume, by its id."""
        self._volume_places: dict[str, str] = {}
        """Full name of each volume's snapshot, by its id."""
        self._volume_findings = VolumeFindings()

    # ---- where they are ----

    @property
    def volumes_path(self) -> Path:
        """Where volumes are mounted, on the host."""
        return Path(os.path.realpath(self.mountpoint)) / VOLUMES

    def volume_path(self, dataset: str) -> Path:
        return self.volumes_path / dataset.rpartition("/")[2]

    def volume_id(self, path: str) -> str:
        """The volume whose dataset, of now or before, is mounted at ``path``; empty: none's is."""
        parent, _, name = path.rpartition("/")
        key = volume_key(name)
        return key[0] if key is not None and parent == str(self.volumes_path) else ""

    def volume_dataset(self, volume_id: str) -> str:
        """Raises NotFound."""
        with self._guard:
            try:
                return self._volumes[volume_id]
            except KeyError:
                raise NotFound("volume", volume_id) from None

    def knows_volume(self, volume_id: str) -> bool | None:
        """Is there such a volume? None: there is, and its record cannot be read."""
        with self._guard:
            return None if volume_id in self._volume_findings.unreadable else volume_id in self._volumes

    @translating
    def volume_root(self, volume_id: str) -> Path:
        """Where its files are, on the host; mounted if they were not. Raises NotFound."""
        dataset = self.volume_dataset(volume_id)
        try:
            zfs.mount(dataset)
        except zfs.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None
        return self.volume_path(dataset)

    @translating
    def volume_used(self, volume_id: str) -> int:
        """Bytes that are in it. Raises NotFound."""
        dataset = self.volume_dataset(volume_id)
        try:
            return zfs.get_props([dataset], ["referenced"])[dataset]["referenced"].number
        except zfs.exceptions.DatasetNotFound:
            raise NotFound("volume", volume_id) from None

    # ---- making ----

    @translating
    def create_volume(self, record: Volume, source: str | None = None) -> None:
        """Make a volume, empty and open to every user, or as the snapshot ``source`` is.

        Raises NotFound, NoSpace, OverQuota (the snapshot holds more).
        """
        dataset = f"{self.root}/{VOLUMES}/{record.id}"
        record.host = {"dataset": dataset}
        if source is None:
            self._create_empty(dataset, record)
        else:
            options = encode(record, 1) | {"refquota": str(record.size_mb << 20)}
            self._clone(source, dataset, options, record.size_mb)
        with self._guard:
            self._volumes[record.id] = dataset
            self._generations[record.id] = 1

    def _create_empty(self, dataset: str, record: Volume) -> None:
        zfs.lzc_create(dataset, props={"refquota": str(record.size_mb << 20)})
        try:
            self.volume_path(dataset).chmod(0o777)
            self._write(dataset, record)
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                self._destroy_volume_dataset(dataset)
            raise

    def _clone(self, source: str, dataset: str, options: dict[str, str], size_mb: int) -> None:
        try:
            self._at_volume_place(source, lambda origin: zfs.lzc_clone(dataset, origin, options))
        except zfs.exceptions.NoSpace:
            self._at_volume_place(source, lambda origin: self._blame_quota(origin, size_mb, "volume"))
            raise

    def _at_volume_place(self, snapshot_id: str, use: Callable[[str], R]) -> R:
        """``use`` the full name of a volume's snapshot. Raises NotFound if it is gone."""
        with self._guard:
            place = self._volume_places.get(snapshot_id, "")
        try:
            if place:
                return use(place)
        except zfs.exceptions.DatasetNotFound:
            with self._guard:
                self._volume_places.pop(snapshot_id, None)
        raise NotFound("volume snapshot", snapshot_id)

    @translating
    def grow_volume(self, record: Volume, size_mb: int) -> None:
        """Let it hold ``size_mb`` MiB. Where only the quota was raised, the next scan puts it back."""
        dataset = self.volume_dataset(record.id)
        zfs.lzc_set_prop(dataset, "refquota", size_mb << 20)
        try:
            self._write(dataset, record.model_copy(update={"size_mb": size_mb}))
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                zfs.lzc_set_prop(dataset, "refquota", record.size_mb << 20)
            raise

    # ---- snapshots ----

    @translating
    def snapshot_volume(self, record: VolumeSnapshot) -> None:
        """Snapshot a volume: there is the snapshot with its record, or neither."""
        along, props = self._named([record])
        zfs.lzc_snapshot(along.values(), props)
        with self._guard:
            self._volume_places |= along

    def _named(self, records: Sequence[VolumeSnapshot]) -> tuple[dict[str, str], dict[str, str]]:
        """``({id: full name}, {property: value})`` for snapshots of volumes that are to be taken."""
        names = {record.id: f"{self.volume_dataset(record.volume)}@{record.id}" for record in records}
        return names, {volume_snapshot_head(record.id): encode(record, 1)[HEAD] for record in records}

    @translating
    def destroy_volume_snapshot(self, snapshot_id: str, *, deferred: bool = False) -> None:
        """Remove a volume's snapshot.

        Refused with InUse, naming each, while volumes were made from it, unless ``deferred``. That the volume itself
        was rolled back to it is no reason: then it is hidden, and ZFS removes it when nothing stands on it any more.
        """
        with self._shape:
            self._at_volume_place(snapshot_id, lambda name: self._destroy_volume_snapshot(snapshot_id, name, deferred))
            with self._guard:
                name = self._volume_places.pop(snapshot_id)
            self._tidy_volume(name.partition("@")[0])

    def _destroy_volume_snapshot(self, snapshot_id: str, name: str, deferred: bool) -> None:
        if not zfs.lzc_exists(name):
            raise zfs.exceptions.SnapshotNotFound(name)
        try:
            zfs.lzc_destroy_snaps([name], False)
        except zfs.exceptions.SnapshotDestructionFailure as failure:
            reason = failure.errors[0]
            if not isinstance(reason, zfs.exceptions.SnapshotIsHeld | zfs.exceptions.SnapshotIsCloned):
                raise
            if not deferred:
                self._refuse_made(f"the snapshot {snapshot_id} of a volume", [name])
                if isinstance(reason, zfs.exceptions.SnapshotIsHeld):
                    raise InUse(f"{name} is held: `zfs release` what holds it", blockers=[name]) from None
            zfs.lzc_destroy_snaps([name], True)

    def _refuse_made(self, what: str, names: Sequence[str]) -> None:
        """Raises InUse if anything but the same volume's datasets was cloned from one of the snapshots ``names``."""
        if not names:
            return
        blockers: dict[str, str] = {}
        facts = zfs.get_props(zfs.list_datasets(self.root.partition("/")[0]), ["origin"])
        for clone, props in facts.items():
            origin = props["origin"].value
            if origin in names and self._id_of(clone) != self._id_of(origin.partition("@")[0]):
                blockers.update([self._volume_of(clone)])
        if blockers:
            made = "volume was" if len(blockers) == 1 else "volumes were"
            raise InUse(
                f"{what} is in use: {len(blockers)} {made} made from it ({', '.join(blockers.values())}); "
                "remove what was made first",
                blockers=list(blockers),
            )

    def _id_of(self, dataset: str) -> str:
        """The volume a dataset belongs to; itself where it belongs to none."""
        parent, _, name = dataset.rpartition("/")
        key = volume_key(name)
        return key[0] if key is not None and parent == f"{self.root}/{VOLUMES}" else dataset

    def _volume_of(self, clone: str) -> tuple[str, str]:
        """What a clone is called in a refusal: ``(volume id, name)``, or its dataset where it is nobody's."""
        id = self._id_of(clone)
        try:
            record = decode(zfs.local_props(self._volumes.get(id, clone)), "volume").record
        except (ValueError, zfs.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Volume)
        return record.id, record.name

    # ---- rollback ----

    @translating
    def begin_rollback(self, record: Volume, snapshot_id: str) -> str:
        """The dataset that the volume would become: a mounted clone. It is swept unless it is committed."""
        with self._shape:
            own = self._own(record.id)
            numbers = [key[1] for name in own if (key := volume_key(name.rpartition("/")[2]))]
            dataset = f"{self.root}/{VOLUMES}/{record.id}.{max(numbers, default=0) + 1}"
            self._clone(snapshot_id, dataset, {"refquota": str(record.size_mb << 20)}, record.size_mb)
        return dataset

    @translating
    def commit_rollback(self, record: Volume, dataset: str) -> None:
        """From here on ``dataset`` is the volume. What it was before is a leftover."""
        self._write(dataset, record.model_copy(update={"host": {"dataset": dataset}}))
        record.host = {"dataset": dataset}
        with self._guard:
            self._volumes[record.id] = dataset

    @translating
    def settle_volume(self, volume_id: str) -> list[str]:
        """Retire or remove what a volume was before, or did not become; returns what that was. Busy: try again."""
        with self._shape:
            now, settled = self.volume_dataset(volume_id), []
            for dataset in self._own(volume_id):
                if dataset != now and not self._is_settled(dataset):
                    self._retire_volume(dataset)
                    settled.append(dataset)
            return settled

    def _is_settled(self, dataset: str) -> bool:
        facts = zfs.get_props([dataset], ["canmount", HEAD])[dataset]
        return is_retired(facts["canmount"], facts[HEAD].local) and bool(zfs.list_snapshots(dataset))

    def _retire_volume(self, dataset: str) -> None:
        if not zfs.list_snapshots(dataset):
            self._destroy_volume_dataset(dataset)
            return
        self._drop_record(dataset)
        zfs.unmount(dataset)
        self._in_need(lambda: zfs.lzc_set_prop(dataset, "canmount", "noauto"))
        self._drop_mount_point(dataset)

    # ---- removing ----

    @translating
    def doom_volume(self, volume_id: str) -> None:
        """Commit the removal of a volume and its snapshots: it is none from here on, and no scan finds it again.

        Refused with InUse, naming each, while other volumes were made from its snapshots, or somebody else keeps some.
        """
        with self._shape:
            own = self._own(volume_id)
            names = [name for dataset in own for name in zfs.list_snapshots(dataset)]
            self._refuse_made("a snapshot of the volume", names)
            self._refuse_kept(names)
            if own:
                self._in_need(partial(zfs.lzc_set_prop, own[0], DOOMED, "yes"))
            with self._guard:
                self._volumes.pop(volume_id, None)
                for snapshot_id, name in list(self._volume_places.items()):
                    if name in names:
                        del self._volume_places[snapshot_id]

    def _refuse_kept(self, names: Sequence[str]) -> None:
        if not names:
            return
        held = {name for name, facts in zfs.get_props(names, ["userrefs"]).items() if facts["userrefs"].number}
        ours = set(self._volume_places.values())
        # What is destroyed with its last clone is hidden and no longer known; nor is it anybody's to keep.
        hidden = {name for name, facts in zfs.get_props(names, ["defer_destroy"]).items() if facts["defer_destroy"].yes}
        kept = sorted(held | set(names) - ours - hidden)
        if kept:
            raise InUse(
                f"the volume has snapshots that others made or hold ({', '.join(kept)}): `zfs destroy` or release them",
                blockers=kept,
            )

    @translating
    def finish_removal(self, volume_id: str) -> None:
        """Remove all datasets of a doomed volume. Busy: try again."""
        with self._shape:
            own = self._own(volume_id)
            # The newest stands on the others: that they go too must be known when it is gone.
            for dataset in reversed(own):
                if DOOMED not in zfs.local_props(dataset):
                    self._in_need(partial(zfs.lzc_set_prop, dataset, DOOMED, "yes"))
            for dataset in own:
                zfs.lzc_destroy_snaps(zfs.list_snapshots(dataset), False)
                self._destroy_volume_dataset(dataset)

    def _own(self, volume_id: str) -> list[str]:
        """All datasets of a volume, the newest first."""
        found = []
        for dataset in zfs.list_datasets(f"{self.root}/{VOLUMES}", depth=1)[1:]:
            key = volume_key(dataset.rpartition("/")[2])
            if key is not None and key[0] == volume_id:
                found.append((key[1], dataset))
        return [dataset for _, dataset in sorted(found, reverse=True)]

    def _destroy_volume_dataset(self, dataset: str) -> None:
        """One without snapshots, and what was only kept for it."""
        origin = zfs.get_props([dataset], ["origin"])[dataset]["origin"].value
        zfs.unmount(dataset)
        zfs.lzc_destroy(dataset)
        self._drop_mount_point(dataset)
        if origin != "-":
            self._tidy_volume(origin.partition("@")[0])

    def _drop_mount_point(self, dataset: str) -> None:
        """An empty mount point is litter, nothing worse."""
        with suppress(OSError):
            self.volume_path(dataset).rmdir()

    def _tidy_volume(self, dataset: str) -> None:
        """Remove what a volume was before a rollback, once its last snapshot is gone; what fails, the next scan does.

        One that is being removed is left to that.
        """
        with suppress(zfs.exceptions.ZFSError):
            facts = zfs.get_props([dataset], ["canmount", HEAD, DOOMED])[dataset]
            disposable = is_retired(facts["canmount"], facts[HEAD].local) and not facts[DOOMED].local
            if disposable and self._id_of(dataset) != dataset and not zfs.list_snapshots(dataset):
                self._destroy_volume_dataset(dataset)

    # ---- finding again ----

    def _load_volumes(self, found: VolumeFindings) -> list[str]:
        """Know what a scan found, and have it as its records say; returns sentences on what was odd."""
        with self._guard:
            self._volumes, self._volume_places = found.datasets, found.places
            self._generations |= found.generations
            self._volume_findings = found
        self._mark(found)
        notes = [f"{name}: left alone, {why}" for name, why in found.quarantined.items()]
        notes += [f"{name}: its record can be read again" for name in found.mended]
        for dataset, size in found.sizes.items():
            notes.append(_tried(dataset, "it is as large as its record says again", _set_size, dataset, size))
        mounted = [_tried(dataset, "", zfs.mount, dataset) for dataset in found.unmounted]
        return [note for note in notes + mounted if note]

    def sweep_volumes(self) -> list[str]:
        """Remove what the last scan found to be left over, and no jail mounts. Sentences on what was done, or not."""
        found = self._volume_findings
        notes = []
        for snapshot_id in found.unfounded:
            why = "removed, the snapshot of a sandbox that it was part of is not there"
            notes.append(_tried(found.places[snapshot_id], why, self._drop_unfounded, snapshot_id))
        with self._shape:
            for dataset in found.leftover:
                why = "retired, it is what the volume was before a rollback, or did not become"
                notes.append(_tried(dataset, why, self._retire_volume, dataset))
            for dataset in found.uncommitted:
                notes.append(_tried(dataset, "removed, it was never committed", self._destroy_volume_dataset, dataset))
        for volume_id in found.doomed:
            place = f"{self.root}/{VOLUMES}/{volume_id}"
            notes.append(_tried(place, "removed, as was asked for", self.finish_removal, volume_id))
        return notes

    def _drop_unfounded(self, snapshot_id: str) -> None:
        self.destroy_volume_snapshot(snapshot_id, deferred=True)


def _tried(what: str, why: str, change: Callable[..., object], *arguments: object) -> str:
    """A sentence on what was done, or could not be."""
    try:
        change(*arguments)
    except (GatewayError, zfs.exceptions.ZFSError) as error:
        return f"{what}: {why or 'put in order'}; that could not be done yet: {error}"
    return why and f"{what}: {why}"


def _set_size(dataset: str, size: int) -> None:
    zfs.lzc_set_prop(dataset, "refquota", size)
