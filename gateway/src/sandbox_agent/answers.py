"""Where what happens in a cell goes: lines to a client as they come, or one value."""

from __future__ import annotations

import json
import socket
import time

from sandbox_agent.kernel_protocol import FIELDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.wire import Connection, Reply

_KIND = b"application/x-ndjson"
_PIECE = 256 << 10
_PEEK = socket.MSG_PEEK
_encode = json.JSONEncoder(separators=(",", ":")).encode
_TEXTS = frozenset(FIELDS.values()) - {"json"}
_RESULT = frozenset({"type", "extra", "is_main_result", *FIELDS.values()})
_ERROR = {"type", "name", "value", "traceback"}


class Answer:
    """Nobody's: what happens is dropped. ``failed``: there was an error; ``waiting``: bytes that can be sent."""

    def __init__(self, connection: Connection | None = None) -> None:
        self.connection = connection
        self.failed = False
        self.waiting = 0

    def client(self) -> int:
        """The descriptor of who waits for the answer; -1 where nobody does."""
        return self.connection.sock.fileno() if self.connection else -1

    def gone(self) -> bool:
        """Whether the client, which has stirred, has hung up."""
        try:
            return self.connection is not None and not self.connection.sock.recv(1, _PEEK)
        except OSError:
            return True

    def started(self, count: int) -> None:
        """The cell is the ``count``-th of its kernel, and is about to run."""

    def text(self, stream: str, text: str) -> None:
        """Some of its stdout or stderr."""

    def event(self, line: bytes, too_late: str) -> bool:
        """A result or an error that the kernel tells of; False where it is neither.

        ``too_late`` says so of a cell that was interrupted for that, and not by its client.
        """
        event = _event(line)
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
        """A result, ``line`` being its JSON."""

    def error(self, name: str, value: str, traceback: str = "") -> None:
        self.failed = True

    def begin(self) -> None:
        """Let the client know that there will be an answer."""

    def flush(self) -> None:
        """Send what is waiting; raises Gone."""

    def end(self) -> None:
        """Send the rest; raises Gone."""


class Lines(Answer):
    """JSON, a line for each event, as ``Sandbox.run_code`` of E2B's clients reads it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.connection)
        self._reply = reply
        self._lines: list[bytes] = []

    def started(self, count: int) -> None:
        self._add(b'{"type":"number_of_executions","execution_count":%d}' % count)

    def text(self, stream: str, text: str) -> None:
        self._put({"type": stream, "text": text, "timestamp": time.time_ns()})

    def result(self, line: bytes, event: dict[str, Any]) -> None:
        self._add(line)

    def error(self, name: str, value: str, traceback: str = "") -> None:
        super().error(name, value)
        self._put({"type": "error", "name": name, "value": value, "traceback": traceback})

    def begin(self) -> None:
        self.flush()

    def flush(self) -> None:
        data = self._take()
        if not self._reply.begun:
            self._reply.begin(_KIND, data[:_PIECE])
            data = data[_PIECE:]
        # In pieces: each may take as long as a silent client is waited for.
        for start in range(0, len(data), _PIECE):
            self._reply.write(data[start : start + _PIECE])

    def end(self) -> None:
        if self._reply.begun or self.waiting > _PIECE:
            self.flush()
            self._reply.end()
        else:
            self._reply.send(200, self._take(), _KIND)

    def _put(self, event: dict[str, Any]) -> None:
        self._add(_encode(event).encode())

    def _add(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        self.waiting += len(line) + 1

    def _take(self) -> bytes:
        data = self._lines[0] if len(self._lines) == 1 else b"".join(self._lines)
        self._lines = []
        self.waiting = 0
        return data


class Value(Answer):
    """The value of the cell, or its error, in words. What it prints is dropped."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.value = "None"
        self.words = ""

    def result(self, line: bytes, event: dict[str, Any]) -> None:
        if event["is_main_result"]:
            self.value = event.get("text", "")

    def error(self, name: str, value: str, traceback: str = "") -> None:
        super().error(name, value)
        self.words = f"{name}: {value}" if value else name


def _event(line: bytes) -> dict[str, Any] | None:
    """What a kernel's line says; None where that is nothing that a client would understand."""
    if not line.isascii() or b"\n" in line or b"\r" in line:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    if event.get("type") == "error":
        right = set(event) == _ERROR and all(isinstance(value, str) for value in event.values())
    else:
        right = (
            event.get("type") == "result"
            and isinstance(event.get("is_main_result"), bool)
            and isinstance(event.get("extra", {}), dict)
            and set(event) <= _RESULT
            and all(isinstance(event[name], str) for name in _TEXTS & set(event))
        )
    return event if right else None
