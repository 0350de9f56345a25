"""Neither clients that read slowly nor services that write slowly delay other clients or use much memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.api import output
from sandbox_gateway.api.access.limits import MAX_BODY_BYTES, MAX_HELD_BYTES
from sandbox_gateway.api.data_plane import heads
from tests.security.hostile import make_endless_sender
from tests.support import waiting
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    make_port_headers,
    make_port_host,
    make_reply,
    make_request_head,
    raw_connection,
    raw_service,
    read_response,
    wait_until,
)
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, OTHER_EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox

KEY = f"X-API-Key: {EXEC_KEY}"
CLIENT_COUNT = 20
MAX_BYTES_PER_CLIENT = 16 << 20
"""Maximum number of bytes in transit to a client that does not read: kernel buffers, and a few pieces."""
ENDLESS_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"


def measure_memory() -> int:
    """Return the memory use of this process in bytes. The client, the gateway and the service run in this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_slow_clients_do_not_delay_other_clients(
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

    request = make_request_head("GET /", f"Host: {make_port_host(sandbox, PORT)}", KEY)
    with (
        raw_service(
            memory_gateway, sandbox, *[ENDLESS_RESPONSE] * CLIENT_COUNT, make_reply(), next_handler=flood
        ) as service,
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
                assert client.get("/echo", headers=make_port_headers(other_sandbox)).status_code == 201
                assert client.get("/", headers=make_port_headers(sandbox, PORT)).text == "ok"
                assert client.post("/sandboxes/other/exec", json={"args": ["exit", "0"]}).status_code == 200
    wait_until(lambda: not service.open_connection_count)


def test_many_slow_clients_share_the_memory_for_reads(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    total_bytes = 128 << 10
    monkeypatch.setattr(heads, "_TOTAL_READ_BYTES", total_bytes)
    monkeypatch.setattr(heads, "_MIN_READ_BYTES", 1 << 10)
    flood, sent_bytes = make_endless_sender(b"x" * 65536, limit=1 << 40)
    request = make_request_head("GET /", f"Host: {make_port_host(sandbox, PORT)}", KEY)

    def is_stalled() -> bool:
        sent_bytes_before = sent_bytes[0]
        time.sleep(0.5)
        return 0 < sent_bytes[0] == sent_bytes_before

    with (
        raw_service(memory_gateway, sandbox, ENDLESS_RESPONSE, next_handler=flood) as service,
        contextlib.ExitStack() as stack,
    ):
        readers = [stack.enter_context(raw_connection(memory_gateway, request)) for _ in range(CLIENT_COUNT)]
        for reader in readers:
            assert reader.recv(1) == b"H"
        waiting.wait_until(is_stalled)
        streams = [each for each in heads._streams if each._transport.get_extra_info("peername")[1] == PORT]
        assert len(streams) == CLIENT_COUNT
        # Connections that were opened when there were fewer of them hold more than their share.
        assert sum(len(each._unread_data) + count_buffered_bytes(each) for each in streams) < 4 * total_bytes
    wait_until(lambda: not service.open_connection_count)


def count_buffered_bytes(stream: heads.CountingStream) -> int:
    """Return the number of bytes that anyio has buffered for a stream."""
    return sum(map(len, stream._transport.get_protocol().read_queue))


def test_slow_services_do_not_delay_other_clients(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other_sandbox = create_sandbox(api, name="other")

    async def send_slowly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"TTP/1.1 200 OK\r\nX-Slow: " + b"a" * 3600:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)

    request = make_request_head("GET /", f"Host: {make_port_host(sandbox, PORT)}", KEY)
    with (
        raw_service(memory_gateway, sandbox, b"H", next_handler=send_slowly) as service,
        contextlib.ExitStack() as stack,
    ):
        connections = [stack.enter_context(raw_connection(memory_gateway, request)) for _ in range(CLIENT_COUNT)]
        wait_until(lambda: service.open_connection_count == CLIENT_COUNT)
        with memory_gateway.client(EXEC_KEY) as client:
            for _ in range(20):
                assert client.get("/health").status_code == 200
                assert client.get("/echo", headers=make_port_headers(other_sandbox)).status_code == 201
        for each in connections[: CLIENT_COUNT // 2]:
            each.close()
        # A client that disconnects also ends its request.
        wait_until(lambda: service.open_connection_count == CLIENT_COUNT // 2)
    wait_until(lambda: not service.open_connection_count)


EXEC_BODY = b'{"args": ["x"], "code": "x"}'
EXEC_HEADERS = ("Host: gateway", "Content-Type: application/json", f"Content-Length: {len(EXEC_BODY)}")
OUTPUT = b"\0" * (2 << 20)
"""The output of each command. Encoded as JSON, it is larger than all buffers of a connection."""
OUTPUT_FIELDS = {"exitCode": 0, "stdout": base64.b64encode(OUTPUT).decode(), "exit_code": 0, "error": ""}
RESPONSE_WITH_OUTPUT = make_reply(body=json.dumps({**OUTPUT_FIELDS, "result": OUTPUT.decode()}).encode())


@pytest.mark.parametrize("route", ["/sandboxes/{}/exec", "/v1/sandboxes/{}/exec", "/v1/sandboxes/{}/eval"])
def test_output_that_no_client_reads_is_limited_in_total(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    sandbox: dict[str, Any],
    route: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients run commands with large output by the id and the name of a sandbox, and do not read the responses."""
    monkeypatch.setattr(output, "MAX_UNSENT_BYTES_PER_SANDBOX", 5 << 20)
    monkeypatch.setattr(output, "MAX_UNSENT_BYTES", 13 << 20)
    other_sandboxes = [create_sandbox(api, name=name) for name in ("other", "third", "fourth")]
    with contextlib.ExitStack() as stack:
        for each in (sandbox, *other_sandboxes):
            stack.enter_context(raw_service(memory_gateway, each, RESPONSE_WITH_OUTPUT, port=AGENT_PORT))

        def run(ref: str, key: str = EXEC_KEY) -> socket.socket:
            request = make_request_head(
                f"POST {route.format(ref)}", *EXEC_HEADERS, *([f"X-API-Key: {key}"] if key else [])
            )
            connection = stack.enter_context(raw_connection(memory_gateway, request + EXEC_BODY, is_local=not key))
            assert connection.recv(9, socket.MSG_PEEK) == b"HTTP/1.1 "
            return connection

        def read_refusal(connection: socket.socket) -> str:
            head = connection.recv(65536, socket.MSG_PEEK)
            assert b"retry-after" not in head, "the client would run the command again"
            status, error = read_response(connection)
            assert (status, error["kind"]) == (429, "output_lost")
            message: str = error["message"]
            return message

        connections = [run(sandbox["sandboxID"]), run(sandbox["name"])]
        assert f"the responses of sandbox {sandbox['sandboxID']}" in read_refusal(run(sandbox["name"]))
        connections.append(run("other"))
        assert "the responses to caller 'runner'" in read_refusal(run("other"))
        # Another client can use the other half.
        connections += [run(ref, ADMIN_KEY) for ref in ("other", "third", "third")]
        assert "the responses to all keys" in read_refusal(run("fourth", OTHER_EXEC_KEY))
        # The administrator still receives output over the Unix socket, even of a sandbox that has reached its limit.
        connections += [run(ref, "") for ref in (sandbox["name"], "fourth", "fourth")]
        assert all(each.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200" for each in connections)
        assert "the responses over the Unix socket" in read_refusal(run("fourth", ""))
        # A client that reads its response receives all of it, and one that disconnects frees its share.
        response = b""
        while not response.endswith(b"\r\n0\r\n\r\n"):
            response += connections[0].recv(1 << 20)
        assert response.startswith(b"HTTP/1.1 200 ") and response.count(rb"\u0000") == len(OUTPUT)
        connections[1].close()
        wait_until(lambda: f"of sandbox {sandbox['sandboxID']}" not in output._unsent_bytes)
        assert run("one").recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: not output._unsent_bytes)


METADATA_BYTES = 7 << 19
RESPONSE_BYTES = 4 * METADATA_BYTES
"""The size of a list of four sandboxes, which is larger than all buffers of a connection."""
MAX_READ_COUNT = 4
"""The number of such responses that a key may leave unread in the next test."""


@pytest.mark.parametrize("route", ["/sandboxes", "/plans/{}/sandboxes", "/lineage", "/lineage?flat=true"])
def test_large_responses_that_no_client_reads_are_limited_in_total(
    memory_gateway: MemoryGateway, api: httpx.Client, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with a read key requests large JSON on many connections, and does not read it."""
    for number in range(4):
        memory_gateway.set_metadata(create_sandbox(api)["sandboxID"], {"notes": f"{number}" * METADATA_BYTES})
    for name in ("build_lineage", "walk_lineage"):
        nodes = [{"id": "x" * (1 << 16)}] * (RESPONSE_BYTES >> 16)
        monkeypatch.setattr(memory_gateway.engine.snapshots, name, lambda *_, nodes=nodes: nodes)
    key_limit = MAX_READ_COUNT * RESPONSE_BYTES + RESPONSE_BYTES // 2
    monkeypatch.setattr(output, "MAX_UNSENT_BYTES", 2 * key_limit)
    with memory_gateway.client(READ_KEY) as client:
        plan_id = client.post("/plans", json={"run": f"attack on {route}"}).json()["planID"]
    request = make_request_head(f"GET {route.format(plan_id)}", "Host: gateway", f"X-API-Key: {READ_KEY}")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: memory_gateway.client(READ_KEY).delete(f"/plans/{plan_id}"))
        memory_before = measure_memory()
        unread_connections: list[socket.socket] = []
        refused_connections: list[socket.socket] = []
        for _ in range(CLIENT_COUNT):
            connection = stack.enter_context(raw_connection(memory_gateway, request))
            status_line = connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL)
            (unread_connections if status_line == b"HTTP/1.1 200" else refused_connections).append(connection)
        # The limit allows a fifth of what the client has requested.
        assert measure_memory() - memory_before < CLIENT_COUNT * RESPONSE_BYTES // 2
        assert len(unread_connections) == MAX_READ_COUNT
        assert MAX_READ_COUNT * RESPONSE_BYTES <= output._unsent_bytes["to all keys"] <= key_limit
        for each in refused_connections:
            assert b"\r\nretry-after: 1\r\n" in each.recv(65536, socket.MSG_PEEK).lower()
            status, error = read_response(each)
            assert (status, error["kind"]) == (429, "busy") and "the responses to caller 'looker'" in error["message"]
        # Small responses, and those to other clients, are not refused.
        with memory_gateway.client(READ_KEY) as client:
            assert client.get("/volumes").status_code == 200
        assert len(api.get("/sandboxes").content) > RESPONSE_BYTES
        # A client that reads its response receives all of it, and then the next one.
        for connection in [unread_connections[0]] * 2:
            status, entries = read_response(connection)
            assert status == 200 and len(json.dumps(entries)) > RESPONSE_BYTES
            connection.sendall(request)
    wait_until(lambda: not output._unsent_bytes)


def test_requests_with_unread_responses_do_not_keep_their_bodies_in_memory(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """Otherwise, the clients would use up the limit for the bodies of all requests."""
    body = json.dumps({"args": ["x"], "padding": "x" * (MAX_BODY_BYTES - 1000)}).encode()
    request = make_request_head("POST /sandboxes/one/exec", "Host: gateway", f"Content-Length: {len(body)}", KEY) + body
    with (
        raw_service(memory_gateway, sandbox, RESPONSE_WITH_OUTPUT, port=AGENT_PORT),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(MAX_HELD_BYTES // len(body) + 1):
            connection = stack.enter_context(raw_connection(memory_gateway, request))
            assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        assert output._unsent_bytes
        assert api.patch("/sandboxes/one", json={"padding": "x" * (MAX_BODY_BYTES - 1000)}).status_code == 200


def test_event_listeners_that_never_read_use_little_memory(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    """Unread events are dropped beyond a limit. Listeners are removed when they disconnect."""
    queues = memory_gateway.engine.events._queues
    count_before = len(queues)
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENT_COUNT):
            stack.enter_context(raw_connection(memory_gateway, make_request_head("GET /events", "Host: gateway", KEY)))
        wait_until(lambda: len(queues) == count_before + CLIENT_COUNT)
        memory_before_flood = measure_memory()
        for _ in range(5000):
            memory_gateway.loop.call_soon_threadsafe(
                lambda: memory_gateway.engine.events.publish("flood", data="x" * 1000)
            )
        assert api.get("/health").status_code == 200
        assert measure_memory() - memory_before_flood < 32 << 20
    wait_until(lambda: len(queues) == count_before)
