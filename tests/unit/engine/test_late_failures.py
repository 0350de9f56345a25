"""Steps that fail after the commit of an operation: what is answered as failed does not exist, and the reverse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import MountSpec
from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot
from tests.api.memory_host import MemoryHost
from tests.support.memory_engine import create, open_engine


class _Host(MemoryHost):
    full = False
    stuck = False

    async def save(self, sandbox: Sandbox) -> None:
        if self.full:
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if self.stuck:
            raise BackendFailed("it cannot be removed")
        await super().remove_snapshot(snapshot)


def test_a_capture_that_failed_can_be_repeated_under_its_name(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await engine.volumes.create("v", 64)
            await create(engine, "a")
            await engine.attachments.attach("a", MountSpec("v", "/data"))
            head = engine.sandboxes.get("a").head
            host.full = True
            with pytest.raises(NoSpace):
                await engine.snapshots.create("a", name="s", volumes=["v"])
            assert engine.snapshots.list() == [] and engine.index.volume_snapshots == {} == host.volume_snapshots
            assert engine.sandboxes.get("a").head == head
            host.full = False
            again = await engine.snapshots.create("a", name="s", volumes=["v"])
            assert again.parent == head and engine.sandboxes.get("a").head == again.id

    asyncio.run(story())


def test_a_resumed_or_deleted_sandbox_is_so_although_its_capture_stays(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a")
            for end in (engine.sandboxes.resume, engine.sandboxes.delete):
                await engine.sandboxes.pause("a")
                host.stuck = True
                await end("a")
                host.stuck = False
                assert all(each.state is SandboxState.RUNNING for each in engine.sandboxes.list())
            assert engine.sandboxes.list() == []

    asyncio.run(story())
