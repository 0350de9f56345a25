"""The process's heap: what was freed goes back to the system."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 1 << 20
"""Bytes; from here on an allocation is a mapping of its own, and gone when it is freed."""


def give_back() -> None:
    """Keep the heap as small as what is in use.

    By itself glibc raises the size from which on it maps allocations up to 32 MiB, after the first of that size was
    freed. Pages of captured machines then come from heaps, of which each thread has one, and stay there. Other
    libraries need no such word: they give back by themselves. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_THRESHOLD, _LARGE), (_M_TRIM_THRESHOLD, _LARGE), (_M_ARENA_MAX, 2)):
            mallopt(option, value)
