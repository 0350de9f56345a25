"""A client with a key sends bodies that are read as a whole, on many connections, each without its last byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from sandbox_gateway.api.access.limits import MAX_BODY_BYTES, MAX_HELD_BYTES
from tests.api.memory_gateway import ADMIN_KEY
from tests.support.daemon import Daemon
from tests.support.waiting import eventually

CLIENTS = 80
EACH = MAX_BODY_BYTES - 1000
"""Bytes: 320 MiB in total."""
MOST_GROWTH = 5 * MAX_HELD_BYTES
"""Includes data between the socket and the counter, and unused memory of the heap."""
HEAD = (
    f"POST /sandboxes HTTP/1.1\r\nHost: gateway\r\nX-API-Key: {ADMIN_KEY}\r\n"
    f"Content-Type: application/json\r\nContent-Length: {EACH + 1}\r\n\r\n"
).encode()


def test_incomplete_bodies(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, contextlib.ExitStack() as stack:
        before = daemon.memory_use()
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), 30)) for _ in range(CLIENTS)]
        threads = [threading.Thread(target=_send, args=[line]) for line in lines]
        for thread in threads:
            thread.start()
        peak, settled = 0, 0
        while settled < 20:
            daemon.check_health()
            peak = max(peak, daemon.memory_use())
            settled += not any(thread.is_alive() for thread in threads)
        assert peak - before < MOST_GROWTH, f"{peak - before} bytes"
        refused = [line for line in lines if _answer(line).startswith(b"HTTP/1.1 429 ")]
        assert CLIENTS // 2 < len(refused) < CLIENTS
        stack.close()
        # The bytes no longer count once their sender is gone.
        eventually(lambda: _is_accepted(daemon), seconds=60)


def _send(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.sendall(HEAD + b"x" * EACH)


def _answer(line: socket.socket) -> bytes:
    """The answer so far."""
    line.settimeout(1)
    try:
        return line.recv(65536)
    except OSError:
        return b""


def _is_accepted(daemon: Daemon) -> bool:
    with socket.create_connection(("127.0.0.1", daemon.port), 30) as line:
        line.sendall(HEAD + b"x" * (EACH + 1))
        return line.recv(65536).startswith(b"HTTP/1.1 400 ")
