"""Start the daemon (configuration → log → host → engine → application → listeners), and stop it in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import importlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from sandbox_gateway import __version__, log
from sandbox_gateway.api.access.auth import Keys, LocalPeerMiddleware
from sandbox_gateway.api.access.forwarded import ForwardedMiddleware
from sandbox_gateway.api.data_plane.websocket import MAX_MESSAGE_BYTES, PING_SECONDS, ClientWebSocket
from sandbox_gateway.config import Config, Server
from sandbox_gateway.errors import GatewayError, Invalid
from sandbox_gateway.server import heap
from sandbox_gateway.server.connections import (
    MAX_GATEWAY_CONNECTIONS,
    Connections,
    HttpConnection,
    Listener,
    reserve_descriptors,
)
from sandbox_gateway.server.service_manager import notify, start_timeout_extended, watchdog_notified

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sandbox_gateway.engine.engine import Engine
    from sandbox_gateway.fleet.fleet import Fleet
    from sandbox_gateway.hosts.base import Host

GRACE_SECONDS = 10
_BACKLOG = 512
_HOST_CLASSES = {
    "kvm_xfs": ("sandbox_gateway.hosts.kvm_xfs.host", "KvmXfsHost"),
    "jail_zfs": ("sandbox_gateway.hosts.jail_zfs.host", "JailZfsHost"),
}

logger = log.Logger("daemon")


@dataclass(frozen=True)
class Address:
    """A resolved TCP address to listen on."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    is_loopback: bool


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises GatewayError if the daemon cannot start."""
    from sandbox_gateway.engine.engine import Engine

    heap.configure_allocator()
    log.setup(config.log.level, config.log.format, config.log.file)
    _silence_libraries()
    stop_event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_event.set)
    async with watchdog_notified():
        await serve(config, Engine(make_host(config), config), stop_event)
    logger.info("stopped")


async def serve(config: Config, engine: Engine, stop_event: asyncio.Event) -> None:
    """Open ``engine``, serve requests until ``stop_event`` is set, and close it. Raises GatewayError."""
    keys, address, tls = load_listener_settings(config.server)
    fleet = _create_fleet(config, engine)
    # On a busy machine, this takes longer than the lease of a member of a fleet, which must be renewed meanwhile.
    importlib.import_module("sandbox_gateway.api.app")

    async def open_all() -> None:
        await engine.open()
        if fleet:
            await fleet.open()

    try:
        async with start_timeout_extended():
            is_open = await _run_until_stopped(stop_event, open_all())
        if is_open:
            heap.exclude_existing_objects()
            await _serve(config, engine, keys, address, tls, stop_event, fleet)
    finally:
        try:
            await engine.close()
        finally:
            if fleet:
                await fleet.close()


async def check(config: Config) -> None:
    """Check that a gateway with this configuration can run on this machine. Raises GatewayError."""
    load_listener_settings(config.server)
    host = make_host(config)
    if config.fleet:
        from sandbox_gateway.fleet.fleet import check_files

        check_files(config.fleet)
    try:
        await host.open()
    finally:
        await host.close()


def build_openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document. This does not require a host."""
    from sandbox_gateway.api.app import create_app
    from sandbox_gateway.engine.engine import Engine

    no_host: Any = None
    return create_app(Engine(no_host, Config()), Config(), Keys()).openapi()


def make_host(config: Config) -> Host:
    """Create the host of the configured kind. Raises Invalid if a library that it requires is missing."""
    module, name = _HOST_CLASSES[config.host.kind]
    try:
        host_class = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Invalid(
            f"host.kind {config.host.kind!r} does not work on this machine ({error}): install the missing "
            "library, or set host.kind to a different kind"
        ) from None
    host: Host = host_class(config)
    return host


def _create_fleet(config: Config, engine: Engine) -> Fleet | None:
    """Return the fleet of a gateway, or None without `[fleet]`. Raises Invalid."""
    if config.fleet is None:
        return None
    try:
        from sandbox_gateway.fleet.fleet import Fleet
    except ImportError as error:
        raise Invalid(
            f"[fleet] needs a client for etcd ({error}): install the gateway with the extra `fleet`, or remove [fleet] "
            "from the configuration"
        ) from None
    return Fleet(config.fleet, engine)


