"""Test the functions of zfs_core on real ZFS."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import zfs_core
from zfs_core import changes, snapshots
from zfs_core import exceptions as lzc_exc
from zfs_core import run as zfs_run
from zfs_core.causes import Cause
from zfs_core.listing import COMPARISON_PREFIX

from tests.support import pools


def _catch_error(function: Callable[..., object], *args: object) -> lzc_exc.ZFSError:
    with pytest.raises(lzc_exc.ZFSError) as error_info:
        function(*args)
    return error_info.value


def _get_single_error(error: lzc_exc.ZFSError) -> lzc_exc.ZFSError:
    assert isinstance(error, lzc_exc.MultipleOperationsFailure)
    assert len(error.errors) == 1
    return error.errors[0]


needs_openzfs = pytest.mark.skipif(not pools.IS_OPENZFS, reason="zfs-fuse has neither channel programs nor `.zfs`")

_create = partial(zfs_core.lzc_create, mounted=True)
_destroy = partial(zfs_core.lzc_destroy, unmounted=True)


def test_a_dataset_can_be_created_and_destroyed(root: str, root_path: Path) -> None:
    name = f"{root}/a".encode()
    zfs_core.lzc_create(name, props={b"sandbox:x": b"1 2", "atime": False})
    assert zfs_core.lzc_exists(name) and zfs_core.lzc_exists(name.decode())
    assert not zfs_core.is_mounted(name)
    assert zfs_core.local_props(name) == {"sandbox:x": "1 2"}
    assert zfs_core.lzc_get_props(name)[b"sandbox:x"] == b"1 2" and zfs_core.lzc_get_props(name)["atime"] == 0
    zfs_core.mount(name)
    busy_error = _catch_error(zfs_core.lzc_destroy, name)
    assert isinstance(busy_error, lzc_exc.DatasetBusy) and busy_error.name == name
    zfs_core.lzc_destroy(name, unmounted=True)
    assert not zfs_core.lzc_exists(name)
    assert zfs_core.list_datasets(root) == [root]


def test_create_raises_specific_errors(root: str) -> None:
    _create(f"{root}/a")
    exists_error = _catch_error(zfs_core.lzc_create, f"{root}/a")
    assert isinstance(exists_error, lzc_exc.FilesystemExists) and isinstance(exists_error, lzc_exc.DatasetExists)
    assert (exists_error.name, exists_error.errno, exists_error.message) == (
        f"{root}/a",
        17,
        "Filesystem already exists",
    )
    assert str(exists_error).startswith(f"[Errno 17] Filesystem already exists: '{root}/a'")
    assert isinstance(_catch_error(zfs_core.lzc_create, f"{root}/no/a"), lzc_exc.ParentNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_create, "nopool/a"), lzc_exc.ParentNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_create, f"{root}/a b"), lzc_exc.NameInvalid)
    assert isinstance(_catch_error(zfs_core.lzc_create, f"{root}/b", "tape"), lzc_exc.DatasetTypeInvalid)
    for props in ({"refquota": "banana"}, {"used": "1"}, {"nonsense": "1"}, {"a:B": "1"}, {"a:b": "x" * 9000}):
        assert isinstance(_catch_error(zfs_core.lzc_create, f"{root}/b", "zfs", props), lzc_exc.PropertyInvalid)
    assert isinstance(_catch_error(zfs_core.lzc_create, f"{root}/b", "zfs", {"reservation": "100T"}), lzc_exc.NoSpace)
    assert zfs_core.list_datasets(root) == [root, f"{root}/a"]


def test_an_unmountable_dataset_is_destroyed(root: str, root_path: Path) -> None:
    (root_path / "file").touch()
    props = {"mountpoint": str(root_path / "file" / "a")}
    error = _catch_error(partial(zfs_core.lzc_create, props=props, mounted=True), f"{root}/a")
    assert isinstance(error, lzc_exc.MountFailed)
    assert not zfs_core.lzc_exists(f"{root}/a")


def test_snapshots_are_taken_with_their_properties(root: str) -> None:
    for short_name in "ab":
        _create(f"{root}/{short_name}")
    snapshot_names = [f"{root}/a@1", f"{root}/b@1"]
    zfs_core.lzc_snapshot(snapshot_names, {"sandbox:record": "x" * 8191, "sandbox:more": '{"a": "ä\\t"}'})
    for name in snapshot_names:
        assert zfs_core.local_props(name) == {"sandbox:record": "x" * 8191, "sandbox:more": '{"a": "ä\\t"}'}
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_snapshot, [snapshot_names[0]])), lzc_exc.SnapshotExists
    )
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_snapshot, [f"{root}/no@1"])), lzc_exc.FilesystemNotFound
    )
    duplicate_error = _catch_error(zfs_core.lzc_snapshot, [f"{root}/a@2", f"{root}/a@3"])
    assert isinstance(duplicate_error, lzc_exc.SnapshotFailure) and isinstance(
        _get_single_error(duplicate_error), lzc_exc.DuplicateSnapshots
    )
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_snapshot, [f"{root}/a@2", "nopool/a@2"])), lzc_exc.PoolsDiffer
    )
    assert isinstance(_get_single_error(_catch_error(zfs_core.lzc_snapshot, [f"{root}/a@b c"])), lzc_exc.NameInvalid)
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_snapshot, [f"{root}/a@{'n' * 255}"])), lzc_exc.NameTooLong
    )
    assert zfs_core.list_snapshots(f"{root}/a") == [snapshot_names[0]]


def test_taking_several_snapshots_is_all_or_nothing(root: str) -> None:
    for short_name in "abc":
        _create(f"{root}/{short_name}")
    zfs_core.lzc_snapshot([f"{root}/c@1"])
    error = _catch_error(zfs_core.lzc_snapshot, [f"{root}/a@1", f"{root}/b@1", f"{root}/c@1"])
    assert isinstance(_get_single_error(error), lzc_exc.SnapshotExists)
    assert zfs_core.list_datasets(root, types="snapshot") == [f"{root}/c@1"]


def test_clone_creates_a_dataset_or_raises_specific_errors(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    (root_path / "a" / "file").write_text("here")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    zfs_core.lzc_clone(f"{root}/b", f"{root}/a@1", {"refquota": 10 << 20, "sandbox:x": "1"}, mounted=True)
    assert (root_path / "b" / "file").read_text() == "here"
    assert zfs_core.get_props([f"{root}/b"], ["refquota"])[f"{root}/b"]["refquota"].number == 10 << 20
    assert zfs_core.list_clones(f"{root}/a@1") == [f"{root}/b"]
    assert isinstance(_catch_error(zfs_core.lzc_clone, f"{root}/b", f"{root}/a@1"), lzc_exc.FilesystemExists)
    assert isinstance(_catch_error(zfs_core.lzc_clone, f"{root}/c", f"{root}/a@no"), lzc_exc.DatasetNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_clone, f"{root}/no/c", f"{root}/a@1"), lzc_exc.DatasetNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_clone, "nopool/c", f"{root}/a@1"), lzc_exc.DatasetNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_clone, f"{root}/c", f"{root}/a"), lzc_exc.SnapshotNameInvalid)
    with pytest.raises(OSError, match="quota"):
        (root_path / "b" / "big").write_bytes(os.urandom(11 << 20))


def test_destroying_several_snapshots_is_all_or_nothing(root: str) -> None:
    _create(f"{root}/a")
    for short_name in "123":
        zfs_core.lzc_snapshot([f"{root}/a@{short_name}"])
    zfs_core.lzc_clone(f"{root}/b", f"{root}/a@2", mounted=True)
    zfs_core.lzc_destroy_snaps([f"{root}/a@never", f"{root}/nor@this"], False)
    error = _catch_error(zfs_core.lzc_destroy_snaps, [f"{root}/a@1", f"{root}/a@2"], False)
    assert isinstance(error, lzc_exc.SnapshotDestructionFailure)
    cloned_error = _get_single_error(error)
    assert isinstance(cloned_error, lzc_exc.SnapshotIsCloned) and cloned_error.related == (f"{root}/b",)
    assert len(zfs_core.list_snapshots(f"{root}/a")) == 3, "a snapshot was destroyed although another one was refused"
    zfs_core.lzc_destroy_snaps([f"{root}/a@1", f"{root}/a@2"], True)
    assert zfs_core.list_snapshots(f"{root}/a") == [f"{root}/a@2", f"{root}/a@3"]
    zfs_core.lzc_destroy(f"{root}/b", unmounted=True)
    assert zfs_core.list_snapshots(f"{root}/a") == [f"{root}/a@3"]


@pytest.fixture
def snapshots_of_several_filesystems(root: str) -> list[str]:
    names = [f"{root}/{name}" for name in "abc"]
    for name in names:
        _create(name)
    zfs_core.lzc_snapshot([f"{name}@1" for name in names])
    return [f"{name}@1" for name in names]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the arguments of the ``zfs`` commands that are run."""
    arguments: list[tuple[str, ...]] = []
    execute = zfs_run.execute

    def record(args: tuple[str, ...], *rest: object) -> object:
        arguments.append(args)
        return execute(args, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(zfs_run, "execute", record)
    return arguments


@pytest.mark.parametrize("defer", [False, True])
def test_snapshots_of_several_filesystems_are_destroyed(
    snapshots_of_several_filesystems: list[str], commands: list[tuple[str, ...]], defer: bool, root: str
) -> None:
    names = snapshots_of_several_filesystems
    zfs_core.lzc_destroy_snaps([f"{root}/a@never", *names, f"{root}/no@1", names[0]], defer)
    assert not any(map(zfs_core.lzc_exists, names))
    changes_made = [args[0] for args in commands if args[0] not in ("get", "list")]
    if zfs_core.detect_capabilities().pool_commands:
        assert changes_made == ["program"]
    else:
        assert changes_made.count("destroy") >= 3 and "program" not in changes_made


def test_snapshots_of_several_filesystems_are_destroyed_together_or_not_at_all(
    snapshots_of_several_filesystems: list[str], root: str
) -> None:
    names = snapshots_of_several_filesystems
    zfs_core.lzc_clone(f"{root}/clone", names[1])
    error = _get_single_error(_catch_error(zfs_core.lzc_destroy_snaps, names, False))
    assert isinstance(error, lzc_exc.SnapshotIsCloned) and error.related == (f"{root}/clone",)
    zfs_core.lzc_hold({names[2]: "keep"})
    with pytest.raises(lzc_exc.SnapshotDestructionFailure):
        zfs_core.lzc_destroy_snaps([names[0], names[2]], False)
    assert all(map(zfs_core.lzc_exists, names))
    zfs_core.lzc_destroy_snaps(names, True)
    assert [zfs_core.lzc_exists(name) for name in names] == [False, True, True]
    zfs_core.lzc_release({names[2]: ["keep"]})
    zfs_core.lzc_destroy(f"{root}/clone", unmounted=True)
    assert not any(map(zfs_core.lzc_exists, names))


@needs_openzfs
def test_a_mounted_snapshot_is_destroyed_with_others(
    snapshots_of_several_filesystems: list[str], root_path: Path
) -> None:
    """A channel program cannot destroy a mounted snapshot, so the ordinary command has to."""
    names = snapshots_of_several_filesystems
    assert not [*(root_path / "a" / ".zfs" / "snapshot" / "1").iterdir()]
    zfs_core.lzc_destroy_snaps(names, False)
    assert not any(map(zfs_core.lzc_exists, names))


@needs_openzfs
def test_programs_that_fail_are_replaced_with_commands(
    snapshots_of_several_filesystems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise lzc_exc.ZCPPermissionError

    monkeypatch.setattr(snapshots, "lzc_channel_program", refuse)
    zfs_core.lzc_destroy_snaps(snapshots_of_several_filesystems, False)
    assert not any(map(zfs_core.lzc_exists, snapshots_of_several_filesystems))


def test_destroy_removes_only_the_named_dataset(root: str) -> None:
    _create(f"{root}/a")
    _create(f"{root}/a/child")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    error = _catch_error(_destroy, f"{root}/a")
    assert isinstance(error, lzc_exc.DatasetBusy)
    assert sorted(error.related) == [f"{root}/a/child", f"{root}/a@1"]
    assert isinstance(_catch_error(zfs_core.lzc_destroy, f"{root}/a@1"), lzc_exc.NameInvalid)
    assert isinstance(_catch_error(zfs_core.lzc_destroy, f"{root}/no"), lzc_exc.FilesystemNotFound)
    assert zfs_core.lzc_exists(f"{root}/a@1")


def test_a_dataset_with_open_files_is_busy(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    with (root_path / "a" / "open").open("w"):
        assert isinstance(_catch_error(zfs_core.unmount, f"{root}/a"), lzc_exc.DatasetBusy)
        assert isinstance(_catch_error(_destroy, f"{root}/a"), lzc_exc.DatasetBusy)
    zfs_core.lzc_destroy(f"{root}/a", unmounted=True)


def test_only_a_rollback_to_the_latest_snapshot_is_possible(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    assert isinstance(_catch_error(zfs_core.lzc_rollback, f"{root}/a"), lzc_exc.SnapshotNotFound)
    for short_name in "12":
        (root_path / "a" / "file").write_text(short_name)
        zfs_core.lzc_snapshot([f"{root}/a@{short_name}"])
    (root_path / "a" / "file").write_text("later")
    assert isinstance(_catch_error(zfs_core.lzc_rollback_to, f"{root}/a", f"{root}/a@1"), lzc_exc.SnapshotNotLatest)
    assert isinstance(_catch_error(zfs_core.lzc_rollback_to, f"{root}/a", f"{root}/a@9"), lzc_exc.SnapshotNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_rollback_to, f"{root}/no", f"{root}/no@9"), lzc_exc.FilesystemNotFound)
    assert zfs_core.lzc_rollback(f"{root}/a".encode()) == f"{root}/a@2".encode()
    assert (root_path / "a" / "file").read_text() == "2"


def test_promote_moves_snapshots_to_the_clone(root: str) -> None:
    _create(f"{root}/a")
    assert isinstance(_catch_error(zfs_core.lzc_promote, f"{root}/a"), lzc_exc.NotClone)
    assert isinstance(_catch_error(zfs_core.lzc_promote, f"{root}/no"), lzc_exc.FilesystemNotFound)
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    zfs_core.lzc_clone(f"{root}/b", f"{root}/a@1", mounted=True)
    zfs_core.lzc_snapshot([f"{root}/b@2"])
    zfs_core.lzc_promote(f"{root}/b")
    assert zfs_core.list_snapshots(f"{root}/b") == [f"{root}/b@1", f"{root}/b@2"]
    assert zfs_core.list_clones(f"{root}/b@1") == [f"{root}/a"]
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    assert isinstance(_catch_error(zfs_core.lzc_promote, f"{root}/a"), lzc_exc.SnapshotExists)


def test_rename_moves_mount_and_snapshots(root: str, root_path: Path) -> None:
    for name in ("a", "b", "in"):
        _create(f"{root}/{name}")
    (root_path / "a" / "file").write_text("here")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    assert isinstance(_catch_error(zfs_core.lzc_rename, f"{root}/a", f"{root}/b"), lzc_exc.FilesystemExists)
    assert isinstance(_catch_error(zfs_core.lzc_rename, f"{root}/a", f"{root}/no/b"), lzc_exc.FilesystemNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_rename, f"{root}/no", f"{root}/c"), lzc_exc.FilesystemNotFound)
    assert isinstance(_catch_error(zfs_core.lzc_rename, f"{root}/a", "nopool/a"), lzc_exc.PoolsDiffer)
    assert zfs_core.is_mounted(f"{root}/a"), "the failed rename did not mount it again"
    zfs_core.lzc_rename(f"{root}/a", f"{root}/in/a", remounted=True)
    assert (root_path / "in" / "a" / "file").read_text() == "here"
    assert zfs_core.list_snapshots(f"{root}/in/a") == [f"{root}/in/a@1"]


def test_rename_does_not_unmount_clones(root: str, root_path: Path) -> None:
    """By default, `zfs rename` unmounts clones and tries to mount them again."""
    for name in ("a", "in"):
        _create(f"{root}/{name}")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    zfs_core.lzc_clone(f"{root}/b", f"{root}/a@1", mounted=True)
    zfs_core.lzc_snapshot([f"{root}/b@1"])
    zfs_core.lzc_clone(f"{root}/c", f"{root}/b@1", mounted=True)
    zfs_core.unmount(f"{root}/a")
    mount_ids_before = pools.read_mount_ids(root_path)
    with pools.mounts_kept_in_use():
        is_refused = not zfs_core.detect_capabilities().rename_without_unmount
        error = _catch_error(zfs_core.lzc_rename, f"{root}/a", f"{root}/in/a") if is_refused else None
    assert pools.read_mount_ids(root_path) == mount_ids_before
    if error is not None:
        assert isinstance(error, lzc_exc.DatasetBusy) and error.related == (f"{root}/b", f"{root}/c")
    for name in ("b", "c"):
        zfs_core.unmount(f"{root}/{name}")
    zfs_core.lzc_rename(f"{root}/a", f"{root}/in/a", remounted=True)
    assert zfs_core.list_snapshots(f"{root}/in/a") == [f"{root}/in/a@1"] and not zfs_core.is_mounted(f"{root}/b")


def test_mount_waits_until_the_dataset_is_released(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    (root_path / "a" / "file").write_bytes(os.urandom(2 << 20))
    with ThreadPoolExecutor(1) as pool:
        with pools.kept_unmountable(f"{root}/a"):
            mount_future = pool.submit(zfs_core.mount, f"{root}/a")
            with pytest.raises(TimeoutError):
                mount_future.result(1)
        mount_future.result()
    assert zfs_core.is_mounted(f"{root}/a")


def test_mount_of_a_busy_dataset_times_out(root: str, root_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.5)
    _create(f"{root}/a")
    (root_path / "a" / "file").write_bytes(os.urandom(2 << 20))
    with pools.kept_unmountable(f"{root}/a"):
        assert isinstance(_catch_error(zfs_core.mount, f"{root}/a"), lzc_exc.DatasetBusy)
    zfs_core.mount(f"{root}/a")


def test_a_held_snapshot_is_not_destroyed_until_its_release(root: str) -> None:
    _create(f"{root}/a")
    snapshot_name = f"{root}/a@1"
    zfs_core.lzc_snapshot([snapshot_name])
    assert zfs_core.lzc_hold({snapshot_name: "keep this", f"{root}/a@no": "x"}) == [f"{root}/a@no"]
    assert list(zfs_core.lzc_get_holds(snapshot_name)) == ["keep this"]
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_hold, {snapshot_name: "keep this"})), lzc_exc.HoldExists
    )
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_hold, {snapshot_name: "x" * 300})), lzc_exc.NameTooLong
    )
    assert isinstance(_get_single_error(_catch_error(zfs_core.lzc_hold, {snapshot_name: "-r"})), lzc_exc.NameInvalid)
    assert isinstance(
        _get_single_error(_catch_error(zfs_core.lzc_destroy_snaps, [snapshot_name], False)), lzc_exc.SnapshotIsHeld
    )
    assert zfs_core.lzc_release({snapshot_name: ["other"]}) == [f"{snapshot_name}#other"]
    assert zfs_core.lzc_release({snapshot_name: ["keep this"], f"{root}/a@no": ["x"]}) == [f"{root}/a@no"]
    assert zfs_core.lzc_get_holds(snapshot_name) == {}
    assert isinstance(_catch_error(zfs_core.lzc_get_holds, f"{root}/a@no"), lzc_exc.SnapshotNotFound)
    zfs_core.lzc_destroy_snaps([snapshot_name], False)


