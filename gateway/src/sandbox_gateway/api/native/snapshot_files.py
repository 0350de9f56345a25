"""Shared parts of the routes that export and import snapshots and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sandbox_gateway.api.access.pace import Pace
from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.log import Logger

_FILE_TYPE = "application/octet-stream"
_PIECE_BYTES = 64 << 10
FILE_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {_FILE_TYPE: {}}, "description": "The snapshot file, sent while it is created"}
}
FILE_BODY = {
    "requestBody": {"required": True, "content": {_FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
Trust = Annotated[
    list[str] | None,
    Query(max_length=16, description="Fingerprints of signers to accept in addition to this gateway's own"),
]

log = Logger("transfers")


class ExportResponse(StreamingResponse):
    """A response that ends the export when the client disconnects, or reads too slowly for ``stalled_seconds``."""

    def __init__(self, export: Export, stalled_seconds: float) -> None:
        super().__init__(export.read_pieces(), media_type=_FILE_TYPE)
        self._export = export
        self._stalled_seconds = stalled_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pace = Pace(self._stalled_seconds)

        async def send_in_time(message: Message) -> None:
            for part in _split(message):
                try:
                    await pace.wait_for_client(send(part))
                except TimeoutError:
                    log.warning("export ended because its client reads too slowly", path=scope["path"])
                    raise ClientGone from None
                pace.count(len(part.get("body", b"")))

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            await self._export.close()


def _split(message: Message) -> Iterator[Message]:
    """Split the body of a message, so that the pace of a slow client can be measured."""
    body = message.get("body", b"")
    if len(body) <= _PIECE_BYTES:
        yield message
        return
    for start in range(0, len(body), _PIECE_BYTES):
        is_last = start + _PIECE_BYTES >= len(body)
        yield {
            **message,
            "body": body[start : start + _PIECE_BYTES],
            "more_body": message.get("more_body", False) or not is_last,
        }
