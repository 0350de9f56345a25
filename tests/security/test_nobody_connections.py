"""Nobody, who has no key, opens connections and sends little or nothing on them; TCP and TLS."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.api.served import ADMIN_KEY
from tests.support.daemon import Daemon
from tests.support.waiting import eventually

FILES = 400
"""The daemon's limit of descriptors: it reserves half of them for connections and their counterparts inside."""
CONNECTIONS, PER_ADDRESS = 90, 40
REQUEST_SECONDS, STALLED_SECONDS = 2, 3
CUT_OFF_SECONDS = 45
"""The longest time that a busy machine may take to notice."""
ATTACKER, OTHERS = "127.0.0.2", [f"127.0.0.{number}" for number in range(3, 20)]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("certificate")
    cert, key = root / "cert.pem", root / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return {"tls_cert": str(cert), "tls_key": str(key)}


class Target:
    """A daemon and its TCP clients."""

    def __init__(self, daemon: Daemon, cert: str) -> None:
        self.daemon = daemon
        self.tls = ssl.create_default_context(cafile=cert) if cert else None
        self.sandbox: dict[str, Any] = {}

    def bare(self, source: str = ATTACKER) -> socket.socket:
        """A TCP connection without a handshake."""
        return socket.create_connection(("127.0.0.1", self.daemon.port), timeout=30, source_address=(source, 0))

    def line(self, source: str = ATTACKER) -> socket.socket:
        """A connection that can carry a request. Raises OSError when it was refused."""
        connection = self.bare(source)
        if self.tls is None:
            return connection
        try:
            return self.tls.wrap_socket(connection, server_hostname="127.0.0.1")
        except OSError:
            connection.close()
            raise

    def client(self) -> httpx.Client:
        """A client with a key, from its own address."""
        return httpx.Client(
            base_url=f"{'https' if self.tls else 'http'}://127.0.0.1:{self.daemon.port}",
            headers={"X-API-Key": ADMIN_KEY},
            verify=self.tls or True,
            timeout=30,
        )

    def others_are_served(self) -> None:
        self.daemon.health()
        with self.client() as client:
            client.get("/sandboxes").raise_for_status()


@pytest.fixture(scope="module", params=["tcp", "tls"])
def _target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificate: dict[str, str]
) -> Iterator[Target]:
    tls = certificate if request.param == "tls" else {}
    bounds = {
        "connections": CONNECTIONS,
        "connections_per_address": PER_ADDRESS,
        "request_seconds": REQUEST_SECONDS,
        "stalled_seconds": STALLED_SECONDS,
    }
    with Daemon(tmp_path_factory.mktemp("daemon"), files=FILES, **bounds, **tls) as daemon:
        target = Target(daemon, tls.get("tls_cert", ""))
        target.sandbox = daemon.sandbox()
        yield target


@pytest.fixture
def target(_target: Target) -> Iterator[Target]:
    """Checks afterwards that no connection is left."""
    yield _target
    eventually(lambda: _target.daemon.metric("sandbox_gateway_connections") == 0, seconds=CUT_OFF_SECONDS)


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def head(request: str, *fields: str) -> bytes:
    return "\r\n".join([f"{request} HTTP/1.1", "Host: gateway", *fields, "", ""]).encode()


def is_closed(connection: socket.socket) -> bool:
    """Whether the gateway has closed it; reads any answer before that."""
    connection.settimeout(0.05)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def answer_of(connection: socket.socket, end: bytes) -> bytes:
    answer = b""
    while not answer.endswith(end):
        piece = connection.recv(65536)
        assert piece, f"hung up after {answer!r}"
        answer += piece
    return answer


def cut_off(connection: socket.socket, meanwhile: Callable[[], object] = lambda: None) -> None:
    def closed() -> bool:
        with contextlib.suppress(OSError):
            meanwhile()
        return is_closed(connection)

    eventually(closed, seconds=CUT_OFF_SECONDS)


def test_connections_that_say_nothing(target: Target, held: contextlib.ExitStack) -> None:
    """More connections than descriptors, from one address and then from many."""
    held_open = [held.enter_context(target.bare()) for _ in range(FILES + 100)]
    target.others_are_served()
    assert target.daemon.metric("sandbox_gateway_connections") <= PER_ADDRESS + 1
    held_open += [held.enter_context(target.bare(source)) for _ in range(30) for source in OTHERS]
    target.daemon.health()
    assert target.daemon.metric("sandbox_gateway_connections") <= CONNECTIONS
    assert target.daemon.descriptors() < FILES // 2 + 50
    refused = {
        reason: target.daemon.metric("sandbox_gateway_connections_ended_total", reason=reason)
        for reason in ("too many connections", "too many connections of one address")
    }
    assert min(refused.values()) > 100
    # They are still open, and their time is over.
    eventually(lambda: all(map(is_closed, held_open)), seconds=CUT_OFF_SECONDS)
    target.others_are_served()


