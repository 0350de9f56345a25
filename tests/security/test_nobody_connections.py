"""A client without a key opens TCP and TLS connections, and sends little or no data."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.daemon import Daemon
from tests.support.memory_gateway import ADMIN_KEY
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until

MAX_DESCRIPTORS = 400
"""The daemon's limit on file descriptors. Half of them are for connections from clients and to sandboxes."""
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS = 90, 40
REQUEST_TIMEOUT_SECONDS, STALL_TIMEOUT_SECONDS = 2, 3
CUT_OFF_TIMEOUT_SECONDS = 45
"""The time within which the gateway must close connections, on a busy machine."""
ATTACKER_ADDRESS, OTHER_ADDRESSES = "127.0.0.2", [f"127.0.0.{number}" for number in range(3, 20)]


@pytest.fixture(scope="module")
def certificate_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("certificate")
    cert, key = directory / "cert.pem", directory / "key.pem"
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
    """A daemon under attack. Its methods connect to the daemon over TCP or TLS."""

    def __init__(self, daemon: Daemon, cert: str) -> None:
        self.daemon = daemon
        self.tls_context = ssl.create_default_context(cafile=cert) if cert else None
        self.sandbox: dict[str, Any] = {}

    def open_tcp_connection(self, source: str = ATTACKER_ADDRESS) -> socket.socket:
        """Open a TCP connection without performing a TLS handshake."""
        return socket.create_connection(("127.0.0.1", self.daemon.port), timeout=30, source_address=(source, 0))

    def open_connection(self, source: str = ATTACKER_ADDRESS) -> socket.socket:
        """Open a connection that can send requests. Raises OSError if it is refused."""
        connection = self.open_tcp_connection(source)
        if self.tls_context is None:
            return connection
        try:
            return self.tls_context.wrap_socket(connection, server_hostname="127.0.0.1")
        except OSError:
            connection.close()
            raise

    def make_client(self) -> httpx.Client:
        """Return a client that has a key and does not connect from the attacker's address."""
        return httpx.Client(
            base_url=f"{'https' if self.tls_context else 'http'}://127.0.0.1:{self.daemon.port}",
            headers={"X-API-Key": ADMIN_KEY},
            verify=self.tls_context or True,
            timeout=30,
        )

    def check_others_are_served(self) -> None:
        self.daemon.check_health()
        with self.make_client() as client:
            client.get("/sandboxes").raise_for_status()


@pytest.fixture(scope="module", params=mark_slow_except(("tls",), ("tcp", "tls")))
def module_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificate_settings: dict[str, str]
) -> Iterator[Target]:
    tls_settings = certificate_settings if request.param == "tls" else {}
    limits = {
        "connections": MAX_CONNECTIONS,
        "connections_per_address": MAX_CONNECTIONS_PER_ADDRESS,
        "request_seconds": REQUEST_TIMEOUT_SECONDS,
        "stalled_seconds": STALL_TIMEOUT_SECONDS,
    }
    with Daemon(tmp_path_factory.mktemp("daemon"), max_files=MAX_DESCRIPTORS, **limits, **tls_settings) as daemon:
        target = Target(daemon, tls_settings.get("tls_cert", ""))
        target.sandbox = daemon.create_sandbox()
        yield target


@pytest.fixture
def target(module_target: Target) -> Iterator[Target]:
    """The daemon under attack. Checks after each test that all connections have been closed."""
    yield module_target
    wait_until(
        lambda: module_target.daemon.read_metric("sandbox_gateway_connections") == 0, seconds=CUT_OFF_TIMEOUT_SECONDS
    )


@pytest.fixture
def connection_stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def make_request_head(request: str, *fields: str) -> bytes:
    return "\r\n".join([f"{request} HTTP/1.1", "Host: gateway", *fields, "", ""]).encode()


def is_closed(connection: socket.socket) -> bool:
    """Return whether the gateway has closed the connection. Discards any data received."""
    connection.settimeout(0.05)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def read_response(connection: socket.socket, end: bytes) -> bytes:
    response = b""
    while not response.endswith(end):
        piece = connection.recv(65536)
        assert piece, f"hung up after {response!r}"
        response += piece
    return response


def wait_until_cut_off(connection: socket.socket, action: Callable[[], object] = lambda: None) -> None:
    def is_cut_off() -> bool:
        with contextlib.suppress(OSError):
            action()
        return is_closed(connection)

    wait_until(is_cut_off, seconds=CUT_OFF_TIMEOUT_SECONDS)


