"""Destroy a snapshot, or hide it until nothing uses it any more."""

from __future__ import annotations

from collections.abc import Callable

from sandbox_gateway import zfs
from sandbox_gateway.errors import InUseExternally


def destroy_snapshot(name: str, *, deferred: bool, check_clones: Callable[[], None]) -> bool:
    """Destroy a snapshot and return True. Returns False if it is only hidden, because it is held or has clones.

    ZFS destroys a hidden snapshot with its last clone or hold. Unless ``deferred``, raises InUseExternally if the
    snapshot is held. ``check_clones`` raises it if a clone prevents hiding the snapshot.
    """
    try:
        zfs.lzc_destroy_snaps([name], False)
        return True
    except zfs.exceptions.SnapshotDestructionFailure as failure:
        reason = failure.errors[0]
        if not isinstance(reason, zfs.exceptions.SnapshotIsHeld | zfs.exceptions.SnapshotIsCloned):
            raise
    if not deferred:
        check_clones()
        if isinstance(reason, zfs.exceptions.SnapshotIsHeld):
            raise InUseExternally({"hold": {name: name}}, "Release it first (`zfs release`).")
    zfs.lzc_destroy_snaps([name], True)
    return not zfs.lzc_exists(name)
