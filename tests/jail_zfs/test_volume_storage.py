"""Volumes on real ZFS: created, grown, captured, cloned, rolled back, removed, and found after any interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gateway import zfs
from sandbox_gateway.errors import GatewayError, NotFound, OverQuota, UsedOutside
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, QUARANTINE
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.storage.volume_datasets import VolumeDatasets
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import DOOMED
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from sandbox_gateway.zfs import snapshots
from sandbox_gateway.zfs.capabilities import openzfs
from sandbox_gateway.zfs.outcome import Outcome
from tests.jail_zfs import pools


def names(storage: ZfsStorage, types: str = "filesystem,snapshot") -> list[str]:
    prefix = f"{storage.root.dataset}/volumes/"
    return [
        name.removeprefix(prefix) for name in zfs.list_datasets(storage.root.dataset, types=types) if prefix in name
    ]


def reopen(storage: ZfsStorage) -> ZfsStorage:
    """Return the storage as a freshly started gateway finds it."""
    storage.close()
    storage.open()
    return storage


def create_volume(storage: ZfsStorage, name: str = "data", *, source: VolumeSnapshot | None = None) -> Volume:
    volume = Volume(name=name, size_mb=64, from_snapshot=source.id if source else "")
    storage.volumes.create(volume, source.id if source else None)
    return volume


def take_snapshot(storage: ZfsStorage, volume: Volume, name: str, **more: str) -> VolumeSnapshot:
    snapshot = VolumeSnapshot(name=name, volume=volume.id, size_mb=volume.size_mb, **more)
    storage.volume_snapshots.capture(snapshot)
    return snapshot


def data_file(storage: ZfsStorage, volume: Volume) -> Path:
    return storage.volumes.mount(volume.id) / "file"


def roll_back(storage: ZfsStorage, volume: Volume, snapshot: VolumeSnapshot) -> None:
    storage.volumes.commit_rollback(volume, storage.volumes.begin_rollback(volume, snapshot.id))
    storage.volumes.settle(volume.id)


def fill(path: Path, megabytes: int) -> None:
    with path.open("wb") as target:
        for _ in range(megabytes):
            target.write(os.urandom(1 << 20))
            target.flush()


def test_a_volume_is_accessible_only_inside_sandboxes(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    root = storage.volumes.mount(volume.id)
    assert (root.stat().st_mode & 0o7777, root.stat().st_uid) == (0o777, 0)
    assert root.parent.stat().st_mode & 0o7777 == 0o700
    assert volume.host == {"dataset": f"{storage.root.dataset}/volumes/{volume.id}"}
    found = reopen(storage).scan()
    assert (found.volumes, found.repaired, storage.volumes.sweep()) == ([volume], [], [])
    storage.volumes.doom(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert names(storage) == [] and list(root.parent.iterdir()) == []


def test_the_size_is_enforced_and_grows_while_in_use(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    path = data_file(storage, volume)
    with pytest.raises(OSError, match="quota"):
        fill(path, 80)
    path.unlink()
    storage.volumes.grow(volume, 128)
    fill(path, 100)
    zfs.sync(volume.host["dataset"])
    assert 100 << 20 <= storage.volumes.used_bytes(volume.id) < 128 << 20
    assert reopen(storage).scan().volumes == [volume.model_copy(update={"size_mb": 128})]


def test_an_interrupted_growth_is_undone(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    zfs.lzc_set_prop(volume.host["dataset"], "refquota", 500 << 20)
    found = reopen(storage).scan()
    assert found.volumes == [volume]
    assert found.repaired == [f"{volume.host['dataset']}: reset its size to the size in its record"]
    assert zfs.get_props([volume.host["dataset"]], ["refquota"])[volume.host["dataset"]]["refquota"].number == 64 << 20


def test_a_clone_is_independent_and_has_the_content(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    data_file(storage, volume).write_text("first")
    mark = take_snapshot(storage, volume, "mark")
    data_file(storage, volume).write_text("second")
    clones = [create_volume(storage, f"clone{n}", source=mark) for n in range(2)]
    assert [data_file(storage, each).read_text() for each in clones] == ["first", "first"]
    data_file(storage, clones[0]).write_text("third")
    assert data_file(storage, volume).read_text() == "second"
    for refused in (lambda: storage.volume_snapshots.destroy(mark.id), lambda: storage.volumes.doom(volume.id)):
        with pytest.raises(UsedOutside) as error:
            refused()
        assert error.value.users == {"ZFS clone": {each.id: each.name for each in clones}}
        assert set(error.value.blockers) == {each.id for each in clones}
    found = reopen(storage).scan()
    assert ({each.id for each in found.volumes}, found.volume_snapshots) == (
        {volume.id, *(each.id for each in clones)},
        [mark],
    )
    for each in clones:
        storage.volumes.doom(each.id)
        storage.volumes.finish_removal(each.id)
    storage.volume_snapshots.destroy(mark.id)
    with pytest.raises(NotFound):
        storage.volumes.create(Volume(name="late"), mark.id)
    assert names(storage) == [volume.id]


def test_a_clone_too_small_for_its_content_is_refused(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    storage.volumes.grow(volume, 128)
    fill(data_file(storage, volume), 80)
    mark = take_snapshot(storage, volume, "mark")
    with pytest.raises(OverQuota, match=r"a volume of 64 MiB is too small|quota"):
        storage.volumes.create(Volume(name="small", size_mb=64), mark.id)
    assert len(names(storage, "filesystem")) == 1


def test_rollback_keeps_newer_snapshots_and_can_go_forward_again(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    marks = []
    for text in ("one", "two", "three"):
        data_file(storage, volume).write_text(text)
        marks.append(take_snapshot(storage, volume, text))
    storage.volumes.grow(volume, 128)
    volume.size_mb = 128
    for wanted in (0, 2, 1):
        roll_back(storage, volume, marks[wanted])
        assert data_file(storage, volume).read_text() == marks[wanted].name
        found = reopen(storage).scan()
        assert (found.volumes, found.volume_snapshots, found.repaired) == ([volume], marks, [])
        assert (storage.volumes.sweep(), volume.size_mb) == ([], 128)
    own = take_snapshot(storage, volume, "own")
    # The first is hidden or removed at once, because the volume depends on none of the others.
    for mark in (marks[1], marks[0], marks[2], own):
        storage.volume_snapshots.destroy(mark.id)
    assert data_file(storage, volume).read_text() == "two"
    found = reopen(storage).scan()
    assert (found.volume_snapshots, found.repaired) == ([], [])
    storage.volumes.doom(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert names(storage) == []


def test_a_retired_dataset_is_removed_with_its_last_snapshot(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    first, second = take_snapshot(storage, volume, "first"), take_snapshot(storage, volume, "second")
    roll_back(storage, volume, first)
    roll_back(storage, volume, first)
    assert names(storage, "filesystem") == [volume.id, f"{volume.id}.2"]
    storage.volume_snapshots.destroy(second.id)
    own = take_snapshot(storage, volume, "own")
    roll_back(storage, volume, own)
    assert len(names(storage, "filesystem")) == 3
    storage.volumes.doom(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert names(storage) == []


CUT: dict[str, Callable[[ZfsStorage, Volume, VolumeSnapshot], object]] = {
    "begun": lambda storage, volume, mark: storage.volumes.begin_rollback(volume, mark.id),
    "committed": lambda storage, volume, mark: storage.volumes.commit_rollback(
        volume, storage.volumes.begin_rollback(volume, mark.id)
    ),
    "half retired": lambda storage, volume, mark: (
        storage.volumes.commit_rollback(volume, storage.volumes.begin_rollback(volume, mark.id)),
        zfs.lzc_inherit_prop(f"{storage.root.dataset}/volumes/{volume.id}", HEAD),
    ),
    "settled": roll_back,
}


@pytest.mark.parametrize("cut", CUT)
def test_an_interrupted_rollback_is_complete_or_undone(storage: ZfsStorage, cut: str) -> None:
    volume = create_volume(storage)
    data_file(storage, volume).write_text("old")
    mark = take_snapshot(storage, volume, "mark")
    data_file(storage, volume).write_text("new")
    later = take_snapshot(storage, volume, "later")
    CUT[cut](storage, volume, mark)
    found = reopen(storage).scan()
    notes = storage.volumes.sweep()
    assert ([each.id for each in found.volumes], found.volume_snapshots) == ([volume.id], [mark, later])
    assert data_file(storage, volume).read_text() == ("new" if cut == "begun" else "old")
    assert len(notes) == (0 if cut == "settled" else 1), notes
    assert len(names(storage, "filesystem")) == (1 if cut == "begun" else 2)
    assert sum(zfs.is_mounted(f"{storage.root.dataset}/volumes/{name}") for name in names(storage, "filesystem")) == 1
    assert (reopen(storage).scan().repaired, storage.volumes.sweep()) == ([], [])


def test_an_interrupted_removal_is_finished(storage: ZfsStorage) -> None:
    volume, other = create_volume(storage), create_volume(storage, "other")
    mark = take_snapshot(storage, volume, "mark")
    take_snapshot(storage, volume, "more")
    roll_back(storage, volume, mark)
    storage.volumes.doom(volume.id)
    with pytest.raises(NotFound):
        storage.volumes.mount(volume.id)
    found = reopen(storage).scan()
    assert ([each.id for each in found.volumes], found.volume_snapshots) == ([other.id], [])
    assert len(storage.volumes.sweep()) == 1
    assert names(storage) == [other.id]


def test_a_removal_interrupted_after_the_newest_dataset(storage: ZfsStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = create_volume(storage)
    mark = take_snapshot(storage, volume, "mark")
    roll_back(storage, volume, mark)
    storage.volumes.doom(volume.id)
    destroy = VolumeDatasets.destroy

    def once(self: VolumeDatasets, dataset: str) -> None:
        destroy(self, dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr(VolumeDatasets, "destroy", once)
    with pytest.raises(KeyboardInterrupt):
        storage.volumes.finish_removal(volume.id)
    monkeypatch.undo()
    assert names(storage, "filesystem") == [volume.id]
    assert reopen(storage).scan().volumes == []
    storage.volumes.sweep()
    assert names(storage) == []


def test_an_uncommitted_volume_is_swept(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    zfs.lzc_inherit_prop(volume.host["dataset"], HEAD)
    assert reopen(storage).scan().volumes == []
    assert storage.volumes.sweep() == [f"{volume.host['dataset']}: removed, because it was never committed"]
    assert names(storage) == []


def test_damage_does_not_prevent_a_scan_or_destroy_data(storage: ZfsStorage) -> None:
    good, bad = create_volume(storage, "good"), create_volume(storage, "bad")
    fine, torn = take_snapshot(storage, good, "fine"), take_snapshot(storage, good, "torn")
    lost = take_snapshot(storage, bad, "lost")
    record = zfs.local_props(bad.host["dataset"])[HEAD]
    pools.run("zfs", "set", f"{HEAD}=two\nlines\tlocal\nand more", bad.host["dataset"])
    pools.run("zfs", "set", f"sandbox:volume-snapshot.{torn.id}={{}}", f"{good.host['dataset']}@{torn.id}")
    pools.run("zfs", "create", f"{storage.root.dataset}/volumes/odd one")
    before = names(storage)
    for _ in range(2):
        found = reopen(storage).scan()
        assert (found.volumes, found.volume_snapshots) == ([good], [fine])
        assert storage.volumes.sweep() == []
        assert names(storage) == before
    assert len(found.repaired) == 3, found.repaired
    assert "not JSON" in zfs.local_props(bad.host["dataset"])[QUARANTINE]
    assert storage.volumes.is_known(bad.id) is None and storage.volumes.is_known(good.id) is True
    zfs.lzc_set_prop(bad.host["dataset"], HEAD, record)
    found = reopen(storage).scan()
    assert {each.id for each in found.volumes} == {good.id, bad.id}
    assert {each.id for each in found.volume_snapshots} == {fine.id, lost.id}
    assert QUARANTINE not in zfs.local_props(bad.host["dataset"])


def test_a_volume_destroyed_by_hand_is_gone(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    mark = take_snapshot(storage, volume, "mark")
    pools.run("zfs", "destroy", f"{volume.host['dataset']}@{mark.id}")
    with pytest.raises(NotFound):
        storage.volume_snapshots.destroy(mark.id)
    with pytest.raises(NotFound):
        storage.volumes.begin_rollback(volume, mark.id)
    pools.destroy_all(volume.host["dataset"])
    for use in (storage.volumes.mount, storage.volumes.used_bytes):
        with pytest.raises(NotFound, match="volume"):
            use(volume.id)
    storage.volumes.doom(volume.id)
    storage.volumes.finish_removal(volume.id)
    assert (reopen(storage).scan().volumes, storage.volumes.is_known(volume.id)) == ([], False)


def test_foreign_snapshots_are_not_destroyed(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    pools.run("zfs", "snapshot", f"{volume.host['dataset']}@hourly")
    found = reopen(storage).scan()
    assert (found.volumes, found.volume_snapshots, found.repaired) == ([volume], [], [])
    with pytest.raises(UsedOutside, match="@hourly"):
        storage.volumes.doom(volume.id)
    assert reopen(storage).scan().volumes == [volume]
    assert DOOMED not in zfs.local_props(volume.host["dataset"])


def instance(storage: ZfsStorage) -> Sandbox:
    base = storage.snapshots.create_base(Snapshot(kind=SnapshotKind.BASE), lambda path: None)
    sandbox = Sandbox(name="web", forked_from=base.id)
    storage.instances.clone(base.id, sandbox.instance)
    storage.instances.save(sandbox)
    return sandbox


def test_volumes_are_captured_with_a_sandbox_all_or_none(storage: ZfsStorage) -> None:
    sandbox, volumes = instance(storage), [create_volume(storage, name) for name in ("a", "b", "c")]
    record = Snapshot(source_sandbox=sandbox.id, recipe={"text": "y" * 20_000})
    parts = [VolumeSnapshot(name=each.name, volume=each.id, size_mb=64, sandbox_snapshot=record.id) for each in volumes]
    # one of the names is taken: nothing is left of the earlier ones
    pools.run("zfs", "snapshot", f"{volumes[1].host['dataset']}@{parts[1].id}")
    before = zfs.list_datasets(storage.root.dataset, types="snapshot")
    with pytest.raises(GatewayError, match="already exists"):
        storage.snapshots.capture(sandbox.instance, record, parts)
    assert zfs.list_datasets(storage.root.dataset, types="snapshot") == before
    zfs.lzc_destroy_snaps([f"{volumes[1].host['dataset']}@{parts[1].id}"], False)
    storage.snapshots.capture(sandbox.instance, record, parts)
    found = reopen(storage).scan()
    assert found.snapshots[-1] == record
    assert found.volume_snapshots == parts
    assert (found.repaired, storage.volumes.sweep()) == ([], [])


def test_parts_of_an_uncommitted_snapshot_are_swept(storage: ZfsStorage) -> None:
    volume = create_volume(storage)
    part = take_snapshot(storage, volume, "part", sandbox_snapshot="0" * 12)
    kept = take_snapshot(storage, volume, "cloned-part", sandbox_snapshot="1" * 12)
    clone = create_volume(storage, "clone", source=kept)
    found = reopen(storage).scan()
    assert found.volume_snapshots == []
    assert len(storage.volumes.sweep()) == 2
    assert not zfs.lzc_exists(f"{volume.host['dataset']}@{part.id}")
    assert (reopen(storage).scan().volume_snapshots, storage.volumes.sweep()) == ([], [])
    storage.volumes.doom(clone.id)
    storage.volumes.finish_removal(clone.id)
    assert not zfs.lzc_exists(f"{volume.host['dataset']}@{kept.id}"), "it goes with what was made from it"


def test_one_command_takes_several_snapshots(storage: ZfsStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, volume = instance(storage), create_volume(storage)
    record = Snapshot(source_sandbox=sandbox.id)
    part = VolumeSnapshot(name="part", volume=volume.id, size_mb=64, sandbox_snapshot=record.id)
    commands: list[tuple[str, ...]] = []

    def run(*argv: str, **_: object) -> Outcome:
        commands.append(argv)
        return Outcome("", "", None)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "detect_capabilities", lambda: openzfs((2, 2)))
        patch.setattr(snapshots, "run", run)
        storage.snapshots.capture(sandbox.instance, record, [part])
    (command,) = commands
    assert command[0] == "snapshot"
    assert command[-2:] == (
        f"{volume.host['dataset']}@{part.id}",
        f"{storage.instances.dataset(sandbox.instance)}@{record.id}",
    )
    assert [word.partition("=")[0] for word in command[2:-2:2]] == [f"sandbox:volume-snapshot.{part.id}", HEAD]
