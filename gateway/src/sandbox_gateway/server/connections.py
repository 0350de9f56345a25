"""Limit the number of TCP connections, and the time that clients take to send a request and to read the response.

A client can connect without a key, so a connection's resources are limited before the client is identified. Some file
descriptors are always reserved for the Unix socket, whose users are administrators.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from sandbox_gateway.api.data_plane.websocket import ClientWebSocket
from sandbox_gateway.api.metrics import Metrics
from sandbox_gateway.config import Config, Server
from sandbox_gateway.log import Logger

_OWN_DESCRIPTOR_COUNT = 256
"""Number of the daemon's own descriptors: its log, the Unix socket's connections, external commands, probes of
agents.
"""
_DESCRIPTORS_PER_SANDBOX = 24
"""Number of descriptors per sandbox: its process, QMP connection, log, and idle connections of the data plane."""
MAX_GATEWAY_CONNECTIONS = 2048
"""Maximum number of connections from other gateways of a fleet, in addition to those from clients."""
MAX_HANDSHAKES = 256
"""Maximum number of connections to the listener for gateways that have not completed their TLS handshake."""
_GATEWAY_TLS_SHUTDOWN_SECONDS = 1.0
"""The idle connections of another gateway are not read, so that it does not answer when they are closed."""
_DESCRIPTORS_PER_CONNECTION = 2
"""Number of descriptors per request: the connection to the client and the connection to the sandbox."""
_LOG_INTERVAL_SECONDS = 5.0
"""One log line reports all connections that were closed within this time."""
_IPV6_PREFIX_LENGTH = 64
_MAX_HEADER_BYTES = 64 << 10
_MAX_EVENTS_PER_TURN = 32
"""Maximum number of events, such as pieces of a body, per turn of the event loop: one read can contain tens of
thousands.
"""

log = Logger("connections")


def reserve_descriptors(config: Config) -> int:
    """Raise the limit on open files if necessary, and return how many TCP connections it allows.

    Raises the process's soft limit, up to the hard limit. Reserves descriptors for the sandboxes and for the daemon
    itself. Returns at most ``server.connections``.
    """
    requested_connection_count = config.server.connections
    reserved_descriptor_count = _OWN_DESCRIPTOR_COUNT + _DESCRIPTORS_PER_SANDBOX * config.limits.sandboxes
    if config.fleet:
        reserved_descriptor_count += _DESCRIPTORS_PER_CONNECTION * MAX_GATEWAY_CONNECTIONS
    needed_descriptor_count = _DESCRIPTORS_PER_CONNECTION * requested_connection_count + reserved_descriptor_count
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return requested_connection_count
    open_file_limit = max(
        soft_limit,
        needed_descriptor_count if hard_limit == resource.RLIM_INFINITY else min(needed_descriptor_count, hard_limit),
    )
    if open_file_limit > soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_file_limit, hard_limit))
    # If there are too few, keep half of them for the sandboxes.
    possible_connection_count = (
        open_file_limit - min(reserved_descriptor_count, open_file_limit // 2)
    ) // _DESCRIPTORS_PER_CONNECTION
    if possible_connection_count < requested_connection_count:
        log.warning(
            "the limit on open files is too low for server.connections: raise the service's limit "
            "(LimitNOFILE, openfiles)",
            open_files=open_file_limit,
            needed=needed_descriptor_count,
            connections=possible_connection_count,
        )
    return min(requested_connection_count, possible_connection_count)


class Connections:
    """The open TCP connections of a listener, counted by client address.

    On the listener for gateways, a connection counts from the end of its TLS handshake, because the sandboxes of a host
    have the same address as its gateway there. Of the others, the oldest is closed when there are too many: only a
    gateway completes its handshake, and it does so in milliseconds.
    """

    def __init__(self, server: Server, limit: int, metrics: Metrics, *, is_for_gateways: bool = False) -> None:
        self.request_seconds = server.request_seconds
        self.stalled_seconds = server.stalled_seconds
        self.tls_shutdown_seconds = _GATEWAY_TLS_SHUTDOWN_SECONDS if is_for_gateways else None
        """Maximum time to close a connection; None: asyncio's default."""
        self._limit = limit
        self._limit_per_address = server.connections_per_address or limit
        self._metrics = metrics
        if not is_for_gateways:
            metrics.connection_gauge.set_function(lambda: len(self))
        self._handshakes: dict[Any, CountedSocket] | None = {} if is_for_gateways else None
        """The connections that have not completed their handshake, by the address and port of the peer."""
        self._open_counts: Counter[str] = Counter()
        self._unlogged_counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open_counts.total()

    def admit(self, connection: CountedSocket, peer: Any) -> bool:
        """Count an accepted connection until it is closed. Returns False if there are too many."""
        if self._handshakes is None:
            return self._count(connection, peer)
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest_peer, oldest = next(iter(self._handshakes.items()))
            del self._handshakes[oldest_peer]
            self.record_end("too many handshakes", oldest_peer[0])
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # The event loop then closes it.
        self._handshakes[peer] = connection
        connection.release = functools.partial(self._handshakes.pop, peer, None)
        return True

    def confirm(self, peer: Any) -> bool:
        """Count a connection whose handshake is complete. Returns False if there are too many."""
        if self._handshakes is None:
            return True
        connection = self._handshakes.pop(peer, None)
        return connection is not None and self._count(connection, peer)

    def _count(self, connection: CountedSocket, peer: Any) -> bool:
        address = peer[0]
        key = _build_counting_key(address)
        if self._open_counts.total() >= self._limit:
            self.record_end("too many connections", address)
        elif self._open_counts[key] >= self._limit_per_address:
            self.record_end("too many connections from one address", address)
        else:
            self._open_counts[key] += 1
            connection.release = functools.partial(self._release, key)
            return True
        return False

    def _release(self, key: str) -> None:
        self._open_counts[key] -= 1
        if not self._open_counts[key]:
            del self._open_counts[key]

    def record_end(self, reason: str, address: str) -> None:
        """Record that the gateway closed a connection. A single log line may report several connections."""
        self._metrics.record_connection_end(reason)
        if not self._unlogged_counts:
            asyncio.get_running_loop().call_later(_LOG_INTERVAL_SECONDS, self._log_closed_connections, address)
        self._unlogged_counts[reason] += 1

    def _log_closed_connections(self, address: str) -> None:
        counts_by_reason = {reason.replace(" ", "_"): count for reason, count in self._unlogged_counts.items()}
        self._unlogged_counts.clear()
        log.warning("connections closed", first_address=address, **counts_by_reason)


