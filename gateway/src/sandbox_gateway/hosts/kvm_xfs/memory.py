"""The memory of a running machine: which pages it wrote since it was started, and copying them out.

A machine's RAM is a private mapping (MAP_PRIVATE) of its base image: a page it never wrote belongs to that file, a
page it wrote is anonymous. Sources: Linux Documentation/admin-guide/mm/pagemap.rst, process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.records import Memory

PAGE = os.sysconf("SC_PAGE_SIZE")
HELD_BYTES = 256 << 20
"""Pages are held in our own memory until the machine goes on, up to this much; beyond, they are written at once."""

_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("=12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
# With more, Linux 6.18 reports some regions twice: it fills a buffer of 512 at a time.
_SCAN_REGIONS = 512
_PM_FILE, _PM_SWAPPED, _PM_PRESENT = np.uint64(1 << 61), np.uint64(1 << 62), np.uint64(1 << 63)
_IOV_MAX = 1024

Runs = NDArray[np.uint64]
"""Shape (n, 2): start address and length in bytes of each run of pages, ascending."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


@dataclass(frozen=True)
class Area:
    """One mapped stretch of the base image in the machine's address space; bytes."""

    start: int
    end: int
    offset: int


class Ram:
    """The RAM of process ``pid``, mapped from the file ``image`` (identified by its inode)."""

    def __init__(self, pid: int, image: Path) -> None:
        self.pid = pid
        self.areas = _areas(pid, image)
        self.size = sum(area.end - area.start for area in self.areas)

    def written(self) -> tuple[Runs, Memory]:
        """Runs of pages that differ from the image, and the mode that found them.

        ``incremental`` where the kernel tells which pages are anonymous, else ``full``: every page.
        """
        try:
            return self._join(_scan(self.pid, area) for area in self.areas), Memory.INCREMENTAL
        except OSError:
            pass
        try:
            return self._join(_pagemap(self.pid, area) for area in self.areas), Memory.INCREMENTAL
        except OSError:
            return self.everything(), Memory.FULL

    def everything(self) -> Runs:
        return np.array([(area.start, area.end - area.start) for area in self.areas], dtype=np.uint64).reshape(-1, 2)

    @staticmethod
    def _join(parts: Iterator[Runs]) -> Runs:
        return np.concatenate([np.empty((0, 2), dtype=np.uint64), *parts])

    def offsets(self, runs: Runs) -> list[int]:
        """Where each run lies in the image."""
        starts = runs[:, 0]
        offsets = np.zeros(len(runs), dtype=np.int64)
        for area in self.areas:
            inside = (starts >= area.start) & (starts < area.end)
            offsets[inside] = (starts[inside] - np.uint64(area.start) + np.uint64(area.offset)).astype(np.int64)
        return [int(offset) for offset in offsets]

    def read(self, runs: Runs, into: NDArray[np.uint8]) -> None:
        """Copy the runs one behind another into ``into``, which is exactly as long as they are together."""
        done = 0
        for first in range(0, len(runs), _IOV_MAX):
            part = np.ascontiguousarray(runs[first : first + _IOV_MAX])
            length = int(part[:, 1].sum())
            local = np.array([into.ctypes.data + done, length], dtype=np.uint64)
            copied = _libc.process_vm_readv(self.pid, local.ctypes.data, 1, part.ctypes.data, len(part), 0)
            if copied != length:
                reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {length} bytes"
                raise BackendFailed(f"the memory of process {self.pid} cannot be read: {reason}")
            done += length


