"""Operations that wait for a sandbox's lock while another request deletes the snapshot that they use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.errors import InUse, NotFound
from sandbox_gateway.records import Snapshot
from tests.api.memory_host import MemoryHost
from tests.support.memory_engine import Gate, create, opened_engine, wait_until


async def test_a_rollback_that_waits_for_a_lock_keeps_its_snapshot(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "a")
        snapshot = await engine.snapshots.create("a", name="s")
        async with engine.sandboxes._locking.sandbox_locked("a"):
            rollback_task = asyncio.create_task(engine.sandboxes.rollback("a", "s"))
            await asyncio.sleep(0.02)
            with pytest.raises(InUse):
                await engine.snapshots.delete("s")
        assert (await rollback_task).head == snapshot.id
        assert snapshot.id in engine.index.snapshots
        await engine.snapshots.delete("s")


async def test_a_rollback_to_a_snapshot_that_is_being_removed_is_refused(tmp_path: Path) -> None:
    class Host(MemoryHost):
        removal_gate: Gate | None = None

        async def remove_snapshot(self, snapshot: Snapshot) -> None:
            if self.removal_gate:
                await self.removal_gate()
            await super().remove_snapshot(snapshot)

    host = Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox_before = await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        host.removal_gate = Gate()
        removal_task = asyncio.create_task(engine.snapshots.delete("s"))
        await host.removal_gate.reached.wait()
        with pytest.raises(NotFound):
            await engine.sandboxes.rollback("a", "s")
        host.removal_gate.opened.set()
        await removal_task
        assert engine.sandboxes.get("a").instance == sandbox_before.instance


async def test_a_promotion_that_waits_for_a_lock_keeps_its_capture(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        await create(engine, "f", "s")
        ids_before = set(engine.index.snapshots)
        async with engine.sandboxes._locking.sandbox_locked("a"):
            promotion_task = asyncio.create_task(engine.sandboxes.promote("f"))
            await wait_until(lambda: set(engine.index.snapshots) > ids_before)
            await engine.snapshots.create("f", name="later")  # Then the capture is not the head.
            await engine.sandboxes._collector.collect()
        assert (await promotion_task).head in engine.index.snapshots
