"""Test images on two file systems without machines: copying them, and capturing the memory of this process."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from pathlib import Path

import pytest

from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.kvm_xfs.files import held_images, instances, reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.files.memory_roots import MemoryRoots
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import WriteTracking
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, Snapshot
from tests.support.xfs import LoopXfs

MIB = 1 << 20
PAGE_COUNT = 4096


@pytest.fixture
def layout(state_xfs: LoopXfs, tmp_path: Path) -> Layout:
    layout = Layout(state_xfs.mount_point / tmp_path.name)
    layout.create()
    return layout


@pytest.fixture
def memory_directory(layout: Layout, root_xfs: LoopXfs) -> MemoryDirectory:
    memory_directory = MemoryRoots(layout, root_xfs.mount_point).find_capture_directory()
    assert memory_directory is not None
    return memory_directory


def write_image(path: Path, seed: int) -> Path:
    """Write a sparse image of PAGE_COUNT pages."""
    random_generator = random.Random(seed)
    with path.open("xb") as file:
        file.truncate(PAGE_COUNT * PAGE_BYTES)
        for _ in range(200):
            file.seek(random_generator.randrange(PAGE_COUNT) * PAGE_BYTES)
            file.write(random_generator.randbytes(PAGE_BYTES))
    return path


def count_used_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_images_are_shared_where_possible_and_copied_otherwise(
    layout: Layout, memory_directory: MemoryDirectory, root_xfs: LoopXfs
) -> None:
    source = write_image(layout.root / "source", 1)
    copy_across, copy_within = memory_directory.snapshots / "across", memory_directory.snapshots / "within"
    reflink.clone_or_copy(source, copy_across)
    reflink.clone_or_copy(copy_across, copy_within)
    assert source.read_bytes() == copy_across.read_bytes() == copy_within.read_bytes()
    assert copy_within.stat().st_mode & 0o777 == 0o600
    for copy in (copy_across, copy_within):
        assert count_used_bytes(copy) <= count_used_bytes(source) + MIB
    assert reflink.have_same_extents(copy_across, copy_within, seconds=60) == root_xfs.reflink
    final_copy = layout.root / "back"
    reflink.clone_or_copy(copy_within, final_copy)
    assert final_copy.read_bytes() == source.read_bytes()


def test_an_empty_image_is_copied_as_a_hole(layout: Layout, memory_directory: MemoryDirectory) -> None:
    source = layout.root / "source"
    with source.open("xb") as file:
        file.truncate(1 << 30)
    reflink.clone_or_copy(source, memory_directory.snapshots / "hole")
    assert (memory_directory.snapshots / "hole").stat().st_size == 1 << 30
    assert count_used_bytes(memory_directory.snapshots / "hole") == 0


def test_a_copy_does_not_replace_an_existing_file(layout: Layout, memory_directory: MemoryDirectory) -> None:
    source = write_image(layout.root / "source", 1)
    target = memory_directory.snapshots / "target"
    target.write_text("unchanged")
    with pytest.raises(FileExistsError):
        reflink.clone_or_copy(source, target)
    assert target.read_text() == "unchanged"


def test_a_copy_to_a_full_file_system_fails_and_leaves_nothing(
    layout: Layout, memory_directory: MemoryDirectory, root_xfs: LoopXfs
) -> None:
    source = layout.root / "source"
    source.write_bytes(os.urandom(MIB) * 32)
    filler = root_xfs.mount_point / "filler"
    status = os.statvfs(root_xfs.mount_point)
    length = str(status.f_bavail * status.f_frsize - 8 * MIB)
    subprocess.run(["fallocate", "-l", length, str(filler)], check=True, timeout=30)
    try:
        with pytest.raises(OSError, match="No space left"):
            reflink.clone_or_copy(source, memory_directory.snapshots / "target")
        assert not (memory_directory.snapshots / "target").exists()
    finally:
        filler.unlink()


class SimulatedMachine:
    """A simulated machine, whose memory is a private mapping of an image in this process."""

    def __init__(self, files: InstanceFiles) -> None:
        with files.memory.open("rb") as file:
            self.memory = mmap.mmap(
                file.fileno(), PAGE_COUNT * PAGE_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        self.ram = Ram(os.getpid(), files.memory)

    def __enter__(self) -> SimulatedMachine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.memory.close()

    def write(self, random_generator: random.Random) -> None:
        for _ in range(100):
            start = random_generator.randrange(PAGE_COUNT) * PAGE_BYTES
            self.memory[start : start + PAGE_BYTES] = random_generator.randbytes(PAGE_BYTES)


def capture_memory(
    tracking: WriteTracking, machine: SimulatedMachine, image: Path, memory_directory: MemoryDirectory | None
) -> None:
    """Capture the memory of ``machine`` in ``image``, as a host does."""
    tracking.begin(machine.ram)
    assert tracking.base is not None
    reflink.clone_or_copy(tracking.base, image)
    with image.open("r+b") as target, tracking.base.open("rb") as base:
        copier = Copier(machine.ram, target.fileno(), base.fileno())
        copier.copy(tracking.take(machine.ram))
    tracking.complete(image, memory_directory)


@pytest.fixture
def files(layout: Layout) -> InstanceFiles:
    files = layout.instance(Sandbox(name="machine"))
    files.directory.mkdir(parents=True)
    return files


@pytest.mark.parametrize("mode", [MemoryMode.COMPARE, MemoryMode.INCREMENTAL])
def test_captures_to_alternating_file_systems_equal_the_memory(
    layout: Layout, memory_directory: MemoryDirectory, files: InstanceFiles, mode: MemoryMode
) -> None:
    source = write_image(memory_directory.snapshots / "start.img", 2)
    held_images.hold(source, files.memory, memory_directory)
    source.unlink()
    tracking = WriteTracking(files, TrackerClient(None), mode, None)
    random_generator = random.Random(3)
    with SimulatedMachine(files) as machine:
        for number, target_directory in enumerate((memory_directory, memory_directory, None, None, memory_directory)):
            machine.write(random_generator)
            image = (layout.root if target_directory is None else target_directory.snapshots) / f"image-{number}"
            capture_memory(tracking, machine, image, target_directory)
            assert tracking.mode is (mode if number else MemoryMode.INCREMENTAL)
            assert image.read_bytes() == machine.memory[:]
            assert tracking.reason == ""
            image.unlink()
            assert files.last_memory.read_bytes() == machine.memory[:], "the machine does not hold the image"
    instances.remove(files)
    assert memory_directory.list_machine_files() == []


def test_a_new_boot_discards_the_images_of_the_previous_run(
    layout: Layout, memory_directory: MemoryDirectory, files: InstanceFiles
) -> None:
    """The first capture of the new run must not be based on the memory of the previous run."""
    held_images.hold(write_image(memory_directory.snapshots / "start.img", 4), files.memory, memory_directory)
    with SimulatedMachine(files) as machine:
        machine.write(random.Random(5))
        tracking = WriteTracking(files, TrackerClient(None), MemoryMode.COMPARE, None)
        capture_memory(tracking, machine, memory_directory.snapshots / "before.img", memory_directory)
    instances.create_memory_file(files, PAGE_COUNT * PAGE_BYTES // MIB)
    with SimulatedMachine(files) as machine:
        machine.memory[:PAGE_BYTES] = b"x" * PAGE_BYTES
        image = memory_directory.snapshots / "after.img"
        capture_memory(
            WriteTracking(files, TrackerClient(None), MemoryMode.COMPARE, None), machine, image, memory_directory
        )
        assert image.read_bytes() == machine.memory[:]


def test_an_unmounted_file_system_is_detected_and_nothing_is_written_there(
    layout: Layout, root_xfs: LoopXfs, memory_directory: MemoryDirectory
) -> None:
    roots = MemoryRoots(layout, root_xfs.mount_point)
    snapshot = Snapshot(memory=MemoryMode.FULL, resources=Resources(memory_mb=64))
    memory_directory.record_location(snapshot)
    image = memory_directory.snapshot(snapshot.id)
    with image.open("xb") as file:
        file.truncate(64 * MIB)
    assert roots.find_memory_problem(snapshot) == ""
    root_xfs.unmount()
    try:
        assert "is not mounted" in roots.find_memory_problem(snapshot)
        with pytest.raises(Conflict, match="is not mounted"):
            roots.find_capture_directory()
        assert list(root_xfs.mount_point.iterdir()) == []
    finally:
        root_xfs.mount()
    assert roots.find_memory_problem(snapshot) == "" and roots.find_capture_directory() is not None
