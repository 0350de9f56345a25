"""Wait until a guest answers. Our sandboxes and those of the rivals are probed in the same way.

A guest has answered when its agent, a process in the guest, has sent the first bytes of an HTTP response.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from sandbox_gateway.hosts.addresses import AGENT_PORT

_TIMEOUT_SECONDS = 120.0
_ATTEMPT_INTERVAL_SECONDS = 0.01
_MAX_ATTEMPTS = 16
_REQUEST = b"GET /health HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"


def wait_for_answer(address: str, open_socket: Callable[[], socket.socket] = socket.socket) -> None:
    """Return once the guest at ``address`` has answered. Raises RuntimeError after a timeout.

    Opens another connection every few milliseconds, because the kernel repeats a lost first packet only after a second.
    ``open_socket`` returns a TCP socket, of another network namespace if necessary.
    """
    deadline = time.perf_counter() + _TIMEOUT_SECONDS
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        attempts: list[socket.socket] = []
        due = 0.0
        while (now := time.perf_counter()) < deadline:
            if now >= due:
                attempt = stack.enter_context(open_socket())
                attempt.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    attempt.connect((address, AGENT_PORT))
                selector.register(attempt, selectors.EVENT_WRITE)
                attempts.append(attempt)
                if len(attempts) > _MAX_ATTEMPTS:
                    _discard(selector, attempts.pop(0))
                due = now + _ATTEMPT_INTERVAL_SECONDS
            for key, _ in selector.select(max(0.0, due - time.perf_counter())):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                try:
                    if key.events == selectors.EVENT_WRITE:
                        ready.sendall(_REQUEST)
                        selector.modify(ready, selectors.EVENT_READ)
                    elif ready.recv(64).startswith(b"HTTP/"):
                        return
                    else:
                        raise ConnectionResetError
                except OSError:
                    attempts.remove(ready)
                    _discard(selector, ready)
    raise RuntimeError(f"the guest at {address} did not answer within {_TIMEOUT_SECONDS:g} s")


def _discard(selector: selectors.BaseSelector, attempt: socket.socket) -> None:
    selector.unregister(attempt)
    attempt.close()
