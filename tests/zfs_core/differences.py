"""List the tests of libzfs_core that cannot pass, with the reason of each."""

from __future__ import annotations

_BOTH = {
    "test_set_readonly_prop": "zfs_core refuses to set a read-only property, which this test wants to be ignored",
    "test_set_prop_too_small_quota": "a quota below the used space is QuotaExceeded, not NoSpace: the pool has space",
}
DIFFERENCES: dict[str, dict[str, str]] = {
    "openzfs": {**_BOTH},
    "zfs-fuse": {**_BOTH},
}
