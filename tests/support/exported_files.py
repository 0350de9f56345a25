"""Read an export completely, and pass it to an import."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

from sandbox_gateway.engine.transfer.transfers import Export


async def read_export(opening: Awaitable[Export]) -> list[bytes]:
    """Open an export, and return the pieces of its file."""
    export = await opening
    try:
        return [piece async for piece in export.read_pieces()]
    finally:
        await export.close()


async def iterate_pieces(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a file, as an import expects them."""
    for piece in pieces:
        yield piece
