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
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs, union
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram

PAGE_COUNT = 64
page_number_sets = st.sets(st.integers(0, PAGE_COUNT - 1))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "base"
    path.write_bytes(b"".join(bytes([page + 1]) * PAGE_BYTES for page in range(PAGE_COUNT)))
    return path


class MappedImage:
    """A private mapping of an image in this process, in which some pages have been written."""

    def __init__(self, image: Path, written_pages: set[int]) -> None:
        with image.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(), PAGE_COUNT * PAGE_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        self.ram = Ram(os.getpid(), image)
        for page in range(PAGE_COUNT):
            self._map[page * PAGE_BYTES]  # Makes the page present, but it still belongs to the file.
        self.write(written_pages)

    def __enter__(self) -> MappedImage:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def write(self, numbers: set[int]) -> None:
        for page in numbers:
            old_value = self._map[page * PAGE_BYTES]
            self._map[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes([(old_value + 100) % 256]) * PAGE_BYTES

    def restore(self, page: int) -> None:
        """Write the image's original contents back to a page."""
        self._map[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes([page + 1]) * PAGE_BYTES

    def read_contents(self) -> bytes:
        return self._map[:]


def list_page_numbers(ram: Ram, runs: Runs) -> set[int]:
    numbers = set()
    for offset, length in zip(ram.compute_offsets(runs), runs[:, 1].tolist(), strict=True):
        numbers |= set(range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES))
    return numbers


@settings(max_examples=40, deadline=None)
@given(written_pages=page_number_sets)
def test_pagemap_and_scan_list_exactly_the_written_pages(image: Path, written_pages: set[int]) -> None:
    with MappedImage(image, written_pages) as mapped_image:
        (area,) = mapped_image.ram.areas
        if written_pages:
            assert (
                list_page_numbers(
                    mapped_image.ram, listing._list_matching_pages(os.getpid(), area, listing._is_anonymous)
                )
                == written_pages
            )
        try:
            assert list_page_numbers(mapped_image.ram, listing._scan(os.getpid(), area)) == written_pages
        except OSError:
            pytest.skip("this kernel has no PAGEMAP_SCAN (requires Linux 6.7 or later)")


@settings(max_examples=30, deadline=None)
@given(
    written_pages=page_number_sets,
    max_buffered_bytes=st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, copying.MAX_BUFFERED_BYTES]),
    early_pages=page_number_sets,
)
def test_copied_image_equals_the_memory(
    image: Path, written_pages: set[int], max_buffered_bytes: int, early_pages: set[int]
) -> None:
    """Pages in ``early_pages`` are copied while the machine runs. All written pages are buffered during the stop."""
    copy = image.with_name("copy")
    copy.write_bytes(image.read_bytes())
    with (
        MappedImage(image, early_pages) as mapped_image,
        pytest.MonkeyPatch.context() as patch,
        copy.open("r+b") as file,
    ):
        patch.setattr(copying, "MAX_BUFFERED_BYTES", max_buffered_bytes)
        patch.setattr(copying, "_PIECE_BYTES", 2 * PAGE_BYTES)
        with image.open("rb") as base:
            copier = Copier(mapped_image.ram, file.fileno(), base.fileno())
            early_runs = listing.list_anonymous_pages(mapped_image.ram)
            copier.copy(early_runs)
            mapped_image.write(written_pages)
            copier.reserve(1 << 16)
            copier.buffer(union(early_runs, listing.list_anonymous_pages(mapped_image.ram)))
            copier.write_buffered()
        assert copy.read_bytes() == mapped_image.read_contents()


def test_copier_skips_pages_that_equal_the_base(image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(image.read_bytes())
    with MappedImage(image, {3, 4, 9}) as mapped_image, copy.open("r+b") as file, image.open("rb") as base:
        mapped_image.restore(4)
        copier = Copier(mapped_image.ram, file.fileno(), base.fileno())
        copier.buffer(listing.list_anonymous_pages(mapped_image.ram))
        copier.write_buffered()
        assert copier.written_bytes == 2 * PAGE_BYTES
        assert copy.read_bytes() == mapped_image.read_contents()


def test_copier_without_a_base_leaves_holes_for_empty_pages(tmp_path: Path) -> None:
    blank_image, copy = tmp_path / "blank", tmp_path / "copy"
    for path in (blank_image, copy):
        with path.open("wb") as file:
            file.truncate(PAGE_COUNT * PAGE_BYTES)
    with MappedImage(blank_image, {3, 4, 60}) as mapped_image, copy.open("r+b") as file:
        copier = Copier(mapped_image.ram, file.fileno(), None)
        copier.buffer(mapped_image.ram.list_all_pages())
        copier.write_buffered()
        assert copier.written_bytes == 3 * PAGE_BYTES
        assert copy.read_bytes() == mapped_image.read_contents()
    assert copy.stat().st_blocks * 512 <= 8 * PAGE_BYTES


def test_read_splits_runs_over_several_system_calls(tmp_path: Path) -> None:
    page_count = 2500
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(page_count * 2 * PAGE_BYTES)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    for index in range(page_count):
        mapping[index * 2 * PAGE_BYTES] = index % 251 + 1
    ram = Ram(os.getpid(), path)
    runs = listing.list_anonymous_pages(ram)
    assert len(runs) == page_count
    data = np.empty(page_count * PAGE_BYTES, dtype=np.uint8)
    ram.read(runs, data)
    assert data[::PAGE_BYTES].tolist() == [index % 251 + 1 for index in range(page_count)]
    mapping.close()


def test_reading_an_exited_process_fails(image: Path) -> None:
    with MappedImage(image, {1}) as mapped_image:
        runs = listing.list_anonymous_pages(mapped_image.ram)
        mapped_image.ram.pid = 2**22 + 1
        with pytest.raises(BackendFailed, match="cannot be read"):
            mapped_image.ram.read(runs, np.empty(PAGE_BYTES, dtype=np.uint8))


def test_ram_refuses_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(BackendFailed, match="does not map"):
        Ram(os.getpid(), tmp_path / "other")
