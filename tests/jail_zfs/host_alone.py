"""Kill the private zfs-fuse daemon of a jail host while a sandbox runs.

Run `python -m tests.jail_zfs.host_alone DIRECTORY` as root in new mount, network and PID namespaces. It prints
``"passed"`` at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed
from tests.jail_zfs.alone import _POOL_NAME, _hide_daemon, _kill, _private_pool, _restart_daemon
from tests.support import pools, session
from tests.support.jail_world import PF_RULES, JailZfsWorld, opened_world, run_shim
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE


def collect_resources(world: JailZfsWorld, runner: EngineRunner) -> dict[str, set[str]]:
    prefix = runner.config.network.prefix
    return {
        "jails": set(world.list_jail_names(runner.config)),
        "epairs": set(run_shim("ifconfig", "-g", f"{prefix}-epair", check=False).split()),
        "limits": {line for line in run_shim("rctl").split() if f":{prefix}-" in line},
        "anchors": set(run_shim("pfctl", "-a", "sbx", "-s", "Anchors").split()),
        "identities": {path.name for path in (runner.config.host.state_root / "run").glob("*")},
    }


def assert_fails_without_daemon(runner: EngineRunner, operation: Coroutine[Any, Any, Any]) -> None:
    try:
        runner.do(operation)
    except BackendFailed as error:
        assert "ZFS cannot be reached" in error.message and "start it" in error.message, error.message
    else:
        raise AssertionError("the operation succeeded without a daemon")


def run_scenario(world: JailZfsWorld, pid_file: Path) -> None:
    config = world.make_config()
    runner = EngineRunner(world.make_host(config), config)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    runner.do(runner.engine.snapshots.create("one", name="mark"))
    resources_before = collect_resources(world, runner)
    _kill(pid_file)
    assert_fails_without_daemon(runner, runner.engine.forks.create(TEMPLATE, ForkSpec(names=["two"])))
    assert_fails_without_daemon(runner, runner.engine.forks.fork("mark", ForkSpec(count=2)))
    assert_fails_without_daemon(runner, runner.engine.sandboxes.rollback("one", "mark"))
    assert_fails_without_daemon(runner, runner.engine.snapshots.delete("mark"))
    assert collect_resources(world, runner) == resources_before
    assert [sandbox.name for sandbox in runner.engine.sandboxes.list()] == ["one"]
    runner.close()
    # Simulate a crash of the machine: no process survives it.
    run_shim("freebsd-shim", "purge")
    run_shim("pfctl", "-q", "-f", "-", input=PF_RULES)
    _restart_daemon(pid_file, pid_file.parent)
    runner_after_restart = EngineRunner(world.make_host(config), config)
    snapshot_names = [name for snapshot in runner_after_restart.engine.snapshots.list() for name in snapshot.names]
    assert snapshot_names == ["mark"], snapshot_names
    fork = runner_after_restart.do(runner_after_restart.engine.forks.create("mark", ForkSpec()))
    assert runner_after_restart.shell(fork.id, "echo alive").strip() == "alive"
    runner_after_restart.remove_all()
    runner_after_restart.close()
    world.clean_up(config)


def main(directory: Path) -> None:
    os.environ["GROVE_TEST_STATE"] = str(directory)
    os.environ.pop(session.RUN_VARIABLE, None)
    _hide_daemon()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
    with _private_pool(directory) as pid_file, opened_world(pools.Pool(_POOL_NAME, directory / "mnt")) as world:
        run_scenario(world, pid_file)
    print('"passed"')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
