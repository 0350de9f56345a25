"""Kill the private zfs-fuse daemon of a jail host while a sandbox runs.

Run `python -m tests.jail_zfs.host_alone DIRECTORY` as root in new mount, network and process namespaces. It prints
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
from tests.jail_zfs import pools
from tests.jail_zfs.alone import _POOL, _hide_daemon, _kill, _private_pool, _restart_daemon
from tests.support import session
from tests.support.jail_world import PF_RULES, JailZfsWorld, open_world, shim
from tests.support.live import Live
from tests.support.worlds import TEMPLATE


def collect_resources(world: JailZfsWorld, live: Live) -> dict[str, set[str]]:
    prefix = live.config.network.prefix
    return {
        "jails": set(world.jails(live.config)),
        "epairs": set(shim("ifconfig", "-g", f"{prefix}-epair", check=False).split()),
        "limits": {line for line in shim("rctl").split() if f":{prefix}-" in line},
        "anchors": set(shim("pfctl", "-a", "sbx", "-s", "Anchors").split()),
        "identities": {path.name for path in (live.config.host.state_root / "run").glob("*")},
    }


def assert_refused(live: Live, operation: Coroutine[Any, Any, Any]) -> None:
    try:
        live.do(operation)
    except BackendFailed as error:
        assert "ZFS cannot be reached" in error.message and "start it" in error.message, error.message
    else:
        raise AssertionError("the operation succeeded without a daemon")


def run_scenario(world: JailZfsWorld, pid_file: Path) -> None:
    config = world.config()
    live = Live(world.host(config), config)
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    live.do(live.engine.snapshots.create("one", name="mark"))
    before = collect_resources(world, live)
    _kill(pid_file)
    assert_refused(live, live.engine.forks.create(TEMPLATE, ForkSpec(names=["two"])))
    assert_refused(live, live.engine.forks.fork("mark", ForkSpec(count=2)))
    assert_refused(live, live.engine.sandboxes.rollback("one", "mark"))
    assert_refused(live, live.engine.snapshots.delete("mark"))
    assert collect_resources(world, live) == before
    assert [sandbox.name for sandbox in live.engine.sandboxes.list()] == ["one"]
    live.close()
    # Simulate a crash of the machine: no process survives it.
    shim("freebsd-shim", "purge")
    shim("pfctl", "-q", "-f", "-", input=PF_RULES)
    _restart_daemon(pid_file, pid_file.parent)
    restarted = Live(world.host(config), config)
    names = [name for snapshot in restarted.engine.snapshots.list() for name in snapshot.names]
    assert names == ["mark"], names
    fork = restarted.do(restarted.engine.forks.create("mark", ForkSpec()))
    assert restarted.shell(fork.id, "echo alive").strip() == "alive"
    restarted.remove_all()
    restarted.close()
    world.forget(config)


def main(directory: Path) -> None:
    os.environ["GROVE_TEST_STATE"] = str(directory)
    os.environ.pop(session.RUN_VARIABLE, None)
    _hide_daemon()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
    with _private_pool(directory) as pid_file, open_world(pools.Pool(_POOL, directory / "mnt")) as world:
        run_scenario(world, pid_file)
    print('"passed"')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
