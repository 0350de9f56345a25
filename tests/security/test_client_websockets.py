"""A client with a key, or root in a guest, sends endless WebSocket messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame
from websockets.sync.client import ClientConnection, connect
from websockets.uri import WebSocketURI

from sandbox_gateway.api.data_plane.fragments import MAX_CONTROL_FRAMES, ClientFragmentProtocol, FragmentProtocol
from tests.api.test_websocket import Handler, RecordingService, open_websocket
from tests.security.hostile import LoopMonitor, make_endless_sender
from tests.support.daemon import Daemon
from tests.support.guest_services import PORT, Service, make_port_host, raw_service
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until

CLIENT_COUNT = 20
MESSAGE_BYTES = 8 << 20
"""Size of the message that each connection sends. All messages together take 160 MiB."""
MAX_GROWTH_BYTES = 40 << 20
"""Buffering until messages are complete would take more than 160 MiB."""
DaemonAndClients = tuple[Daemon, list[ClientConnection]]


@pytest.fixture(scope="module")
def _daemon_and_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, dict[str, Any]]]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon, daemon.create_sandbox()


@contextlib.contextmanager
def opened_websockets(
    daemon_and_sandbox: tuple[Daemon, dict[str, Any]], handler: Handler, **settings: Any
) -> Iterator[DaemonAndClients]:
    """Open CLIENT_COUNT connections to a service in a sandbox. The service runs ``handler`` for each connection."""
    daemon, sandbox = daemon_and_sandbox
    service = RecordingService(handler, **settings)
    with Service(sandbox["address"], PORT, service.listen), contextlib.ExitStack() as stack:
        clients = []
        for _ in range(CLIENT_COUNT):
            connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=30)
            connection.settimeout(None)
            clients.append(
                stack.enter_context(
                    connect(
                        f"ws://{make_port_host(sandbox, PORT)}/",
                        sock=connection,
                        additional_headers={"X-API-Key": ADMIN_KEY},
                        compression=None,
                        open_timeout=60,
                        close_timeout=0.1,
                        max_queue=1,
                    )
                )
            )
            stack.callback(connection.close)
        yield daemon, clients


async def read_all(connection: ServerConnection) -> None:
    async for _ in connection.recv_streaming():
        pass


async def never_read(connection: ServerConnection) -> None:
    connection.transport.pause_reading()
    await asyncio.Event().wait()


def make_fragments(size: int) -> bytes:
    """Return a client's unfinished message: about MESSAGE_BYTES in fragments of ``size`` bytes."""
    length_field = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return b"\x02\x81\0\0\0\0x" + (b"\x00" + length_field + b"\0" * 4 + b"x" * size) * (MESSAGE_BYTES // (size + 8))


FLOODS = {
    "small fragments": make_fragments(100),
    "large fragments": make_fragments(32_000),
    "one frame whose end is missing": b"\x82\xff" + (16 << 20).to_bytes(8, "big") + b"\0" * 4 + b"x" * MESSAGE_BYTES,
    "empty messages": (b"\x82\x80" + b"\0" * 4) * 100_000,
    "pings": (b"\x89\xfd\0\0\0\0" + b"x" * 125) * (MESSAGE_BYTES // 131),
}


@pytest.mark.parametrize("handler", mark_slow_except((never_read,), (read_all, never_read)))
@pytest.mark.parametrize("flood", FLOODS)
def test_memory_use_is_limited_when_a_client_floods(
    _daemon_and_sandbox: tuple[Daemon, dict[str, Any]], flood: str, handler: Handler
) -> None:
    with opened_websockets(_daemon_and_sandbox, handler) as (daemon, clients):
        memory_before = daemon.measure_memory()
        peak_memory = send_to_all(daemon, clients, FLOODS[flood])
        assert peak_memory - memory_before < MAX_GROWTH_BYTES


@pytest.mark.parametrize(("size", "is_final"), [(0, True), (100, False), (60_000, False), (MESSAGE_BYTES, False)])
def test_memory_use_is_limited_when_a_guest_floods(
    _daemon_and_sandbox: tuple[Daemon, dict[str, Any]], size: int, is_final: bool
) -> None:
    """The clients read nothing. The guest sends whole messages, fragments, or one long frame."""
    if size < 126:
        length_field = bytes([size])
    else:
        length_field = b"\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x7f" + (16 << 20).to_bytes(8, "big")
    frame = (b"\x82" if is_final else b"\x00") + length_field + b"x" * size
    flood_count = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal flood_count
        connection.transport.write(b"" if is_final else b"\x02\x01x")
        connection.transport.write(frame * max(1, min(MESSAGE_BYTES // len(frame), 100_000)))
        flood_count += 1
        await asyncio.Event().wait()

    with opened_websockets(_daemon_and_sandbox, flood) as (daemon, _):
        memory_before = daemon.measure_memory()
        wait_until(lambda: flood_count == CLIENT_COUNT, seconds=60)
        # The gateway does not report when it stops reading, so measure for a while.
        peak_memory = max(measure_memory(daemon) for _ in range(20))
        assert peak_memory - memory_before < MAX_GROWTH_BYTES


@pytest.mark.parametrize("control_frame", [b"\x89\x00", b"\x8a\x00"])
def test_thousands_of_control_frames_do_not_delay_other_clients(control_frame: bytes) -> None:
    """All frames arrive in a single read. On 60 connections, this once delayed other clients for seconds."""
    protocol = ClientFragmentProtocol(WebSocketURI(False, "inside", 80, "/", ""), max_size=1 << 20)
    protocol.parser = FragmentProtocol.parse(protocol)
    protocol.receive_data(control_frame * 8000 + b"\x82\x01x")
    control_frame_count = 0
    while protocol.has_reached_control_limit:
        batch = protocol.events_received()
        assert protocol.has_more and len(batch) <= MAX_CONTROL_FRAMES
        control_frame_count += len(batch)
        protocol.receive_data(b"")
    *remaining_frames, message = protocol.events_received()
    assert control_frame_count + len(remaining_frames) == 8000 and isinstance(message, Frame) and message.data == b"x"


def test_messages_arrive_among_thousands_of_control_frames(_daemon_and_sandbox: tuple[Daemon, dict[str, Any]]) -> None:
    """Control frames precede and follow a message in each direction."""
    pings, trailing_pongs = b"\x89\x80abcd" * 5000, b"\x8a\x80abcd" * 5000

    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            connection.transport.write(b"\x8a\x00" * 5000)
            await connection.send(message)
            connection.transport.write(b"\x8a\x00" * 5000)

    with opened_websockets(_daemon_and_sandbox, echo) as (daemon, clients):
        for client in clients:
            client.socket.sendall(pings + b"\x82\x81\0\0\0\0x" + trailing_pongs)
        for client in clients:
            assert client.recv(timeout=60) == b"x"
            client.send(b"y")
            assert client.recv(timeout=60) == b"y"
        daemon.check_health()


REFUSAL_HEAD = b"HTTP/1.1 403 Forbidden\r\n"
LONG_REFUSALS = {
    "a long body in tiny chunks": b"Transfer-Encoding: chunked\r\n\r\nf0000\r\n" + b"x" * 0xF0000 + b"\r\n",
    "a body without an end": b"\r\n" + b"x" * 100_000,
    "a long body": b"Content-Length: 1000000\r\n\r\n" + b"x" * 100_000,
    "long headers": b"a: %s\r\n" % (b"b" * 1000) * 100,
}


@pytest.mark.parametrize("case", LONG_REFUSALS)
def test_a_long_handshake_refusal_does_not_delay_other_clients(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service never closes the connection. Each of the tiny chunks once took as long as copying the whole body."""
    responses: list[Any] = []
    read_sizes: list[int] = []
    original_receive_data = ClientFragmentProtocol.receive_data

    def record_read(protocol: ClientFragmentProtocol, data: bytes) -> None:
        read_sizes.append(len(data))
        original_receive_data(protocol, data)

    monkeypatch.setattr(ClientFragmentProtocol, "receive_data", record_read)

    def open_refused_websocket() -> None:
        with pytest.raises(InvalidStatus) as error_info:
            open_websocket(memory_gateway, sandbox, open_timeout=50)
        responses.append(error_info.value.response)

    flood, _ = make_endless_sender(b"1\r\nx\r\n" * 10_000)
    with (
        raw_service(memory_gateway, sandbox, REFUSAL_HEAD + LONG_REFUSALS[case], next_handler=flood),
        LoopMonitor(memory_gateway) as loop_monitor,
    ):
        threads = [threading.Thread(target=open_refused_websocket) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [response.status_code for response in responses] == [502] * 10
    assert all(b"longer than 65536 bytes" in response.body for response in responses)
    assert loop_monitor.longest_block_seconds < 0.2
    assert 0 < max(read_sizes) <= 1024, "the gateway parses too much at a time"


def send_to_all(daemon: Daemon, clients: list[ClientConnection], data: bytes) -> int:
    """Send as much of ``data`` as possible on each connection, and return the daemon's peak memory use in bytes."""

    def send_to_one(client: ClientConnection) -> None:
        client.socket.settimeout(5)
        with contextlib.suppress(OSError):
            client.socket.sendall(data)

    threads = [threading.Thread(target=send_to_one, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    peak_memory = 0
    while any(thread.is_alive() for thread in threads):
        peak_memory = max(peak_memory, measure_memory(daemon))
    return max(peak_memory, measure_memory(daemon))


def measure_memory(daemon: Daemon) -> int:
    """Check that the daemon responds, and return its current memory use in bytes."""
    daemon.check_health()
    threading.Event().wait(0.1)
    return daemon.measure_memory()
