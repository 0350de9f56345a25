"""Tests that the agent client sends identities over the serial port or HTTP, and handles hostile responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from sandbox_gateway.engine import agent_client
from sandbox_gateway.engine.agent_client import AgentClient, Identity
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.base import Endpoint

ADDRESS = "127.0.0.1"
FRAME_BYTES = 4096


class FakeMachine:
    """A fake machine that records the identities that it receives over the serial port and over HTTP.

    ``line_responses``: what the machine sends over the serial port after each challenge. None closes the port.
    """

    def __init__(self, line_responses: list[bytes | None]) -> None:
        self.line_identities: list[dict[str, Any]] = []
        self.http_identities: list[dict[str, Any]] = []
        self.dropped_connection_count = 0
        """Number of connections that were closed without a request."""
        self._line_responses = line_responses
        self._listener = socket.create_server((ADDRESS, 0))
        self.port = self._listener.getsockname()[1]
        self.line, self._guest_line = socket.socketpair()
        self.line.setblocking(False)
        self._guest_line.setblocking(False)

    async def identify(self, identity: Identity, *, use_line: bool = True, end_reason: str = "") -> None:
        server = await asyncio.start_server(self._serve_http, sock=self._listener)
        responder = asyncio.create_task(self._answer_challenges())
        client = AgentClient(Endpoint(ADDRESS, self.line if use_line else None), "")
        try:
            await client.identify(identity, seconds=10, find_end_reason=lambda: end_reason)
            await asyncio.sleep(0.05)
        finally:
            responder.cancel()
            await asyncio.gather(responder, return_exceptions=True)
            server.close()

    def close(self) -> None:
        for each in (self._listener, self.line, self._guest_line):
            each.close()

    async def _answer_challenges(self) -> None:
        loop = asyncio.get_running_loop()
        while frame := await loop.sock_recv(self._guest_line, FRAME_BYTES):
            if frame[:1] == b"=":
                self.line_identities.append(json.loads(frame[1:]))
                continue
            for response in self._line_responses:
                if response is None:
                    self._guest_line.shutdown(socket.SHUT_RDWR)
                    return
                await loop.sock_sendall(self._guest_line, response.replace(b"CHALLENGE", frame))
                await asyncio.sleep(0.01)

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            headers = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            self.dropped_connection_count += 1
            writer.close()
            return
        self.http_identities.append(json.loads(await reader.readexactly(_parse_content_length(headers))))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()


def _parse_content_length(headers: bytes) -> int:
    return next(int(line[15:]) for line in headers.splitlines() if line.lower().startswith(b"content-length:"))


def make_identity(**env: str) -> Identity:
    return Identity(sandbox_id="0123", hostname="one", access_token="t", env=env, dns=["192.0.2.1"])


@contextlib.contextmanager
def opened_machine(monkeypatch: pytest.MonkeyPatch, *line_responses: bytes | None) -> Iterator[FakeMachine]:
    fake_machine = FakeMachine(list(line_responses))
    monkeypatch.setattr(agent_client, "AGENT_PORT", fake_machine.port)
    yield fake_machine
    fake_machine.close()


@pytest.mark.parametrize(
    "line_responses",
    [
        [b"CHALLENGE"],
        [b"?output from before the capture", b"CHALLENGE"],
        [b"?output from before the capture" + b"CHALLENGE"],
    ],
)
async def test_the_identity_is_sent_over_the_line_if_the_agent_responds(
    monkeypatch: pytest.MonkeyPatch, line_responses: list[bytes]
) -> None:
    with opened_machine(monkeypatch, *line_responses) as fake_machine:
        await fake_machine.identify(make_identity(COLOUR="green"))
    assert fake_machine.http_identities == []
    (line_identity,) = fake_machine.line_identities
    assert (line_identity["hostname"], line_identity["env"], line_identity["wait"]) == (
        "one",
        {"COLOUR": "green"},
        False,
    )
    assert abs(line_identity["time"] - time.time()) < 5


async def test_the_identity_is_sent_over_http_if_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_machine(monkeypatch) as fake_machine:
        await fake_machine.identify(make_identity(COLOUR="green"), use_line=False)
    assert fake_machine.line_identities == []
    assert [request["env"] for request in fake_machine.http_identities] == [{"COLOUR": "green"}]


@pytest.mark.parametrize("line_responses", [[], [b"?something else"], [None], [b"x" * FRAME_BYTES] * 100])
async def test_the_identity_is_sent_over_http_if_the_line_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, line_responses: list[bytes | None]
) -> None:
    monkeypatch.setattr(agent_client, "_LINE_TIMEOUT_SECONDS", 0.3)
    with opened_machine(monkeypatch, *line_responses) as fake_machine:
        start_time = time.monotonic()
        await fake_machine.identify(make_identity())
    assert time.monotonic() - start_time < 2
    assert fake_machine.line_identities == [] and len(fake_machine.http_identities) == 1


async def test_a_long_identity_is_sent_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_machine(monkeypatch, b"CHALLENGE") as fake_machine:
        await fake_machine.identify(make_identity(LONG="x" * FRAME_BYTES))
    assert fake_machine.line_identities == []
    assert [request["env"]["LONG"] for request in fake_machine.http_identities] == ["x" * FRAME_BYTES]


async def test_only_one_of_several_simultaneous_connections_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several attempts can succeed simultaneously, for example when the guest's network comes up."""
    attempt_count, connect_event = 0, asyncio.Event()
    original_open_connection = agent_client.open_connection

    async def connect_later(*address: Any) -> Any:
        nonlocal attempt_count
        attempt_count += 1
        if attempt_count == 5:
            connect_event.set()
        await connect_event.wait()
        return await original_open_connection(*address)

    monkeypatch.setattr(agent_client, "open_connection", connect_later)
    with opened_machine(monkeypatch) as fake_machine:
        await fake_machine.identify(make_identity(), use_line=False)
    assert len(fake_machine.http_identities) == 1
    assert fake_machine.dropped_connection_count == attempt_count - 1 > 3


