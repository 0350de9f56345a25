"""The Connect protocol with the JSON codec: https://connectrpc.com/docs/protocol

A unary call is a JSON object each way. A streamed one is frames: a byte of flags, a big-endian 32-bit length, JSON; the
last frame of an answer has flag 2 and says whether it went well.
"""

from __future__ import annotations

import json
import select
import struct
import time

from sandbox_agent.failure import Failure, invalid, of_os_error
from sandbox_agent.server import Route
from sandbox_agent.wire import MAX_JSON, Gone, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.wire import Body, Reply, Request

KEEPALIVE_SECONDS = 50.0
_FRAME = struct.Struct(">BI")
_COMPRESSED, _LAST = 1, 2


def unary(call: Callable[[Request, dict[str, Any]], dict[str, Any] | bytes]) -> Route:
    """A route that answers a JSON object with ``call``'s JSON object, which may be written already."""

    def handler(request: Request, reply: Reply) -> None:
        if request.headers.get("content-type", "application/json").partition(";")[0].strip() != "application/json":
            raise Failure("unimplemented", "this call takes Content-Type application/json", 415)
        answer = call(request, request.json())
        if isinstance(answer, bytes):
            reply.send(200, answer, b"application/json")
        else:
            reply.json(answer)

    return Route(handler, named=True)


def streamed(call: Callable[[Request, Stream], None]) -> Route:
    """A route on which ``call`` receives and sends frames; its Failure goes into the last frame."""

    def handler(request: Request, reply: Reply) -> None:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/connect+json":
            raise Failure("unimplemented", "this call takes Content-Type application/connect+json", 415)
        stream = Stream(request, reply)
        try:
            call(request, stream)
        except Failure as failure:
            stream.end(failure)
        except OSError as error:
            stream.end(of_os_error(error))

    return Route(handler, named=True)


def frame(data: bytes, flags: int = 0) -> bytes:
    return _FRAME.pack(flags, len(data)) + data


class Stream:
    """Frames in and out.

    ``deadline``: of the monotonic clock, or None; ``keepalive``: seconds of silence after which the client wants to
    hear something.
    """

    GONE = getattr(select, "POLLRDHUP", select.POLLHUP)
    """What to poll the descriptor for to learn that the client went away; where that is not told, sending tells."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._body = request.body
        self._reply = reply
        timeout = request.headers.get("connect-timeout-ms", "")
        # "0" is how some clients spell "no deadline".
        milliseconds = int(timeout) if timeout.isdigit() else 0
        self.deadline = time.monotonic() + milliseconds / 1000 if milliseconds else None
        seconds = request.headers.get("keepalive-ping-interval", "")
        self.keepalive = (
            float(seconds) if seconds.isascii() and seconds.isdigit() and float(seconds) else KEEPALIVE_SECONDS
        )

    def fileno(self) -> int:
        return self._reply.connection.sock.fileno()

    def abandon(self) -> None:
        """End it without an answer: there is nobody to read one."""
        raise Gone

    def allow_silence(self, seconds: float) -> None:
        """How long the client may send nothing, or not read what is sent, before it counts as gone."""
        self._reply.connection.sock.settimeout(seconds)

    def receive(self) -> dict[str, Any] | None:
        """The next frame's object; None at the end of the request."""
        head = _exactly(self._body, _FRAME.size)
        if not head:
            return None
        flags, size = _FRAME.unpack(head)
        if size > MAX_JSON:
            raise Failure("resource_exhausted", f"a message is larger than {MAX_JSON} bytes")
        data = _exactly(self._body, size)
        if flags & _COMPRESSED:
            raise Failure("unimplemented", "compressed messages are not taken")
        return None if flags & _LAST else parse_object(data)

    def receive_only(self) -> dict[str, Any]:
        """The one message of the request."""
        message = self.receive()
        if message is None:
            raise invalid("the request has no message")
        self._body.read_all(1024)
        return message

    def send(self, frames: bytes) -> None:
        """Send frames that are made already (``frame``)."""
        if self._reply.begun:
            self._reply.write(frames)
        else:
            self._reply.begin(b"application/connect+json", frames)

    def end(self, failure: Failure | None = None, before: bytes = b"") -> None:
        """Send the last frame, in one write with the frames ``before`` it."""
        data = b"{}"
        if failure is not None:
            data = json.dumps({"error": {"code": failure.code, "message": failure.message}}).encode()
        if not self._reply.begun:
            self._reply.begin(b"application/connect+json")
        self._reply.end(before + frame(data, _LAST))


def _exactly(body: Body, size: int) -> bytes:
    """``size`` bytes, or b"" where the body ends before the first of them."""
    data = body.read(size)
    if len(data) == size or not data:
        return data
    pieces = [data]
    left = size - len(data)
    while left:
        data = body.read(left)
        if not data:
            raise invalid("the request ends within a message")
        pieces.append(data)
        left -= len(data)
    return b"".join(pieces)
