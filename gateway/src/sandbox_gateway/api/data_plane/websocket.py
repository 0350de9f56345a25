"""Forward WebSockets to ports inside sandboxes: each fragment that arrives on one connection is sent on the other.

Each side is read only as fast as the other accepts data. Each connection answers its own pings. uvicorn and websockets
buffer whole messages: without this module, a few connections could use up the gateway's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidState, InvalidStatus
from websockets.frames import Frame
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from sandbox_gateway.api.data_plane.fragments import (
    MAX_FRAGMENT_BYTES,
    MAX_HANDSHAKE_READ_BYTES,
    ClientFragmentProtocol,
    ServerFragmentProtocol,
    send_fragment,
)
from sandbox_gateway.api.data_plane.pools import CONNECT_SECONDS
from sandbox_gateway.api.data_plane.streams import SMALL_PIECE_BYTES
from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.hosts.connect import create_connection

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a message, in either direction; a larger one closes the connection with 1009."""
PING_SECONDS = 20.0
"""Interval of pings to the client, so that no network device in between drops an idle connection."""
HANDSHAKE_SECONDS = 60.0
MAX_UNSENT_BYTES = 256 << 10
"""Maximum bytes buffered for a peer that does not read, such as replies to its pings."""
_CLOSE_SECONDS = 5.0
_NO_CODE, _NORMAL_CLOSURE, _SERVICE_RESTART, _BAD_GATEWAY = 1005, 1000, 1012, 1014
_BAD_REQUEST_RESPONSE = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
HANDSHAKE_HEADERS = frozenset(
    {
        "sec-websocket-accept",
        "sec-websocket-extensions",
        "sec-websocket-key",
        "sec-websocket-protocol",
        "sec-websocket-version",
    }
)
"""Headers that each of the two connections sets for itself."""

# At level DEBUG, websockets logs every header, including secrets.
_silent_logger = logging.getLogger("sandbox_gateway.websockets")
_silent_logger.setLevel(logging.CRITICAL)
_silent_logger.propagate = False


