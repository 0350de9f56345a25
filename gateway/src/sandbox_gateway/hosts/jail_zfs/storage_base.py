"""What all that is kept in ZFS has in common: the root dataset, how records are written, what a full pool allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sandbox_gateway.errors import Conflict, OverQuota
from sandbox_gateway.hosts.jail_zfs import zfs
from sandbox_gateway.hosts.jail_zfs.storage_scan import Marks
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, QUARANTINE, Record, encode, stale_parts

_BALLAST = "ballast"
_BALLAST_BYTES = 16 << 20


class StorageBase:
    def __init__(self, root_dataset: str) -> None:
        self.root = root_dataset
        self._mountpoint: Path | None = None
        self._guard = threading.RLock()
        """Over the maps."""
        self._shape = threading.RLock()
        """Over what moves or removes datasets that others may depend on."""
        self._generations: dict[str, int] = {}
        """Of the newest record of each thing, by its id."""
        self._long: set[str] = set()
        """Datasets and snapshots that have, or may have, parts of records."""

    @property
    def mountpoint(self) -> Path:
        """Of the root dataset. Raises Conflict before ``open``."""
        if self._mountpoint is None:
            raise Conflict("the storage is not open")
        return self._mountpoint

    def _ensure_container(self, name: str) -> None:
        if not zfs.lzc_exists(name):
            # snapshots that some tool takes of everything would keep every instance from going
            zfs.lzc_create(name, props={"atime": "off", "com.sun:auto-snapshot": "false"})
        zfs.mount(name)

    # ---- records ----

    def _write(self, name: str, record: Record) -> None:
        with self._guard:
            generation = self._generations[record.id] = self._generations.get(record.id, 0) + 1
        props = encode(record, generation)
        for prop, value in props.items():
            self._in_need(lambda prop=prop, value=value: zfs.lzc_set_prop(name, prop, value))  # type: ignore[misc]
        if name in self._long:
            self._drop_stale_parts(name)
        if len(props) > 1:
            self._long.add(name)

    @staticmethod
    def _drop_stale_parts(name: str) -> None:
        """The record is committed already; what cannot be dropped now is dropped by the next scan."""
        with suppress(zfs.exceptions.ZFSError):
            for prop in stale_parts(zfs.local_props(name)):
                zfs.lzc_inherit_prop(name, prop)

    def _drop_record(self, dataset: str) -> None:
        if HEAD in zfs.local_props(dataset):
            self._in_need(lambda: zfs.lzc_inherit_prop(dataset, HEAD))

    def _mark(self, found: Marks) -> None:
        """Properties that say what was found; that they cannot be written (a full pool) changes nothing else."""
        with suppress(zfs.exceptions.ZFSError):
            for name, why in found.to_mark.items():
                zfs.lzc_set_prop(name, QUARANTINE, why)
            for name in found.mended:
                zfs.lzc_inherit_prop(name, QUARANTINE)
            for name, prop in found.stale:
                zfs.lzc_inherit_prop(name, prop)

    # ---- when space is short ----

    def _in_need(self, change: Callable[[], None]) -> None:
        """Make a change that must be possible on a full pool, or nothing could ever be removed from it.

        On a full pool ZFS destroys, but writes no property and renames nothing. So a few megabytes are held back in
        a dataset that can be destroyed; it comes back with the next ``scan`` that finds space.
        """
        try:
            change()
        except zfs.exceptions.NoSpace:
            ballast = f"{self.root}/{_BALLAST}"
            if not zfs.lzc_exists(ballast):
                raise
            zfs.lzc_destroy(ballast)
            change()

    def _take_ballast(self) -> list[str]:
        ballast = f"{self.root}/{_BALLAST}"
        if zfs.lzc_exists(ballast):
            return []
        try:
            zfs.lzc_create(ballast, props={"canmount": "off", "refreservation": str(_BALLAST_BYTES)})
        except (zfs.exceptions.NoSpace, zfs.exceptions.QuotaExceeded):
            return [f"the pool of {self.root} is nearly full: not even {_BALLAST_BYTES >> 20} MiB can be held back"]
        return []

    @staticmethod
    def _blame_quota(origin: str, size_mb: int | None, what: str = "disk") -> None:
        """zfs-fuse says "out of space" where a clone is born larger than its quota."""
        held = zfs.get_props([origin], ["referenced"])[origin]["referenced"].number
        if size_mb is not None and held > size_mb << 20:
            raise OverQuota(f"a {what} of {size_mb} MiB is too small: the snapshot holds {(held >> 20) + 1} MiB")
