"""The HTTP server: one thread per connection, a routing table, and error responses.

It does not use ``http.server``, which is slow to import and does not support chunked bodies.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

from sandbox_agent.failure import Failure, from_os_error
from sandbox_agent.http.wire import MAX_HEAD, Connection, Gone, Reply, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[Request, Reply], None]
    Guard = Callable[[Request], None]

IDLE_SECONDS = 75.0
"""How long a connection may be silent: between requests, within a body, or with full buffers."""
MAX_CONNECTIONS = 512
"""Maximum number of connections from other machines, and as many from this machine.

The separate limits prevent programs in the sandbox from locking the gateway out.
"""


class Route:
    """A handler. ``guarded``: the server's guard checks requests first. ``named``: errors carry a Connect code."""

    def __init__(self, handler: Handler, *, method: str = "POST", guarded: bool = True, named: bool = False) -> None:
        self.handler = handler
        self.method = method
        self.guarded = guarded
        self.named = named


class Server:
    """An HTTP server. ``routes``: by path; ``{}`` in a path matches any text, the request's ``parameter``."""

    def __init__(self, address: str, port: int, routes: dict[str, list[Route]], guard: Guard) -> None:
        self._routes = {(path, route.method): route for path, some in routes.items() for route in some}
        self._paths = set(routes)
        self._prefixes = {path.partition("{}")[0] for path in routes if "{}" in path}
        self._guard = guard
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._local_slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=128)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # No descriptors left, or the peer hung up before it was accepted: keep serving.
                print(f"sandbox-agent: cannot accept a connection: {error}", file=sys.stderr)
                time.sleep(0.05)
                continue
            slots = self._slots_of(sock, address[0])
            if not slots.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve_connection, args=(sock, address[0], slots), daemon=True).start()
            except RuntimeError:
                sock.close()
                slots.release()

    def _slots_of(self, sock: socket.socket, peer: str) -> threading.Semaphore:
        try:
            return self._local_slots if peer in (sock.getsockname()[0], "127.0.0.1") else self._slots
        except OSError:
            return self._local_slots

    def _serve_connection(self, sock: socket.socket, peer: str, slots: threading.Semaphore) -> None:
        try:
            sock.settimeout(IDLE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = Connection(sock, peer[7:] if peer.startswith("::ffff:") else peer)
            while self._exchange(connection):
                pass
        except (Gone, OSError):
            pass
        finally:
            sock.close()
            slots.release()

    def _exchange(self, connection: Connection) -> bool:
        """Serve one request; False if the connection must be closed."""
        head = connection.take_until(b"\r\n\r\n", MAX_HEAD)
        request = Request(connection, head.lstrip(b"\r\n"))
        reply = Reply(connection, request)
        route = self._routes.get((request.path, request.method)) or self._parameter_route(request)
        try:
            self._answer(route, request, reply)
        except Failure as failure:
            self._send_failure(failure, route, request, reply)
        if not request.body.finished:
            _linger(connection, request)
            return False
        return request.keep and reply.complete

    def _parameter_route(self, request: Request) -> Route | None:
        """Find the route for a path with a parameter; sets the request's ``parameter``."""
        for start in self._prefixes:
            parameter, slash, rest = request.path[len(start) :].partition("/")
            if request.path.startswith(start) and parameter:
                path = f"{start}{{}}{slash}{rest}"
                if path in self._paths:
                    request.path, request.parameter = path, _unquote(parameter)
                    return self._routes.get((path, request.method))
        return None

    def _answer(self, route: Route | None, request: Request, reply: Reply) -> None:
        if route is None or route.guarded:
            self._guard(request)
        if route is None:
            if request.path in self._paths:
                raise Failure("unimplemented", f"{request.path} does not support the method {request.method}", 405)
            # The gateway recognises an agent without /eval by this text: do not change it.
            raise Failure("unimplemented", f"{request.path} not found", 404)
        try:
            route.handler(request, reply)
        except (Failure, Gone):
            raise
        except OSError as error:
            raise from_os_error(error) from None
        except Exception as error:
            import traceback

            traceback.print_exc()
            raise Failure("internal", f"internal error in the agent: {type(error).__name__}: {error}") from None

    def _send_failure(self, failure: Failure, route: Route | None, request: Request, reply: Reply) -> None:
        if reply.begun:
            raise Gone
        named = route.named if route else "." in request.path
        request.keep = request.body.skip() and request.keep
        code: object = failure.code if named else failure.status
        reply.json({"code": code, "message": failure.message}, failure.status)


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def _linger(connection: Connection, request: Request) -> None:
    """Let the peer read the answer before the connection closes: closing with unread bytes would reset it."""
    connection.sock.shutdown(socket.SHUT_WR)
    connection.sock.settimeout(2)
    request.body.discard(2)
