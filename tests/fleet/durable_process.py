"""Run one gateway of a fleet as a process of its own, whose host keeps its objects on the disk, and that can be killed.

Usage: python -m tests.fleet.durable_process ROOT SECTIONS [faults]. It prints its TCP port and the path of its socket
when it is ready. With `faults`, it has the times for tests of faults.

If the file `ROOT/kill-after` contains a number, the process kills itself after so many steps of moves, transfers and
forks on several hosts, and removes the file. If the file `ROOT/clock-shift` contains a number, the clock of the process
is wrong by so many seconds; its monotonic clock is not. The file `ROOT/../machines` lists all starts and stops of
machines, on all hosts.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from sandbox_gateway import records
from sandbox_gateway.api.fleet.move_requests import MoveClient, MoveServer
from sandbox_gateway.fleet.holds import Holds
from sandbox_gateway.fleet.store import Store
from sandbox_gateway.hosts.base import ImportBase, Scan, SnapshotPart, VolumeSnapshot
from sandbox_gateway.records import Sandbox, Snapshot
from tests.fleet.times import FAULT_TIMES, PATIENT_TIMES, set_times
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import Machine, MemoryHost, MemoryTarget


class Steps:
    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> None:
        try:
            remaining = int(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return
        if remaining == 0:
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self._path.write_text(str(remaining - 1))


class DurableTarget(MemoryTarget):
    host: DurableHost

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        self.host.steps.count()
        super().write(part, offset, data)

    async def commit(self) -> None:
        self.host.steps.count()
        await super().commit()
        self.host.snapshots[self.snapshot.id] = self.snapshot
        self.host.write()


class DurableMachine(Machine):
    """A machine whose disk has what a command has written before the command ends."""

    host: DurableHost

    async def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        result = await super()._exec(request)
        if request["args"][0] == "write":
            self.host.write()
        return result


class DurableHost(MemoryHost):
    """A host whose machines end with its gateway, and whose objects do not."""

    machine_type = DurableMachine

    def __init__(self, root: Path, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self._root = root
        self._path = root / "objects"
        self.snapshots: dict[str, Snapshot] = {}
        DurableMachine.host = self  # A process has one host.
        if self._path.exists():
            self.saved_sandboxes, self.snapshots, self.disks = pickle.loads(self._path.read_bytes())

    def write(self) -> None:
        """Write all objects, as one step."""
        disks = {**self.disks, **{instance: machine.state for instance, machine in self.machines.items()}}
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps((self.saved_sandboxes, self.snapshots, disks)))
        partial.rename(self._path)
        self.steps.count()

    def _log(self, event: str, id: str) -> None:
        with (self._root.parent / "machines").open("a") as file:
            file.write(f"{self._root.name} {event} {id}\n")

    async def scan(self) -> Scan:
        self._log("end", "*")
        known_disks = {each.instance for each in self.saved_sandboxes.values()} | self.snapshots.keys()
        self.disks = {id: disk for id, disk in self.disks.items() if id in known_disks}
        self.write()
        copies = [each.model_copy(deep=True) for each in self.saved_sandboxes.values()]
        return Scan(sandboxes=copies, snapshots=[each.model_copy(deep=True) for each in self.snapshots.values()])

    async def boot(self, sandbox: Sandbox) -> None:
        self.steps.count()
        # Before the machine starts, so that the times when it may run are not listed as too short.
        self._log("start", sandbox.id)
        try:
            await super().boot(sandbox)
        except BaseException:
            self._log("stop", sandbox.id)
            raise
        self.steps.count()

    async def stop(self, sandbox: Sandbox) -> None:
        is_running = sandbox.instance in self.machines
        await super().stop(sandbox)
        if is_running:
            self._log("stop", sandbox.id)
            self.write()

    async def discard(self, sandbox: Sandbox) -> None:
        await super().discard(sandbox)
        self.write()

    async def save(self, sandbox: Sandbox) -> None:
        self.steps.count()
        await super().save(sandbox)
        self.write()

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots[snapshot.id] = snapshot
        self.write()

    async def remove(self, sandbox: Sandbox) -> None:
        self.steps.count()
        self.saved_sandboxes.pop(sandbox.id, None)
        self.write()
        await super().remove(sandbox)

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        captured = await super().capture(sandbox, snapshot, memory=memory, volumes=volumes)
        self.snapshots[captured.id] = captured
        self.write()
        return captured

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        self.steps.count()
        await super().remove_snapshot(snapshot)
        self.snapshots.pop(snapshot.id, None)
        self.write()

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> DurableTarget:
        return DurableTarget(snapshot, self, base)


def _count_steps(steps: Steps) -> None:
    """Count the requests between gateways about moves and shares, and the changes of both in etcd, before and after."""
    for owner, names in (
        (Store, ("transact",)),
        (MoveClient, ("_call",)),
        (MoveServer, ("answer",)),
        (Holds, ("wait_until_ready", "commit")),
    ):
        for name in names:
            _count_calls(owner, name, steps)


def _count_calls(owner: type, name: str, steps: Steps) -> None:
    work = getattr(owner, name)

    async def count(*arguments: Any, **options: Any) -> Any:
        is_step = name != "transact" or _changes_move_or_decision(arguments[2])
        if is_step:
            steps.count()
        result = await work(*arguments, **options)
        if is_step:
            steps.count()
        return result

    setattr(owner, name, count)


def _changes_move_or_decision(operations: Sequence[Mapping[str, Any]]) -> bool:
    encoded_keys = [operation.get(kind, {}).get("key", "") for operation in operations for kind in operation]
    keys = [base64.b64decode(key).decode() for key in encoded_keys]
    return any("/moves/" in key or "/decisions/" in key for key in keys)


def _shift_clock(path: Path) -> None:
    """Let the clock of this process be wrong by the seconds in a file, whenever the file exists."""
    get_time = time.time

    def read_shift() -> float:
        try:
            return float(path.read_text())
        except (FileNotFoundError, ValueError):
            return 0.0

    class ShiftedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=read_shift())

    time.time = lambda: get_time() + read_shift()
    records.datetime = ShiftedDatetime  # type: ignore[misc]


def main() -> None:
    root, sections, *options = Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
    if options == ["faults"]:
        set_times(FAULT_TIMES)
        _shift_clock(root / "clock-shift")
    else:
        set_times(PATIENT_TIMES)
    steps = Steps(root / "kill-after")
    _count_steps(steps)
    gateway = MemoryGateway(root, DurableHost(root, steps), **sections)
    print(gateway.port, flush=True)
    print(gateway.socket, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
