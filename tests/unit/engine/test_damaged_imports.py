"""A file that is cut, damaged or too new is refused with a sentence, and leaves nothing behind in the engine."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.transfer.container import MAGIC, VERSION
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import MemoryHost

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with opened_engine(tmp_path, MemoryHost()) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        await engine.volumes.create("v", size_mb=64)
        await engine.volumes.create_snapshot("v", "s")
        yield engine


async def read_file(export: Export) -> bytes:
    try:
        return b"".join([piece async for piece in export.read_pieces()])
    finally:
        await export.close()


async def import_file(engine: Engine, kind: str, file: bytes) -> None:
    async def read() -> AsyncIterator[bytes]:
        yield file

    if kind == "volume":
        await engine.transfers.import_volume(read(), name="new")
    else:
        await engine.transfers.import_(read(), name="new")


async def export_file(engine: Engine, kind: str) -> bytes:
    export = engine.transfers.export_volume("v", "s") if kind == "volume" else engine.transfers.export("s")
    return await read_file(await export)


async def check_refused(engine: Engine, kind: str, file: bytes, error: type[GatewayError], message: str) -> None:
    """Check that a file is refused, and that nothing of it is left."""
    objects = {*engine.index.snapshots, *engine.index.volumes}
    with pytest.raises(error, match=message) as error_info:
        await import_file(engine, kind, file)
    assert len(error_info.value.message) < 700
    assert isinstance(engine.host, MemoryHost)
    assert engine.host.partial_imports == set() and {*engine.index.snapshots, *engine.index.volumes} == objects
    assert engine.transfers.interrupted_imports.list() == []
    assert engine.room._pending_imports == [] and engine.transfers._active_count == 0


@pytest.mark.parametrize("kind", ["sandbox", "volume"])
async def test_a_small_export_cut_at_every_byte_leaves_nothing_behind(engine: Engine, kind: str) -> None:
    file = await export_file(engine, kind)
    assert len(file) < 4000
    for size in range(len(file)):
        await check_refused(engine, kind, file[:size], Invalid, r"^the snapshot file is (empty|incomplete)")
    await import_file(engine, kind, file)


@pytest.mark.parametrize("kind", ["sandbox", "volume"])
async def test_a_small_export_with_changed_bytes_leaves_nothing_behind(engine: Engine, kind: str) -> None:
    file = await export_file(engine, kind)
    generator = random.Random(19)
    for _ in range(100):
        changed_file = bytearray(file)
        changed_file[generator.randrange(len(MAGIC) + 2, len(file))] ^= 1 << generator.randrange(8)
        await check_refused(engine, kind, bytes(changed_file), Invalid, "damaged|incomplete")


async def test_a_file_of_a_newer_version_leaves_nothing_behind(engine: Engine) -> None:
    file = await export_file(engine, "sandbox")
    newer_file = MAGIC + (VERSION + 1).to_bytes(2, "big") + file[len(MAGIC) + 2 :]
    for kind in ("sandbox", "volume"):
        await check_refused(engine, kind, newer_file, Unsupported, "format version .*: upgrade this gateway")
