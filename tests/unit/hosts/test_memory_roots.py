"""Test memory images in a memory root: where they are, when they are unavailable, and which of them a scan removes.

The roots are plain directories. Renaming a root simulates unmounting it.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.kvm_xfs.files import held_images, instances, memory_roots, reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.files.memory_roots import MemoryRoots
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, Snapshot, SnapshotKind

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that does not list extents, such as tmpfs."""
    monkeypatch.setattr(reflink, "count_unique_bytes", lambda path: 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A memory root."""
    root = tmp_path / "memory"
    root.mkdir(mode=0o700)
    return root


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "state")
    layout.create()
    return layout


class Store:
    """The snapshots and memory roots of one gateway."""

    def __init__(self, layout: Layout, root: Path | None) -> None:
        self.layout = layout
        self.roots = MemoryRoots(layout, root)
        self.quarantine = Quarantine(layout.root)
        self.snapshots = Snapshots(layout, self.quarantine)

    def capture(self, kind: SnapshotKind = SnapshotKind.SNAPSHOT, *, commit: bool = True) -> Snapshot:
        """Create the files of a snapshot with memory."""
        snapshot = Snapshot(kind=kind, memory=MemoryMode.FULL, resources=Resources(memory_mb=64))
        if directory := self.roots.find_capture_directory():
            directory.record_location(snapshot)
        files = self.snapshots.partial_files(snapshot)
        files.directory.mkdir()
        for path in (files.disk, files.kernel, files.initrd, files.device_state):
            path.write_bytes(b"x")
        files.memory.write_bytes(b"memory")
        os.truncate(files.memory, 64 * MIB)
        if commit:
            self.snapshots.commit(snapshot)
        return snapshot

    def fork(self, snapshot: Snapshot) -> InstanceFiles:
        """Create the memory file of a machine that is forked from a snapshot."""
        sandbox = Sandbox(name="fork")
        files = self.layout.instance(sandbox)
        files.directory.mkdir(parents=True)
        snapshot_files = self.snapshots.files(snapshot)
        held_images.hold(snapshot_files.memory, files.memory, snapshot_files.memory_directory)
        return files

    def scan(self) -> tuple[list[str], list[str]]:
        """Scan the state root, and return the ids of the snapshots and descriptions of the repairs."""
        repairs: list[str] = []
        ids = [snapshot.id for snapshot in self.snapshots.scan(repairs)]
        self.roots.sweep(self.quarantine, repairs)
        return ids, repairs


@pytest.fixture
def store(layout: Layout, root: Path) -> Store:
    store = Store(layout, root)
    store.roots.open()
    return store


def unmount_root(root: Path) -> None:
    """Replace a root with an empty directory, as if the root were unmounted."""
    root.rename(root.with_name("unmounted"))
    root.mkdir(mode=0o700)


def mount_root(root: Path) -> None:
    root.rmdir()
    root.with_name("unmounted").rename(root)


def list_images(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_the_record_of_a_snapshot_says_where_its_memory_is(store: Store, root: Path) -> None:
    snapshot = store.capture()
    manifest = json.loads((store.snapshots.files(snapshot).directory / "manifest.json").read_text())
    location = manifest["host"]["memory"]
    assert location["root"] == str(root)
    assert list_images(root) == [f"{location['gateway']}/snapshots/{snapshot.id}.img"]
    assert store.snapshots.get_file_paths(snapshot)["memory"] == str(root / list_images(root)[0])
    assert not (store.snapshots.files(snapshot).directory / "memory.img").exists()
    assert store.scan() == ([snapshot.id], [])


def test_without_a_memory_root_the_image_is_in_the_snapshots_directory(layout: Layout) -> None:
    store = Store(layout, None)
    store.roots.open()
    snapshot = store.capture()
    assert (store.snapshots.files(snapshot).directory / "memory.img").exists()
    assert store.roots.find_memory_problem(snapshot) == "" and not layout.memory_roots.exists()


def test_memory_is_unavailable_until_its_root_is_mounted(store: Store, root: Path) -> None:
    snapshot = store.capture()
    assert store.roots.find_memory_problem(snapshot) == ""
    unmount_root(root)
    assert f"{root} is not mounted" in store.roots.find_memory_problem(snapshot)
    with pytest.raises(Conflict, match=rf"snapshot {snapshot.id} is not available: .*not mounted.*'coldStart: true'"):
        store.roots.require_memory(snapshot)
    mount_root(root)
    assert store.roots.find_memory_problem(snapshot) == ""
    store.roots.require_memory(snapshot)


def test_a_missing_directory_makes_memory_unavailable(store: Store, root: Path) -> None:
    snapshot = store.capture()
    root.rename(root.with_name("unmounted"))
    assert f"the directory {root} does not exist" in store.roots.find_memory_problem(snapshot)


def test_a_missing_or_short_image_makes_memory_unavailable(store: Store) -> None:
    snapshot = store.capture()
    image = store.snapshots.files(snapshot).memory
    os.truncate(image, MIB)
    assert store.roots.find_memory_problem(snapshot) == f"{image} is too short"
    image.unlink()
    assert store.roots.find_memory_problem(snapshot) == f"{image}: No such file or directory"
    assert store.scan() == ([snapshot.id], []), "it is not damaged"


def test_snapshots_of_an_unmounted_root_are_neither_quarantined_nor_removed(store: Store, root: Path) -> None:
    snapshot = store.capture()
    unmount_root(root)
    assert store.scan() == ([snapshot.id], [])
    assert not (store.layout.root / ".damaged").exists()
    mount_root(root)
    assert store.scan() == ([snapshot.id], []) and store.roots.find_memory_problem(snapshot) == ""


def test_a_transient_snapshot_on_an_unmounted_root_survives_a_gateway_restart(store: Store, root: Path) -> None:
    snapshot = store.capture(SnapshotKind.TRANSIENT)
    unmount_root(root)
    assert store.scan() == ([snapshot.id], [])


def test_captures_are_refused_and_nothing_is_created_while_the_root_is_not_mounted(
    store: Store, layout: Layout, root: Path
) -> None:
    unmount_root(root)
    with pytest.raises(Conflict, match=rf"the memory root {root} is not available: .*Mount it"):
        store.capture()
    restarted_store = Store(layout, root)
    restarted_store.roots.open()
    assert list(root.iterdir()) == []
    mount_root(root)
    assert restarted_store.roots.find_capture_directory() is not None


def test_a_root_that_does_not_exist_yet_is_used_once_it_exists(layout: Layout, tmp_path: Path) -> None:
    store = Store(layout, tmp_path / "later")
    store.roots.open()
    with pytest.raises(Conflict, match="does not exist"):
        store.capture()
    assert not (tmp_path / "later").exists(), "the gateway does not create the root"
    (tmp_path / "later").mkdir(mode=0o700)
    assert store.roots.find_memory_problem(store.capture()) == ""


def test_a_root_writable_by_other_users_is_refused(layout: Layout, root: Path) -> None:
    root.chmod(0o1777)
    with pytest.raises(Conflict, match="users other than root can write"):
        Store(layout, root).capture()
    assert list(root.iterdir()) == []


def test_a_file_system_that_reports_mappings_by_another_device_is_refused(
    layout: Layout, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "major", lambda device: 4095)
    with pytest.raises(Conflict, match="reports a different device for mapped files"):
        Store(layout, root).capture()


def test_old_snapshots_stay_in_their_root_after_a_configuration_change(
    store: Store, layout: Layout, tmp_path: Path, root: Path
) -> None:
    old_snapshot = store.capture()
    other_root = tmp_path / "other"
    other_root.mkdir(mode=0o700)
    other_root_store = Store(layout, other_root)
    new_snapshot = other_root_store.capture()
    rootless_store = Store(layout, None)
    newest_snapshot = rootless_store.capture()
    for each in (store, other_root_store, rootless_store):
        assert sorted(each.scan()[0]) == sorted([old_snapshot.id, new_snapshot.id, newest_snapshot.id])
        assert [
            each.roots.find_memory_problem(snapshot) for snapshot in (old_snapshot, new_snapshot, newest_snapshot)
        ] == [
            "",
            "",
            "",
        ]
    found_roots = [rootless_store.snapshots.files(each).memory.parents[2] for each in (old_snapshot, new_snapshot)]
    assert found_roots == [root, other_root]


def test_removal_removes_the_record_and_the_image(store: Store, root: Path) -> None:
    snapshot = store.capture()
    store.snapshots.remove(snapshot)
    assert list_images(root) == [] and store.scan() == ([], [])


def test_the_image_of_a_snapshot_removed_while_unmounted_is_swept(store: Store, root: Path) -> None:
    snapshot = store.capture()
    unmount_root(root)
    store.snapshots.remove(snapshot)
    assert store.scan() == ([], [])
    mount_root(root)
    ids, repairs = store.scan()
    assert ids == [] and list_images(root) == []
    assert len(repairs) == 1 and "belonged to no snapshot" in repairs[0]


@pytest.mark.parametrize("is_committed", [True, False])
def test_undo_removes_the_image(store: Store, root: Path, is_committed: bool) -> None:
    store.snapshots.undo(store.capture(commit=is_committed))
    assert list_images(root) == []


def test_an_uncommitted_snapshots_image_is_swept(store: Store, root: Path) -> None:
    committed_snapshot = store.capture()
    store.capture(commit=False)
    ids, repairs = store.scan()
    assert ids == [committed_snapshot.id] and len(repairs) == 1
    assert list_images(root) == [str(store.snapshots.files(committed_snapshot).memory.relative_to(root))]


def test_the_image_of_a_quarantined_snapshot_is_kept(store: Store, root: Path) -> None:
    snapshot = store.capture()
    (store.snapshots.files(snapshot).directory / "manifest.json").write_text("{")
    ids, repairs = store.scan()
    assert ids == [] and len(repairs) == 1 and "is damaged" in repairs[0]
    assert len(list_images(root)) == 1
    assert store.scan() == ([], []) and len(list_images(root)) == 1


@pytest.mark.parametrize("location", ["/memory", {"root": "/memory"}, {"root": 3, "gateway": "a"}])
def test_a_snapshot_with_an_invalid_location_is_quarantined(store: Store, location: object) -> None:
    manifest_path = store.snapshots.files(store.capture()).directory / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["host"]["memory"] = location
    manifest_path.write_text(json.dumps(manifest))
    ids, repairs = store.scan()
    assert ids == [] and "host.memory" in repairs[0]


def test_the_files_of_another_gateway_are_kept(store: Store, tmp_path: Path, root: Path) -> None:
    other_layout = Layout(tmp_path / "other-state")
    other_layout.create()
    other_store = Store(other_layout, root)
    other_store.capture()
    assert store.scan() == ([], []) and len(list_images(root)) == 1


# -- machines ----------------------------------------------------------------------------------------------------------


def test_a_machine_holds_its_image_after_the_snapshot_was_removed(store: Store, root: Path) -> None:
    snapshot = store.capture()
    files = store.fork(snapshot)
    assert files.memory.samefile(store.snapshots.files(snapshot).memory)
    store.snapshots.remove(snapshot)
    assert files.memory.read_bytes()[:6] == b"memory"
    assert store.scan() == ([], [])
    instances.remove(files)
    assert list_images(root) == [] and not files.directory.parent.exists()


def test_removing_a_sandbox_releases_its_images(store: Store, root: Path) -> None:
    snapshot = store.capture()
    files = store.fork(snapshot)
    held_images.hold(files.memory, files.last_memory, store.snapshots.files(snapshot).memory_directory)
    assert len(list_images(root)) == 3
    instances.remove_all(files.directory.parent)
    instances.remove_all(files.directory.parent)
    assert len(list_images(root)) == 1 and store.scan() == ([snapshot.id], [])


def test_the_image_of_a_missing_machine_is_swept(store: Store, root: Path) -> None:
    snapshot = store.capture()
    swept_files, kept_files = store.fork(snapshot), store.fork(snapshot)
    swept_files.memory.unlink()
    _, repairs = store.scan()
    assert len(repairs) == 1 and "belonged to no machine" in repairs[0]
    assert len(list_images(root)) == 2 and kept_files.memory.exists()


def test_the_image_of_a_machine_in_quarantine_is_kept(store: Store, root: Path) -> None:
    files = store.fork(store.capture())
    store.quarantine.move(files.directory.parent)
    assert store.scan()[1] == [] and len(list_images(root)) == 2


def test_machine_images_are_not_swept_while_their_root_is_unmounted(store: Store, root: Path) -> None:
    files = store.fork(store.capture())
    unmount_root(root)
    assert files.memory.is_symlink() and not files.memory.exists()
    with pytest.raises(Conflict, match=r"image of the running machine is not available.*Mount"):
        memory_roots.require_held_image(files.memory)
    assert store.scan()[1] == []
    mount_root(root)
    memory_roots.require_held_image(files.memory)
    assert store.scan()[1] == [] and files.memory.exists()


def test_a_newer_image_replaces_the_held_one_even_in_a_different_root(store: Store, tmp_path: Path, root: Path) -> None:
    snapshot = store.capture()
    files = store.fork(snapshot)
    other_directory = MemoryDirectory(tmp_path / "other", "gateway")
    for path in (other_directory.snapshots, other_directory.machines):
        path.mkdir(parents=True)
    directory = store.snapshots.files(snapshot).memory_directory
    assert directory is not None
    for number, image_directory in enumerate((None, directory, directory, other_directory, None)):
        image = (files.directory if image_directory is None else image_directory.snapshots) / f"image-{number}"
        image.write_text(str(number))
        held_images.hold(image, files.last_memory, image_directory)
        image.unlink()
        assert files.last_memory.read_text() == str(number)
    assert not files.last_memory.is_symlink()
    assert [path.name for path in directory.list_machine_files()] == ["memory.base"]
    assert other_directory.list_machine_files() == [] and list(other_directory.machines.iterdir()) == []


def test_a_booting_machine_uses_neither_the_root_nor_a_former_machines_images(store: Store, root: Path) -> None:
    snapshot = store.capture()
    files = store.fork(snapshot)
    held_images.hold(files.memory, files.last_memory, store.snapshots.files(snapshot).memory_directory)
    files.last_memory_check.write_text("{}")
    files.taken_marker.touch()
    instances.create_memory_file(files, 64)
    assert sorted(path.name for path in files.directory.iterdir()) == ["memory.base"]
    assert files.memory.stat().st_size == 64 * MIB and files.memory.stat().st_blocks == 0
    assert len(list_images(root)) == 1


def test_a_machine_boots_while_the_root_is_not_mounted(store: Store, root: Path) -> None:
    files = store.fork(store.capture())
    unmount_root(root)
    instances.create_memory_file(files, 64)
    assert files.memory.stat().st_size == 64 * MIB
    mount_root(root)
    assert "belonged to no machine" in store.scan()[1][0]


# -- free space, and the file that lists known roots -------------------------------------------------------------------


def test_disk_reports_the_space_of_the_root_or_the_problem(store: Store, layout: Layout, root: Path) -> None:
    disk = store.roots.measure_disk()
    assert disk is not None and disk.path == str(root) and 0 < disk.free <= disk.total and disk.problem == ""
    unmount_root(root)
    disk = store.roots.measure_disk()
    assert disk is not None and disk.total == 0 and "not mounted" in disk.problem
    assert Store(layout, None).roots.measure_disk() is None


def test_a_damaged_list_of_roots_is_reported(layout: Layout, root: Path) -> None:
    layout.memory_roots.write_text("{}")
    with pytest.raises(BackendFailed, match=r"memory-roots\.json cannot be read .*restore it"):
        Store(layout, root).roots.open()


def test_the_gateway_keeps_its_directory_when_it_is_restarted(store: Store, layout: Layout, root: Path) -> None:
    directory_before = store.roots.find_capture_directory()
    directory_after = Store(layout, root).roots.find_capture_directory()
    assert (
        directory_before is not None
        and directory_after is not None
        and directory_before.directory == directory_after.directory
    )
    assert directory_before.directory.stat().st_mode & 0o777 == 0o700
    assert layout.memory_roots.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in root.iterdir()] == [directory_before.gateway]


# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_extent_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file system refuse to share extents."""
    monkeypatch.setattr(reflink, "_FICLONE", 0)


def write_sparse_file(path: Path, pieces: dict[int, bytes], size: int) -> Path:
    with path.open("wb") as file:
        for offset, data in pieces.items():
            file.seek(offset)
            file.write(data)
        file.truncate(size)
    return path


@pytest.mark.usefixtures("no_extent_sharing")
@pytest.mark.parametrize(
    "pieces",
    [
        {},
        {0: b"start"},
        {63 * MIB: b"\1" * MIB},
        {0: b"a" * 5000, 3 * MIB: b"b" * (9 * MIB + 17), 40 * MIB + 4096: b"c" * 4096},
    ],
)
def test_a_copy_is_equal_and_its_holes_remain_holes(tmp_path: Path, pieces: dict[int, bytes]) -> None:
    source = write_sparse_file(tmp_path / "source", pieces, 64 * MIB)
    reflink.clone_or_copy(source, tmp_path / "target")
    target = tmp_path / "target"
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks


@pytest.mark.usefixtures("no_extent_sharing")
def test_a_failed_copy_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: int, target: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reflink, "_copy_data", fail)
    source = write_sparse_file(tmp_path / "source", {0: b"x"}, MIB)
    with pytest.raises(OSError, match="No space"):
        reflink.clone_or_copy(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.usefixtures("no_extent_sharing")
def test_a_copy_uses_little_memory(tmp_path: Path) -> None:
    source = write_sparse_file(tmp_path / "source", {0: b"\1" * (48 * MIB)}, 64 * MIB)
    tracemalloc.start()
    try:
        reflink.clone_or_copy(source, tmp_path / "target")
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
