"""The report of a host's room does not wait for a hung host."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_gateway.engine import room
from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.base import Room
from tests.support.memory_engine import opened_engine
from tests.support.memory_host import MemoryHost

pytestmark = pytest.mark.anyio


async def test_reports_do_not_pile_up_while_the_host_is_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_REPORT_TIMEOUT_SECONDS", 0.05)
    host = MemoryHost()
    host.abilities = replace(host.abilities, can_stall=False)  # The engine does not poll the room.
    async with opened_engine(tmp_path, host) as engine:
        original_room, response_event, call_count = host.measure_room, asyncio.Event(), 0

        async def hang() -> Room:
            nonlocal call_count
            call_count += 1
            await response_event.wait()
            return await original_room()

        monkeypatch.setattr(host, "measure_room", hang)
        for _ in range(3):
            with pytest.raises(Timeout, match="did not report its free space"):
                await engine.room.report()
        assert call_count == 1
        response_event.set()
        assert (await engine.room.report()).room == await original_room()

        async def fail() -> Room:
            raise BackendFailed("no pool")

        monkeypatch.setattr(host, "measure_room", fail)
        with pytest.raises(BackendFailed, match="no pool"):
            await engine.room.report()
