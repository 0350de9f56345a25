"""List the pages that a machine has written, as recorded by the kernel.

A page that the machine has written since its start is anonymous: a private copy of a page of the boot image. The
kernel's marks show which pages were written since an earlier listing. Taking the marks clears them, so that the next
listing shows only later writes. A listing is complete only if the machine is stopped and has no I/O in flight: such I/O
writes to pages that the kernel looked up earlier, and does not mark them.

Sources: Linux Documentation/admin-guide/mm/pagemap.rst and soft-dirty.rst.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs, concatenate, create_empty_runs, create_runs_from_mask
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Area, Ram

_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARGUMENT = struct.Struct("=12Q")
_IS_WRITTEN, _IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_PROTECT_MATCHING, _REQUIRE_TRACKING = 1 << 0, 1 << 1
# Linux 6.18 fills a buffer of 512 regions at a time. With a larger limit, it reports some regions twice.
_MAX_SCAN_REGIONS = 512
_PM_SOFT_DIRTY, _PM_FILE, _PM_SWAPPED, _PM_PRESENT = (np.uint64(1 << bit) for bit in (55, 61, 62, 63))
_CLEAR_SOFT_DIRTY = b"4"


def list_anonymous_pages(ram: Ram) -> Runs:
    """Return all pages written since the machine's start. Raises OSError if the kernel does not report them."""
    try:
        return concatenate(_scan(ram.pid, area) for area in ram.areas)
    except OSError:
        return concatenate(_list_matching_pages(ram.pid, area, _is_anonymous) for area in ram.areas)


def is_tracked(ram: Ram) -> bool:
    """Return whether the kernel tracks writes to the machine's memory."""
    try:
        for area in ram.areas:
            _scan(ram.pid, Area(area.start, area.start + PAGE_BYTES, area.offset), _REQUIRE_TRACKING, _IS_WRITTEN)
    except OSError:
        return False
    return True


def list_written_pages(ram: Ram, *, take_marks: bool) -> Runs:
    """Return the pages written since the marks were last taken, or since the machine's start if none were taken.

    ``take_marks``: also take the marks in the same atomic step. Raises OSError if the kernel does not track the memory.
    """
    flags = _REQUIRE_TRACKING | (_PROTECT_MATCHING if take_marks else 0)
    return concatenate(_scan(ram.pid, area, flags, _IS_WRITTEN) for area in ram.areas)


def list_soft_dirty_pages(ram: Ram, *, take_marks: bool) -> Runs:
    """Return the same pages as ``list_written_pages``, based on soft-dirty bits. Taking the marks is not atomic."""
    runs = concatenate(_list_matching_pages(ram.pid, area, _is_soft_dirty) for area in ram.areas)
    if take_marks:
        descriptor = os.open(f"/proc/{ram.pid}/clear_refs", os.O_WRONLY)
        try:
            os.write(descriptor, _CLEAR_SOFT_DIRTY)
        finally:
            os.close(descriptor)
    return runs


@functools.cache
def has_soft_dirty_bits() -> bool:
    """Return whether this kernel supports soft-dirty bits. Writes to a page to find out."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[0] = 1
        start = np.frombuffer(page, dtype=np.uint8).ctypes.data
        try:
            entries = _read_pagemap_entries(os.getpid(), start, start + PAGE_BYTES)
        except OSError:
            return False
    return bool(entries[0] & _PM_SOFT_DIRTY)


def _scan(pid: int, area: Area, flags: int = 0, categories: int = 0) -> Runs:
    """Return the anonymous pages that are in all ``categories``. Uses the PAGEMAP_SCAN ioctl (Linux 6.7 or later)."""
    parts: list[Runs] = []
    regions = np.empty((_MAX_SCAN_REGIONS, 3), dtype=np.uint64)
    descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = area.start
        while start < area.end:
            argument = bytearray(
                _SCAN_ARGUMENT.pack(
                    _SCAN_ARGUMENT.size, flags, start, area.end, 0, regions.ctypes.data, _MAX_SCAN_REGIONS, 0,
                    _IS_FILE, _IS_FILE | categories, _IS_PRESENT | _IS_SWAPPED, _IS_PRESENT,
                )
            )  # fmt: skip
            count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, argument)
            spans = regions[:count]
            parts.append(np.stack([spans[:, 0], spans[:, 1] - spans[:, 0]], axis=1))
            start = _SCAN_ARGUMENT.unpack(argument)[4]
    finally:
        os.close(descriptor)
    return concatenate(parts) if parts else create_empty_runs()


def _list_matching_pages(pid: int, area: Area, matches: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]) -> Runs:
    """Return the pages whose entries in /proc/PID/pagemap satisfy ``matches``."""
    entries = _read_pagemap_entries(pid, area.start, area.end)
    if not (entries & (_PM_PRESENT | _PM_SWAPPED)).any():
        # A running machine has always written something, so an empty map means that the kernel hides it.
        raise OSError(errno.EPERM, "the pagemap is empty")
    return create_runs_from_mask(matches(entries), area.start, PAGE_BYTES)


def _read_pagemap_entries(pid: int, start: int, end: int) -> NDArray[np.uint64]:
    length = (end - start) // PAGE_BYTES * 8
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        raw_entries = os.pread(pagemap.fileno(), length, start // PAGE_BYTES * 8)
    if len(raw_entries) != length:
        raise OSError(errno.EIO, "the pagemap is too short")
    return np.frombuffer(raw_entries, dtype=np.uint64)


def _is_anonymous(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray(((entries & (_PM_PRESENT | _PM_SWAPPED)) != 0) & ((entries & _PM_FILE) == 0))


def _is_soft_dirty(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray(_is_anonymous(entries) & ((entries & _PM_SOFT_DIRTY) != 0))
