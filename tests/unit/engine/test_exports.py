"""Exports read and compress several chunks at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, Decoder
from sandbox_gateway.hosts.base import SnapshotPart
from tests.api.memory_host import MemoryHost, MemorySource
from tests.support.memory_engine import build, create, open_engine, wait_until

pytestmark = pytest.mark.anyio

_DISK = b"".join(bytes([number % 3]) * CHUNK_BYTES for number in range(20)) + b"end"
"""Every third chunk consists of zeros."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with open_engine(tmp_path, MemoryHost()) as engine:
        await build(engine, "t")
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        yield engine


async def test_chunks_are_in_order_and_zeros_are_left_out(engine: Engine) -> None:
    export = await engine.transfers.export("s")
    assert isinstance(export._source, MemorySource)
    export._source.contents[SnapshotPart.DISK] = _DISK
    export._source.sizes[SnapshotPart.DISK] = len(_DISK)
    export.prepare()
    file = b"".join([piece async for piece in export.pieces()])
    await export.close()
    decoder = Decoder()
    decoder.feed(file)
    places = [(chunk.offset, chunk.data) for chunk in decoder.read_chunks() if chunk.part.name is SnapshotPart.DISK]
    decoder.close()
    starts = [start for start in range(0, len(_DISK), CHUNK_BYTES) if start // CHUNK_BYTES % 3 or start == 20 << 20]
    assert places == [(start, _DISK[start : start + CHUNK_BYTES]) for start in starts]


async def test_the_source_is_closed_only_after_its_last_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    release, reads = threading.Event(), 0

    def read(source: MemorySource, part: SnapshotPart, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        assert release.wait(30) and not source.is_closed
        return b"x" * length

    monkeypatch.setattr(MemorySource, "read", read)
    export = await engine.transfers.export("s")
    source = export._source
    assert isinstance(source, MemorySource)
    pieces = export.pieces()
    await anext(pieces)
    reader = asyncio.create_task(anext(pieces))
    await wait_until(lambda: reads)
    reader.cancel()
    closing = asyncio.create_task(export.close())
    await asyncio.sleep(0.05)
    assert not source.is_closed
    release.set()
    await closing
    assert source.is_closed
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert all(not task.cancelled() and task.exception() is None for task in export._pending)