def test_silent_connections_are_closed(target: Target, connection_stack: contextlib.ExitStack) -> None:
    """The attacker opens more connections than the daemon has descriptors, from one address and then from several."""
    connections = [connection_stack.enter_context(target.open_tcp_connection()) for _ in range(MAX_DESCRIPTORS + 100)]
    target.check_others_are_served()
    assert target.daemon.read_metric("sandbox_gateway_connections") <= MAX_CONNECTIONS_PER_ADDRESS + 1
    connections += [
        connection_stack.enter_context(target.open_tcp_connection(source))
        for _ in range(30)
        for source in OTHER_ADDRESSES
    ]
    target.daemon.check_health()
    assert target.daemon.read_metric("sandbox_gateway_connections") <= MAX_CONNECTIONS
    assert target.daemon.count_descriptors() < MAX_DESCRIPTORS // 2 + 50
    refused_counts = {
        reason: target.daemon.read_metric("sandbox_gateway_connections_ended_total", reason=reason)
        for reason in ("too many connections", "too many connections from one address")
    }
    assert min(refused_counts.values()) > 100
    # The remaining connections exceed their time limit.
    wait_until(lambda: all(map(is_closed, connections)), seconds=CUT_OFF_TIMEOUT_SECONDS)
    target.check_others_are_served()


def test_descriptors_remain_for_the_unix_socket(tmp_path: Path, connection_stack: contextlib.ExitStack) -> None:
    """The limits in the configuration allow more connections than the daemon has descriptors."""
    with Daemon(tmp_path, max_files=MAX_DESCRIPTORS, connections=4096, connections_per_address=0) as daemon:
        for _ in range(MAX_DESCRIPTORS + 100):
            connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=30)
            connection_stack.enter_context(connection)
        daemon.check_health()
        assert daemon.read_metric("sandbox_gateway_connections") <= MAX_DESCRIPTORS // 4
        assert daemon.read_metric("sandbox_gateway_connections_ended_total", reason="too many connections") > 100


def test_reconnecting_clients_are_limited(target: Target, connection_stack: contextlib.ExitStack) -> None:
    """The clients reconnect as soon as they are cut off."""
    connections: list[socket.socket] = []
    deadline = time.monotonic() + 3 * REQUEST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if len(connections) > 2 * MAX_CONNECTIONS_PER_ADDRESS:
            connections = [each for each in connections if not is_closed(each)]
        connections += [connection_stack.enter_context(target.open_tcp_connection()) for _ in range(10)]
        target.check_others_are_served()


UPGRADE_HEADERS = (
    *("Upgrade: websocket", "Connection: Upgrade"),
    *("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"),
)
REQUEST_BEGINNINGS = {
    "nothing": b"",
    "a first line": b"GET /health HTTP/1.1\r\n",
    "half of the headers": b"GET /health HTTP/1.1\r\nHost: gateway\r\nX-Long: ",
    "half of an upgrade": b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: ",
    "an upgrade with a body": make_request_head("GET /", *UPGRADE_HEADERS, "Content-Length: 5"),
    "an upgrade with chunks": make_request_head("GET /", *UPGRADE_HEADERS, "Transfer-Encoding: chunked"),
    "an upgrade with a long line": make_request_head("GET /", *UPGRADE_HEADERS, "X-Long: " + 9000 * "x"),
    "an upgrade with many headers": make_request_head(
        "GET /", *UPGRADE_HEADERS, *(f"X-{number}: x" for number in range(200))
    ),
    "the next request": make_request_head("GET /health") + b"GET /health HTTP/1.1\r\nX-Long: ",
    "a body without a key": make_request_head("POST /sandboxes", "Content-Length: 1000000"),
    "chunks without a key": make_request_head("POST /sandboxes", "Transfer-Encoding: chunked") + b"f4240\r\n",
    "an unexpected body": make_request_head("GET /health", "Content-Length: 1000000"),
    "a body with a key": make_request_head("POST /sandboxes", f"X-API-Key: {ADMIN_KEY}", "Content-Length: 1000000")
    + b'{"name": "',
    "a body to a sandbox, without a key": make_request_head(
        "POST /", "Content-Length: 1000000", "E2b-Sandbox-Id: one", "E2b-Sandbox-Port: 49983"
    ),
}


