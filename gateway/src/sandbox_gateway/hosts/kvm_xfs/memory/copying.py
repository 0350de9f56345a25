"""Copy pages of a machine's memory to a new image. Pages that equal those of the base image are not written."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs, count_bytes, create_runs_from_mask, split
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.positional_writes import write_all

MAX_BUFFERED_BYTES = 256 << 20
"""Maximum bytes to buffer until the machine resumes. Any further bytes are written while the machine is stopped."""
_PIECE_BYTES = 8 << 20
_WORDS_PER_PAGE = PAGE_BYTES // 8


class Copier:
    """Copies pages to ``image``, a clone of ``base``. Without a base, the image is empty.

    ``image`` and ``base`` are descriptors. ``written_bytes`` counts the bytes written to the image.
    """

    def __init__(self, ram: Ram, image: int, base: int | None) -> None:
        self._ram = ram
        self._image = image
        self._base = base
        self._written_pages = np.zeros(ram.end // PAGE_BYTES, dtype=np.bool_)
        """The pages of the image that this capture has written, and that may therefore differ from the base."""
        self._buffer = np.empty(0, dtype=np.uint8)
        self._buffered_runs: list[tuple[Runs, NDArray[np.uint8]]] = []
        self.written_bytes = 0

    def reserve(self, size: int) -> None:
        """Allocate and touch ``size`` bytes of memory in advance, because page faults take longer than copying."""
        self._buffer = np.ones(min(size, MAX_BUFFERED_BYTES), dtype=np.uint8)

    def buffer(self, runs: Runs) -> None:
        """Read pages of the stopped machine into memory, for ``write_buffered``.

        If the pages exceed MAX_BUFFERED_BYTES, writes the buffered pages immediately to make room for more.
        """
        buffered_bytes = 0
        for piece in split(runs, MAX_BUFFERED_BYTES):
            size = count_bytes(piece)
            if buffered_bytes + size > MAX_BUFFERED_BYTES:
                self.write_buffered()
                buffered_bytes = 0
            data = self._buffer[buffered_bytes : buffered_bytes + size]
            if len(data) < size:
                data = np.empty(size, dtype=np.uint8)
            self._ram.read(piece, data)
            self._buffered_runs.append((piece, data))
            buffered_bytes += size

    def write_buffered(self) -> None:
        buffered_runs, self._buffered_runs = self._buffered_runs, []
        for runs, data in buffered_runs:
            self._write(runs, data)

    def copy(self, runs: Runs) -> None:
        """Copy pages in chunks, to limit memory use. Call this again for pages that a running machine writes later."""
        buffer = np.empty(min(count_bytes(runs), _PIECE_BYTES), dtype=np.uint8)
        for piece in split(runs, _PIECE_BYTES):
            data = buffer[: count_bytes(piece)]
            self._ram.read(piece, data)
            self._write(piece, data)

    def _write(self, runs: Runs, data: NDArray[np.uint8]) -> None:
        position = 0
        for offset, length in zip(self._ram.compute_offsets(runs), runs[:, 1].tolist(), strict=True):
            contents = data[position : position + length]
            position += length
            first_page = offset // PAGE_BYTES
            is_changed = (
                self._differs_from_base(contents, offset)
                | self._written_pages[first_page : first_page + length // PAGE_BYTES]
            )
            self._written_pages[first_page : first_page + length // PAGE_BYTES] = is_changed
            for start, size in create_runs_from_mask(is_changed, 0, PAGE_BYTES).tolist():
                write_all(self._image, contents[start : start + size].data, offset + start)
                self.written_bytes += size

    def _differs_from_base(self, contents: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
        """Return a mask of the pages that differ from the base or, without a base, are not zero."""
        difference = contents.view(np.uint64).reshape(-1, _WORDS_PER_PAGE)
        if self._base is not None:
            base_contents = np.frombuffer(os.pread(self._base, len(contents), offset), dtype=np.uint8)
            if len(base_contents) != len(contents):
                raise BackendFailed("the base image is shorter than the machine's memory")
            difference = difference ^ base_contents.view(np.uint64).reshape(-1, _WORDS_PER_PAGE)
        return np.asarray(difference.any(axis=1))
