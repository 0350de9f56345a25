"""Sending a machine its identity: over its serial line or by HTTP; and the possible answers of a hostile sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_gateway.engine import agent_client
from sandbox_gateway.engine.agent_client import AgentClient, Identity
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.base import Endpoint

ADDRESS = "127.0.0.1"
FRAME = 4096


class Machine:
    """Records the messages over the line and the HTTP requests that it receives.

    ``says``: its answers over the line to questions; None: it hangs up without an answer.
    """

    def __init__(self, says: list[bytes | None]) -> None:
        self.told: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.hung_up = 0
        """Connections without a question."""
        self._says = says
        self._listener = socket.create_server((ADDRESS, 0))
        self.port = self._listener.getsockname()[1]
        self.line, self._end = socket.socketpair()
        self.line.setblocking(False)
        self._end.setblocking(False)

    async def identify(self, identity: Identity, *, line: bool = True, gone: str = "") -> None:
        server = await asyncio.start_server(self._serve, sock=self._listener)
        answering = asyncio.create_task(self._answer())
        client = AgentClient(Endpoint(ADDRESS, self.line if line else None), "")
        try:
            await client.identify(identity, seconds=10, gone=lambda: gone)
            await asyncio.sleep(0.05)
        finally:
            answering.cancel()
            server.close()

    def close(self) -> None:
        for each in (self._listener, self.line, self._end):
            each.close()

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while frame := await loop.sock_recv(self._end, FRAME):
            if frame[:1] == b"=":
                self.told.append(json.loads(frame[1:]))
                continue
            for said in self._says:
                if said is None:
                    self._end.shutdown(socket.SHUT_RDWR)
                    return
                await loop.sock_sendall(self._end, said.replace(b"QUESTION", frame))
                await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            self.hung_up += 1
            writer.close()
            return
        self.requests.append(json.loads(await reader.readexactly(_length(head))))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()


def _length(head: bytes) -> int:
    return next(int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:"))


def identity(**env: str) -> Identity:
    return Identity(sandbox_id="0123", hostname="one", access_token="t", env=env, dns=["192.0.2.1"])


@contextlib.contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, *says: bytes | None) -> Iterator[Machine]:
    made = Machine(list(says))
    monkeypatch.setattr(agent_client, "AGENT_PORT", made.port)
    yield made
    made.close()


@pytest.mark.parametrize(
    "says",
    [
        [b"QUESTION"],
        [b"?what it said before it was captured", b"QUESTION"],
        [b"?what it said before it was captured" + b"QUESTION"],
    ],
)
def test_an_agent_that_answers_over_the_line_is_identified_over_the_line(
    monkeypatch: pytest.MonkeyPatch, says: list[bytes]
) -> None:
    with machine(monkeypatch, *says) as there:
        asyncio.run(there.identify(identity(COLOUR="green")))
    assert there.requests == []
    (told,) = there.told
    assert (told["hostname"], told["env"], told["wait"]) == ("one", {"COLOUR": "green"}, False)
    assert abs(told["time"] - time.time()) < 5


def test_without_a_line_http_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch) as there:
        asyncio.run(there.identify(identity(COLOUR="green"), line=False))
    assert there.told == []
    assert [request["env"] for request in there.requests] == [{"COLOUR": "green"}]


@pytest.mark.parametrize("says", [[], [b"?something else"], [None], [b"x" * FRAME] * 100])
def test_without_an_answer_over_the_line_http_is_used(
    monkeypatch: pytest.MonkeyPatch, says: list[bytes | None]
) -> None:
    monkeypatch.setattr(agent_client, "_LINE_SECONDS", 0.3)
    with machine(monkeypatch, *says) as there:
        start = time.monotonic()
        asyncio.run(there.identify(identity()))
    assert time.monotonic() - start < 2
    assert there.told == [] and len(there.requests) == 1


def test_a_long_identity_is_sent_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, b"QUESTION") as there:
        asyncio.run(there.identify(identity(LONG="x" * FRAME)))
    assert there.told == []
    assert [request["env"]["LONG"] for request in there.requests] == ["x" * FRAME]


def test_one_of_several_simultaneous_connections_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the guest's network comes up, or a host under load tries again."""
    attempts, answered = 0, asyncio.Event()
    connect = agent_client.open_connection

    async def delayed(*where: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 5:
            answered.set()
        await answered.wait()
        return await connect(*where)

    monkeypatch.setattr(agent_client, "open_connection", delayed)
    with machine(monkeypatch) as there:
        asyncio.run(there.identify(identity(), line=False))
    assert len(there.requests) == 1
    assert there.hung_up == attempts - 1 > 3


def test_an_ended_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, None) as there:
        start = time.monotonic()
        there._listener.close()
        there._listener = socket.create_server((ADDRESS, 0))
        with pytest.raises(BackendFailed, match="its machine ended"):
            asyncio.run(there.identify(identity(), gone="its machine ended"))
    assert time.monotonic() - start < 1


