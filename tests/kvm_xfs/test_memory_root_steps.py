"""Test that killing a host's file operation with a memory root neither loses an image nor leaves a stray one.

By default, each operation is killed at several of its steps; with GROVE_CRASH_POINTS=all, at every step. The host is
real, but the memory of its machines belongs to the process that is killed. `test_memory_root_crash` kills a gateway
with real machines at fewer steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, Snapshot, SnapshotKind
from tests.kvm_xfs.process_host import make_host
from tests.support.crash import KILLED_EXIT_CODE, StepCounter
from tests.support.xfs import LoopXfs

MEMORY_MB = 64
MIN_CRASH_POINTS = 6
"""Each operation is killed at this many steps or more, unless it has fewer."""
_numbers = itertools.count(1)


class Gateway:
    """A gateway with a running source, the snapshots of its two captures, and an idle fork of the first snapshot."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host = make_host(config)
        self.base = Snapshot(kind=SnapshotKind.BASE, resources=Resources(memory_mb=MEMORY_MB, disk_mb=64))
        self.source = self._make_sandbox("source")
        self.idle_fork = self._make_sandbox("idle-fork")
        self.first_snapshot, self.second_snapshot = self._make_snapshot(), self._make_snapshot()

    def _make_sandbox(self, name: str) -> Sandbox:
        return Sandbox(name=name, resources=self.base.resources)

    def _make_snapshot(self, kind: SnapshotKind = SnapshotKind.SNAPSHOT) -> Snapshot:
        return Snapshot(kind=kind)

    def close(self) -> None:
        """Unmap the machines' images, so that their file systems can be unmounted."""
        for machine in self.host._machines.running.values():  # type: ignore[attr-defined]
            machine.memory.close()

    async def prepare(self) -> None:
        files = self.host._snapshots.partial_files(self.base)
        files.directory.mkdir()
        for path in (files.disk, files.kernel, files.initrd):
            path.write_bytes(b"x" * 4096)
        self.host._snapshots.commit(self.base)
        await self.host.fork(self.base, self.source, with_memory=False)
        await self.host.save(self.source)
        for number, snapshot in enumerate((self.first_snapshot, self.second_snapshot)):
            self.write(number)
            await self.host.capture(self.source, snapshot, memory=True)
        await self.host.fork(self.first_snapshot, self.idle_fork, with_memory=True)
        await self.host.save(self.idle_fork)

    def write(self, number: int) -> None:
        memory = self.host._machines.require_running(self.source).machine.memory  # type: ignore[attr-defined]
        memory[number * 4096 : number * 4096 + 6] = b"number"

    async def capture(self) -> None:
        self.write(2)
        await self.host.capture(self.source, self._make_snapshot(), memory=True)

    async def capture_transient(self) -> None:
        self.write(2)
        await self.host.capture(self.source, self._make_snapshot(SnapshotKind.TRANSIENT), memory=True)
        await self.host._background.wait()

    async def fork(self) -> None:
        fork = self._make_sandbox("fork")
        await self.host.fork(self.second_snapshot, fork, with_memory=True)
        await self.host.save(fork)

    async def discard_fork(self) -> None:
        fork = self._make_sandbox("fork")
        await self.host.fork(self.second_snapshot, fork, with_memory=True)
        await self.host.discard(fork)

    async def remove_snapshot(self) -> None:
        await self.host.remove_snapshot(self.second_snapshot)

    async def remove_sandbox(self) -> None:
        await self.host.remove(self.source)

    async def reboot(self) -> None:
        await self.host.stop(self.source)
        await self.host.boot(self.source)

    def is_completed_removal(self, operation: str, snapshot_ids: set[str], sandbox_ids: set[str]) -> bool:
        """Return whether ``operation`` is a removal that has taken effect."""
        removed_id = {"remove_snapshot": self.second_snapshot.id, "remove_sandbox": self.source.id}.get(operation)
        return removed_id is not None and removed_id not in snapshot_ids | sandbox_ids


OPERATIONS: dict[str, Callable[[Gateway], Awaitable[None]]] = {
    name: getattr(Gateway, name)
    for name in (
        "capture",
        "capture_transient",
        "fork",
        "discard_fork",
        "remove_snapshot",
        "remove_sandbox",
        "reboot",
    )
}


