"""Root in a sandbox runs a program that sends invalid HTTP, in place of the agent or on another port.

This must affect only that sandbox. `test_guest_root_answers.py` covers invalid JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine import commands
from tests.api.test_memory import check_no_leaks
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    Handler,
    RawService,
    Service,
    get_machine_address,
    make_port_headers,
    make_reply,
    raw_service,
    wait_until,
)
from tests.support.memory_gateway import EXEC_KEY, MemoryGateway, create_sandbox

AGENT_REQUESTS = (
    ("POST", "/sandboxes/one/exec", {"args": ["true"]}),
    ("POST", "/v1/sandboxes/one/eval", {"code": "1"}),
    ("POST", "/v1/sandboxes/one/ping", None),
    ("GET", "/sandboxes/one", None),
)
"""All API calls by which a client with a limited key can cause requests to an agent."""
OK_STATUS_LINE = b"HTTP/1.1 200 OK\r\n"
HOST_SERVICE_PORT = 47113
"""The port to which responses redirect the gateway. The test listens on it."""


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_PING_TIMEOUT_SECONDS", 2)


@pytest.fixture
def host_service(memory_gateway: MemoryGateway) -> Iterator[RawService]:
    """A service on the host that must not receive requests."""
    service = RawService()
    with Service("127.0.0.1", HOST_SERVICE_PORT, service.listen):
        yield service


class Probe:
    """A context in which requests to `/health` and to a port of another sandbox must succeed."""

    def __init__(self, memory_gateway: MemoryGateway, other_sandbox: dict[str, Any]) -> None:
        self._gateway = memory_gateway
        self._other_sandbox = other_sandbox
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_requests)
        self.success_count = 0
        self.failures: list[str] = []

    def _send_requests(self) -> None:
        with self._gateway.client(EXEC_KEY) as client:
            while not self._stop.wait(0.01):
                responses = client.get("/health"), client.get("/echo", headers=make_port_headers(self._other_sandbox))
                self.success_count += all(response.is_success for response in responses)
                self.failures += [response.text for response in responses if not response.is_success]

    def __enter__(self) -> Probe:
        self._thread.start()
        wait_until(lambda: self.success_count or self.failures)
        return self

    def __exit__(self, *_: object) -> None:
        count_before = self.success_count
        wait_until(lambda: self.success_count > count_before or self.failures)
        self._stop.set()
        self._thread.join()
        assert self.failures == []


def make_repeating_sender(piece: bytes, limit: int | None = None) -> Handler:
    """Return a handler that sends ``piece`` repeatedly, at most ``limit`` times."""

    async def send_repeatedly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while limit is None or count < limit:
            writer.write(piece)
            await writer.drain()
            count += 1

    return send_repeatedly


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


GZIP_BOMB = gzip.compress(b'{"exitCode": 0, "stdout": "' + b"A" * (64 << 20) + b'"}')

_HOST_SERVICE_URL = f"http://127.0.0.1:{HOST_SERVICE_PORT}"

FALSE_RESPONSES: dict[str, tuple[bytes, Handler | None]] = {
    "nothing": (b"", None),
    "a head that never ends": (OK_STATUS_LINE, make_repeating_sender(b"X-Y: " + b"z" * 1000 + b"\r\n")),
    "one header that never ends": (OK_STATUS_LINE + b"X: ", make_repeating_sender(b"z" * 4096)),
    "a first line that never ends": (b"HTTP/1.1 200 ", make_repeating_sender(b"z" * 4096)),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", hang_up),
    "another version": (b"HTTP/22 200 OK\r\nContent-Length: 2\r\n\r\n{}", hang_up),
    "less than the length": (OK_STATUS_LINE + b"Content-Length: 1000\r\n\r\n{", hang_up),
    "two lengths": (OK_STATUS_LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", hang_up),
    "a negative length": (OK_STATUS_LINE + b"Content-Length: -1\r\n\r\n{}", hang_up),
    "a length of 5000 digits": (OK_STATUS_LINE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", hang_up),
    "more than the limit": (
        OK_STATUS_LINE + b"Content-Length: 1000000000000\r\n\r\n",
        make_repeating_sender(b" " * 65536),
    ),
    "chunks without end": (
        OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n",
        make_repeating_sender(b"10000\r\n" + b" " * 65536 + b"\r\n"),
    ),
    "a chunk without a size": (OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\nx\r\n{}\r\n", hang_up),
    "a chunk of negative size": (OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", hang_up),
    "a size that never ends": (
        OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n",
        make_repeating_sender(b"0" * 4096),
    ),
    "an extension that never ends": (
        OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n1;",
        make_repeating_sender(b"a" * 4096),
    ),
    "trailers that never end": (
        OK_STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        make_repeating_sender(b"X: y\r\n"),
    ),
    "an unknown encoding": (OK_STATUS_LINE + b"Transfer-Encoding: rot13\r\n\r\n{}", hang_up),
    "no length before a hang-up": (b"HTTP/1.0 200 OK\r\n\r\n[", make_repeating_sender(b" " * 65536, 4096)),
    "a change of protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", hang_up),
    "early hints without end": (
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
        make_repeating_sender(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100),
    ),
    "100 without end": (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        make_repeating_sender(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    ),
    "an invalid status": (b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}", hang_up),
    "a gzip bomb": (make_reply("200 OK", GZIP_BOMB, "Content-Encoding: gzip", "Content-Type: application/json"), None),
    "a redirect": (make_reply("302 Found", b"", f"Location: {_HOST_SERVICE_URL}/stolen"), None),
    "a redirect that keeps the method": (
        make_reply("307 X", b"", f"Location: {_HOST_SERVICE_URL}/stolen"),
        None,
    ),
    "a redirect loop": (
        make_reply("308 X", b"", f"Location: //127.0.0.1:{HOST_SERVICE_PORT}/", "Refresh: 0; url=/"),
        None,
    ),
    "another location of the content": (
        make_reply("201 X", b"[", f"Content-Location: {_HOST_SERVICE_URL}/"),
        None,
    ),
    "a redirect to a proxy": (
        make_reply("305 Use Proxy", b"", f"Location: {_HOST_SERVICE_URL}/"),
        None,
    ),
    "a request for authentication": (make_reply("401 X", b"", "WWW-Authenticate: Basic realm=gateway"), None),
    "a request for proxy authentication": (make_reply("407 X", b"", "Proxy-Authenticate: Basic"), None),
    "a request to retry": (make_reply("503 X", b"", "Retry-After: 0"), None),
    "a failed expectation": (make_reply("417 X", b""), None),
}


@pytest.mark.parametrize("case", FALSE_RESPONSES)
def test_a_lying_agent_affects_only_its_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], host_service: RawService, case: str
) -> None:
    response, next_handler = FALSE_RESPONSES[case]
    other_sandbox = create_sandbox(api, name="other")
    agent_requests = AGENT_REQUESTS[2:3] if "without end" in case and "chunks" not in case else AGENT_REQUESTS
    with (
        raw_service(memory_gateway, sandbox, response, port=AGENT_PORT, next_handler=next_handler) as agent,
        Probe(memory_gateway, other_sandbox),
    ):
        for method, path, body in agent_requests:
            request_count_before = len(agent.heads)
            result = api.request(method, path, json=body)
            if method == "GET":
                assert result.status_code == 200 and result.json()["diverged"] is None, "divergence is unknown"
            else:
                assert 400 <= result.status_code < 600 and result.json()["kind"] != "internal", result.text
            assert len(result.content) < 8192
            assert len(agent.heads) <= request_count_before + 1, "the gateway repeated a request"
        wait_until(lambda: not agent.open_connection_count)
    assert host_service.connection_count == 0, "the gateway followed a redirect"


@pytest.mark.parametrize("case", FALSE_RESPONSES)
def test_a_lying_service_affects_only_its_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], host_service: RawService, case: str
) -> None:
    response, next_handler = FALSE_RESPONSES[case]
    other_sandbox = create_sandbox(api, name="other")
    with (
        raw_service(memory_gateway, sandbox, response, next_handler=next_handler) as service,
        Probe(memory_gateway, other_sandbox),
        memory_gateway.client(EXEC_KEY) as client,
    ):
        client.timeout = httpx.Timeout(2)
        received_bytes = 0
        try:
            with client.stream("POST", "/", content=b"x", headers=make_port_headers(sandbox, PORT)) as result:
                for piece in result.iter_raw():
                    received_bytes += len(piece)
                    if received_bytes > 4 << 20:
                        break
        except (httpx.TransportError, TimeoutError):
            pass
        assert len(service.heads) == 1, "the gateway repeated a request"
        wait_until(lambda: not service.open_connection_count, seconds=20) if next_handler else None
    assert host_service.connection_count == 0


@pytest.fixture
def _disabled_log() -> Iterator[None]:
    """Disable the log, because pytest keeps all records in memory."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_disabled_log")
