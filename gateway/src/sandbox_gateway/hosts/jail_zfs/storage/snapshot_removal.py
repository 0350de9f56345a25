"""Destroy a snapshot, or hide it until it is no longer used."""

from __future__ import annotations

from collections.abc import Callable

import zfs_core

from sandbox_gateway.errors import InUseExternally


def destroy_snapshot(name: str, *, deferred: bool, check_clones: Callable[[], None]) -> bool:
    """Destroy a snapshot, or hide it if it is held or has clones. Returns whether it was destroyed.

    ZFS destroys a hidden snapshot when its last clone or hold is removed. Unless ``deferred``, raises InUseExternally
    if the snapshot is held, and calls ``check_clones``, which raises InUseExternally if a clone prevents hiding it.
    """
    try:
        zfs_core.lzc_destroy_snaps([name], False)
        return True
    except zfs_core.exceptions.SnapshotDestructionFailure as failure:
        error = failure.errors[0]
        if not isinstance(error, zfs_core.exceptions.SnapshotIsHeld | zfs_core.exceptions.SnapshotIsCloned):
            raise
    if not deferred:
        check_clones()
        if isinstance(error, zfs_core.exceptions.SnapshotIsHeld):
            raise InUseExternally({"hold": {name: name}}, "Release it first (`zfs release`).")
    zfs_core.lzc_destroy_snaps([name], True)
    return not zfs_core.lzc_exists(name)
