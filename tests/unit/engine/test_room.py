"""Operations that would exhaust the host's disk or memory are refused. Stalled machines are reported and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_gateway.engine import room
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer import transfers
from sandbox_gateway.errors import NoSpace
from sandbox_gateway.hosts.base import MemoryDisk, Room, Usage, VolumeState
from sandbox_gateway.records import Sandbox, Volume
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost

pytestmark = pytest.mark.anyio
MIB = 1 << 20


class _Host(MemoryHost):
    """A host that counts captures. ``memory_bytes`` and ``image_bytes``: the usage of each machine."""

    def __init__(self) -> None:
        super().__init__()
        self.capture_count = self.room_count = 0
        self.memory_bytes = 200 * MIB
        self.image_bytes = self.disk_bytes = 0

    async def capture(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.capture_count += 1
        return await super().capture(*args, **kwargs)

    async def measure_room(self) -> Room:
        self.room_count += 1
        return await super().measure_room()

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        return Usage(disk_bytes=self.disk_bytes, memory_bytes=self.memory_bytes, image_bytes=self.image_bytes)

    async def read_volume_state(self, volume: Volume) -> VolumeState:
        return VolumeState(used_bytes=self.disk_bytes)

    def set_free_space(self, *, disk_mb: int | None = None, memory_mb: int | None = None) -> None:
        if disk_mb is not None:
            self.available_room = replace(self.available_room, disk_free=disk_mb * MIB)
        if memory_mb is not None:
            self.available_room = replace(self.available_room, memory_free=memory_mb * MIB)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    monkeypatch.setattr(room, "_CHECK_INTERVAL_SECONDS", 0.01)
    return _Host()


@pytest.fixture
async def engine(tmp_path: Path, host: _Host) -> AsyncIterator[Engine]:
    """An engine with the sandbox `a` and its snapshot `s`, and reserves of 1000 MiB of disk and 500 MiB of memory."""
    limits = {"free_disk_mb": 1000, "free_memory_mb": 500}
    async with opened_engine(tmp_path, host, limits=limits) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        host.fork_count = host.capture_count = 0
        yield engine


async def _fork_snapshot(engine: Engine) -> None:
    await engine.forks.fork("s", ForkSpec(count=3))


async def _clone_sandbox(engine: Engine) -> None:
    await engine.forks.clone("a", ForkSpec(count=3))


async def _capture_sandbox(engine: Engine) -> None:
    await engine.snapshots.create("a", name="more")


async def _pause_sandbox(engine: Engine) -> None:
    await engine.sandboxes.pause("a")


Operation = Callable[[Engine], Awaitable[None]]


@pytest.mark.parametrize("operation", [_fork_snapshot, _clone_sandbox, _capture_sandbox, _pause_sandbox])
async def test_an_operation_is_refused_before_it_begins_if_the_disk_would_be_full(
    engine: Engine, host: _Host, operation: Operation
) -> None:
    records_before = {**engine.index.sandboxes}, {**engine.index.snapshots}
    host.set_free_space(disk_mb=999)
    with pytest.raises(
        NoSpace, match=r"less than 1000 MiB of disk space free: the host has 999 MiB free\. Delete snap"
    ):
        await operation(engine)
    assert (host.fork_count, host.capture_count) == (0, 0)
    assert (engine.index.sandboxes, engine.index.snapshots) == records_before
    host.set_free_space(disk_mb=2000)
    await operation(engine)


@pytest.mark.parametrize("operation", [_fork_snapshot, _clone_sandbox, _capture_sandbox, _pause_sandbox])
async def test_an_operation_measures_the_room_once(tmp_path: Path, operation: Operation) -> None:
    """A measurement takes two commands on a jail host. The host stalls no machines, so the engine does not poll it."""
    host = _Host()
    host.abilities = replace(host.abilities, can_stall=False)
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        host.room_count = 0
        await operation(engine)
        assert host.room_count == 1


@pytest.mark.parametrize(
    ("free_mb", "used_mb", "is_refused"), [(1256, 999, False), (1199, 200, True), (1200, 200, False)]
)
async def test_a_capture_is_refused_only_if_used_memory_would_fill_the_disk(
    engine: Engine, host: _Host, free_mb: int, used_mb: int, is_refused: bool
) -> None:
    assert engine.sandboxes.get("a").resources.memory_mb == 256
    host.set_free_space(disk_mb=free_mb)
    host.memory_bytes = used_mb * MIB
    if is_refused:
        with pytest.raises(NoSpace, match=r"a capture of a \(up to 200 MiB\) would leave"):
            await _capture_sandbox(engine)
    else:
        await _capture_sandbox(engine)


@pytest.mark.parametrize(
    ("free_mb", "used_mb", "image_mb", "is_refused"),
    [(1256, 999, 0, False), (1199, 150, 50, True), (1200, 150, 50, False)],
)
async def test_a_capture_is_refused_if_it_would_fill_the_memory_root(
    engine: Engine, host: _Host, free_mb: int, used_mb: int, image_mb: int, is_refused: bool
) -> None:
    memory_disk = MemoryDisk("/memory", free_mb * MIB, 9000 * MIB)
    host.available_room = replace(host.available_room, disk_free=1000 * MIB, memory_disk=memory_disk)
    host.memory_bytes, host.image_bytes = used_mb * MIB, image_mb * MIB
    if is_refused:
        with pytest.raises(
            NoSpace, match=r"a capture of a \(up to 200 MiB\) would .* in the memory root /memory, which"
        ):
            await _capture_sandbox(engine)
    else:
        await _capture_sandbox(engine)
    host.set_free_space(disk_mb=999)
    with pytest.raises(NoSpace, match="the host has 999 MiB free"):
        await engine.snapshots.create("a")


async def test_a_full_memory_root_refuses_only_captures_with_memory(engine: Engine, host: _Host) -> None:
    host.available_room = replace(host.available_room, memory_disk=MemoryDisk("/memory", 0, 9000 * MIB))
    await engine.snapshots.create("a", name="disk", memory="none")
    await _fork_snapshot(engine)
    with pytest.raises(NoSpace, match="memory root"):
        await _clone_sandbox(engine)


async def test_the_space_of_an_unavailable_memory_root_is_not_checked(engine: Engine, host: _Host) -> None:
    """A real host refuses the capture itself, with a better message."""
    host.available_room = replace(
        host.available_room, memory_disk=MemoryDisk("/memory", problem="/memory is not mounted")
    )
    await _capture_sandbox(engine)


async def test_a_capture_without_memory_needs_only_the_reserve(engine: Engine, host: _Host) -> None:
    host.set_free_space(disk_mb=1000)
    await engine.snapshots.create("a", name="disk", memory="none")


@pytest.mark.parametrize("operation", [_fork_snapshot, _clone_sandbox])
async def test_new_machines_are_refused_if_they_would_exhaust_the_memory(
    engine: Engine, host: _Host, operation: Operation
) -> None:
    host.set_free_space(memory_mb=500 + 3 * 64 - 1)
    with pytest.raises(NoSpace, match=r"3 more machines would leave less than 500 MiB of memory free: .* has 691"):
        await operation(engine)
    assert (host.fork_count, host.capture_count) == (0, 0)
    await create(engine, "b", "s")
    host.set_free_space(memory_mb=500 + 3 * 64)
    await operation(engine)


async def test_reserves_of_zero_cause_no_refusal(tmp_path: Path, host: _Host) -> None:
    async with opened_engine(tmp_path, host, limits={"free_disk_mb": 0, "free_memory_mb": 0}) as engine:
        host.set_free_space(disk_mb=0, memory_mb=0)
        await create(engine, "a")
        await engine.forks.clone("a", ForkSpec())


async def test_rollback_and_resume_are_possible_on_a_full_host(engine: Engine, host: _Host) -> None:
    """Rollback and resume need no more space than they free."""
    await engine.sandboxes.pause("a")
    host.set_free_space(disk_mb=0, memory_mb=0)
    await engine.sandboxes.resume("a")
    await engine.sandboxes.rollback("a", "s")


async def test_the_report_adds_up_the_sizes_of_disks_volumes_and_memory(engine: Engine, host: _Host) -> None:
    await create(engine, "b")
    await engine.volumes.create("data", 64)
    await engine.sandboxes.pause("b")
    report = await engine.room.report()
    disk_mb = engine.sandboxes.get("a").resources.disk_mb
    assert (report.disk_promised, report.memory_promised) == ((2 * disk_mb + 64) * MIB, 256 * MIB)
    assert (report.room, report.stalled_ids) == (host.available_room, [])


async def test_a_stalled_machine_is_reported_and_resumed_when_there_is_space(engine: Engine, host: _Host) -> None:
    sandbox = engine.sandboxes.get("a")
    with engine.events.subscribed() as events:
        host.set_free_space(disk_mb=0)
        host.stalled_instances.add(sandbox.instance)
        await wait_until(lambda: engine.room.get_stall_reason(sandbox))
        assert engine.room.get_stall_reason(sandbox).startswith("the host's disk has no space left")
        assert (await engine.room.report()).stalled_ids == [sandbox.id]
        host.set_free_space(disk_mb=999)
        await _wait_for_checks(host)
        assert host.stalled_instances == {sandbox.instance}, "it was resumed below the reserve"
        host.set_free_space(disk_mb=1000)
        await wait_until(lambda: not host.stalled_instances)
        await wait_until(lambda: not engine.room.get_stall_reason(sandbox))
        event_types = [events.get_nowait().type for _ in range(2)]
    assert event_types == ["sandbox.stalled", "sandbox.continued"]


async def test_a_stalled_machine_is_not_resumed_during_a_change_of_its_sandbox(engine: Engine, host: _Host) -> None:
    """A capture stops the machine, and nothing else may resume the machine during the capture."""
    sandbox = engine.sandboxes.get("a")
    async with engine.sandboxes._locking.sandbox_locked("a"):
        host.set_free_space(disk_mb=0)
        host.stalled_instances.add(sandbox.instance)
        await wait_until(lambda: engine.room.get_stall_reason(sandbox))
        host.set_free_space(disk_mb=2000)
        await _wait_for_checks(host)
        assert host.stalled_instances
    await wait_until(lambda: not host.stalled_instances)


async def _wait_for_checks(host: _Host) -> None:
    """Wait until the watch loop has checked several times."""
    check_count = 0
    original_find_stalled = host.find_stalled_instances

    async def count_check() -> set[str]:
        nonlocal check_count
        check_count += 1
        return await original_find_stalled()

    host.find_stalled_instances = count_check  # type: ignore[method-assign]
    await wait_until(lambda: check_count >= 3)
    host.find_stalled_instances = original_find_stalled  # type: ignore[method-assign]


# --- plan sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_memory_root", [False, True])
async def test_a_plan_session_counts_the_disk_space_of_its_own_snapshots(
    engine: Engine, host: _Host, has_memory_root: bool
) -> None:
    original_snapshot = engine.snapshots.get("s")
    engine.index.put(
        original_snapshot.model_copy(update={"memory_bytes_written": 300 * MIB, "disk_bytes_unique": 5 * MIB})
    )
    if has_memory_root:
        disk = MemoryDisk("/memory", free=1250 * MIB, total=9000 * MIB)
        host.available_room = replace(host.available_room, memory_disk=disk)
    else:
        host.set_free_space(disk_mb=1250)
    session = PlanSessions(engine).open("key", "a check-mode run of a test").engine
    await session.snapshots.create("a", name="s1")
    with pytest.raises(NoSpace):
        await session.snapshots.create("a", name="s2")
    await session.snapshots.delete("s")
    await session.snapshots.create("a", name="s2")
    with pytest.raises(NoSpace):
        await session.snapshots.create("a", name="s3")
    await session.snapshots.delete("s1")
    await session.snapshots.create("a", name="s3")


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_plan_session_counts_the_disks_of_removed_objects(engine: Engine, host: _Host, is_paused: bool) -> None:
    await engine.volumes.create("data")
    await create(engine, "b", "s")
    if is_paused:
        await engine.sandboxes.pause("b", memory=False)
    host.disk_bytes = 300 * MIB
    host.set_free_space(disk_mb=600)
    session = PlanSessions(engine).open("key", "a check-mode run of a test").engine
    with pytest.raises(NoSpace):
        await create(session, "c", "s")
    if not is_paused:
        await session.sandboxes.pause("b", memory=False)  # The sandbox keeps its disk.
    with pytest.raises(NoSpace):
        await create(session, "c", "s")
    await session.sandboxes.delete("b")
    with pytest.raises(NoSpace):
        await create(session, "c", "s")
    await session.volumes.delete("data")
    await create(session, "c", "s")


async def test_two_imports_that_together_fill_the_disk_are_not_both_accepted(
    engine: Engine, host: _Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for an import is checked once, but its last byte can arrive hours later."""
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    export = await engine.transfers.export("s")
    pieces = [piece async for piece in export.read_pieces()]
    await export.close()
    size = export.manifest.sum_data_bytes(memory=True)
    host.available_room = replace(host.available_room, disk_free=1000 * MIB + size + size // 2)
    first_release_event = asyncio.Event()

    async def send_file(release_event: asyncio.Event | None = None) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            if release_event:
                await release_event.wait()

    first_import = asyncio.create_task(engine.transfers.import_(send_file(first_release_event), name="first"))
    await wait_until(lambda: host.partial_imports)
    with pytest.raises(NoSpace, match=r"free, of which running imports need 1 MiB\."):
        await engine.transfers.import_(send_file(), name="second")
    first_release_event.set()
    await first_import
    await engine.transfers.import_(send_file(), name="second")


@pytest.mark.parametrize("has_memory_root", [False, True])
async def test_an_import_reserves_only_what_it_has_not_written(
    engine: Engine, host: _Host, has_memory_root: bool
) -> None:
    def set_free_space(free_mb: int) -> None:
        disk = MemoryDisk("/memory", free_mb * MIB, 99000 * MIB) if has_memory_root else None
        host.available_room = replace(host.available_room, disk_free=free_mb * MIB, memory_disk=disk)

    def reserve_space(size_mb: int) -> AbstractAsyncContextManager[room.PendingImport]:
        return engine.room.reserved_for_import(0, size_mb * MIB)

    set_free_space(15000)
    async with reserve_space(10000) as pending_import:
        pending_import.count_written_bytes(6000 * MIB, memory=True)
        set_free_space(9000)
        with pytest.raises(NoSpace, match="9000 MiB free, of which running imports need 4000 MiB"):
            async with reserve_space(4001):
                pass
        async with reserve_space(4000):
            pass
    async with reserve_space(8000):
        pass
