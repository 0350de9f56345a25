"""Test volumes on real ZFS: their operations, and scans after interruptions and damage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zfs_core
from zfs_core import snapshots
from zfs_core.capabilities import make_openzfs_capabilities
from zfs_core.outcome import Outcome

from sandbox_gateway.engine.index import sort_oldest_first
from sandbox_gateway.errors import GatewayError, InUseExternally, NotFound, OverQuota
from sandbox_gateway.hosts.jail_zfs.storage.dataset_tree import DatasetTree
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import DOOMED_PROPERTY, QUARANTINE_PROPERTY, RECORD_PROPERTY
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from tests.support import pools


def list_volume_datasets(storage: ZfsStorage, types: str = "filesystem,snapshot") -> list[str]:
    prefix = f"{storage.root.dataset}/volumes/"
    return [
        name.removeprefix(prefix)
        for name in zfs_core.list_datasets(storage.root.dataset, types=types)
        if prefix in name
    ]


def reopen(storage: ZfsStorage) -> ZfsStorage:
    """Close and reopen the storage, as a restart of the gateway does."""
    storage.close()
    storage.open()
    return storage


def create_volume(storage: ZfsStorage, name: str = "data", *, source: VolumeSnapshot | None = None) -> Volume:
    volume = Volume(name=name, size_mb=64, from_snapshot=source.id if source else "")
    storage.volumes.create(volume, source.id if source else None)
    return volume


def take_snapshot(storage: ZfsStorage, volume: Volume, name: str, **fields: str) -> VolumeSnapshot:
    snapshot = VolumeSnapshot(name=name, volume=volume.id, size_mb=volume.size_mb, **fields)
    storage.volume_snapshots.capture(snapshot)
    return snapshot


def get_data_file(storage: ZfsStorage, volume: Volume) -> Path:
    return storage.volumes.mount(volume.id) / "file"


def roll_back(storage: ZfsStorage, volume: Volume, snapshot: VolumeSnapshot) -> None:
    storage.volumes.commit_rollback(volume, storage.volumes.begin_rollback(volume, snapshot.id))
    storage.volumes.retire_former_datasets(volume.id)


def write_megabytes(path: Path, megabytes: int) -> None:
    with path.open("wb") as target:
        for _ in range(megabytes):
            target.write(os.urandom(1 << 20))
            target.flush()


def test_a_volume_is_accessible_only_inside_sandboxes(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    mount_point = storage.volumes.mount(volume.id)
    assert (mount_point.stat().st_mode & 0o7777, mount_point.stat().st_uid) == (0o777, 0)
    assert mount_point.parent.stat().st_mode & 0o7777 == 0o700
    assert volume.host == {"dataset": f"{storage.root.dataset}/volumes/{volume.id}"}
    scan = reopen(storage).scan()
    assert (scan.volumes, scan.repaired, storage.volumes.sweep()) == ([volume], [], [])
    storage.volumes.commit_removal(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert list_volume_datasets(storage) == [] and list(mount_point.parent.iterdir()) == []


def test_the_size_of_a_volume_is_enforced_and_can_grow_while_in_use(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    path = get_data_file(storage, volume)
    with pytest.raises(OSError, match="quota"):
        write_megabytes(path, 80)
    path.unlink()
    storage.volumes.grow(volume, 128)
    write_megabytes(path, 100)
    zfs_core.sync(volume.host["dataset"])
    assert 100 << 20 <= storage.volumes.count_used_bytes(volume.id) < 128 << 20
    assert reopen(storage).scan().volumes == [volume.model_copy(update={"size_mb": 128})]


def test_a_scan_undoes_an_interrupted_growth(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    zfs_core.lzc_set_prop(volume.host["dataset"], "refquota", 500 << 20)
    scan = reopen(storage).scan()
    assert scan.volumes == [volume]
    assert scan.repaired == [
        f"{volume.host['dataset']}: reset to the size in its record, because its quota was different"
    ]
    assert (
        zfs_core.get_props([volume.host["dataset"]], ["refquota"])[volume.host["dataset"]]["refquota"].number
        == 64 << 20
    )


def test_a_clone_has_the_snapshots_contents_and_is_independent(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    get_data_file(storage, volume).write_text("first")
    snapshot = take_snapshot(storage, volume, "mark")
    get_data_file(storage, volume).write_text("second")
    clones = [create_volume(storage, f"clone{n}", source=snapshot) for n in range(2)]
    assert [get_data_file(storage, each).read_text() for each in clones] == ["first", "first"]
    get_data_file(storage, clones[0]).write_text("third")
    assert get_data_file(storage, volume).read_text() == "second"
    for operation in (
        lambda: storage.volume_snapshots.destroy(snapshot.id),
        lambda: storage.volumes.commit_removal(volume.id),
    ):
        with pytest.raises(InUseExternally) as error:
            operation()
        assert error.value.users == {"ZFS clone": {each.id: each.name for each in clones}}
        assert set(error.value.blockers) == {each.id for each in clones}
    scan = reopen(storage).scan()
    assert ({each.id for each in scan.volumes}, scan.volume_snapshots) == (
        {volume.id, *(each.id for each in clones)},
        [snapshot],
    )
    for each in clones:
        storage.volumes.commit_removal(each.id)
        storage.volumes.finish_removal(each.id)
    storage.volume_snapshots.destroy(snapshot.id)
    with pytest.raises(NotFound):
        storage.volumes.create(Volume(name="late"), snapshot.id)
    assert list_volume_datasets(storage) == [volume.id]


def test_a_clone_too_small_for_the_snapshot_is_refused(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    storage.volumes.grow(volume, 128)
    write_megabytes(get_data_file(storage, volume), 80)
    snapshot = take_snapshot(storage, volume, "mark")
    with pytest.raises(OverQuota, match=r"a volume of 64 MiB is too small|quota"):
        storage.volumes.create(Volume(name="small", size_mb=64), snapshot.id)
    assert len(list_volume_datasets(storage, "filesystem")) == 1


def test_rollback_keeps_newer_snapshots(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    taken_snapshots = []
    for text in ("one", "two", "three"):
        get_data_file(storage, volume).write_text(text)
        taken_snapshots.append(take_snapshot(storage, volume, text))
    storage.volumes.grow(volume, 128)
    volume.size_mb = 128
    for index in (0, 2, 1):
        roll_back(storage, volume, taken_snapshots[index])
        assert get_data_file(storage, volume).read_text() == taken_snapshots[index].name
        scan = reopen(storage).scan()
        assert (scan.volumes, scan.volume_snapshots, scan.repaired) == ([volume], taken_snapshots, [])
        assert (storage.volumes.sweep(), volume.size_mb) == ([], 128)
    last_snapshot = take_snapshot(storage, volume, "own")
    # The volume depends only on the first of these, which is hidden until the volume is removed.
    for snapshot in (taken_snapshots[1], taken_snapshots[0], taken_snapshots[2], last_snapshot):
        storage.volume_snapshots.destroy(snapshot.id)
    assert get_data_file(storage, volume).read_text() == "two"
    scan = reopen(storage).scan()
    assert (scan.volume_snapshots, scan.repaired) == ([], [])
    storage.volumes.commit_removal(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert list_volume_datasets(storage) == []


def test_a_retired_dataset_is_removed_with_its_last_snapshot(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    first_snapshot, second_snapshot = take_snapshot(storage, volume, "first"), take_snapshot(storage, volume, "second")
    roll_back(storage, volume, first_snapshot)
    roll_back(storage, volume, first_snapshot)
    assert list_volume_datasets(storage, "filesystem") == [volume.id, f"{volume.id}.2"]
    storage.volume_snapshots.destroy(second_snapshot.id)
    last_snapshot = take_snapshot(storage, volume, "own")
    roll_back(storage, volume, last_snapshot)
    assert len(list_volume_datasets(storage, "filesystem")) == 3
    storage.volumes.commit_removal(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert list_volume_datasets(storage) == []


INTERRUPTIONS: dict[str, Callable[[ZfsStorage, Volume, VolumeSnapshot], object]] = {
    "before the commit": lambda storage, volume, snapshot: storage.volumes.begin_rollback(volume, snapshot.id),
    "after the commit": lambda storage, volume, snapshot: storage.volumes.commit_rollback(
        volume, storage.volumes.begin_rollback(volume, snapshot.id)
    ),
    "while retiring": lambda storage, volume, snapshot: (
        storage.volumes.commit_rollback(volume, storage.volumes.begin_rollback(volume, snapshot.id)),
        zfs_core.lzc_inherit_prop(f"{storage.root.dataset}/volumes/{volume.id}", RECORD_PROPERTY),
    ),
    "none": roll_back,
}


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_a_scan_completes_or_undoes_an_interrupted_rollback(storage: ZfsStorage, interruption: str) -> None:
    volume = create_volume(storage)
    get_data_file(storage, volume).write_text("old")
    snapshot = take_snapshot(storage, volume, "mark")
    get_data_file(storage, volume).write_text("new")
    later_snapshot = take_snapshot(storage, volume, "later")
    INTERRUPTIONS[interruption](storage, volume, snapshot)
    scan = reopen(storage).scan()
    notes = storage.volumes.sweep()
    assert ([each.id for each in scan.volumes], scan.volume_snapshots) == ([volume.id], [snapshot, later_snapshot])
    assert get_data_file(storage, volume).read_text() == ("new" if interruption == "before the commit" else "old")
    assert len(notes) == (0 if interruption == "none" else 1), notes
    assert len(list_volume_datasets(storage, "filesystem")) == (1 if interruption == "before the commit" else 2)
    assert (
        sum(
            zfs_core.is_mounted(f"{storage.root.dataset}/volumes/{name}")
            for name in list_volume_datasets(storage, "filesystem")
        )
        == 1
    )
    assert (reopen(storage).scan().repaired, storage.volumes.sweep()) == ([], [])


def test_a_scan_finishes_an_interrupted_removal(storage: ZfsStorage) -> None:
    volume, other_volume = create_volume(storage), create_volume(storage, "other")
    snapshot = take_snapshot(storage, volume, "mark")
    take_snapshot(storage, volume, "more")
    roll_back(storage, volume, snapshot)
    storage.volumes.commit_removal(volume.id)
    with pytest.raises(NotFound):
        storage.volumes.mount(volume.id)
    scan = reopen(storage).scan()
    assert ([each.id for each in scan.volumes], scan.volume_snapshots) == ([other_volume.id], [])
    assert len(storage.volumes.sweep()) == 1
    assert list_volume_datasets(storage) == [other_volume.id]


def test_a_scan_finishes_a_removal_interrupted_after_the_newest_dataset_is_destroyed(
    storage: ZfsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = create_volume(storage)
    snapshot = take_snapshot(storage, volume, "mark")
    roll_back(storage, volume, snapshot)
    storage.volumes.commit_removal(volume.id)
    original_destroy = DatasetTree.destroy

    def destroy_and_interrupt(self: DatasetTree, dataset: str) -> None:
        original_destroy(self, dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr(DatasetTree, "destroy", destroy_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage.volumes.finish_removal(volume.id)
    monkeypatch.undo()
    assert list_volume_datasets(storage, "filesystem") == [volume.id]
    assert reopen(storage).scan().volumes == []
    storage.volumes.sweep()
    assert list_volume_datasets(storage) == []


def test_sweep_removes_an_uncommitted_volume(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    zfs_core.lzc_inherit_prop(volume.host["dataset"], RECORD_PROPERTY)
    assert reopen(storage).scan().volumes == []
    assert storage.volumes.sweep() == [f"{volume.host['dataset']}: removed, because it was never committed"]
    assert list_volume_datasets(storage) == []


def test_damaged_records_are_quarantined_and_keep_their_data(storage: ZfsStorage) -> None:
    intact_volume, damaged_volume = create_volume(storage, "good"), create_volume(storage, "bad")
    intact_snapshot, damaged_snapshot = (
        take_snapshot(storage, intact_volume, "fine"),
        take_snapshot(storage, intact_volume, "torn"),
    )
    dependent_snapshot = take_snapshot(storage, damaged_volume, "lost")
    record = zfs_core.local_props(damaged_volume.host["dataset"])[RECORD_PROPERTY]
    pools.run("zfs", "set", f"{RECORD_PROPERTY}=two\nlines\tlocal\nand more", damaged_volume.host["dataset"])
    pools.run(
        "zfs",
        "set",
        f"sandbox:volume-snapshot.{damaged_snapshot.id}={{}}",
        f"{intact_volume.host['dataset']}@{damaged_snapshot.id}",
    )
    pools.run("zfs", "create", f"{storage.root.dataset}/volumes/odd one")
    datasets_before = list_volume_datasets(storage)
    for _ in range(2):
        scan = reopen(storage).scan()
        assert (scan.volumes, scan.volume_snapshots) == ([intact_volume], [intact_snapshot])
        assert storage.volumes.sweep() == []
        assert list_volume_datasets(storage) == datasets_before
    assert len(scan.repaired) == 3, scan.repaired
    assert "not JSON" in zfs_core.local_props(damaged_volume.host["dataset"])[QUARANTINE_PROPERTY]
    assert storage.volumes.is_known(damaged_volume.id) is None and storage.volumes.is_known(intact_volume.id) is True
    zfs_core.lzc_set_prop(damaged_volume.host["dataset"], RECORD_PROPERTY, record)
    scan = reopen(storage).scan()
    assert {each.id for each in scan.volumes} == {intact_volume.id, damaged_volume.id}
    assert {each.id for each in scan.volume_snapshots} == {intact_snapshot.id, dependent_snapshot.id}
    assert QUARANTINE_PROPERTY not in zfs_core.local_props(damaged_volume.host["dataset"])


def test_a_volume_destroyed_with_zfs_is_not_found(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    snapshot = take_snapshot(storage, volume, "mark")
    pools.run("zfs", "destroy", f"{volume.host['dataset']}@{snapshot.id}")
    with pytest.raises(NotFound):
        storage.volume_snapshots.destroy(snapshot.id)
    with pytest.raises(NotFound):
        storage.volumes.begin_rollback(volume, snapshot.id)
    pools.destroy_all(volume.host["dataset"])
    for operation in (storage.volumes.mount, storage.volumes.count_used_bytes):
        with pytest.raises(NotFound, match="volume"):
            operation(volume.id)
    storage.volumes.commit_removal(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert (reopen(storage).scan().volumes, storage.volumes.is_known(volume.id)) == ([], False)


def test_foreign_snapshots_are_not_destroyed(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    pools.run("zfs", "snapshot", f"{volume.host['dataset']}@hourly")
    scan = reopen(storage).scan()
    assert (scan.volumes, scan.volume_snapshots, scan.repaired) == ([volume], [], [])
    with pytest.raises(InUseExternally, match="@hourly"):
        storage.volumes.commit_removal(volume.id)
    assert reopen(storage).scan().volumes == [volume]
    assert DOOMED_PROPERTY not in zfs_core.local_props(volume.host["dataset"])


def create_sandbox(storage: ZfsStorage) -> Sandbox:
    base = storage.snapshots.create_base(Snapshot(kind=SnapshotKind.BASE), lambda path: None)
    sandbox = Sandbox(name="web", forked_from=base.id)
    storage.instances.clone(base.id, sandbox.instance)
    storage.instances.save(sandbox)
    return sandbox


def test_capturing_a_sandbox_with_volumes_is_all_or_nothing(storage: ZfsStorage) -> None:
    sandbox, volumes = create_sandbox(storage), [create_volume(storage, name) for name in ("a", "b", "c")]
    record = Snapshot(source_sandbox=sandbox.id, recipe={"text": "y" * 20_000})
    volume_snapshots = [
        VolumeSnapshot(name=each.name, volume=each.id, size_mb=64, sandbox_snapshot=record.id) for each in volumes
    ]
    # One of the names is already in use, so the snapshots taken before it must be removed again.
    pools.run("zfs", "snapshot", f"{volumes[1].host['dataset']}@{volume_snapshots[1].id}")
    snapshots_before = zfs_core.list_datasets(storage.root.dataset, types="snapshot")
    with pytest.raises(GatewayError, match="already exists"):
        storage.snapshots.capture(sandbox.instance, record, volume_snapshots)
    assert zfs_core.list_datasets(storage.root.dataset, types="snapshot") == snapshots_before
    zfs_core.lzc_destroy_snaps([f"{volumes[1].host['dataset']}@{volume_snapshots[1].id}"], False)
    storage.snapshots.capture(sandbox.instance, record, volume_snapshots)
    scan = reopen(storage).scan()
    assert scan.snapshots[-1] == record
    assert sort_oldest_first(scan.volume_snapshots) == volume_snapshots
    assert (scan.repaired, storage.volumes.sweep()) == ([], [])


def test_sweep_removes_volume_snapshots_of_an_uncommitted_snapshot(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    unused_snapshot = take_snapshot(storage, volume, "part", sandbox_snapshot="0" * 12)
    cloned_snapshot = take_snapshot(storage, volume, "cloned-part", sandbox_snapshot="1" * 12)
    clone = create_volume(storage, "clone", source=cloned_snapshot)
    scan = reopen(storage).scan()
    assert scan.volume_snapshots == []
    assert len(storage.volumes.sweep()) == 2
    assert not zfs_core.lzc_exists(f"{volume.host['dataset']}@{unused_snapshot.id}")
    assert (reopen(storage).scan().volume_snapshots, storage.volumes.sweep()) == ([], [])
    storage.volumes.commit_removal(clone.id)
    storage.volumes.finish_removal(clone.id)
    assert not zfs_core.lzc_exists(f"{volume.host['dataset']}@{cloned_snapshot.id}"), (
        "the snapshot was not removed with its clone"
    )


def test_one_command_takes_several_snapshots(storage: ZfsStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, volume = create_sandbox(storage), create_volume(storage)
    record = Snapshot(source_sandbox=sandbox.id)
    volume_snapshot = VolumeSnapshot(name="part", volume=volume.id, size_mb=64, sandbox_snapshot=record.id)
    commands: list[tuple[str, ...]] = []

    def record_command(*argv: str, **_: object) -> Outcome:
        commands.append(argv)
        return Outcome("", "", None)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "detect_capabilities", lambda: make_openzfs_capabilities((2, 2)))
        patch.setattr(snapshots, "run", record_command)
        storage.snapshots.capture(sandbox.instance, record, [volume_snapshot])
    (command,) = commands
    assert command[0] == "snapshot"
    assert command[-2:] == (
        f"{volume.host['dataset']}@{volume_snapshot.id}",
        f"{storage.instances.dataset(sandbox.instance)}@{record.id}",
    )
    assert [word.partition("=")[0] for word in command[2:-2:2]] == [
        f"sandbox:volume-snapshot.{volume_snapshot.id}",
        RECORD_PROPERTY,
    ]