def _build_counting_key(address: str) -> str:
    """Return the key under which connections from an address are counted.

    An IPv6 address is counted by its /64 network, the smallest network that a client is usually assigned.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((ip, _IPV6_PREFIX_LENGTH), strict=False))


class Listener(socket.socket):
    """A TCP socket that counts connections when it accepts them, before a TLS handshake."""

    def __init__(self, connections: Connections, family: socket.AddressFamily) -> None:
        # With IPPROTO_TCP, asyncio sets TCP_NODELAY. Otherwise, small pieces would be sent with a delay of 40 ms.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If there are too many, raise ConnectionAbortedError, which the event loop ignores."""
        descriptor, peer = self._accept()  # type: ignore[attr-defined]
        connection = CountedSocket(self.family, self.type, self.proto, fileno=descriptor)
        if not self._connections.admit(connection, peer):
            connection.close()
            raise ConnectionAbortedError
        return connection, peer


class CountedSocket(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    release: Callable[[], object] | None = None

    def close(self) -> None:
        super().close()
        release, self.release = self.release, None
        if release:
            release()


class _StallTimer:
    """A timer that aborts a connection if the client stops reading its response."""

    def __init__(self, transport: asyncio.Transport, seconds: float, on_stall: Callable[[], None]) -> None:
        self._transport = transport
        self._seconds = seconds
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        # With a higher mark, unsent data below it would go unnoticed, even after closing. With 0, TLS never drains.
        transport.set_write_buffer_limits(high=1, low=0)

    def start(self) -> None:
        if self._timer is None:
            unsent_bytes = self._transport.get_write_buffer_size()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check_progress, unsent_bytes)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self, previous_size: int) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() < previous_size:
            self.start()
            return
        self._on_stall()
        self._transport.abort()


