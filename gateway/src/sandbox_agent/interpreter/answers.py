"""Destinations of a cell's events: a stream of lines or a single value."""

from __future__ import annotations

import json
import socket
import time

from sandbox_agent.interpreter.kernel_protocol import FIELDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.http.wire import Connection, Reply

_CONTENT_TYPE = b"application/x-ndjson"
_PIECE = 256 << 10
_PEEK = socket.MSG_PEEK
_encode = json.JSONEncoder(separators=(",", ":")).encode
_TEXTS = frozenset(FIELDS.values()) - {"json"}
_RESULT = frozenset({"type", "extra", "is_main_result", *FIELDS.values()})
_ERROR = {"type", "name", "value", "traceback"}


class Answer:
    """Discards all events. ``failed``: the cell raised an error; ``pending``: bytes ready to be sent."""

    def __init__(self, connection: Connection | None = None) -> None:
        self.connection = connection
        self.failed = False
        self.pending = 0

    def client_descriptor(self) -> int:
        """Return the descriptor of the waiting client; -1 if there is none."""
        return self.connection.sock.fileno() if self.connection else -1

    def is_client_gone(self) -> bool:
        """Return whether the client has hung up. Call it when the client's descriptor is readable."""
        try:
            return self.connection is not None and not self.connection.sock.recv(1, _PEEK)
        except OSError:
            return True

    def begin_cell(self, count: int) -> None:
        """Handle the start of the kernel's ``count``-th cell."""

    def text(self, stream: str, text: str) -> None:
        """Handle a piece of stdout or stderr."""

    def event(self, line: bytes, too_late: str) -> bool:
        """Handle a result or an error, as the kernel's JSON; False for anything else.

        ``too_late``: the message of a TimeoutError, if the cell was interrupted because its time was up.
        """
        event = _parse_event(line)
        if event is None:
            return False
        if event["type"] == "result":
            self.result(line, event)
        elif too_late:
            self.error("TimeoutError", too_late, event["traceback"])
        else:
            self.error(event["name"], event["value"], event["traceback"])
        return True

    def result(self, line: bytes, event: dict[str, Any]) -> None:
        """Handle a result; ``line`` is its JSON."""

    def error(self, name: str, value: str, traceback: str = "") -> None:
        self.failed = True

    def begin(self) -> None:
        """Send the head of the answer early, so that the client knows the cell is running."""

    def flush(self) -> None:
        """Send the pending bytes. Raises Gone."""

    def end(self) -> None:
        """Send the rest. Raises Gone."""


class LineAnswer(Answer):
    """A line of JSON for each event, as ``Sandbox.run_code`` of E2B's clients reads it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.connection)
        self._reply = reply
        self._lines: list[bytes] = []

    def begin_cell(self, count: int) -> None:
        self._add_line(b'{"type":"number_of_executions","execution_count":%d}' % count)

    def text(self, stream: str, text: str) -> None:
        self._add_event({"type": stream, "text": text, "timestamp": time.time_ns()})

    def result(self, line: bytes, event: dict[str, Any]) -> None:
        self._add_line(line)

    def error(self, name: str, value: str, traceback: str = "") -> None:
        super().error(name, value)
        self._add_event({"type": "error", "name": name, "value": value, "traceback": traceback})

    def begin(self) -> None:
        self.flush()

    def flush(self) -> None:
        data = self._take_pending()
        if not self._reply.begun:
            self._reply.begin(_CONTENT_TYPE, data[:_PIECE])
            data = data[_PIECE:]
        # In pieces: the timeout of a slow client applies to each.
        for start in range(0, len(data), _PIECE):
            self._reply.write(data[start : start + _PIECE])

    def end(self) -> None:
        if self._reply.begun or self.pending > _PIECE:
            self.flush()
            self._reply.end()
        else:
            self._reply.send(200, self._take_pending(), _CONTENT_TYPE)

    def _add_event(self, event: dict[str, Any]) -> None:
        self._add_line(_encode(event).encode())

    def _add_line(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        self.pending += len(line) + 1

    def _take_pending(self) -> bytes:
        data = self._lines[0] if len(self._lines) == 1 else b"".join(self._lines)
        self._lines = []
        self.pending = 0
        return data


class ValueAnswer(Answer):
    """The value of the cell, or its error, as text. Discards the cell's output."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.value = "None"
        self.error_text = ""

    def result(self, line: bytes, event: dict[str, Any]) -> None:
        if event["is_main_result"]:
            self.value = event.get("text", "")

    def error(self, name: str, value: str, traceback: str = "") -> None:
        super().error(name, value)
        self.error_text = f"{name}: {value}" if value else name


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """Parse a kernel's line; None if it is neither a result nor an error in the clients' format."""
    if not line.isascii() or b"\n" in line or b"\r" in line:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    if event.get("type") == "error":
        valid = set(event) == _ERROR and all(isinstance(value, str) for value in event.values())
    else:
        valid = (
            event.get("type") == "result"
            and isinstance(event.get("is_main_result"), bool)
            and isinstance(event.get("extra", {}), dict)
            and set(event) <= _RESULT
            and all(isinstance(event[name], str) for name in _TEXTS & set(event))
        )
    return event if valid else None
