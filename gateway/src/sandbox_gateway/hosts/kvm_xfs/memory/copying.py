"""Copies pages from a stopped machine to its memory image."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Ram, Runs

HELD_BYTES = 256 << 20
"""Maximum bytes held in memory until the machine resumes; the rest is written immediately."""


class PageBuffer:
    """Memory for pages while the machine is stopped, touched in advance to avoid page faults."""

    def __init__(self, size: int) -> None:
        self._bytes = np.ones(min(size, HELD_BYTES), dtype=np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        return self._bytes[:size] if size <= len(self._bytes) else np.empty(size, dtype=np.uint8)


@dataclass
class HeldPages:
    """Pages that were read from a stopped machine and have not been written to its image yet."""

    data: NDArray[np.uint8]
    runs: list[tuple[int, int]]
    """(offset in the image, length) of each run, in the order of ``data``."""
    written: int = 0

    def write(self, descriptor: int, *, skip_zeros: bool = False) -> int:
        """Write the pages to the image; return the bytes written. ``skip_zeros``: leave holes for empty pages."""
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


def copy_out(ram: Ram, runs: Runs, descriptor: int, buffer: PageBuffer, *, skip_zeros: bool) -> HeldPages:
    """Read the runs while the machine is stopped. Writes pages beyond ``HELD_BYTES`` to ``descriptor`` immediately."""
    total = int(runs[:, 1].sum())
    if total <= HELD_BYTES:
        data = buffer.take(total)
        ram.read(runs, data)
        return HeldPages(data, list(zip(ram.offsets(runs), runs[:, 1].tolist(), strict=True)))
    written = 0
    for piece in _pieces(runs, HELD_BYTES):
        data = buffer.take(int(piece[:, 1].sum()))
        ram.read(piece, data)
        held = HeldPages(data, list(zip(ram.offsets(piece), piece[:, 1].tolist(), strict=True)))
        written += held.write(descriptor, skip_zeros=skip_zeros)
    return HeldPages(np.empty(0, dtype=np.uint8), [], written)


def _pieces(runs: Runs, most: int) -> Iterator[Runs]:
    """Yield the runs in groups of at most ``most`` bytes; long runs are split."""
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


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done
