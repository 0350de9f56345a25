"""Send responses that contain a guest program's output.

The output can be up to 32 MiB, or six times as much when encoded as JSON. The responses are encoded and sent in pieces,
so that the event loop can serve other requests in between.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Iterator, Mapping

from starlette.responses import Response, StreamingResponse

Output = bytes | str
_PIECE_BYTES = 32 << 10
_MAX_UNSPLIT_BYTES = 64 << 10


def respond(fields: Mapping[str, Output | int | bool | None]) -> Response:
    """Return a response with ``fields`` as a JSON object. Bytes are decoded as UTF-8, with invalid ones replaced."""
    if sum(len(value) for value in fields.values() if isinstance(value, Output)) <= _MAX_UNSPLIT_BYTES:
        return Response(b"".join(_encode_object(fields)), media_type="application/json")
    return StreamingResponse(_merge_into_chunks(_encode_object(fields)), media_type="application/json")


async def _merge_into_chunks(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        if len(buffer) >= _PIECE_BYTES:
            yield bytes(buffer)
            buffer.clear()
            await asyncio.sleep(0)
    yield bytes(buffer)


def _encode_object(fields: Mapping[str, Output | int | bool | None]) -> Iterator[bytes]:
    separator = b"{"
    for name, value in fields.items():
        yield separator + json.dumps(name).encode() + b":"
        if isinstance(value, Output):
            yield b'"'
            yield from _encode_string(value)
            yield b'"'
        else:
            yield json.dumps(value).encode()
        separator = b","
    yield b"}"


def _encode_string(value: Output) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for start in range(0, len(value), _PIECE_BYTES):
        piece = value[start : start + _PIECE_BYTES]
        text = piece if isinstance(piece, str) else decoder.decode(piece)
        yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
    yield json.dumps(decoder.decode(b"", final=True), ensure_ascii=False)[1:-1].encode()
