"""ZFS commands that never return: they are killed at their timeout, are reported, and block no other work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zfs_core
from zfs_core import capabilities, process
from zfs_core import run as run_module
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES, make_openzfs_capabilities
from zfs_core.exceptions import DatasetNotFound, ZFSGenericError

from sandbox_gateway.errors import Busy, NotFound, Timeout
from sandbox_gateway.hosts.jail_zfs import disk_usage, retries
from sandbox_gateway.hosts.jail_zfs.disk_usage import DiskUsage
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.storage import root as root_module
from sandbox_gateway.hosts.jail_zfs.storage import slow_commands
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.slow_commands import list_slow_commands
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_names import SnapshotNames
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import translated_errors
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Volume
from sandbox_gateway.tasks import BackgroundTasks
from tests.support.waiting import wait_until

_HANGING_ZFS = """#!/bin/sh
for word; do last=$word; done
case $last in *hanging*) exec sleep 60 ;; esac
echo "$last"
"""


@pytest.fixture
def set_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Provide a `zfs` that becomes hung on datasets named "hanging". Returns a function that sets the timeout."""
    program = tmp_path / "bin/zfs"
    program.parent.mkdir()
    program.write_text(_HANGING_ZFS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(process, "_KILL_WAIT_SECONDS", 0.2)

    def set_timeout(seconds: float) -> None:
        monkeypatch.setattr(process, "TIMEOUT_SECONDS", seconds)

    set_timeout(0.3)
    return set_timeout


@pytest.fixture
def end_unkillable_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make processes ignore being killed, as if they were hung in the kernel. Returns a function that kills them."""
    processes: list[subprocess.Popen[bytes]] = []
    original_kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: processes.append(process))

    def end_processes() -> None:
        while processes:
            original_kill(processes.pop())

    yield end_processes
    end_processes()


def test_a_hung_command_is_killed_at_its_timeout_and_counted(set_timeout: Callable[[float], None]) -> None:
    timeouts_before = zfs_core.count_timeouts()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(process.execute, ("snapshot", "p/hanging@a"), None, None, None, "p/hanging")
        wait_until(list_slow_commands)
        (command,) = list_slow_commands()
        assert (command.command, command.name, command.was_killed) == ("zfs snapshot", "p/hanging", False)
        assert abs(time.time() - command.started_at) < 30
        with pytest.raises(ZFSGenericError, match=r"`zfs snapshot` did not finish within 0\.3 s and was killed"):
            call.result(20)
    assert zfs_core.list_running_commands() == []
    assert zfs_core.count_timeouts() == timeouts_before + 1
    assert process.execute(("snapshot", "p/other@a")).output == "p/other@a\n"


def test_an_unkillable_command_is_abandoned_and_reported_until_it_exits(
    set_timeout: Callable[[float], None], end_unkillable_processes: Callable[[], None]
) -> None:
    with pytest.raises(ZFSGenericError, match="could not be killed, because it is hung in the kernel"):
        process.execute(("destroy", "p/hanging"))
    with pytest.raises(ZFSGenericError, match="did not finish within"):
        process.read_first_bytes("send", "p/hanging@a", count=8)
    assert [(each.command, each.name, each.was_killed) for each in list_slow_commands()] == [
        ("zfs destroy", "p/hanging", True),
        ("zfs send", "p/hanging@a", True),
    ]
    assert list_slow_commands(thread=threading.get_ident()) == [], "this thread no longer waits for them"
    end_unkillable_processes()
    wait_until(lambda: not list_slow_commands())


def test_first_bytes_are_returned_before_the_command_exits(tmp_path: Path, set_timeout: Any) -> None:
    assert process.read_first_bytes("send", "p/a@b", count=3) == (b"p/a", None)
    data, outcome = process.read_first_bytes("send", "p/a@b", count=30)
    assert data == b"p/a@b\n" and outcome is not None and outcome.cause is None


def test_a_hung_commands_error_names_the_dataset_and_a_remedy(set_timeout: Any) -> None:
    with (
        pytest.raises(Timeout, match=r"`zfs set` .* 0\.3 s .* on p/hanging: .*`zpool status`.*GET /health"),
        translated_errors(),
    ):
        process.execute(("set", "a=b", "p/hanging"), name="p/hanging")


async def test_hung_commands_do_not_use_up_the_threads_for_other_work(set_timeout: Callable[[float], None]) -> None:
    set_timeout(30)

    done = threading.Event()
    hanging_calls = [asyncio.ensure_future(run_in_thread(done.wait, 30)) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await run_in_thread(lambda text: text, "another verb") == "another verb"
    done.set()
    assert all(await asyncio.gather(*hanging_calls))


def test_a_removal_waits_for_another_removal_but_not_for_a_hung_one(
    set_timeout: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_module, "_LOCK_POLL_SECONDS", 0.02)
    set_timeout(30)
    root = RootDataset("p/root")
    acquired_event, release_event = threading.Event(), threading.Event()

    def hold_lock(work: Callable[[], object]) -> None:
        with root.tree_locked():
            acquired_event.set()
            work()

    with ThreadPoolExecutor() as pool:
        try:
            holder = pool.submit(hold_lock, lambda: release_event.wait(30))
            assert acquired_event.wait(10)
            waiter = pool.submit(hold_lock, lambda: None)
            hanging_mount = pool.submit(process.execute, ("mount", "p/hanging"), 1.2)
            wait_until(list_slow_commands)
            time.sleep(0.1)
            assert not waiter.done(), "a command that is hung elsewhere does not concern the owner of the lock"
            release_event.set()
            holder.result(10), waiter.result(10)
            with pytest.raises(ZFSGenericError):
                hanging_mount.result(10)

            acquired_event.clear()
            holder = pool.submit(hold_lock, lambda: process.execute(("destroy", "p/hanging"), 1.5))
            assert acquired_event.wait(10)
            with pytest.raises(Busy, match=r"`zfs destroy` has been running on p/hanging for .* try again later"):
                hold_lock(lambda: None)
            with pytest.raises(ZFSGenericError):
                holder.result(10)
            hold_lock(lambda: None)
        finally:
            release_event.set()


def test_waiting_for_another_mount_is_reported_and_counts_towards_the_timeout(
    set_timeout: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    monkeypatch.setattr(run_module, "_FUSE_DIRECTORY", tmp_path)
    set_timeout(60)
    with ThreadPoolExecutor() as pool, run_module.mount_lock("clone", 5, "p/hanging"):
        assert run_module.run("receive", "-u", "p/new@a").output == "p/new@a\n", "it mounts nothing"
        call = pool.submit(run_module.run, "mount", "p/other", seconds=1.0, name="p/other")
        wait_until(zfs_core.list_running_commands)
        (command,) = zfs_core.list_running_commands()
        assert (command.command, command.name) == ("zfs mount (waiting for another command)", "p/other")
        with pytest.raises(ZFSGenericError, match=r"`zfs mount` waited 0\.75 s for another command .* not started"):
            call.result(20)
    assert run_module.run("mount", "p/other").output == "p/other\n"
    assert zfs_core.list_running_commands() == []


def test_a_hung_command_does_not_keep_others_from_mounting(
    set_timeout: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    monkeypatch.setattr(run_module, "_FUSE_DIRECTORY", tmp_path)
    monkeypatch.setattr(run_module, "_MAX_LOCK_SECONDS", 0.2)
    set_timeout(60)
    release_event = threading.Event()

    def hang() -> None:
        with run_module.mount_lock("set", 5, "p/hanging"):
            assert release_event.wait(60)

    with ThreadPoolExecutor() as pool:
        hanging_call = pool.submit(hang)
        try:
            calls = [pool.submit(run_module.run, "mount", f"p/{number}", seconds=40.0) for number in range(3)]
            assert [call.result(60).output for call in calls] == ["p/0\n", "p/1\n", "p/2\n"]
            assert not hanging_call.done()
            with run_module.mount_lock("mount", 5, "p/other"):
                release_event.set()
                hanging_call.result(60)
                with pytest.raises(ZFSGenericError, match="waited 0 s"):
                    run_module.run("mount", "p/new", seconds=0.0)
        finally:
            release_event.set()


@pytest.mark.parametrize(
    ("line", "can_mount"),
    [
        ("set mountpoint=/data p/other", True),
        ("set canmount=on p/other", True),
        ("set quota=1G readonly=on p/other", True),
        ("inherit mountpoint p/other", True),
        ("inherit -S canmount p/other", True),
        ("set quota=1G p/other", False),
        ("set test:mountpoint=canmount p/other", False),
        ("inherit pyzfs:sync p/canmount", False),
        ("get mountpoint p/other", False),
    ],
)
def test_changes_of_properties_that_mount_wait_for_another_mount(
    set_timeout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, can_mount: bool
) -> None:
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    monkeypatch.setattr(run_module, "_FUSE_DIRECTORY", tmp_path)
    set_timeout(60)
    with run_module.mount_lock("mount", 5, "p/hanging"):
        if can_mount:
            with pytest.raises(ZFSGenericError, match="waited 0 s for another command that mounts"):
                run_module.run(*line.split(), seconds=0.0, name="p/other")
        else:
            run_module.run(*line.split(), name="p/other")


def test_waiting_reduces_a_commands_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    monkeypatch.setattr(capabilities, "_capabilities", make_openzfs_capabilities((2, 3)))
    monkeypatch.setattr(run_module, "execute", lambda _args, seconds, *_: timeouts.append(seconds))
    monkeypatch.setattr(run_module, "wait_for_releases", lambda seconds: timeouts.append(seconds))
    for negligible_seconds in (0.1, 1000.0):
        monkeypatch.setattr(run_module, "_NEGLIGIBLE_SECONDS", negligible_seconds)
        run_module.run("rename", "p/a", "p/b", seconds=100.0, precheck=lambda _: time.sleep(0.2))
    assert timeouts[0] == timeouts[2] == 75 and 25 < timeouts[1] <= 99.8 and timeouts[3] == 100


class _HostPartsThatHangOnce:
    """Stands in for all parts of the host. The first removal times out, and the second one succeeds."""

    def __init__(self) -> None:
        self.instances = self.snapshots = self
        self.attempts: list[str] = []

    def describe_stuck_mounts(self, _mount_filter: object) -> list[str]:
        return []

    async def wait_until_unmounted(self, _mount_filter: object) -> None:
        pass

    async def describe(self, _dataset: str, _path: Path) -> str:
        raise AssertionError("the commands that find the holders could become hung, too")

    def path(self, instance: str) -> Path:
        return Path("/nowhere", instance)

    def commit_removal(self, _volume_id: str) -> None:
        pass

    def discard(self, name: str) -> None:
        self.attempts.append(name)
        if len(self.attempts) == 1:
            raise Timeout("`zfs destroy` did not finish within 60 s")

    finish_removal = discard


def test_a_removal_whose_command_is_hung_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_RETRY_SECONDS", 0.01)

    async def run_scenario(remove: Callable[[_HostPartsThatHangOnce, BackgroundTasks], Awaitable[None]]) -> list[str]:
        parts, background = _HostPartsThatHangOnce(), BackgroundTasks(Logger("test"))
        await remove(parts, background)
        await background.wait(10)
        return parts.attempts

    def discard(parts: Any, background: BackgroundTasks) -> Awaitable[None]:
        return Disks(parts, StorageCalls(parts, parts), parts, background).discard("one")

    def remove(parts: Any, background: BackgroundTasks) -> Awaitable[None]:
        parts.volumes = parts.volume_snapshots = parts
        return JailVolumes(parts, StorageCalls(parts, parts), parts, parts, parts, background).remove(
            Volume(name="v", size_mb=64)
        )

    assert asyncio.run(run_scenario(discard)) == ["one", "one"]
    assert len(asyncio.run(run_scenario(remove))) == 2


def test_no_command_runs_while_the_event_loop_could_be_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    root = RootDataset("p/root")
    names = SnapshotNames(root, "snapshot")
    names.load({"one": "p/root/a@one"})

    def can_acquire_lock() -> bool:
        if is_free := root.index_lock.acquire(timeout=5):
            root.index_lock.release()
        return is_free

    def check_that_lock_is_free(name: str) -> bool:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(can_acquire_lock).result(10)
        return False

    monkeypatch.setattr(zfs_core, "lzc_exists", check_that_lock_is_free)

    def fail(name: str) -> None:
        raise DatasetNotFound(name)

    with pytest.raises(NotFound):
        names.call_with_name("one", fail)
    assert names.list_all() == set()


def test_a_hung_file_system_hides_only_its_own_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_usage, "_TIMEOUT_SECONDS", 0.2)
    release = threading.Event()
    calls: list[Path] = []

    def read(path: Path) -> int | None:
        calls.append(path)
        if path == tmp_path / "hung" and not release.is_set():
            release.wait(30)
        return 1

    monkeypatch.setattr(disk_usage, "_read_used_bytes", read)
    usage = DiskUsage()
    paths = {name: tmp_path / name for name in ("a", "hung", "z")}

    async def run_scenario() -> None:
        assert await usage.read(paths) == {"a": 1, "hung": None, "z": None}
        for _ in range(3):
            assert await usage.read(paths) == {"a": 1, "hung": None, "z": 1}
        assert calls.count(tmp_path / "hung") == 1, "each call leaves a thread behind"
        release.set()

    asyncio.run(run_scenario())
    wait_until(lambda: asyncio.run(usage.read(paths))["hung"] == 1)


async def test_each_hung_file_system_blocks_only_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several file systems become hung while they are read at the same time, and respond one after the other."""
    monkeypatch.setattr(disk_usage, "_TIMEOUT_SECONDS", 1.0)
    paths = {name: tmp_path / name for name in ("a", "b", "c")}
    release_events = {path: threading.Event() for path in paths.values()}
    active_paths: list[Path] = []
    calls: list[Path] = []

    def read(path: Path) -> int | None:
        calls.append(path)
        active_paths.append(path)
        release_events[path].wait(30)
        active_paths.remove(path)
        return 1

    monkeypatch.setattr(disk_usage, "_read_used_bytes", read)
    usage = DiskUsage()

    await asyncio.gather(*(usage.read(paths) for _ in range(5)))
    assert sorted(active_paths) == sorted(paths.values())
    release_events[paths["a"]].set()
    await run_in_thread(wait_until, lambda: len(active_paths) == 2)
    await usage.read({"b": paths["b"], "c": paths["c"]})
    assert sorted(calls) == sorted(paths.values()), "a file system blocks two threads"
    for event in release_events.values():
        event.set()


def test_most_commands_count_as_slow_after_ten_seconds() -> None:
    assert pytest.approx(10) == process.TIMEOUT_SECONDS * slow_commands.SLOW_FRACTION
