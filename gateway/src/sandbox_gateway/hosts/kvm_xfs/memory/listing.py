"""List the pages that a machine has written, as recorded by the kernel.

A page that the machine has written since its start is anonymous: a copy of the page of its boot image. Marks show which
pages were written since an earlier listing. Taking the marks clears them, which starts a new window. The machine must
be stopped, with no I/O in flight, because I/O writes to pages that were looked up earlier, without marking them.

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

from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Area, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs, concatenate, empty, from_mask

_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARGUMENT = struct.Struct("=12Q")
_IS_WRITTEN, _IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_PROTECT_MATCHING, _REQUIRE_TRACKING = 1 << 0, 1 << 1
# Linux 6.18 fills a buffer of 512 regions at a time. With a larger limit, it reports some regions twice.
_MAX_SCAN_REGIONS = 512
_PM_SOFT_DIRTY, _PM_FILE, _PM_SWAPPED, _PM_PRESENT = (np.uint64(1 << bit) for bit in (55, 61, 62, 63))
_CLEAR_SOFT_DIRTY = b"4"


def list_anonymous(ram: Ram) -> Runs:
    """Return all pages written since the machine's start. Raises OSError if the kernel does not report them."""
    try:
        return concatenate(_scan(ram.pid, area) for area in ram.areas)
    except OSError:
        return concatenate(_read_pagemap(ram.pid, area, _is_anonymous) for area in ram.areas)


def is_tracked(ram: Ram) -> bool:
    """Return whether the kernel tracks writes to the machine's memory."""
    try:
        for area in ram.areas:
            _scan(ram.pid, Area(area.start, area.start + PAGE, area.offset), _REQUIRE_TRACKING, _IS_WRITTEN)
    except OSError:
        return False
    return True


def list_written(ram: Ram, *, take: bool) -> Runs:
    """Return the pages written since the marks were last taken, or since the start of a newly tracked machine.

    ``take``: also take the marks, in the same atomic step. Raises OSError if the kernel does not track the memory.
    """
    flags = _REQUIRE_TRACKING | (_PROTECT_MATCHING if take else 0)
    return concatenate(_scan(ram.pid, area, flags, _IS_WRITTEN) for area in ram.areas)


def list_soft_dirty(ram: Ram, *, take: bool) -> Runs:
    """Do the same as ``list_written``, but with soft-dirty bits, and not atomically."""
    runs = concatenate(_read_pagemap(ram.pid, area, _is_soft_dirty) for area in ram.areas)
    if take:
        descriptor = os.open(f"/proc/{ram.pid}/clear_refs", os.O_WRONLY)
        try:
            os.write(descriptor, _CLEAR_SOFT_DIRTY)
        finally:
            os.close(descriptor)
    return runs


@functools.cache
def has_soft_dirty() -> bool:
    """Return whether this kernel has soft-dirty bits. Writes to a page to find out."""
    with mmap.mmap(-1, PAGE) as page:
        page[0] = 1
        start = np.frombuffer(page, dtype=np.uint8).ctypes.data
        try:
            entries = _pagemap_entries(os.getpid(), start, start + PAGE)
        except OSError:
            return False
    return bool(entries[0] & _PM_SOFT_DIRTY)


def _scan(pid: int, area: Area, flags: int = 0, categories: int = 0) -> Runs:
    """List anonymous pages of ``categories`` with the PAGEMAP_SCAN ioctl (Linux 6.7)."""
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
    return concatenate(parts) if parts else empty()


def _read_pagemap(pid: int, area: Area, matches: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]) -> Runs:
    """List the pages whose entry in /proc/PID/pagemap ``matches``."""
    entries = _pagemap_entries(pid, area.start, area.end)
    if not (entries & (_PM_PRESENT | _PM_SWAPPED)).any():
        # A running machine has always written something, so an empty map means that the kernel hides it.
        raise OSError(errno.EPERM, "the pagemap is empty")
    return from_mask(matches(entries), area.start, PAGE)


def _pagemap_entries(pid: int, start: int, end: int) -> NDArray[np.uint64]:
    length = (end - start) // PAGE * 8
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        raw = os.pread(pagemap.fileno(), length, start // PAGE * 8)
    if len(raw) != length:
        raise OSError(errno.EIO, "the pagemap is too short")
    return np.frombuffer(raw, dtype=np.uint64)


def _is_anonymous(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray(((entries & (_PM_PRESENT | _PM_SWAPPED)) != 0) & ((entries & _PM_FILE) == 0))


def _is_soft_dirty(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray(_is_anonymous(entries) & ((entries & _PM_SOFT_DIRTY) != 0))
