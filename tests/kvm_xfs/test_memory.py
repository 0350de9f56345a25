"""Which pages were written, found on a mapping of our own, and copied to an image."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs import memory
from sandbox_gateway.records import Memory

PAGES = 64
page_sets = st.sets(st.integers(0, PAGES - 1))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "base"
    path.write_bytes(b"".join(bytes([page + 1]) * memory.PAGE for page in range(PAGES)))
    return path


class Mapped:
    """A private mapping of the image in this process, some pages of it written."""

    def __init__(self, image: Path, written: set[int]) -> None:
        with image.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(), PAGES * memory.PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        self.ram = memory.Ram(os.getpid(), image)
        for page in range(PAGES):
            self._map[page * memory.PAGE]  # present, but the file's
        for page in written:
            self._map[page * memory.PAGE : (page + 1) * memory.PAGE] = bytes([255 - page]) * memory.PAGE

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def content(self) -> bytes:
        return self._map[:]


def pages(ram: memory.Ram, runs: memory.Runs) -> set[int]:
    found = set()
    for offset, length in zip(ram.offsets(runs), runs[:, 1].tolist(), strict=True):
        found |= set(range(offset // memory.PAGE, (offset + length) // memory.PAGE))
    return found


@settings(max_examples=40, deadline=None)
@given(written=page_sets)
def test_both_ways_of_asking_find_just_the_pages_written(image: Path, written: set[int]) -> None:
    with Mapped(image, written) as mapped:
        (area,) = mapped.ram.areas
        if written:
            assert pages(mapped.ram, memory._pagemap(os.getpid(), area)) == written
        try:
            assert pages(mapped.ram, memory._scan(os.getpid(), area)) == written
        except OSError:
            pytest.skip("this kernel has no PAGEMAP_SCAN (Linux 6.7)")


@settings(max_examples=30, deadline=None)
@given(written=page_sets, held=st.sampled_from([memory.PAGE, 3 * memory.PAGE, memory.HELD_BYTES]))
def test_image_with_the_pages_written_is_the_memory(image: Path, written: set[int], held: int) -> None:
    with Mapped(image, written) as mapped, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "HELD_BYTES", held)
        copy = image.with_name("copy")
        copy.write_bytes(image.read_bytes())
        runs, mode = mapped.ram.written()
        assert mode is Memory.INCREMENTAL
        with copy.open("r+b") as file:
            rest = memory.copy_out(mapped.ram, runs, file.fileno(), memory.PageBuffer(1 << 20), skip_zeros=False)
            assert rest.write(file.fileno()) == len(written) * memory.PAGE
        assert copy.read_bytes() == mapped.content()


def test_without_a_page_map_everything_is_taken_and_empty_pages_stay_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(memory, "_scan", refuse)
    monkeypatch.setattr(memory, "_pagemap", refuse)
    blank = tmp_path / "blank"
    with blank.open("wb") as file:
        file.truncate(PAGES * memory.PAGE)
    with Mapped(blank, {3, 4, 60}) as mapped:
        runs, mode = mapped.ram.written()
        assert mode is Memory.FULL
        copy = tmp_path / "copy"
        with copy.open("w+b") as file:
            file.truncate(PAGES * memory.PAGE)
            rest = memory.copy_out(mapped.ram, runs, file.fileno(), memory.PageBuffer(1 << 20), skip_zeros=True)
            assert rest.write(file.fileno(), skip_zeros=True) == 3 * memory.PAGE
        assert copy.read_bytes() == mapped.content()
        assert copy.stat().st_blocks * 512 <= 8 * memory.PAGE


@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    most=st.integers(1, 7),
)
def test_pieces_are_the_same_bytes_in_the_same_order(lengths: list[int], most: int) -> None:
    starts = np.cumsum([0, *lengths])[:-1] * 2
    runs = np.array(list(zip(starts.tolist(), lengths, strict=True)), dtype=np.uint64).reshape(-1, 2)
    wanted = [start + step for start, length in runs.tolist() for step in range(length)]
    got = []
    for piece in memory._pieces(runs, most):
        assert 0 < int(piece[:, 1].sum()) <= most
        got += [start + step for start, length in piece.tolist() for step in range(length)]
    assert got == wanted


def test_more_runs_than_one_call_takes(tmp_path: Path) -> None:
    count = 2500
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(count * 2 * memory.PAGE)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    for index in range(count):
        mapped[index * 2 * memory.PAGE] = index % 251 + 1
    ram = memory.Ram(os.getpid(), path)
    runs, _ = ram.written()
    assert len(runs) == count
    data = np.empty(count * memory.PAGE, dtype=np.uint8)
    ram.read(runs, data)
    assert data[:: memory.PAGE].tolist() == [index % 251 + 1 for index in range(count)]
    mapped.close()


def test_a_process_that_is_gone_is_said_to_be(image: Path) -> None:
    with Mapped(image, {1}) as mapped:
        runs, _ = mapped.ram.written()
        mapped.ram.pid = 2**22 + 1
        with pytest.raises(BackendFailed, match="cannot be read"):
            mapped.ram.read(runs, np.empty(memory.PAGE, dtype=np.uint8))


def test_a_file_that_is_not_mapped_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(BackendFailed, match="does not map"):
        memory.Ram(os.getpid(), tmp_path / "other")