class PageBuffer:
    """Memory to hold pages in while the machine stands still, touched beforehand so that no fault costs time then."""

    def __init__(self, size: int) -> None:
        self._bytes = np.ones(min(size, HELD_BYTES), dtype=np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        return self._bytes[:size] if size <= len(self._bytes) else np.empty(size, dtype=np.uint8)


@dataclass
class Held:
    """Pages read from a stopped machine, yet to be written to its image."""

    data: NDArray[np.uint8]
    runs: list[tuple[int, int]]
    """(offset in the image, length) of each run, in the order of ``data``."""
    written: int = 0

    def write(self, descriptor: int, *, skip_zeros: bool = False) -> int:
        """Write what is held to the image; returns the bytes written. ``skip_zeros``: leave holes for empty pages."""
        position = 0
        view = self.data.data
        for offset, length in self.runs:
            if skip_zeros:
                self._write_nonzero(descriptor, offset, self.data[position : position + length])
            else:
                _pwrite(descriptor, view[position : position + length], offset)
                self.written += length
            position += length
        return self.written

    def _write_nonzero(self, descriptor: int, offset: int, pages: NDArray[np.uint8]) -> None:
        full = pages.view(np.uint64).reshape(-1, PAGE // 8).any(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], full, [False])).astype(np.int8))).reshape(-1, 2) * PAGE
        for first, last in edges.tolist():
            _pwrite(descriptor, pages[first:last].data, offset + first)
            self.written += last - first


def copy_out(ram: Ram, runs: Runs, descriptor: int, buffer: PageBuffer, *, skip_zeros: bool) -> Held:
    """Read the runs while the machine is stopped; what is not held in the answer was written to ``descriptor``."""
    total = int(runs[:, 1].sum())
    if total <= HELD_BYTES:
        data = buffer.take(total)
        ram.read(runs, data)
        return Held(data, list(zip(ram.offsets(runs), runs[:, 1].tolist(), strict=True)))
    written = 0
    for piece in _pieces(runs, HELD_BYTES):
        data = buffer.take(int(piece[:, 1].sum()))
        ram.read(piece, data)
        held = Held(data, list(zip(ram.offsets(piece), piece[:, 1].tolist(), strict=True)))
        written += held.write(descriptor, skip_zeros=skip_zeros)
    return Held(np.empty(0, dtype=np.uint8), [], written)


def _pieces(runs: Runs, most: int) -> Iterator[Runs]:
    """The runs in groups of at most ``most`` bytes, long runs cut."""
    group: list[tuple[int, int]] = []
    room = most
    for start, length in runs.tolist():
        while length:
            step = min(length, room)
            group.append((start, step))
            start, length, room = start + step, length - step, room - step
            if room == 0:
                yield np.array(group, dtype=np.uint64)
                group, room = [], most
    if group:
        yield np.array(group, dtype=np.uint64)


def _areas(pid: int, image: Path) -> list[Area]:
    """The mappings of ``image`` in /proc/PID/maps, by device and inode: the path may have been unlinked since."""
    stat = image.stat()
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
    areas = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, where, inode = line.split(maxsplit=5)[:5]
        if where == device and int(inode) == stat.st_ino:
            start, end = (int(edge, 16) for edge in span.split("-"))
            areas.append(Area(start, end, int(offset, 16)))
    if not areas:
        raise BackendFailed(f"process {pid} does not map {image}")
    return areas


def _scan(pid: int, area: Area) -> Runs:
    """Anonymous pages by the PAGEMAP_SCAN ioctl (Linux 6.7). Raises OSError where the kernel has it not."""
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
    """Anonymous pages by reading /proc/PID/pagemap: (present or swapped) and not of the file."""
    pages = (area.end - area.start) // PAGE
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        raw = os.pread(pagemap.fileno(), pages * 8, area.start // PAGE * 8)
    if len(raw) != pages * 8:
        raise OSError(errno.EIO, "short pagemap")
    entries = np.frombuffer(raw, dtype=np.uint64)
    if not (entries & (_PM_PRESENT | _PM_SWAPPED)).any():
        # A kernel that hides the map from us shows nothing at all; a machine that runs has written something.
        raise OSError(errno.EPERM, "empty pagemap")
    anonymous = ((entries & (_PM_PRESENT | _PM_SWAPPED)) != 0) & ((entries & _PM_FILE) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], anonymous, [False])).astype(np.int8))).reshape(-1, 2)
    starts = edges[:, 0] * PAGE + area.start
    return np.stack([starts, (edges[:, 1] - edges[:, 0]) * PAGE], axis=1).astype(np.uint64)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done