class _LimitedConnection(h11.Connection):
    """An h11 connection that returns ``remaining_event_count`` more events, then NEED_DATA."""

    remaining_event_count = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if not self.remaining_event_count:
            return h11.NEED_DATA
        self.remaining_event_count -= 1
        return super().next_event()


class _FlowControl(FlowControl):
    """Flow control that does not read while events from earlier data are pending, even if uvicorn resumes reading."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self) -> None:
        # Pause again even if reading is already held: uvicorn resumes the transport at the end of an unread body.
        self._is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            if not self.read_paused:
                self._transport.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self._is_held:
                self._transport.resume_reading()


class _StallTimedConnection(asyncio.Protocol):
    """A connection whose ``_StallTimer`` runs while writing is paused."""

    _stall_timer: _StallTimer | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer:
            self._stall_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer:
            self._stall_timer.stop()


class HttpConnection(_StallTimedConnection, H11Protocol):
    """An HTTP connection from a client, which is closed if a request does not arrive in time.

    This class limits the time for the headers, and for the rest of a body after an early response. In all other
    cases, the code that reads a body limits the time for it: see ``api.access.limits`` and ``api.data_plane.proxy``.
    """

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = connections
        self.flow: _FlowControl
        self.conn: _LimitedConnection = _LimitedConnection(
            h11.SERVER, self.config.h11_max_incomplete_event_size or _MAX_HEADER_BYTES
        )
        self._is_continuation_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._awaited_input: object = None
        self.ws_protocol_class = lambda **options: WebSocketConnection(connections, **options)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall_timer = _StallTimer(transport, self._limits.stalled_seconds, lambda: self._record_end("stalled"))
        self.flow = _FlowControl(transport)
        self._start_timer("headers")
        if not self._limits.confirm(transport.get_extra_info("peername")):
            transport.abort()

    def handle_events(self) -> None:
        """Handle a limited number of events now, and the rest in later turns of the event loop."""
        self.conn.remaining_event_count = _MAX_EVENTS_PER_TURN
        super().handle_events()
        if self.conn.remaining_event_count or self._stall_timer is None:  # None: the connection was upgraded or lost.
            self.flow.release()
            return
        self.flow.hold()
        if not self._is_continuation_scheduled:
            self._is_continuation_scheduled = True
            self.loop.call_soon(self._handle_pending_events)

    def _handle_pending_events(self) -> None:
        self._is_continuation_scheduled = False
        if self._stall_timer is not None and not self.transport.is_closing():
            self.handle_events()
            self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A client that has not sent anything more is idle; uvicorn has a timer for that.
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            self._update_timer()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_timers()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        if self._stall_timer is None:
            return  # The connection was upgraded, so ``WebSocketConnection`` owns it.
        state = self.conn.their_state
        if state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._start_timer("headers", self.cycle)
        elif state is h11.SEND_BODY and self.cycle.response_complete:
            self._start_timer("body", self.cycle)
        else:
            self._start_timer(None)

    def _start_timer(self, awaited_part: str | None, request: object = None) -> None:
        """Start the timer for ``awaited_part``, which the client must send next. If it is None, stop the timer."""
        if (awaited_input := (awaited_part, request)) == self._awaited_input:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            self.loop.call_later(self._limits.request_seconds, self._abort_slow_request) if awaited_part else None
        )
        self._awaited_input = awaited_input

    def _abort_slow_request(self) -> None:
        self._record_end("request too slow")
        self.transport.abort()

    def _record_end(self, reason: str) -> None:
        self._limits.record_end(reason, self.client[0] if self.client else "")

    def _stop_timers(self) -> None:
        self._start_timer(None)
        if self._stall_timer:
            self._stall_timer.stop()
            self._stall_timer = None


class WebSocketConnection(_StallTimedConnection, ClientWebSocket):
    """A client's connection after its upgrade to WebSocket."""

    def __init__(self, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._stall_timer = _StallTimer(self.transport, self._limits.stalled_seconds, self._record_end)
        if self.transport.get_write_buffer_size():
            # Writing was paused before the upgrade, so ``pause_writing`` is not called again.
            self._stall_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stall_timer:
            self._stall_timer.stop()
        super().connection_lost(exc)

    def _record_end(self) -> None:
        self._limits.record_end("stalled", self.client[0] if self.client else "")
