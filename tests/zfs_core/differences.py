"""List the tests of libzfs_core that cannot pass, with the reason of each."""

from __future__ import annotations

_COMMON_DIFFERENCES = {
    "test_force_recv_full_already_existing_with_snapshots": (
        "`zfs receive -F` does not replace a filesystem that has snapshots"
    ),
}

_NO_READ_ONLY_POOLS = "zfs-fuse cannot import a pool read-only"
_NO_LATER_SNAPSHOTS = "`zfs receive -F` of zfs-fuse does not destroy snapshots that are later than the stream's base"
_SAME_FILESYSTEM_ONLY = "`zfs send -i` of zfs-fuse needs a base in the same filesystem"
_DIFFERENT_ORDER = "zfs-fuse checks the destination in a different order, so it reports a different reason"
_NO_OPTIONS = "`zfs receive` of zfs-fuse has no options for properties and origins"
_NO_SEND_OPTIONS = "`zfs send` of zfs-fuse has no flags, and sends only snapshots"

DIFFERENCES: dict[str, dict[str, str]] = {
    "openzfs": {
        **_COMMON_DIFFERENCES,
        "test_force_recv_full_existing_modified_mounted_fs": (
            "`zfs receive -F` unmounts a filesystem before it replaces it, which fails while a file is open"
        ),
    },
    "zfs-fuse": {
        **_COMMON_DIFFERENCES,
        **dict.fromkeys(
            ("test_create_fs_in_ro_pool", "test_recv_full_into_ro_pool", "test_snapshot_ro_pool"), _NO_READ_ONLY_POOLS
        ),
        **dict.fromkeys(
            (
                "test_force_recv_incremental_modified_fs_plus_cloned_snap",
                "test_force_recv_incremental_modified_fs_plus_later_snap",
            ),
            _NO_LATER_SNAPSHOTS,
        ),
        **dict.fromkeys(
            (
                "test_recv_incr_across_clone_branch_point",
                "test_recv_incr_across_clone_branch_point_new_fs",
                "test_recv_incr_across_clone_branch_point_no_origin",
                "test_send_incr_across_clone_branch_point",
            ),
            _SAME_FILESYSTEM_ONLY,
        ),
        **dict.fromkeys(
            (
                "test_recv_incremental_duplicate",
                "test_recv_incremental_into_cloned_fs",
                "test_recv_incremental_more_recent_snap",
                "test_recv_incremental_same_fs",
                "test_recv_incremental_unrelated_fs",
            ),
            _DIFFERENT_ORDER,
        ),
        **dict.fromkeys(
            ("test_recv_full_but_specify_origin", "test_recv_one_invalid_prop", "test_recv_one_props"), _NO_OPTIONS
        ),
        **dict.fromkeys(("test_send_filesystem", "test_send_flags"), _NO_SEND_OPTIONS),
        "test_promote_too_long_snapname": "zfs-fuse promotes a clone even if the name of a snapshot becomes too long",
    },
}
HANGING_TESTS = dict.fromkeys(
    ("test_force_recv_full_existing_modified_mounted_fs", "test_force_recv_incremental_modified_mounted_fs"),
    "zfs-fuse hangs when it replaces a filesystem in which a process has files open",
)
"""Tests that zfs-fuse does not survive."""
