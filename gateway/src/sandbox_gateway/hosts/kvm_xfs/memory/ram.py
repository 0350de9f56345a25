"""Locates and reads the memory of a running machine. Runs of its pages start at addresses in its process.

A machine's RAM is a private mapping (MAP_PRIVATE) of its base image: pages it never wrote belong to that file,
pages it wrote are anonymous. Source: process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs

PAGE = os.sysconf("SC_PAGE_SIZE")
_IOV_MAX = 1024

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
    """One mapped part of the base image in the machine's address space, in bytes."""

    start: int
    end: int
    offset: int


class Ram:
    """The RAM of process ``pid``, mapped from the file ``image`` (identified by its inode)."""

    def __init__(self, pid: int, image: Path) -> None:
        self.pid = pid
        self.areas = _areas(pid, image)
        self.end = max(area.offset + area.end - area.start for area in self.areas)
        """The end of its last area in the image."""

    def everything(self) -> Runs:
        return np.array([(area.start, area.end - area.start) for area in self.areas], dtype=np.uint64).reshape(-1, 2)

    def offsets(self, runs: Runs) -> list[int]:
        """Return the offset of each run in the image."""
        starts = runs[:, 0]
        offsets = np.zeros(len(runs), dtype=np.int64)
        for area in self.areas:
            inside = (starts >= area.start) & (starts < area.end)
            offsets[inside] = (starts[inside] - np.uint64(area.start) + np.uint64(area.offset)).astype(np.int64)
        return [int(offset) for offset in offsets]

    def read(self, runs: Runs, into: NDArray[np.uint8]) -> None:
        """Copy the runs one after another into ``into``, whose length is their total length."""
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


def _areas(pid: int, image: Path) -> list[Area]:
    """Return the mappings of ``image`` in /proc/PID/maps, by device and inode: its path may be unlinked."""
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