@pytest.fixture
def make_config(state_xfs: LoopXfs, root_xfs: LoopXfs) -> Callable[[], Config]:
    """A function that returns a configuration with a new state root and a new memory root."""

    def make_new_config() -> Config:
        number = next(_numbers)
        state_root, memory_root = state_xfs.mount_point / str(number), root_xfs.mount_point / str(number)
        state_root.mkdir()
        memory_root.mkdir(mode=0o700)
        kvm_xfs = {"memory_root": memory_root, "memory_mode": "compare"}
        return Config.model_validate({"host": {"state_root": state_root}, "kvm_xfs": kvm_xfs})

    return make_new_config


def run_and_kill(gateway: Gateway, operation: str, fatal_step: int) -> tuple[int, int]:
    """Run an operation in a forked child process, and kill it at the step ``fatal_step`` (0: never).

    Return the exit code of the child and, if it was not killed, the number of its steps.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            step_counter = StepCounter(fatal_step)
            sys.addaudithook(step_counter.on_audit)
            step_counter.is_armed = True
            asyncio.run(OPERATIONS[operation](gateway))  # type: ignore[arg-type]
            step_counter.is_armed = False
            os.write(writer, str(step_counter.count).encode())
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(output or 0)


def check_state(gateway: Gateway, operation: str, moment: str) -> None:
    """Check that a new gateway finds complete snapshots and sandboxes, and that no other image exists."""
    config = gateway.config
    host = make_host(config)
    scan = asyncio.run(host.scan())
    assert not (config.host.state_root / ".damaged").exists(), (moment, scan.repaired)
    snapshots = {each.id: each for each in scan.snapshots if each.memory is not MemoryMode.NONE}
    sandbox_ids = {each.id for each in scan.sandboxes}
    expected_ids = {gateway.first_snapshot.id, gateway.second_snapshot.id, gateway.source.id, gateway.idle_fork.id}
    missing_ids = expected_ids - snapshots.keys() - sandbox_ids
    assert not missing_ids or (
        len(missing_ids) == 1 and gateway.is_completed_removal(operation, {*snapshots}, sandbox_ids)
    ), moment
    assert [host.find_memory_problem(each) for each in snapshots.values()] == [""] * len(snapshots), moment
    for snapshot in snapshots.values():
        with Path(host.get_file_paths(snapshot)["memory"]).open("rb") as image:
            first_pages = image.read(3 * 4096)
        written_page_count = {gateway.first_snapshot.id: 1, gateway.second_snapshot.id: 2}.get(snapshot.id, 3)
        written_flags = [first_pages[page * 4096 : page * 4096 + 6] == b"number" for page in range(3)]
        assert written_flags == [page < written_page_count for page in range(3)], (moment, snapshot.id)
    links = [path for path in (config.host.state_root / "sandboxes").glob("*/*/memory.*") if path.is_symlink()]
    assert all(link.exists() for link in links), moment
    images = {path for path in config.kvm_xfs.memory_root.rglob("*") if path.is_file()}  # type: ignore[union-attr]
    assert images == {Path(host.get_file_paths(each)["memory"]) for each in snapshots.values()} | {
        link.readlink() for link in links
    }, (moment, scan.repaired)
    if gateway.idle_fork.id in sandbox_ids:
        memory_path = host._layout.instance(gateway.idle_fork).memory
        assert memory_path.read_bytes()[:6] == b"number", moment


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_file_operation_neither_loses_nor_leaks_an_image(
    operation: str, make_config: Callable[[], Config]
) -> None:
    def run(fatal_step: int) -> tuple[int, int]:
        gateway = Gateway(make_config())
        try:
            asyncio.run(gateway.prepare())
            code, step_count = run_and_kill(gateway, operation, fatal_step)
            check_state(gateway, operation, f"{operation} killed at step {fatal_step}: {code}")
            return code, step_count
        finally:
            gateway.close()

    code, step_count = run(0)
    assert code == 0 and step_count > 1
    kills_at_each_step = os.environ.get("GROVE_CRASH_POINTS") == "all"
    fatal_steps = range(1, step_count + 1, 1 if kills_at_each_step else max(1, step_count // MIN_CRASH_POINTS))
    assert {run(step)[0] for step in fatal_steps} == {KILLED_EXIT_CODE}
