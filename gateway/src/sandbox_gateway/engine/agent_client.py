"""A client for the agent inside a sandbox. It uses HTTP/1.1 with JSON, and Connect streams for live output.

It uses h11 directly, because HTTP client libraries do not limit what an untrusted agent makes the gateway parse.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import h11

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine import guest_json
from sandbox_gateway.errors import BackendFailed, Invalid, Timeout, Unsupported
from sandbox_gateway.hosts.base import Endpoint, GuestMount
from sandbox_gateway.hosts.connect import AGENT_PORT, open_connection

_READ_BYTES = 1 << 14
"""Maximum number of bytes that are read and parsed per turn of the event loop."""
_MAX_FRAME_BYTES = 4 << 20
_MAX_REFUSAL_BYTES = 4096
_MAX_REASON_LENGTH = 1000
_EXIT_CODE_RANGE = (-255, 255)
_ATTEMPT_INTERVAL_SECONDS = 0.01
_SLOW_ATTEMPT_INTERVAL_SECONDS = 0.25
_FAST_ATTEMPT_PERIOD_SECONDS = 0.5
_MAX_ATTEMPTS = 8
_CALL_TIMEOUT_SECONDS = 30.0
_MAX_LINE_FRAME_BYTES = 4096
_LINE_TIMEOUT_SECONDS = 5.0
_MAX_BYTES_BEFORE_ECHO = 1 << 16

_INVALID_RESPONSE_ERRORS = (KeyError, ValueError)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class ExecResult:
    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool


@dataclass(frozen=True)
class EvalResult:
    """The result of evaluating code in the sandbox's interpreter."""

    result: str
    """The ``repr`` of the value of the last expression."""
    error: str
    """The error message; empty if there was no error."""
    exit_code: int
    """0, or 1 after an error."""


@dataclass(frozen=True)
class Identity:
    """The properties that distinguish forks of the same snapshot."""

    sandbox_id: str
    hostname: str
    access_token: str
    env: dict[str, str]
    dns: list[str]
    grow_disk: bool = False

    def to_body(self) -> dict[str, Any]:
        """Return the body of a request to `/identity`. Raises Invalid if the agent would refuse the environment."""
        check_environment(self.env)
        return {
            "sandboxID": self.sandbox_id,
            "hostname": self.hostname,
            "machineID": os.urandom(16).hex(),
            "time": time.time(),
            "entropy": base64.b64encode(os.urandom(64)).decode(),
            "accessToken": self.access_token,
            "env": self.env,
            "dns": self.dns,
            "growDisk": self.grow_disk,
            # The agent delays later requests until the identity is set, so this request need not wait.
            "wait": False,
        }


