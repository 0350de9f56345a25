"""Test files that share blocks, and the errors on file systems that are full or do not support reflinks."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.errors import NoSpace, Unsupported
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from tests.support.xfs import LoopXfs

MIB = 1 << 20


@pytest.fixture
def directory(xfs_root: Path, tmp_path: Path) -> Path:
    path = xfs_root / f"reflink-{tmp_path.name}"
    path.mkdir()
    return path


def write_file(path: Path, size: int = 4 * MIB) -> Path:
    path.write_bytes(bytes(range(256)) * (size // 256))
    return path


def test_a_clone_has_equal_contents_and_uses_no_space(directory: Path) -> None:
    source = write_file(directory / "source")
    assert reflink.count_unique_bytes(source) == 4 * MIB
    reflink.clone(source, directory / "clone")
    assert (directory / "clone").read_bytes() == source.read_bytes()
    assert reflink.count_unique_bytes(source) == reflink.count_unique_bytes(directory / "clone") == 0
    assert reflink.have_same_extents(source, directory / "clone", seconds=60)


def test_writing_to_a_clone_does_not_change_the_source(directory: Path) -> None:
    source = write_file(directory / "source")
    clone = directory / "clone"
    reflink.clone(source, clone)
    with clone.open("r+b") as file:
        file.seek(MIB)
        file.write(b"x" * 8192)
    assert source.read_bytes()[MIB : MIB + 2] != b"xx"
    assert 8192 <= reflink.count_unique_bytes(clone) <= MIB
    assert not reflink.have_same_extents(source, clone, seconds=60)


def test_files_have_the_same_extents_after_a_third_file_split_them(directory: Path) -> None:
    source, first_clone, second_clone = write_file(directory / "source"), directory / "first", directory / "second"
    reflink.clone(source, first_clone)
    reflink.clone(source, second_clone)
    with second_clone.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"x" * 65536)
    assert reflink.have_same_extents(source, first_clone, seconds=60)


@settings(max_examples=25, deadline=None)
@given(
    base=st.lists(st.booleans(), min_size=64, max_size=64),
    changes=st.dictionaries(st.integers(0, 63), st.sampled_from(["write", "punch"]), max_size=20),
)
def test_differing_ranges_are_exactly_the_blocks_that_were_written_or_punched(
    xfs_root: Path, base: list[bool], changes: dict[int, str]
) -> None:
    with tempfile.TemporaryDirectory(dir=xfs_root) as name:
        source, clone = Path(name, "source"), Path(name, "clone")
        with source.open("wb") as file:
            for number in (number for number, is_data in enumerate(base) if is_data):
                os.pwrite(file.fileno(), bytes([number + 1]) * 4096, number * 4096)
            file.truncate(64 * 4096)
        reflink.clone(source, clone)
        with clone.open("r+b") as file:
            for number, change in changes.items():
                if change == "write":
                    os.pwrite(file.fileno(), b"x" * 4096, number * 4096)
                else:
                    assert reflink.punch_hole(file.fileno(), number * 4096, 4096)
        expected = {number for number, change in changes.items() if change == "write" or base[number]}
        for pair in ((source, clone), (clone, source)):
            ranges = [*reflink.list_differing_ranges(*pair)]
            assert ranges == sorted(ranges) and all(start < end for start, end in ranges)
            found = [number for start, end in ranges for number in range(start // 4096, end // 4096)]
            assert len(found) == len({*found}) and {*found} == expected
        assert [*reflink.list_differing_ranges(source, source)] == []


def test_only_holes_in_both_of_two_files_with_too_many_extents_are_equal(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, clone = write_file(directory / "source"), directory / "clone"
    reflink.clone(source, clone)
    with clone.open("r+b") as file:
        for offset in range(0, MIB, 16384):
            os.pwrite(file.fileno(), b"x" * 4096, offset)
    assert len([*reflink.list_differing_ranges(source, clone)]) == 64
    monkeypatch.setattr(reflink, "_MAX_COMPARED_EXTENTS", 50)
    assert [*reflink.list_differing_ranges(source, clone)] == [(0, 4 * MIB)]
    with source.open("r+b") as file:
        assert reflink.punch_hole(file.fileno(), MIB, 2 * MIB)
    with clone.open("r+b") as file:
        assert reflink.punch_hole(file.fileno(), 2 * MIB, MIB)
    assert [*reflink.list_differing_ranges(source, clone)] == [(0, 2 * MIB), (3 * MIB, 4 * MIB)]


def test_many_extents_are_listed(directory: Path) -> None:
    sparse_file = write_file(directory / "holed", 24 * MIB)
    for index in range(1200):
        hole_options = ["-o", str(index * 16384), "-l", "8192"]
        subprocess.run(["fallocate", "--punch-hole", *hole_options, str(sparse_file)], check=True, timeout=30)
    extents = [*reflink.walk_extents(sparse_file)]
    assert len(extents) >= 1200
    assert sum(extent.length for extent in extents) == 24 * MIB - 1200 * 8192


def test_clone_does_not_replace_an_existing_target(directory: Path) -> None:
    source = write_file(directory / "source")
    (directory / "existing").write_text("unchanged")
    with pytest.raises(FileExistsError):
        reflink.clone(source, directory / "existing")
    assert (directory / "existing").read_text() == "unchanged"


def test_require_reflinks_refuses_a_file_system_without_them(tmp_path: Path, requires_root: None) -> None:
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320, reflink=False) as xfs:
        with pytest.raises(Unsupported, match=r"mkfs\.xfs -m reflink=1"):
            reflink.require_reflinks(xfs.mount_point)
        assert not list(xfs.mount_point.glob(".reflink*"))


def test_clone_fails_on_a_full_file_system(tmp_path: Path, requires_root: None) -> None:
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320) as xfs:
        source = write_file(xfs.mount_point / "source")
        with (xfs.mount_point / "filler").open("wb") as filler:
            try:
                while filler.write(b"\1" * MIB):
                    filler.flush()
            except OSError:
                pass
        with pytest.raises((NoSpace, OSError)):
            for index in range(10_000):
                reflink.clone(source, xfs.mount_point / f"clone-{index}")