@pytest.mark.parametrize(
    "beginning", mark_slow_except(("nothing", "half of an upgrade", "a body without a key"), REQUEST_BEGINNINGS)
)
@pytest.mark.parametrize("extra_byte", [b"", b"x"])
def test_an_incomplete_request_times_out(target: Target, beginning: str, extra_byte: bytes) -> None:
    """The client stops sending, or sends the rest one byte at a time."""
    if beginning == "nothing":
        extra_byte = extra_byte and b"G"
    with target.open_connection() as connection:
        connection.sendall(REQUEST_BEGINNINGS[beginning])
        wait_until_cut_off(connection, lambda: connection.sendall(extra_byte))
    target.check_others_are_served()


def test_a_late_body_is_refused_with_a_reason(target: Target) -> None:
    with target.open_connection() as connection:
        connection.sendall(REQUEST_BEGINNINGS["a body with a key"])
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b'"kind":"timeout"' in response and b"server.request_seconds" in response


def test_a_request_ends_when_its_sender_hangs_up(target: Target) -> None:
    with target.open_tcp_connection() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        connection.shutdown(socket.SHUT_WR)
        wait_until_cut_off(connection)


def test_an_incomplete_tls_handshake_times_out(target: Target) -> None:
    """A TLS port receives the beginning of a long record. On a port without TLS, the same bytes are invalid HTTP."""
    with target.open_tcp_connection() as connection:
        connection.sendall(b"\x16\x03\x01\x40\x00\x01")
        wait_until_cut_off(connection, lambda: connection.sendall(b"\0"))
    target.check_others_are_served()


def test_unread_responses_time_out(target: Target) -> None:
    with target.open_connection() as connection:
        connection.settimeout(5)
        with pytest.raises(OSError):
            for _ in itertools.count():
                connection.sendall(make_request_head("GET /openapi.json", f"X-API-Key: {ADMIN_KEY}") * 100)
        wait_until(
            lambda: target.daemon.read_metric("sandbox_gateway_connections") == 0, seconds=CUT_OFF_TIMEOUT_SECONDS
        )
    stalled_count = target.daemon.read_metric("sandbox_gateway_connections_ended_total", reason="stalled")
    assert stalled_count >= 1


def test_an_idle_connection_stays_open_for_the_next_request(target: Target) -> None:
    with target.open_connection() as connection:
        for _ in range(2):
            connection.sendall(make_request_head("GET /health"))
            assert read_response(connection, b'"memory"}').startswith(b"HTTP/1.1 200 ")
            time.sleep(REQUEST_TIMEOUT_SECONDS + 1)
        assert not is_closed(connection)


def test_a_slow_upload_succeeds(target: Target) -> None:
    """An upload may take longer than other requests if it makes progress. A stalled upload is cut off."""
    headers = (
        *(f"X-API-Key: {ADMIN_KEY}", "Transfer-Encoding: chunked"),
        *(f"E2b-Sandbox-Id: {target.sandbox['sandboxID']}", "E2b-Sandbox-Port: 49983"),
    )
    with target.open_connection() as connection:
        connection.sendall(make_request_head("POST /echo", *headers))
        for _ in range(3 * REQUEST_TIMEOUT_SECONDS):
            time.sleep(0.7)
            connection.sendall(b"1\r\nx\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_response(connection, b"}").startswith(b"HTTP/1.1 201 ")
    with target.open_connection() as connection:
        connection.sendall(make_request_head("POST /echo", *headers) + b"1\r\nx\r\n")
        response = b"".join(iter(lambda: connection.recv(65536), b""))
        assert response.startswith(b"HTTP/1.1 408 ") and b"server.stalled_seconds" in response


def test_the_log_is_not_flooded(target: Target, connection_stack: contextlib.ExitStack) -> None:
    """The gateway logs one line for all connections that it refused during a period of a few seconds."""

    def list_refusals() -> list[int]:
        entries = map(json.loads, filter(None, target.daemon.log.read_text().splitlines()))
        counts = (entry.get("too_many_connections_from_one_address") for entry in entries)
        return [count for count in counts if count]

    refusals_before = list_refusals()
    for _ in range(MAX_CONNECTIONS_PER_ADDRESS + 500):
        connection_stack.enter_context(target.open_tcp_connection())
    wait_until(lambda: sum(list_refusals()) >= sum(refusals_before) + 400, seconds=CUT_OFF_TIMEOUT_SECONDS)
    assert len(list_refusals()) < len(refusals_before) + 100
    log_text = target.daemon.log.read_text()
    # Otherwise, anyone could make the gateway log tracebacks.
    assert "Traceback" not in log_text and '"event": "internal error"' not in log_text, log_text[-4000:]