async def test_identify_fails_immediately_if_the_machine_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_machine(monkeypatch, None) as fake_machine:
        start_time = time.monotonic()
        fake_machine._listener.close()
        fake_machine._listener = socket.create_server((ADDRESS, 0))
        with pytest.raises(BackendFailed, match="its machine stopped"):
            await fake_machine.identify(make_identity(), end_reason="its machine stopped")
    assert time.monotonic() - start_time < 1


async def test_the_identity_is_sent_over_http_if_the_host_closes_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "_LINE_TIMEOUT_SECONDS", 0.3)
    with opened_machine(monkeypatch) as fake_machine:
        asyncio.get_running_loop().call_later(0.1, fake_machine.line.close)
        await fake_machine.identify(make_identity())
    assert len(fake_machine.http_identities) == 1


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}])
async def test_an_invalid_environment_is_refused(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    with (
        opened_machine(monkeypatch, b"CHALLENGE") as fake_machine,
        pytest.raises(Invalid, match="env contains the invalid variable"),
    ):
        await fake_machine.identify(make_identity(**env))
    assert fake_machine.line_identities == fake_machine.http_identities == []


async def _call_agent(response: bytes, monkeypatch: pytest.MonkeyPatch, action: Any) -> Any:
    """Return the result of ``action(client)``, where the client's agent answers every request with ``response``."""

    async def serve_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = await reader.readuntil(b"\r\n\r\n")
        # Closing a connection with unread data resets it, and the response is lost.
        await reader.readexactly(_parse_content_length(headers))
        with contextlib.suppress(ConnectionError):
            writer.write(response)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve_response, ADDRESS, 0)
    monkeypatch.setattr(agent_client, "AGENT_PORT", server.sockets[0].getsockname()[1])
    async with server:
        return await action(AgentClient(Endpoint(ADDRESS), ""))


