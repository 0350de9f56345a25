"""Perform the operations on jails with two playbooks, one with our modules and one with community.general.zfs.

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

import zfs_core

from benchmarks.plays import Plays
from benchmarks.rivals.probe import wait_for_answer
from sandbox_gateway.hosts.jail_zfs.jail import jails
from tests.collection import awx_collection
from tests.support import jail_world, pools, session
from tests.support.gateway import Gateway
from tests.support.jail_world import JailZfsWorld, run_shim
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE

_TASKS_DIRECTORY = Path(__file__).parent / "tasks"
_PYTHON_VARIABLES = {"ansible_python_interpreter": sys.executable}


class OurPlaybook:
    key = "our_play"
    title = "this collection's modules"
    baseline_key = ""

    def __init__(self, gateway: Gateway, scratch: Path) -> None:
        self.not_offered: dict[str, str] = {}
        self._gateway = gateway
        self._plays = Plays(scratch, {"ANSIBLE_TRANSPORT": "local"})
        self._numbers = itertools.count()
        self._snapshot = ""
        gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source"})

    def snapshot(self) -> None:
        self._snapshot = f"snapshot-{next(self._numbers)}"
        self._run_playbook({"grove.sandbox.sandbox_snapshot": {"name": self._snapshot, "sandbox": "source"}})
        self._wait_for_answers("source")

    def fork(self, count: int) -> None:
        self._run_playbook(
            {"grove.sandbox.sandbox_fork": {"snapshot": self._snapshot, "count": count, "name_prefix": "fork"}}
        )
        self._wait_for_answers(*(f"fork-{number}" for number in range(1, count + 1)))

    def rollback(self) -> None:
        options = {"sandbox": "source", "snapshot": self._snapshot, "unless_clean": False}
        self._run_playbook({"grove.sandbox.sandbox_rollback": options})
        self._wait_for_answers("source")

    def remove_forks(self) -> None:
        for sandbox in self._gateway.call("GET", "/sandboxes", params={"limit": 1000}):
            if sandbox["name"] != "source":
                self._gateway.call("DELETE", f"/sandboxes/{sandbox['sandboxID']}")

    def remove_snapshot(self) -> None:
        self._gateway.call("DELETE", f"/snapshots/{self._snapshot}", params={"when": "unused"})

    def run_empty_playbook(self) -> None:
        """Run a playbook with one task that does nothing."""
        self._run_playbook({"ansible.builtin.debug": {"msg": "nothing"}})

    def _run_playbook(self, task: dict[str, Any]) -> None:
        if "ansible.builtin.debug" not in task:
            task = {name: {**options, "gateway_url": self._gateway.url} for name, options in task.items()}
        self._plays.run("here,", [{"name": "The only task", **task}], vars=_PYTHON_VARIABLES)

    def _wait_for_answers(self, *names: str) -> None:
        for name in names:
            wait_for_answer(self._gateway.call("GET", f"/sandboxes/{name}")["address"])


class HandWrittenPlaybook:
    key = "hand_play"
    title = "community.general.zfs and commands"
    baseline_key = "our_play"

    def __init__(self, dataset: str, root: Path, template: str, scratch: Path) -> None:
        self.not_offered: dict[str, str] = {}
        network = session.allocate_network()
        subnet = ipaddress.IPv4Network(network["subnet"])
        self._prefix, self._addresses = network["prefix"], subnet.network_address
        self._bridge, gateway = f"{self._prefix}br", str(self._addresses + 1)
        self._dataset, self._root = dataset, root
        collections = f"{session.COLLECTIONS}:{awx_collection.unpack_collection('community.general')}"
        environment = {"ANSIBLE_TRANSPORT": "local", "ANSIBLE_COLLECTIONS_PATH": collections}
        self._plays = Plays(scratch, environment | jail_world.make_shim_environment())
        self._numbers = itertools.count()
        self._snapshot = ""
        self._forks: list[dict[str, str]] = []
        self._variables = {
            **_PYTHON_VARIABLES,
            "dataset": dataset,
            "source": f"{self._prefix}-s",
            "root": str(root),
            "bridge": self._bridge,
            "gateway": gateway,
            "prefix_length": subnet.prefixlen,
            "start": jails._START_COMMAND,
        }
        self._source = {"name": f"{self._prefix}-s", "address": str(self._addresses + 2)}
        run_shim("ifconfig", "bridge", "create", "name", self._bridge)
        run_shim("ifconfig", self._bridge, "inet", f"{gateway}/{subnet.prefixlen}", "up")
        self._run_playbook("fork.yml", origin=template, jails=[self._source])
        self._wait_for_answers(self._source)

    def snapshot(self) -> None:
        self._snapshot = f"snapshot-{next(self._numbers)}"
        self._run_playbook("snapshot.yml")
        self._wait_for_answers(self._source)

    def fork(self, count: int) -> None:
        self._forks = [
            {"name": f"{self._prefix}-f{number}", "address": str(self._addresses + 2 + number)}
            for number in range(1, count + 1)
        ]
        self._run_playbook(
            "fork.yml", origin=f"{self._dataset}/{self._source['name']}@{self._snapshot}", jails=self._forks
        )
        self._wait_for_answers(*self._forks)

    def rollback(self) -> None:
        self._run_playbook("rollback.yml", jails=[self._source])
        self._wait_for_answers(self._source)

    def remove_forks(self) -> None:
        for fork in self._forks:
            self._remove_jail(fork)
        self._forks = []

    def remove_snapshot(self) -> None:
        pools.destroy_all(f"{self._dataset}/{self._source['name']}@{self._snapshot}")

    def clean_up(self) -> None:
        self.remove_forks()
        self._remove_jail(self._source)
        run_shim("ifconfig", self._bridge, "destroy")

    def _remove_jail(self, jail: dict[str, str]) -> None:
        name = jail["name"]
        run_shim("pkill", "-KILL", "-j", name, check=False)
        run_shim("jail", "-R", name, check=False)
        run_shim("ifconfig", f"{name}a", "destroy", check=False)
        run_shim("umount", str(self._root / name / "dev"), check=False)
        pools.destroy_all(f"{self._dataset}/{name}")

    def _run_playbook(self, tasks: str, **variables: Any) -> None:
        task = {"name": tasks, "ansible.builtin.include_tasks": str(_TASKS_DIRECTORY / tasks)}
        self._plays.run("here,", [task], vars={**self._variables, "snapshot": self._snapshot, **variables})

    def _wait_for_answers(self, *jails_to_probe: dict[str, str]) -> None:
        for jail in jails_to_probe:
            wait_for_answer(jail["address"])


@contextlib.contextmanager
def jail_playbooks(scratch: Path, settle_seconds: float) -> Iterator[tuple[OurPlaybook, HandWrittenPlaybook]]:
    """Run a gateway with a source jail, and a second source jail for the hand-written playbook.

    Yields both playbooks, and removes everything at the end.
    """
    with jail_world.jail_zfs_world() as world, world_gateway(world, scratch, log={"level": "info"}) as gateway:
        our_playbook = OurPlaybook(gateway, scratch)
        hand_written_playbook = _create_hand_written_playbook(world, scratch)
        try:
            time.sleep(settle_seconds)
            yield our_playbook, hand_written_playbook
        finally:
            hand_written_playbook.clean_up()


def _create_hand_written_playbook(world: JailZfsWorld, scratch: Path) -> HandWrittenPlaybook:
    pool = world._pool
    dataset = f"{pool.name}/hand"
    zfs_core.lzc_create(dataset, mounted=True)
    return HandWrittenPlaybook(dataset, pool.mount_point / "hand", world._template.host["zfsSnapshot"], scratch)
