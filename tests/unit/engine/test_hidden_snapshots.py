"""Snapshots deleted with ``when_unused`` are removed once they are unused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Abilities
from sandbox_gateway.records import Snapshot
from tests.support.memory_engine import Gate, create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    abilities = Abilities(memory=True, resize_on_fork=False, independent_snapshots=False)

    def __init__(self) -> None:
        super().__init__()
        self.hide_gate: Gate | None = None

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        if self.hide_gate and snapshot.doomed:
            await self.hide_gate()


async def test_deleting_the_last_user_while_a_snapshot_is_being_hidden_removes_it(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        await create(engine, "b", "s")
        host.hide_gate = Gate()
        snapshot_deletion_task = asyncio.create_task(engine.snapshots.delete("s", when_unused=True))
        await host.hide_gate.reached.wait()
        sandbox_deletion_task = asyncio.create_task(engine.sandboxes.delete("b"))
        await asyncio.sleep(0.05)
        host.hide_gate.opened.set()
        assert await snapshot_deletion_task is True, "it was only hidden"
        await sandbox_deletion_task
        assert [each.id for each in engine.index.snapshots.values() if each.doomed] == []


@pytest.mark.parametrize("verb", ["fork", "rollback"])
async def test_a_snapshot_hidden_during_a_failing_operation_is_removed(tmp_path: Path, verb: str) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        snapshot = await engine.snapshots.create("a", name="s")
        host.fork_seconds, host.failing_names = 0.1, {"a", "b"}
        fork_operation = engine.forks.fork("s", ForkSpec(names=["b"])) if verb == "fork" else None
        task = asyncio.create_task(fork_operation or engine.sandboxes.rollback("a", "s"))  # type: ignore[arg-type]
        await asyncio.sleep(0.03)
        assert await engine.snapshots.delete("s", when_unused=True) is False
        with pytest.raises(BackendFailed):
            await task
        assert snapshot.id not in engine.index.snapshots


async def test_a_hidden_snapshot_is_removed_with_the_last_volume_created_from_it(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await engine.volumes.create("v", 64)
        await create(engine, "a", mounts=[MountSpec("v", "/data")])
        snapshot = await engine.snapshots.create("a", name="s", volumes=["v"])
        await engine.volumes.create("w", from_snapshot=snapshot.volumes[0].snapshot)
        assert await engine.snapshots.delete("s", when_unused=True) is False
        await engine.volumes.delete("w")
        assert snapshot.id not in engine.index.snapshots
