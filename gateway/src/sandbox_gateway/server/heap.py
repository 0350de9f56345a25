"""Make the allocator return freed memory to the system, and keep the garbage collector away from lasting objects."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 1 << 20
"""Threshold in bytes. Larger allocations get their own mapping, which is unmapped when they are freed."""


def return_freed_memory() -> None:
    """Configure glibc to return freed memory.

    By default glibc raises the threshold for mapped allocations, up to 32 MiB, when a larger one is freed. Buffers for
    pages of captured machines are then allocated in the heaps of threads, and stay there. Other C libraries need no
    setting. Source: mallopt(3).
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
    """Exclude the objects that exist now from garbage collection. Call this when the start is complete.

    Records of all sandboxes and snapshots exist as long as the gateway runs, or are freed by their reference counts.
    With thousands of them, each full collection would stop the gateway for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
