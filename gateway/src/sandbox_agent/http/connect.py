"""The Connect protocol with the JSON codec: https://connectrpc.com/docs/protocol

In a unary call, the request and the response are JSON objects. In a streaming call, they are sequences of frames. A
frame consists of a byte of flags, a big-endian 32-bit length, and JSON. The last frame of a response has flag 2 and
contains the error, if any.
"""

from __future__ import annotations

import json
import select
import struct
import time

from sandbox_agent.failure import Failure, from_os_error, invalid_argument
from sandbox_agent.http.server import Route
from sandbox_agent.http.wire import MAX_JSON_BYTES, ConnectionLost, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.wire import Body, Reply, Request

KEEPALIVE_SECONDS = 50.0
_FRAME_HEAD = struct.Struct(">BI")
_COMPRESSED, _END_OF_STREAM = 1, 2


def make_unary_route(call: Callable[[Request, dict[str, Any]], dict[str, Any] | bytes]) -> Route:
    """Return a route that responds with the result of ``call``: a dict or an encoded JSON object."""

    def handle(request: Request, reply: Reply) -> None:
        if request.headers.get("content-type", "application/json").partition(";")[0].strip() != "application/json":
            raise Failure("unimplemented", "this call requires Content-Type application/json", 415)
        response = call(request, request.json())
        if isinstance(response, bytes):
            reply.send(200, response, b"application/json")
        else:
            reply.json(response)

    return Route(handle, uses_connect_codes=True)


def make_streaming_route(call: Callable[[Request, Stream], None]) -> Route:
    """Return a route whose ``call`` receives and sends frames.

    If ``call`` raises Failure or OSError, the last frame contains the error.
    """

    def handle(request: Request, reply: Reply) -> None:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/connect+json":
            raise Failure("unimplemented", "this call requires Content-Type application/connect+json", 415)
        stream = Stream(request, reply)
        try:
            call(request, stream)
        except Failure as failure:
            stream.end(failure)
        except OSError as error:
            stream.end(from_os_error(error))

    return Route(handle, uses_connect_codes=True)


def encode_frame(data: bytes, flags: int = 0) -> bytes:
    return _FRAME_HEAD.pack(flags, len(data)) + data


class Stream:
    """A stream that receives and sends the frames of one call.

    ``deadline``: a time on the monotonic clock, or None; ``keepalive``: the number of seconds without a frame after
    which to send a keepalive.
    """

    HANGUP_EVENT = getattr(select, "POLLRDHUP", select.POLLHUP)
    """The poll event for a client that hangs up. If the system has no such event, the next write fails instead."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._body = request.body
        self._reply = reply
        timeout_header = request.headers.get("connect-timeout-ms", "")
        # Some clients send "0" for no deadline.
        timeout_ms = int(timeout_header) if timeout_header.isdigit() else 0
        self.deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else None
        interval_header = request.headers.get("keepalive-ping-interval", "")
        self.keepalive = (
            float(interval_header)
            if interval_header.isascii() and interval_header.isdigit() and float(interval_header)
            else KEEPALIVE_SECONDS
        )

    def fileno(self) -> int:
        return self._reply.connection.sock.fileno()

    def abandon(self) -> None:
        """End the call without a response, because the client has hung up."""
        raise ConnectionLost

    def set_idle_timeout(self, seconds: float) -> None:
        """Set the number of seconds after which to close the connection if the client neither sends nor reads."""
        self._reply.connection.sock.settimeout(seconds)

    def receive(self) -> dict[str, Any] | None:
        """Return the JSON object in the next frame; None at the end of the request."""
        head = _read_exactly(self._body, _FRAME_HEAD.size)
        if not head:
            return None
        flags, size = _FRAME_HEAD.unpack(head)
        if size > MAX_JSON_BYTES:
            raise Failure(
                "resource_exhausted", f"a message is larger than {MAX_JSON_BYTES} bytes: send smaller messages"
            )
        data = _read_exactly(self._body, size)
        if flags & _COMPRESSED:
            raise Failure("unimplemented", "compressed messages are not supported: send them uncompressed")
        return None if flags & _END_OF_STREAM else parse_object(data)

    def receive_single(self) -> dict[str, Any]:
        """Return the single message of the request."""
        message = self.receive()
        if message is None:
            raise invalid_argument("the request body is empty: send one frame with a JSON object")
        self._body.read_all(1024)
        return message

    def send(self, frames: bytes) -> None:
        """Send frames that were encoded with ``encode_frame``."""
        if self._reply.has_begun:
            self._reply.write(frames)
        else:
            self._reply.begin(b"application/connect+json", frames)

    def end(self, failure: Failure | None = None, frames: bytes = b"") -> None:
        """Send the encoded ``frames``, then the last frame, which contains ``failure`` if there is one."""
        data = b"{}"
        if failure is not None:
            data = json.dumps({"error": {"code": failure.code, "message": failure.message}}).encode()
        if not self._reply.has_begun:
            self._reply.begin(b"application/connect+json")
        self._reply.end(frames + encode_frame(data, _END_OF_STREAM))


def _read_exactly(body: Body, size: int) -> bytes:
    """Read ``size`` bytes; b"" if the body has already ended. Raises Failure if the body ends earlier."""
    data = body.read(size)
    if len(data) == size or not data:
        return data
    pieces = [data]
    remaining_size = size - len(data)
    while remaining_size:
        data = body.read(remaining_size)
        if not data:
            raise invalid_argument("the request body ends in the middle of a message: send the complete message")
        pieces.append(data)
        remaining_size -= len(data)
    return b"".join(pieces)
