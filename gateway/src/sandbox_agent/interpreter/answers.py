"""Responses to requests that execute a cell. They contain a stream of the cell's events, or only its value."""

from __future__ import annotations

import json
import socket
import time

from sandbox_agent.interpreter.kernel_protocol import FIELD_BY_MIME_TYPE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.http.wire import Connection, Reply

_CONTENT_TYPE = b"application/x-ndjson"
_PIECE_SIZE = 256 << 10
_PEEK = socket.MSG_PEEK
_encode = json.JSONEncoder(separators=(",", ":")).encode
_TEXT_FIELDS = frozenset(FIELD_BY_MIME_TYPE.values()) - {"json"}
_RESULT_FIELDS = frozenset({"type", "extra", "is_main_result", *FIELD_BY_MIME_TYPE.values()})
_ERROR_FIELDS = {"type", "name", "value", "traceback"}


class CellResponse:
    """The base class of the responses, which discards all events.

    ``has_failed``: whether the cell raised an error; ``pending_byte_count``: the number of bytes ready to send.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        self.connection = connection
        self.has_failed = False
        self.pending_byte_count = 0

    def client_descriptor(self) -> int:
        """Return the descriptor of the client's connection; -1 if there is no client."""
        return self.connection.sock.fileno() if self.connection else -1

    def is_client_gone(self) -> bool:
        """Return whether the client has hung up. Call this only if the client's descriptor is readable."""
        try:
            return self.connection is not None and not self.connection.sock.recv(1, _PEEK)
        except OSError:
            return True

    def begin_cell(self, count: int) -> None:
        """Handle the start of the kernel's ``count``-th cell."""

    def handle_text(self, stream: str, text: str) -> None:
        """Handle a piece of stdout or stderr."""

    def handle_event(self, line: bytes, timeout_message: str) -> bool:
        """Handle a result or an error, which the kernel sent as JSON. Returns False if ``line`` is neither.

        ``timeout_message``: the text of the TimeoutError if the cell exceeded its time limit, otherwise "".
        """
        event = _parse_event(line)
        if event is None:
            return False
        if event["type"] == "result":
            self.handle_result(line, event)
        elif timeout_message:
            self.handle_error("TimeoutError", timeout_message, event["traceback"])
        else:
            self.handle_error(event["name"], event["value"], event["traceback"])
        return True

    def handle_result(self, line: bytes, event: dict[str, Any]) -> None:
        """Handle a result. ``line``: the result as JSON."""

    def handle_error(self, name: str, value: str, traceback: str = "") -> None:
        self.has_failed = True

    def begin(self) -> None:
        """Send the head of the response early, so that the client knows that the cell is running."""

    def flush(self) -> None:
        """Send the pending bytes. Raises ConnectionLost if the client hung up."""

    def end(self) -> None:
        """Send the rest of the response. Raises ConnectionLost if the client hung up."""


class LineResponse(CellResponse):
    """A response with a line of JSON for each event, in the format that E2B's ``Sandbox.run_code`` expects."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.connection)
        self._reply = reply
        self._lines: list[bytes] = []

    def begin_cell(self, count: int) -> None:
        self._add_line(b'{"type":"number_of_executions","execution_count":%d}' % count)

    def handle_text(self, stream: str, text: str) -> None:
        self._add_event({"type": stream, "text": text, "timestamp": time.time_ns()})

    def handle_result(self, line: bytes, event: dict[str, Any]) -> None:
        self._add_line(line)

    def handle_error(self, name: str, value: str, traceback: str = "") -> None:
        super().handle_error(name, value)
        self._add_event({"type": "error", "name": name, "value": value, "traceback": traceback})

    def begin(self) -> None:
        self.flush()

    def flush(self) -> None:
        data = self._take_pending_bytes()
        if not self._reply.has_begun:
            self._reply.begin(_CONTENT_TYPE, data[:_PIECE_SIZE])
            data = data[_PIECE_SIZE:]
        # Send pieces, because the timeout for slow clients applies to each write.
        for start in range(0, len(data), _PIECE_SIZE):
            self._reply.write(data[start : start + _PIECE_SIZE])

    def end(self) -> None:
        if self._reply.has_begun or self.pending_byte_count > _PIECE_SIZE:
            self.flush()
            self._reply.end()
        else:
            self._reply.send(200, self._take_pending_bytes(), _CONTENT_TYPE)

    def _add_event(self, event: dict[str, Any]) -> None:
        self._add_line(_encode(event).encode())

    def _add_line(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        self.pending_byte_count += len(line) + 1

    def _take_pending_bytes(self) -> bytes:
        data = self._lines[0] if len(self._lines) == 1 else b"".join(self._lines)
        self._lines = []
        self.pending_byte_count = 0
        return data


class ValueResponse(CellResponse):
    """A response that keeps the value or the error of the cell as text, and discards the output."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.value = "None"
        self.error_text = ""

    def handle_result(self, line: bytes, event: dict[str, Any]) -> None:
        if event["is_main_result"]:
            self.value = event.get("text", "")

    def handle_error(self, name: str, value: str, traceback: str = "") -> None:
        super().handle_error(name, value)
        self.error_text = f"{name}: {value}" if value else name


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """Parse a line from a kernel. Returns None if it is neither a valid result nor a valid error."""
    if not line.isascii() or b"\n" in line or b"\r" in line:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    if event.get("type") == "error":
        is_valid = set(event) == _ERROR_FIELDS and all(isinstance(value, str) for value in event.values())
    else:
        is_valid = (
            event.get("type") == "result"
            and isinstance(event.get("is_main_result"), bool)
            and isinstance(event.get("extra", {}), dict)
            and set(event) <= _RESULT_FIELDS
            and all(isinstance(event[name], str) for name in _TEXT_FIELDS & set(event))
        )
    return event if is_valid else None