def load_listener_settings(server: Server) -> tuple[Keys, Address | None, ssl.SSLContext | None]:
    """Load the keys, the TCP address and the TLS certificate. Raises Invalid if they are invalid or inconsistent."""
    if server.socket is None and not server.listen:
        raise Invalid("neither server.socket nor server.listen is set: set at least one of them")
    keys = Keys.load(server.key_file) if server.key_file else Keys()
    tls = _load_tls(server)
    address = resolve(server.listen) if server.listen else None
    setting = f"server.listen {server.listen!r}"
    if address and not address.is_loopback:
        if not len(keys):
            raise Invalid(
                f"other machines can reach {setting}, but no API key is configured: set server.key_file to a file that "
                "contains a key"
            )
        if tls is None and not server.allow_plaintext:
            raise Invalid(
                f"other machines can reach {setting}, but keys must not be sent unencrypted: set "
                "server.tls_cert and server.tls_key, or server.allow_plaintext if a proxy provides TLS"
            )
    if address and not len(keys):
        logger.warning("no API key is configured, so requests to the TCP address will be refused: set server.key_file")
    return keys, address, tls


def resolve(listen: str, setting: str = "server.listen") -> Address:
    """Resolve `host:port`, `[v6]:port` or `:port` (all addresses). Raises Invalid if it cannot be resolved."""
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise Invalid(f"{setting} {listen!r} is not an address: use host:port, such as 127.0.0.1:8700")
    hostname = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        candidates = socket.getaddrinfo(hostname or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Invalid(
            f"the host in {setting} {listen!r} cannot be resolved ({error}): use an IP address, or check the name"
        ) from None
    family, _, _, _, sockaddr = candidates[0]
    return Address(family, sockaddr, ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]).is_loopback)


def _load_tls(server: Server) -> ssl.SSLContext | None:
    if not server.tls_cert and not server.tls_key:
        return None
    if not server.tls_cert or not server.tls_key:
        raise Invalid("TLS needs both server.tls_cert and server.tls_key: set both, or neither")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
    except OSError as error:
        raise Invalid(
            f"the TLS certificate {server.tls_cert} with the key {server.tls_key} cannot be loaded ({error}): check "
            "both files"
        ) from None
    return context


async def _serve(
    config: Config,
    engine: Engine,
    keys: Keys,
    address: Address | None,
    tls: ssl.SSLContext | None,
    stop_event: asyncio.Event,
    fleet: Fleet | None,
) -> None:
    from sandbox_gateway.api.app import create_app

    app = create_app(engine, config, keys, fleet)
    with contextlib.ExitStack() as stack:
        listeners: list[tuple[uvicorn.Server, socket.socket]] = []
        if config.server.socket:
            unix_listener = stack.enter_context(unix_socket_bound(config.server.socket, config.server.socket_group))
            listeners.append((_DaemonServer(_create_uvicorn_config(LocalPeerMiddleware(app), None)), unix_listener))
        if address:
            connections = Connections(config.server, reserve_descriptors(config), app.state.metrics)
            tcp_listener = stack.enter_context(
                contextlib.closing(_create_tcp_socket(connections, address, f"server.listen {config.server.listen!r}"))
            )
            listeners.append((_TcpServer(_create_uvicorn_config(app, tls), connections), tcp_listener))
        if config.fleet and fleet:
            listen = config.fleet.listen or config.fleet.address
            setting = "fleet.listen" if config.fleet.listen else "fleet.address"
            # Anyone who reaches the listener can begin a TLS handshake.
            gateways = Connections(config.server, MAX_GATEWAY_CONNECTIONS, app.state.metrics, is_for_gateways=True)
            gateway_listener = stack.enter_context(
                contextlib.closing(_create_tcp_socket(gateways, resolve(listen, setting), f"{setting} {listen!r}"))
            )
            settings = _create_uvicorn_config(ForwardedMiddleware(app), fleet.server_tls)
            listeners.append((_TcpServer(settings, gateways), gateway_listener))
        await _listen(listeners, app, stop_event)


