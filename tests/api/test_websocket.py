"""Test WebSockets to services in sandboxes, over real sockets at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from sandbox_gateway.api.data_plane import websocket
from tests.support.guest_services import (
    PORT,
    Service,
    get_machine_address,
    make_port_headers,
    make_port_host,
    make_reply,
    make_request_head,
    raw_connection,
    raw_service,
    read_response,
    wait_until,
)
from tests.support.memory_gateway import EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox

KEY_HEADERS = {"X-API-Key": EXEC_KEY}
NONCE = "A" * 22 + "=="
Handler = Callable[[ServerConnection], Awaitable[None]]


class RecordingService:
    """A service that handles each connection with ``handler``, and records headers, paths and close codes."""

    def __init__(self, handler: Handler, **settings: Any) -> None:
        self._handler = handler
        self._settings = {"max_size": None, "ping_interval": None, "close_timeout": 0.2} | settings
        self.headers: list[tuple[str, str]] = []
        self.path = ""
        self.close_codes: list[int | None] = []
        """The close code of each connection, as the service received it."""

    async def listen(self, address: str, port: int) -> Server:
        return await serve(self._serve, address, port, **self._settings)

    async def _serve(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.headers, self.path = list(connection.request.headers.raw_items()), connection.request.path
        try:
            with contextlib.suppress(ConnectionClosed):
                await self._handler(connection)
            await connection.wait_closed()
            self.close_codes.append(connection.close_code)
        finally:
            connection.transport.abort()


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@contextlib.contextmanager
def recording_service(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], handler: Handler = echo, **settings: Any
) -> Iterator[RecordingService]:
    service = RecordingService(handler, **settings)
    with Service(get_machine_address(memory_gateway, sandbox), PORT, service.listen):
        yield service


def open_websocket(
    memory_gateway: MemoryGateway,
    sandbox: dict[str, Any],
    path: str = "/",
    *,
    uses_host_name: bool = True,
    **options: Any,
) -> ClientConnection:
    headers = options.pop("headers", KEY_HEADERS)
    if not uses_host_name:
        headers = headers | make_port_headers(sandbox, PORT)
    authority = make_port_host(sandbox, PORT) if uses_host_name else f"127.0.0.1:{memory_gateway.port}"
    return connect(
        f"ws://{authority}{path}",
        sock=socket.create_connection(("127.0.0.1", memory_gateway.port), timeout=30),
        additional_headers=headers,
        max_size=None,
        proxy=None,
        **options,
    )


@pytest.mark.parametrize("uses_host_name", [True, False])
def test_messages_are_forwarded_in_both_directions(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], uses_host_name: bool
) -> None:
    service_headers = {"Origin": "http://example.org", "Cookie": "a=1", "Authorization": "Bearer the-services-own"}
    with recording_service(memory_gateway, sandbox) as service:
        with open_websocket(
            memory_gateway,
            sandbox,
            "/a%2Fb;c=1/?x=%20y",
            uses_host_name=uses_host_name,
            headers=KEY_HEADERS | service_headers,
        ) as client:
            for message in ("text ü", b"\x00\xff", "", b""):
                client.send(message)
                assert client.recv(10) == message
            assert client.ping().wait(5)
        assert service.path == "/a%2Fb;c=1/?x=%20y"
        received_headers = {name.lower(): value for name, value in service.headers}
        assert len(service.headers) == len(received_headers)
        assert {name.lower(): received_headers[name.lower()] for name in service_headers} == {
            name.lower(): service_headers[name] for name in service_headers
        }
        assert received_headers["host"] == (make_port_host(sandbox, PORT) if uses_host_name else f"localhost:{PORT}")
        assert "sec-websocket-extensions" not in received_headers and EXEC_KEY not in str(received_headers)
        assert not {"x-api-key", "e2b-sandbox-id", "e2b-sandbox-port", "x-access-token"} & set(received_headers)
        wait_until(lambda: service.close_codes == [1000])


def test_subprotocols_are_negotiated_with_the_service(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    with (
        recording_service(memory_gateway, sandbox, subprotocols=["v2", "v3"]),
        open_websocket(memory_gateway, sandbox, subprotocols=["v1", "v2"]) as client,
    ):
        assert client.subprotocol == "v2"
    with (
        recording_service(memory_gateway, sandbox),
        open_websocket(memory_gateway, sandbox, subprotocols=["v1"]) as client,
    ):
        assert client.subprotocol is None


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "away"), (1011, "ü"), (4321, "own")])
def test_close_codes_are_forwarded_in_both_directions(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], code: int, reason: str
) -> None:
    async def close_if_requested(connection: ServerConnection) -> None:
        if connection.request is not None and connection.request.path == "/close":
            await connection.close(code, reason)

    with recording_service(memory_gateway, sandbox, close_if_requested) as service:
        with open_websocket(memory_gateway, sandbox, "/close") as client, pytest.raises(ConnectionClosed) as error_info:
            client.recv(10)
        assert error_info.value.rcvd is not None
        assert (error_info.value.rcvd.code, error_info.value.rcvd.reason) == (code, reason)
        with open_websocket(memory_gateway, sandbox) as client:
            client.close(code, reason)
        wait_until(lambda: service.close_codes == [code, code])


def test_large_fragmented_messages_are_forwarded(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    large_message = bytes(range(256)) * (4 << 12)
    with recording_service(memory_gateway, sandbox), open_websocket(memory_gateway, sandbox) as client:
        client.send(large_message[start : start + 100_000] for start in range(0, len(large_message), 100_000))
        assert client.recv(20) == large_message


def test_oversized_messages_are_refused_in_both_directions(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    async def send_large_message(connection: ServerConnection) -> None:
        if connection.request is not None and connection.request.path == "/large":
            await connection.send(b"x" * (websocket.MAX_MESSAGE_BYTES + 1))
        await connection.wait_closed()

    with recording_service(memory_gateway, sandbox, send_large_message) as service:
        with (
            open_websocket(memory_gateway, sandbox, "/large") as client,
            pytest.raises(ConnectionClosedError) as error_info,
        ):
            client.recv(20)
        assert error_info.value.rcvd is not None and error_info.value.rcvd.code == 1009
        with open_websocket(memory_gateway, sandbox) as client, pytest.raises(ConnectionClosedError) as error_info:
            client.send(b"x" * (websocket.MAX_MESSAGE_BYTES + 1))
            client.recv(20)
        wait_until(lambda: service.close_codes == [1009, 1009])


def test_a_slow_reader_blocks_the_sender(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    flooded_byte_count = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal flooded_byte_count
        while True:
            await connection.send(b"x" * 65536)
            flooded_byte_count += 65536

    async def wait_without_reading(connection: ServerConnection) -> None:
        await connection.wait_closed()

    with (
        recording_service(memory_gateway, sandbox, flood) as service,
        open_websocket(memory_gateway, sandbox, max_queue=1, close_timeout=0.1) as client,
    ):
        previous_byte_count = -1
        while flooded_byte_count != previous_byte_count:
            previous_byte_count = flooded_byte_count
            threading.Event().wait(0.25)
        assert flooded_byte_count < 32 << 20
        client.recv(5)
        client.socket.close()
        wait_until(lambda: service.close_codes)
    with (
        recording_service(memory_gateway, sandbox, wait_without_reading),
        open_websocket(memory_gateway, sandbox, close_timeout=0.1) as client,
    ):
        client.socket.settimeout(0.5)
        sent_byte_count = 0
        with pytest.raises((TimeoutError, ConnectionClosed)):
            while sent_byte_count < 64 << 20:
                client.send(b"x" * 65536)
                sent_byte_count += 65536
        assert sent_byte_count < 32 << 20
        client.socket.close()


def test_a_disconnect_without_a_close_frame_is_forwarded(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    async def abort_if_requested(connection: ServerConnection) -> None:
        if connection.request is not None and connection.request.path == "/leave":
            connection.transport.abort()

    with recording_service(memory_gateway, sandbox, abort_if_requested) as service:
        with (
            open_websocket(memory_gateway, sandbox, "/leave") as client,
            pytest.raises(ConnectionClosedError) as error_info,
        ):
            client.recv(10)
        assert error_info.value.rcvd is not None and error_info.value.rcvd.code == 1014
        client = open_websocket(memory_gateway, sandbox)
        client.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: service.close_codes == [1006, 1006])


def test_a_refused_handshake_is_forwarded(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    chunked_response = (
        b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\nX-Own: 1\r\nSet-Cookie: a=1; Domain=local\r\n\r\n"
    )
    for reply, status, body in (
        (make_reply("401 Unauthorized", b"who?", "WWW-Authenticate: Basic"), 401, b"who?"),
        (chunked_response + b"2\r\nno\r\n0\r\n\r\n", 403, b"no"),
        (make_reply("403 Forbidden", b"x" * 60_000), 403, b"x" * 60_000),
    ):
        with raw_service(memory_gateway, sandbox, reply) as service, pytest.raises(InvalidStatus) as error_info:
            open_websocket(memory_gateway, sandbox)
        response = error_info.value.response
        assert (response.status_code, response.body) == (status, body) and len(service.heads) == 1
        assert "set-cookie" not in response.headers
    redirect_response = make_reply("302 Found", b"", "Location: ws://127.0.0.1:1/")
    # The client, not the gateway, refuses the redirect.
    with (
        raw_service(memory_gateway, sandbox, redirect_response) as service,
        pytest.raises(ValueError, match=r"redirect to ws://127\.0\.0\.1:1/"),
    ):
        open_websocket(memory_gateway, sandbox)
    for reply in (make_reply(), b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"):
        with raw_service(memory_gateway, sandbox, reply) as service, pytest.raises(InvalidStatus) as error_info:
            open_websocket(memory_gateway, sandbox)
        assert error_info.value.response.status_code == (200 if reply == make_reply() else 502), reply
        wait_until(lambda: not service.open_connection_count)


def test_handshakes_need_access_to_an_open_port(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    def read_refusal(target: dict[str, Any], **headers: str) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as error_info:
            open_websocket(memory_gateway, target, headers=headers)
        return error_info.value.response.status_code, error_info.value.response.body.decode()

    assert read_refusal(sandbox)[0] == read_refusal(sandbox, **{"X-Access-Token": "wrong"})[0] == 403
    assert read_refusal(sandbox, **{"X-API-Key": READ_KEY})[0] == 403
    status, message = read_refusal(sandbox, **KEY_HEADERS)
    assert status == 502 and "port is not open" in message and '"kind":"backend_failed"' in message
    status, message = read_refusal({"sandboxID": "0" * 12}, **KEY_HEADERS)
    assert status == 502 and "was not found" in message
    with recording_service(memory_gateway, sandbox) as service:
        for credentials in (
            {"X-Access-Token": sandbox["envdAccessToken"]},
            {"E2B-Traffic-Access-Token": sandbox["trafficAccessToken"]},
            {"Authorization": f"Bearer {EXEC_KEY}"},
        ):
            with open_websocket(memory_gateway, sandbox, headers=credentials) as client:
                client.send("x")
                assert client.recv(10) == "x"
            assert not {value for _, value in service.headers} & set(credentials.values())
    upgrade_headers = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    gateway_request = make_request_head("GET /events", "Host: gateway", *upgrade_headers, f"Sec-WebSocket-Key: {NONCE}")
    with raw_connection(memory_gateway, gateway_request) as connection:
        status, body = read_response(connection)
        assert status == 400 and body["kind"] == "unsupported"
    incomplete_handshake = make_request_head(
        "GET /", f"Host: {make_port_host(sandbox, PORT)}", f"X-API-Key: {EXEC_KEY}", *upgrade_headers
    )
    with raw_connection(memory_gateway, incomplete_handshake) as connection:
        assert read_response(connection)[0] == 400, "the handshake has no Sec-WebSocket-Key"


@pytest.mark.parametrize("operation", ["rollback", "pause", "kill"])
def test_the_connection_is_closed_when_the_machine_stops(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], operation: str
) -> None:
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    with recording_service(memory_gateway, sandbox) as service, open_websocket(memory_gateway, sandbox) as client:
        client.send("x")
        assert client.recv(10) == "x"
        if operation == "rollback":
            response = api.post("/sandboxes/one/rollback", json={"snapshotID": "s1"})
        elif operation == "pause":
            response = api.post("/sandboxes/one/pause")
        else:
            response = api.delete("/sandboxes/one")
        assert response.is_success
        with pytest.raises(ConnectionClosedError) as error_info:
            client.recv(10)
        assert error_info.value.rcvd is not None and error_info.value.rcvd.code == 1012
        assert "rolled back, paused or removed" in error_info.value.rcvd.reason
        wait_until(lambda: service.close_codes == [1006])
    if operation == "rollback":
        with recording_service(memory_gateway, sandbox), open_websocket(memory_gateway, sandbox) as client:
            client.send("new")
            assert client.recv(10) == "new"


def test_a_connection_resumes_a_paused_sandbox(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    sandbox = create_sandbox(api, name="resuming", autoPause=True, autoResume={"enabled": True})
    api.post("/sandboxes/resuming/pause")
    with pytest.raises(InvalidStatus) as error_info:
        open_websocket(memory_gateway, sandbox)
    assert error_info.value.response.status_code == 502 and b"port is not open" in error_info.value.response.body
    assert api.get("/sandboxes/resuming").json()["state"] == "running"


def test_a_disconnect_during_the_handshake_reaches_the_service(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    disconnected = threading.Event()

    async def listen(address: str, port: int) -> asyncio.Server:
        async def wait_for_disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(OSError):
                await reader.read()
            disconnected.set()
            writer.close()

        return await asyncio.start_server(wait_for_disconnect, address, port)

    upgrade_headers = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    handshake = make_request_head(
        "GET /",
        f"Host: {make_port_host(sandbox, PORT)}",
        f"X-API-Key: {EXEC_KEY}",
        *upgrade_headers,
        "Sec-WebSocket-Key: " + "A" * 22 + "==",
    )
    with Service(get_machine_address(memory_gateway, sandbox), PORT, listen):
        with raw_connection(memory_gateway, handshake):
            assert not disconnected.wait(0.2)
        assert disconnected.wait(5)


async def _send_pings(connection: ServerConnection) -> None:
    """Keep sending pings from the service, and never read the pongs."""
    connection.transport.pause_reading()
    frame = b"\x89\x7d" + b"x" * 125
    for _ in range(1 << 20):
        if connection.transport.is_closing():
            return
        if connection.transport.get_write_buffer_size() < 1 << 20:
            connection.transport.write(frame * 2000)
        await asyncio.sleep(0.0005)


def test_a_service_that_never_reads_pongs_is_disconnected(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_UNSENT_BYTES", 1 << 20)
    with (
        recording_service(memory_gateway, sandbox, _send_pings),
        open_websocket(memory_gateway, sandbox) as client,
        pytest.raises(ConnectionClosed),
    ):
        client.recv(timeout=30)


def test_fragments_are_forwarded_as_they_arrive(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    """The gateway starts to forward a large frame before all of it has arrived."""
    received_fragments: list[str | bytes] = []

    async def receive_fragments(connection: ServerConnection) -> None:
        async for piece in connection.recv_streaming():
            received_fragments.append(piece)
        await connection.send(["a", "b"])
        await connection.wait_closed()

    with (
        recording_service(memory_gateway, sandbox, receive_fragments),
        open_websocket(memory_gateway, sandbox) as client,
    ):
        client.socket.sendall(b"\x01\x83" + b"\0" * 4 + b"one")
        wait_until(lambda: received_fragments == ["one"])
        client.socket.sendall(b"\x80\xff" + (1 << 20).to_bytes(8, "big") + b"\0" * 4 + b"x" * 100_000)
        wait_until(lambda: len("".join(map(str, received_fragments))) > 80_000)
        client.socket.sendall(b"x" * ((1 << 20) - 100_000))
        assert client.recv(10) == "ab"
        assert "".join(map(str, received_fragments)) == "one" + "x" * (1 << 20)


def test_messages_sent_before_a_close_arrive(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    """All messages arrive although the gateway parses only one fragment at a time."""
    received_messages: list[str | bytes] = []

    async def receive_all(connection: ServerConnection) -> None:
        async for message in connection:
            received_messages.append(message)

    with recording_service(memory_gateway, sandbox, receive_all) as service:
        with open_websocket(memory_gateway, sandbox, close_timeout=0.1) as client:
            client.socket.sendall(b"".join(b"\x81\x81\0\0\0\0%d" % (number % 10) for number in range(500)))
            client.socket.sendall(b"\x88\x82\0\0\0\0\x03\xe8")
            wait_until(lambda: service.close_codes == [1000], seconds=30)
        assert received_messages == [str(number % 10) for number in range(500)]


def test_services_receive_the_masked_host(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    for mask, expected_host in (("${PORT}-shop.example.com", f"{PORT}-shop.example.com"), ("shop:443", "shop:443")):
        sandbox = create_sandbox(api, network={"maskRequestHost": mask})
        with recording_service(memory_gateway, sandbox) as service, open_websocket(memory_gateway, sandbox) as client:
            client.send("text")
            assert client.recv(10) == "text"
            host_headers = [value for name, value in service.headers if name.lower() == "host"]
            assert host_headers == [expected_host]
