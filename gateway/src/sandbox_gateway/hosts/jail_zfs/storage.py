"""Where a jail host keeps what it knows: datasets, snapshots, and the records that are their user properties.

::

    <root>/_template-<id>@base        a base as it was built; its dataset stays unmounted
    <root>/sandboxes/<instance>       a clone; its record says which sandbox it embodies
    <root>/sandboxes/<instance>@<id>  a snapshot, with its record
    <root>/retired/<instance>         what is left of an instance whose snapshots have to stay; unmounted, goes with
                                      the last of them

A snapshot exists when ZFS has it, for its record is set by the command that takes it. A sandbox exists when its
instance's record is written (``save``). What has no record is swept by ``scan``. What has one that cannot be read is
left where it is, marked ``sandbox:quarantine``, and reported. Nothing is ever destroyed with ``-r`` or ``-R``.

Functions block; they may be called from several threads. They raise GatewayError.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sandbox_gateway.errors import (
    BackendFailed,
    Busy,
    Conflict,
    GatewayError,
    InUse,
    Invalid,
    NoSpace,
    NotFound,
    OverQuota,
)
from sandbox_gateway.hosts.jail_zfs import zfs
from sandbox_gateway.hosts.jail_zfs.zfs_owner import Ownership
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, QUARANTINE, Stored, decode, encode, stale_parts
from sandbox_gateway.records import Sandbox, Snapshot

_FACTS = ("type", "origin", "createtxg", "defer_destroy", "mounted")
_CONTAINERS = ("sandboxes", "retired")
_BASE = "base"
_TEMPLATE = "_template-"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class StorageScan:
    """What ``scan`` found."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order they were taken."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """A sentence for each thing that was swept, quarantined or mended."""


@dataclass(frozen=True)
class Usage:
    """Bytes. ``referenced``: what is reachable in it; ``unique``: what its destruction would free."""

    referenced: int
    unique: int
    available: int


