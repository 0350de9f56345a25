"""A guest that fails to thaw its file system after the host has committed a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import Machine, MemoryHost


class _ThawFailingMachine(Machine):
    """A machine whose agent closes the connection instead of thawing the file system."""

    async def _handle_request(self, line: str, target: str, *arguments: Any) -> None:
        if target == "/thaw":
            raise OSError("the connection is closed")
        await super()._handle_request(line, target, *arguments)


class _Host(MemoryHost):
    machine_type = _ThawFailingMachine
    capture_fails = False

    async def capture(self, sandbox: Sandbox, snapshot: Snapshot, **options: Any) -> Snapshot:
        if self.capture_fails:
            raise BackendFailed("the disk cannot be read")
        return await super().capture(sandbox, snapshot, **options)


async def test_a_committed_capture_is_kept_if_the_thaw_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await create(engine, "a")
        snapshot = await engine.snapshots.create("a", name="s", memory="none")
        assert [each.id for each in engine.snapshots.list()] == [snapshot.id]
        assert engine.sandboxes.get("a").head == snapshot.id
    assert "thaw failed" in [record.message for record in caplog.records]


async def test_the_error_of_a_capture_is_reported_if_the_thaw_also_fails(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        host.capture_fails = True
        with pytest.raises(BackendFailed, match="the disk cannot be read"):
            await engine.snapshots.create("a", name="s", memory="none")
        assert engine.snapshots.list() == []
