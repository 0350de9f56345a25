"""Kill the host's operations on files at many steps, with a memory root. No image is missing, and none is left over.

With GROVE_CRASH_POINTS=all, each operation is killed at every step; by default, at some. The host is real, but the
memory of its machines is that of the process which is killed. `test_memory_root_crash` kills a gateway with real
machines, at fewer steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.records import Memory, Resources, Sandbox, Snapshot, SnapshotKind
from tests.kvm_xfs.process_host import make_host
from tests.support.crash import KILLED, StepCounter
from tests.support.xfs import LoopXfs

MEMORY_MB = 64
CRASH_POINTS = 6
_numbers = itertools.count(1)


class Gateway:
    """A gateway with a running source that was captured twice, an idle fork, and the snapshots of both captures."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host = make_host(config)
        self.base = Snapshot(kind=SnapshotKind.BASE, resources=Resources(memory_mb=MEMORY_MB, disk_mb=64))
        self.source = self._new_sandbox("source")
        self.spare = self._new_sandbox("spare")
        self.mark, self.other = self._new_snapshot(), self._new_snapshot()

    def _new_sandbox(self, name: str) -> Sandbox:
        return Sandbox(name=name, resources=self.base.resources)

    def _new_snapshot(self, kind: SnapshotKind = SnapshotKind.SNAPSHOT) -> Snapshot:
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
        for number, snapshot in enumerate((self.mark, self.other)):
            self.write(number)
            await self.host.capture(self.source, snapshot, memory=True)
        await self.host.fork(self.mark, self.spare, with_memory=True)
        await self.host.save(self.spare)

    def write(self, number: int) -> None:
        memory = self.host._machines.require_running(self.source).machine.memory  # type: ignore[attr-defined]
        memory[number * 4096 : number * 4096 + 6] = b"number"

    async def capture(self) -> None:
        self.write(2)
        await self.host.capture(self.source, self._new_snapshot(), memory=True)

    async def capture_transient(self) -> None:
        self.write(2)
        await self.host.capture(self.source, self._new_snapshot(SnapshotKind.TRANSIENT), memory=True)
        await self.host._background.wait()

    async def fork(self) -> None:
        fork = self._new_sandbox("fork")
        await self.host.fork(self.other, fork, with_memory=True)
        await self.host.save(fork)

    async def discard_fork(self) -> None:
        fork = self._new_sandbox("fork")
        await self.host.fork(self.other, fork, with_memory=True)
        await self.host.discard(fork)

    async def remove_snapshot(self) -> None:
        await self.host.remove_snapshot(self.other)

    async def remove_sandbox(self) -> None:
        await self.host.remove(self.source)

    async def boot_again(self) -> None:
        await self.host.stop(self.source)
        await self.host.boot(self.source)

    def has_finished(self, operation: str, snapshots: set[str], sandboxes: set[str]) -> bool:
        """Return whether an operation that removes something has removed it."""
        removed = {"remove_snapshot": self.other.id, "remove_sandbox": self.source.id}.get(operation)
        return removed is not None and removed not in snapshots | sandboxes


OPERATIONS: dict[str, Callable[[Gateway], Awaitable[None]]] = {
    name: getattr(Gateway, name)
    for name in (
        "capture",
        "capture_transient",
        "fork",
        "discard_fork",
        "remove_snapshot",
        "remove_sandbox",
        "boot_again",
    )
}


@pytest.fixture(scope="module")
def state(need_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopXfs]:
    directory = tmp_path_factory.mktemp("state")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512) as xfs:
        yield xfs


@pytest.fixture(scope="module", params=[True, False], ids=["reflink", "no-reflink"])
def root(
    request: pytest.FixtureRequest, need_root: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoopXfs]:
    directory = tmp_path_factory.mktemp("root")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512, reflink=request.param) as xfs:
        yield xfs


@pytest.fixture
def config(state: LoopXfs, root: LoopXfs) -> Callable[[], Config]:
    """A function that returns a configuration with a new state root and a new memory root."""

    def new_config() -> Config:
        number = next(_numbers)
        state_root, memory_root = state.mount_point / str(number), root.mount_point / str(number)
        state_root.mkdir()
        memory_root.mkdir(mode=0o700)
        kvm_xfs = {"memory_root": memory_root, "memory_mode": "compare"}
        return Config.model_validate({"host": {"state_root": state_root}, "kvm_xfs": kvm_xfs})

    return new_config


def run_and_kill(gateway: Gateway, operation: str, fatal: int) -> tuple[int, int]:
    """Run an operation in a copy of this process, and kill it at the step ``fatal`` (0: never).

    Return its exit code and, if it was not killed, the number of its steps.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            steps = StepCounter(fatal)
            sys.addaudithook(steps.on_audit)
            steps.armed = True
            asyncio.run(OPERATIONS[operation](gateway))  # type: ignore[arg-type]
            steps.armed = False
            os.write(writer, str(steps.count).encode())
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(output or 0)


def check(gateway: Gateway, operation: str, when: str) -> None:
    """Check that a new gateway finds complete snapshots and sandboxes, and that no other image exists."""
    config = gateway.config
    host = make_host(config)
    scan = asyncio.run(host.scan())
    assert not (config.host.state_root / ".damaged").exists(), (when, scan.repaired)
    snapshots = {each.id: each for each in scan.snapshots if each.memory is not Memory.NONE}
    sandboxes = {each.id for each in scan.sandboxes}
    expected = {gateway.mark.id, gateway.other.id, gateway.source.id, gateway.spare.id}
    missing = expected - snapshots.keys() - sandboxes
    assert not missing or (len(missing) == 1 and gateway.has_finished(operation, {*snapshots}, sandboxes)), when
    assert [host.memory_problem(each) for each in snapshots.values()] == [""] * len(snapshots), when
    for snapshot in snapshots.values():
        with Path(host.files_of(snapshot)["memory"]).open("rb") as image:
            start = image.read(3 * 4096)
        count = {gateway.mark.id: 1, gateway.other.id: 2}.get(snapshot.id, 3)
        written = [start[page * 4096 : page * 4096 + 6] == b"number" for page in range(3)]
        assert written == [page < count for page in range(3)], (when, snapshot.id)
    links = [path for path in (config.host.state_root / "sandboxes").glob("*/*/memory.*") if path.is_symlink()]
    assert all(link.exists() for link in links), when
    images = {path for path in config.kvm_xfs.memory_root.rglob("*") if path.is_file()}  # type: ignore[union-attr]
    assert images == {Path(host.files_of(each)["memory"]) for each in snapshots.values()} | {
        link.readlink() for link in links
    }, (when, scan.repaired)
    if gateway.spare.id in sandboxes:
        base = host._layout.instance(gateway.spare).memory
        assert base.read_bytes()[:6] == b"number", when


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_operation_loses_no_image_and_leaves_none(operation: str, config: Callable[[], Config]) -> None:
    def run(fatal: int) -> tuple[int, int]:
        gateway = Gateway(config())
        try:
            asyncio.run(gateway.prepare())
            code, steps = run_and_kill(gateway, operation, fatal)
            check(gateway, operation, f"{operation} killed at step {fatal}: {code}")
            return code, steps
        finally:
            gateway.close()

    code, steps = run(0)
    assert code == 0 and steps > 1
    kills_at_each_step = os.environ.get("GROVE_CRASH_POINTS") == "all"
    fatal_steps = range(1, steps + 1, 1 if kills_at_each_step else max(1, steps // CRASH_POINTS))
    assert {run(step)[0] for step in fatal_steps} == {KILLED}