def test_those_that_come_again_and_again(target: Target, held: contextlib.ExitStack) -> None:
    """Clients that reconnect as soon as they are cut off."""
    lines: list[socket.socket] = []
    deadline = time.monotonic() + 3 * REQUEST_SECONDS
    while time.monotonic() < deadline:
        lines = [each for each in lines if not is_closed(each)] if len(lines) > 2 * PER_ADDRESS else lines
        lines += [held.enter_context(target.bare()) for _ in range(10)]
        target.others_are_served()


UPGRADE = (
    *("Upgrade: websocket", "Connection: Upgrade"),
    *("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"),
)
BEGINNINGS = {
    "nothing": b"",
    "a first line": b"GET /health HTTP/1.1\r\n",
    "half of the headers": b"GET /health HTTP/1.1\r\nHost: gateway\r\nX-Long: ",
    "half of an upgrade": b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: ",
    "an upgrade with a body": head("GET /", *UPGRADE, "Content-Length: 5"),
    "an upgrade with chunks": head("GET /", *UPGRADE, "Transfer-Encoding: chunked"),
    "an upgrade with a long line": head("GET /", *UPGRADE, "X-Long: " + 9000 * "x"),
    "an upgrade with many headers": head("GET /", *UPGRADE, *(f"X-{number}: x" for number in range(200))),
    "the next request": head("GET /health") + b"GET /health HTTP/1.1\r\nX-Long: ",
    "a body without a key": head("POST /sandboxes", "Content-Length: 1000000"),
    "chunks without a key": head("POST /sandboxes", "Transfer-Encoding: chunked") + b"f4240\r\n",
    "a body nobody asked for": head("GET /health", "Content-Length: 1000000"),
    "a body with a key": head("POST /sandboxes", f"X-API-Key: {ADMIN_KEY}", "Content-Length: 1000000") + b'{"name": "',
    "a body to a sandbox, without a key": head(
        "POST /", "Content-Length: 1000000", "E2b-Sandbox-Id: one", "E2b-Sandbox-Port: 49983"
    ),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("dribble", [b"", b"x"])
def test_a_request_that_never_ends(target: Target, beginning: str, dribble: bytes) -> None:
    """It stops, or continues with a byte now and then."""
    if beginning == "nothing":
        dribble = dribble and b"G"
    with target.line() as connection:
        connection.sendall(BEGINNINGS[beginning])
        cut_off(connection, lambda: connection.sendall(dribble))
    target.others_are_served()


def test_what_a_late_body_is_answered(target: Target) -> None:
    with target.line() as connection:
        connection.sendall(BEGINNINGS["a body with a key"])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"kind":"timeout"' in answer and b"server.request_seconds" in answer


def test_a_request_whose_sender_hangs_up_halfway(target: Target) -> None:
    with target.bare() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        connection.shutdown(socket.SHUT_WR)
        cut_off(connection)


def test_a_handshake_that_never_ends(target: Target) -> None:
    """To a port with TLS: the beginning of a record that is much longer. To a port without TLS: not HTTP."""
    with target.bare() as connection:
        connection.sendall(b"\x16\x03\x01\x40\x00\x01")
        cut_off(connection, lambda: connection.sendall(b"\0"))
    target.others_are_served()


def test_requests_whose_answers_nobody_reads(target: Target) -> None:
    with target.line() as connection:
        connection.settimeout(5)
        with pytest.raises(OSError):
            for _ in itertools.count():
                connection.sendall(head("GET /openapi.json", f"X-API-Key: {ADMIN_KEY}") * 100)
        eventually(lambda: target.daemon.metric("sandbox_gateway_connections") == 0, seconds=CUT_OFF_SECONDS)
    ended = target.daemon.metric("sandbox_gateway_connections_ended_total", reason="stalled")
    assert ended >= 1


def test_an_idle_connection_is_kept_for_the_next_request(target: Target) -> None:
    with target.line() as connection:
        for _ in range(2):
            connection.sendall(head("GET /health"))
            assert answer_of(connection, b'"memory"}').startswith(b"HTTP/1.1 200 ")
            time.sleep(REQUEST_SECONDS + 1)
        assert not is_closed(connection)


def test_a_slow_upload_to_a_sandbox_passes(target: Target) -> None:
    """An upload may take longer than a request may, as long as it makes progress; a stalled one is cut off."""
    fields = (
        *(f"X-API-Key: {ADMIN_KEY}", "Transfer-Encoding: chunked"),
        *(f"E2b-Sandbox-Id: {target.sandbox['sandboxID']}", "E2b-Sandbox-Port: 49983"),
    )
    with target.line() as connection:
        connection.sendall(head("POST /echo", *fields))
        for _ in range(3 * REQUEST_SECONDS):
            time.sleep(0.7)
            connection.sendall(b"1\r\nx\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert answer_of(connection, b"}").startswith(b"HTTP/1.1 201 ")
    with target.line() as connection:
        connection.sendall(head("POST /echo", *fields) + b"1\r\nx\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ") and b"server.stalled_seconds" in answer


def test_the_log_is_not_flooded(target: Target) -> None:
    text = target.daemon.log.read_text()
    assert 1 <= text.count('"connections closed"') < 100
    # A traceback of ours would be one that anybody can cause.
    assert "Traceback" not in text and '"event": "bug"' not in text, text[-4000:]
