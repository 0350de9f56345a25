# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run processes and transfer files in one sandbox, through the gateway's data plane and the agent."""

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

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client, read_limited_response
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

AGENT_PORT = 49983
AGENT_FAILURE_KIND = "inside"
"""The ``kind`` of a Failure that the agent reports: the sandbox is reachable, but refuses the request."""
MAX_IDLE_SECONDS = 30
"""Seconds after which an idle connection is no longer reused, because the gateway may be closing it."""
INPUT_TIMEOUT_SECONDS = 60
"""Seconds for which the agent waits for a process to read its input."""
_GATEWAY_TIMEOUT_STATUS = 504
_CHUNK_BYTES = 256 << 10
_MAX_INLINE_INPUT_BYTES = 8 << 20
_FRAME_HEADER = struct.Struct(">BI")
_LAST_FRAME_FLAG = 2
_MAX_FRAME_BYTES = 4 << 20
"""Maximum size of a frame in bytes. The agent sends output in chunks of 64 KiB and buffers at most 1 MiB of it."""
_MAX_RESPONSE_BYTES = 1 << 20
"""Maximum size in bytes of all other responses of the agent, which are short."""
_MAX_DIGITS = 20
"""Maximum number of digits of a number in a frame."""


class Channel(Client):
    """A client of the agent of ``sandbox`` (an id or a name), which acts as ``user`` and reuses connections.

    ``may_resume``: whether a request resumes the sandbox if it is paused and was created with autoResume.
    ``timeout`` is the time limit in seconds without data or a heartbeat. Methods raise Failure: with the kind
    AGENT_FAILURE_KIND if the agent refuses the request, or with another kind if the sandbox or the gateway is
    unreachable.
    """

    def __init__(
        self, sandbox: str, user: str = "", *, may_resume: bool = True, timeout: float = 60, **gateway: Any
    ) -> None:
        super().__init__(timeout=timeout, **gateway)
        self.sandbox = sandbox
        credentials = base64.b64encode(f"{user}:".encode()).decode()
        self._headers = {
            "E2b-Sandbox-Id": sandbox,
            "E2b-Sandbox-Port": str(AGENT_PORT),
            "Authorization": f"Basic {credentials}",
        }
        if not may_resume:
            self._headers["X-Sandbox-Auto-Resume"] = "false"
        if self._token:
            self._headers["X-API-Key"] = self._token
        self._idle_connections: list[tuple[float, http.client.HTTPConnection]] = []

    def close(self) -> None:
        super().close()
        while self._idle_connections:
            self._idle_connections.pop()[1].close()

    def start(self, argv: list[str], *, stdin: bool = False, input_data: bytes = b"") -> Process:
        """Start a process. Without ``stdin``, its standard input is /dev/null.

        ``input_data`` is the complete input, which is sent with the request. If the process then has
        ``is_input_accepted`` set to False, call ``feed``.
        """
        request: dict[str, Any] = {"process": {"cmd": argv[0], "args": argv[1:]}, "stdin": stdin}
        if input_data and len(input_data) <= _MAX_INLINE_INPUT_BYTES:
            request["input"] = base64.b64encode(input_data).decode()
        message = json.dumps(request).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(max(1, int(self.timeout / 4))),
        }
        body = _FRAME_HEADER.pack(0, len(message)) + message
        return Process(self, *self.send_request("POST", "/process.Process/Start", body, headers))

    def upload_file(self, file: BinaryIO, size: int, path: str) -> None:
        """Write ``size`` bytes of a regular file to ``path`` in the sandbox, in chunks."""
        connection = self.acquire_connection()
        try:
            connection.putrequest("POST", _make_files_target(path), skip_accept_encoding=True)
            for name, value in {**self._headers, "Content-Type": "application/octet-stream"}.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(size))
            connection.endheaders()
            upload_error = None
            try:
                if size and connection.sock.sendfile(file, count=size) != size:
                    raise Failure(
                        f"the file shrank below {size} bytes while it was being sent: do not change it during "
                        "the transfer",
                        AGENT_FAILURE_KIND,
                    )
            except OSError as error:
                # A server that refuses the body may stop reading it, but it has sent a response.
                upload_error = error
            try:
                response = connection.getresponse()
            except (http.client.HTTPException, OSError) as error:
                raise self.create_connection_lost_error("POST /files", upload_error or error) from None
        except Failure:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise self.create_connection_lost_error("POST /files", error) from None
        self._read_to_end("POST /files", connection, self._check_status("POST /files", connection, response))

    def download_file(self, path: str, out: BinaryIO) -> None:
        """Write the file at ``path`` in the sandbox to ``out``, in chunks."""
        connection, response = self.send_request("GET", _make_files_target(path), None, {"Accept-Encoding": "identity"})
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        try:
            size = response.readinto(chunk)
            while size:
                out.write(chunk[:size])
                size = response.readinto(chunk)
            if response.length:
                raise Failure(
                    f"the transfer of {path} ended {response.length} bytes early: run the task again", "unreachable"
                )
        except (http.client.HTTPException, ConnectionError, socket.timeout) as error:
            connection.close()
            raise self.create_connection_lost_error("GET /files", error) from None
        except BaseException:
            connection.close()
            raise
        self.release(connection, response)

    def call_unary(self, method: str, message: dict[str, Any], extra_timeout: float = 0) -> None:
        """Call ``method`` of the agent's process service. ``extra_timeout`` seconds are added to the timeout."""
        path = f"/process.Process/{method}"
        body = json.dumps(message).encode()
        connection, response = self.send_request(
            "POST", path, body, {"Content-Type": "application/json"}, extra_timeout
        )
        self._read_to_end(path, connection, response)

    def send_request(
        self, method: str, target: str, body: bytes | None, headers: dict[str, str], extra_timeout: float = 0
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and return the response with its body unread. Raises Failure for an error response."""
        request = f"{method} {target.partition('?')[0]}"
        connection = self.acquire_connection()
        connection.sock.settimeout(self.timeout + extra_timeout)
        try:
            connection.request(method, target, body, {**self._headers, **headers})
            response = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise self.create_connection_lost_error(request, error) from None
        return connection, self._check_status(request, connection, response)

    def acquire_connection(self) -> http.client.HTTPConnection:
        """Return an idle connection or a new one. It belongs to the caller until ``release`` is called."""
        while self._idle_connections:
            idle_since, connection = self._idle_connections.pop()
            # No request is pending, so a readable connection was closed by the other side.
            if time.monotonic() - idle_since < MAX_IDLE_SECONDS and not _is_readable(connection.sock):
                connection.sock.settimeout(self.timeout)
                return connection
            connection.close()
        self._has_connected = False
        connection = self._make_connection()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise self._create_unreachable_error("a connection", error) from None
        self._has_connected = True
        connection.sock.settimeout(self.timeout)
        if not self.address.socket:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def release(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Return a connection to the pool after its response has been read completely."""
        if response.will_close:
            connection.close()
        else:
            self._idle_connections.append((time.monotonic(), connection))

    def create_connection_lost_error(self, request: str, error: Exception) -> Failure:
        if isinstance(error, socket.timeout):
            return Failure(
                f"sandbox {self.sandbox} sent neither data nor a heartbeat for {self.timeout:g} s ({request})",
                "unreachable",
            )
        if isinstance(error, (http.client.HTTPException, ConnectionError)):
            return Failure(
                f"the connection to sandbox {self.sandbox} was closed ({request}): the sandbox was paused, "
                f"rolled back or removed, or the gateway at {self.address.url} stopped",
                "unreachable",
            )
        return self._create_unreachable_error(request, error)

    def _check_status(
        self, request: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> http.client.HTTPResponse:
        if response.status < 400:
            return response
        try:
            data = self._decode(request, response.status, self._read_short_response(request, response))
        except (http.client.HTTPException, OSError) as error:
            raise self.create_connection_lost_error(request, error) from None
        finally:
            connection.close()
        # Only errors of the gateway have a kind; the agent's do not.
        if isinstance(data, dict) and "message" in data and "kind" not in data:
            raise Failure(str(data["message"]), AGENT_FAILURE_KIND, status=response.status)
        raise self._make_response_failure(request, response.status, data)

    def _read_to_end(
        self, request: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        try:
            self._read_short_response(request, response)
        except Failure:
            connection.close()
            raise
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise self.create_connection_lost_error(request, error) from None
        self.release(connection, response)

    def _read_short_response(self, request: str, response: http.client.HTTPResponse) -> bytes:
        """Return the rest of a short response. Raises Failure if it is too long."""
        data = read_limited_response(_MAX_RESPONSE_BYTES, response)
        if data is None:
            raise self.create_invalid_response_error(
                f"its response to {request} is longer than {_MAX_RESPONSE_BYTES} bytes"
            )
        return data

    def create_invalid_response_error(self, reason: str) -> Failure:
        return Failure(
            f"the agent of sandbox {self.sandbox} sent an invalid response ({reason}): a program in the sandbox "
            "may have replaced it. Roll the sandbox back, or replace the sandbox",
            "unreachable",
        )


class Process:
    """A process in the sandbox. ``exit_code`` is set when the iterator ``read_output`` is exhausted."""

    def __init__(
        self, channel: Channel, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.exit_code: int | None = None
        self.pid = 0
        self.is_input_accepted = False
        """Whether the agent accepted the input that was sent with the request."""
        self._channel = channel
        self._connection = connection
        self._response = response
        self._feeder: threading.Thread | None = None
        self._feeder_failure: Failure | None = None

    def read_output(self) -> Iterator[tuple[str, bytes]]:
        """Yield ``("stdout"|"stderr", data)`` as it arrives, and ``("", b"")`` for a heartbeat.

        The first item is a heartbeat, which means that the process has started.
        """
        try:
            for flags, message in self._read_frames():
                if flags & _LAST_FRAME_FLAG:
                    self._finish(message)
                    return
                event = _get_field(message, "event", dict)
                if "start" in event:
                    start_event = _get_field(event, "start", dict)
                    self.pid = _get_field(start_event, "pid", int)
                    self.is_input_accepted = bool(start_event.get("input"))
                if "end" in event:
                    self.exit_code = _parse_exit_code(_get_field(event, "end", dict))
                    continue
                data = _get_field(event, "data", dict)
                for kind in ("stdout", "stderr"):
                    if kind in data:
                        yield kind, _decode_base64(_get_field(data, kind, str))
                if not data:
                    yield "", b""
        except _InvalidResponse as error:
            raise self._channel.create_invalid_response_error(str(error)) from None
        except (http.client.HTTPException, OSError) as error:
            raise self._channel.create_connection_lost_error("its output", error) from None
        finally:
            self._join_feeder()
            if self._connection.sock is not None and not self._response.isclosed():
                self._connection.close()

    def _read_frames(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while True:
            flags, size = _FRAME_HEADER.unpack(self._read_exactly(_FRAME_HEADER.size))
            if size > _MAX_FRAME_BYTES:
                raise _InvalidResponse(
                    f"it announced a message of {size} bytes, but at most {_MAX_FRAME_BYTES} are allowed"
                )
            yield flags, _parse_message(self._read_exactly(size))

    def _read_exactly(self, size: int) -> bytes:
        data = self._response.read(size)
        if len(data) != size:
            raise http.client.IncompleteRead(data, size - len(data))
        return data

    def _finish(self, end_message: dict[str, Any]) -> None:
        if self._response.read(1):
            raise _InvalidResponse("it sent data after its last message")
        self._channel.release(self._connection, self._response)
        error = _get_field(end_message, "error", dict)
        if error:
            raise Failure(_get_field(error, "message", str) or "the agent reported no reason", AGENT_FAILURE_KIND)
        if self.exit_code is None:
            raise Failure(
                f"the agent of sandbox {self._channel.sandbox} did not report the exit code of the command: "
                "run the task again",
                AGENT_FAILURE_KIND,
            )
        if self._feeder_failure is not None:
            raise self._feeder_failure

    def write(self, data: bytes) -> None:
        """Write to the standard input of the process."""
        encoded_data = base64.b64encode(data).decode()
        message = {"process": {"pid": self.pid}, "input": {"stdin": encoded_data}}
        self._channel.call_unary("SendInput", message, INPUT_TIMEOUT_SECONDS)

    def close_stdin(self) -> None:
        self._channel.call_unary("CloseStdin", {"process": {"pid": self.pid}})

    def kill(self) -> None:
        """Kill the process and its group, if they are still running."""
        with contextlib.suppress(Failure):
            self._channel.call_unary("SendSignal", {"process": {"pid": self.pid}, "signal": "SIGNAL_SIGKILL"})

    def feed(self, data: bytes) -> None:
        """Start a thread that writes ``data`` and closes the input, while the caller reads the output."""
        self._feeder = threading.Thread(target=self._write_input, args=(data,), daemon=True)
        self._feeder.start()

    def _write_input(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), 4 * _CHUNK_BYTES):
                self.write(data[start : start + 4 * _CHUNK_BYTES])
            self.close_stdin()
        except Failure as failure:
            # The process has exited or closed its input. Its exit code shows whether this is an error.
            if failure.kind == AGENT_FAILURE_KIND and failure.status != _GATEWAY_TIMEOUT_STATUS:
                return
            # The process would wait forever for the rest of its input.
            self._feeder_failure = failure
            self.kill()

    def _join_feeder(self) -> None:
        """Wait for the feeder thread, which ends soon after the process, unless a child still has the input open."""
        if self._feeder is not None:
            self._feeder.join(2 if self.exit_code is not None else 0)


def _make_files_target(path: str) -> str:
    return "/files?" + urlencode({"path": path.encode("utf-8", "surrogateescape")})


def _is_readable(sock: Any) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


class _InvalidResponse(Exception):
    """A malformed response from the agent. The message describes the error."""


def _parse_message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data or b"{}", parse_int=_parse_number)
    except (ValueError, RecursionError):
        raise _InvalidResponse("it is not JSON") from None
    if not isinstance(message, dict):
        raise _InvalidResponse("it is not a message")
    return message


def _parse_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number has more than {_MAX_DIGITS} digits")
    return int(digits)


def _get_field(message: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of a message, or the empty value of ``kind`` if it is missing. Raises _InvalidResponse."""
    value = message.get(name)
    if value is None:
        return kind()
    # In Python, a bool is an int.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _InvalidResponse(f"its field {name} is not of type {kind.__name__}")
    return value


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _InvalidResponse("its output is not base64") from None


def _parse_exit_code(end: dict[str, Any]) -> int:
    """Return the exit code as a shell reports it, which is 128 + n if signal n killed the process."""
    if end.get("exited", True):
        return _get_field(end, "exitCode", int)  # type: ignore[no-any-return]
    name = _get_field(end, "status", str).partition(": ")[2]
    for number in signal.valid_signals():
        if name in (str(int(number)), (signal.strsignal(number) or "").lower()):
            return 128 + int(number)
    return 255
