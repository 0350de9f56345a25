"""Copies pages of a machine to its new memory image; writes only pages that differ from the base."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs, from_mask, pieces, total

HELD_BYTES = 256 << 20
"""Maximum bytes held until the machine resumes; the rest is written while it is stopped."""
_PIECE_BYTES = 8 << 20
_PAGE_WORDS = PAGE // 8


class Copier:
    """Copies pages to ``image``, a clone of ``base``. Without a base, the image is empty.

    ``image`` and ``base`` are descriptors. ``written``: the number of bytes written to the image so far.
    """

    def __init__(self, ram: Ram, image: int, base: int | None) -> None:
        self._ram = ram
        self._image = image
        self._base = base
        self._written_before = np.zeros(ram.end // PAGE, dtype=np.bool_)
        """The pages of the image that this capture has written: their content is no longer the base's."""
        self._buffer = np.empty(0, dtype=np.uint8)
        self._held: list[tuple[Runs, NDArray[np.uint8]]] = []
        self.written = 0

    def reserve(self, size: int) -> None:
        """Allocate memory for ``size`` bytes of pages, and touch it, which would take longer than copying."""
        self._buffer = np.ones(min(size, HELD_BYTES), dtype=np.uint8)

    def hold(self, runs: Runs) -> None:
        """Read pages, whose machine is stopped; ``write_held`` writes them. What exceeds HELD_BYTES is written now."""
        used = 0
        for piece in pieces(runs, HELD_BYTES):
            size = total(piece)
            if used + size > HELD_BYTES:
                self.write_held()
                used = 0
            data = self._buffer[used : used + size]
            if len(data) < size:
                data = np.empty(size, dtype=np.uint8)
            self._ram.read(piece, data)
            self._held.append((piece, data))
            used += size

    def write_held(self) -> None:
        held, self._held = self._held, []
        for runs, data in held:
            self._write(runs, data)

    def copy(self, runs: Runs) -> None:
        """Copy pages piece by piece, in bounded memory. The machine may run: they are copied again if it writes."""
        buffer = np.empty(min(total(runs), _PIECE_BYTES), dtype=np.uint8)
        for piece in pieces(runs, _PIECE_BYTES):
            data = buffer[: total(piece)]
            self._ram.read(piece, data)
            self._write(piece, data)

    def _write(self, runs: Runs, data: NDArray[np.uint8]) -> None:
        position = 0
        for offset, length in zip(self._ram.offsets(runs), runs[:, 1].tolist(), strict=True):
            content = data[position : position + length]
            position += length
            first = offset // PAGE
            changed = self._differs(content, offset) | self._written_before[first : first + length // PAGE]
            self._written_before[first : first + length // PAGE] = changed
            for start, size in from_mask(changed, 0, PAGE).tolist():
                _pwrite(self._image, content[start : start + size].data, offset + start)
                self.written += size

    def _differs(self, content: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
        """Return, for each page, whether the base has another content."""
        differs = content.view(np.uint64).reshape(-1, _PAGE_WORDS)
        if self._base is not None:
            base = np.frombuffer(os.pread(self._base, len(content), offset), dtype=np.uint8)
            if len(base) != len(content):
                raise BackendFailed("the base of a memory image is shorter than the memory")
            differs = differs ^ base.view(np.uint64).reshape(-1, _PAGE_WORDS)
        return np.asarray(differs.any(axis=1))


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done
