"""Send responses that contain a guest program's output.

The output can be up to 32 MiB, or six times as much when encoded as JSON. The responses are encoded and sent in pieces,
so that the event loop can serve other requests in between.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sandbox_gateway.api.access.auth import caller_of
from sandbox_gateway.errors import OutputLost

Output = bytes | str
MAX_UNSENT_BYTES = 512 << 20
"""Maximum memory for the large outputs of all sandboxes that clients have not received completely.

One key can use half of it, so that it does not prevent others from running commands.
"""
MAX_UNSENT_BYTES_PER_SANDBOX = 192 << 20
"""The same for one sandbox. A single text of 48 MiB takes this much if one of its characters takes four bytes."""
_PIECE_BYTES = 32 << 10
_MAX_UNSPLIT_BYTES = 16 << 10
"""Maximum size of an output that is sent in one piece and never counts as unsent: even thousands of them are small."""
_unsent_bytes: Counter[str] = Counter()
"""The size of the outputs that count as unsent, by the owner of a limit as error messages name it."""


def respond(sandbox: str, fields: Mapping[str, Output | int | bool | None]) -> Response:
    """Return a response with ``fields`` as a JSON object. Bytes are decoded as UTF-8, with invalid ones replaced.

    ``sandbox``: the id of the sandbox. Sending the response raises OutputLost if too much output has not been sent yet.
    """
    outputs = [value for value in fields.values() if isinstance(value, Output)]
    if sum(map(len, outputs)) <= _MAX_UNSPLIT_BYTES:
        return Response(b"".join(_encode_object(fields)), media_type="application/json")
    return _LargeResponse(sandbox, sum(map(sys.getsizeof, outputs)), fields)


class _LargeResponse(StreamingResponse):
    """A response that counts as unsent until the client has received it or disconnected."""

    def __init__(self, sandbox: str, size: int, fields: Mapping[str, Output | int | bool | None]) -> None:
        super().__init__(_merge_into_chunks(_encode_object(fields)), media_type="application/json")
        self._sandbox = sandbox
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _counted_as_unsent(self._sandbox, caller_of(scope).name, self._size):
            await super().__call__(scope, receive, send)


@contextlib.contextmanager
def _counted_as_unsent(sandbox: str, caller: str, size: int) -> Iterator[None]:
    limits = {
        f"sandbox {sandbox}": MAX_UNSENT_BYTES_PER_SANDBOX,
        f"caller {caller!r}": MAX_UNSENT_BYTES // 2,
        "all sandboxes together": MAX_UNSENT_BYTES,
    }
    for owner, limit in limits.items():
        if _unsent_bytes[owner] + size > limit:
            raise OutputLost(
                f"the command has run, but its output is lost: the output of {owner} that clients have not received "
                f"yet would exceed {limit >> 20} MiB. Receive the responses of earlier commands before you run more "
                "commands with large output, or write the output to a file"
            )
    for owner in limits:
        _unsent_bytes[owner] += size
    try:
        yield
    finally:
        for owner in limits:
            _unsent_bytes[owner] -= size
            if not _unsent_bytes[owner]:
                del _unsent_bytes[owner]


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
