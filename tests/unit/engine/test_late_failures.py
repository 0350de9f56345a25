"""An operation whose last steps fail succeeds if it has been committed, and leaves nothing behind otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    is_full = False
    removal_fails = False

    async def save(self, sandbox: Sandbox) -> None:
        if self.is_full:
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if self.removal_fails:
            raise BackendFailed("it cannot be removed")
        await super().remove_snapshot(snapshot)


async def test_a_failed_capture_can_be_retried_with_the_same_name(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await engine.volumes.create("v", 64)
        await create(engine, "a")
        await engine.attachments.attach("a", MountSpec("v", "/data"))
        head = engine.sandboxes.get("a").head
        host.is_full = True
        with pytest.raises(NoSpace):
            await engine.snapshots.create("a", name="s", volumes=["v"])
        assert engine.snapshots.list() == [] and engine.index.volume_snapshots == {} == host.volume_snapshots
        assert engine.sandboxes.get("a").head == head
        host.is_full = False
        snapshot = await engine.snapshots.create("a", name="s", volumes=["v"])
        assert snapshot.parent == head and engine.sandboxes.get("a").head == snapshot.id


async def test_a_failed_promotion_changes_nothing(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.forks.clone("a", ForkSpec(names=["b"]))
        records = [each.model_dump(exclude={"generation"}) for each in engine.sandboxes.list()]
        snapshot_ids = {*engine.index.snapshots}
        host.failing_names = {"a"}
        with pytest.raises(BackendFailed, match="no machine for a"):
            await engine.sandboxes.promote("b")
        assert [each.model_dump(exclude={"generation"}) for each in engine.sandboxes.list()] == records
        assert {*engine.index.snapshots} == snapshot_ids
        host.failing_names = set()
        promoted_sandbox = await engine.sandboxes.promote("b")
        assert promoted_sandbox.name == "a" and promoted_sandbox.head == engine.sandboxes.get("b").head


async def test_resume_and_delete_succeed_if_the_pause_snapshot_cannot_be_removed(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        for operation in (engine.sandboxes.resume, engine.sandboxes.delete):
            await engine.sandboxes.pause("a")
            host.removal_fails = True
            await operation("a")
            host.removal_fails = False
            assert all(each.state is SandboxState.RUNNING for each in engine.sandboxes.list())
        assert engine.sandboxes.list() == []