class ClientWebSocket(WebSocketsSansIOProtocol):
    """A client's connection that receives and sends fragments as ASGI messages with a `frame`.

    It resumes reading only after the application has received all parsed fragments. A client for which more than
    MAX_UNSENT_BYTES are buffered is disconnected, because it does not read the responses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: ServerFragmentProtocol = ServerFragmentProtocol(
            max_size=self.config.ws_max_size, logger=_silent_logger
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = MAX_FRAGMENT_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc and not self.handshake_initiated:
            self._refuse_upgrade()
            return
        self._discard_fragments()
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        if self.conn.has_reached_control_limit:
            self._pause()
            self.loop.call_soon(self._resume_parsing)

    def _refuse_upgrade(self) -> None:
        """Close a connection whose upgrade does not request a WebSocket, because uvicorn would wait forever."""
        self.handshake_complete = self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST_RESPONSE)
        self.transport.close()

    def _discard_fragments(self) -> None:
        """Discard fragments once the gateway has sent a close frame, so that the peer's close frame is parsed."""
        while self.close_sent and self.conn.has_more and not self.conn.has_reached_control_limit:
            super().data_received(b"")

    def _resume_parsing(self) -> None:
        """Continue parsing control frames after other tasks have had their turn."""
        if self.conn.has_reached_control_limit and not self.transport.is_closing():
            self.data_received(b"")
            self._resume()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Resume reading, unless earlier fragments are still waiting."""
        if self.read_paused and self.queue.empty() and not self.conn.has_reached_control_limit:
            self.read_paused = False
            self.transport.resume_reading()

    def handle_text(self, event: Frame) -> None:
        if self.close_sent:
            return
        message: Any = {"type": "websocket.receive", "frame": event}
        self.queue.put_nowait(message)
        self._pause()

    handle_bytes = handle_cont = handle_text

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.conn.has_more and not self.transport.is_closing():
            self.data_received(b"")
        self._resume()
        return message

    async def send(self, message: Any) -> None:
        if "frame" in message:
            await self.writable.wait()
            if self.disconnected:
                raise ClientGone
            try:
                send_fragment(self.conn, message["frame"])
            except InvalidState:
                raise ClientGone from None
            self.transport.write(b"".join(self.conn.data_to_send()))
            return
        await super().send(message)
        self._discard_fragments()
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # uvicorn does not count a refusal as a response, and would log an error for each refusal.
            self.handshake_complete = True


class _ServiceConnection(ClientConnection):
    """The connection to a service, with the same limits as ``ClientWebSocket``."""

    protocol: ClientFragmentProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = MAX_HANDSHAKE_READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    async def handshake(self, *args: Any, **kwargs: Any) -> None:
        await super().handshake(*args, **kwargs)
        self.transport.max_size = MAX_FRAGMENT_BYTES  # type: ignore[attr-defined]

    async def receive_fragment(self) -> Frame:
        """Return the next fragment. Raises ConnectionClosed."""
        assembler = self.recv_messages
        try:
            frame = await assembler.frames.get(not assembler.closed)
        except EOFError:
            await asyncio.shield(self.connection_lost_waiter)
            raise self.protocol.close_exc from None
        if self.protocol.has_more and not assembler.closed:
            self.data_received(b"")
        assembler.maybe_resume()
        if self.protocol.has_reached_control_limit:
            self.transport.pause_reading()
        return frame

    async def send_fragment(self, frame: Frame) -> None:
        """Send a fragment. Raises ConnectionClosed."""
        async with self.send_context():
            send_fragment(self.protocol, frame)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        has_invalid_response = self.response is None and self.protocol.handshake_exc is not None
        if has_invalid_response or self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        if self.protocol.has_reached_control_limit:
            self.transport.pause_reading()
            self.loop.call_soon(self._resume_parsing)

    def _resume_parsing(self) -> None:
        """Continue parsing control frames after other tasks have had their turn."""
        if self.protocol.has_reached_control_limit and not self.transport.is_closing():
            self.data_received(b"")
            if not self.protocol.has_reached_control_limit and not self.recv_messages.paused:
                self.transport.resume_reading()


class HandshakeRefused(Exception):
    """The service refused the handshake with an HTTP response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def connect(
    address: str,
    port: int,
    host: str,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    scope: Scope,
    tls: ssl.SSLContext | None = None,
) -> _ServiceConnection:
    """Open a WebSocket to a service inside a sandbox, or with ``tls`` to another gateway.

    Raises HandshakeRefused, OSError (including TimeoutError), or InvalidHandshake if the service does not support
    WebSockets.
    """
    # Not `websockets.connect`: it would follow the service's redirects to any address.
    path, _, query = target.decode("ascii").partition("?")
    name, _, port_text = host.partition(":")
    uri = WebSocketURI(False, name, int(port_text or 80), path, query)
    subprotocols = [Subprotocol(word) for word in scope.get("subprotocols", ())]
    protocol = ClientFragmentProtocol(
        uri, subprotocols=subprotocols or None, max_size=MAX_MESSAGE_BYTES, logger=_silent_logger
    )
    decoded_headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    header_pairs = [(name, value) for name, value in decoded_headers if name.lower() not in HANDSHAKE_HEADERS]

    def create_protocol() -> _ServiceConnection:
        return _ServiceConnection(protocol, ping_interval=None, close_timeout=_CLOSE_SECONDS, max_queue=0)

    async with asyncio.timeout(CONNECT_SECONDS):
        if tls is None:
            _, connection = await create_connection(create_protocol, address, port)
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(create_protocol, address, port, ssl=tls)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await connection.handshake(header_pairs, None)
    except InvalidStatus as error:
        connection.transport.abort()
        raise HandshakeRefused(error.response) from None
    except EOFError:
        connection.transport.abort()
        raise InvalidHandshake("the service closed the connection during the handshake") from None
    except BaseException:
        connection.transport.abort()
        raise
    return connection


