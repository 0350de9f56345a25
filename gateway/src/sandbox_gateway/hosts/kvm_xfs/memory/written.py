"""Finds the pages that a machine wrote since its start: the anonymous pages of its private mapping.

Source: Linux Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Area, Ram, Runs
from sandbox_gateway.records import Memory

_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("=12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
# With more, Linux 6.18 reports some regions twice, because it fills a buffer of 512 at a time.
_SCAN_REGIONS = 512
_PM_FILE, _PM_SWAPPED, _PM_PRESENT = np.uint64(1 << 61), np.uint64(1 << 62), np.uint64(1 << 63)


def list_written(ram: Ram) -> tuple[Runs, Memory]:
    """Return the runs of pages that may differ from the image, and the mode that found them.

    ``incremental`` if the kernel reports which pages are anonymous, else ``full``: every page.
    """
    try:
        return _join(_scan(ram.pid, area) for area in ram.areas), Memory.INCREMENTAL
    except OSError:
        pass
    try:
        return _join(_pagemap(ram.pid, area) for area in ram.areas), Memory.INCREMENTAL
    except OSError:
        return ram.everything(), Memory.FULL


def _join(parts: Iterator[Runs]) -> Runs:
    return np.concatenate([np.empty((0, 2), dtype=np.uint64), *parts])


def _scan(pid: int, area: Area) -> Runs:
    """Find anonymous pages with the PAGEMAP_SCAN ioctl (Linux 6.7). Raises OSError if the kernel lacks it."""
    found: list[Runs] = []
    regions = np.empty((_SCAN_REGIONS, 3), dtype=np.uint64)
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        start = area.start
        while start < area.end:
            argument = bytearray(
                _SCAN.pack(
                    _SCAN.size, 0, start, area.end, 0, regions.ctypes.data, _SCAN_REGIONS, 0,
                    _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_PRESENT,
                )
            )  # fmt: skip
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
            spans = regions[:count]
            found.append(np.stack([spans[:, 0], spans[:, 1] - spans[:, 0]], axis=1))
            start = _SCAN.unpack(argument)[4]
    return np.concatenate([np.empty((0, 2), dtype=np.uint64), *found])


def _pagemap(pid: int, area: Area) -> Runs:
    """Find anonymous pages by reading /proc/PID/pagemap: (present or swapped) and not of the file."""
    pages = (area.end - area.start) // PAGE
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        raw = os.pread(pagemap.fileno(), pages * 8, area.start // PAGE * 8)
    if len(raw) != pages * 8:
        raise OSError(errno.EIO, "short pagemap")
    entries = np.frombuffer(raw, dtype=np.uint64)
    if not (entries & (_PM_PRESENT | _PM_SWAPPED)).any():
        # A kernel that hides the map returns nothing at all, but a running machine has always written something.
        raise OSError(errno.EPERM, "empty pagemap")
    anonymous = ((entries & (_PM_PRESENT | _PM_SWAPPED)) != 0) & ((entries & _PM_FILE) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], anonymous, [False])).astype(np.int8))).reshape(-1, 2)
    starts = edges[:, 0] * PAGE + area.start
    return np.stack([starts, (edges[:, 1] - edges[:, 0]) * PAGE], axis=1).astype(np.uint64)
