"""Exports read and compress several chunks concurrently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, Decoder
from sandbox_gateway.hosts.base import SnapshotPart
from tests.support.memory_engine import build, create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost, MemorySource

pytestmark = pytest.mark.anyio

_DISK = b"".join(bytes([number % 3]) * CHUNK_BYTES for number in range(20)) + b"end"
"""Every third chunk consists of zeros."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with opened_engine(tmp_path, MemoryHost()) as engine:
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
    file = b"".join([piece async for piece in export.read_pieces()])
    await export.close()
    decoder = Decoder()
    decoder.feed(file)
    places = [(chunk.offset, chunk.data) for chunk in decoder.read_chunks() if chunk.part.name is SnapshotPart.DISK]
    decoder.close()
    starts = [start for start in range(0, len(_DISK), CHUNK_BYTES) if start // CHUNK_BYTES % 3 or start == 20 << 20]
    assert places == [(start, _DISK[start : start + CHUNK_BYTES]) for start in starts]


async def test_odd_extents_become_whole_blocks_that_an_import_accepts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems report extents that neither begin nor end at a block."""
    size, original_read = (64 << 10) + 100, MemorySource.read
    extents = [(1, 2), (4000, 4097), (8192, 8193), (20000, 20001), (20479, 20480), (65600, size)]
    export = await engine.transfers.export("s")
    monkeypatch.setattr(
        MemorySource,
        "extents",
        lambda source, part: extents if part == SnapshotPart.DISK else [(0, len(source.contents[part]))],
    )
    monkeypatch.setattr(
        MemorySource,
        "read",
        lambda *place: b"x" * place[-1] if place[1] == SnapshotPart.DISK else original_read(*place),
    )
    assert isinstance(export._source, MemorySource)
    export._source.sizes[SnapshotPart.DISK] = size
    export.prepare()
    file = b"".join([piece async for piece in export.read_pieces()])
    await export.close()
    decoder = Decoder()
    decoder.feed(file)
    chunks = [chunk for chunk in decoder.read_chunks() if chunk.part.name is SnapshotPart.DISK]
    decoder.close()
    assert [(chunk.offset, len(chunk.data)) for chunk in chunks] == [(0, 12288), (16384, 4096), (65536, 100)]
    assert chunks[0].part.data_bytes == 12288 + 4096 + 100


async def test_the_source_is_closed_only_after_its_last_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    release_event, read_count = threading.Event(), 0

    def read(source: MemorySource, part: SnapshotPart, offset: int, length: int) -> bytes:
        nonlocal read_count
        read_count += 1
        assert release_event.wait(30) and not source.is_closed
        return b"x" * length

    monkeypatch.setattr(MemorySource, "read", read)
    export = await engine.transfers.export("s")
    source = export._source
    assert isinstance(source, MemorySource)
    pieces = export.read_pieces()
    await anext(pieces)
    read_task = asyncio.create_task(anext(pieces))
    await wait_until(lambda: read_count)
    read_task.cancel()
    close_task = asyncio.create_task(export.close())
    await asyncio.sleep(0.05)
    assert not source.is_closed
    release_event.set()
    await close_task
    assert source.is_closed
    with pytest.raises(asyncio.CancelledError):
        await read_task
    assert all(not task.cancelled() and task.exception() is None for task in export._pending_tasks)
