"""Services on simulated machines, and the headers that address them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tests.support import waiting
from tests.support.memory_gateway import MemoryGateway

AGENT_PORT = 49983
PORT = 3000
_START_TIMEOUT_SECONDS = 30

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def make_port_headers(sandbox: dict[str, Any], port: int | str = AGENT_PORT, **other_headers: str) -> dict[str, str]:
    """Return headers that name a port of a sandbox."""
    return {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(port), **other_headers}


def make_port_headers_with_host(
    sandbox: dict[str, Any], port: int | str = AGENT_PORT, **other_headers: str
) -> dict[str, str]:
    """Return headers whose Host names a port of a sandbox."""
    return {"Host": make_port_host(sandbox, port), **other_headers}


def make_port_host(sandbox: dict[str, Any], port: int | str = AGENT_PORT) -> str:
    """Return the host name of a sandbox's port."""
    return f"{port}-{sandbox['sandboxID']}.sandbox.local"


wait_until = functools.partial(waiting.wait_until, seconds=5)
"""Waits for less than the idle timeout of connections."""


class Service:
    """A service that listens at a machine's address, in its own thread.

    It outlives the machine and closes no connections, like a service in a virtual machine that was killed.
    """

    def __init__(self, address: str, port: int, listen: Callable[[str, int], Awaitable[Any]]) -> None:
        self._address = (address, port)
        self._listen = listen
        self._loop = asyncio.new_event_loop()
        self._ready_event = threading.Event()
        self._failure: BaseException | None = None
        self._stop_event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready_event.set()
        finally:
            self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))
            self._loop.close()

    async def _serve(self) -> None:
        server = await self._listen(*self._address)
        self._ready_event.set()
        await self._stop_event.wait()
        server.close()

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._ready_event.wait(_START_TIMEOUT_SECONDS)
        if self._failure:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop_event.set)
        self._thread.join(_START_TIMEOUT_SECONDS)


async def _close(server: asyncio.Server) -> None:
    server.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RawService:
    """A service that sends raw bytes. It responds with each of ``replies`` in turn, and then repeats the last one."""

    def __init__(self, *replies: bytes, next_handler: Handler | None = None) -> None:
        self.replies = replies or (make_reply(),)
        self.next_handler = next_handler
        """The handler that takes over the connection after each reply."""
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.open_connection_count = 0
        self.connection_count = 0

    async def listen(self, address: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, address, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connection_count += 1
        self.connection_count += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.bodies.append(await _read_body(reader, head))
                reply = self.replies[min(len(self.heads), len(self.replies)) - 1]
                if not reply:
                    return
                writer.write(reply)
                await writer.drain()
                if self.next_handler:
                    await self.next_handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            pass  # The peer disconnected. A ValueError means that a chunk never arrived.
        finally:
            self.open_connection_count -= 1
            writer.close()

    def parse_request_headers(self, number: int = -1) -> dict[str, str]:
        lines = self.heads[number].decode("latin-1").split("\r\n")[1:-2]
        return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    def parse_request_target(self, number: int = -1) -> str:
        return self.heads[number].split(b" ")[1].decode()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = {name.lower(): value for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n"))}
    if fields.get(b"transfer-encoding") != b"chunked":
        return await reader.readexactly(int(fields.get(b"content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while await reader.readline() != b"\r\n":
        pass
    return body


def make_reply(status: str = "200 OK", body: bytes = b"ok", *fields: str) -> bytes:
    head = "".join(f"{field}\r\n" for field in (f"Content-Length: {len(body)}", *fields))
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body


def get_machine_address(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> str:
    return memory_gateway.machine(sandbox["sandboxID"]).address


@contextlib.contextmanager
def raw_service(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], *replies: bytes, port: int = PORT, **options: Any
) -> Iterator[RawService]:
    """Run a ``RawService`` on a port of the sandbox's machine."""
    if port == AGENT_PORT:
        agent_server = memory_gateway.machine(sandbox["sandboxID"])._server
        assert agent_server is not None
        # A server reports that it has no sockets before it closes them.
        asyncio.run_coroutine_threadsafe(_close(agent_server), memory_gateway.loop).result(_START_TIMEOUT_SECONDS)
    service = RawService(*replies, **options)
    with Service(get_machine_address(memory_gateway, sandbox), port, service.listen):
        yield service


@contextlib.contextmanager
def raw_connection(memory_gateway: MemoryGateway, *pieces: bytes, is_local: bool = False) -> Iterator[socket.socket]:
    """Open a connection to the gateway, and send ``pieces`` unchanged.

    ``is_local``: whether to connect to the gateway's Unix socket.
    """
    with socket.socket(socket.AF_UNIX if is_local else socket.AF_INET) as connection:
        connection.settimeout(30)
        connection.connect(str(memory_gateway.socket) if is_local else ("127.0.0.1", memory_gateway.port))
        for piece in pieces:
            connection.sendall(piece)
        yield connection


def make_request_head(request: str, *fields: str, **headers: str) -> bytes:
    """Return the head of a request. ``request`` is its first line without the version."""
    header_lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"{request} HTTP/1.1", *fields, *header_lines, "", ""]).encode("latin-1")


def read_response(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Read a response, and return its status and its JSON object, or an empty dict for other content types."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        piece = connection.recv(4096)
        assert piece, f"the connection was closed after {bytes(data)!r}"
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if b"application/json" not in head.lower():
        return status, {}
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return status, json.loads(body)
