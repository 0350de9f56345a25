"""Make the allocator return freed memory to the system, and exclude long-lived objects from garbage collection."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 1 << 20
"""Threshold in bytes. Larger allocations get their own mapping, which is unmapped when they are freed."""


def configure_allocator() -> None:
    """Configure glibc to return freed memory to the system.

    By default, when a mapped allocation is freed, glibc raises the threshold for mapped allocations to its size, up to
    32 MiB. Later buffers for the pages of captured machines are then allocated in the heaps of threads, which do not
    return the memory. Other C libraries need no configuration. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in (
            (_M_MMAP_THRESHOLD, _THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, _THRESHOLD_BYTES),
            (_M_ARENA_MAX, 2),
        ):
            mallopt(option, value)


def exclude_existing_objects() -> None:
    """Exclude the objects that exist now from garbage collection. Call this when startup is complete.

    The records of sandboxes and snapshots exist as long as the gateway runs, or are freed by reference counting. With
    thousands of them, each full collection would pause the gateway for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
