"""Root of a sandbox, whose own program answers in the agent's place or at any other port: its HTTP harms only its own
sandbox. (For its JSON, see `test_guest_root_agent_answers`.)
"""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine import commands
from tests.api.inside import (
    AGENT_PORT,
    PORT,
    Handler,
    RawService,
    Service,
    eventually,
    machine_address,
    make_reply,
    port_headers,
    raw_service,
)
from tests.api.memory_gateway import EXEC_KEY, MemoryGateway
from tests.api.test_sandboxes import create_sandbox

CALLS = (
    ("POST", "/sandboxes/one/exec", {"args": ["true"]}),
    ("POST", "/v1/sandboxes/one/eval", {"code": "1"}),
    ("POST", "/v1/sandboxes/one/ping", None),
    ("GET", "/sandboxes/one", None),
)
"""Every request to an agent that a client with a limited key can cause."""
OK = b"HTTP/1.1 200 OK\r\n"
ELSEWHERE = 47113
"""A port on which the test listens; answers redirect the gateway there."""


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_PING_SECONDS", 2)


@pytest.fixture
def host_service(memory_gateway: MemoryGateway) -> Iterator[RawService]:
    """A service of the host itself."""
    canary = RawService()
    with Service("127.0.0.1", ELSEWHERE, canary.listen):
        yield canary


class Probe:
    """Keeps sending requests to `/health` and to another sandbox's port."""

    def __init__(self, memory_gateway: MemoryGateway, other: dict[str, Any]) -> None:
        self._served = memory_gateway
        self._other = other
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = 0
        self.failures: list[str] = []

    def _ask(self) -> None:
        with self._served.client(EXEC_KEY) as client:
            while not self._ended.wait(0.01):
                answers = client.get("/health"), client.get("/echo", headers=port_headers(self._other))
                self.answers += all(answer.is_success for answer in answers)
                self.failures += [answer.text for answer in answers if not answer.is_success]

    def __enter__(self) -> Probe:
        self._thread.start()
        eventually(lambda: self.answers or self.failures)
        return self

    def __exit__(self, *_: object) -> None:
        before = self.answers
        eventually(lambda: self.answers > before or self.failures)
        self._ended.set()
        self._thread.join()
        assert self.failures == []


def repeat(piece: bytes, limit: int | None = None) -> Handler:
    """Send ``piece`` repeatedly: without end, or ``most`` times."""

    async def send_repeatedly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        while limit is None or sent < limit:
            writer.write(piece)
            await writer.drain()
            sent += 1

    return send_repeatedly


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


BOMB = gzip.compress(b'{"exitCode": 0, "stdout": "' + b"A" * (64 << 20) + b'"}')

