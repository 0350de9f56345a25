"""Perform the operations on jails with two playbooks: one of our modules, one of community.general.zfs and commands.

Both use the same pool (zfs-fuse), the same template and the same emulated FreeBSD commands. Each operation is one run
of ansible-playbook.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plays import Plays
from benchmarks.rivals.probe import wait_for_answer
from sandbox_gateway import zfs
from sandbox_gateway.hosts.jail_zfs.jail import jails
from tests.collection import awx_collection
from tests.jail_zfs import pools
from tests.support import jail_world, session
from tests.support.gateway import Gateway
from tests.support.jail_gateway import jail_gateway
from tests.support.jail_world import JailZfsWorld, shim
from tests.support.worlds import TEMPLATE

_TASKS = Path(__file__).parent / "tasks"
_PYTHON = {"ansible_python_interpreter": sys.executable}


class OurPlaybook:
    key = "our_play"
    title = "this collection's modules"
    compared_with = ""

    def __init__(self, gateway: Gateway, scratch: Path) -> None:
        self.not_offered: dict[str, str] = {}
        self._gateway = gateway
        self._plays = Plays(scratch, {"ANSIBLE_TRANSPORT": "local"})
        self._numbers = itertools.count()
        self._snapshot = ""
        gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source"})

    def snapshot(self) -> None:
        self._snapshot = f"snapshot-{next(self._numbers)}"
        self._play({"grove.sandbox.sandbox_snapshot": {"name": self._snapshot, "sandbox": "source"}})
        self._wait("source")

    def fork(self, count: int) -> None:
        self._play({"grove.sandbox.sandbox_fork": {"snapshot": self._snapshot, "count": count, "name_prefix": "fork"}})
        self._wait(*(f"fork-{number}" for number in range(1, count + 1)))

    def rollback(self) -> None:
        options = {"sandbox": "source", "snapshot": self._snapshot, "unless_clean": False}
        self._play({"grove.sandbox.sandbox_rollback": options})
        self._wait("source")

    def remove_forks(self) -> None:
        for sandbox in self._gateway.call("GET", "/sandboxes", params={"limit": 1000}):
            if sandbox["name"] != "source":
                self._gateway.call("DELETE", f"/sandboxes/{sandbox['sandboxID']}")

    def remove_snapshot(self) -> None:
        self._gateway.call("DELETE", f"/snapshots/{self._snapshot}", params={"when": "unused"})

    def run_empty_playbook(self) -> None:
        """Run a playbook with one task that does nothing."""
        self._play({"ansible.builtin.debug": {"msg": "nothing"}})

    def _play(self, task: dict[str, Any]) -> None:
        if "ansible.builtin.debug" not in task:
            task = {name: {**options, "gateway_url": self._gateway.url} for name, options in task.items()}
        self._plays.run("here,", [{"name": "The only task", **task}], vars=_PYTHON)

    def _wait(self, *names: str) -> None:
        for name in names:
            wait_for_answer(self._gateway.call("GET", f"/sandboxes/{name}")["address"])


class HandWrittenPlaybook:
    key = "hand_play"
    title = "community.general.zfs and commands"
    compared_with = "our_play"

    def __init__(self, dataset: str, root: Path, template: str, scratch: Path) -> None:
        self.not_offered: dict[str, str] = {}
        network = session.network()
        subnet = ipaddress.IPv4Network(network["subnet"])
        self._prefix, self._addresses = network["prefix"], subnet.network_address
        self._bridge, gateway = f"{self._prefix}br", str(self._addresses + 1)
        self._dataset, self._root = dataset, root
        collections = f"{session.COLLECTIONS}:{awx_collection.collections_path('community.general')}"
        environment = {"ANSIBLE_TRANSPORT": "local", "ANSIBLE_COLLECTIONS_PATH": collections}
        self._plays = Plays(scratch, environment | jail_world.shim_environment())
        self._numbers = itertools.count()
        self._snapshot = ""
        self._forks: list[dict[str, str]] = []
        self._variables = {
            **_PYTHON,
            "dataset": dataset,
            "source": f"{self._prefix}-s",
            "root": str(root),
            "bridge": self._bridge,
            "gateway": gateway,
            "prefix_length": subnet.prefixlen,
            "start": jails._START_COMMAND,
        }
        self._source = {"name": f"{self._prefix}-s", "address": str(self._addresses + 2)}
        shim("ifconfig", "bridge", "create", "name", self._bridge)
        shim("ifconfig", self._bridge, "inet", f"{gateway}/{subnet.prefixlen}", "up")
        self._play("fork.yml", origin=template, jails=[self._source])
        self._wait(self._source)

    def snapshot(self) -> None:
        self._snapshot = f"snapshot-{next(self._numbers)}"
        self._play("snapshot.yml")
        self._wait(self._source)

    def fork(self, count: int) -> None:
        self._forks = [
            {"name": f"{self._prefix}-f{number}", "address": str(self._addresses + 2 + number)}
            for number in range(1, count + 1)
        ]
        self._play("fork.yml", origin=f"{self._dataset}/{self._source['name']}@{self._snapshot}", jails=self._forks)
        self._wait(*self._forks)

    def rollback(self) -> None:
        self._play("rollback.yml", jails=[self._source])
        self._wait(self._source)

    def remove_forks(self) -> None:
        for fork in self._forks:
            self._remove(fork)
        self._forks = []

    def remove_snapshot(self) -> None:
        pools.destroy_all(f"{self._dataset}/{self._source['name']}@{self._snapshot}")

    def end(self) -> None:
        self.remove_forks()
        self._remove(self._source)
        shim("ifconfig", self._bridge, "destroy")

    def _remove(self, jail: dict[str, str]) -> None:
        name = jail["name"]
        shim("pkill", "-KILL", "-j", name, check=False)
        shim("jail", "-R", name, check=False)
        shim("ifconfig", f"{name}a", "destroy", check=False)
        shim("umount", str(self._root / name / "dev"), check=False)
        pools.destroy_all(f"{self._dataset}/{name}")

    def _play(self, tasks: str, **variables: Any) -> None:
        task = {"name": tasks, "ansible.builtin.include_tasks": str(_TASKS / tasks)}
        self._plays.run("here,", [task], vars={**self._variables, "snapshot": self._snapshot, **variables})

    def _wait(self, *targets: dict[str, str]) -> None:
        for jail in targets:
            wait_for_answer(jail["address"])


@contextlib.contextmanager
def jail_playbooks(scratch: Path, settle: float) -> Iterator[tuple[OurPlaybook, HandWrittenPlaybook]]:
    """Run a gateway with a source, and a second source that only playbooks manage. Removes everything at the end."""
    with jail_world.jail_zfs_world() as world, jail_gateway(world, scratch, log={"level": "info"}) as gateway:
        ours = OurPlaybook(gateway, scratch)
        hand_written = _create_hand_written(world, scratch)
        try:
            time.sleep(settle)
            yield ours, hand_written
        finally:
            hand_written.end()


def _create_hand_written(world: JailZfsWorld, scratch: Path) -> HandWrittenPlaybook:
    pool = world._pool
    dataset = f"{pool.name}/hand"
    zfs.lzc_create(dataset)
    return HandWrittenPlaybook(dataset, pool.mount_point / "hand", world._template.host["zfsSnapshot"], scratch)