def _translated(function: Callable[P, R]) -> Callable[P, R]:
    """ZFS's errors as the gateway's."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated():
            return function(*args, **kwargs)

    return wrapper


@contextmanager
def translated() -> Iterator[None]:
    """Turn a ZFSError into the GatewayError that says it to a caller."""
    try:
        yield
    except zfs.exceptions.MultipleOperationsFailure as error:
        raise gateway_error(error.errors[0]) from error
    except zfs.exceptions.ZFSError as error:
        raise gateway_error(error) from error


def gateway_error(error: zfs.exceptions.ZFSError) -> GatewayError:
    name = f" {error.name}" if error.name else ""
    match error:
        case zfs.exceptions.NoSpace():
            pool = (error.name or "").partition("/")[0] or "ZFS"
            return NoSpace(f"the pool {pool} has no space left{name and f' for{name}'}: remove snapshots or sandboxes")
        case zfs.exceptions.QuotaExceeded():
            return OverQuota(f"the disk quota of{name} does not allow this: what it holds is more")
        case zfs.exceptions.ZFSInitializationFailed():
            return BackendFailed(f"ZFS cannot be reached: {error.said}")
        case zfs.exceptions.DatasetBusy():
            listed = f" ({', '.join(error.related)})" if error.related else ""
            return Busy(f"the dataset{name} is busy{listed}: a process or a mount still uses it; try again")
        case zfs.exceptions.SuspendedPool() | zfs.exceptions.ReadOnlyPool():
            return BackendFailed(f"{error.message}:{name or ' the pool'} takes no writes; see `zpool status`")
        case zfs.exceptions.NameInvalid() | zfs.exceptions.NameTooLong() | zfs.exceptions.PropertyInvalid():
            return Invalid(f"ZFS does not take{name}: {error.said or error.message}")
    return BackendFailed(f"ZFS failed: {error}")


class ZfsStorage:
    """The storage below the dataset ``root_dataset``, which must exist and be mounted somewhere."""

    def __init__(self, root_dataset: str, *, lock_directory: Path = Path("/var/run")) -> None:
        self.root = root_dataset
        self._lock_directory = lock_directory
        self._ownership: Ownership | None = None
        self._mountpoint: Path | None = None
        self._guard = threading.RLock()
        """Over the two maps."""
        self._shape = threading.RLock()
        """Over what moves or removes datasets that others may depend on."""
        self._places: dict[str, str] = {}
        """Full name of each snapshot, by its id."""
        self._generations: dict[str, int] = {}
        """Of the newest record of each sandbox or snapshot, by its id."""

    # ---- opening ----

    @_translated
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

    def _ensure_container(self, name: str) -> None:
        if not zfs.lzc_exists(name):
            # snapshots that some tool takes of everything would keep every instance from going
            zfs.lzc_create(name, props={"atime": "off", "com.sun:auto-snapshot": "false"})
        zfs.mount(name)

    @property
    def mountpoint(self) -> Path:
        """Of the root dataset. Raises Conflict before ``open``."""
        if self._mountpoint is None:
            raise Conflict("the storage is not open")
        return self._mountpoint

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

    @_translated
    def create_base(self, record: Snapshot, fill: Callable[[Path], None]) -> Snapshot:
        """Make a dataset, let ``fill`` write a file system into the directory it is given, and commit it as ``@base``.

        Nothing is left if ``fill`` raises.
        """
        dataset = f"{self.root}/{_TEMPLATE}{record.id}"
        zfs.lzc_create(dataset, props={"canmount": "noauto", "atime": "off", "com.sun:auto-snapshot": "false"})
        try:
            zfs.mount(dataset)
            fill(self.mountpoint / f"{_TEMPLATE}{record.id}")
            zfs.unmount(dataset)
            self._take(f"{dataset}@{_BASE}", record)
        except BaseException:
            with suppress(zfs.exceptions.ZFSError):
                self._destroy(dataset)
            raise
        return record

    @_translated
    def clone(
        self, snapshot_id: str, instance: str, *, disk_mb: int | None = None, props: Mapping[str, str] | None = None
    ) -> Path:
        """Clone a snapshot as an instance, mounted; returns where. It is swept at the next scan unless it is saved.

        ``disk_mb``: what may be referenced in it (``refquota``), in MiB. Raises NotFound, NoSpace, OverQuota.
        """
        options: dict[str, str] = dict(props or {})
        if disk_mb is not None:
            options["refquota"] = str(disk_mb << 20)
        origin = self.snapshot_dataset(snapshot_id)
        try:
            zfs.lzc_clone(self.dataset(instance), origin, options)
        except zfs.exceptions.DatasetNotFound:
            self._forget_if_gone(snapshot_id, origin)
            raise
        except zfs.exceptions.NoSpace:
            self._blame_quota(origin, disk_mb)
            raise
        return self.instance_root(instance)

    def _forget_if_gone(self, snapshot_id: str, origin: str) -> None:
        if not zfs.lzc_exists(origin):
            with self._guard:
                self._places.pop(snapshot_id, None)
            raise NotFound("snapshot", snapshot_id)

    def _blame_quota(self, origin: str, disk_mb: int | None) -> None:
        """zfs-fuse says "out of space" where a clone is born larger than its quota."""
        held = zfs.get_props([origin], ["referenced"])[origin]["referenced"].number
        if disk_mb is not None and held > disk_mb << 20:
            raise OverQuota(f"a disk of {disk_mb} MiB is too small: the snapshot holds {(held >> 20) + 1} MiB")

    @_translated
    def mount(self, instance: str) -> Path:
        """Mount an instance's file system where it is not mounted (after the host went down); returns where."""
        zfs.mount(self.dataset(instance))
        return self.instance_root(instance)

    @_translated
    def set_disk(self, instance: str, disk_mb: int) -> None:
        """Change what may be referenced in an instance, in MiB. Raises OverQuota if it holds more."""
        zfs.lzc_set_prop(self.dataset(instance), "refquota", disk_mb << 20)

    # ---- records ----

    @_translated
    def save(self, record: Sandbox) -> None:
        """Commit a sandbox's record on the dataset of the instance it names; older ones elsewhere no longer count."""
        self._write(self.dataset(record.instance), record)

    @_translated
    def snapshot(self, instance: str, record: Snapshot) -> Snapshot:
        """Snapshot an instance's file system, as ``record``: there is both or neither.

        What programs wrote is in it; what they hold in memory maps is, if they synced it.
        """
        self._take(f"{self.dataset(instance)}@{record.id}", record)
        return record

    @_translated
    def save_snapshot(self, record: Snapshot) -> None:
        """Write a snapshot's record anew. Raises NotFound if it is gone."""
        name = self.snapshot_dataset(record.id)
        try:
            self._write(name, record)
        except zfs.exceptions.DatasetNotFound:
            self._forget_if_gone(record.id, name)
            raise

    def _take(self, name: str, record: Snapshot) -> None:
        zfs.lzc_snapshot([name], encode(record, 1))
        with self._guard:
            self._places[record.id] = name
            self._generations[record.id] = 1

    def _write(self, name: str, record: Sandbox | Snapshot) -> None:
        with self._guard:
            generation = self._generations[record.id] = self._generations.get(record.id, 0) + 1
        props = encode(record, generation)
        for prop, value in props.items():
            zfs.lzc_set_prop(name, prop, value)
        if generation > 1:
            self._drop_old_parts(name, len(props) > 1)

    def _drop_old_parts(self, name: str, has_parts: bool) -> None:
        """Only a record that is, or may have been, long has parts; the next scan drops what is left here."""
        with self._guard:
            had_parts = name in self._long
            (self._long.add if has_parts else self._long.discard)(name)
        if had_parts:
            with suppress(zfs.exceptions.ZFSError):
                for prop in stale_parts(zfs.local_props(name)):
                    zfs.lzc_inherit_prop(name, prop)