def test_the_host_may_close_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(there: Machine) -> None:
        asyncio.get_running_loop().call_later(0.1, there.line.close)
        await there.identify(identity())

    monkeypatch.setattr(agent_client, "_LINE_SECONDS", 0.3)
    with machine(monkeypatch) as there:
        asyncio.run(test(there))
    assert len(there.requests) == 1


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}])
def test_an_impossible_environment_is_refused(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    with machine(monkeypatch, b"QUESTION") as there, pytest.raises(Invalid, match="env must map"):
        asyncio.run(there.identify(identity(**env)))
    assert there.told == there.requests == []


def _answering(answer: bytes, monkeypatch: pytest.MonkeyPatch, work: Any) -> Any:
    """The result of ``work(client)`` with an agent that sends ``answer`` in one piece to every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        # Closing a connection with unread data resets it, and loses the answer.
        await reader.readexactly(_length(head))
        with contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, ADDRESS, 0)
        monkeypatch.setattr(agent_client, "AGENT_PORT", server.sockets[0].getsockname()[1])
        async with server:
            return await work(AgentClient(Endpoint(ADDRESS), ""))

    return asyncio.run(run())


def _http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        _http(200, b"abc"),
        _http(200, b"[" * 30_000),
        _http(200, b'{"exitCode": "no"}'),
        _http(200, b'{"exitCode": Infinity}'),
        _http(200, b'{"exitCode": 0, "stdout": "a"}'),
        _http(200, b'{"exitCode": 0, "stdout": [' + b"{}," * 40_000 + b"{}]}"),
        _http(500, b"["),
        _http(500, b"[]"),
        _http(500, b"[" * 30_000),
    ],
)
def test_an_invalid_answer_is_a_failure_and_not_a_bug(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with pytest.raises(BackendFailed):
        _answering(answer, monkeypatch, lambda client: client.exec(["true"]))


def test_the_size_of_answers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    much = _http(200, b'{"a": "' + b"x" * (2 << 20) + b'"}')
    with pytest.raises(BackendFailed, match="more than 262144 bytes"):
        _answering(much, monkeypatch, lambda client: client.call("/sync", {}))
    stdout = json.dumps({"exitCode": 0, "stdout": "eHh4" * (1 << 19)}).encode()
    assert len(_answering(_http(200, stdout), monkeypatch, lambda client: client.exec(["x"])).stdout) == 3 << 19


def test_an_answer_in_tiny_pieces_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def work(client: AgentClient) -> None:
        nonlocal turns

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(others())
        await client.call("/sync", {})
        waiting.cancel()

    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"a": "' + b"x" * 5000 + b'"}')
    _answering(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n", monkeypatch, work)
    assert turns > 5000


def test_half_a_character_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _http(200, b'{"result": "\\ud800", "error": "", "exit_code": 0}')
    assert _answering(answer, monkeypatch, lambda client: client.eval("x", timeout=1)).result == "?"
