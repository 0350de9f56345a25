"""The data plane to a port inside: streams in both directions, without the gateway's own secrets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from sandbox_gateway.api.data_plane import pools, proxy
from tests.api.inside import (
    AGENT_PORT,
    PORT,
    Service,
    eventually,
    host,
    machine_address,
    make_reply,
    port_headers,
    port_headers_with_host,
    raw_connection,
    raw_service,
    read_status,
    request_head,
)
from tests.api.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.api.test_sandboxes import create_sandbox


@pytest.mark.parametrize("addressed", [port_headers, port_headers_with_host])
def test_a_request_is_forwarded_unchanged(api: httpx.Client, sandbox: dict[str, Any], addressed: Any) -> None:
    own = {"X-Own": "1", "Keep-Alive": "timeout=3"}
    answer = api.post("/echo/a%2Fb//c?x=1&y=%20z", content=b"hello", headers=addressed(sandbox, **own))
    assert answer.status_code == 201 and answer.headers["x-inside"] == "yes"
    assert "keep-alive" not in answer.headers
    told = answer.json()
    assert told["target"] == "/echo/a%2Fb//c?x=1&y=%20z" and told["body"] == "hello"
    headers = told["headers"]
    assert headers["x-own"] == "1" and headers["content-length"] == "5" and "keep-alive" not in headers
    assert headers["x-access-token"] == sandbox["envdAccessToken"]
    assert headers["host"] == (host(sandbox) if addressed is port_headers_with_host else f"localhost:{AGENT_PORT}")


def test_hosts_with_ports_and_capitals(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    name = sandbox["sandboxID"]
    for asked in (f"{AGENT_PORT}-{name}.SANDBOX.local:8443", f"{AGENT_PORT}-{name.upper()}.sandbox.local"):
        assert api.get("/echo", headers={"Host": asked}).status_code == 201
    assert api.get("/echo", headers={"Host": f"{AGENT_PORT}-{name}.elsewhere.example"}).status_code == 404


def test_keys_are_not_forwarded(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    with memory_gateway.client("") as client:
        for header in ({"X-API-Key": EXEC_KEY}, {"Authorization": f"Bearer {EXEC_KEY}"}):
            told = client.get("/echo", headers=port_headers(sandbox, **header)).json()
            assert EXEC_KEY not in str(told)
        both = {"X-API-Key": EXEC_KEY, "Authorization": "Bearer the-services-own"}
        passed = client.get("/echo", headers=port_headers(sandbox, **both)).json()["headers"]
        twice = [
            *port_headers(sandbox).items(),
            ("Authorization", "Bearer other"),
            ("Authorization", f"Bearer {EXEC_KEY}"),
        ]
        assert EXEC_KEY not in client.get("/echo", headers=[*twice, ("X-API-Key", EXEC_KEY)]).text
        assert passed["authorization"] == "Bearer the-services-own" and "x-api-key" not in passed
        basic = {"X-API-Key": EXEC_KEY, "Authorization": "Basic dXNlcjo="}
        assert (
            client.get("/echo", headers=port_headers(sandbox, **basic)).json()["headers"]["authorization"]
            == "Basic dXNlcjo="
        )


def test_access_to_ports(api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any]) -> None:
    token = {"X-Access-Token": sandbox["envdAccessToken"]}
    assert keyless_client.get("/echo", headers=port_headers(sandbox, **token)).status_code == 201
    other = create_sandbox(api)
    for headers in (
        port_headers(sandbox),
        port_headers(other, **token),
        port_headers(sandbox, **{"X-Access-Token": "wrong"}),
        port_headers({"sandboxID": "0" * 12}, **token),
        port_headers(sandbox, **{"X-API-Key": "wrong-key-0123456789"}),
    ):
        answer = keyless_client.get("/echo", headers=headers)
        assert answer.status_code == 401 and answer.json()["kind"] == "unauthorized", headers
    assert keyless_client.get("/echo", headers=port_headers(sandbox, **{"X-API-Key": READ_KEY})).status_code == 403
    assert (
        keyless_client.get("/echo", headers=port_headers(sandbox, **{"X-API-Key": READ_KEY}, **token)).status_code
        == 201
    )
    assert (
        keyless_client.get(
            "/echo", headers=port_headers({"sandboxID": "0" * 12}, **{"X-API-Key": ADMIN_KEY})
        ).status_code
        == 502
    )
    assert keyless_client.get("/sandboxes", headers=token).status_code == 401, "a token opens no control plane"


@pytest.mark.parametrize("port", ["0", "65536", "999999", "-1", "x", ""])
def test_impossible_ports(api: httpx.Client, sandbox: dict[str, Any], port: str) -> None:
    answer = api.get("/echo", headers=port_headers(sandbox, port))
    assert answer.status_code == 400 and "1 to 65535" in answer.json()["message"]


def test_a_port_where_nothing_listens(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    answer = api.get("/", headers=port_headers(sandbox, PORT))
    assert answer.status_code == 502 and answer.json()["kind"] == "backend_failed"
    assert "nothing listens on port 3000" in answer.json()["message"] and "port is not open" in answer.json()["message"]


def test_a_large_body_is_forwarded(memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b"x" * 100_000

    told = api.post("/echo", content=chunks(), headers=port_headers(sandbox)).json()
    assert told["length"] == 8_000_000 and told["headers"]["transfer-encoding"] == "chunked"


def test_an_answer_is_streamed_until_its_reader_leaves(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with memory_gateway.client() as client, client.stream("GET", "/stream", headers=port_headers(sandbox)) as answer:
        lines = answer.iter_lines()
        assert [next(lines), next(lines)] == ["tick 0", "tick 1"]
    machine = memory_gateway.machine(sandbox["sandboxID"])
    eventually(lambda: not machine.connections)


def test_a_paused_sandbox(api: httpx.Client) -> None:
    stays, wakes = create_sandbox(api), create_sandbox(api, autoPause=True, autoResume={"enabled": True})
    for sandbox in (stays, wakes):
        api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    answer = api.get("/echo", headers=port_headers(stays))
    assert answer.status_code == 502 and answer.json()["kind"] == "conflict"
    assert "is paused: resume it first" in answer.json()["message"] and "was not found" in answer.json()["message"]
    assert api.get("/echo", headers=port_headers(wakes)).status_code == 201
    assert api.get(f"/sandboxes/{wakes['sandboxID']}").json()["state"] == "running"


def test_hop_by_hop_headers_named_by_the_caller(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    sent = {"Connection": "keep-alive, X-Private", "X-Private": "1", "TE": "trailers", "Proxy-Authorization": "x"}
    headers = api.get("/echo", headers=port_headers(sandbox, **sent)).json()["headers"]
    assert not {"x-private", "te", "proxy-authorization"} & set(headers)


def test_concurrent_requests_wait_for_one_resume(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    wakes = create_sandbox(api, autoPause=True, autoResume={"enabled": True})
    api.post(f"/sandboxes/{wakes['sandboxID']}/pause")
    before, memory_gateway.host.slow = memory_gateway.host.forked, 0.3

    def ask(_: int) -> int:
        with memory_gateway.client() as client:
            return client.get("/echo", headers=port_headers(wakes)).status_code

    with ThreadPoolExecutor(6) as many:
        assert set(many.map(ask, range(6))) == {201}
    assert memory_gateway.host.forked == before + 1


# --- ambiguous requests, and harmful answers -------------------------------------------------------------------------

KEY = f"X-API-Key: {EXEC_KEY}"


def test_ambiguous_requests_are_refused(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    chunk = b"5\r\nhello\r\n0\r\n\r\n"
    mine = f"Host: {host(sandbox, PORT)}"
    with raw_service(memory_gateway, sandbox) as service:
        for request, status in (
            (request_head("POST /", mine, KEY, "Content-Length: 5", "Transfer-Encoding: chunked") + chunk, 400),
            (request_head("POST /", mine, KEY, "Transfer-Encoding: chunked", "Content-Length: 15") + chunk, 400),
            (request_head("POST /", mine, KEY, "Content-Length: 5", "Content-Length: 6") + b"hello", 400),
            (request_head("POST /", mine, KEY, "Transfer-Encoding: gzip, chunked") + chunk, 400),
            (request_head("GET /", mine, mine, KEY), 400),
            (request_head("GET /", mine, "Host: elsewhere", KEY), 400),
            (request_head("GET /", KEY), 400),
            (request_head("GET http://elsewhere.example/", mine, KEY), 400),
            (request_head("OPTIONS *", mine, KEY), 400),
            (request_head("CONNECT localhost:22", mine, KEY), 501),
            (request_head("GET /", mine, KEY, "Connection: upgrade", "Upgrade: tcp"), 501),
        ):
            with raw_connection(memory_gateway, request) as connection:
                assert read_status(connection)[0] == status, request
        hidden = chunk + request_head("GET /hidden", mine, KEY)
        for whose in (mine, "Host: gateway"):
            both = request_head("POST /", whose, KEY, f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked")
            with raw_connection(memory_gateway, both + hidden) as connection:
                assert read_status(connection)[0] == 400
                assert connection.recv(4096) == b"", "what follows is not read"
        assert not service.heads
        h2c = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        with raw_connection(memory_gateway, request_head("GET /", mine, KEY, *h2c)) as connection:
            assert read_status(connection)[0] == 200, "who offers HTTP/2 takes an answer of HTTP/1.1"
        assert not {"upgrade", "http2-settings"} & set(service.request_headers())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 799 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
        b"",
    ],
)
def test_invalid_answers(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], answer: bytes
) -> None:
    with raw_service(memory_gateway, sandbox, answer) as service:
        told = api.post("/", content=b"x", headers=port_headers(sandbox, PORT))
        assert told.status_code == 502 and "port 3000" in told.json()["message"], told.text
        eventually(lambda: not service.open)


def test_an_answer_with_two_lengths(memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]) -> None:
    both = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    with raw_service(memory_gateway, sandbox, both + b"0\r\nX-Trailer: 1\r\n\r\n"):
        answer = api.get("/", headers=port_headers(sandbox, PORT))
        assert answer.text == "hello" and "content-length" not in answer.headers
        assert "x-trailer" not in answer.headers


def test_answer_headers_that_affect_other_sandboxes_are_removed(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    mine = host(sandbox, PORT)
    kept = ("a=1; Path=/", f"b=1; Domain={mine}", f"c=1; domain=.{mine.upper()}")
    wide = ("d=1; Domain=sandbox.local", "e=1;domain=.sandbox.local; Secure", f"f=1; Domain={mine}; Domain=local")
    fields = [f"Set-Cookie: {cookie}" for cookie in (*kept, *wide)]
    fields += ["Strict-Transport-Security: max-age=1", 'Alt-Svc: h3=":443"', "Proxy-Authenticate: Basic", "X-Own: 1"]
    with raw_service(memory_gateway, sandbox, make_reply("200 OK", b"ok", *fields)):
        by_host = api.get("/", headers=port_headers_with_host(sandbox, PORT)).headers
        assert by_host.get_list("set-cookie") == list(kept) and "strict-transport-security" in by_host
        by_header = api.get("/", headers=port_headers(sandbox, PORT)).headers
        assert not {"set-cookie", "strict-transport-security"} & set(by_header)
        for headers in (by_host, by_header):
            assert headers["x-own"] == "1" and not {"alt-svc", "proxy-authenticate"} & set(headers)


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_is_requested_only_from_authorized_callers(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    waits = (f"Host: {host(sandbox, PORT)}", "Content-Length: 5", "Expect: 100-continue")
    with raw_service(memory_gateway, sandbox) as service:
        with raw_connection(memory_gateway, request_head("POST /", *waits)) as connection:
            assert read_status(connection)[0] == 401
        with raw_connection(memory_gateway, request_head("POST /", *waits, KEY)) as connection:
            assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"hello")
            assert read_status(connection)[0] == 200
        assert service.bodies == [b"hello"] and "expect" not in service.request_headers()


def test_chunks_are_forwarded_as_they_arrive(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    rest = threading.Event()

    async def send_later(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(rest.wait, 10)
        writer.write(b"3\r\ntwo\r\n0\r\nX-Trailer: 1\r\n\r\n")

    chunked = request_head(
        "POST /", f"Host: {host(sandbox, PORT)}", KEY, "Transfer-Encoding: chunked", "Trailer: X-Sum"
    )
    with (
        raw_service(memory_gateway, sandbox, begun + b"3\r\none\r\n", then=send_later) as service,
        raw_connection(memory_gateway, chunked) as connection,
    ):
        for piece in (b"4\r\nsent\r\n", b"5\r\nlater\r\n"):
            connection.sendall(piece)
            time.sleep(0.05)
        connection.sendall(b"0\r\nX-Sum: 1\r\n\r\n")
        got = b""
        while b"one" not in got:
            got += connection.recv(4096)
        assert service.bodies == [b"sentlater"] and "trailer" not in service.request_headers() and b"two" not in got
        rest.set()
        connection.settimeout(10)
        while not got.endswith(b"0\r\n\r\n"):
            got += connection.recv(4096)
        assert b"two" in got and b"Trailer" not in got


def test_a_slow_reader_slows_the_service(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    piece, sent = b"x" * 65536, 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
    with raw_service(memory_gateway, sandbox, endless, then=flood) as service:
        with raw_connection(memory_gateway, request_head("GET /", f"Host: {host(sandbox, PORT)}", KEY)) as connection:
            before = -1
            while sent != before:
                before = sent
                time.sleep(0.25)
            # The kernel's buffers at the ends of three connections.
            assert sent < 32 << 20
            for _ in range(400):
                connection.recv(65536, socket.MSG_WAITALL)
            eventually(lambda: sent > before)
        eventually(lambda: not service.open)


async def _accept_and_stop_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts a request and then stops reading."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(3600)
    finally:
        writer.close()


async def _listen_without_reading(address: str, port: int) -> asyncio.Server:
    return await asyncio.start_server(_accept_and_stop_reading, address, port)


def test_a_slow_service_slows_the_client(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    request = request_head("PUT /", f"Host: {host(sandbox, PORT)}", KEY, "Content-Length: 1000000000")
    with (
        Service(machine_address(memory_gateway, sandbox), PORT, _listen_without_reading),
        raw_connection(memory_gateway, request) as connection,
    ):
        connection.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                sent += connection.send(b"x" * 65536)
        assert 0 < sent < 32 << 20


def test_an_answer_before_the_end_of_the_body(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(make_reply("413 Too Large", b"enough"))
        while await reader.read(65536):
            pass
        writer.close()

    async def listen(address: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(refuse, address, port)

    with Service(machine_address(memory_gateway, sandbox), PORT, listen), memory_gateway.client(EXEC_KEY) as client:
        answer = client.post("/", content=(b"x" * 65536 for _ in range(100)), headers=port_headers(sandbox, PORT))
        assert answer.status_code == 413 and answer.text == "enough"


@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_closes_its_side_has_disconnected(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], half: bool
) -> None:
    ended = threading.Event()

    async def listen(address: str, port: int) -> asyncio.Server:
        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(-1)
            ended.set()
            writer.close()

        return await asyncio.start_server(wait, address, port)

    with Service(machine_address(memory_gateway, sandbox), PORT, listen):
        with raw_connection(memory_gateway, request_head("GET /", f"Host: {host(sandbox, PORT)}", KEY)) as connection:
            time.sleep(0.1)
            assert not ended.is_set()
            if half:
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(4096) == b""
        assert ended.wait(5)


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_closed_idle_connection_is_replaced(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    # The connection for the second request is closed when the request arrives.
    with raw_service(memory_gateway, sandbox, make_reply(), b"", make_reply(body=b"anew")) as service:
        assert api.get("/", headers=port_headers(sandbox, PORT)).text == "ok"
        assert api.get("/", headers=port_headers(sandbox, PORT)).text == "anew"
        assert service.accepted == 2 and len(service.heads) == 3
    with raw_service(memory_gateway, sandbox, make_reply(), b"", make_reply()) as service:
        assert api.get("/", headers=port_headers(sandbox, PORT)).text == "ok"
        for method, content in (("POST", b"x"), ("POST", b""), ("DELETE", b"")):
            service.heads.clear()
            assert api.get("/", headers=port_headers(sandbox, PORT)).text == "ok"
            answer = api.request(method, "/", content=content, headers=port_headers(sandbox, PORT))
            assert answer.status_code == 502, "it may have been done: nobody but its sender may say it again"
            assert len(service.heads) == 2


def test_the_number_of_open_requests_is_limited(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, limits={"connections": 2})
    try:
        gateway.build_template("base", packages=["python3"])
        with gateway.client() as api:
            one, other = create_sandbox(api), create_sandbox(api)
            streams = [api.stream("GET", "/stream", headers=port_headers(one)) for _ in range(2)]
            for stream in streams:
                stream.__enter__()
            busy = api.get("/echo", headers=port_headers(one))
            assert busy.status_code == 429 and int(busy.headers["retry-after"]) > 0
            assert "limits.connections" in busy.json()["message"]
            assert api.get("/echo", headers=port_headers(other)).status_code == 201, "it is for each sandbox"
            streams[0].__exit__(None, None, None)
            eventually(lambda: api.get("/echo", headers=port_headers(one)).status_code == 201)
            streams[1].__exit__(None, None, None)
    finally:
        gateway.end()


_ENDINGS = {
    "rollback": ("POST", "/sandboxes/one/rollback", {"snapshotID": "s1"}),
    "pause": ("POST", "/sandboxes/one/pause", None),
    "kill": ("DELETE", "/sandboxes/one", None),
}


@pytest.mark.parametrize("ending", _ENDINGS)
def test_all_connections_end_with_the_machine(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], ending: str
) -> None:
    """The service outlives the machine and closes nothing, like one in a virtual machine that was killed."""
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
    mine = f"Host: {host(sandbox, PORT)}"

    async def hold(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        if len(service.heads) > 1:
            await reader.read(1)

    with (
        raw_service(
            memory_gateway, sandbox, make_reply(), begun, b"HTTP/1.1 100 Continue\r\n\r\n", then=hold
        ) as service,
        memory_gateway.client(EXEC_KEY) as client,
        raw_connection(memory_gateway, request_head("GET /", mine, KEY)) as streaming,
        raw_connection(memory_gateway) as waiting,
        raw_connection(memory_gateway) as uploading,
    ):
        eventually(lambda: len(service.heads) == 1)
        assert read_status(streaming)[0] == 200
        streaming.sendall(request_head("GET /", mine, KEY))
        eventually(lambda: len(service.heads) == 2)
        eventually(lambda: b"first" in streaming.recv(4096, socket.MSG_PEEK))
        waiting.sendall(request_head("GET /", mine, KEY))
        eventually(lambda: len(service.heads) == 3)
        uploading.sendall(request_head("POST /", mine, KEY, "Content-Length: 10") + b"half")
        eventually(lambda: len(service.heads) == 4)
        eventually(lambda: service.open == 3)
        method, path, body = _ENDINGS[ending]
        assert api.request(method, path, json=body).is_success
        for connection in (waiting, uploading):
            status, told = read_status(connection)
            assert status == 502 and "rolled back, paused or ended" in told["message"]
        data = b""
        while piece := streaming.recv(4096):
            data += piece
        assert data.endswith(b"5\r\nfirst\r\n"), "it ends without its last piece"
        eventually(lambda: not service.open)
        asked = len(service.heads)
        answer = client.get("/", headers=port_headers(sandbox, PORT))
        assert answer.status_code == 502 and len(service.heads) == asked, "nothing goes to the old machine"
        if ending == "rollback":
            assert "port is not open" in answer.json()["message"]
            assert client.get("/echo", headers=port_headers(sandbox)).status_code == 201
        else:
            assert "was not found" in answer.json()["message"]


def test_idle_connections_end_with_the_machine(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    with raw_service(memory_gateway, sandbox) as old:
        assert api.get("/", headers=port_headers(sandbox, PORT)).text == "ok" and old.open == 1
        assert api.post("/sandboxes/one/rollback", json={"snapshotID": "s1"}).status_code == 200
        eventually(lambda: not old.open)
        with raw_service(memory_gateway, sandbox, make_reply(body=b"new")) as new:
            assert api.get("/", headers=port_headers(sandbox, PORT)).text == "new"
            assert len(old.heads) == len(new.heads) == 1


def test_cancellation_at_any_await_leaks_no_connection() -> None:
    """An agent ended and left idle connections. A request finds them closed, and is cancelled while it removes them."""
    asyncio.run(_cancel_at_each_await())


async def _cancel_at_each_await() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer)
        while await reader.read(4096):
            pass
        writer.close()

    left: dict[int, int] = {}
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for turns in range(30):
            machine = _memory_machine()
            errand = _make_request(port)
            asking = [asyncio.create_task(proxy._http(errand, machine, 300, has_body=False)) for _ in range(12)]
            writers = [await accepted.get() for _ in asking]
            for writer in writers:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await asyncio.gather(*asking)
            for writer in writers:
                writer.close()
            await asyncio.sleep(0.02)
            late = asyncio.create_task(proxy._http(errand, machine, 300, has_body=False))
            for _ in range(turns):
                await asyncio.sleep(0)
            await machine.end()
            await asyncio.gather(late, return_exceptions=True)
            while not accepted.empty():
                accepted.get_nowait().close()
            await asyncio.sleep(0.02)
            if stay := _open_connections(port):
                left[turns] = stay
    assert left == {}


def _memory_machine() -> pools.MachineConnections:
    sandbox = types.SimpleNamespace(instance="i", started_at=None)
    return pools.MachineConnections(cast(Any, sandbox), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cast(Any, None))


def _make_request(port: int) -> proxy.ServiceRequest:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    sandbox = types.SimpleNamespace(id="one")
    target = proxy.Target("one", port, "localhost", by_host=False)
    return proxy.ServiceRequest({"method": "GET"}, receive, send, target, cast(Any, sandbox), "127.0.0.1", b"/", [])


def _open_connections(port: int) -> int:
    """Connections to ``port`` that any process still holds open."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[9] != "0" for row in rows)
