"""A client for the agent inside a sandbox: HTTP/1.1 with JSON, and Connect streams for live output."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h11

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine import guest_json
from sandbox_gateway.engine.spec import EvalResult, ExecResult
from sandbox_gateway.errors import BackendFailed, Invalid, Timeout, Unsupported
from sandbox_gateway.hosts.addresses import AGENT_PORT
from sandbox_gateway.hosts.base import Endpoint, GuestMount
from sandbox_gateway.hosts.connect import open_connection

_READ = 1 << 14
"""Maximum number of bytes that are read and parsed per turn of the event loop."""
_MAX_FRAME_BYTES = 4 << 20
_MAX_REFUSAL_BYTES = 4096
_MAX_REASON_LETTERS = 1000
_EXIT_CODES = (-255, 255)
_ATTEMPT_SECONDS = 0.01
_SLOW_ATTEMPT_SECONDS = 0.25
_QUICK_SECONDS = 0.5
_MAX_ATTEMPTS = 8
_LINE_FRAME = 4096
_LINE_SECONDS = 5.0
_MAX_LINE_BYTES = 1 << 16

_NO_RESULT = (KeyError, ValueError)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Identity:
    """The properties that distinguish forks of the same snapshot."""

    sandbox_id: str
    hostname: str
    access_token: str
    env: dict[str, str]
    dns: list[str]
    grow_disk: bool = False

    def body(self) -> dict[str, Any]:
        """Return the body of `/identity`. Raises Invalid for an environment that the agent would refuse."""
        if not all(name and "=" not in name and "\0" not in name + value for name, value in self.env.items()):
            raise Invalid("env must map names without '=' and NUL to strings without NUL")
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
            # The agent delays later requests until the identity is set, so there is no need to wait.
            "wait": False,
        }


class AgentClient:
    """A client for the agent at ``endpoint``. Each call opens a new connection: the machine may have been replaced."""

    def __init__(self, endpoint: Endpoint, access_token: str) -> None:
        self._address = endpoint.address
        self._line = endpoint.line
        self._key = endpoint.key
        self._token = access_token

    async def identify(self, identity: Identity, *, seconds: float, gone: Callable[[], str]) -> None:
        """Send a newly started machine its identity. Returns when the agent has answered.

        ``gone()`` returns the reason to stop waiting, or "". Raises Invalid, BackendFailed or Timeout.
        """
        deadline = time.monotonic() + seconds
        body = identity.body()
        if self._line is not None and len(_line_message(body)) <= _LINE_FRAME:
            with contextlib.suppress(OSError):
                await self._send_over_line(self._line, body)
                return
        while True:
            reader, writer = await self._connect_when_ready(deadline, gone)
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    await self._exchange(reader, writer, "/identity", _with_current_time(body))
                return
            except TimeoutError:
                raise Timeout(f"the sandbox's agent did not answer within {seconds:g} s") from None
            except (OSError, h11.RemoteProtocolError):
                # The agent accepted and hung up, so it may still be starting: try again.
                if time.monotonic() > deadline:
                    raise Timeout(
                        f"the sandbox's agent closed every connection for {seconds:g} s: look at the agent's "
                        "log in the sandbox"
                    ) from None
                await asyncio.sleep(_ATTEMPT_SECONDS)
            finally:
                _close_writer(writer)

    async def _send_over_line(self, line: socket.socket, body: dict[str, Any]) -> None:
        """Send the identity over the serial line, which is much cheaper for a new machine than a connection.

        Sends a question first, and the identity after the answer, so that its time is current. Raises OSError if the
        agent hangs up or does not answer within a few seconds (TimeoutError).
        """
        loop = asyncio.get_running_loop()
        question = b"?" + os.urandom(16)
        heard = b""
        with line.dup() as ours:  # its owner may close it at any time
            async with asyncio.timeout(_LINE_SECONDS):
                await loop.sock_sendall(ours, question)
                # Output that the agent wrote to the line before the capture may arrive first.
                while question not in heard:
                    piece = await loop.sock_recv(ours, _LINE_FRAME)
                    heard += piece
                    if not piece or len(heard) > _MAX_LINE_BYTES:
                        raise ConnectionResetError("the agent closed the connection or sent an unexpected frame")
                await loop.sock_sendall(ours, _line_message(body))

    async def _connect_when_ready(self, deadline: float, gone: Callable[[], str]) -> Streams:
        """Connect to a machine that is not listening yet.

        A SYN sent before the guest's network is up is lost, and the kernel retransmits it only after a second. So this
        starts a new attempt every few milliseconds and uses the first that succeeds.
        """
        begun = time.monotonic()
        attempts: set[asyncio.Task[Streams]] = set()
        try:
            while True:
                attempts.add(asyncio.create_task(open_connection(self._address, AGENT_PORT)))
                every = _ATTEMPT_SECONDS if time.monotonic() - begun < _QUICK_SECONDS else _SLOW_ATTEMPT_SECONDS
                done, _ = await asyncio.wait(attempts, timeout=every, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    attempts.remove(attempt)
                    if attempt.exception() is None:
                        return attempt.result()
                if reason := gone():
                    raise BackendFailed(f"the sandbox did not start: {reason}")
                if time.monotonic() > deadline:
                    raise Timeout("the sandbox's agent could not be reached in time, so its guest did not start")
                if done:
                    await asyncio.sleep(every)
                while len(attempts) >= _MAX_ATTEMPTS:
                    _discard_attempt(attempts.pop())
        finally:
            for attempt in attempts:
                _discard_attempt(attempt)

    async def call(
        self, path: str, body: dict[str, Any] | None, *, seconds: float = 30, most: int = guest_json.DEFAULT_BYTES
    ) -> dict[str, Any]:
        """POST JSON (or GET without a body) and return the answer's JSON, of at most ``most`` bytes. Raises Invalid if
        the agent refuses the request as invalid, BackendFailed, Timeout."""
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await open_connection(self._address, AGENT_PORT)
                try:
                    return await self._exchange(reader, writer, path, body, most)
                finally:
                    _close_writer(writer)
        except TimeoutError:
            raise Timeout(f"the sandbox's agent did not answer {path} within {seconds:g} s") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(f"the sandbox's agent cannot be reached: {error}") from None

    async def mounts(self, wanted: Sequence[GuestMount], *, seconds: float) -> None:
        """Make the agent mount exactly ``wanted``, in this order. If one mount fails, no new one is made."""
        described = [
            {
                "path": each.path,
                "source": each.source,
                "type": each.type,
                "options": each.options,
                "readOnly": each.read_only,
            }
            for each in wanted
        ]
        await self.call("/mounts", {"mounts": described}, seconds=seconds)

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
        answer = await self.call("/exec", body, seconds=timeout + 30, most=guest_json.MAX_BYTES)
        try:
            return ExecResult(
                exit_code=guest_json.read_integer(answer["exitCode"], *_EXIT_CODES),
                stdout=await guest_json.decode_base64(answer.pop("stdout", "")),
                stderr=await guest_json.decode_base64(answer.pop("stderr", "")),
                timed_out=answer.get("timedOut") is True,
            )
        except _NO_RESULT:
            raise BackendFailed("the sandbox's agent sent an invalid answer to /exec") from None

    async def eval(self, code: str, *, timeout: float) -> EvalResult:
        """Evaluate code in the default Python context of the sandbox's interpreter, which keeps its state."""
        try:
            body = {"code": code, "timeout": timeout}
            answer = await self.call("/eval", body, seconds=timeout + 30, most=guest_json.MAX_BYTES)
            exit_code = guest_json.read_integer(answer["exit_code"], *_EXIT_CODES)
            return EvalResult(_require_string(answer["result"]), _require_string(answer["error"]), exit_code)
        except Invalid as error:
            if error.message != "/eval not found":
                raise
            raise Unsupported(
                "the agent of this sandbox is too old to evaluate code: build its template again"
            ) from None
        except _NO_RESULT:
            raise BackendFailed("the sandbox's agent sent an invalid answer to /eval") from None

    async def ping(self, *, seconds: float) -> None:
        """Make one round trip to the agent. Raises BackendFailed or Timeout."""
        await self.call("/health", None, seconds=seconds)

    async def shell(self, command: str, output: Callable[[bytes], None], *, seconds: float) -> int:
        """Run ``/bin/sh -c command`` as root and pass on its output as it arrives. Returns the exit code."""
        try:
            async with asyncio.timeout(seconds):
                async for event in self._start(command):
                    for stream, data in _get_object(event, "data").items():
                        if stream in ("stdout", "stderr"):
                            output(await guest_json.decode_base64(data))
                    if "end" in event:
                        return guest_json.read_integer(_get_object(event, "end").get("exitCode", 0), *_EXIT_CODES)
        except TimeoutError:
            raise Timeout(f"the command did not end within {seconds:g} s") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(f"the connection to the sandbox broke during the command: {error}") from None
        except ValueError:
            raise BackendFailed("the sandbox's agent sent invalid output of a command") from None
        raise BackendFailed("the sandbox's agent ended the command's output early")

    async def launch(self, command: str) -> None:
        """Start ``/bin/sh -c command`` as root and leave it running."""
        stream = self._start(command)
        try:
            async with asyncio.timeout(30):
                await anext(stream)
        except (TimeoutError, StopAsyncIteration, OSError, h11.RemoteProtocolError) as error:
            raise BackendFailed(f"the start command could not be started: {error}") from None
        finally:
            await stream.aclose()

    async def _start(self, command: str) -> AsyncGenerator[dict[str, Any], None]:
        request = {"process": {"cmd": "/bin/sh", "args": ["-c", command], "envs": {}}, "stdin": False}
        payload = json.dumps(request).encode()
        body = struct.pack(">BI", 0, len(payload)) + payload
        reader, writer = await open_connection(self._address, AGENT_PORT)
        try:
            chunks = self._request(reader, writer, "/process.Process/Start", body, "application/connect+json")
            async for flags, message in self._frames(chunks):
                if flags & 2:
                    if "error" in message:
                        reason = _clean_reason(_get_object(message, "error").get("message", ""))
                        raise BackendFailed(f"the agent refused the command: {reason}")
                    return
                yield _get_object(message, "event")
        finally:
            _close_writer(writer)

    async def _frames(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield Connect frames: a flag byte, a big-endian length, that many bytes of JSON."""
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            while len(data) >= 5:
                flags, length = struct.unpack_from(">BI", data)
                if length > _MAX_FRAME_BYTES:
                    raise BackendFailed(f"the sandbox's agent sent a frame of more than {_MAX_FRAME_BYTES} bytes")
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
        most: int = guest_json.DEFAULT_BYTES,
    ) -> dict[str, Any]:
        sent = None if body is None else json.dumps(body).encode()
        with guest_json.Answer(self._address, path, most) as answer:
            async for chunk in self._request(reader, writer, path, sent, "application/json"):
                await answer.feed(chunk)
            return await answer.parse()

    async def _request(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: bytes | None,
        content_type: str,
    ) -> AsyncIterator[bytes]:
        """Send one request and yield the body of the answer, which is untrusted because it comes from the sandbox."""
        connection = h11.Connection(h11.CLIENT)
        headers = [("Host", "agent")]
        if body is not None:
            headers += [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        if self._token:
            headers.append(("X-Access-Token", self._token))
        if self._key:
            headers.append(("X-Gateway-Key", self._key))
        method = "GET" if body is None else "POST"
        request = h11.Request(method=method, target=path, headers=headers)
        sent = [request, h11.Data(data=body or b""), h11.EndOfMessage()]
        writer.write(b"".join(connection.send(event) or b"" for event in sent))
        await writer.drain()
        status, refusal = 0, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.InformationalResponse):
                # No request expects an interim answer. Thousands of them fit into one read, and their number is
                # unlimited.
                raise BackendFailed(f"the sandbox's agent sent an invalid answer to {path}")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                # Thousands of small pieces may arrive at once; without this, parsing them would block the event loop.
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
            raise await self._refusal_error(status, path, refusal)

    async def _refusal_error(self, status: int, path: str, body: bytes) -> BackendFailed | Invalid:
        text: object = body.decode(errors="replace")
        with contextlib.suppress(BackendFailed):
            text = (await guest_json.parse(self._address, path, body)).get("message", text)
        if status in (400, 404):
            return Invalid(_clean_reason(text))
        return BackendFailed(f"the sandbox's agent refused {path} ({status}): {_clean_reason(text)}")


def _with_current_time(body: dict[str, Any]) -> dict[str, Any]:
    """Set the time of an identity to the current time."""
    return body | {"time": time.time()}


def _line_message(body: dict[str, Any]) -> bytes:
    return b"=" + json.dumps(_with_current_time(body)).encode()


def _require_string(value: object) -> str:
    """Return ``value``. Raises ValueError if it is not a string."""
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def _get_object(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object called ``name``; an empty object if there is none."""
    part = message.get(name)
    return part if isinstance(part, dict) else {}


def _clean_reason(words: object) -> str:
    """Return a guest's error message, printable and shortened, for use in the gateway's messages."""
    return remove_control_characters(str(words)[:_MAX_REASON_LETTERS])


def _close_writer(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.close()


def _discard_attempt(attempt: asyncio.Task[Streams]) -> None:
    """Cancel a connection attempt, and close the connection if it succeeds before that."""
    attempt.add_done_callback(_close_if_connected)
    attempt.cancel()


def _close_if_connected(attempt: asyncio.Task[Streams]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        _close_writer(attempt.result()[1])