LIES: dict[str, tuple[bytes, Handler | None]] = {
    "nothing": (b"", None),
    "a head that never ends": (OK, repeat(b"X-Y: " + b"z" * 1000 + b"\r\n")),
    "one header that never ends": (OK + b"X: ", repeat(b"z" * 4096)),
    "a first line that never ends": (b"HTTP/1.1 200 ", repeat(b"z" * 4096)),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", hang_up),
    "another version": (b"HTTP/22 200 OK\r\nContent-Length: 2\r\n\r\n{}", hang_up),
    "less than it says": (OK + b"Content-Length: 1000\r\n\r\n{", hang_up),
    "two lengths": (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", hang_up),
    "a length below zero": (OK + b"Content-Length: -1\r\n\r\n{}", hang_up),
    "a length of 5000 digits": (OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", hang_up),
    "more than it may": (OK + b"Content-Length: 1000000000000\r\n\r\n", repeat(b" " * 65536)),
    "chunks without end": (OK + b"Transfer-Encoding: chunked\r\n\r\n", repeat(b"10000\r\n" + b" " * 65536 + b"\r\n")),
    "a chunk of no size": (OK + b"Transfer-Encoding: chunked\r\n\r\nx\r\n{}\r\n", hang_up),
    "a chunk below zero": (OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", hang_up),
    "a size that never ends": (OK + b"Transfer-Encoding: chunked\r\n\r\n", repeat(b"0" * 4096)),
    "an extension that never ends": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", repeat(b"a" * 4096)),
    "trailers that never end": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", repeat(b"X: y\r\n")),
    "an encoding of its own": (OK + b"Transfer-Encoding: rot13\r\n\r\n{}", hang_up),
    "until it hangs up": (b"HTTP/1.0 200 OK\r\n\r\n[", repeat(b" " * 65536, 4096)),
    "a change of protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", hang_up),
    "early hints without end": (b"HTTP/1.1 103 Early Hints\r\n\r\n", repeat(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)),
    "100 without end": (b"HTTP/1.1 100 Continue\r\n\r\n", repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)),
    "a status that is none": (b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}", hang_up),
    "a gzip bomb": (make_reply("200 OK", BOMB, "Content-Encoding: gzip", "Content-Type: application/json"), None),
    "a redirect": (make_reply("302 Found", b"", f"Location: http://127.0.0.1:{ELSEWHERE}/stolen"), None),
    "a redirect that keeps the method": (
        make_reply("307 X", b"", f"Location: http://127.0.0.1:{ELSEWHERE}/stolen"),
        None,
    ),
    "a redirect for ever": (make_reply("308 X", b"", f"Location: //127.0.0.1:{ELSEWHERE}/", "Refresh: 0; url=/"), None),
    "another place that has it": (make_reply("201 X", b"[", f"Content-Location: http://127.0.0.1:{ELSEWHERE}/"), None),
    "a proxy to be used": (make_reply("305 Use Proxy", b"", f"Location: http://127.0.0.1:{ELSEWHERE}/"), None),
    "a demand for a key": (make_reply("401 X", b"", "WWW-Authenticate: Basic realm=gateway"), None),
    "a demand for a proxy's key": (make_reply("407 X", b"", "Proxy-Authenticate: Basic"), None),
    "a demand to ask again": (make_reply("503 X", b"", "Retry-After: 0"), None),
    "a demand for another length": (make_reply("417 X", b""), None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_agent_harms_only_its_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], host_service: RawService, lie: str
) -> None:
    answer, then = LIES[lie]
    other = create_sandbox(api, name="other")
    calls = CALLS[2:3] if "without end" in lie and "chunks" not in lie else CALLS
    with (
        raw_service(memory_gateway, sandbox, answer, port=AGENT_PORT, then=then) as agent,
        Probe(memory_gateway, other),
    ):
        for method, path, body in calls:
            asked = len(agent.heads)
            told = api.request(method, path, json=body)
            if method == "GET":
                assert told.status_code == 200 and told.json()["diverged"] is None, "it is not known"
            else:
                assert 400 <= told.status_code < 600 and told.json()["kind"] != "internal", told.text
            assert len(told.content) < 8192
            assert len(agent.heads) <= asked + 1, "nothing is asked twice"
        eventually(lambda: not agent.open)
    assert host_service.accepted == 0, "nobody is sent elsewhere"


@pytest.mark.parametrize("lie", LIES)
def test_a_false_service_affects_only_its_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], host_service: RawService, lie: str
) -> None:
    answer, then = LIES[lie]
    other = create_sandbox(api, name="other")
    with (
        raw_service(memory_gateway, sandbox, answer, then=then) as service,
        Probe(memory_gateway, other),
        memory_gateway.client(EXEC_KEY) as client,
    ):
        client.timeout = httpx.Timeout(2)
        taken = 0
        try:
            with client.stream("POST", "/", content=b"x", headers=port_headers(sandbox, PORT)) as told:
                for piece in told.iter_raw():
                    taken += len(piece)
                    if taken > 4 << 20:
                        break
        except (httpx.TransportError, TimeoutError):
            pass
        assert len(service.heads) == 1, "nothing is asked twice"
        eventually(lambda: not service.open, seconds=20) if then else None
    assert host_service.accepted == 0


