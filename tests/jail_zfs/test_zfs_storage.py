"""Test the storage on real ZFS: templates, instances, snapshots and their records."""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zfs_core
from zfs_core.listing import COMPARISON_PREFIX

from sandbox_gateway.errors import BackendFailed, Busy, InUseExternally, NoSpace, NotFound, OverQuota
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE_PROPERTY, RECORD_PROPERTY, encode
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translate_errors
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, new_id
from tests.support import pools, session

_DATASETS_OF_EMPTY_STORAGE = ["", "/ballast", "/retired", "/sandboxes", "/volumes"]


def _list_dataset_names(storage: ZfsStorage, types: str = "filesystem,snapshot") -> list[str]:
    return [
        name.removeprefix(storage.root.dataset) for name in zfs_core.list_datasets(storage.root.dataset, types=types)
    ]


def _create_base(storage: ZfsStorage, text: str = "base") -> Snapshot:
    record = Snapshot(kind=SnapshotKind.BASE, recipe={"setup": ["true"]})
    return storage.snapshots.create_base(record, lambda path: _write(path / "file", text))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _create_sandbox(storage: ZfsStorage, source: Snapshot, name: str = "web", **fields: str) -> Sandbox:
    sandbox = Sandbox(name=name, forked_from=source.id, **fields)
    storage.instances.clone(source.id, sandbox.instance)
    storage.instances.save(sandbox)
    return sandbox


def _reopen(storage: ZfsStorage) -> ZfsStorage:
    """Close and reopen the storage, as a restart of the gateway does."""
    storage.close()
    storage.open()
    return storage


def test_a_sandbox_can_be_created_and_removed(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base, metadata={"ü": "€"})
    path = storage.instances.path(sandbox.instance)
    assert (path / "file").read_text() == "base"
    assert not zfs_core.is_mounted(f"{storage.root.dataset}/_template-{base.id}")
    scan = _reopen(storage).scan()
    assert (scan.snapshots, scan.sandboxes, scan.repaired) == ([base], [sandbox], [])
    assert storage.snapshots.get_full_name(base.id) == f"{storage.root.dataset}/_template-{base.id}@base"
    storage.instances.forget(sandbox.instance)
    assert storage.instances.discard(sandbox.instance)
    assert storage.snapshots.destroy(base.id)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE
    assert list((storage.root.mountpoint / "sandboxes").iterdir()) == []


def test_a_failed_base_is_destroyed(storage: ZfsStorage) -> None:
    def fail(path: Path) -> None:
        (path / "half").write_text("done")
        raise ValueError("no mirror")

    with pytest.raises(ValueError, match="no mirror"):
        storage.snapshots.create_base(Snapshot(), fail)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE


