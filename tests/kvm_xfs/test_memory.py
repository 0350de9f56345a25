"""Written pages: found on a mapping in this process, and copied to an image."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.memory import copying
from sandbox_gateway.hosts.kvm_xfs.memory import written as written_pages
from sandbox_gateway.hosts.kvm_xfs.memory.copying import PageBuffer, copy_out
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Ram, Runs
from sandbox_gateway.records import Memory

PAGES = 64
page_sets = st.sets(st.integers(0, PAGES - 1))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "base"
    path.write_bytes(b"".join(bytes([page + 1]) * PAGE for page in range(PAGES)))
    return path


class Mapped:
    """A private mapping of the image in this process, with some pages written."""

    def __init__(self, image: Path, written: set[int]) -> None:
        with image.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.ram = Ram(os.getpid(), image)
        for page in range(PAGES):
            self._map[page * PAGE]  # present, but still the file's page
        for page in written:
            self._map[page * PAGE : (page + 1) * PAGE] = bytes([255 - page]) * PAGE

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def content(self) -> bytes:
        return self._map[:]


def pages(ram: Ram, runs: Runs) -> set[int]:
    found = set()
    for offset, length in zip(ram.offsets(runs), runs[:, 1].tolist(), strict=True):
        found |= set(range(offset // PAGE, (offset + length) // PAGE))
    return found


@settings(max_examples=40, deadline=None)
@given(written=page_sets)
def test_both_ways_of_asking_find_just_the_pages_written(image: Path, written: set[int]) -> None:
    with Mapped(image, written) as mapped:
        (area,) = mapped.ram.areas
        if written:
            assert pages(mapped.ram, written_pages._pagemap(os.getpid(), area)) == written
        try:
            assert pages(mapped.ram, written_pages._scan(os.getpid(), area)) == written
        except OSError:
            pytest.skip("this kernel has no PAGEMAP_SCAN (Linux 6.7)")


@settings(max_examples=30, deadline=None)
@given(written=page_sets, held=st.sampled_from([PAGE, 3 * PAGE, copying.HELD_BYTES]))
def test_image_with_the_pages_written_is_the_memory(image: Path, written: set[int], held: int) -> None:
    with Mapped(image, written) as mapped, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "HELD_BYTES", held)
        copy = image.with_name("copy")
        copy.write_bytes(image.read_bytes())
        runs, mode = written_pages.list_written(mapped.ram)
        assert mode is Memory.INCREMENTAL
        with copy.open("r+b") as file:
            rest = copy_out(mapped.ram, runs, file.fileno(), PageBuffer(1 << 20), skip_zeros=False)
            assert rest.write(file.fileno()) == len(written) * PAGE
        assert copy.read_bytes() == mapped.content()


def test_without_a_page_map_everything_is_taken_and_empty_pages_stay_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(written_pages, "_scan", refuse)
    monkeypatch.setattr(written_pages, "_pagemap", refuse)
    blank = tmp_path / "blank"
    with blank.open("wb") as file:
        file.truncate(PAGES * PAGE)
    with Mapped(blank, {3, 4, 60}) as mapped:
        runs, mode = written_pages.list_written(mapped.ram)
        assert mode is Memory.FULL
        copy = tmp_path / "copy"
        with copy.open("w+b") as file:
            file.truncate(PAGES * PAGE)
            rest = copy_out(mapped.ram, runs, file.fileno(), PageBuffer(1 << 20), skip_zeros=True)
            assert rest.write(file.fileno(), skip_zeros=True) == 3 * PAGE
        assert copy.read_bytes() == mapped.content()
        assert copy.stat().st_blocks * 512 <= 8 * PAGE


@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    most=st.integers(1, 7),
)
def test_pieces_are_the_same_bytes_in_the_same_order(lengths: list[int], most: int) -> None:
    starts = np.cumsum([0, *lengths])[:-1] * 2
    runs = np.array(list(zip(starts.tolist(), lengths, strict=True)), dtype=np.uint64).reshape(-1, 2)
    wanted = [start + step for start, length in runs.tolist() for step in range(length)]
    got = []
    for piece in copying._pieces(runs, most):
        assert 0 < int(piece[:, 1].sum()) <= most
        got += [start + step for start, length in piece.tolist() for step in range(length)]
    assert got == wanted


def test_more_runs_than_one_call_takes(tmp_path: Path) -> None:
    count = 2500
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(count * 2 * PAGE)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    for index in range(count):
        mapped[index * 2 * PAGE] = index % 251 + 1
    ram = Ram(os.getpid(), path)
    runs, _ = written_pages.list_written(ram)
    assert len(runs) == count
    data = np.empty(count * PAGE, dtype=np.uint8)
    ram.read(runs, data)
    assert data[::PAGE].tolist() == [index % 251 + 1 for index in range(count)]
    mapped.close()


def test_a_process_that_is_gone_is_said_to_be(image: Path) -> None:
    with Mapped(image, {1}) as mapped:
        runs, _ = written_pages.list_written(mapped.ram)
        mapped.ram.pid = 2**22 + 1
        with pytest.raises(BackendFailed, match="cannot be read"):
            mapped.ram.read(runs, np.empty(PAGE, dtype=np.uint8))


def test_a_file_that_is_not_mapped_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(BackendFailed, match="does not map"):
        Ram(os.getpid(), tmp_path / "other")