def test_the_last_release_destroys_a_deferred_snapshot(root: str) -> None:
    _create(f"{root}/a")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    zfs_core.lzc_hold({f"{root}/a@1": "t"})
    zfs_core.lzc_destroy_snaps([f"{root}/a@1"], True)
    assert zfs_core.lzc_exists(f"{root}/a@1")
    zfs_core.lzc_release({f"{root}/a@1": ["t"]})
    assert not zfs_core.lzc_exists(f"{root}/a@1")


def test_a_dataset_can_be_sent_and_received(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    for short_name in "12":
        (root_path / "a" / "file").write_text(short_name)
        zfs_core.lzc_snapshot([f"{root}/a@{short_name}"])
    with (
        tempfile.TemporaryFile() as full_stream,
        tempfile.TemporaryFile() as incremental_stream,
        tempfile.TemporaryFile() as invalid_stream,
    ):
        zfs_core.lzc_send(f"{root}/a@1", None, full_stream.fileno())
        zfs_core.lzc_send(f"{root}/a@2", f"{root}/a@1", incremental_stream.fileno())
        invalid_stream.write(b"no stream")

        def receive(name: str, stream: object, force: bool = False) -> None:
            os.lseek(stream.fileno(), 0, os.SEEK_SET)  # type: ignore[attr-defined]
            zfs_core.lzc_receive(name, stream.fileno(), force)  # type: ignore[attr-defined]

        # zfs-fuse looks for the stream's origin on its own, and therefore reports another error.
        error = _catch_error(receive, f"{root}/b@2", incremental_stream)
        assert isinstance(error, lzc_exc.DatasetNotFound | lzc_exc.StreamMismatch)
        assert isinstance(_catch_error(receive, f"{root}/b@2", invalid_stream), lzc_exc.BadStream)
        receive(f"{root}/b@1", full_stream)
        zfs_core.mount(f"{root}/b")
        assert (root_path / "b" / "file").read_text() == "1"
        assert isinstance(_catch_error(receive, f"{root}/b@1", full_stream), lzc_exc.DatasetExists)
        (root_path / "b" / "file").write_text("changed")
        assert isinstance(_catch_error(receive, f"{root}/b@2", incremental_stream), lzc_exc.DestinationModified)
        receive(f"{root}/b@2", incremental_stream, True)
        assert (root_path / "b" / "file").read_text() == "2"
        _create(f"{root}/c")
        zfs_core.lzc_snapshot([f"{root}/c@0"])
        assert isinstance(_catch_error(receive, f"{root}/c@2", incremental_stream), lzc_exc.StreamMismatch)
    with tempfile.TemporaryFile() as output:
        fd = output.fileno()
        assert isinstance(_catch_error(zfs_core.lzc_send, f"{root}/a@no", None, fd), lzc_exc.SnapshotNotFound)
        assert isinstance(_catch_error(zfs_core.lzc_send, f"{root}/a@1", f"{root}/b@1", fd), lzc_exc.SnapshotMismatch)
        assert isinstance(_catch_error(zfs_core.lzc_send, f"{root}/a@1", "nopool/b@1", fd), lzc_exc.PoolsDiffer)


def test_only_the_datasets_own_properties_are_returned(root: str) -> None:
    _create(f"{root}/a", props={"sandbox:x": "parent"})
    _create(f"{root}/a/b")
    zfs_core.lzc_snapshot([f"{root}/a/b@1"], {"sandbox:y": "line\nend\tlocal\nand \x7f more"})
    tree = zfs_core.local_tree(root)
    assert tree == {
        f"{root}/a": {"sandbox:x": "parent"},
        f"{root}/a/b@1": {"sandbox:y": "line\nend\tlocal\nand \x7f more"},
    }
    props = zfs_core.get_props([f"{root}/a/b@1"], ["sandbox:x", "sandbox:no"])[f"{root}/a/b@1"]
    assert (props["sandbox:x"].value, props["sandbox:x"].is_local) == ("parent", False)
    assert props["sandbox:no"].value == "-"
    zfs_core.lzc_inherit_prop(f"{root}/a", "sandbox:x")
    assert f"{root}/a" not in zfs_core.local_tree(root)
    assert isinstance(_catch_error(zfs_core.get_props, [f"{root}/a", f"{root}/no"], ["used"]), lzc_exc.DatasetNotFound)
    assert isinstance(_catch_error(zfs_core.get_props, [f"{root}/a"], ["nonsense"]), lzc_exc.PropertyInvalid)
    assert isinstance(_catch_error(zfs_core.lzc_set_prop, f"{root}/no", "a:b", "1"), lzc_exc.DatasetNotFound)


def test_names_that_only_zfs_accepts_can_be_read(root: str) -> None:
    pools.run("zfs", "create", f"{root}/a b")
    pools.run("zfs", "create", f"{root}/-x")
    assert zfs_core.list_datasets(root) == [root, f"{root}/-x", f"{root}/a b"]
    assert set(zfs_core.get_tree(root, ["origin"])) == {root, f"{root}/-x", f"{root}/a b"}
    for name in (f"{root}/-x", f"{root}/a b"):
        zfs_core.lzc_destroy(name, unmounted=True)


@pytest.mark.parametrize("name", ["", "-r", "a b", "ä" * 10, "n" * 300, "nopool", "nopool/a@b", "/", "a\nb", b"\xff"])
def test_lzc_exists_returns_false_for_impossible_names(root: str, name: str | bytes) -> None:
    assert not zfs_core.lzc_exists(name)


def test_a_quota_below_the_used_space_is_refused(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    (root_path / "a" / "file").write_bytes(os.urandom(3 << 20))
    zfs_core.sync(f"{root}/a")
    assert isinstance(_catch_error(zfs_core.lzc_set_prop, f"{root}/a", "refquota", 1 << 20), lzc_exc.QuotaTooSmall)


def test_a_read_only_property_is_ignored_or_refused(root: str) -> None:
    _create(f"{root}/a")
    zfs_core.lzc_set_prop(f"{root}/a", "creation", 0)
    assert zfs_core.get_props([f"{root}/a"], ["creation"])[f"{root}/a"]["creation"].number > 0, "it was ignored"
    refused = _catch_error(zfs_core.set_writable_property, f"{root}/a", "creation", 0)
    assert isinstance(refused, lzc_exc.PropertyInvalid)


def test_changes_since_any_ancestor_are_detected(root: str, root_path: Path) -> None:
    a, b = f"{root}/a", f"{root}/b"
    _create(a)
    (root_path / "a" / "file").write_text("1")
    zfs_core.lzc_snapshot([f"{a}@1"])
    zfs_core.lzc_snapshot([f"{a}@2"])
    assert not zfs_core.has_changed_since(a, f"{a}@1")
    zfs_core.lzc_clone(b, f"{a}@2", mounted=True)
    assert (root_path / "b" / "file").read_text() == "1"
    assert not zfs_core.has_changed_since(b, f"{a}@2")
    assert not zfs_core.has_changed_since(b, f"{a}@1"), "a difference was found between two equal snapshots"
    zfs_core.lzc_snapshot([f"{b}@3"])
    assert not zfs_core.has_changed_since(b, f"{a}@1")
    (root_path / "b" / "file").touch()
    for snapshot_name in (f"{b}@3", f"{a}@2", f"{a}@1"):
        assert zfs_core.has_changed_since(b, snapshot_name)
    zfs_core.lzc_snapshot([f"{b}@4"])
    zfs_core.lzc_snapshot([f"{b}@5"])
    assert not zfs_core.has_changed_since(b, f"{b}@5")
    assert not zfs_core.has_changed_since(b, f"{b}@4")
    for snapshot_name in (f"{b}@3", f"{a}@2", f"{a}@1"):
        assert zfs_core.has_changed_since(b, snapshot_name)
    (root_path / "a" / "file").touch()
    assert isinstance(_catch_error(zfs_core.has_changed_since, a, f"{b}@3"), lzc_exc.SnapshotMismatch)
    assert isinstance(_catch_error(zfs_core.has_changed_since, root, f"{b}@3"), lzc_exc.SnapshotMismatch)
    assert isinstance(_catch_error(zfs_core.has_changed_since, b, f"{b}@no"), lzc_exc.SnapshotNotFound)


def test_mounting_a_clone_does_not_change_it(root: str, root_path: Path) -> None:
    """The clone inherits an intent log, so OpenZFS writes the clone's header when it mounts the clone."""
    a, b = f"{root}/a", f"{root}/b"
    _create(a)
    with (root_path / "a" / "file").open("w") as file:
        file.write("1")
        file.flush()
        os.fsync(file.fileno())
    zfs_core.lzc_snapshot([f"{a}@1"])
    zfs_core.lzc_clone(b, f"{a}@1", mounted=True)
    zfs_core.sync(b)
    assert bool(zfs_core.written_bytes(b)) == zfs_core.detect_capabilities().written_property
    assert not zfs_core.has_changed_since(b, f"{a}@1")
    zfs_core.unmount(b)
    assert not zfs_core.has_changed_since(b, f"{a}@1")
    zfs_core.lzc_snapshot([f"{b}@2"])
    zfs_core.mount(b)
    assert not zfs_core.has_changed_since(b, f"{a}@1")
    (root_path / "b" / "file").touch()
    assert zfs_core.has_changed_since(b, f"{b}@2") and zfs_core.has_changed_since(b, f"{a}@1")
    zfs_core.unmount(b)
    assert zfs_core.has_changed_since(b, f"{b}@2") and zfs_core.has_changed_since(b, f"{a}@1")


@pytest.mark.parametrize("change", ["content", "mode", "attribute", "mapping", "undone creation"])
def test_every_small_change_is_detected(root: str, root_path: Path, change: str) -> None:
    _create(f"{root}/a")
    path = root_path / "a" / "file"
    path.write_text("1")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    if change == "content":
        path.write_text("2")
    elif change == "mode":
        path.chmod(0o600)
    elif change == "attribute":
        if not zfs_core.detect_capabilities().written_property:
            pytest.skip("zfs-fuse has no extended attributes")
        os.setxattr(path, "user.a", b"2")
    elif change == "mapping":
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 1) as mapping:
            mapping[0] = ord("2")
            os.sync()
    else:
        (root_path / "a" / "other").touch()
        (root_path / "a" / "other").unlink()
    assert zfs_core.has_changed_since(f"{root}/a", f"{root}/a@1")


def test_an_unfinished_comparison_does_not_hide_changes(root: str, root_path: Path) -> None:
    _create(f"{root}/a")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    (root_path / "a" / "file").touch()
    pools.run("zfs", "snapshot", f"{root}/a@{COMPARISON_PREFIX}1")
    assert zfs_core.list_snapshots(f"{root}/a") == [f"{root}/a@1"]
    if zfs_core.detect_capabilities().written_property:  # Otherwise, no comparison takes a snapshot.
        assert zfs_core.has_changed_since(f"{root}/a", f"{root}/a@1")


def test_a_comparison_leaves_no_snapshot(root: str, root_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _create(f"{root}/a")
    zfs_core.lzc_snapshot([f"{root}/a@1"])
    (root_path / "a" / "file").touch()
    taken_names: list[str] = []

    def fail(base_snapshot: str, end_snapshot: str) -> bool:
        taken_names.extend(zfs_core.list_datasets(root, types="snapshot"))
        raise lzc_exc.SnapshotNotFound(base_snapshot)

    monkeypatch.setattr(changes, "_stream_has_changes", fail)
    if zfs_core.detect_capabilities().written_property:
        assert isinstance(
            _catch_error(zfs_core.has_changed_since, f"{root}/a", f"{root}/a@1"), lzc_exc.SnapshotNotFound
        )
        assert len(taken_names) == 2 and zfs_core.is_comparison_snapshot(taken_names[1])
    else:
        assert zfs_core.has_changed_since(f"{root}/a", f"{root}/a@1")
    assert zfs_core.list_datasets(root, types="snapshot") == [f"{root}/a@1"]
