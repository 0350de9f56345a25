"""Locate and read the memory of a running machine.

A machine's RAM is a private mapping (MAP_PRIVATE) of its base image: pages that it never wrote belong to that file, and
pages that it wrote are anonymous. The start of a run of pages is a virtual address in the machine's process. Source:
process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
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
    """A mapped part of the base image: its start and end addresses in the process, and its offset in the image."""

    start: int
    end: int
    offset: int


class Ram:
    """The RAM of process ``pid``, mapped from the file ``image`` (identified by its inode)."""

    def __init__(self, pid: int, image: Path) -> None:
        self.pid = pid
        self.areas = _find_areas(pid, image)
        self.end = max(area.offset + area.end - area.start for area in self.areas)
        """The offset in the image at which its last area ends."""

    def list_all_pages(self) -> Runs:
        """Return all pages, as one run for each area."""
        return np.array([(area.start, area.end - area.start) for area in self.areas], dtype=np.uint64).reshape(-1, 2)

    def compute_offsets(self, runs: Runs) -> list[int]:
        """Return each run's offset in the image."""
        starts = runs[:, 0]
        offsets = np.zeros(len(runs), dtype=np.int64)
        for area in self.areas:
            is_inside = (starts >= area.start) & (starts < area.end)
            offsets[is_inside] = (starts[is_inside] - np.uint64(area.start) + np.uint64(area.offset)).astype(np.int64)
        return [int(offset) for offset in offsets]

    def read(self, runs: Runs, target: NDArray[np.uint8]) -> None:
        """Copy the contents of the runs one after another into ``target``, which must have their total length.

        Raises BackendFailed if the memory cannot be read.
        """
        position = 0
        for first in range(0, len(runs), _IOV_MAX):
            batch = np.ascontiguousarray(runs[first : first + _IOV_MAX])
            length = int(batch[:, 1].sum())
            local_iovec = np.array([target.ctypes.data + position, length], dtype=np.uint64)
            copied_bytes = _libc.process_vm_readv(
                self.pid, local_iovec.ctypes.data, 1, batch.ctypes.data, len(batch), 0
            )
            if copied_bytes != length:
                reason = os.strerror(ctypes.get_errno()) if copied_bytes < 0 else f"{copied_bytes} of {length} bytes"
                raise BackendFailed(f"the memory of process {self.pid} cannot be read: {reason}")
            position += length


def _find_areas(pid: int, image: Path) -> list[Area]:
    """Return the mappings of ``image``. Finds them by device and inode, because the mapped path may be unlinked."""
    status = image.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    areas = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, mapped_device, inode = line.split(maxsplit=5)[:5]
        if mapped_device == device and int(inode) == status.st_ino:
            start, end = (int(bound, 16) for bound in span.split("-"))
            areas.append(Area(start, end, int(offset, 16)))
    if not areas:
        raise BackendFailed(f"process {pid} does not map {image}")
    return areas
