"""Wait until a guest answers: the same probe for our sandboxes and for those of the rivals.

A guest has answered when its agent, a process in the guest, has sent the first bytes of an HTTP response.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from sandbox_gateway.hosts.addresses import AGENT_PORT

_SECONDS = 120.0
_ATTEMPT_EVERY = 0.01
_MAX_ATTEMPTS = 16
_REQUEST = b"GET /health HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"


def wait_for_answer(address: str, open_socket: Callable[[], socket.socket] = socket.socket) -> None:
    """Return once the guest at ``address`` has answered. Raises RuntimeError after a timeout.

    Starts another attempt every few milliseconds, because a packet that arrives too early is lost, and the kernel sends
    it again only after a second. ``open_socket`` returns a TCP socket, of another network namespace if necessary.
    """
    deadline = time.perf_counter() + _SECONDS
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
                due = now + _ATTEMPT_EVERY
            for key, _ in selector.select(max(0.0, due - time.perf_counter())):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                try:
                    if key.events == selectors.EVENT_WRITE:
                        found.sendall(_REQUEST)
                        selector.modify(found, selectors.EVENT_READ)
                    elif found.recv(64).startswith(b"HTTP/"):
                        return
                    else:
                        raise ConnectionResetError
                except OSError:
                    attempts.remove(found)
                    _discard(selector, found)
    raise RuntimeError(f"the guest at {address} did not answer within {_SECONDS:g} s")


def _discard(selector: selectors.BaseSelector, attempt: socket.socket) -> None:
    selector.unregister(attempt)
    attempt.close()
