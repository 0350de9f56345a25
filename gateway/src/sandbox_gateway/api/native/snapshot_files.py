"""Shared parts of the routes that export and import snapshots and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sandbox_gateway.api.access.pace import Pace
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.transfer.interrupted import Continuation
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.errors import Invalid
from sandbox_gateway.log import Logger

_FILE_TYPE = "application/octet-stream"
_PIECE_BYTES = 64 << 10
FILE_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {_FILE_TYPE: {}}, "description": "The snapshot file, sent while it is created"},
    206: {"content": {_FILE_TYPE: {}}, "description": "The rest of the snapshot file, from `offset`"},
}
FILE_BODY = {
    "requestBody": {"required": True, "content": {_FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
Trust = Annotated[
    list[str] | None,
    Query(max_length=16, description="Fingerprints of signers to accept in addition to this gateway's own"),
]

Resume = Annotated[
    str,
    Query(max_length=MAX_REF_LENGTH, description="The id of an interrupted import, to send the rest of its file"),
]
Offset = Annotated[int, Query(ge=0, description="With `resume`: the offset in the file at which the body begins")]

SkippedBytes = Annotated[
    int, Query(alias="offset", ge=0, description="Return only the bytes from this offset, with status 206")
]
SkippedDigest = Annotated[
    str, Query(alias="digest", pattern="^([0-9a-f]{64})?$", description="The SHA-256 of the bytes before `offset`")
]

log = Logger("transfers")


def build_continuation(resume: str, offset: int) -> Continuation | None:
    """Return which import the parameters of a request continue. Raises Invalid."""
    if offset and not resume:
        raise Invalid("'offset' is only for the rest of a file: remove it, or add 'resume'")
    return Continuation(resume, offset) if resume else None


async def respond(
    request: Request, export: Export, stalled_seconds: float, skipped_bytes: int, skipped_digest: str
) -> ExportResponse:
    """Return a response with the bytes of the file after ``skipped_bytes``, whose SHA-256 is ``skipped_digest``.

    Raises Conflict if the digest does not match. Closes the export if it raises.
    """
    if skipped_bytes:
        try:
            await cancel_on_disconnect(request, export.skip(skipped_bytes, skipped_digest))
        except BaseException:
            await export.close()
            raise
    return ExportResponse(export, stalled_seconds, status=206 if skipped_bytes else 200)


class ExportResponse(StreamingResponse):
    """A response that ends the export when the client disconnects, or reads too slowly for ``stalled_seconds``."""

    def __init__(self, export: Export, stalled_seconds: float, status: int = 200) -> None:
        super().__init__(export.read_pieces(), media_type=_FILE_TYPE, status_code=status)
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
