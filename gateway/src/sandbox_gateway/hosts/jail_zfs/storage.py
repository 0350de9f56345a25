"""Where a jail host keeps what it knows: datasets, snapshots, and the records that are their user properties.

::

    <root>/_template-<id>@base        a base as it was built; its dataset stays unmounted
    <root>/sandboxes/<instance>       a clone; its record says which sandbox it embodies
    <root>/sandboxes/<instance>@<id>  a snapshot, with its record
    <root>/ballast                    16 MiB held back for when the pool is full
    <root>/volumes/<id>               a volume, see storage_volumes
    <root>/retired/<instance>         what is left of an instance whose snapshots have to stay; unmounted, goes with
                                      the last of them (on zfs-fuse it stays in sandboxes/ while forks are mounted)

A snapshot exists when ZFS has it, for its record is set by the command that takes it. A sandbox exists when its
instance's record is written (``save``). What has no record is swept by ``scan``. What has one that cannot be read is
left where it is, marked ``sandbox:quarantine``, and reported. Nothing is ever destroyed with ``-r`` or ``-R``.

Functions block; they may be called from several threads. They raise GatewayError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sandbox_gateway.errors import BackendFailed, GatewayError, InUse, NotFound
from sandbox_gateway.hosts.jail_zfs import zfs
from sandbox_gateway.hosts.jail_zfs.storage_errors import translating
from sandbox_gateway.hosts.jail_zfs.storage_scan import TEMPLATE, interpret, is_retired
from sandbox_gateway.hosts.jail_zfs.storage_volumes import VolumeStorage
from sandbox_gateway.hosts.jail_zfs.volume_scan import VOLUME_FACTS, interpret_volumes
from sandbox_gateway.hosts.jail_zfs.zfs_owner import Ownership
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, decode, encode
from sandbox_gateway.records import Sandbox, Snapshot, Volume, VolumeSnapshot

R = TypeVar("R")

_CONTAINERS = ("sandboxes", "retired", "volumes")
_BASE = "base"


@dataclass
class StorageScan:
    """What ``scan`` found."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order they were taken."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """A sentence for each thing that was swept, quarantined or mended."""
    volumes: list[Volume] = field(default_factory=list)
    volume_snapshots: list[VolumeSnapshot] = field(default_factory=list)
    unreadable_sandboxes: list[str] = field(default_factory=list)
    """Datasets of instances whose records cannot be read."""


@dataclass(frozen=True)
class Usage:
    """Bytes. ``referenced``: what is reachable in it; ``unique``: what its destruction would free."""

    referenced: int
    unique: int
    available: int


