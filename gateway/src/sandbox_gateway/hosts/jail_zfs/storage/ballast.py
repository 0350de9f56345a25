"""Reserve space for changes that must be possible on a full pool."""

from __future__ import annotations

from collections.abc import Callable

import zfs_core

_BALLAST_BYTES = 16 << 20


class Ballast:
    """The dataset ``ROOT/ballast``, whose only purpose is to reserve space.

    On a full pool, ZFS can destroy datasets, but can neither set properties nor rename datasets. Removing a sandbox
    requires both, so it would fail without reserved space.
    """

    def __init__(self, root_dataset: str) -> None:
        self._root = root_dataset
        self._dataset = f"{root_dataset}/ballast"

    def run_even_if_full(self, change: Callable[[], None]) -> None:
        """Call ``change``, and if the pool is full, release the ballast and call ``change`` again."""
        try:
            change()
        except zfs_core.exceptions.QuotaTooSmall:
            raise
        except zfs_core.exceptions.NoSpace:
            if not zfs_core.lzc_exists(self._dataset):
                raise
            zfs_core.lzc_destroy(self._dataset, unmounted=True)
            change()

    def refill(self) -> list[str]:
        """Recreate the ballast if it is missing. Returns a warning if the pool is too full."""
        if zfs_core.lzc_exists(self._dataset):
            return []
        try:
            zfs_core.lzc_create(self._dataset, props={"canmount": "off", "refreservation": str(_BALLAST_BYTES)})
        except (zfs_core.exceptions.NoSpace, zfs_core.exceptions.QuotaExceeded):
            return [
                f"the pool of {self._root} is nearly full: {_BALLAST_BYTES >> 20} MiB could not be reserved. "
                "Remove snapshots or sandboxes"
            ]
        return []
