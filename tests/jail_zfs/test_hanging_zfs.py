"""Test that a `zfs` command hung on one sandbox's dataset does not affect other sandboxes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import zfs_core
from zfs_core import process

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Timeout
from tests.support.jail_world import JailZfsWorld
from tests.support.live import engines
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE

_WRAPPER = """#!/bin/sh
if [ "$1" = snapshot ] && [ -e {flag} ]; then
    case $* in *"$(cat {flag})"*) exec sleep 600 ;; esac
fi
exec {zfs} "$@"
"""


def test_other_sandboxes_keep_working_while_a_command_is_hung(
    jail_zfs_world: JailZfsWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zfs = shutil.which("zfs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    flag, wrapper = tmp_path / "hanging", tmp_path / "bin/zfs"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(flag=flag, zfs=zfs))
    wrapper.chmod(0o755)
    with engines(jail_zfs_world) as make_runner:
        runner = make_runner()
        engine = runner.engine
        for name in ("one", "two"):
            runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=[name])))
        monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
        monkeypatch.setattr(process, "TIMEOUT_SECONDS", 4.0)
        flag.write_text(runner.get_sandbox("one").instance)
        timeouts_before = zfs_core.count_timeouts()
        errors: list[Exception] = []

        def capture_one() -> None:
            try:
                runner.do(engine.snapshots.create("one", name="s1"))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=capture_one)
        thread.start()
        wait_until(lambda: engine.host.storage_commands().slow_commands)
        (command,) = engine.host.storage_commands().slow_commands
        assert command.command == "zfs snapshot" and runner.get_sandbox("one").instance in command.dataset
        snapshot = runner.do(engine.snapshots.create("two", name="s2"))
        runner.do(engine.snapshots.delete(snapshot.id))
        runner.do(engine.sandboxes.delete("two"))
        assert thread.is_alive() and runner.do(engine.room.report()).room.disk_total > 0
        thread.join(60)
        (error,) = errors
        assert isinstance(error, Timeout) and "`zfs snapshot` did not finish within 4 s" in str(error)
        assert engine.host.storage_commands().slow_commands == [] and zfs_core.count_timeouts() == timeouts_before + 1
        flag.unlink()
        runner.do(engine.snapshots.create("one", name="s1"))
