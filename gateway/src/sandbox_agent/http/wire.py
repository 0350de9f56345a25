"""Read HTTP/1.1 requests from a connection and write responses, each in a single write if possible."""

from __future__ import annotations

import json
import time

from sandbox_agent.failure import Failure, invalid_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

MAX_HEAD_BYTES = 64 << 10
MAX_JSON_BYTES = 32 << 20
PIECE_SIZE = 64 << 10
_MAX_LENGTH_DIGITS = 18

REASON_PHRASES = {
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
_OK_JSON_FORMAT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


class ConnectionLost(Exception):
    """The peer closed the connection or does not speak HTTP, so the agent cannot respond."""


class Connection:
    """A socket, with a ``buffer`` of bytes that were received but not yet consumed."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.buffer = b""

    def receive(self) -> bytes:
        """Receive bytes from the peer. Raises ConnectionLost at the end of the stream."""
        try:
            data = self.sock.recv(PIECE_SIZE)
        except OSError as error:
            raise ConnectionLost from error
        if not data:
            raise ConnectionLost
        return data

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise ConnectionLost from error

    def take(self, limit: int) -> bytes:
        """Return between one and ``limit`` bytes."""
        data = self.buffer or self.receive()
        self.buffer = data[limit:]
        return data[:limit]

    def take_until(self, delimiter: bytes, limit: int) -> bytes:
        """Return the bytes before ``delimiter``. Raises ConnectionLost if there are more than ``limit`` bytes."""
        data = self.buffer
        end = data.find(delimiter)
        while end < 0:
            if len(data) > limit:
                raise ConnectionLost
            start = max(0, len(data) - len(delimiter))
            data += self.receive()
            end = data.find(delimiter, start)
        if end > limit:
            raise ConnectionLost
        self.buffer = data[end + len(delimiter) :]
        return data[:end]


class Body:
    """The body of a request, which callers read piece by piece. ``length``: None if the body is chunked."""

    def __init__(self, connection: Connection, length: int | None, expects_continue: bool) -> None:
        self._connection = connection
        self._is_chunked = length is None
        self._remaining_bytes = length or 0
        self._expects_continue = expects_continue
        self.is_finished = length == 0

    def read(self, limit: int = PIECE_SIZE) -> bytes:
        """Return between one and ``limit`` bytes; b"" at the end."""
        if self.is_finished:
            return b""
        if self._expects_continue:
            self._expects_continue = False
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._is_chunked and not self._remaining_bytes and not self._begin_chunk():
            self.is_finished = True
            return b""
        data = self._connection.take(min(limit, self._remaining_bytes))
        self._remaining_bytes -= len(data)
        if not self._remaining_bytes:
            if self._is_chunked:
                self._connection.take_until(b"\r\n", 2)
            else:
                self.is_finished = True
        return data

    def _begin_chunk(self) -> bool:
        line = self._connection.take_until(b"\r\n", 1024)
        try:
            self._remaining_bytes = int(line.split(b";", 1)[0].strip(), 16)
        except ValueError:
            raise ConnectionLost from None
        if self._remaining_bytes < 0:
            raise ConnectionLost
        while not self._remaining_bytes:
            if not self._connection.take_until(b"\r\n", MAX_HEAD_BYTES):
                return False
        return True

    def read_all(self, limit: int = MAX_JSON_BYTES) -> bytes:
        if not self._is_chunked and self._remaining_bytes > limit:
            raise _make_too_large_error(limit)
        pieces, size = [], 0
        while not self.is_finished:
            piece = self.read()
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise _make_too_large_error(limit)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self) -> bool:
        """Read the rest of the body and return True if it is short and its length is known; otherwise return False."""
        if self.is_finished:
            return True
        if self._is_chunked or self._expects_continue or self._remaining_bytes > PIECE_SIZE:
            return False
        while not self.is_finished:
            self.read()
        return True

    def discard(self, seconds: float) -> None:
        """Read and discard the rest of the body, for at most ``seconds``.

        Otherwise, a peer that is still sending would receive a reset instead of the response.
        """
        deadline = time.monotonic() + seconds
        while not self.is_finished and not self._expects_continue and time.monotonic() < deadline:
            self.read()


def _make_too_large_error(limit: int) -> Failure:
    message = f"the request body is larger than {limit} bytes: send a smaller body"
    return Failure("resource_exhausted", message, 413)


class Request:
    """An HTTP request.

    ``headers``: the header values by lower-case name (the last value if a header is repeated); ``parameter``: see
    ``server.Server``.
    """

    def __init__(self, connection: Connection, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        try:
            self.method, target, version = lines[0].split(" ")
        except ValueError:
            raise ConnectionLost from None
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self.headers = headers
        self.path, _, self._query = target.partition("?")
        self.parameter = ""
        self.peer = connection.peer
        self.accepts_chunked = version != "HTTP/1.0"
        self.keep_alive = self.accepts_chunked and "close" not in headers.get("connection", "").lower()
        expects_continue = headers.get("expect", "").lower() == "100-continue"
        self.body = Body(connection, _parse_content_length(headers), expects_continue)

    def query(self) -> dict[str, str]:
        """Return the query parameters. If a parameter is repeated, the last value wins."""
        if not self._query:
            return {}
        from urllib.parse import parse_qsl

        return dict(parse_qsl(self._query, keep_blank_values=True))

    def json(self) -> dict[str, Any]:
        """Return the JSON object in the body; an empty object if the body is empty."""
        return parse_object(self.body.read_all())


def _parse_content_length(headers: dict[str, str]) -> int | None:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return None
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_LENGTH_DIGITS):
        raise ConnectionLost
    return int(text)


def parse_object(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_argument("the request body must be a JSON object")
    return value


class Reply:
    """The response to one request.

    Call either ``send`` or ``json`` once, or ``begin``, ``write`` any number of times, and ``end``.
    """

    def __init__(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self._request = request
        self.has_begun = False
        self.is_complete = False

    def json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        if status == 200 and self._request.keep_alive:
            self.has_begun = True
            self.connection.send(_OK_JSON_FORMAT % (len(body), body))
            self.is_complete = True
        else:
            self.send(status, body, b"application/json")

    def send(self, status: int, body: bytes = b"", content_type: bytes = b"", extra_headers: bytes = b"") -> None:
        head = self._format_head(status, content_type, extra_headers)
        if status != 204:
            head += b"Content-Length: %d\r\n" % len(body)
        self.has_begun = True
        self.connection.send(head + b"\r\n" + body)
        self.is_complete = True

    def begin(
        self, content_type: bytes, first_data: bytes = b"", *, length: int | None = None, extra_headers: bytes = b""
    ) -> None:
        """Send the head and the first bytes of a streamed response, which is chunked unless ``length`` is set."""
        head = self._format_head(200, content_type, extra_headers)
        self._is_chunked = length is None and self._request.accepts_chunked
        if length is not None:
            head += b"Content-Length: %d\r\n" % length
        elif self._is_chunked:
            head += b"Transfer-Encoding: chunked\r\n"
        else:
            self._request.keep_alive = False
        self.has_begun = True
        self.connection.send(head + b"\r\n" + self._encode_chunk(first_data))

    def write(self, data: bytes) -> None:
        if data:
            self.connection.send(self._encode_chunk(data))

    def end(self, last_data: bytes = b"") -> None:
        data = self._encode_chunk(last_data) + (b"0\r\n\r\n" if self._is_chunked else b"")
        if data:
            self.connection.send(data)
        self.is_complete = True

    def _encode_chunk(self, data: bytes) -> bytes:
        if not data or not self._is_chunked:
            return data
        return b"%x\r\n%s\r\n" % (len(data), data)

    def _format_head(self, status: int, content_type: bytes, extra_headers: bytes) -> bytes:
        head = b"HTTP/1.1 %d %s\r\n" % (status, REASON_PHRASES.get(status, b"Error"))
        if content_type:
            head += b"Content-Type: " + content_type + b"\r\n"
        if not self._request.keep_alive:
            head += b"Connection: close\r\n"
        return head + extra_headers
