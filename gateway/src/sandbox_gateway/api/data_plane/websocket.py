"""WebSockets to ports inside sandboxes: two connections, and each fragment from one is sent to the other.

Each side is read only as fast as the other accepts data. Each connection answers its own pings. uvicorn and websockets
buffer whole messages: without this module, a few connections could use up the gateway's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

from sandbox_gateway.api.data_plane.fragments import MAX_FRAGMENT_BYTES, ClientFragments, ServerFragments, send_fragment
from sandbox_gateway.api.data_plane.pools import CONNECT_SECONDS, SMALL_PIECE, MachineConnections
from sandbox_gateway.api.errors import ClientGone
from sandbox_gateway.hosts.connect import create_connection

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a message, in either direction; a larger one closes the connection with 1009."""
PING_SECONDS = 20.0
"""Interval of pings to the client, so that no network device in between drops an idle connection."""
HANDSHAKE_SECONDS = 60.0
MAX_UNSENT_BYTES = 256 << 10
"""Maximum bytes buffered for a peer that does not read, such as answers to its pings."""
_CLOSE_SECONDS = 5.0
_NO_CODE, _NORMAL, _RESTART, _BAD_GATEWAY = 1005, 1000, 1012, 1014
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
OWN_HEADERS = frozenset(
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
_silent = logging.getLogger("sandbox_gateway.websockets")
_silent.setLevel(logging.CRITICAL)
_silent.propagate = False


class FromClient(WebSocketsSansIOProtocol):
    """A client's connection that receives and sends fragments: ASGI messages with a `frame`.

    It resumes reading only after the last fragment was received. A client for which more than MOST_UNSENT bytes are
    buffered is disconnected, because it does not read the answers.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn: ServerFragments = ServerFragments(max_size=self.config.ws_max_size, logger=_silent)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = MAX_FRAGMENT_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc and not self.handshake_initiated:
            self._refuse_upgrade()
            return
        self._discard_rest()
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        if self.conn.crowded:
            self._pause()
            self.loop.call_soon(self._resume_parsing)

    def _refuse_upgrade(self) -> None:
        """Close a connection whose upgrade does not request a WebSocket: uvicorn would wait forever."""
        self.handshake_complete = self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
        self.transport.close()

    def _discard_rest(self) -> None:
        """Discard fragments after the gateway's close frame: the peer's close frame may follow unreceived fragments."""
        while self.close_sent and self.conn.has_more and not self.conn.crowded:
            super().data_received(b"")

    def _resume_parsing(self) -> None:
        """Continue parsing control frames after other tasks had their turn."""
        if self.conn.crowded and not self.transport.is_closing():
            self.data_received(b"")
            self._resume()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Resume reading, unless earlier fragments are still waiting."""
        if self.read_paused and self.queue.empty() and not self.conn.crowded:
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
        self._discard_rest()
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # uvicorn does not count a refusal as an answer, and would log an error for each of them.
            self.handshake_complete = True


class _ServiceConnection(ClientConnection):
    """The connection to a service, with the same limits."""

    protocol: ClientFragments

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = MAX_FRAGMENT_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    async def next_fragment(self) -> Frame:
        """Return the next fragment. Raises ConnectionClosed."""
        messages = self.recv_messages
        try:
            frame = await messages.frames.get(not messages.closed)
        except EOFError:
            await asyncio.shield(self.connection_lost_waiter)
            raise self.protocol.close_exc from None
        if self.protocol.has_more and not messages.closed:
            self.data_received(b"")
        messages.maybe_resume()
        if self.protocol.crowded:
            self.transport.pause_reading()
        return frame

    async def send_fragment(self, frame: Frame) -> None:
        """Send a fragment. Raises ConnectionClosed."""
        async with self.send_context():
            send_fragment(self.protocol, frame)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
        if self.protocol.crowded:
            self.transport.pause_reading()
            self.loop.call_soon(self._resume_parsing)

    def _resume_parsing(self) -> None:
        """Continue parsing control frames after other tasks had their turn."""
        if self.protocol.crowded and not self.transport.is_closing():
            self.data_received(b"")
            if not self.protocol.crowded and not self.recv_messages.paused:
                self.transport.resume_reading()


class Refused(Exception):
    """The service inside answered the handshake with an HTTP response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def connect(
    address: str, port: int, host: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], scope: Scope
) -> _ServiceConnection:
    """Open a WebSocket to the service inside.

    Raises Refused, OSError (also TimeoutError), or InvalidHandshake when the service does not speak WebSocket.
    """
    # Not `websockets.connect`: it would follow the service's redirects to any address.
    path, _, query = target.decode("ascii").partition("?")
    name, _, shown = host.partition(":")
    uri = WebSocketURI(False, name, int(shown or 80), path, query)
    offered = [Subprotocol(word) for word in scope.get("subprotocols", ())]
    protocol = ClientFragments(uri, subprotocols=offered or None, max_size=MAX_MESSAGE_BYTES, logger=_silent)
    sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]

    def made() -> _ServiceConnection:
        return _ServiceConnection(protocol, ping_interval=None, close_timeout=_CLOSE_SECONDS, max_queue=0)

    async with asyncio.timeout(CONNECT_SECONDS):
        _, connection = await create_connection(made, address, port)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await connection.handshake([(name, value) for name, value in sent if name.lower() not in OWN_HEADERS], None)
    except InvalidStatus as error:
        connection.transport.abort()
        raise Refused(error.response) from None
    except EOFError:
        connection.transport.abort()
        raise InvalidHandshake("the service closed the connection during the handshake") from None
    except BaseException:
        connection.transport.abort()
        raise
    return connection


class Tunnel:
    """A tunnel for fragments between a client (ASGI) and a connection that ``connect`` opened."""

    def __init__(self, receive: Receive, send: Send, machine: MachineConnections) -> None:
        self._receive = receive
        self._send = send
        self._machine = machine
        self._next: asyncio.Future[Message] | None = None
        self._left = False
        """The client has closed, or disconnected."""

    async def wait_until_open(self, opening: asyncio.Future[_ServiceConnection]) -> _ServiceConnection | None:
        """Return the result of ``opening``; None if the machine ends first. Raises ClientGone or its errors."""
        await self._receive()  # "websocket.connect"
        self._next = asyncio.ensure_future(self._receive())
        ours: set[asyncio.Future[Any]] = {opening, self._next}
        try:
            await asyncio.wait({*ours, self._machine.gone}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
            if self._machine.gone.done():
                return None
            raise ClientGone
        finally:
            if not opening.done() or opening.exception():
                for task in ours:
                    task.cancel()
                await asyncio.wait(ours)

    async def run(self, inside: _ServiceConnection, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept the client, and pass messages on until either side closes or the machine ends."""
        tasks: set[asyncio.Future[None]] = set()
        try:
            await self._send_to_client(
                {"type": "websocket.accept", "subprotocol": inside.subprotocol, "headers": headers}
            )
            inward, outward = (
                asyncio.ensure_future(self._pump_to_service(inside)),
                asyncio.ensure_future(self._pump_to_client(inside)),
            )
            tasks = {inward, outward}
            await asyncio.wait({*tasks, self._machine.gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._machine.gone.done():
                await self._close(_RESTART, "the sandbox was rolled back, paused or ended")
            elif self._left:
                await inward
            else:
                outward.result()
        finally:
            if self._next is not None:
                self._next.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            inside.transport.abort()

    async def _send_to_client(self, message: Message) -> None:
        """Send to the client. Raises ClientGone."""
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

    async def _pump_to_service(self, inside: _ServiceConnection) -> None:
        """Pass fragments from the client to the service until the client closes or disconnects."""
        assert self._next is not None
        message = await self._next
        while message["type"] == "websocket.receive":
            try:
                await inside.send_fragment(message["frame"])
            except ConnectionClosed:
                # _pump_to_client knows the reason, and closes the client with it.
                await asyncio.Event().wait()
            self._next = asyncio.ensure_future(self._receive())
            message = await self._next
        self._left = True
        if "reason" in message:
            code = message.get("code", _NO_CODE)
            await inside.close(_NORMAL if code == _NO_CODE else code, message["reason"] or "")
        else:
            # The client disconnected without a close frame; show the same to the service.
            inside.transport.close()

    async def _pump_to_client(self, inside: _ServiceConnection) -> None:
        """Pass fragments to the client; when the service closes, close with its code and reason. Raises ClientGone."""
        try:
            while True:
                frame = await inside.next_fragment()
                # Keep reading after the client has closed: the answer to its close frame arrives after the rest.
                if not self._left:
                    await self._send_to_client({"type": "websocket.send", "frame": frame})
                if len(frame.data) < SMALL_PIECE:
                    await asyncio.sleep(0)
        except ConnectionClosed as error:
            closed = error.rcvd or error.sent
        if self._left:
            return
        if closed is None:
            await self._close(_BAD_GATEWAY, "the service inside broke the connection")
        else:
            await self._close(_NORMAL if closed.code == _NO_CODE else closed.code, closed.reason)
