"""Forks and clones whose client disconnects while they are being committed or undone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import NameTaken
from sandbox_gateway.records import Sandbox
from tests.support.memory_engine import Gate, create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    """A host that waits at one gate before it saves the sandbox ``b``, and at another before it removes any sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self.commit_gate = Gate()
        self.removal_gate: Gate | None = None

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.name == "b":
            await self.commit_gate()
        await super().save(sandbox)

    async def remove(self, sandbox: Sandbox) -> None:
        if self.removal_gate:
            await self.removal_gate()
        await super().remove(sandbox)


async def _cancel_during_commit(engine: Engine, host: _Host, task: asyncio.Task[object]) -> None:
    await host.commit_gate.reached.wait()
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    task.cancel()
    with pytest.raises(NameTaken):
        await engine.forks.create("t", ForkSpec(names=["c"]))
    host.commit_gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_committed_forks_keep_their_clones_of_volumes(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await engine.volumes.create("v", 64)
        await create(engine, "a", mounts=[MountSpec("v", "/data")])
        await engine.snapshots.create("a", name="s", volumes=["v"])
        spec = ForkSpec(names=["b", "c"], mounts=[MountSpec("v", "/data", clone=True)])
        await _cancel_during_commit(engine, host, asyncio.create_task(engine.forks.fork("s", spec)))
        for name in ("b", "c"):
            (mount,) = engine.sandboxes.get(name).mounts
            assert mount.volume in engine.index.volumes and mount.volume in host.volumes


async def test_committed_clones_keep_their_capture(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        source = await create(engine, "a")
        spec = ForkSpec(names=["b", "c"])
        await _cancel_during_commit(engine, host, asyncio.create_task(engine.forks.clone("a", spec)))
        clone = engine.sandboxes.get("b")
        assert clone.forked_from in engine.index.snapshots
        assert engine.sandboxes.get(source.id).head == clone.forked_from, (
            "the head is not the one that a completed clone has"
        )


async def test_names_stay_reserved_while_cancelled_forks_are_removed(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        host.fork_seconds = 60
        task = asyncio.create_task(engine.forks.fork("t", ForkSpec(names=["b", "c"])))
        await asyncio.sleep(0.02)
        host.removal_gate = Gate()
        task.cancel()
        await host.removal_gate.reached.wait()
        task.cancel()
        await asyncio.sleep(0.02)
        with pytest.raises(NameTaken):
            await engine.forks.create("t", ForkSpec(names=["b"]))
        host.removal_gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        host.fork_seconds = 0
        await create(engine, "c")
