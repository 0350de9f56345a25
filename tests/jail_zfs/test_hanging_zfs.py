"""Test that a `zfs` command hung on one sandbox's dataset does not affect other sandboxes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import zfs_core
from zfs_core import process
from zfs_core import run as zfs_run

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Timeout
from sandbox_gateway.hosts.jail_zfs.storage import slow_commands
from tests.support.jail_world import JailZfsWorld
from tests.support.live import EngineRunner, engines
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE

_T = TypeVar("_T")
_PATIENCE_SECONDS = 300.0
"""How long a slow machine may take for the work that the hung command must not prevent."""

# The shell waits until the test writes a line to the FIFO.
_WRAPPER = """#!/bin/sh
if [ -e {directory}/pattern ]; then
    pattern=$(cat {directory}/pattern)
    case $* in $pattern) read -r line <{directory}/fifo ;; esac
fi
exec {zfs} "$@"
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a double of `zfs` first on PATH. It hangs if its arguments match the pattern in the file `pattern`."""
    commands_directory = tmp_path / "bin"
    commands_directory.mkdir()
    os.mkfifo(tmp_path / "fifo")
    zfs = shutil.which("zfs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    wrapper = commands_directory / "zfs"
    wrapper.write_text(_WRAPPER.format(directory=tmp_path, zfs=zfs))
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands_directory), prepend=os.pathsep)
    return tmp_path


def test_other_sandboxes_keep_working_while_a_command_is_hung(
    jail_zfs_world: JailZfsWorld, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(jail_zfs_world) as make_runner, ThreadPoolExecutor() as pool:
        runner = make_runner()
        engine = runner.engine
        for name in ("one", "two"):
            runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=[name])))
        monkeypatch.setattr(process, "TIMEOUT_SECONDS", _PATIENCE_SECONDS)
        monkeypatch.setattr(slow_commands, "SLOW_FRACTION", 1 / _PATIENCE_SECONDS)
        instance = runner.get_sandbox("one").instance
        (directory / "pattern").write_text(f"snapshot *{instance}*")
        capture = pool.submit(lambda: runner.do(engine.snapshots.create("one", name="s1")))
        try:
            wait_until(lambda: engine.host.get_storage_commands().slow_commands)
            (command,) = engine.host.get_storage_commands().slow_commands
            assert command.command == "zfs snapshot" and instance in command.dataset
            snapshot = runner.do(engine.snapshots.create("two", name="s2"))
            runner.do(engine.snapshots.delete(snapshot.id))
            runner.do(engine.sandboxes.delete("two"))
            assert runner.do(engine.room.report()).room.disk_total > 0
            assert not capture.done()
        finally:
            captured_snapshot = finish(directory, capture)
        assert captured_snapshot.id in {each.id for each in engine.snapshots.list()}


def delete_sandbox(runner: EngineRunner) -> None:
    """Its file system has a snapshot, so it is retired, which sets `canmount`."""
    runner.do(runner.engine.snapshots.create("one", name="kept"))
    runner.do(runner.engine.sandboxes.delete("one"))


def resume_sandbox(runner: EngineRunner) -> None:
    runner.do(runner.engine.sandboxes.resume("one"))


def set_mount_point(runner: EngineRunner) -> None:
    """The gateway never does this, but administrators and `lzc` may."""
    dataset = f"{runner.config.jail_zfs.dataset}/sandboxes/{runner.get_sandbox('one').instance}"
    zfs_core.lzc_set_prop(
        dataset, "mountpoint", zfs_core.get_props([dataset], ["mountpoint"])[dataset]["mountpoint"].value
    )


@pytest.mark.parametrize(
    ("operate", "pattern"),
    [(resume_sandbox, "mount *"), (delete_sandbox, "set canmount=*"), (set_mount_point, "set mountpoint=*")],
    ids=["mount", "canmount", "mountpoint"],
)
def test_other_sandboxes_are_created_and_forked_while_a_mount_is_hung(
    jail_zfs_world: JailZfsWorld,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    operate: Callable[[EngineRunner], None],
    pattern: str,
) -> None:
    """On zfs-fuse, only one command mounts a file system at a time. Some commands that set properties count, too."""
    monkeypatch.setattr(zfs_run, "_MAX_LOCK_SECONDS", 1.0)
    with engines(jail_zfs_world) as make_runner, ThreadPoolExecutor() as pool:
        runner = make_runner()
        engine = runner.engine
        runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
        if operate is not delete_sandbox:
            runner.do(engine.sandboxes.pause("one"))
        monkeypatch.setattr(process, "TIMEOUT_SECONDS", _PATIENCE_SECONDS)
        monkeypatch.setattr(slow_commands, "SLOW_FRACTION", 1 / _PATIENCE_SECONDS)
        instance = runner.get_sandbox("one").instance
        (directory / "pattern").write_text(f"{pattern}/{instance}")
        operation = pool.submit(operate, runner)
        try:
            wait_until(lambda: engine.host.get_storage_commands().slow_commands)
            (command,) = engine.host.get_storage_commands().slow_commands
            assert command.command == f"zfs {pattern.split()[0]}" and command.dataset.endswith(instance)
            runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["two"])))
            runner.do(engine.snapshots.create("two", name="mark"))
            runner.do(engine.forks.fork("mark", ForkSpec(count=2)))
            assert not operation.done()
        finally:
            finish(directory, operation)


def finish(directory: Path, operation: Future[_T]) -> _T:
    """Let the hung command continue, and return the result of the operation that runs it."""
    (directory / "pattern").unlink()
    # If opened for both, a FIFO needs no reader.
    with (directory / "fifo").open("r+b", buffering=0) as fifo:
        fifo.write(b"\n")
        return operation.result(_PATIENCE_SECONDS)


def test_a_hung_command_is_killed_and_its_sandbox_keeps_working(
    jail_zfs_world: JailZfsWorld, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(jail_zfs_world) as make_runner:
        runner = make_runner()
        engine = runner.engine
        runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
        (directory / "pattern").write_text(f"snapshot *{runner.get_sandbox('one').instance}*")
        timeouts_before = zfs_core.count_timeouts()
        with monkeypatch.context() as context:
            context.setattr(process, "TIMEOUT_SECONDS", 4.0)
            with pytest.raises(Timeout, match=r"`zfs snapshot` did not finish within [\d.]+ s and was killed"):
                runner.do(engine.snapshots.create("one", name="s1"))
        assert (
            engine.host.get_storage_commands().slow_commands == [] and zfs_core.count_timeouts() == timeouts_before + 1
        )
        (directory / "pattern").unlink()
        runner.do(engine.snapshots.create("one", name="s1"))