class ZfsStorage(VolumeStorage):
    """The storage below the dataset ``root_dataset``, which must exist and be mounted somewhere."""

    def __init__(self, root_dataset: str, *, lock_directory: Path = Path("/var/run")) -> None:
        super().__init__(root_dataset)
        self._lock_directory = lock_directory
        self._ownership: Ownership | None = None
        self._places: dict[str, str] = {}
        """Full name of each snapshot, by its id."""

    # ---- opening ----

    @translating
    def open(self) -> list[str]:
        """Take the root for this gateway alone and make what is missing below it.

        Returns sentences on what was mended. Raises Conflict if another gateway has it, BackendFailed if it is missing.
        """
        zfs.reachable()
        if not zfs.lzc_exists(self.root):
            raise BackendFailed(
                f"the dataset {self.root} does not exist: `zfs create {self.root}`, or run the role jail_zfs_host"
            )
        ownership = Ownership(self.root, self._lock_directory)
        notes = ownership.take()
        self._ownership = ownership
        try:
            self._mountpoint = self._mounted_root()
            for name in _CONTAINERS:
                self._ensure_container(f"{self.root}/{name}")
            # Root in a jail makes programs that run as root (set-user-ID): no user of the host may get to them.
            for name in _CONTAINERS:
                (self._mountpoint / name).chmod(0o700)
            notes += self._take_ballast()
        except BaseException:
            self.close()
            raise
        return notes

    def close(self) -> None:
        """Let go of the root; everything stays mounted. Never raises for ZFS's sake."""
        if self._ownership is not None:
            self._ownership.give_back()
            self._ownership = None

    def _mounted_root(self) -> Path:
        facts = zfs.get_props([self.root], ["mountpoint", "type"])[self.root]
        path = facts["mountpoint"].value
        if facts["type"].value != "filesystem" or not path.startswith("/"):
            raise BackendFailed(
                f"the dataset {self.root} has no place in the file system (mountpoint {path}): "
                f"`zfs set mountpoint=/some/directory {self.root}`"
            )
        zfs.mount(self.root)
        return Path(path)

    def instance_root(self, instance: str) -> Path:
        """Where the file system of an instance is mounted."""
        return self.mountpoint / "sandboxes" / instance

    def dataset(self, instance: str) -> str:
        return f"{self.root}/sandboxes/{instance}"

    def snapshot_dataset(self, snapshot_id: str) -> str:
        """``dataset@snapshot``, as ZFS has it now. Raises NotFound."""
        with self._guard:
            try:
                return self._places[snapshot_id]
            except KeyError:
                raise NotFound("snapshot", snapshot_id) from None

    # ---- making ----

    @translating
    def create_base(self, record: Snapshot, fill: Callable[[Path], None]) -> Snapshot:
        """Make a dataset, let ``fill`` write a file system into the directory it is given, and commit it as ``@base``.

        Nothing is left if ``fill`` raises.
        """
        dataset = f"{self.root}/{TEMPLATE}{record.id}"
        zfs.lzc_create(dataset, props={"canmount": "noauto", "atime": "off", "com.sun:auto-snapshot": "false"})
        try:
            zfs.mount(dataset)
            fill(self.mountpoint / f"{TEMPLATE}{record.id}")
            zfs.unmount(dataset)
            self._take(f"{dataset}@{_BASE}", record)
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                self._destroy(dataset)
            raise
        return record

    @translating
    def clone(
        self, snapshot_id: str, instance: str, *, disk_mb: int | None = None, props: Mapping[str, str] | None = None
    ) -> Path:
        """Clone a snapshot as an instance, mounted; returns where. It is swept at the next scan unless it is saved.

        ``disk_mb``: what may be referenced in it (``refquota``), in MiB. Raises NotFound, NoSpace, OverQuota.
        """
        options: dict[str, str] = dict(props or {})
        if disk_mb is not None:
            options["refquota"] = str(disk_mb << 20)
        try:
            self._at_place(snapshot_id, lambda origin: zfs.lzc_clone(self.dataset(instance), origin, options))
        except zfs.exceptions.NoSpace:
            self._blame_quota(self.snapshot_dataset(snapshot_id), disk_mb)
            raise
        return self.instance_root(instance)

    def _at_place(self, snapshot_id: str, use: Callable[[str], R]) -> R:
        """``use`` the snapshot's full name; again, if it was moved meanwhile. Raises NotFound if it is gone."""
        while True:
            place = self.snapshot_dataset(snapshot_id)
            try:
                return use(place)
            except zfs.exceptions.DatasetNotFound:
                with self._shape, self._guard:
                    if self._places.get(snapshot_id) != place:
                        continue
                    if zfs.lzc_exists(place):
                        raise
                    del self._places[snapshot_id]
                    raise NotFound("snapshot", snapshot_id) from None

    @translating
    def mount(self, instance: str) -> Path:
        """Mount an instance's file system where it is not mounted (after the host went down); returns where."""
        zfs.mount(self.dataset(instance))
        return self.instance_root(instance)

    @translating
    def set_disk(self, instance: str, disk_mb: int) -> None:
        """Change what may be referenced in an instance, in MiB. Raises OverQuota if it holds more."""
        zfs.lzc_set_prop(self.dataset(instance), "refquota", disk_mb << 20)

    # ---- records ----

    @translating
    def save(self, record: Sandbox) -> None:
        """Commit a sandbox's record on the dataset of the instance it names; older ones elsewhere no longer count."""
        self._write(self.dataset(record.instance), record)

    @translating
    def snapshot(self, instance: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> Snapshot:
        """Snapshot an instance's file system, as ``record``, and volumes with it: there are all or none.

        What programs wrote is in it; what they hold in memory maps is, if they synced it.
        """
        self._take(f"{self.dataset(instance)}@{record.id}", record, volumes)
        return record

    @translating
    def save_snapshot(self, record: Snapshot) -> None:
        """Write a snapshot's record anew. Raises NotFound if it is gone."""
        self._at_place(record.id, lambda name: self._write(name, record))

    def _take(self, name: str, record: Snapshot, volumes: Sequence[VolumeSnapshot] = ()) -> None:
        props = encode(record, 1)
        along, volume_props = self._named(volumes)
        # what is not taken at once is taken in this order: the volumes' are nothing without the sandbox's
        zfs.lzc_snapshot([*along.values(), name], volume_props | props)
        with self._guard:
            self._volume_places |= along
            self._places[record.id] = name
            self._generations[record.id] = 1
            self._long.update([name] if len(props) > 1 else [])

    # ---- removing ----

    @translating
    def forget(self, instance: str) -> None:
        """Take back the record of an instance: from here on it embodies no sandbox, and a scan sweeps it."""
        with suppress(zfs.exceptions.DatasetNotFound):
            self._drop_record(self.dataset(instance))

    @translating
    def discard(self, instance: str) -> bool:
        """Remove an instance. True: it is gone; False: its snapshots have to stay, so it is retired until they go.

        Nothing may use its files any more: Busy if something does, and then it is there still (without its record, if
        it has snapshots). An instance that is not there is gone.
        """
        with self._shape:
            return self._discard(self.dataset(instance))

    def _discard(self, dataset: str) -> bool:
        try:
            if zfs.list_snapshots(dataset):
                self._retire(dataset)
                return False
            self._destroy(dataset)
        except zfs.exceptions.FilesystemNotFound:
            pass
        return True

    def _retire(self, dataset: str) -> None:
        """From the moment it has no record and ``canmount=noauto`` it is retired, wherever it is.

        zfs-fuse cannot rename it while clones of its snapshots are mounted; then the next scan tries again.
        """
        self._drop_record(dataset)
        zfs.unmount(dataset)
        self._in_need(lambda: zfs.lzc_set_prop(dataset, "canmount", "noauto"))
        self._drop_directory(dataset.rpartition("/")[2])
        self._move_away(dataset)

    def _move_away(self, dataset: str) -> None:
        retired = f"{self.root}/retired/{dataset.rpartition('/')[2]}"
        try:
            self._in_need(lambda: zfs.lzc_rename(dataset, retired, patient=False))
        except zfs.exceptions.DatasetBusy:
            return
        with self._guard:
            for snapshot_id, place in self._places.items():
                if place.startswith(f"{dataset}@"):
                    self._places[snapshot_id] = retired + place.removeprefix(dataset)

    def _is_retired(self, dataset: str) -> bool:
        if not dataset.startswith(f"{self.root}/sandboxes/"):
            return dataset.startswith(f"{self.root}/retired/")
        facts = zfs.get_props([dataset], ["canmount", HEAD])[dataset]
        return is_retired(facts["canmount"], facts[HEAD].local)

    def _destroy(self, dataset: str) -> None:
        """A dataset without snapshots, and what was only kept for it."""
        origin = zfs.get_props([dataset], ["origin"])[dataset]["origin"].value
        zfs.unmount(dataset)
        zfs.lzc_destroy(dataset)
        self._drop_directory(dataset.rpartition("/")[2])
        if origin != "-":
            self._tidy(origin.partition("@")[0])

    def _drop_directory(self, instance: str) -> None:
        """An empty mount point is litter, nothing worse."""
        if self._mountpoint is not None:
            with suppress(OSError):
                self.instance_root(instance).rmdir()

    def _tidy(self, dataset: str) -> None:
        """Remove a retired dataset, or a base's, once its last snapshot is gone; then the same for its origin's.

        It has done its part in what the caller asked for; what fails here, the next scan does.
        """
        with suppress(zfs.exceptions.ZFSError):
            disposable = dataset.startswith(f"{self.root}/{TEMPLATE}") or self._is_retired(dataset)
            if disposable and not zfs.list_snapshots(dataset):
                self._destroy(dataset)

    @translating
    def destroy_snapshot(self, snapshot_id: str, *, deferred: bool = False) -> bool:
        """Remove a snapshot. True: it is gone; False: hidden, and ZFS removes it with the last that needs it.

        Refused with InUse, naming each, while sandboxes (or datasets of others) are its clones, or holds are on it;
        unless ``deferred``. Clones that are only kept for their own snapshots are no reason: then it is hidden.
        """
        with self._shape:
            name = self.snapshot_dataset(snapshot_id)
            gone = self._destroy_snapshot(snapshot_id, name, deferred)
            with self._guard:
                self._places.pop(snapshot_id, None)
                self._generations.pop(snapshot_id, None)
                self._long.discard(name)
            self._tidy(name.partition("@")[0])
        return gone

    def _destroy_snapshot(self, snapshot_id: str, name: str, deferred: bool) -> bool:
        try:
            zfs.lzc_destroy_snaps([name], False)
        except zfs.exceptions.SnapshotDestructionFailure as failure:
            held = isinstance(failure.errors[0], zfs.exceptions.SnapshotIsHeld)
            if not held and not isinstance(failure.errors[0], zfs.exceptions.SnapshotIsCloned):
                raise
            if not deferred:
                self._refuse(snapshot_id, name, held)
            zfs.lzc_destroy_snaps([name], True)
            return not zfs.lzc_exists(name)
        return True

    def _refuse(self, snapshot_id: str, name: str, held: bool) -> None:
        """Raises InUse if anything but retired datasets stands in the way."""
        blockers: dict[str, str] = {}
        for clone in zfs.clones(name):
            if not self._is_retired(clone):
                blockers.update([self._sandbox_of(clone)])
        if blockers:
            forks = "fork" if len(blockers) == 1 else "forks"
            raise InUse(
                f"the snapshot {snapshot_id} is in use by {len(blockers)} {forks}: {', '.join(blockers.values())}",
                blockers=list(blockers),
            )
        if held:
            raise InUse(f"the snapshot {snapshot_id} is held (`zfs release` what holds {name})", blockers=[name])

    def _sandbox_of(self, clone: str) -> tuple[str, str]:
        """What a clone is called in a refusal: ``(sandbox id, name)``, or its dataset where it is nobody's."""
        try:
            record = decode(zfs.local_props(clone), "sandbox").record
        except (ValueError, zfs.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Sandbox)
        return record.id, record.name

    # ---- measuring ----

    @translating
    def diverged(self, instance: str, snapshot_id: str) -> bool:
        """Was anything written to the instance since that snapshot, its own or one it descends from?

        True as well where it does not descend from it. Waits for what is being written. Raises NotFound.
        """
        try:
            return self._at_place(snapshot_id, lambda place: zfs.changed_since(self.dataset(instance), place))
        except zfs.exceptions.SnapshotMismatch:
            return True

    @translating
    def usage(self, instance: str) -> Usage:
        facts = zfs.get_props([self.dataset(instance)], ["referenced", "used", "available"])[self.dataset(instance)]
        return Usage(facts["referenced"].number, facts["used"].number, facts["available"].number)

    @translating
    def snapshot_bytes(self, snapshot_id: str) -> int:
        """Bytes that only this snapshot holds."""
        return self._at_place(snapshot_id, zfs.used)

    # ---- finding again ----

    @translating
    def scan(self, teardown: Callable[[str], None] = lambda instance: None) -> StorageScan:
        """Find everything, sweep what was never committed. What is damaged is reported, and stops nothing.

        What volumes leave behind is only found: ``sweep_volumes`` removes it, when jails have let go of it.
        ``teardown(instance)`` is called before an instance is swept, to end what may still run in it; what it raises
        is reported, and the instance stays until the next scan.
        """
        with self._shape:
            facts, local = zfs.get_tree(self.root, VOLUME_FACTS), zfs.local_tree(self.root)
            found, volumes = interpret(self.root, facts, local), interpret_volumes(self.root, facts, local)
            with self._guard:
                self._places, self._generations, self._long = found.places, found.generations, found.long
            self._mark(found)
            notes = self._load_volumes(volumes)
            notes += [f"{name}: left alone, {why}" for name, why in found.quarantined.items()]
            notes += [f"{name}: its record can be read again" for name in found.mended]
            notes += [self._sweep(instance, why, teardown) for instance, why in found.superseded.items()]
            # asked once more, alone: nothing that another dataset bears may have hidden a record
            notes += [
                self._sweep(instance, "it was never committed, or was being removed", teardown)
                for instance in found.uncommitted
                if HEAD not in zfs.local_props(self.dataset(instance))
            ]
            for name in found.empty:
                self._tidy(name)
                notes.append(f"{name}: removed, nothing was kept in it")
            notes += [note for name in found.to_move if (note := self._try_to_move_away(name))]
            notes += self._take_ballast()
            instances = f"{self.root}/sandboxes/"
            unreadable = [name for name in found.quarantined if name.startswith(instances) and "@" not in name]
            return StorageScan(found.snapshots, found.sandboxes, notes, volumes.volumes, volumes.snapshots, unreadable)

    def _try_to_move_away(self, dataset: str) -> str:
        """A sentence if it failed: a dataset that stays where it is must not keep the gateway from starting."""
        try:
            self._move_away(dataset)
        except zfs.exceptions.ZFSError as error:
            return f"{dataset}: retired; it could not be moved to {self.root}/retired yet: {error}"
        return ""

    def _sweep(self, instance: str, why: str, teardown: Callable[[str], None]) -> str:
        dataset = self.dataset(instance)
        try:
            teardown(instance)
            gone = self._discard(dataset)
        except (GatewayError, zfs.exceptions.ZFSError) as error:
            return f"{dataset}: {why}; it could not be removed yet: {error}"
        return f"{dataset}: {'removed' if gone else 'retired'}, {why}"
