"""Operations that wait for a sandbox's lock while another request deletes the snapshot that they use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import InUse, NotFound
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.memory_engine import Gate, create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


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


async def test_captures_and_a_rollback_of_one_sandbox_run_one_after_another(tmp_path: Path) -> None:
    class Host(MemoryHost):
        capture_gate: Gate | None = None
        running_operations: list[str]
        operations: list[str]

        async def capture(self, sandbox: Sandbox, snapshot: Snapshot, **options: Any) -> Snapshot:
            with self._recorded("capture"):
                if self.capture_gate:
                    await self.capture_gate()
                return await super().capture(sandbox, snapshot, **options)

        async def fork(self, snapshot: Snapshot, sandbox: Sandbox, **options: Any) -> None:
            with self._recorded("fork"):
                await super().fork(snapshot, sandbox, **options)

        @contextlib.contextmanager
        def _recorded(self, operation: str) -> Iterator[None]:
            assert not self.running_operations, f"{operation} during {self.running_operations}"
            self.running_operations.append(operation)
            self.operations.append(operation)
            try:
                yield
            finally:
                self.running_operations.pop()

    host = Host()
    host.running_operations, host.operations = [], []
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        host.operations.clear()
        host.capture_gate = Gate()
        first_task = asyncio.create_task(engine.snapshots.create("a", name="first"))
        await host.capture_gate.reached.wait()
        rollback_task = asyncio.create_task(engine.sandboxes.rollback("a", "s"))
        await asyncio.sleep(0.02)
        second_task = asyncio.create_task(engine.snapshots.create("a", name="second"))
        await asyncio.sleep(0.02)
        assert not rollback_task.done() and not second_task.done()
        host.capture_gate.opened.set()
        first, second = await first_task, await second_task
        await rollback_task
        snapshot = engine.snapshots.get("s")
        assert host.operations == ["capture", "fork", "capture"]
        assert (first.parent, second.parent) == (snapshot.id, snapshot.id)
        assert engine.sandboxes.get("a").head == second.id


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