def test_a_snapshot_survives_its_sandbox(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    source = _create_sandbox(storage, base)
    (storage.instances.path(source.instance) / "file").write_text("changed")
    snapshot = storage.snapshots.capture(source.instance, Snapshot(source_sandbox=source.id, names=["v1"]))
    (storage.instances.path(source.instance) / "file").write_text("later")
    storage.instances.forget(source.instance)
    assert not storage.instances.discard(source.instance)
    retired_dataset = storage.snapshots.get_full_name(snapshot.id).partition("@")[0]
    assert not zfs_core.is_mounted(retired_dataset)
    scan = _reopen(storage).scan()
    assert (scan.snapshots, scan.sandboxes, scan.repaired) == ([base, snapshot], [], [])

    fork = _create_sandbox(storage, snapshot, "fork")
    assert (storage.instances.path(fork.instance) / "file").read_text() == "changed"
    with pytest.raises(InUseExternally) as error_info:
        storage.snapshots.destroy(snapshot.id)
    assert error_info.value.users == {"ZFS clone": {fork.id: "fork"}}
    assert error_info.value.blockers == [fork.id]
    assert storage.instances.discard(fork.instance)
    assert storage.snapshots.destroy(snapshot.id)
    assert _list_dataset_names(storage, "filesystem") == sorted([*_DATASETS_OF_EMPTY_STORAGE, f"/_template-{base.id}"])
    assert storage.snapshots.destroy(base.id)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE


def test_removing_a_snapshot_in_use_lists_all_users(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    forks = [_create_sandbox(storage, base, f"web-{n}") for n in range(3)]
    with pytest.raises(InUseExternally) as error_info:
        storage.snapshots.destroy(base.id)
    fork_names = {fork.id: fork.name for fork in forks}
    assert set(error_info.value.blockers) == set(fork_names)
    assert all(name in error_info.value.message for name in fork_names.values())
    zfs_core.lzc_hold({storage.snapshots.get_full_name(base.id): "backup"})
    for fork in forks:
        storage.instances.discard(fork.instance)
    with pytest.raises(InUseExternally, match="@") as error_info:
        storage.snapshots.destroy(base.id)
    assert list(error_info.value.users) == ["hold"]
    zfs_core.lzc_release({storage.snapshots.get_full_name(base.id): ["backup"]})
    assert storage.snapshots.destroy(base.id)


def test_a_snapshot_can_be_removed_before_the_file_system_of_a_removed_fork(storage: ZfsStorage) -> None:
    """The file system may be in use for a while, for example by a dying jail."""
    base = _create_base(storage)
    fork = _create_sandbox(storage, base)
    storage.instances.forget(fork.instance)
    assert not storage.snapshots.destroy(base.id)
    assert _reopen(storage).scan().snapshots == []
    assert storage.instances.discard(fork.instance)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE


def test_a_deferred_snapshot_is_hidden_and_removed_with_its_last_fork(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    fork = _create_sandbox(storage, base)
    assert not storage.snapshots.destroy(base.id, deferred=True)
    with pytest.raises(NotFound):
        storage.snapshots.get_full_name(base.id)
    scan = _reopen(storage).scan()
    assert (scan.snapshots, scan.sandboxes) == ([], [fork])
    assert storage.instances.discard(fork.instance)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE


def test_an_ancestor_can_be_removed_if_only_descendant_snapshots_need_it(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    snapshot = storage.snapshots.capture(sandbox.instance, Snapshot())
    storage.instances.discard(sandbox.instance)
    assert not storage.snapshots.destroy(base.id), "the base was destroyed although a snapshot depends on it"
    fork = _create_sandbox(storage, snapshot)
    assert (storage.instances.path(fork.instance) / "file").read_text() == "base"
    assert [record.id for record in _reopen(storage).scan().snapshots] == [snapshot.id]
    storage.instances.discard(fork.instance)
    assert storage.snapshots.destroy(snapshot.id)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE, (
        "retired datasets were not destroyed with the last snapshot"
    )


def test_a_scan_keeps_only_the_newest_instance_of_a_sandbox(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    old_instance = sandbox.instance
    first_snapshot = storage.snapshots.capture(old_instance, Snapshot())
    second_snapshot = storage.snapshots.capture(old_instance, Snapshot())
    storage.instances.clone(first_snapshot.id, instance := new_id())
    storage.instances.save(rolled_back_sandbox := sandbox.model_copy(update={"instance": instance}))
    # If the gateway is killed here, two instances have a record of the sandbox.
    scan = _reopen(storage).scan()
    assert scan.sandboxes == [rolled_back_sandbox]
    assert scan.repaired == [
        f"{storage.instances.dataset(old_instance)}: retired, "
        f"because the instance of sandbox {sandbox.id} is now {instance}"
    ]
    assert [record.id for record in scan.snapshots] == [base.id, first_snapshot.id, second_snapshot.id], (
        "newer snapshots were removed"
    )


def test_a_dataset_that_cannot_be_moved_is_retired_in_place(storage: ZfsStorage) -> None:
    """zfs-fuse cannot rename a dataset without unmounting the clones of its snapshots."""
    base = _create_base(storage)
    source = _create_sandbox(storage, base)
    snapshot = storage.snapshots.capture(source.instance, Snapshot())
    forks = [_create_sandbox(storage, snapshot, f"fork-{n}") for n in range(3)]
    assert not storage.instances.discard(source.instance)
    assert not storage.instances.path(source.instance).exists()
    for _ in range(2):
        scan = _reopen(storage).scan()
        assert ([s.id for s in scan.sandboxes], scan.repaired) == ([fork.id for fork in forks], [])
    snapshot_name = storage.snapshots.get_full_name(snapshot.id)  # a later scan may have moved it
    assert snapshot_name.partition("@")[0] in (
        f"{storage.root.dataset}/{container}/{source.instance}" for container in ("retired", "sandboxes")
    )
    assert not storage.snapshots.destroy(base.id), "the base was not hidden"
    for fork in forks:
        storage.instances.discard(fork.instance)
    assert storage.snapshots.destroy(snapshot.id)
    assert _list_dataset_names(storage) == _DATASETS_OF_EMPTY_STORAGE


def test_retiring_does_not_unmount_forks(storage: ZfsStorage) -> None:
    """Forks must stay mounted even if they are not running, because they may be about to start."""
    source = _create_sandbox(storage, _create_base(storage))
    snapshot = storage.snapshots.capture(source.instance, Snapshot())
    forks = [_create_sandbox(storage, snapshot, f"fork-{n}") for n in range(2)]
    paths = [str(storage.instances.path(fork.instance)) for fork in forks]
    mount_ids_before = pools.read_mount_ids(storage.root.mountpoint)
    assert not storage.instances.discard(source.instance)
    _reopen(storage).scan()
    mount_ids_after = pools.read_mount_ids(storage.root.mountpoint)
    assert [mount_ids_after.get(path) for path in paths] == [mount_ids_before[path] for path in paths]


def test_a_scan_removes_uncommitted_objects(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    storage.instances.clone(base.id, instance := new_id())
    pools.run("zfs", "create", f"{storage.root.dataset}/_template-{new_id()}")
    torn_down_instances = []
    scan = _reopen(storage).scan(torn_down_instances.append)
    assert torn_down_instances == [instance]
    assert len(scan.repaired) == 2
    assert _list_dataset_names(storage) == sorted(
        [*_DATASETS_OF_EMPTY_STORAGE, f"/_template-{base.id}", f"/_template-{base.id}@base"]
    )


def test_a_scan_reports_objects_that_it_cannot_remove(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    storage.instances.clone(base.id, instance := new_id())
    with (storage.instances.path(instance) / "open").open("w"):
        scan = _reopen(storage).scan()
        assert len(scan.repaired) == 1 and "could not be removed yet" in scan.repaired[0]
        with pytest.raises(Busy, match="still uses it"):
            storage.instances.discard(instance)
    assert "removed" in storage.scan().repaired[0]


def test_damaged_properties_do_not_prevent_a_scan(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    intact_sandbox = _create_sandbox(storage, base, "good")
    damaged_sandbox = _create_sandbox(storage, base, "bad")
    snapshot = storage.snapshots.capture(intact_sandbox.instance, Snapshot())
    duplicate_snapshot = storage.snapshots.capture(intact_sandbox.instance, Snapshot())
    pools.run("zfs", "set", f"{RECORD_PROPERTY}={{not json", storage.instances.dataset(damaged_sandbox.instance))
    pools.run(
        "zfs", "set", f"{RECORD_PROPERTY}=two\nlines\tlocal\nand more", storage.snapshots.get_full_name(snapshot.id)
    )
    pools.run(
        "zfs",
        "set",
        f"{RECORD_PROPERTY}={encode(base, 3)[RECORD_PROPERTY]}",
        storage.snapshots.get_full_name(duplicate_snapshot.id),
    )
    pools.run("zfs", "create", f"{storage.root.dataset}/sandboxes/odd one")
    for _ in range(2):
        scan = _reopen(storage).scan()
        assert (scan.sandboxes, scan.snapshots) == ([intact_sandbox], [base])
    assert len(scan.repaired) == 3
    assert any("is not JSON" in note for note in scan.repaired)
    assert any(f"also has the record of the snapshot {base.id}" in note for note in scan.repaired)
    assert "not JSON" in zfs_core.local_props(storage.instances.dataset(damaged_sandbox.instance))[QUARANTINE_PROPERTY]
    storage.instances.save(damaged_sandbox)
    scan = _reopen(storage).scan()
    assert {sandbox.name for sandbox in scan.sandboxes} == {"good", "bad"}
    assert f"{storage.instances.dataset(damaged_sandbox.instance)}: its record can be read again" in scan.repaired
    assert QUARANTINE_PROPERTY not in zfs_core.local_props(storage.instances.dataset(damaged_sandbox.instance))


def test_a_record_of_a_newer_release_is_refused_before_anything_changes(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    storage.instances.clone(base.id, new_id())  # It was never committed, so a scan would remove it.
    dataset = storage.instances.dataset(sandbox.instance)
    record = zfs_core.local_props(dataset)[RECORD_PROPERTY]
    newer_record = record.replace('"state":"running"', '"state":"frozen"')
    pools.run("zfs", "set", f"{RECORD_PROPERTY}={newer_record}", dataset)
    state_before = (_list_dataset_names(storage), zfs_core.local_tree(storage.root.dataset))
    with pytest.raises(BackendFailed, match=f"{dataset} was written by a newer release .*its state is 'frozen'"):
        _reopen(storage).scan()
    assert (_list_dataset_names(storage), zfs_core.local_tree(storage.root.dataset)) == state_before
    pools.run("zfs", "set", f"{RECORD_PROPERTY}={record}", dataset)
    assert _reopen(storage).scan().sandboxes == [sandbox]


@pytest.mark.parametrize("ambiguous_value", ["x\tlocal\nb\tc", "x\tlocal\n{root}/sandboxes/a\tb:c"])
def test_an_ambiguous_value_does_not_hide_other_records(storage: ZfsStorage, ambiguous_value: str) -> None:
    base = _create_base(storage)
    sandboxes = [_create_sandbox(storage, base, f"s{n}") for n in range(4)]
    for sandbox in sandboxes:
        pools.run(
            "zfs",
            "set",
            f"sandbox:a={ambiguous_value.format(root=storage.root.dataset)}",
            storage.instances.dataset(sandbox.instance),
        )
    scan = _reopen(storage).scan()
    assert all(zfs_core.lzc_exists(storage.instances.dataset(sandbox.instance)) for sandbox in sandboxes)
    assert all("removed" not in note and "retired" not in note for note in scan.repaired)


def test_a_snapshot_destroyed_with_zfs_is_not_found(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    snapshot = storage.snapshots.capture(sandbox.instance, Snapshot())
    storage.instances.discard(sandbox.instance)
    pools.run("zfs", "destroy", storage.snapshots.get_full_name(snapshot.id))
    for operation in (
        lambda: storage.instances.clone(snapshot.id, new_id()),
        lambda: storage.snapshots.save(snapshot),
        lambda: storage.instances.has_diverged(sandbox.instance, snapshot.id),
    ):
        with pytest.raises(NotFound):
            operation()
    scan = storage.scan()
    assert scan.snapshots == [base]
    assert len(scan.repaired) == 1
    assert scan.repaired[0].endswith(f"/{sandbox.instance}: removed, because it no longer had snapshots")


def test_foreign_snapshots_are_ignored_and_kept(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    pools.run("zfs", "snapshot", f"{storage.instances.dataset(sandbox.instance)}@hourly")
    scan = _reopen(storage).scan()
    assert (scan.snapshots, scan.sandboxes, scan.repaired) == ([base], [sandbox], [])
    assert not storage.instances.discard(sandbox.instance)
    assert any(name.endswith(f"/{sandbox.instance}@hourly") for name in _list_dataset_names(storage))


def test_records_of_any_length_are_replaced_completely(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    for length in (10, 30_000, 20_000, 10):
        sandbox.metadata = {"text": "ä" * length}
        storage.instances.save(sandbox)
        scan = _reopen(storage).scan()
        assert (scan.sandboxes, scan.repaired) == ([sandbox], [])
    assert list(zfs_core.local_props(storage.instances.dataset(sandbox.instance))) == [RECORD_PROPERTY]
    big_snapshot = Snapshot(recipe={"setup": ["x" * 100_000]})
    storage.snapshots.capture(sandbox.instance, big_snapshot)
    big_snapshot.names = ["named"]
    storage.snapshots.save(big_snapshot)
    assert _reopen(storage).scan().snapshots == [base, big_snapshot]


def test_an_interrupted_save_has_no_effect(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    partial_props = encode(sandbox.model_copy(update={"metadata": {"A": "x" * 30_000}}), 2)
    for prop, value in partial_props.items():
        if prop != RECORD_PROPERTY:
            zfs_core.lzc_set_prop(storage.instances.dataset(sandbox.instance), prop, value)
    assert _reopen(storage).scan().sandboxes == [sandbox]
    assert list(zfs_core.local_props(storage.instances.dataset(sandbox.instance))) == [RECORD_PROPERTY]


def test_an_instance_that_is_being_compared_is_removed_later(storage: ZfsStorage) -> None:
    sandbox = _create_sandbox(storage, _create_base(storage))
    dataset = storage.instances.dataset(sandbox.instance)
    pools.run("zfs", "snapshot", f"{dataset}@{COMPARISON_PREFIX}1")
    storage.instances.forget(sandbox.instance)
    with pytest.raises(Busy):
        storage.instances.discard(sandbox.instance)
    pools.run("zfs", "destroy", f"{dataset}@{COMPARISON_PREFIX}1")
    assert storage.instances.discard(sandbox.instance)
    assert not zfs_core.lzc_exists(dataset)


def test_snapshots_of_interrupted_comparisons_are_removed_at_the_next_start(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox, removed_sandbox = _create_sandbox(storage, base), _create_sandbox(storage, base, "removed")
    leftovers = [f"{storage.instances.dataset(s.instance)}@{COMPARISON_PREFIX}1" for s in (sandbox, removed_sandbox)]
    for name in leftovers:
        pools.run("zfs", "snapshot", name)
    storage.instances.forget(removed_sandbox.instance)
    scan = _reopen(storage).scan()
    assert (scan.snapshots, scan.sandboxes) == ([base], [sandbox])
    for name in leftovers:
        assert f"{name}: removed, because a comparison left it behind" in scan.repaired
        assert not zfs_core.lzc_exists(name)
    assert not zfs_core.lzc_exists(storage.instances.dataset(removed_sandbox.instance))
    assert _reopen(storage).scan().repaired == []


def test_has_diverged_compares_an_instance_with_its_ancestors(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    assert not storage.instances.has_diverged(sandbox.instance, base.id)
    (storage.instances.path(sandbox.instance) / "new").touch()
    assert storage.instances.has_diverged(sandbox.instance, base.id)
    snapshot = storage.snapshots.capture(sandbox.instance, Snapshot())
    assert not storage.instances.has_diverged(sandbox.instance, snapshot.id)
    storage.instances.save(sandbox)
    assert not storage.instances.has_diverged(sandbox.instance, snapshot.id), "saving a record counted as a change"
    fork = _create_sandbox(storage, snapshot)
    storage.instances.discard(sandbox.instance)
    assert not storage.instances.has_diverged(fork.instance, snapshot.id)
    assert storage.instances.has_diverged(fork.instance, base.id)
    (storage.instances.path(fork.instance) / "newer").touch()
    assert storage.instances.has_diverged(fork.instance, snapshot.id)
    unrelated_base = storage.snapshots.create_base(Snapshot(), lambda path: None)
    assert storage.instances.has_diverged(fork.instance, unrelated_base.id), (
        "an unrelated snapshot counted as an ancestor"
    )


def test_quotas_are_enforced(storage: ZfsStorage) -> None:
    base = storage.snapshots.create_base(Snapshot(), lambda path: _write_megabytes(path / "big", 5))
    with pytest.raises(OverQuota, match=r"a disk of 4 MiB is too small, because the snapshot contains \d+ MiB|quota"):
        storage.instances.clone(base.id, new_id(), disk_mb=4)
    instance = new_id()
    path = storage.instances.clone(base.id, instance, disk_mb=10)
    with pytest.raises(OSError, match="quota"):
        _write_megabytes(path / "more", 20)
    (path / "more").unlink()
    _set_disk_quota(storage, instance, 64)
    _write_megabytes(path / "more", 20)
    with pytest.raises(OverQuota):
        zfs_core.sync(storage.instances.dataset(instance))
        _set_disk_quota(storage, instance, 8)
    dataset = storage.instances.dataset(instance)
    assert zfs_core.get_props([dataset], ["referenced"])[dataset]["referenced"].number > 25 << 20
    assert 20 << 20 < storage.instances.count_unique_bytes(instance) < 24 << 20
    assert zfs_core.used_bytes(storage.snapshots.get_full_name(base.id)) < 1 << 20
    assert sorted(_list_dataset_names(storage, "filesystem")) == sorted(
        [*_DATASETS_OF_EMPTY_STORAGE, f"/_template-{base.id}", f"/sandboxes/{instance}"]
    )


@translate_errors
def _set_disk_quota(storage: ZfsStorage, instance: str, disk_mb: int) -> None:
    zfs_core.lzc_set_prop(storage.instances.dataset(instance), "refquota", disk_mb << 20)


def _write_megabytes(path: Path, megabytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1 << 20))
            file.flush()


def test_a_full_pool_is_reported_and_can_be_emptied(zpool: pools.Pool, lock_directory: Path) -> None:
    with pools.pool(f"t{session.get_run_id()}f", session.get_run_dir(), megabytes=128) as small_pool:
        storage = ZfsStorage(small_pool.name, state_root=lock_directory)
        storage.open()
        base = _create_base(storage)
        sandbox, captured_sandbox = _create_sandbox(storage, base, "fills"), _create_sandbox(storage, base, "keeps")
        snapshot = storage.snapshots.capture(captured_sandbox.instance, Snapshot())
        with pytest.raises(OSError, match="No space left"):
            _write_megabytes(storage.instances.path(sandbox.instance) / "all", 200)
        with pytest.raises(NoSpace, match=f"the pool {small_pool.name} has no space left"):
            storage.snapshots.capture(sandbox.instance, Snapshot())
        with pytest.raises(NoSpace):
            storage.instances.clone(base.id, new_id())
        assert [s.id for s in storage.scan().sandboxes] == [sandbox.id, captured_sandbox.id]
        storage.instances.forget(captured_sandbox.instance)
        assert not storage.instances.discard(captured_sandbox.instance), "the instance with a snapshot was not retired"
        assert storage.instances.discard(sandbox.instance)
        storage.scan()
        assert "/ballast" in _list_dataset_names(storage)
        assert storage.snapshots.destroy(snapshot.id)
        storage.close()


def test_concurrent_operations_leave_nothing_behind(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    dataset_names_before = _list_dataset_names(storage)
    barrier = threading.Barrier(4)

    def run_life_cycle(number: int) -> None:
        barrier.wait()
        for round_number in range(2):
            sandbox = _create_sandbox(storage, base, f"s-{number}-{round_number}")
            snapshot = storage.snapshots.capture(sandbox.instance, Snapshot())
            fork = _create_sandbox(storage, snapshot, f"f-{number}-{round_number}")
            storage.instances.discard(sandbox.instance)
            storage.instances.discard(fork.instance)
            storage.snapshots.destroy(snapshot.id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run_life_cycle, range(4)))
    assert _list_dataset_names(storage) == dataset_names_before
    assert storage.scan().repaired == []


def test_an_unusable_root_dataset_is_reported(root: str, lock_directory: Path) -> None:
    with pytest.raises(BackendFailed, match=re.escape(f"zfs create {root}/no")):
        ZfsStorage(f"{root}/no", state_root=lock_directory).open()
    pools.run("zfs", "create", "-o", "mountpoint=none", f"{root}/nowhere")
    with pytest.raises(BackendFailed, match="zfs set mountpoint"):
        ZfsStorage(f"{root}/nowhere", state_root=lock_directory).open()


def test_a_record_is_one_line_of_readable_json(storage: ZfsStorage) -> None:
    base = _create_base(storage)
    sandbox = _create_sandbox(storage, base)
    value = pools.run(
        "zfs", "get", "-H", "-o", "value", RECORD_PROPERTY, storage.instances.dataset(sandbox.instance)
    ).stdout
    assert json.loads(value)["record"]["name"] == "web"


def test_a_snapshot_can_be_forked_while_its_dataset_is_retired(storage: ZfsStorage) -> None:
    """The snapshot's dataset may be retired, and therefore renamed, during a fork."""
    base = _create_base(storage)
    for _ in range(4):
        source = _create_sandbox(storage, base)
        snapshot = storage.snapshots.capture(source.instance, Snapshot())
        with ThreadPoolExecutor(2) as pool:
            discard_future = pool.submit(storage.instances.discard, source.instance)
            fork_futures = [pool.submit(storage.instances.clone, snapshot.id, new_id()) for _ in range(3)]
            assert not discard_future.result()
            assert all((fork_future.result() / "file").exists() for fork_future in fork_futures)