def test_repeated_lies_do_not_leak_memory(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    cases = ("not HTTP", "less than the length", "a change of protocol", "a redirect")

    def run_rounds(count: int) -> None:
        for case in cases:
            response, next_handler = FALSE_RESPONSES[case]
            with (
                raw_service(memory_gateway, sandbox, response, port=AGENT_PORT, next_handler=next_handler),
                raw_service(memory_gateway, sandbox, response, next_handler=next_handler) as service,
            ):
                for number in range(count):
                    for method, path, body in AGENT_REQUESTS:
                        api.request(method, path, json=body)
                    with contextlib.suppress(httpx.RemoteProtocolError):  # The response may end too early.
                        api.get(f"/{number}", headers=make_port_headers(sandbox, PORT))
                assert len(service.heads) >= count

    check_no_leaks(run_rounds)


def test_compressed_responses_are_forwarded_unchanged(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with (
        raw_service(memory_gateway, sandbox, make_reply("200 OK", GZIP_BOMB, "Content-Encoding: gzip")),
        api.stream("GET", "/", headers=make_port_headers(sandbox, PORT)) as result,
    ):
        assert result.headers["content-encoding"] == "gzip"
        assert b"".join(result.iter_raw()) == GZIP_BOMB


# --- reused connections ---------------------------------------------------------------------------------------------

POISONED_RESPONSES: dict[str, bytes] = {
    "two responses at once": make_reply(body=b"first") + make_reply(body=b"poison"),
    "after a response without a body": b"HTTP/1.1 204 No Content\r\n\r\n" + make_reply(body=b"poison"),
    "after 304 Not Modified": b"HTTP/1.1 304 Not Modified\r\n\r\n" + make_reply(body=b"poison"),
    "after chunks": OK_STATUS_LINE
    + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n"
    + make_reply(body=b"poison"),
    "half a head": make_reply(body=b"first") + OK_STATUS_LINE + b"X-Poison: ",
    "a byte": make_reply(body=b"first") + b"H",
    "an early hint": make_reply(body=b"first") + b"HTTP/1.1 103 Early Hints\r\nX-Poison: 1\r\n\r\n",
    **{
        f"after {size >> 10} KiB": make_reply(body=b"a" * (size - len(make_reply(body=b"a" * size)) + size))
        + make_reply(body=b"poison")
        for size in (16 << 10, 64 << 10, 256 << 10)
    },
}
"""Responses followed by additional bytes. Some responses are as long as common buffers."""


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("poison", POISONED_RESPONSES)
def test_a_surplus_response_does_not_reach_the_next_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], poison: str, method: str
) -> None:
    with raw_service(memory_gateway, sandbox, POISONED_RESPONSES[poison], make_reply(body=b"second")) as service:
        with memory_gateway.client(EXEC_KEY) as attacker:
            attacker.request(method, "/", headers=make_port_headers(sandbox, PORT))
        responses = [api.get("/", headers=make_port_headers(sandbox, PORT)) for _ in range(3)]
        assert [response.text for response in responses] == ["second"] * 3
        assert not any("x-poison" in response.headers for response in responses)
        assert service.connection_count >= 2, "the gateway reused the connection"


