"""An HTTP server with a thread for each connection.

It does not use ``http.server``, which is slow to import and does not support chunked bodies.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

from sandbox_agent.failure import Failure, from_os_error
from sandbox_agent.http.wire import MAX_HEAD_BYTES, Connection, ConnectionLost, Reply, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[Request, Reply], None]
    Guard = Callable[[Request], None]

IDLE_TIMEOUT_SECONDS = 75.0
"""How long a connection may be silent between requests, within a body, or while its buffers are full."""
MAX_CONNECTIONS = 512
"""Maximum number of connections from other machines. Connections from this machine have a separate limit of this size.

The limits are separate so that programs in the sandbox cannot lock the gateway out.
"""
_DROP_TIMEOUT_SECONDS = 1.0
"""How long a new connection waits for the slot of a dropped one."""


class _Slots:
    """The connection slots for this machine, or for all other machines.

    If all slots are in use, a new connection takes the slot of the oldest one that has not sent an authorized request.
    Otherwise, a program without a token could lock the gateway out.
    """

    def __init__(self) -> None:
        self._free_slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._unauthorized_sockets: dict[socket.socket, None] = {}

    def take(self, sock: socket.socket) -> bool:
        """Take a slot for a new connection. Returns whether there was one."""
        if not self._free_slots.acquire(blocking=False) and not (
            self._drop_oldest_unauthorized() and self._free_slots.acquire(timeout=_DROP_TIMEOUT_SECONDS)
        ):
            return False
        with self._lock:
            self._unauthorized_sockets[sock] = None
        return True

    def authorize(self, sock: socket.socket) -> None:
        with self._lock:
            self._unauthorized_sockets.pop(sock, None)

    def release(self, sock: socket.socket) -> None:
        self.authorize(sock)
        self._free_slots.release()

    def _drop_oldest_unauthorized(self) -> bool:
        """Shut down a connection, so that its thread releases the slot. Returns whether there was one."""
        with self._lock:
            sock = next(iter(self._unauthorized_sockets), None)
            if sock is None:
                return False
            del self._unauthorized_sockets[sock]
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has just ended
        return True


class Route:
    """A request handler and its HTTP method.

    ``is_guarded``: whether the server's guard checks each request first; ``uses_connect_codes``: whether errors carry a
    Connect code instead of an HTTP status.
    """

    def __init__(
        self, handler: Handler, *, method: str = "POST", is_guarded: bool = True, uses_connect_codes: bool = False
    ) -> None:
        self.handler = handler
        self.method = method
        self.is_guarded = is_guarded
        self.uses_connect_codes = uses_connect_codes


class Server:
    """An HTTP server.

    ``routes``: the routes by path; ``{}`` in a path matches any text without a slash, which becomes the ``parameter``
    of the request.
    """

    def __init__(self, address: str, port: int, routes: dict[str, list[Route]], guard: Guard) -> None:
        self._routes = {(path, route.method): route for path, path_routes in routes.items() for route in path_routes}
        self._paths = set(routes)
        self._prefixes = {path.partition("{}")[0] for path in routes if "{}" in path}
        self._guard = guard
        self._slots = _Slots()
        self._local_slots = _Slots()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=128)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # No descriptors are left, or the peer hung up before the accept: keep serving.
                print(f"sandbox-agent: cannot accept a connection: {error}", file=sys.stderr)
                time.sleep(0.05)
                continue
            slots = self._select_slots(sock, address[0])
            if not slots.take(sock):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve_connection, args=(sock, address[0], slots), daemon=True).start()
            except RuntimeError:
                sock.close()
                slots.release(sock)

    def _select_slots(self, sock: socket.socket, peer: str) -> _Slots:
        try:
            return self._local_slots if peer in (sock.getsockname()[0], "127.0.0.1") else self._slots
        except OSError:
            return self._local_slots

    def _serve_connection(self, sock: socket.socket, peer: str, slots: _Slots) -> None:
        try:
            sock.settimeout(IDLE_TIMEOUT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = Connection(sock, peer[7:] if peer.startswith("::ffff:") else peer)
            while self._serve_request(connection, slots):
                pass
        except (ConnectionLost, OSError):
            pass
        finally:
            sock.close()
            slots.release(sock)

    def _serve_request(self, connection: Connection, slots: _Slots) -> bool:
        """Serve one request. Returns False if the connection must be closed."""
        head = connection.take_until(b"\r\n\r\n", MAX_HEAD_BYTES)
        request = Request(connection, head.lstrip(b"\r\n"))
        reply = Reply(connection, request)
        route = self._routes.get((request.path, request.method)) or self._find_parameter_route(request)
        try:
            if route is None or route.is_guarded:
                self._guard(request)
                slots.authorize(connection.sock)
            self._dispatch(route, request, reply)
        except Failure as failure:
            self._send_failure(failure, route, request, reply)
        if not request.body.is_finished:
            _linger(connection, request)
            return False
        return request.keep_alive and reply.is_complete

    def _find_parameter_route(self, request: Request) -> Route | None:
        """Return the route for a path with a parameter, and set the ``parameter`` of the request."""
        for prefix in self._prefixes:
            parameter, slash, rest = request.path[len(prefix) :].partition("/")
            if request.path.startswith(prefix) and parameter:
                path = f"{prefix}{{}}{slash}{rest}"
                if path in self._paths:
                    request.path, request.parameter = path, _unquote(parameter)
                    return self._routes.get((path, request.method))
        return None

    def _dispatch(self, route: Route | None, request: Request, reply: Reply) -> None:
        if route is None:
            if request.path in self._paths:
                raise Failure("unimplemented", f"{request.path} does not support the method {request.method}", 405)
            # The gateway recognises an agent without /eval by this text: do not change it.
            raise Failure("unimplemented", f"{request.path} not found", 404)
        try:
            route.handler(request, reply)
        except (Failure, ConnectionLost):
            raise
        except OSError as error:
            raise from_os_error(error) from None
        except Exception as error:
            import traceback

            traceback.print_exc()
            raise Failure("internal", f"internal error in the agent: {type(error).__name__}: {error}") from None

    def _send_failure(self, failure: Failure, route: Route | None, request: Request, reply: Reply) -> None:
        if reply.has_begun:
            raise ConnectionLost
        uses_connect_codes = route.uses_connect_codes if route else "." in request.path
        request.keep_alive = request.body.skip() and request.keep_alive
        code: object = failure.code if uses_connect_codes else failure.status
        reply.json({"code": code, "message": failure.message}, failure.status)


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def _linger(connection: Connection, request: Request) -> None:
    """Give the peer time to read the response, because closing a connection with unread bytes would reset it."""
    connection.sock.shutdown(socket.SHUT_WR)
    connection.sock.settimeout(2)
    request.body.discard(2)
