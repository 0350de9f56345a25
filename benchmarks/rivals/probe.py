"""Wait until a guest answers. Our sandboxes and the rivals' sandboxes are probed in the same way.

A guest has answered when its agent, a process in the guest, has sent the first bytes of an HTTP response.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from sandbox_gateway.hosts.connect import AGENT_PORT, MARK

_TIMEOUT_SECONDS = 120.0
_ATTEMPT_INTERVAL_SECONDS = 0.01
_MAX_ATTEMPTS = 16
_MAX_ATTEMPT_SECONDS = 1.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"


def wait_for_answer(address: str, open_socket: Callable[[], socket.socket] = socket.socket) -> None:
    """Wait until the guest at ``address`` has answered. Raises RuntimeError after a timeout.

    Opens another connection every few milliseconds, because the kernel retransmits a lost SYN only after a second. If
    many connections are open, it waits: a slow guest needs time to answer, and each connection costs some of it.
    ``open_socket`` returns a TCP socket, if necessary in another network namespace.
    """
    deadline = time.perf_counter() + _TIMEOUT_SECONDS
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        start_times: dict[socket.socket, float] = {}  # of the open connections
        next_attempt = 0.0
        while (now := time.perf_counter()) < deadline:
            if len(start_times) == _MAX_ATTEMPTS:
                oldest = next(iter(start_times))
                next_attempt = start_times[oldest] + _MAX_ATTEMPT_SECONDS
                if now >= next_attempt:
                    del start_times[oldest]
                    _discard(selector, oldest)
            if now >= next_attempt:
                attempt = stack.enter_context(open_socket())
                attempt.setblocking(False)
                # Our firewall refuses unmarked connections to agents. The rivals ignore the mark.
                attempt.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
                with contextlib.suppress(BlockingIOError):
                    attempt.connect((address, AGENT_PORT))
                selector.register(attempt, selectors.EVENT_WRITE)
                start_times[attempt] = now
                next_attempt = now + _ATTEMPT_INTERVAL_SECONDS
            for key, _ in selector.select(max(0.0, next_attempt - time.perf_counter())):
                ready_socket = key.fileobj
                assert isinstance(ready_socket, socket.socket)
                try:
                    if key.events == selectors.EVENT_WRITE:
                        ready_socket.sendall(_REQUEST)
                        selector.modify(ready_socket, selectors.EVENT_READ)
                    elif ready_socket.recv(64).startswith(b"HTTP/"):
                        return
                    else:
                        raise ConnectionResetError
                except OSError:
                    del start_times[ready_socket]
                    _discard(selector, ready_socket)
    raise RuntimeError(f"the guest at {address} did not answer within {_TIMEOUT_SECONDS:g} s")


def _discard(selector: selectors.BaseSelector, attempt: socket.socket) -> None:
    selector.unregister(attempt)
    attempt.close()
