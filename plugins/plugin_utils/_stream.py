# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stream processes and files of one sandbox through the gateway's data plane and the agent, in both directions."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import urlencode

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client, read_at_most
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

AGENT_PORT = 49983
INSIDE = "inside"
"""The ``kind`` of a Failure from the agent: the sandbox is reachable, but refuses the request."""
IDLE_SECONDS = 30
"""Seconds after which an idle connection is not reused, because the gateway is about to close it."""
INPUT_SECONDS = 60
"""Seconds for which the agent waits for a process that does not read its input."""
_TIMED_OUT = 504
_PIECE = 256 << 10
_GIVEN = 8 << 20
_FRAME = struct.Struct(">BI")
_LAST = 2
_LARGEST_FRAME = 4 << 20
"""Maximum bytes of a frame. The agent sends output in chunks of 64 KiB and buffers at most 1 MiB for a slow reader."""
_LARGEST_ANSWER = 1 << 20
"""Maximum bytes of all other responses of the agent, which are short."""
_LARGEST_NUMBER = 20
"""Maximum number of digits of a number in a frame."""


class Channel(Client):
    """Requests to the agent of ``sandbox`` (an id or a name) as ``user``, with reused connections.

    ``timeout``: seconds to wait for data or a heartbeat. Methods raise Failure: of kind INSIDE if the agent refuses, of
    another kind if the sandbox or the gateway is unreachable.
    """

    def __init__(self, sandbox: str, user: str = "", *, timeout: float = 60, **gateway: Any) -> None:
        super().__init__(timeout=timeout, **gateway)
        self.sandbox = sandbox
        login = base64.b64encode(f"{user}:".encode()).decode()
        self._headers = {
            "E2b-Sandbox-Id": sandbox,
            "E2b-Sandbox-Port": str(AGENT_PORT),
            "Authorization": f"Basic {login}",
        }
        if self._token:
            self._headers["X-API-Key"] = self._token
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []

    def close(self) -> None:
        super().close()
        while self._idle:
            self._idle.pop()[1].close()

    def start(self, argv: list[str], *, stdin: bool = False, given: bytes = b"") -> Process:
        """Start a process; without ``stdin`` it reads /dev/null.

        ``given``: its complete input, sent with the request. If the agent does not support that, call ``feed``.
        """
        asked: dict[str, Any] = {"process": {"cmd": argv[0], "args": argv[1:]}, "stdin": stdin}
        if given and len(given) <= _GIVEN:
            asked["input"] = base64.b64encode(given).decode()
        message = json.dumps(asked).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(max(1, int(self.timeout / 4))),
        }
        body = _FRAME.pack(0, len(message)) + message
        return Process(self, *self.ask("POST", "/process.Process/Start", body, headers))

    def upload(self, file: BinaryIO, size: int, path: str) -> None:
        """Write ``size`` bytes of a real file to ``path`` in the sandbox, one chunk at a time."""
        connection = self.connection()
        try:
            connection.putrequest("POST", _files(path), skip_accept_encoding=True)
            for name, value in {**self._headers, "Content-Type": "application/octet-stream"}.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(size))
            connection.endheaders()
            failed = None
            try:
                if size and connection.sock.sendfile(file, count=size) != size:
                    raise Failure(
                        f"the file became shorter than {size} bytes while it was sent: do not change it during "
                        "the transfer",
                        INSIDE,
                    )
            except OSError as error:
                # A server that refuses a body may stop reading it, but has still sent a response.
                failed = error
            try:
                response = connection.getresponse()
            except (http.client.HTTPException, OSError) as error:
                raise self.connection_lost("POST /files", failed or error) from None
        except Failure:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise self.connection_lost("POST /files", error) from None
        self._read_all("POST /files", connection, self._accepted("POST /files", connection, response))

    def download(self, path: str, out: BinaryIO) -> None:
        """Write the file at ``path`` in the sandbox to ``out``, chunk by chunk."""
        connection, response = self.ask("GET", _files(path), None, {"Accept-Encoding": "identity"})
        piece = memoryview(bytearray(_PIECE))
        try:
            size = response.readinto(piece)
            while size:
                out.write(piece[:size])
                size = response.readinto(piece)
            if response.length:
                raise Failure(f"the transfer of {path} ended {response.length} bytes early", "unreachable")
        except (http.client.HTTPException, ConnectionError, socket.timeout) as error:
            connection.close()
            raise self.connection_lost("GET /files", error) from None
        except BaseException:
            connection.close()
            raise
        self.keep(connection, response)

    def unary(self, method: str, message: dict[str, Any], patience: float = 0) -> None:
        """Call ``method`` of the agent's process service, with ``patience`` added to the timeout."""
        path = f"/process.Process/{method}"
        body = json.dumps(message).encode()
        connection, response = self.ask("POST", path, body, {"Content-Type": "application/json"}, patience)
        self._read_all(path, connection, response)

    def ask(
        self, method: str, target: str, body: bytes | None, headers: dict[str, str], patience: float = 0
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request. Returns the response with its body unread. Raises Failure for an error response."""
        asked = f"{method} {target.partition('?')[0]}"
        connection = self.connection()
        connection.sock.settimeout(self.timeout + patience)
        try:
            connection.request(method, target, body, {**self._headers, **headers})
            response = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise self.connection_lost(asked, error) from None
        return connection, self._accepted(asked, connection, response)

    def connection(self) -> http.client.HTTPConnection:
        """Return an idle connection or a new one. It belongs to the caller until ``keep``."""
        while self._idle:
            since, connection = self._idle.pop()
            # A readable idle connection was closed by the other side: no request is pending.
            if time.monotonic() - since < IDLE_SECONDS and not _readable(connection.sock):
                connection.sock.settimeout(self.timeout)
                return connection
            connection.close()
        self._connected_once = False
        connection = self._new_connection()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise self._unreachable("a connection", error) from None
        self._connected_once = True
        connection.sock.settimeout(self.timeout)
        if not self.address.socket:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Return a connection to the pool after its response has been read completely."""
        if response.will_close:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))

    def connection_lost(self, asked: str, error: Exception) -> Failure:
        if isinstance(error, socket.timeout):
            return Failure(
                f"sandbox {self.sandbox} sent neither data nor a heartbeat for {self.timeout:g} s ({asked})",
                "unreachable",
            )
        if isinstance(error, (http.client.HTTPException, ConnectionError)):
            return Failure(
                f"the connection to sandbox {self.sandbox} was closed ({asked}): the sandbox was paused, "
                f"rolled back or removed, or the gateway at {self.address.url} stopped",
                "unreachable",
            )
        return self._unreachable(asked, error)

    def _accepted(
        self, asked: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> http.client.HTTPResponse:
        if response.status < 400:
            return response
        try:
            data = self._decoded(asked, response.status, self._read_short_answer(asked, response))
        except (http.client.HTTPException, OSError) as error:
            raise self.connection_lost(asked, error) from None
        finally:
            connection.close()
        # Only errors of the gateway have a kind; the agent's do not.
        if isinstance(data, dict) and "message" in data and "kind" not in data:
            raise Failure(str(data["message"]), INSIDE, status=response.status)
        raise self._failure(asked, response.status, data)

    def _read_all(self, asked: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        try:
            self._read_short_answer(asked, response)
        except Failure:
            connection.close()
            raise
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise self.connection_lost(asked, error) from None
        self.keep(connection, response)

    def _read_short_answer(self, asked: str, response: http.client.HTTPResponse) -> bytes:
        """Return the rest of a short response."""
        data = read_at_most(_LARGEST_ANSWER, response)
        if data is None:
            raise self.invalid_answer(f"its answer to {asked} is larger than {_LARGEST_ANSWER} bytes")
        return data

    def invalid_answer(self, why: str) -> Failure:
        return Failure(
            f"the agent of sandbox {self.sandbox} sent an invalid answer ({why}): a program in the sandbox "
            "may have replaced it. Roll the sandbox back, or replace the sandbox",
            "unreachable",
        )


class Process:
    """A process in the sandbox. Iterate ``output`` to its end; then ``exit_code`` is set."""

    def __init__(
        self, channel: Channel, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.exit_code: int | None = None
        self.pid = 0
        self.fed = False
        """Whether the agent accepted the input with the request that started the process."""
        self._channel = channel
        self._connection = connection
        self._response = response
        self._feeder: threading.Thread | None = None
        self._feed_failure: Failure | None = None

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yield ``("stdout"|"stderr", data)`` as it arrives, and ``("", b"")`` for a heartbeat.

        The first item is a heartbeat, which means that the process has started.
        """
        try:
            for flags, message in self._frames():
                if flags & _LAST:
                    self._finish(message)
                    return
                event = _field(message, "event", dict)
                if "start" in event:
                    start = _field(event, "start", dict)
                    self.pid = _field(start, "pid", int)
                    self.fed = bool(start.get("input"))
                if "end" in event:
                    self.exit_code = _exit_code(_field(event, "end", dict))
                    continue
                data = _field(event, "data", dict)
                for kind in ("stdout", "stderr"):
                    if kind in data:
                        yield kind, _decoded(_field(data, kind, str))
                if not data:
                    yield "", b""
        except _InvalidAnswer as error:
            raise self._channel.invalid_answer(str(error)) from None
        except (http.client.HTTPException, OSError) as error:
            raise self._channel.connection_lost("its output", error) from None
        finally:
            self._stop_feeding()
            if self._connection.sock is not None and not self._response.isclosed():
                self._connection.close()

    def _frames(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while True:
            flags, size = _FRAME.unpack(self._read_exactly(_FRAME.size))
            if size > _LARGEST_FRAME:
                raise _InvalidAnswer(
                    f"it announced a message of {size} bytes, but at most {_LARGEST_FRAME} are allowed"
                )
            yield flags, _parse_message(self._read_exactly(size))

    def _read_exactly(self, size: int) -> bytes:
        data = self._response.read(size)
        if len(data) != size:
            raise http.client.IncompleteRead(data, size - len(data))
        return data

    def _finish(self, last: dict[str, Any]) -> None:
        if self._response.read(1):
            raise _InvalidAnswer("it sent data after its last message")
        self._channel.keep(self._connection, self._response)
        error = _field(last, "error", dict)
        if error:
            raise Failure(_field(error, "message", str) or "the agent reported no reason", INSIDE)
        if self.exit_code is None:
            raise Failure(f"the agent of sandbox {self._channel.sandbox} did not report how the command ended", INSIDE)
        if self._feed_failure is not None:
            raise self._feed_failure

    def write(self, data: bytes) -> None:
        """Write to the standard input of the process."""
        text = base64.b64encode(data).decode()
        message = {"process": {"pid": self.pid}, "input": {"stdin": text}}
        self._channel.unary("SendInput", message, INPUT_SECONDS)

    def close_stdin(self) -> None:
        self._channel.unary("CloseStdin", {"process": {"pid": self.pid}})

    def kill(self) -> None:
        """Kill the process and its group, if they are still running."""
        with contextlib.suppress(Failure):
            self._channel.unary("SendSignal", {"process": {"pid": self.pid}, "signal": "SIGNAL_SIGKILL"})

    def feed(self, data: bytes) -> None:
        """Write ``data`` in a thread and close the input, so that output is read meanwhile and neither side blocks."""
        self._feeder = threading.Thread(target=self._feed, args=(data,), daemon=True)
        self._feeder.start()

    def _feed(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), 4 * _PIECE):
                self.write(data[start : start + 4 * _PIECE])
            self.close_stdin()
        except Failure as failure:
            # The process ended or closed its input; its exit code shows whether that is an error.
            if failure.kind == INSIDE and failure.status != _TIMED_OUT:
                return
            # The process would wait forever for the rest of its input.
            self._feed_failure = failure
            self.kill()

    def _stop_feeding(self) -> None:
        """Wait for the feeder, which ends soon after the process, unless a child holds the input open."""
        if self._feeder is not None:
            self._feeder.join(2 if self.exit_code is not None else 0)


def _files(path: str) -> str:
    return "/files?" + urlencode({"path": path.encode("utf-8", "surrogateescape")})


def _readable(sock: Any) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class _InvalidAnswer(Exception):
    """A malformed response of the agent. The message describes the defect."""


def _parse_message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data or b"{}", parse_int=_number)
    except (ValueError, RecursionError):
        raise _InvalidAnswer("it is not JSON") from None
    if not isinstance(message, dict):
        raise _InvalidAnswer("it is not a message")
    return message


def _number(digits: str) -> int:
    if len(digits) > _LARGEST_NUMBER:
        raise ValueError("a number has too many digits")
    return int(digits)


def _field(message: dict[str, Any], name: str, kind: type) -> Any:
    """Return the field of a message, or the empty value of its type. Raises _InvalidAnswer for another type."""
    value = message.get(name)
    if value is None:
        return kind()
    # In Python, a bool is an int.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _InvalidAnswer(f"its field {name} is not a {kind.__name__}")
    return value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _InvalidAnswer("its output is not base64") from None


def _exit_code(end: dict[str, Any]) -> int:
    """Return the exit code as in a shell: 128 + n for a process that signal n killed."""
    if end.get("exited", True):
        return _field(end, "exitCode", int)  # type: ignore[no-any-return]
    name = _field(end, "status", str).partition(": ")[2]
    for number in signal.valid_signals():
        if name in (str(int(number)), (signal.strsignal(number) or "").lower()):
            return 128 + int(number)
    return 255
