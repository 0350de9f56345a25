"""Test that requests to ports in sandboxes are streamed in both directions, and contain no secrets of the gateway."""

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
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    Service,
    get_machine_address,
    make_port_headers,
    make_port_headers_with_host,
    make_port_host,
    make_reply,
    make_request_head,
    raw_connection,
    raw_service,
    read_response,
    wait_until,
)
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox


@pytest.mark.parametrize("make_headers", [make_port_headers, make_port_headers_with_host])
def test_a_request_is_forwarded_unchanged(api: httpx.Client, sandbox: dict[str, Any], make_headers: Any) -> None:
    client_headers = {"X-Own": "1", "Keep-Alive": "timeout=3"}
    response = api.post("/echo/a%2Fb//c?x=1&y=%20z", content=b"hello", headers=make_headers(sandbox, **client_headers))
    assert response.status_code == 201 and response.headers["x-inside"] == "yes"
    assert "keep-alive" not in response.headers
    echoed_request = response.json()
    assert echoed_request["target"] == "/echo/a%2Fb//c?x=1&y=%20z" and echoed_request["body"] == "hello"
    headers = echoed_request["headers"]
    assert headers["x-own"] == "1" and headers["content-length"] == "5" and "keep-alive" not in headers
    assert headers["x-access-token"] == sandbox["envdAccessToken"]
    assert headers["host"] == (
        make_port_host(sandbox) if make_headers is make_port_headers_with_host else f"localhost:{AGENT_PORT}"
    )