def test_the_body_of_a_head_response_does_not_become_the_next_response(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """The service sends a body in response to HEAD, as some careless servers do."""
    with raw_service(memory_gateway, sandbox, make_reply(body=make_reply(body=b"poison")), make_reply(body=b"second")):
        api.head("/", headers=make_port_headers(sandbox, PORT))
        assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "second"


def test_responses_never_come_from_another_machine_or_port(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other_sandbox = create_sandbox(api, name="other")
    poisoned_response = make_reply(body=b"first") + make_reply(body=b"poison") * 50
    with (
        raw_service(memory_gateway, sandbox, poisoned_response),
        raw_service(memory_gateway, sandbox, make_reply(body=b"clean"), port=PORT + 1),
        raw_service(memory_gateway, other_sandbox, make_reply(body=b"other")),
    ):
        for _ in range(10):
            api.get("/", headers=make_port_headers(sandbox, PORT))
            assert api.get("/", headers=make_port_headers(sandbox, PORT + 1)).text == "clean"
            assert api.get("/", headers=make_port_headers(other_sandbox, PORT)).text == "other"


def test_an_early_response_does_not_reach_another_client(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """The service sends a response on each new connection and after each request, so it is one response ahead."""

    async def listen(address: str, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(make_reply(body=b"early"))
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(make_reply(body=b"late"))
                await writer.drain()

        return await asyncio.start_server(serve, address, port)

    other_sandbox = create_sandbox(api, name="other")
    with (
        Service(get_machine_address(memory_gateway, sandbox), PORT, listen),
        raw_service(memory_gateway, other_sandbox, make_reply(body=b"other")),
    ):
        for _ in range(20):
            api.get("/", headers=make_port_headers(sandbox, PORT))
            assert api.get("/", headers=make_port_headers(other_sandbox, PORT)).text == "other"