def check_environment(env: Mapping[str, str]) -> None:
    """Raise Invalid if the agent would refuse these environment variables."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise Invalid(
                f"env contains the invalid variable {name[:80]!r}: use a nonempty name without '=' or NUL, and a value "
                "without NUL"
            )


class AgentClient:
    """A client for the agent at ``endpoint``.

    Each call opens a new connection, because the machine may have been replaced.
    """

    def __init__(self, endpoint: Endpoint, access_token: str) -> None:
        self._address = endpoint.address
        self._line = endpoint.line
        self._key = endpoint.key
        self._token = access_token

    async def identify(self, identity: Identity, *, seconds: float, find_end_reason: Callable[[], str]) -> None:
        """Send a newly started machine its identity, and wait for the agent's response.

        ``find_end_reason`` returns why the machine has stopped, or "" while it runs. Raises Invalid, BackendFailed or
        Timeout.
        """
        deadline = time.monotonic() + seconds
        body = identity.to_body()
        if self._line is not None and len(_encode_line_message(body)) <= _MAX_LINE_FRAME_BYTES:
            with contextlib.suppress(OSError):
                await self._send_over_line(self._line, body)
                return
        while True:
            reader, writer = await self._connect_when_ready(deadline, find_end_reason)
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    await self._exchange(reader, writer, "/identity", _add_current_time(body))
                return
            except TimeoutError:
                raise Timeout(
                    f"the sandbox's agent did not respond within {seconds:g} s: the host may be overloaded. Try again "
                    "later"
                ) from None
            except (OSError, h11.RemoteProtocolError):
                # The agent accepted the connection and closed it, so it may still be starting.
                if time.monotonic() > deadline:
                    raise Timeout(
                        f"the sandbox's agent closed every connection for {seconds:g} s: look at the agent's "
                        "log in the sandbox"
                    ) from None
                await asyncio.sleep(_ATTEMPT_INTERVAL_SECONDS)
            finally:
                _close_writer(writer)

    async def _send_over_line(self, line: socket.socket, body: dict[str, Any]) -> None:
        """Send the identity over the serial line, which is much cheaper for a new machine than a TCP connection.

        The identity is sent only after the agent has echoed a challenge, so that the time in the identity is current.
        Raises OSError if the agent closes the line, or does not respond within a few seconds.
        """
        loop = asyncio.get_running_loop()
        challenge = b"?" + os.urandom(16)
        received_bytes = b""
        with line.dup() as duplicate:  # the owner may close the line at any time
            async with asyncio.timeout(_LINE_TIMEOUT_SECONDS):
                await loop.sock_sendall(duplicate, challenge)
                # Bytes that the agent wrote to the line before the capture may arrive first.
                while challenge not in received_bytes:
                    piece = await loop.sock_recv(duplicate, _MAX_LINE_FRAME_BYTES)
                    received_bytes += piece
                    if not piece or len(received_bytes) > _MAX_BYTES_BEFORE_ECHO:
                        raise ConnectionResetError("the agent closed the connection or sent an unexpected frame")
                await loop.sock_sendall(duplicate, _encode_line_message(body))

    async def _connect_when_ready(self, deadline: float, find_end_reason: Callable[[], str]) -> Streams:
        """Connect to a machine that may not be listening yet.

        A SYN sent before the guest's network is up is lost, and the kernel retransmits it only after a second.
        Therefore, start a new attempt every few milliseconds and use the first one that succeeds.
        """
        start_time = time.monotonic()
        attempts: set[asyncio.Task[Streams]] = set()
        try:
            while True:
                attempts.add(asyncio.create_task(open_connection(self._address, AGENT_PORT)))
                interval = (
                    _ATTEMPT_INTERVAL_SECONDS
                    if time.monotonic() - start_time < _FAST_ATTEMPT_PERIOD_SECONDS
                    else _SLOW_ATTEMPT_INTERVAL_SECONDS
                )
                finished_attempts, _ = await asyncio.wait(
                    attempts, timeout=interval, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in finished_attempts:
                    attempts.remove(attempt)
                    if attempt.exception() is None:
                        return attempt.result()
                if reason := find_end_reason():
                    raise BackendFailed(f"the sandbox did not start: {reason}. Look at the gateway's log")
                if time.monotonic() > deadline:
                    raise Timeout(
                        "the sandbox's agent did not accept a connection in time: the guest may not have started. Look "
                        "at the gateway's log"
                    )
                if finished_attempts:
                    await asyncio.sleep(interval)
                while len(attempts) >= _MAX_ATTEMPTS:
                    _discard_attempt(attempts.pop())
        finally:
            for attempt in attempts:
                _discard_attempt(attempt)

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None,
        *,
        seconds: float = _CALL_TIMEOUT_SECONDS,
        max_bytes: int = guest_json.DEFAULT_MAX_BYTES,
    ) -> dict[str, Any]:
        """Send a POST request with a JSON body, or a GET request if ``body`` is None. Return the JSON of the response.

        ``max_bytes``: maximum length of the response. Raises Invalid if the agent refuses the request as invalid,
        Timeout if it does not respond within ``seconds``, and BackendFailed if the request fails for any other reason.
        """
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await open_connection(self._address, AGENT_PORT)
                try:
                    return await self._exchange(reader, writer, path, body, max_bytes)
                finally:
                    _close_writer(writer)
        except TimeoutError:
            raise Timeout(
                f"the sandbox's agent did not respond to {path} within {seconds:g} s: the sandbox may be overloaded. "
                "Try again later"
            ) from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(
                f"the sandbox's agent cannot be reached: {error}. Check that the sandbox and its agent are running"
            ) from None

    async def set_mounts(self, mounts: Sequence[GuestMount], *, seconds: float) -> None:
        """Make the agent mount exactly ``mounts``, in this order. If a mount fails, undo the new mounts."""
        entries = [
            {
                "path": each.path,
                "source": each.source,
                "type": each.type,
                "options": each.options,
                "readOnly": each.read_only,
            }
            for each in mounts
        ]
        await self.call("/mounts", {"mounts": entries}, seconds=seconds)

    async def sync(self, *, seconds: float = _CALL_TIMEOUT_SECONDS) -> None:
        """Make the guest write its cached data to its disk."""
        await self.call("/sync", {}, seconds=seconds)

    async def freeze(self, *, seconds: int) -> bool:
        """Block writes to the guest's file system until ``thaw`` is called, but for at most ``seconds``.

        Returns False if the file system cannot be frozen.
        """
        return bool((await self.call("/freeze", {"seconds": seconds})).get("frozen"))

    async def thaw(self) -> None:
        """Allow writes to the guest's file system again."""
        await self.call("/thaw", {})

    async def start_interpreter(self, *, seconds: float) -> None:
        """Start the default Python context of the sandbox's interpreter, so that the first code runs immediately."""
        await self.call("/contexts/default/start", {}, seconds=seconds)

    async def exec(
        self,
        args: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float = 60,
        stdin: bytes | None = None,
    ) -> ExecResult:
        body: dict[str, Any] = {"args": args, "env": env or {}, "timeout": timeout}
        body |= {key: value for key, value in (("cwd", cwd), ("user", user)) if value}
        if stdin is not None:
            body["stdin"] = base64.b64encode(stdin).decode()
        response = await self.call("/exec", body, seconds=timeout + 30, max_bytes=guest_json.MAX_BYTES)
        try:
            return ExecResult(
                exit_code=guest_json.require_integer(response["exitCode"], *_EXIT_CODE_RANGE),
                stdout=await guest_json.decode_base64(response.pop("stdout", "")),
                stderr=await guest_json.decode_base64(response.pop("stderr", "")),
                timed_out=response.get("timedOut") is True,
            )
        except _INVALID_RESPONSE_ERRORS:
            raise guest_json.create_invalid_response_error("sent an invalid response to /exec") from None

    async def eval(self, code: str, *, timeout: float) -> EvalResult:
        """Evaluate code in the default Python context of the sandbox's interpreter. The context keeps its state."""
        try:
            body = {"code": code, "timeout": timeout}
            response = await self.call("/eval", body, seconds=timeout + 30, max_bytes=guest_json.MAX_BYTES)
            exit_code = guest_json.require_integer(response["exit_code"], *_EXIT_CODE_RANGE)
            return EvalResult(_require_string(response["result"]), _require_string(response["error"]), exit_code)
        except Invalid as error:
            if error.message != "/eval not found":
                raise
            raise Unsupported(
                "the agent of this sandbox is too old to evaluate code: build its template again"
            ) from None
        except _INVALID_RESPONSE_ERRORS:
            raise guest_json.create_invalid_response_error("sent an invalid response to /eval") from None

    async def ping(self, *, seconds: float) -> None:
        """Check that the agent responds. Raises BackendFailed or Timeout."""
        await self.call("/health", None, seconds=seconds)

    async def run_shell(self, command: str, output: Callable[[bytes], None], *, seconds: float) -> int:
        """Run ``/bin/sh -c command`` as root, pass its output to ``output`` as it arrives, and return the exit code."""
        try:
            async with asyncio.timeout(seconds):
                async for event in self._start_shell(command):
                    for stream, data in _get_object(event, "data").items():
                        if stream in ("stdout", "stderr"):
                            await _forward(await guest_json.decode_base64(data), output)
                    if "end" in event:
                        return guest_json.require_integer(
                            _get_object(event, "end").get("exitCode", 0), *_EXIT_CODE_RANGE
                        )
        except TimeoutError:
            raise Timeout(f"the command did not finish within {seconds:g} s: increase its timeout") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(
                f"the connection to the sandbox was lost during the command: {error}. Check that the sandbox is "
                "running, and run the command again"
            ) from None
        except ValueError:
            raise guest_json.create_invalid_response_error("sent invalid command output") from None
        raise guest_json.create_invalid_response_error("closed the command's output before the command exited")

    async def start_background_command(self, command: str) -> None:
        """Start ``/bin/sh -c command`` as root and leave it running."""
        stream = self._start_shell(command)
        try:
            async with asyncio.timeout(30):
                await anext(stream)
        except (TimeoutError, StopAsyncIteration, OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(
                f"the template's start command could not be run: {error}. Build the template again"
            ) from None
        finally:
            await stream.aclose()

    async def upload(self, path: str, size: int, pieces: AsyncIterator[bytes], *, seconds: float) -> None:
        """Write ``size`` bytes to a file in the sandbox, as root and as they arrive.

        Raises Timeout, BackendFailed, or Invalid if the agent refuses the file as invalid.
        """
        target = f"/files?{urlencode({'path': path, 'username': 'root'})}"
        connection = h11.Connection(h11.CLIENT)
        head = self._build_request(target, size, "application/octet-stream")
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await open_connection(self._address, AGENT_PORT)
                try:
                    writer.write(connection.send(head) or b"")
                    # The agent may refuse the file while it is being sent, for example because its disk is full.
                    sending = asyncio.create_task(_send_body(connection, writer, pieces))
                    try:
                        async for _ in self._read_response(connection, reader, "/files"):
                            pass
                        await sending
                    finally:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
                finally:
                    _close_writer(writer)
        except TimeoutError:
            raise Timeout(
                f"the files were not written to the sandbox within {seconds:g} s: increase the time for set-up commands"
            ) from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(
                f"the connection to the sandbox was lost while files were written to it: {error}. Build again"
            ) from None

    async def _start_shell(self, command: str) -> AsyncGenerator[dict[str, Any], None]:
        request = {"process": {"cmd": "/bin/sh", "args": ["-c", command], "envs": {}}, "stdin": False}
        payload = json.dumps(request).encode()
        body = struct.pack(">BI", 0, len(payload)) + payload
        reader, writer = await open_connection(self._address, AGENT_PORT)
        try:
            chunks = self._send_request(reader, writer, "/process.Process/Start", body, "application/connect+json")
            async for flags, message in self._read_frames(chunks):
                if flags & 2:
                    if "error" in message:
                        reason = _clean_reason(_get_object(message, "error").get("message", ""))
                        raise BackendFailed(f"the agent refused the command: {reason}")
                    return
                yield _get_object(message, "event")
        finally:
            _close_writer(writer)

    async def _read_frames(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the flags and the message of each Connect frame: a flag byte, a big-endian length, and JSON."""
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            while len(data) >= 5:
                flags, length = struct.unpack_from(">BI", data)
                if length > _MAX_FRAME_BYTES:
                    raise guest_json.create_invalid_response_error(f"sent a frame longer than {_MAX_FRAME_BYTES} bytes")
                if len(data) < 5 + length:
                    break
                frame = bytes(data[5 : 5 + length])
                del data[: 5 + length]
                yield flags, await guest_json.parse(self._address, "a command", frame, _MAX_FRAME_BYTES)

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: dict[str, Any] | None,
        max_bytes: int = guest_json.DEFAULT_MAX_BYTES,
    ) -> dict[str, Any]:
        payload = None if body is None else json.dumps(body).encode()
        with guest_json.ResponseReader(self._address, path, max_bytes) as response:
            async for chunk in self._send_request(reader, writer, path, payload, "application/json"):
                await response.feed(chunk)
            return await response.parse()

    async def _send_request(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: bytes | None,
        content_type: str,
    ) -> AsyncIterator[bytes]:
        """Send one request and yield the body of the response, which is untrusted because it comes from the sandbox."""
        connection = h11.Connection(h11.CLIENT)
        request = self._build_request(path, None if body is None else len(body), content_type)
        events = [request, h11.Data(data=body or b""), h11.EndOfMessage()]
        writer.write(b"".join(connection.send(event) or b"" for event in events))
        await writer.drain()
        async for data in self._read_response(connection, reader, path):
            yield data

    def _build_request(self, path: str, body_size: int | None, content_type: str) -> h11.Request:
        """Return the head of a POST request, or of a GET request if ``body_size`` is None."""
        headers = [("Host", "agent")]
        if body_size is not None:
            headers += [("Content-Type", content_type), ("Content-Length", str(body_size))]
        if self._token:
            headers.append(("X-Access-Token", self._token))
        if self._key:
            headers.append(("X-Gateway-Key", self._key))
        return h11.Request(method="GET" if body_size is None else "POST", target=path, headers=headers)

    async def _read_response(
        self, connection: h11.Connection, reader: asyncio.StreamReader, path: str
    ) -> AsyncIterator[bytes]:
        """Yield the body of the response. Raises Invalid or BackendFailed if the agent refuses the request."""
        status, refusal = 0, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.InformationalResponse):
                # No request expects an interim response. Thousands of them fit into one read, and their number is
                # unlimited.
                raise guest_json.create_invalid_response_error(f"sent an invalid response to {path}")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                # Thousands of small pieces may arrive together. Without this, parsing them would block the event loop.
                await asyncio.sleep(0)
                if status < 300:
                    yield bytes(event.data)
                else:
                    refusal += bytes(event.data)
                    if len(refusal) > _MAX_REFUSAL_BYTES:
                        break
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the agent closed the connection")
        if status >= 300:
            raise await self._create_refusal_error(status, path, refusal)

    async def _create_refusal_error(self, status: int, path: str, body: bytes) -> BackendFailed | Invalid:
        text: object = body.decode(errors="replace")
        with contextlib.suppress(BackendFailed):
            text = (await guest_json.parse(self._address, path, body)).get("message", text)
        if status in (400, 404):
            return Invalid(_clean_reason(text))
        return BackendFailed(f"the sandbox's agent refused {path} ({status}): {_clean_reason(text)}")


def _add_current_time(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the body of an identity request with the current time."""
    return body | {"time": time.time()}


async def _send_body(connection: h11.Connection, writer: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
    """Send the body of a request. If that fails, close the connection, so that nobody waits for the response."""
    try:
        async for piece in pieces:
            writer.write(connection.send(h11.Data(data=piece)) or b"")
            await writer.drain()
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
    except BaseException:
        writer.transport.abort()
        raise


def _encode_line_message(body: dict[str, Any]) -> bytes:
    return b"=" + json.dumps(_add_current_time(body)).encode()


def _require_string(value: object) -> str:
    """Return ``value``. Raises ValueError if it is not a string."""
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _get_object(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object in the field ``name``, or an empty object if there is none."""
    value = message.get(name)
    return value if isinstance(value, dict) else {}


async def _forward(data: bytes, output: Callable[[bytes], None]) -> None:
    """Pass ``data`` to ``output`` in pieces, so that a guest cannot delay other requests with millions of lines."""
    for start in range(0, len(data), _READ_BYTES):
        output(data[start : start + _READ_BYTES])
        await asyncio.sleep(0)


def _clean_reason(message: object) -> str:
    """Shorten a guest's error message and remove control characters, so that the gateway's messages can quote it."""
    return remove_control_characters(str(message)[:_MAX_REASON_LENGTH])


def _close_writer(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.close()


def _discard_attempt(attempt: asyncio.Task[Streams]) -> None:
    """Cancel a connection attempt. If it has already succeeded, close the connection."""
    attempt.add_done_callback(_close_if_connected)
    attempt.cancel()


def _close_if_connected(attempt: asyncio.Task[Streams]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        _close_writer(attempt.result()[1])
