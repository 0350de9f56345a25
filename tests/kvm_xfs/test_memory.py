"""Test listing the written pages of a mapping in this process, and copying them to an image."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory import copying, listing
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs, union

PAGES = 64
page_sets = st.sets(st.integers(0, PAGES - 1))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "base"
    path.write_bytes(b"".join(bytes([page + 1]) * PAGE for page in range(PAGES)))
    return path


class MappedImage:
    """A private mapping of an image in this process, in which some pages have been written."""

    def __init__(self, image: Path, written: set[int]) -> None:
        with image.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.ram = Ram(os.getpid(), image)
        for page in range(PAGES):
            self._map[page * PAGE]  # Makes the page present, but it still belongs to the file.
        self.write(written)

    def __enter__(self) -> MappedImage:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def write(self, numbers: set[int]) -> None:
        for page in numbers:
            before = self._map[page * PAGE]
            self._map[page * PAGE : (page + 1) * PAGE] = bytes([(before + 100) % 256]) * PAGE

    def restore(self, page: int) -> None:
        """Write the contents of the image to a page."""
        self._map[page * PAGE : (page + 1) * PAGE] = bytes([page + 1]) * PAGE

    def contents(self) -> bytes:
        return self._map[:]


def page_numbers(ram: Ram, runs: Runs) -> set[int]:
    numbers = set()
    for offset, length in zip(ram.offsets(runs), runs[:, 1].tolist(), strict=True):
        numbers |= set(range(offset // PAGE, (offset + length) // PAGE))
    return numbers


@settings(max_examples=40, deadline=None)
@given(written=page_sets)
def test_pagemap_and_scan_list_exactly_the_written_pages(image: Path, written: set[int]) -> None:
    with MappedImage(image, written) as mapped:
        (area,) = mapped.ram.areas
        if written:
            assert page_numbers(mapped.ram, listing._read_pagemap(os.getpid(), area, listing._is_anonymous)) == written
        try:
            assert page_numbers(mapped.ram, listing._scan(os.getpid(), area)) == written
        except OSError:
            pytest.skip("this kernel has no PAGEMAP_SCAN (Linux 6.7)")


@settings(max_examples=30, deadline=None)
@given(written=page_sets, max_buffered=st.sampled_from([PAGE, 3 * PAGE, copying.MAX_BUFFERED_BYTES]), early=page_sets)
def test_copied_image_equals_the_memory(image: Path, written: set[int], max_buffered: int, early: set[int]) -> None:
    """Pages written early are copied while the machine runs, and again at the end. Pages written later are buffered."""
    copy = image.with_name("copy")
    copy.write_bytes(image.read_bytes())
    with MappedImage(image, early) as mapped, pytest.MonkeyPatch.context() as patch, copy.open("r+b") as file:
        patch.setattr(copying, "MAX_BUFFERED_BYTES", max_buffered)
        patch.setattr(copying, "_PIECE_BYTES", 2 * PAGE)
        with image.open("rb") as base:
            copier = Copier(mapped.ram, file.fileno(), base.fileno())
            first = listing.list_anonymous(mapped.ram)
            copier.copy(first)
            mapped.write(written)
            copier.reserve(1 << 16)
            copier.buffer(union(first, listing.list_anonymous(mapped.ram)))
            copier.write_buffered()
        assert copy.read_bytes() == mapped.contents()


def test_copier_skips_pages_that_equal_the_base(image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(image.read_bytes())
    with MappedImage(image, {3, 4, 9}) as mapped, copy.open("r+b") as file, image.open("rb") as base:
        mapped.restore(4)
        copier = Copier(mapped.ram, file.fileno(), base.fileno())
        copier.buffer(listing.list_anonymous(mapped.ram))
        copier.write_buffered()
        assert copier.written == 2 * PAGE
        assert copy.read_bytes() == mapped.contents()


def test_copier_without_a_base_leaves_holes_for_empty_pages(tmp_path: Path) -> None:
    blank, copy = tmp_path / "blank", tmp_path / "copy"
    for each in (blank, copy):
        with each.open("wb") as file:
            file.truncate(PAGES * PAGE)
    with MappedImage(blank, {3, 4, 60}) as mapped, copy.open("r+b") as file:
        copier = Copier(mapped.ram, file.fileno(), None)
        copier.buffer(mapped.ram.all_pages())
        copier.write_buffered()
        assert copier.written == 3 * PAGE
        assert copy.read_bytes() == mapped.contents()
    assert copy.stat().st_blocks * 512 <= 8 * PAGE


def test_read_splits_runs_over_several_system_calls(tmp_path: Path) -> None:
    count = 2500
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(count * 2 * PAGE)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    for index in range(count):
        mapping[index * 2 * PAGE] = index % 251 + 1
    ram = Ram(os.getpid(), path)
    runs = listing.list_anonymous(ram)
    assert len(runs) == count
    data = np.empty(count * PAGE, dtype=np.uint8)
    ram.read(runs, data)
    assert data[::PAGE].tolist() == [index % 251 + 1 for index in range(count)]
    mapping.close()


def test_reading_an_ended_process_fails(image: Path) -> None:
    with MappedImage(image, {1}) as mapped:
        runs = listing.list_anonymous(mapped.ram)
        mapped.ram.pid = 2**22 + 1
        with pytest.raises(BackendFailed, match="cannot be read"):
            mapped.ram.read(runs, np.empty(PAGE, dtype=np.uint8))


def test_ram_refuses_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(BackendFailed, match="does not map"):
        Ram(os.getpid(), tmp_path / "other")