def _make_http_response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    "response",
    [
        _make_http_response(200, b"abc"),
        _make_http_response(200, b"[" * 30_000),
        _make_http_response(200, b'{"exitCode": "no"}'),
        _make_http_response(200, b'{"exitCode": Infinity}'),
        _make_http_response(200, b'{"exitCode": 0, "stdout": "a"}'),
        _make_http_response(200, b'{"exitCode": 0, "stdout": [' + b"{}," * 40_000 + b"{}]}"),
        _make_http_response(500, b"["),
        _make_http_response(500, b"[]"),
        _make_http_response(500, b"[" * 30_000),
    ],
)
async def test_an_invalid_response_raises_backend_failed(monkeypatch: pytest.MonkeyPatch, response: bytes) -> None:
    with pytest.raises(BackendFailed):
        await _call_agent(response, monkeypatch, lambda client: client.exec(["true"]))


async def test_the_size_of_responses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    large_response = _make_http_response(200, b'{"a": "' + b"x" * (2 << 20) + b'"}')
    with pytest.raises(BackendFailed, match="more than 262144 bytes"):
        await _call_agent(large_response, monkeypatch, lambda client: client.call("/sync", {}))
    large_body = json.dumps({"exitCode": 0, "stdout": "eHh4" * (1 << 19)}).encode()
    result = await _call_agent(_make_http_response(200, large_body), monkeypatch, lambda client: client.exec(["x"]))
    assert len(result.stdout) == 3 << 19


async def test_a_response_in_tiny_pieces_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_count = 0

    async def call_and_count_turns(client: AgentClient) -> None:
        nonlocal turn_count

        async def count_turns() -> None:
            nonlocal turn_count
            while True:
                turn_count += 1
                await asyncio.sleep(0)

        counter_task = asyncio.create_task(count_turns())
        await client.call("/sync", {})
        counter_task.cancel()

    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"a": "' + b"x" * 5000 + b'"}')
    await _call_agent(
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n", monkeypatch, call_and_count_turns
    )
    assert turn_count > 5000


async def test_an_unpaired_surrogate_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    response = _make_http_response(200, b'{"result": "\\ud800", "error": "", "exit_code": 0}')
    result = await _call_agent(response, monkeypatch, lambda client: client.eval("x", timeout=1))
    assert result.result == "?"


async def _upload_file(
    monkeypatch: pytest.MonkeyPatch, response: bytes, size: int, *, read_bytes: int | None = None
) -> bytes:
    """Upload ``size`` bytes to an agent that reads ``read_bytes`` of them before it responds. Returns what it read."""
    received_data = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received_data.extend(await reader.readuntil(b"\r\n\r\n"))
        received_data.extend(await reader.readexactly(size if read_bytes is None else read_bytes))
        writer.write(response)
        await writer.drain()
        await asyncio.sleep(0.05 if read_bytes is None else 5)
        writer.close()

    async def generate_pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 1 << 16):
            yield bytes(min(1 << 16, size - start))

    server = await asyncio.start_server(serve, ADDRESS, 0)
    monkeypatch.setattr(agent_client, "AGENT_PORT", server.sockets[0].getsockname()[1])
    async with server:
        await AgentClient(Endpoint(ADDRESS), "token").upload("/a b.tar", size, generate_pieces(), seconds=20)
    return bytes(received_data)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
async def test_an_upload_arrives_complete(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    received_data = await _upload_file(monkeypatch, _make_http_response(200, b"[]"), size)
    head, _, body = received_data.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /files?path=%2Fa+b.tar&username=root HTTP/1.1\r\n")
    assert body == bytes(size)


async def test_an_agent_that_refuses_an_upload_while_it_is_sent_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the file, which does not fit into the buffers of the connection, is never read."""
    response = _make_http_response(507, b'{"message": "no space left"}')
    with pytest.raises(BackendFailed, match="no space left"):
        await _upload_file(monkeypatch, response, 64 << 20, read_bytes=10)


async def test_an_agent_that_hangs_up_during_an_upload_causes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendFailed, match="the connection to the sandbox was lost"):
        await _upload_file(monkeypatch, b"", 1 << 20)
