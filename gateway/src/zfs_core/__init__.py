"""Implement the API of ``libzfs_core`` (pyzfs) with the ``zfs`` command. It does not depend on sandboxes.

The functions ``lzc_*`` have the same names, argument order and exceptions as in libzfs_core. Names may be str or bytes.
Exceptions are in ``zfs_core.exceptions``. The functions differ from pyzfs in four ways. A new filesystem is mounted at
once, if its ``canmount`` and ``mountpoint`` allow this. ``lzc_destroy`` unmounts the filesystem first. ``lzc_rename``
mounts the filesystem again under its new name. If ZFS lacks ``atomic_snapshots``, ``lzc_snapshot`` takes snapshots one
by one, and destroys them again if one fails.

The other functions list datasets, mount them, read their properties, and detect changes since a snapshot. They have no
counterpart in pyzfs. All functions block (use ``asyncio.to_thread``). Each command has a timeout of
``zfs_core.process.TIMEOUT_SECONDS``, or ``TRANSFER_TIMEOUT_SECONDS`` if it transfers a stream.
"""

from zfs_core import exceptions
from zfs_core.capabilities import detect_capabilities
from zfs_core.changes import has_changed_since
from zfs_core.datasets import lzc_clone, lzc_create, lzc_destroy, lzc_promote, lzc_rename
from zfs_core.holds import lzc_get_holds, lzc_hold, lzc_release
from zfs_core.listing import check_reachable, list_clones, list_datasets, list_snapshots, lzc_exists
from zfs_core.mounts import is_mounted, list_mounted_dependents, mount, unmount
from zfs_core.properties import (
    get_props,
    get_tree,
    local_props,
    local_tree,
    lzc_inherit_prop,
    lzc_set_prop,
    sync,
    used_bytes,
    written_bytes,
)
from zfs_core.snapshots import lzc_destroy_snaps, lzc_rollback, lzc_rollback_to, lzc_snap, lzc_snapshot
from zfs_core.streams import lzc_receive, lzc_send

__all__ = [
    "check_reachable",
    "detect_capabilities",
    "exceptions",
    "get_props",
    "get_tree",
    "has_changed_since",
    "is_mounted",
    "list_clones",
    "list_datasets",
    "list_mounted_dependents",
    "list_snapshots",
    "local_props",
    "local_tree",
    "lzc_clone",
    "lzc_create",
    "lzc_destroy",
    "lzc_destroy_snaps",
    "lzc_exists",
    "lzc_get_holds",
    "lzc_hold",
    "lzc_inherit_prop",
    "lzc_promote",
    "lzc_receive",
    "lzc_release",
    "lzc_rename",
    "lzc_rollback",
    "lzc_rollback_to",
    "lzc_send",
    "lzc_set_prop",
    "lzc_snap",
    "lzc_snapshot",
    "mount",
    "sync",
    "unmount",
    "used_bytes",
    "written_bytes",
]
