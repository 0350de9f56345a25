"""A client with a key sends large, incomplete request bodies on many connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from sandbox_gateway.api.access.limits import MAX_BODY_BYTES, MAX_HELD_BYTES
from tests.support.daemon import Daemon
from tests.support.memory_gateway import ADMIN_KEY
from tests.support.waiting import wait_until

CLIENT_COUNT = 80
BODY_BYTES = MAX_BODY_BYTES - 1000
"""The bodies of all connections together take about 320 MiB."""
MAX_GROWTH_BYTES = 5 * MAX_HELD_BYTES
"""Includes data that the gateway does not count yet, and unused memory of the heap."""
REQUEST_HEAD = (
    f"POST /sandboxes HTTP/1.1\r\nHost: gateway\r\nX-API-Key: {ADMIN_KEY}\r\n"
    f"Content-Type: application/json\r\nContent-Length: {BODY_BYTES + 1}\r\n\r\n"
).encode()


def test_memory_for_incomplete_bodies_is_limited(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, contextlib.ExitStack() as stack:
        memory_before = daemon.measure_memory()
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), 30)) for _ in range(CLIENT_COUNT)
        ]
        threads = [threading.Thread(target=_send_incomplete_body, args=[connection]) for connection in connections]
        for thread in threads:
            thread.start()
        peak_memory, idle_rounds = 0, 0
        while idle_rounds < 20:
            daemon.check_health()
            peak_memory = max(peak_memory, daemon.measure_memory())
            idle_rounds += not any(thread.is_alive() for thread in threads)
        assert peak_memory - memory_before < MAX_GROWTH_BYTES, f"{peak_memory - memory_before} bytes"
        rejected_connections = [
            connection for connection in connections if _read_response(connection).startswith(b"HTTP/1.1 429 ")
        ]
        assert CLIENT_COUNT // 2 < len(rejected_connections) < CLIENT_COUNT
        stack.close()
        # The bytes no longer count after their senders have disconnected.
        wait_until(lambda: _is_body_accepted(daemon), seconds=60)


def _send_incomplete_body(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(REQUEST_HEAD + b"x" * BODY_BYTES)


def _read_response(connection: socket.socket) -> bytes:
    """Return the part of the response that arrives within a second."""
    connection.settimeout(1)
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _is_body_accepted(daemon: Daemon) -> bool:
    with socket.create_connection(("127.0.0.1", daemon.port), 30) as connection:
        connection.sendall(REQUEST_HEAD + b"x" * (BODY_BYTES + 1))
        return connection.recv(65536).startswith(b"HTTP/1.1 400 ")