def test_host_headers_may_contain_ports_and_capitals(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    sandbox_id = sandbox["sandboxID"]
    for host_header in (
        f"{AGENT_PORT}-{sandbox_id}.SANDBOX.local:8443",
        f"{AGENT_PORT}-{sandbox_id.upper()}.sandbox.local",
    ):
        assert api.get("/echo", headers={"Host": host_header}).status_code == 201
    assert api.get("/echo", headers={"Host": f"{AGENT_PORT}-{sandbox_id}.elsewhere.example"}).status_code == 404


def test_control_plane_requests_may_name_the_agents_port(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """E2B's client 2.26 sends these headers with `connect`, even if the sandbox is paused."""
    route, headers = f"/sandboxes/{sandbox['sandboxID']}", make_port_headers(sandbox)
    assert api.post(f"{route}/pause").status_code == 204
    for prefix in ("/v2", ""):
        response = api.post(f"{prefix}{route}/connect", json={"timeout": 60}, headers=headers)
        assert response.status_code == 200 and response.json()["sandboxID"] == sandbox["sandboxID"]
    assert api.get(route, headers=headers).json()["state"] == "running"
    assert api.get("/templates", headers=headers).status_code == 200
    with memory_gateway.client(EXEC_KEY) as client:
        assert client.delete(route, headers=headers).status_code == 403, "the scope of the key still applies"
    with memory_gateway.client("") as client:
        token_headers = headers | {"X-Access-Token": sandbox["envdAccessToken"]}
        assert client.get(route, headers=token_headers).status_code == 401
        assert client.get("/echo", headers=token_headers).status_code == 201
    with raw_service(memory_gateway, sandbox) as service:
        assert api.get("/sandboxes", headers=make_port_headers(sandbox, PORT)).text == "ok"
        assert api.get("/sandboxes", headers=make_port_headers_with_host(sandbox, PORT)).text == "ok"
        assert service.parse_request_target() == "/sandboxes"
    host_headers = make_port_headers_with_host(sandbox) | {"X-Access-Token": sandbox["envdAccessToken"]}
    assert api.get(route, headers=host_headers).json() == {"frozen": True}, "a host name always means the sandbox"


def test_keys_are_not_forwarded(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    with memory_gateway.client("") as client:
        for header in ({"X-API-Key": EXEC_KEY}, {"Authorization": f"Bearer {EXEC_KEY}"}):
            echoed_request = client.get("/echo", headers=make_port_headers(sandbox, **header)).json()
            assert EXEC_KEY not in str(echoed_request)
        key_and_bearer_headers = {"X-API-Key": EXEC_KEY, "Authorization": "Bearer the-services-own"}
        forwarded_headers = client.get("/echo", headers=make_port_headers(sandbox, **key_and_bearer_headers)).json()[
            "headers"
        ]
        repeated_headers = [
            *make_port_headers(sandbox).items(),
            ("Authorization", "Bearer other"),
            ("Authorization", f"Bearer {EXEC_KEY}"),
        ]
        assert EXEC_KEY not in client.get("/echo", headers=[*repeated_headers, ("X-API-Key", EXEC_KEY)]).text
        assert forwarded_headers["authorization"] == "Bearer the-services-own" and "x-api-key" not in forwarded_headers
        key_and_basic_headers = {"X-API-Key": EXEC_KEY, "Authorization": "Basic dXNlcjo="}
        assert (
            client.get("/echo", headers=make_port_headers(sandbox, **key_and_basic_headers)).json()["headers"][
                "authorization"
            ]
            == "Basic dXNlcjo="
        )


def test_requests_need_access_to_the_port(
    api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    token_header = {"X-Access-Token": sandbox["envdAccessToken"]}
    assert keyless_client.get("/echo", headers=make_port_headers(sandbox, **token_header)).status_code == 201
    other_sandbox = create_sandbox(api)
    unknown_sandbox = {"sandboxID": "0" * 12}
    for port, status, kind in ((AGENT_PORT, 401, "unauthorized"), (PORT, 403, "forbidden")):
        for headers in (
            make_port_headers(sandbox, port),
            make_port_headers(other_sandbox, port, **token_header),
            make_port_headers(sandbox, port, **{"X-Access-Token": "wrong"}),
            make_port_headers(unknown_sandbox, port, **token_header),
            make_port_headers(unknown_sandbox, port),
        ):
            response = keyless_client.get("/echo", headers=headers)
            assert response.status_code == status and response.json()["kind"] == kind, headers
            assert (
                keyless_client.get("/echo", headers=headers | make_port_headers(unknown_sandbox, port)).text
                == response.text
            )
        headers = make_port_headers(sandbox, port, **{"X-API-Key": "wrong-key-0123456789"})
        assert keyless_client.get("/echo", headers=headers).status_code == 401
    assert keyless_client.get("/echo", headers=make_port_headers(sandbox, **{"X-API-Key": READ_KEY})).status_code == 403
    assert (
        keyless_client.get(
            "/echo", headers=make_port_headers(sandbox, **{"X-API-Key": READ_KEY}, **token_header)
        ).status_code
        == 201
    )
    assert (
        keyless_client.get(
            "/echo", headers=make_port_headers({"sandboxID": "0" * 12}, **{"X-API-Key": ADMIN_KEY})
        ).status_code
        == 502
    )
    assert keyless_client.get("/sandboxes", headers=token_header).status_code == 401, (
        "a token gives no access to the control plane"
    )


@pytest.mark.parametrize("port", ["0", "65536", "999999", "-1", "x", ""])
def test_invalid_ports_are_refused(api: httpx.Client, sandbox: dict[str, Any], port: str) -> None:
    response = api.get("/echo", headers=make_port_headers(sandbox, port))
    assert response.status_code == 400 and "1 to 65535" in response.json()["message"]


def test_a_request_to_a_closed_port_fails(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    response = api.get("/", headers=make_port_headers(sandbox, PORT))
    assert response.status_code == 502 and response.json()["kind"] == "backend_failed"
    assert (
        "nothing is listening on port 3000" in response.json()["message"]
        and "port is not open" in response.json()["message"]
    )


def test_a_large_body_is_forwarded(memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]) -> None:
    def generate_chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b"x" * 100_000

    echoed_request = api.post("/echo", content=generate_chunks(), headers=make_port_headers(sandbox)).json()
    assert echoed_request["length"] == 8_000_000 and echoed_request["headers"]["transfer-encoding"] == "chunked"


def test_a_response_is_streamed_until_the_client_disconnects(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with (
        memory_gateway.client() as client,
        client.stream("GET", "/stream", headers=make_port_headers(sandbox)) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["tick 0", "tick 1"]
    machine = memory_gateway.machine(sandbox["sandboxID"])
    wait_until(lambda: not machine.connection_count)


def test_a_request_resumes_a_paused_sandbox_only_with_auto_resume(api: httpx.Client) -> None:
    plain_sandbox, resuming_sandbox = (
        create_sandbox(api),
        create_sandbox(api, autoPause=True, autoResume={"enabled": True}),
    )
    for sandbox in (plain_sandbox, resuming_sandbox):
        api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    response = api.get("/echo", headers=make_port_headers(plain_sandbox))
    assert response.status_code == 502 and response.json()["kind"] == "conflict"
    assert "is paused: resume it first" in response.json()["message"] and "was not found" in response.json()["message"]
    path = f"/sandboxes/{resuming_sandbox['sandboxID']}"
    headers = make_port_headers(resuming_sandbox, **{"X-Sandbox-Auto-Resume": "false"})
    response = api.get("/echo", headers=headers)
    assert response.status_code == 502 and "is paused: resume it first" in response.json()["message"]
    assert api.get(path).json()["state"] == "paused"
    assert api.get("/echo", headers=make_port_headers(resuming_sandbox)).status_code == 201
    assert api.get(path).json()["state"] == "running"
    response = api.get("/echo", headers=headers)
    assert response.status_code == 201 and "x-sandbox-auto-resume" not in response.json()["headers"]


def test_headers_named_in_the_connection_header_are_not_forwarded(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    request_headers = {
        "Connection": "keep-alive, X-Private",
        "X-Private": "1",
        "TE": "trailers",
        "Proxy-Authorization": "x",
    }
    headers = api.get("/echo", headers=make_port_headers(sandbox, **request_headers)).json()["headers"]
    assert not {"x-private", "te", "proxy-authorization"} & set(headers)


def test_concurrent_requests_wait_for_one_resume(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    sandbox = create_sandbox(api, autoPause=True, autoResume={"enabled": True})
    api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    fork_count_before, memory_gateway.host.fork_seconds = memory_gateway.host.fork_count, 0.3

    def request(_: int) -> int:
        with memory_gateway.client() as client:
            return client.get("/echo", headers=make_port_headers(sandbox)).status_code

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(request, range(6))) == {201}
    assert memory_gateway.host.fork_count == fork_count_before + 1


# --- ambiguous requests, and harmful responses -----------------------------------------------------------------------

KEY_HEADER = f"X-API-Key: {EXEC_KEY}"


def test_ambiguous_requests_are_refused(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    chunked_body = b"5\r\nhello\r\n0\r\n\r\n"
    sandbox_host = f"Host: {make_port_host(sandbox, PORT)}"
    with raw_service(memory_gateway, sandbox) as service:
        for request, status in (
            (
                make_request_head("POST /", sandbox_host, KEY_HEADER, "Content-Length: 5", "Transfer-Encoding: chunked")
                + chunked_body,
                400,
            ),
            (
                make_request_head(
                    "POST /", sandbox_host, KEY_HEADER, "Transfer-Encoding: chunked", "Content-Length: 15"
                )
                + chunked_body,
                400,
            ),
            (
                make_request_head("POST /", sandbox_host, KEY_HEADER, "Content-Length: 5", "Content-Length: 6")
                + b"hello",
                400,
            ),
            (
                make_request_head("POST /", sandbox_host, KEY_HEADER, "Transfer-Encoding: gzip, chunked")
                + chunked_body,
                400,
            ),
            (make_request_head("GET /", sandbox_host, sandbox_host, KEY_HEADER), 400),
            (make_request_head("GET /", sandbox_host, "Host: elsewhere", KEY_HEADER), 400),
            (make_request_head("GET /", KEY_HEADER), 400),
            (make_request_head("GET http://elsewhere.example/", sandbox_host, KEY_HEADER), 400),
            (make_request_head("OPTIONS *", sandbox_host, KEY_HEADER), 400),
            (make_request_head("CONNECT localhost:22", sandbox_host, KEY_HEADER), 501),
            (make_request_head("GET /", sandbox_host, KEY_HEADER, "Connection: upgrade", "Upgrade: tcp"), 501),
        ):
            with raw_connection(memory_gateway, request) as connection:
                assert read_response(connection)[0] == status, request
        smuggled_request = chunked_body + make_request_head("GET /hidden", sandbox_host, KEY_HEADER)
        for host_line in (sandbox_host, "Host: gateway"):
            ambiguous_head = make_request_head(
                "POST /",
                host_line,
                KEY_HEADER,
                f"Content-Length: {len(smuggled_request)}",
                "Transfer-Encoding: chunked",
            )
            with raw_connection(memory_gateway, ambiguous_head + smuggled_request) as connection:
                assert read_response(connection)[0] == 400
                assert connection.recv(4096) == b"", "the gateway reads nothing after an ambiguous request"
        assert not service.heads
        h2c_header_lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        with raw_connection(
            memory_gateway, make_request_head("GET /", sandbox_host, KEY_HEADER, *h2c_header_lines)
        ) as connection:
            assert read_response(connection)[0] == 200, "a client that offers HTTP/2 accepts HTTP/1.1"
        assert not {"upgrade", "http2-settings"} & set(service.parse_request_headers())


@pytest.mark.parametrize(
    "reply",
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
def test_invalid_responses_are_reported(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], reply: bytes
) -> None:
    with raw_service(memory_gateway, sandbox, reply) as service:
        response = api.post("/", content=b"x", headers=make_port_headers(sandbox, PORT))
        assert response.status_code == 502 and "port 3000" in response.json()["message"], response.text
        wait_until(lambda: not service.open_connection_count)


def test_transfer_encoding_overrides_content_length(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    response_start = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    with raw_service(memory_gateway, sandbox, response_start + b"0\r\nX-Trailer: 1\r\n\r\n"):
        response = api.get("/", headers=make_port_headers(sandbox, PORT))
        assert response.text == "hello" and "content-length" not in response.headers
        assert "x-trailer" not in response.headers


def test_response_headers_that_affect_other_sandboxes_are_removed(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    own_host = make_port_host(sandbox, PORT)
    allowed_cookies = ("a=1; Path=/", f"b=1; Domain={own_host}", f"c=1; domain=.{own_host.upper()}")
    removed_cookies = (
        "d=1; Domain=sandbox.local",
        "e=1;domain=.sandbox.local; Secure",
        f"f=1; Domain={own_host}; Domain=local",
    )
    header_lines = [f"Set-Cookie: {cookie}" for cookie in (*allowed_cookies, *removed_cookies)]
    header_lines += [
        "Strict-Transport-Security: max-age=1",
        'Alt-Svc: h3=":443"',
        "Proxy-Authenticate: Basic",
        "X-Own: 1",
    ]
    with raw_service(memory_gateway, sandbox, make_reply("200 OK", b"ok", *header_lines)):
        headers_with_host = api.get("/", headers=make_port_headers_with_host(sandbox, PORT)).headers
        assert (
            headers_with_host.get_list("set-cookie") == list(allowed_cookies)
            and "strict-transport-security" in headers_with_host
        )
        headers_without_host = api.get("/", headers=make_port_headers(sandbox, PORT)).headers
        assert not {"set-cookie", "strict-transport-security"} & set(headers_without_host)
        for headers in (headers_with_host, headers_without_host):
            assert headers["x-own"] == "1" and not {"alt-svc", "proxy-authenticate"} & set(headers)


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_is_requested_only_from_authorized_callers(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    header_lines = (f"Host: {make_port_host(sandbox, PORT)}", "Content-Length: 5", "Expect: 100-continue")
    with raw_service(memory_gateway, sandbox) as service:
        with raw_connection(memory_gateway, make_request_head("POST /", *header_lines)) as connection:
            assert read_response(connection)[0] == 403
        with raw_connection(memory_gateway, make_request_head("POST /", *header_lines, KEY_HEADER)) as connection:
            assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"hello")
            assert read_response(connection)[0] == 200
        assert service.bodies == [b"hello"] and "expect" not in service.parse_request_headers()


def test_chunks_are_forwarded_as_they_arrive(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    response_head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first_chunk_event = threading.Event()

    async def send_second_chunk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(first_chunk_event.wait, 10)
        writer.write(b"3\r\ntwo\r\n0\r\nX-Trailer: 1\r\n\r\n")

    request = make_request_head(
        "POST /", f"Host: {make_port_host(sandbox, PORT)}", KEY_HEADER, "Transfer-Encoding: chunked", "Trailer: X-Sum"
    )
    with (
        raw_service(
            memory_gateway, sandbox, response_head + b"3\r\none\r\n", next_handler=send_second_chunk
        ) as service,
        raw_connection(memory_gateway, request) as connection,
    ):
        for piece in (b"4\r\nsent\r\n", b"5\r\nlater\r\n"):
            connection.sendall(piece)
            time.sleep(0.05)
        connection.sendall(b"0\r\nX-Sum: 1\r\n\r\n")
        received_bytes = b""
        while b"one" not in received_bytes:
            received_bytes += connection.recv(4096)
        assert (
            service.bodies == [b"sentlater"]
            and "trailer" not in service.parse_request_headers()
            and b"two" not in received_bytes
        )
        first_chunk_event.set()
        connection.settimeout(10)
        while not received_bytes.endswith(b"0\r\n\r\n"):
            received_bytes += connection.recv(4096)
        assert b"two" in received_bytes and b"Trailer" not in received_bytes


def test_a_slow_reader_slows_the_service(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    piece, sent_byte_count = b"x" * 65536, 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_byte_count
        while True:
            writer.write(piece)
            await writer.drain()
            sent_byte_count += len(piece)

    endless_response = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
    with raw_service(memory_gateway, sandbox, endless_response, next_handler=flood) as service:
        with raw_connection(
            memory_gateway, make_request_head("GET /", f"Host: {make_port_host(sandbox, PORT)}", KEY_HEADER)
        ) as connection:
            previous_byte_count = -1
            while sent_byte_count != previous_byte_count:
                previous_byte_count = sent_byte_count
                time.sleep(0.25)
            # The kernel's buffers at the ends of three connections.
            assert sent_byte_count < 32 << 20
            for _ in range(400):
                connection.recv(65536, socket.MSG_WAITALL)
            wait_until(lambda: sent_byte_count > previous_byte_count)
        wait_until(lambda: not service.open_connection_count)


async def _leave_body_unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the headers of a request, and leave its body unread."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(3600)
    finally:
        writer.close()


async def _listen_and_leave_bodies_unread(address: str, port: int) -> asyncio.Server:
    return await asyncio.start_server(_leave_body_unread, address, port)


def test_a_slow_service_slows_the_client(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    request = make_request_head(
        "PUT /", f"Host: {make_port_host(sandbox, PORT)}", KEY_HEADER, "Content-Length: 1000000000"
    )
    with (
        Service(get_machine_address(memory_gateway, sandbox), PORT, _listen_and_leave_bodies_unread),
        raw_connection(memory_gateway, request) as connection,
    ):
        connection.settimeout(0.5)
        sent_byte_count = 0
        with pytest.raises(TimeoutError):
            while True:
                sent_byte_count += connection.send(b"x" * 65536)
        assert 0 < sent_byte_count < 32 << 20


def test_a_response_before_the_end_of_the_request_body_is_forwarded(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(make_reply("413 Too Large", b"enough"))
        while await reader.read(65536):
            pass
        writer.close()

    async def listen(address: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(refuse, address, port)

    with Service(get_machine_address(memory_gateway, sandbox), PORT, listen), memory_gateway.client(EXEC_KEY) as client:
        response = client.post(
            "/", content=(b"x" * 65536 for _ in range(100)), headers=make_port_headers(sandbox, PORT)
        )
        assert response.status_code == 413 and response.text == "enough"


@pytest.mark.parametrize("is_half_closed", [True, False])
def test_a_half_closed_client_counts_as_disconnected(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], is_half_closed: bool
) -> None:
    disconnect_event = threading.Event()

    async def listen(address: str, port: int) -> asyncio.Server:
        async def wait_for_disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(-1)
            disconnect_event.set()
            writer.close()

        return await asyncio.start_server(wait_for_disconnect, address, port)

    with Service(get_machine_address(memory_gateway, sandbox), PORT, listen):
        with raw_connection(
            memory_gateway, make_request_head("GET /", f"Host: {make_port_host(sandbox, PORT)}", KEY_HEADER)
        ) as connection:
            time.sleep(0.1)
            assert not disconnect_event.is_set()
            if is_half_closed:
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(4096) == b""
        assert disconnect_event.wait(5)


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_closed_idle_connection_is_replaced(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    # The connection for the second request is closed when the request arrives.
    with raw_service(memory_gateway, sandbox, make_reply(), b"", make_reply(body=b"again")) as service:
        assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "ok"
        assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "again"
        assert service.connection_count == 2 and len(service.heads) == 3
    with raw_service(memory_gateway, sandbox, make_reply(), b"", make_reply()) as service:
        assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "ok"
        for method, content in (("POST", b"x"), ("POST", b""), ("DELETE", b"")):
            service.heads.clear()
            assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "ok"
            response = api.request(method, "/", content=content, headers=make_port_headers(sandbox, PORT))
            assert response.status_code == 502, "the service may have processed it, so only the client may repeat it"
            assert len(service.heads) == 2


def test_the_number_of_concurrent_requests_is_limited(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, limits={"connections": 2})
    try:
        gateway.build_template("base", packages=["python3"])
        with gateway.client() as api:
            first_sandbox, second_sandbox = create_sandbox(api), create_sandbox(api)
            streams = [api.stream("GET", "/stream", headers=make_port_headers(first_sandbox)) for _ in range(2)]
            for stream in streams:
                stream.__enter__()
            busy_response = api.get("/echo", headers=make_port_headers(first_sandbox))
            assert busy_response.status_code == 429 and int(busy_response.headers["retry-after"]) > 0
            assert "limits.connections" in busy_response.json()["message"]
            assert api.get("/echo", headers=make_port_headers(second_sandbox)).status_code == 201, (
                "the limit applies to each sandbox"
            )
            streams[0].__exit__(None, None, None)
            wait_until(lambda: api.get("/echo", headers=make_port_headers(first_sandbox)).status_code == 201)
            streams[1].__exit__(None, None, None)
    finally:
        gateway.end()


_STOP_REQUESTS = {
    "rollback": ("POST", "/sandboxes/one/rollback", {"snapshotID": "s1"}),
    "pause": ("POST", "/sandboxes/one/pause", None),
    "kill": ("DELETE", "/sandboxes/one", None),
}


@pytest.mark.parametrize("operation", _STOP_REQUESTS)
def test_all_connections_are_closed_when_the_machine_stops(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], operation: str
) -> None:
    """The service does not close its connections, as if a virtual machine had been killed."""
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    incomplete_response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
    sandbox_host = f"Host: {make_port_host(sandbox, PORT)}"

    async def keep_connection_open(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        if len(service.heads) > 1:
            await reader.read(1)

    with (
        raw_service(
            memory_gateway,
            sandbox,
            make_reply(),
            incomplete_response,
            b"HTTP/1.1 100 Continue\r\n\r\n",
            next_handler=keep_connection_open,
        ) as service,
        memory_gateway.client(EXEC_KEY) as client,
        raw_connection(memory_gateway, make_request_head("GET /", sandbox_host, KEY_HEADER)) as streaming_connection,
        raw_connection(memory_gateway) as waiting_connection,
        raw_connection(memory_gateway) as uploading_connection,
    ):
        wait_until(lambda: len(service.heads) == 1)
        assert read_response(streaming_connection)[0] == 200
        streaming_connection.sendall(make_request_head("GET /", sandbox_host, KEY_HEADER))
        wait_until(lambda: len(service.heads) == 2)
        wait_until(lambda: b"first" in streaming_connection.recv(4096, socket.MSG_PEEK))
        waiting_connection.sendall(make_request_head("GET /", sandbox_host, KEY_HEADER))
        wait_until(lambda: len(service.heads) == 3)
        uploading_connection.sendall(
            make_request_head("POST /", sandbox_host, KEY_HEADER, "Content-Length: 10") + b"half"
        )
        wait_until(lambda: len(service.heads) == 4)
        wait_until(lambda: service.open_connection_count == 3)
        method, path, body = _STOP_REQUESTS[operation]
        assert api.request(method, path, json=body).is_success
        for connection in (waiting_connection, uploading_connection):
            status, error = read_response(connection)
            assert status == 502 and "rolled back, paused or removed" in error["message"]
        received_bytes = b""
        while piece := streaming_connection.recv(4096):
            received_bytes += piece
        assert received_bytes.endswith(b"5\r\nfirst\r\n"), "the response ends without its last chunk"
        wait_until(lambda: not service.open_connection_count)
        request_count = len(service.heads)
        response = client.get("/", headers=make_port_headers(sandbox, PORT))
        assert response.status_code == 502 and len(service.heads) == request_count, (
            "the old machine receives no requests"
        )
        if operation == "rollback":
            assert "port is not open" in response.json()["message"]
            assert client.get("/echo", headers=make_port_headers(sandbox)).status_code == 201
        else:
            assert "was not found" in response.json()["message"]


def test_idle_connections_are_closed_when_the_machine_stops(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    with raw_service(memory_gateway, sandbox) as old_service:
        assert (
            api.get("/", headers=make_port_headers(sandbox, PORT)).text == "ok"
            and old_service.open_connection_count == 1
        )
        assert api.post("/sandboxes/one/rollback", json={"snapshotID": "s1"}).status_code == 200
        wait_until(lambda: not old_service.open_connection_count)
        with raw_service(memory_gateway, sandbox, make_reply(body=b"new")) as new_service:
            assert api.get("/", headers=make_port_headers(sandbox, PORT)).text == "new"
            assert len(old_service.heads) == len(new_service.heads) == 1


def test_cancellation_at_any_await_leaks_no_connection() -> None:
    """A request that removes the idle connections of an exited agent is cancelled at each of its awaits in turn."""
    asyncio.run(_cancel_at_each_await())


async def _cancel_at_each_await() -> None:
    accepted_writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accept_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_writers.put_nowait(writer)
        while await reader.read(4096):
            pass
        writer.close()

    open_count_by_turns: dict[int, int] = {}
    server = await asyncio.start_server(accept_connection, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for turns in range(30):
            machine = _make_machine_connections()
            request = _make_request(port)
            tasks = [asyncio.create_task(proxy._forward_http(request, machine, 300, has_body=False)) for _ in range(12)]
            writers = [await accepted_writers.get() for _ in tasks]
            for writer in writers:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await asyncio.gather(*tasks)
            for writer in writers:
                writer.close()
            await asyncio.sleep(0.02)
            late_task = asyncio.create_task(proxy._forward_http(request, machine, 300, has_body=False))
            for _ in range(turns):
                await asyncio.sleep(0)
            await machine.end()
            await asyncio.gather(late_task, return_exceptions=True)
            while not accepted_writers.empty():
                accepted_writers.get_nowait().close()
            await asyncio.sleep(0.02)
            if open_count := _count_open_connections(port):
                open_count_by_turns[turns] = open_count
    assert open_count_by_turns == {}


def _make_machine_connections() -> pools.MachineConnections:
    sandbox = types.SimpleNamespace(instance="i", started_at=None)
    return pools.MachineConnections(cast(Any, sandbox), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cast(Any, None))


def _make_request(port: int) -> proxy.ServiceRequest:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    sandbox = types.SimpleNamespace(id="one")
    target = proxy.Target("one", port, "localhost", is_named_by_host=False)
    return proxy.ServiceRequest({"method": "GET"}, receive, send, target, cast(Any, sandbox), "127.0.0.1", "", b"/", [])


def _count_open_connections(port: int) -> int:
    """Return the number of connections to ``port`` that any process still has open."""
    table_rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[9] != "0" for row in table_rows)
