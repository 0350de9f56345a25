"""Test images on two file systems without machines: copying them, and capturing the memory of this process."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.kvm_xfs.image import held_images, instances, reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance, Layout, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.image.memory_roots import MemoryRoots
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.memory.window import Window
from sandbox_gateway.records import Memory, Resources, Sandbox, Snapshot
from tests.support.xfs import LoopXfs

MIB = 1 << 20
PAGES = 4096


@pytest.fixture(scope="module")
def state(need_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopXfs]:
    directory = tmp_path_factory.mktemp("state")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512) as xfs:
        yield xfs


@pytest.fixture(scope="module", params=[True, False], ids=["reflink", "no-reflink"])
def root(
    request: pytest.FixtureRequest, need_root: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoopXfs]:
    directory = tmp_path_factory.mktemp("root")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512, reflink=request.param) as xfs:
        yield xfs


@pytest.fixture
def layout(state: LoopXfs, tmp_path: Path) -> Layout:
    layout = Layout(state.mount_point / tmp_path.name)
    layout.create()
    return layout


@pytest.fixture
def directory(layout: Layout, root: LoopXfs) -> MemoryDirectory:
    directory = MemoryRoots(layout, root.mount_point).directory_for_capture()
    assert directory is not None
    return directory


def write_image(path: Path, seed: int) -> Path:
    """Write a sparse image of PAGES pages."""
    generator = random.Random(seed)
    with path.open("xb") as file:
        file.truncate(PAGES * PAGE)
        for _ in range(200):
            file.seek(generator.randrange(PAGES) * PAGE)
            file.write(generator.randbytes(PAGE))
    return path


def used_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_images_are_shared_where_that_is_possible_and_copied_otherwise(
    layout: Layout, directory: MemoryDirectory, root: LoopXfs
) -> None:
    source = write_image(layout.root / "source", 1)
    across, within = directory.snapshots / "across", directory.snapshots / "within"
    reflink.clone_or_copy(source, across)
    reflink.clone_or_copy(across, within)
    assert source.read_bytes() == across.read_bytes() == within.read_bytes()
    assert within.stat().st_mode & 0o777 == 0o600
    for copy in (across, within):
        assert used_bytes(copy) <= used_bytes(source) + MIB
    assert reflink.has_same_extents(across, within) == root.reflink
    back = layout.root / "back"
    reflink.clone_or_copy(within, back)
    assert back.read_bytes() == source.read_bytes()


def test_an_empty_image_is_copied_as_a_hole(layout: Layout, directory: MemoryDirectory) -> None:
    source = layout.root / "source"
    with source.open("xb") as file:
        file.truncate(1 << 30)
    reflink.clone_or_copy(source, directory.snapshots / "hole")
    assert (directory.snapshots / "hole").stat().st_size == 1 << 30
    assert used_bytes(directory.snapshots / "hole") == 0


def test_a_copy_does_not_replace_an_existing_file(layout: Layout, directory: MemoryDirectory) -> None:
    source = write_image(layout.root / "source", 1)
    target = directory.snapshots / "target"
    target.write_text("unchanged")
    with pytest.raises(FileExistsError):
        reflink.clone_or_copy(source, target)
    assert target.read_text() == "unchanged"


def test_a_copy_to_a_full_file_system_fails_and_leaves_nothing(
    layout: Layout, directory: MemoryDirectory, root: LoopXfs
) -> None:
    source = layout.root / "source"
    source.write_bytes(os.urandom(MIB) * 32)
    filler = root.mount_point / "filler"
    status = os.statvfs(root.mount_point)
    length = str(status.f_bavail * status.f_frsize - 8 * MIB)
    subprocess.run(["fallocate", "-l", length, str(filler)], check=True, timeout=30)
    try:
        with pytest.raises(OSError, match="No space left"):
            reflink.clone_or_copy(source, directory.snapshots / "target")
        assert not (directory.snapshots / "target").exists()
    finally:
        filler.unlink()


class Process:
    """This process, as a machine: its memory is a private mapping of an image."""

    def __init__(self, files: Instance) -> None:
        with files.memory.open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.ram = Ram(os.getpid(), files.memory)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.memory.close()

    def write(self, generator: random.Random) -> None:
        for _ in range(100):
            start = generator.randrange(PAGES) * PAGE
            self.memory[start : start + PAGE] = generator.randbytes(PAGE)


def capture(window: Window, process: Process, image: Path, directory: MemoryDirectory | None) -> None:
    """Do what a capture does with the memory."""
    window.begin(process.ram)
    assert window.base is not None
    reflink.clone_or_copy(window.base, image)
    with image.open("r+b") as target, window.base.open("rb") as base:
        copier = Copier(process.ram, target.fileno(), base.fileno())
        copier.copy(window.take(process.ram))
    window.complete(image, directory)


@pytest.fixture
def files(layout: Layout) -> Instance:
    files = layout.instance(Sandbox(name="machine"))
    files.directory.mkdir(parents=True)
    return files


@pytest.mark.parametrize("mode", [Memory.COMPARE, Memory.INCREMENTAL])
def test_captures_that_change_the_file_system_equal_the_memory(
    layout: Layout, directory: MemoryDirectory, files: Instance, mode: Memory
) -> None:
    source = write_image(directory.snapshots / "start.img", 2)
    held_images.hold(source, files.memory, directory)
    source.unlink()
    window = Window(files, TrackerClient(None), mode, None)
    generator = random.Random(3)
    with Process(files) as process:
        for number, where in enumerate((directory, directory, None, None, directory)):
            process.write(generator)
            image = (layout.root if where is None else where.snapshots) / f"image-{number}"
            capture(window, process, image, where)
            assert window.mode is (mode if number else Memory.INCREMENTAL)
            assert image.read_bytes() == process.memory[:]
            assert window.reason == ""
            image.unlink()
            assert files.last_memory.read_bytes() == process.memory[:], "the machine holds the image"
    instances.remove(files)
    assert directory.machine_files() == []


def test_a_machine_that_boots_again_forgets_the_images_of_its_former_run(
    layout: Layout, directory: MemoryDirectory, files: Instance
) -> None:
    """Its first capture is not based on memory that it never had."""
    held_images.hold(write_image(directory.snapshots / "start.img", 4), files.memory, directory)
    with Process(files) as process:
        process.write(random.Random(5))
        window = Window(files, TrackerClient(None), Memory.COMPARE, None)
        capture(window, process, directory.snapshots / "before.img", directory)
    instances.create_memory_file(files, PAGES * PAGE // MIB)
    with Process(files) as process:
        process.memory[:PAGE] = b"x" * PAGE
        image = directory.snapshots / "after.img"
        capture(Window(files, TrackerClient(None), Memory.COMPARE, None), process, image, directory)
        assert image.read_bytes() == process.memory[:]


def test_an_unmounted_file_system_is_noticed_and_nothing_is_written_below_it(
    layout: Layout, root: LoopXfs, directory: MemoryDirectory
) -> None:
    roots = MemoryRoots(layout, root.mount_point)
    snapshot = Snapshot(memory=Memory.FULL, resources=Resources(memory_mb=64))
    directory.record_in(snapshot)
    image = directory.snapshot(snapshot.id)
    with image.open("xb") as file:
        file.truncate(64 * MIB)
    assert roots.memory_problem(snapshot) == ""
    root.unmount()
    try:
        assert "is not mounted" in roots.memory_problem(snapshot)
        with pytest.raises(Conflict, match="is not mounted"):
            roots.directory_for_capture()
        assert list(root.mount_point.iterdir()) == []
    finally:
        root.mount()
    assert roots.memory_problem(snapshot) == "" and roots.directory_for_capture() is not None
