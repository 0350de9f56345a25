"""Neither clients that read slowly nor services that write slowly delay others or use much memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from tests.api.inside import (
    PORT,
    eventually,
    make_reply,
    port_headers,
    port_host,
    raw_connection,
    raw_service,
    request_head,
)
from tests.api.memory_gateway import EXEC_KEY, MemoryGateway
from tests.api.test_sandboxes import create_sandbox

KEY = f"X-API-Key: {EXEC_KEY}"
CLIENT_COUNT = 20
MAX_BYTES_PER_CLIENT = 16 << 20
"""Maximum number of bytes in transit to a client that does not read: kernel buffers, and a few pieces."""
ENDLESS_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"


def measure_memory() -> int:
    """Return the memory use of this process in bytes. The client, the gateway and the service run in this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_slow_clients_do_not_delay_others(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other_sandbox, sent_bytes = create_sandbox(api, name="other"), 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        if len(service.heads) > CLIENT_COUNT:
            return
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent_bytes += 65536

    request = request_head("GET /", f"Host: {port_host(sandbox, PORT)}", KEY)
    with (
        raw_service(memory_gateway, sandbox, *[ENDLESS_RESPONSE] * CLIENT_COUNT, make_reply(), then=flood) as service,
        contextlib.ExitStack() as stack,
    ):
        memory_before = measure_memory()
        readers = [stack.enter_context(raw_connection(memory_gateway, request)) for _ in range(CLIENT_COUNT)]
        for reader in readers:
            assert reader.recv(1) == b"H"
        current_bytes = -1
        for _ in range(60):
            for reader in readers:
                assert reader.recv(1)
            current_bytes, previous_bytes = sent_bytes, current_bytes
            if current_bytes == previous_bytes:
                break
            time.sleep(0.3)
        assert 0 < sent_bytes < CLIENT_COUNT * MAX_BYTES_PER_CLIENT
        assert measure_memory() - memory_before < CLIENT_COUNT * MAX_BYTES_PER_CLIENT
        # Requests to the gateway, to another sandbox and to the same service still work.
        with memory_gateway.client(EXEC_KEY) as client:
            for _ in range(20):
                assert client.get("/health").status_code == 200
                assert client.get("/echo", headers=port_headers(other_sandbox)).status_code == 201
                assert client.get("/", headers=port_headers(sandbox, PORT)).text == "ok"
                assert client.post("/sandboxes/other/exec", json={"args": ["exit", "0"]}).status_code == 200
    eventually(lambda: not service.open_connection_count)


def test_slow_services_do_not_delay_others(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other_sandbox = create_sandbox(api, name="other")

    async def send_slowly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"TTP/1.1 200 OK\r\nX-Slow: " + b"a" * 3600:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)

    request = request_head("GET /", f"Host: {port_host(sandbox, PORT)}", KEY)
    with raw_service(memory_gateway, sandbox, b"H", then=send_slowly) as service, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw_connection(memory_gateway, request)) for _ in range(CLIENT_COUNT)]
        eventually(lambda: service.open_connection_count == CLIENT_COUNT)
        with memory_gateway.client(EXEC_KEY) as client:
            for _ in range(20):
                assert client.get("/health").status_code == 200
                assert client.get("/echo", headers=port_headers(other_sandbox)).status_code == 201
        for each in connections[: CLIENT_COUNT // 2]:
            each.close()
        # A client that disconnects also ends its request.
        eventually(lambda: service.open_connection_count == CLIENT_COUNT // 2)
    eventually(lambda: not service.open_connection_count)


def test_event_listeners_that_never_read_use_little_memory(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    """Unread events are dropped beyond a limit. Listeners are removed when they disconnect."""
    queues = memory_gateway.engine.events._queues
    count_before = len(queues)
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENT_COUNT):
            stack.enter_context(raw_connection(memory_gateway, request_head("GET /events", "Host: gateway", KEY)))
        eventually(lambda: len(queues) == count_before + CLIENT_COUNT)
        memory_before_flood = measure_memory()
        for _ in range(5000):
            memory_gateway.loop.call_soon_threadsafe(
                lambda: memory_gateway.engine.events.publish("flood", data="x" * 1000)
            )
        assert api.get("/health").status_code == 200
        assert measure_memory() - memory_before_flood < 32 << 20
    eventually(lambda: len(queues) == count_before)
