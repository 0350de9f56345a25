"""Gateways are killed at each step of a move, with real processes."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox_gateway.records import SandboxState
from tests.fleet.world import World
from tests.support.memory_gateway import ADMIN_KEY
from tests.support.waiting import wait_until

_MAX_STEPS = 60
_STRIDE = 5
"""A run of the test takes every fifth step. To take all steps, set it to 1: the test then takes some minutes."""


class _Process:
    """A gateway that can be killed and started again."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.root = world.root / name
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        # Another process may take a port that was free.
        while not (port := self._try_to_start()):
            self.kill()
        self.url = f"http://127.0.0.1:{port}"

    def _try_to_start(self) -> str:
        """Start the process, and return the port that it prints, or "" if it fails."""
        section = self._world.create_host(self.name).create_section()
        argv = [sys.executable, "-m", "tests.fleet.durable_process", str(self.root), json.dumps({"fleet": section})]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(20)
            assert self._process.stdout
            self._process.stdout.close()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"X-API-Key": ADMIN_KEY}
        response = httpx.request(method, self.url + path, json=body, headers=headers, timeout=60)
        assert response.status_code < 300, response.text
        return response.json() if response.content else None

    def read_objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sandboxes and the snapshots on the disk."""
        sandboxes, snapshots, _ = pickle.loads((self.root / "objects").read_bytes())
        return sandboxes, snapshots


@pytest.fixture
def processes(world: World) -> Iterator[tuple[_Process, _Process]]:
    """The hosts h1 and h2. The first one has the snapshot `before`, whose disk has the value of a key."""
    one, two = _Process(world, "h1"), _Process(world, "h2")
    with contextlib.ExitStack() as stack:
        for each in (one, two):
            stack.callback(each.kill)
            each.start()
        build = one.call("POST", "/templates", {"name": "base"})
        path = f"/templates/{build['templateID']}/builds/{build['buildID']}/status"
        wait_until(lambda: one.call("GET", path)["status"] == "ready")
        one.call("POST", "/sandboxes", {"templateID": "base", "name": "first"})
        one.call("POST", "/sandboxes/first/exec", {"args": ["write", "key", "value"]})
        one.call("POST", "/sandboxes/first/snapshots", {"name": "before"})
        one.call("DELETE", "/sandboxes/first")
        for each in (one, two):
            wait_until(lambda each=each: _count_running(each) == 2)  # type: ignore[misc]
        yield one, two


def _count_running(process: _Process) -> int:
    return sum(host["state"] == "running" for host in process.call("GET", "/fleet")["hosts"])


def _list_moves(world: World) -> list[str]:
    """Return the keys of the moves that etcd has."""
    start, end = (base64.b64encode(key).decode() for key in (b"/grove.sandbox/moves/", b"/grove.sandbox/moves0"))
    answer = httpx.post(f"{world.etcd.endpoint}/v3/kv/range", json={"key": start, "range_end": end}).json()
    return [base64.b64decode(each["key"]).decode() for each in answer.get("kvs", ())]


def _check_machines(world: World) -> None:
    """Check that no sandbox had machines on two hosts at the same time. A machine may outlive its gateway."""
    hosts: dict[str, set[str]] = {}
    for line in (world.root / "machines").read_text().splitlines():
        host, event, id = line.split()
        if event == "start":
            hosts.setdefault(id, set()).add(host)
            assert len(hosts[id]) == 1, f"{id} runs on {hosts[id]}"
        else:
            for running in hosts.values() if id == "*" else (hosts.get(id, set()),):
                running.discard(host)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_sandbox_is_never_lost_and_never_on_two_hosts(
    world: World, processes: tuple[_Process, _Process], role: str
) -> None:
    one, two = processes
    victim, witness = (one, two) if role == "source" else (two, one)
    outcomes = []
    for step in range(0, _MAX_STEPS, _STRIDE):
        sandbox = one.call("POST", "/snapshots/before/fork", {"names": [f"web-{step}"]})["sandboxes"][0]
        id = sandbox["sandboxID"]
        kill_file = victim.root / "kill-after"
        kill_file.write_text(str(step))
        move = threading.Thread(target=_try_to_move, args=(one, id))
        move.start()
        wait_until(lambda kill_file=kill_file, move=move: not (kill_file.exists() and move.is_alive()))  # type: ignore[misc]
        was_killed = not kill_file.exists()
        kill_file.unlink(missing_ok=True)
        if was_killed:
            victim.kill()
            victim.start()
        move.join(60)
        outcomes.append(_wait_until_settled(world, one, two, id))
        answer = witness.call("POST", f"/sandboxes/{id}/exec", {"args": ["read", "key"]})
        assert answer["stdout"] == "value"
        _check_machines(world)
        witness.call("DELETE", f"/sandboxes/{id}")
        if not was_killed:
            break
    assert len(outcomes) > 15 // _STRIDE and outcomes[0] == "h1" and outcomes[-1] == "h2", outcomes
    print(f"killed the {role} at {len(outcomes) - 1} steps: {outcomes}")


def _try_to_move(process: _Process, id: str) -> None:
    with contextlib.suppress(AssertionError, httpx.HTTPError):
        process.call("POST", f"/sandboxes/{id}/move", {"host": "h2"})


def _wait_until_settled(world: World, one: _Process, two: _Process, id: str) -> str:
    """Wait until nothing of a move remains, and return the host of its sandbox."""
    for process in (one, two):
        wait_until(lambda process=process: _is_settled(process, id))  # type: ignore[misc]
    wait_until(lambda: _list_moves(world) == [])
    location: str = one.call("GET", f"/sandboxes/{id}")["sandboxHost"]
    wait_until(lambda: _describe_disks(one, two, id) == ([location], []))
    assert two.call("GET", f"/sandboxes/{id}")["sandboxHost"] == location
    return location


def _is_settled(process: _Process, id: str) -> bool:
    """Return whether a gateway shows one sandbox with this id, which runs."""
    try:
        entries = [each for each in process.call("GET", "/sandboxes") if each["sandboxID"] == id]
    except (AssertionError, httpx.HTTPError):
        return False
    return [each["state"] for each in entries] == ["running"]


def _describe_disks(one: _Process, two: _Process, id: str) -> tuple[list[str], list[str]]:
    """Return the hosts that have the sandbox on their disk as running, and what else remains of a move."""
    hosts, rest = [], []
    for process in (one, two):
        sandboxes, snapshots = process.read_objects()
        if sandbox := sandboxes.get(id):
            hosts.append(process.name)
            if sandbox.departure or sandbox.arrival or sandbox.state is not SandboxState.RUNNING:
                rest.append(f"{process.name}: {sandbox}")
        rest += [f"{process.name}: {each.kind} {each.id}" for each in snapshots.values() if each.is_hidden]
    return hosts, rest
