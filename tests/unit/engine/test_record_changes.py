"""Concurrent saves and removals of the same object."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.record_changes import save_sandbox, save_snapshot
from sandbox_gateway.errors import NotFound
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.memory_engine import Gate, create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    """A host that, like real hosts, removes the record first, and then waits at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.removal_gate: Gate | None = None
        self.stored_ids: set[str] = set()
        """Ids of the snapshots that have a record."""

    async def remove(self, sandbox: Sandbox) -> None:
        self.saved_sandboxes.pop(sandbox.id, None)
        if self.removal_gate:
            await self.removal_gate()
        await self.discard(sandbox)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self.stored_ids.add(snapshot.id)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        self.stored_ids.discard(snapshot.id)
        if self.removal_gate:
            await self.removal_gate()
        await super().remove_snapshot(snapshot)


async def test_a_deleted_sandbox_stays_deleted_while_its_head_is_deleted(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="head")
        host.removal_gate = Gate()
        deletion_task = asyncio.create_task(engine.sandboxes.delete("a"))
        await host.removal_gate.reached.wait()
        head_deletion_task = asyncio.create_task(engine.snapshots.delete("head"))  # changes the head of the sandbox
        await asyncio.sleep(0.05)
        host.removal_gate.opened.set()
        await asyncio.gather(deletion_task, head_deletion_task)
        assert engine.sandboxes.list() == [] and host.saved_sandboxes == {}
        assert engine.snapshots.list() == []


async def test_a_save_that_waited_for_a_removal_raises_not_found(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "a")
        snapshot = await engine.snapshots.create("a", name="s")
        host.removal_gate = Gate()
        removal_task = asyncio.create_task(engine.sandboxes.delete("a"))
        await host.removal_gate.reached.wait()
        save_task = asyncio.create_task(save_sandbox(engine.sandboxes._context, sandbox.id, metadata={"late": "yes"}))
        await asyncio.sleep(0.02)
        host.removal_gate.opened.set()
        await removal_task
        with pytest.raises(NotFound):
            await save_task
        await engine.snapshots.delete("s")
        with pytest.raises(NotFound):
            await save_snapshot(engine.sandboxes._context, snapshot.id, description="late")
        assert host.saved_sandboxes == {} and snapshot.id not in host.stored_ids


async def test_a_removal_waits_for_a_save_in_progress(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        snapshot = await engine.snapshots.create("a", name="s")
        gate = Gate()

        async def save(record: Snapshot) -> None:
            await gate()
            host.stored_ids.add(record.id)

        host.save_snapshot = save  # type: ignore[method-assign]
        save_task = asyncio.create_task(save_snapshot(engine.sandboxes._context, snapshot.id, description="under way"))
        await gate.reached.wait()
        removal_task = asyncio.create_task(engine.snapshots.delete("s"))
        await asyncio.sleep(0.02)
        gate.opened.set()
        await asyncio.gather(save_task, removal_task)
        assert snapshot.id not in host.stored_ids
