"""Send answers that contain the output of a guest's program: up to 32 MiB, and six times as much when encoded as JSON.

They are encoded and sent in pieces, so that the event loop can serve others in between.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Iterator, Mapping

from starlette.responses import Response, StreamingResponse

Output = bytes | str
_PIECE = 32 << 10
_SMALL = 64 << 10


def respond(fields: Mapping[str, Output | int | bool | None]) -> Response:
    """Return a response with a JSON object. Output in bytes becomes text: invalid UTF-8 is replaced."""
    if sum(len(value) for value in fields.values() if isinstance(value, Output)) <= _SMALL:
        return Response(b"".join(_object(fields)), media_type="application/json")
    return StreamingResponse(_yield_in_pieces(_object(fields)), media_type="application/json")


async def _yield_in_pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= _PIECE:
            yield bytes(waiting)
            waiting.clear()
            await asyncio.sleep(0)
    yield bytes(waiting)


def _object(fields: Mapping[str, Output | int | bool | None]) -> Iterator[bytes]:
    before = b"{"
    for name, value in fields.items():
        yield before + json.dumps(name).encode() + b":"
        if isinstance(value, Output):
            yield b'"'
            yield from _string(value)
            yield b'"'
        else:
            yield json.dumps(value).encode()
        before = b","
    yield b"}"


def _string(value: Output) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for start in range(0, len(value), _PIECE):
        piece = value[start : start + _PIECE]
        text = piece if isinstance(piece, str) else decoder.decode(piece)
        yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
    yield json.dumps(decoder.decode(b"", final=True), ensure_ascii=False)[1:-1].encode()