async def _listen(
    listeners: list[tuple[uvicorn.Server, socket.socket]], app: FastAPI, stop_event: asyncio.Event
) -> None:
    tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in listeners]
    try:
        # uvicorn provides a flag, not an event.
        while not all(server.started for server, _ in listeners) and not any(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _, listener in listeners:
            logger.info("listening", address=str(listener.getsockname()), version=__version__)
        notify("READY=1")
        await asyncio.wait([asyncio.create_task(stop_event.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        notify("STOPPING=1")
        logger.info("stopping", grace_seconds=GRACE_SECONDS)
        app.state.closing.set()
        for server, _ in listeners:
            server.should_exit = True
        await asyncio.gather(*tasks)
        await app.state.pools.close()


class _DaemonServer(uvicorn.Server):
    """A uvicorn server that leaves signal handling to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _TcpServer(_DaemonServer):
    """A server for TCP connections, with the limits of ``Connections``."""

    def __init__(self, settings: uvicorn.Config, connections: Connections) -> None:
        super().__init__(settings)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn allows a minute for a TLS handshake, and has no option to change that.
        assert sockets
        tls = self.config.ssl
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._create_protocol,
                sock=listener,
                ssl=tls,
                ssl_handshake_timeout=self._connections.request_seconds if tls else None,
                ssl_shutdown_timeout=self._connections.tls_shutdown_seconds if tls else None,
                backlog=self.config.backlog,
            )
            for listener in sockets
        ]
        self.started = True

    def _create_protocol(self) -> HttpConnection:
        return HttpConnection(self._connections, config=self.config, server_state=self.server_state, app_state={})


def _create_uvicorn_config(app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        http="h11",
        ws=ClientWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_SECONDS,
        # A client that reads slowly responds to pings late, and must not be disconnected for that.
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        # Pipelined requests must not inherit context variables of the previous request, such as its plan session.
        reset_contextvars=True,
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=_BACKLOG,
    )
    settings.load()
    settings.ssl = tls
    return settings


def _silence_libraries() -> None:
    """Silence the logs of libraries, because the daemon logs requests and errors itself."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)


@contextlib.contextmanager
def unix_socket_bound(path: Path, group: str) -> Iterator[socket.socket]:
    """Create a bound Unix socket, and remove it on exit. Raises Invalid if it cannot be created.

    Its mode is 0660 if ``group`` is set, and 0600 otherwise.
    """
    gid = _find_group_id(group) if group else -1
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_socket(path)
        previous_umask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous_umask)
        if group:
            os.chown(path, -1, gid)
            path.chmod(0o660)
    except OSError as error:
        listener.close()
        raise Invalid(
            f"server.socket {path} cannot be created ({error}): check the directory and its permissions"
        ) from None
    except GatewayError:
        listener.close()
        raise
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _find_group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise Invalid(
            f"server.socket_group {group!r} does not exist: create it with groupadd --system {group}"
        ) from None


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket that no process is listening on."""
    if not path.exists():
        return
    if not path.is_socket():
        raise Invalid(f"server.socket {path} is not a socket: remove it, or choose a different path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise Invalid(f"another gateway is listening on {path}: stop it first, or choose a different server.socket")


def _create_tcp_socket(connections: Connections, address: Address, setting: str) -> socket.socket:
    listener = Listener(connections, address.family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.sockaddr)
    except OSError as error:
        listener.close()
        raise Invalid(f"{setting} cannot be bound ({error.strerror}): choose a different address or port") from None
    return listener


async def _run_until_stopped(stop_event: asyncio.Event, work: Awaitable[None]) -> bool:
    """Await ``work``, but cancel it if ``stop_event`` is set first. Returns whether ``work`` finished."""
    worker, stop_task = asyncio.ensure_future(work), asyncio.ensure_future(stop_event.wait())
    await asyncio.wait({worker, stop_task}, return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    if worker.done():
        worker.result()
        return True
    worker.cancel()
    await asyncio.wait({worker})
    return False
