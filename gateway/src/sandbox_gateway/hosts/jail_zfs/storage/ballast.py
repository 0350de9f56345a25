"""Reserve space for changes that must be possible on a full pool."""

from __future__ import annotations

from collections.abc import Callable

from sandbox_gateway import zfs

_BYTES = 16 << 20


class Ballast:
    """The dataset ``ROOT/ballast``, which only reserves space.

    On a full pool ZFS can destroy datasets, but not set properties or rename anything. Without reserved space, nothing
    could be removed from such a pool.
    """

    def __init__(self, root_dataset: str) -> None:
        self._root = root_dataset
        self._dataset = f"{root_dataset}/ballast"

    def run_even_if_full(self, change: Callable[[], None]) -> None:
        """Make a change. If the pool is full, release the ballast and retry."""
        try:
            change()
        except zfs.exceptions.NoSpace:
            if not zfs.lzc_exists(self._dataset):
                raise
            zfs.lzc_destroy(self._dataset)
            change()

    def refill(self) -> list[str]:
        """Reserve the space again if necessary. Returns a sentence if the pool is too full."""
        if zfs.lzc_exists(self._dataset):
            return []
        try:
            zfs.lzc_create(self._dataset, props={"canmount": "off", "refreservation": str(_BYTES)})
        except (zfs.exceptions.NoSpace, zfs.exceptions.QuotaExceeded):
            return [
                f"the pool of {self._root} is nearly full: {_BYTES >> 20} MiB could not be reserved. "
                "Remove snapshots or sandboxes"
            ]
        return []
