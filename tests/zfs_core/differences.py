"""List the tests of libzfs_core that cannot pass, with the reason of each."""

from __future__ import annotations

_BOTH = {
    "test_set_readonly_prop": "zfs_core refuses to set a read-only property, which this test wants to be ignored",
    "test_set_prop_too_small_quota": "a quota below the used space is QuotaExceeded, not NoSpace: the pool has space",
    "test_force_recv_full_already_existing_with_snapshots": (
        "`zfs receive -F` does not replace a filesystem that has snapshots"
    ),
    "test_force_recv_full_existing_modified_mounted_fs": (
        "`zfs receive -F` does not replace a filesystem while a process has files in it open"
    ),
}
_NO_READ_ONLY_POOLS = "zfs-fuse cannot import a pool read-only"
DIFFERENCES: dict[str, dict[str, str]] = {
    "openzfs": {**_BOTH},
    "zfs-fuse": {
        **_BOTH,
        "test_create_fs_in_ro_pool": _NO_READ_ONLY_POOLS,
        "test_recv_full_into_ro_pool": _NO_READ_ONLY_POOLS,
        "test_snapshot_ro_pool": _NO_READ_ONLY_POOLS,
    },
}
HANGING_TESTS = {
    name: "zfs-fuse hangs if it should replace a filesystem while a process has files in it open"
    for name in ("test_force_recv_full_existing_modified_mounted_fs", "test_force_recv_incremental_modified_mounted_fs")
}
"""Tests that zfs-fuse does not survive."""