def test_compressed_answers_are_forwarded_unchanged(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with (
        raw_service(memory_gateway, sandbox, make_reply("200 OK", BOMB, "Content-Encoding: gzip")),
        api.stream("GET", "/", headers=port_headers(sandbox, PORT)) as told,
    ):
        assert told.headers["content-encoding"] == "gzip"
        assert b"".join(told.iter_raw()) == BOMB


# --- reused connections ---------------------------------------------------------------------------------------------

POISONED: dict[str, bytes] = {
    "two answers at once": make_reply(body=b"first") + make_reply(body=b"poison"),
    "behind one without a body": b"HTTP/1.1 204 No Content\r\n\r\n" + make_reply(body=b"poison"),
    "behind one that has not changed": b"HTTP/1.1 304 Not Modified\r\n\r\n" + make_reply(body=b"poison"),
    "behind chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n" + make_reply(body=b"poison"),
    "half a head": make_reply(body=b"first") + OK + b"X-Poison: ",
    "a byte": make_reply(body=b"first") + b"H",
    "an early hint": make_reply(body=b"first") + b"HTTP/1.1 103 Early Hints\r\nX-Poison: 1\r\n\r\n",
    **{
        f"behind {size >> 10} KiB": make_reply(body=b"a" * (size - len(make_reply(body=b"a" * size)) + size))
        + make_reply(body=b"poison")
        for size in (16 << 10, 64 << 10, 256 << 10)
    },
}
"""An answer to one request with additional bytes; also with answers as long as common buffers."""


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("poison", POISONED)
def test_a_surplus_answer_does_not_reach_the_next_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], poison: str, method: str
) -> None:
    with raw_service(memory_gateway, sandbox, POISONED[poison], make_reply(body=b"second")) as service:
        with memory_gateway.client(EXEC_KEY) as attacker:
            attacker.request(method, "/", headers=port_headers(sandbox, PORT))
        answers = [api.get("/", headers=port_headers(sandbox, PORT)) for _ in range(3)]
        assert [answer.text for answer in answers] == ["second"] * 3
        assert not any("x-poison" in answer.headers for answer in answers)
        assert service.accepted >= 2, "the connection is not used again"


def test_a_body_after_head_does_not_become_the_next_answer(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """The service answers HEAD with a body of its client's choice, as some careless servers do."""
    with raw_service(memory_gateway, sandbox, make_reply(body=make_reply(body=b"poison")), make_reply(body=b"second")):
        api.head("/", headers=port_headers(sandbox, PORT))
        assert api.get("/", headers=port_headers(sandbox, PORT)).text == "second"


def test_answers_never_come_from_another_machine_or_port(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other = create_sandbox(api, name="other")
    poisoned = make_reply(body=b"first") + make_reply(body=b"poison") * 50
    with (
        raw_service(memory_gateway, sandbox, poisoned),
        raw_service(memory_gateway, sandbox, make_reply(body=b"clean"), port=PORT + 1),
        raw_service(memory_gateway, other, make_reply(body=b"other")),
    ):
        for _ in range(10):
            api.get("/", headers=port_headers(sandbox, PORT))
            assert api.get("/", headers=port_headers(sandbox, PORT + 1)).text == "clean"
            assert api.get("/", headers=port_headers(other, PORT)).text == "other"


def test_an_early_answer_does_not_reach_another_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """The service answers when a client connects and then each request, so it is always one answer ahead."""

    async def listen(where: str, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(make_reply(body=b"early"))
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(make_reply(body=b"late"))
                await writer.drain()

        return await asyncio.start_server(serve, where, port)

    other = create_sandbox(api, name="other")
    with (
        Service(machine_address(memory_gateway, sandbox), PORT, listen),
        raw_service(memory_gateway, other, make_reply(body=b"other")),
    ):
        for _ in range(20):
            api.get("/", headers=port_headers(sandbox, PORT))
            assert api.get("/", headers=port_headers(other, PORT)).text == "other"
