"""A client that stalls an export or an import does not count towards `limits.transfers` forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from sandbox_gateway.api.access import pace
from sandbox_gateway.api.access.limits import IMPORT_PATH, VOLUME_IMPORT_PATH, BodyLimitMiddleware, TooSlow
from sandbox_gateway.api.access.signed_urls import UPLOAD_PREFIX
from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.api.native.snapshot_files import ExportResponse

pytestmark = pytest.mark.anyio

STALLED_SECONDS = 0.2
SIZE = 4 << 20
"""A client that is fast enough takes longer than one period for this many bytes."""


class FakeExport:
    is_closed = False

    async def read_pieces(self) -> AsyncIterator[bytes]:
        for _ in range(SIZE >> 20):
            yield bytes(1 << 20)

    async def close(self) -> None:
        self.is_closed = True


async def send_export(seconds_per_piece: float) -> tuple[FakeExport, int]:
    """Send an export to a client that takes ``seconds_per_piece`` per piece. Return it and the number of sent bytes."""
    export, sent_bytes = FakeExport(), 0

    async def send(message: Message) -> None:
        nonlocal sent_bytes
        await asyncio.sleep(seconds_per_piece)
        sent_bytes += len(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    response = ExportResponse(export, STALLED_SECONDS)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(10):
            await response({"type": "http", "path": "/snapshots/s/export"}, receive, send)
    except ClientGone:
        pass
    return export, sent_bytes


@pytest.mark.parametrize("seconds_per_piece", [3600, 0.15], ids=["not at all", "slowly"])
async def test_an_export_ends_if_its_client_reads_too_slowly(
    seconds_per_piece: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also applies to the Unix socket, where nothing else limits how long a client may stall."""
    monkeypatch.setattr(pace, "MIN_BYTES_PER_SECOND", 1 << 20)
    export, sent_bytes = await send_export(seconds_per_piece)
    assert export.is_closed and sent_bytes < SIZE // 2


async def test_an_export_to_a_slow_client_above_the_limit_is_complete() -> None:
    export, sent_bytes = await send_export(0.005)
    assert export.is_closed and sent_bytes == SIZE


def make_receiver(pieces: Iterator[bytes], seconds_per_piece: float) -> Receive:
    async def receive() -> Message:
        await asyncio.sleep(seconds_per_piece)
        piece = next(pieces, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    return receive


FILES = pytest.mark.parametrize(
    ("method", "path"),
    [("POST", IMPORT_PATH), ("POST", VOLUME_IMPORT_PATH), ("PUT", f"{UPLOAD_PREFIX}{'0' * 64}")],
    ids=["import", "volume import", "upload"],
)


async def send_file(receive: Receive, method: str, path: str) -> int:
    size = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal size
        while (message := await receive())["more_body"]:
            size += len(message["body"])

    scope: dict[str, Any] = {"type": "http", "path": path, "method": method, "headers": []}
    middleware = BodyLimitMiddleware(app, seconds=10, stalled_seconds=STALLED_SECONDS)

    async def send(message: Message) -> None:
        raise AssertionError

    async with asyncio.timeout(10):
        await middleware(scope, receive, send)
    return size


@FILES
async def test_an_import_that_sends_one_byte_at_a_time_ends(method: str, path: str) -> None:
    with pytest.raises(TooSlow, match=r"server\.stalled_seconds.* arrived at less than 64 KiB per second"):
        await send_file(make_receiver(iter([b"x"] * 1000), 0.02), method, path)


@FILES
async def test_an_import_from_a_slow_client_above_the_limit_is_complete(method: str, path: str) -> None:
    assert await send_file(make_receiver(iter([bytes(1 << 16)] * 64), 0.005), method, path) == SIZE
