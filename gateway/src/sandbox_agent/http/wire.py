"""HTTP/1.1 on one connection: read requests and write answers, each in one write if possible.

It does not use ``http.server``, which is slow to import and does not support chunked bodies.
"""

from __future__ import annotations

import json
import time

from sandbox_agent.failure import Failure, invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

MAX_HEAD = 64 << 10
MAX_JSON = 32 << 20
PIECE = 64 << 10
_MAX_DIGITS = 18

REASONS = {
    200: b"OK",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    409: b"Conflict",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    507: b"Insufficient Storage",
}
_OK_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


class Gone(Exception):
    """The peer closed the connection or does not speak HTTP, so no answer is possible."""


class Connection:
    """A socket, and the bytes that were read from it but not consumed yet."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.ahead = b""

    def receive(self) -> bytes:
        """Receive bytes from the peer. Raises Gone at the end of the stream."""
        try:
            data = self.sock.recv(PIECE)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        return data

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise Gone from error

    def take(self, most: int) -> bytes:
        """Return at least one and at most ``most`` bytes."""
        data = self.ahead or self.receive()
        self.ahead = data[most:]
        return data[:most]

    def take_until(self, mark: bytes, most: int) -> bytes:
        """Return the bytes before ``mark``. Raises Gone if ``mark`` is not within the first ``most`` bytes."""
        data = self.ahead
        end = data.find(mark)
        while end < 0:
            if len(data) > most:
                raise Gone
            start = max(0, len(data) - len(mark))
            data += self.receive()
            end = data.find(mark, start)
        if end > most:
            raise Gone
        self.ahead = data[end + len(mark) :]
        return data[:end]


class Body:
    """The body of a request, read piece by piece. ``length`` None: chunked."""

    def __init__(self, connection: Connection, length: int | None, expects: bool) -> None:
        self._connection = connection
        self._chunked = length is None
        self._left = length or 0
        self._expects = expects
        self.finished = length == 0

    def read(self, most: int = PIECE) -> bytes:
        """Read at most ``most`` bytes; b"" at the end."""
        if self.finished:
            return b""
        if self._expects:
            self._expects = False
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._chunked and not self._left and not self._next_chunk():
            self.finished = True
            return b""
        data = self._connection.take(min(most, self._left))
        self._left -= len(data)
        if not self._left:
            if self._chunked:
                self._connection.take_until(b"\r\n", 2)
            else:
                self.finished = True
        return data

    def _next_chunk(self) -> bool:
        line = self._connection.take_until(b"\r\n", 1024)
        try:
            self._left = int(line.split(b";", 1)[0].strip(), 16)
        except ValueError:
            raise Gone from None
        if self._left < 0:
            raise Gone
        while not self._left:
            if not self._connection.take_until(b"\r\n", MAX_HEAD):
                return False
        return True

    def read_all(self, cap: int = MAX_JSON) -> bytes:
        if not self._chunked and self._left > cap:
            raise Failure("resource_exhausted", f"the request body is larger than {cap} bytes", 413)
        pieces, size = [], 0
        while not self.finished:
            piece = self.read()
            pieces.append(piece)
            size += len(piece)
            if size > cap:
                raise Failure("resource_exhausted", f"the request body is larger than {cap} bytes", 413)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self) -> bool:
        """Read to the end if the rest is short and its length is known; False otherwise."""
        if self.finished:
            return True
        if self._chunked or self._expects or self._left > PIECE:
            return False
        while not self.finished:
            self.read()
        return True

    def discard(self, seconds: float) -> None:
        """Read to the end, for at most ``seconds``.

        Without this, a peer that still sends would get a reset instead of the answer.
        """
        until = time.monotonic() + seconds
        while not self.finished and not self._expects and time.monotonic() < until:
            self.read()


class Request:
    """A request. ``headers``: by lower-case name; the last one wins. ``parameter``: see ``server.Server``."""

    def __init__(self, connection: Connection, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        try:
            self.method, target, version = lines[0].split(" ")
        except ValueError:
            raise Gone from None
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self.headers = headers
        self.path, _, self._query = target.partition("?")
        self.parameter = ""
        self.peer = connection.peer
        self.modern = version != "HTTP/1.0"
        self.keep = self.modern and "close" not in headers.get("connection", "").lower()
        expects = headers.get("expect", "").lower() == "100-continue"
        self.body = Body(connection, _length(headers), expects)

    def query(self) -> dict[str, str]:
        """Return the query's parameters; of a repeated parameter, the last one wins."""
        if not self._query:
            return {}
        from urllib.parse import parse_qsl

        return dict(parse_qsl(self._query, keep_blank_values=True))

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; an empty body is an empty object."""
        return parse_object(self.body.read_all())


def _length(headers: dict[str, str]) -> int | None:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return None
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise Gone
    return int(text)


def parse_object(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid("the request must be a JSON object")
    return value


class Reply:
    """The answer to one request.

    Call ``send`` or ``json`` once; or ``begin``, then ``write`` any number of times, then ``end``.
    """

    def __init__(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self._request = request
        self.begun = False
        self.complete = False

    def json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        if status == 200 and self._request.keep:
            self.begun = True
            self.connection.send(_OK_JSON % (len(body), body))
            self.complete = True
        else:
            self.send(status, body, b"application/json")

    def send(self, status: int, body: bytes = b"", kind: bytes = b"", extra: bytes = b"") -> None:
        head = self._head(status, kind, extra)
        if status != 204:
            head += b"Content-Length: %d\r\n" % len(body)
        self.begun = True
        self.connection.send(head + b"\r\n" + body)
        self.complete = True

    def begin(self, kind: bytes, first: bytes = b"", *, length: int | None = None, extra: bytes = b"") -> None:
        """Send the head and the first bytes of a streamed answer; it is chunked unless ``length`` is given."""
        head = self._head(200, kind, extra)
        self._chunked = length is None and self._request.modern
        if length is not None:
            head += b"Content-Length: %d\r\n" % length
        elif self._chunked:
            head += b"Transfer-Encoding: chunked\r\n"
        else:
            self._request.keep = False
        self.begun = True
        self.connection.send(head + b"\r\n" + self._framed(first))

    def write(self, data: bytes) -> None:
        if data:
            self.connection.send(self._framed(data))

    def end(self, last: bytes = b"") -> None:
        data = self._framed(last) + (b"0\r\n\r\n" if self._chunked else b"")
        if data:
            self.connection.send(data)
        self.complete = True

    def _framed(self, data: bytes) -> bytes:
        if not data or not self._chunked:
            return data
        return b"%x\r\n%s\r\n" % (len(data), data)

    def _head(self, status: int, kind: bytes, extra: bytes) -> bytes:
        head = b"HTTP/1.1 %d %s\r\n" % (status, REASONS.get(status, b"Error"))
        if kind:
            head += b"Content-Type: " + kind + b"\r\n"
        if not self._request.keep:
            head += b"Connection: close\r\n"
        return head + extra