class Tunnel:
    """A tunnel that forwards fragments between a client (ASGI) and a connection that ``connect`` opened."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        end_future: asyncio.Future[None],
        end_reason: str = "the sandbox was rolled back, paused or removed",
    ) -> None:
        """Create a tunnel. ``end_future``: done when the service's machine ends, for the reason ``end_reason``."""
        self._receive = receive
        self._send = send
        self._end_future = end_future
        self._end_reason = end_reason
        self._next_message_future: asyncio.Future[Message] | None = None
        self._has_client_left = False
        """Whether the client has closed the connection or disconnected."""

    async def wait_until_open(self, connection_task: asyncio.Future[_ServiceConnection]) -> _ServiceConnection | None:
        """Wait until ``connection_task`` is done, and return its connection, or None if the machine stops first.

        Raises ClientGone, or the error of ``connection_task``.
        """
        await self._receive()  # "websocket.connect"
        self._next_message_future = asyncio.ensure_future(self._receive())
        tasks: set[asyncio.Future[Any]] = {connection_task, self._next_message_future}
        try:
            await asyncio.wait({*tasks, self._end_future}, return_when=asyncio.FIRST_COMPLETED)
            if connection_task.done():
                return connection_task.result()
            if self._end_future.done():
                return None
            raise ClientGone
        finally:
            if not connection_task.done() or connection_task.exception():
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def run(self, service: _ServiceConnection, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept the client, and forward messages until either side closes or the machine stops."""
        tasks: set[asyncio.Future[None]] = set()
        try:
            await self._send_to_client(
                {"type": "websocket.accept", "subprotocol": service.subprotocol, "headers": headers}
            )
            to_service_task, to_client_task = (
                asyncio.ensure_future(self._forward_to_service(service)),
                asyncio.ensure_future(self._forward_to_client(service)),
            )
            tasks = {to_service_task, to_client_task}
            await asyncio.wait({*tasks, self._end_future}, return_when=asyncio.FIRST_COMPLETED)
            if self._end_future.done():
                await self._close(_SERVICE_RESTART, self._end_reason)
            elif self._has_client_left:
                await to_service_task
            else:
                to_client_task.result()
        finally:
            if self._next_message_future is not None:
                self._next_message_future.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            service.transport.abort()

    async def _send_to_client(self, message: Message) -> None:
        """Send a message to the client. Raises ClientGone."""
        try:
            await self._send(message)
        except (OSError, RuntimeError):
            # uvicorn raises these errors for a client that has disconnected, or whose connection it has closed itself.
            raise ClientGone from None

    async def _close(self, code: int, reason: str) -> None:
        # A client that does not read never gets the close frame.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._send_to_client({"type": "websocket.close", "code": code, "reason": reason})

    async def _forward_to_service(self, service: _ServiceConnection) -> None:
        """Forward fragments from the client to the service until the client closes or disconnects."""
        assert self._next_message_future is not None
        message = await self._next_message_future
        while message["type"] == "websocket.receive":
            try:
                await service.send_fragment(message["frame"])
            except ConnectionClosed:
                # _forward_to_client knows the reason, and closes the client with it.
                await asyncio.Event().wait()
            self._next_message_future = asyncio.ensure_future(self._receive())
            message = await self._next_message_future
        self._has_client_left = True
        if "reason" in message:
            code = message.get("code", _NO_CODE)
            await service.close(_NORMAL_CLOSURE if code == _NO_CODE else code, message["reason"] or "")
        else:
            # The client disconnected without a close frame, so disconnect from the service in the same way.
            service.transport.close()

    async def _forward_to_client(self, service: _ServiceConnection) -> None:
        """Forward fragments from the service to the client until the service closes.

        Then close the client's connection with the same code and reason. Raises ClientGone.
        """
        try:
            while True:
                frame = await service.receive_fragment()
                # Keep reading after the client has closed: the reply to its close frame arrives last.
                if not self._has_client_left:
                    await self._send_to_client({"type": "websocket.send", "frame": frame})
                if len(frame.data) < SMALL_PIECE_BYTES:
                    await asyncio.sleep(0)
        except ConnectionClosed as error:
            close_frame = error.rcvd or error.sent
        if self._has_client_left:
            return
        if close_frame is None:
            await self._close(_BAD_GATEWAY, "the service in the sandbox closed the connection unexpectedly")
        else:
            await self._close(_NORMAL_CLOSURE if close_frame.code == _NO_CODE else close_frame.code, close_frame.reason)
