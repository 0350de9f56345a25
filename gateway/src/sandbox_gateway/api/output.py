"""Send large responses in pieces, and limit how much of them clients have not received yet.

A guest program's output can be up to 32 MiB, or six times as much when encoded as JSON. It is encoded while it is sent,
so that the event loop can serve other requests in between.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.auth import get_caller, is_local
from sandbox_gateway.errors import Busy, OutputLost

Output = bytes | str
MAX_UNSENT_BYTES = 512 << 20
"""Maximum memory for all large responses that clients with keys have not completely received.

A single key can use only half of it, so that the users of other keys can still run commands. In addition, the Unix
socket can use as much as one key.
"""
MAX_UNSENT_BYTES_PER_SANDBOX = 192 << 20
"""The same limit for the output of one sandbox. A single string of 48 MiB takes this much memory if any of its
characters needs four bytes.
"""
_PIECE_BYTES = 32 << 10
_MAX_UNSPLIT_BYTES = 16 << 10
"""Maximum size of a body that is sent in one piece and never counts as unsent, because it takes little memory."""
_LARGE_RESPONSE_TYPE = "sandbox_gateway.large_response"
"""The type of the ASGI message that a response sends to pass itself to ``LargeResponseMiddleware``."""
_unsent_bytes: Counter[str] = Counter()
"""The total size of the unsent responses, by the owner of the limit. Error messages contain these keys."""


def build_response(sandbox: str, fields: Mapping[str, Output | int | bool | None]) -> Response:
    """Return a response with ``fields`` as a JSON object. Bytes are decoded as UTF-8, with invalid ones replaced.

    ``sandbox``: the id of the sandbox.
    """
    outputs = [value for value in fields.values() if isinstance(value, Output)]
    pieces = _encode_object(fields)
    if sum(map(len, outputs)) <= _MAX_UNSPLIT_BYTES:
        return Response(b"".join(pieces), media_type="application/json")
    return _LargeResponse(pieces, sum(map(sys.getsizeof, outputs)), sandbox, media_type="application/json")


class _LargeResponse(StreamingResponse):
    """A response that ``LargeResponseMiddleware`` sends."""

    def __init__(
        self, pieces: Iterator[bytes], size: int, sandbox: str = "", status: int = 200, media_type: str | None = None
    ) -> None:
        """Create a response. ``size``: the memory that it takes. ``sandbox``: the sandbox whose output it contains."""
        super().__init__(_merge_into_chunks(pieces), status, media_type=media_type)
        self.size = size
        self.sandbox = sandbox

    @classmethod
    def from_messages(cls, start: Message, bodies: Sequence[bytes]) -> _LargeResponse:
        response = cls(_split(bodies), sum(map(len, bodies)), status=start["status"])
        response.raw_headers = [*start["headers"]]
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": _LARGE_RESPONSE_TYPE, "response": self})


class LargeResponseMiddleware:
    """Middleware that sends large responses when the request is finished, so that only the response takes memory.

    A response counts as unsent until the client has received it or disconnected. Beyond the limits, raises Busy if the
    client can repeat the request, and OutputLost otherwise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response: _LargeResponse | None = None
        start: Message | None = None
        bodies: list[bytes] = []

        async def send_unless_large(message: Message) -> None:
            nonlocal response, start
            if message["type"] == _LARGE_RESPONSE_TYPE:
                response = message["response"]
            elif message["type"] == "http.response.start" and _read_declared_length(message) > _MAX_UNSPLIT_BYTES:
                start = message
            elif start is not None:
                bodies.append(message["body"])
            else:
                await send(message)

        await self.app(scope, receive, send_unless_large)
        if start is not None:
            response = _LargeResponse.from_messages(start, bodies)
        if response is not None:
            with _counted_as_unsent(response, scope):
                await response.stream_response(send)


def _read_declared_length(start: Message) -> int:
    return int(Headers(raw=start["headers"]).get("content-length", 0))


@contextlib.contextmanager
def _counted_as_unsent(response: _LargeResponse, scope: Scope) -> Iterator[None]:
    limits = _choose_limits(response, scope)
    for owner, limit in limits.items():
        if _unsent_bytes[owner] + response.size > limit:
            reason = f"the responses {owner} that clients have not received yet would exceed {limit >> 20} MiB"
            if scope["method"] in ("GET", "HEAD") or response.status_code >= 400:
                raise Busy(f"{reason}: receive earlier responses first, or request shorter lists with `limit`")
            raise OutputLost(
                f"the request has been carried out, but its response is lost: {reason}. Receive earlier responses "
                "first, and write large output of commands to files"
            )
    for owner in limits:
        _unsent_bytes[owner] += response.size
    try:
        yield
    finally:
        for owner in limits:
            _unsent_bytes[owner] -= response.size
            if not _unsent_bytes[owner]:
                del _unsent_bytes[owner]


def _choose_limits(response: _LargeResponse, scope: Scope) -> dict[str, int]:
    if is_local(scope):
        return {"over the Unix socket": MAX_UNSENT_BYTES // 2}
    limits = {f"of sandbox {response.sandbox}": MAX_UNSENT_BYTES_PER_SANDBOX} if response.sandbox else {}
    return limits | {f"to caller {get_caller(scope).name!r}": MAX_UNSENT_BYTES // 2, "to all keys": MAX_UNSENT_BYTES}


def _split(bodies: Sequence[bytes]) -> Iterator[bytes]:
    return (body[start : start + _PIECE_BYTES] for body in bodies for start in range(0, len(body), _PIECE_BYTES))


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
