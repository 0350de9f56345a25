"""Shutting down the engine while an operation commits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.records import Sandbox
from tests.support.memory_engine import Gate, create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    is_closed = False

    def __init__(self) -> None:
        super().__init__()
        self.gate: Gate | None = None
        self.has_saved_after_close = False

    async def save(self, sandbox: Sandbox) -> None:
        if self.gate:
            await self.gate()
        self.has_saved_after_close = self.is_closed
        await super().save(sandbox)

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


async def test_close_waits_for_commits_whose_callers_were_cancelled(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "a")
        host.gate = Gate()
        update_task = asyncio.create_task(engine.sandboxes.update("a", metadata={"x": "y"}))
        await host.gate.reached.wait()
        update_task.cancel()
        close_task = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        assert not close_task.done() and not host.is_closed
        host.gate.opened.set()
        await close_task
    assert host.saved_sandboxes[sandbox.id].metadata == {"x": "y"} and not host.has_saved_after_close


async def test_close_does_not_wait_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_gateway.engine.engine._CLOSE_TIMEOUT_SECONDS", 0.05)

    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        host.gate = Gate()
        update_task = asyncio.create_task(engine.sandboxes.update("a", metadata={}))
        await host.gate.reached.wait()
        await engine.close()
        assert host.is_closed
        host.gate.opened.set()
        await update_task
