"""A client hides a second request inside a request. The hidden request has no effect anywhere.

Each variant is a request that different servers parse differently. A server inside a sandbox records the requests that
it receives, and the tests check that they are unambiguous.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sandbox_gateway.records import PLANNED_PREFIX
from tests.support.guest_services import PORT, RawService, make_port_host, raw_connection, raw_service
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, MemoryGateway, create_sandbox

FIRST_RESPONSE_TIMEOUT_SECONDS, NEXT_RESPONSE_TIMEOUT_SECONDS = 2, 0.25
"""Timeouts for the first response and for each later one. They are short, because some requests are incomplete."""
CHUNKED_HEADER = b"Transfer-Encoding: chunked"
CANONICAL_HEAD_PATTERN = re.compile(
    rb"[A-Z]+ /[!-~]* HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[\t -~\x80-\xff]*\r\n)+\r\n"
)
"""A head that all servers parse in the same way, without bare line ends, folded lines or control characters."""


@dataclass(frozen=True)
class RequestVariant:
    """A template for an ambiguous request.

    ``fields``: the headers other than Host and the key; ``body``: the body, in which HIDDEN stands for the
    hidden request.
    """

    fields: tuple[bytes, ...]
    body: bytes = b"HIDDEN"
    request_line: bytes = b"POST / HTTP/1.1"
    end: bytes = b"\r\n"
    raw: bytes = b""
    """The whole request, which replaces the other attributes. FIELDS stands for Host and key."""


def make_chunked_variant(*fields: bytes, body: bytes = b"0\r\n\r\nHIDDEN") -> RequestVariant:
    """Return a variant whose body ends before HIDDEN according to its chunks, but after it according to its length."""
    return RequestVariant((*fields, b"Content-Length: LENGTH"), body)


def make_body_variant(*fields: bytes, body: bytes = b"HIDDEN") -> RequestVariant:
    return RequestVariant(fields, body)


def make_length_variant(*fields: bytes) -> RequestVariant:
    """Return a variant with an unusual length. A server that ignores the length treats HIDDEN as the next request."""
    return RequestVariant(fields, b"HIDDEN")


REQUEST_VARIANTS: dict[str, RequestVariant] = {
    # Two lengths.
    "CL.TE": make_chunked_variant(CHUNKED_HEADER),
    "TE.CL": RequestVariant((CHUNKED_HEADER, b"Content-Length: 4"), b"5c\r\nHIDDEN\r\n0\r\n\r\n"),
    "TE before CL": RequestVariant((CHUNKED_HEADER, b"Content-Length: LENGTH"), b"0\r\n\r\nHIDDEN"),
    "CL twice, small first": make_length_variant(b"Content-Length: 0", b"Content-Length: LENGTH"),
    "CL twice, small last": make_length_variant(b"Content-Length: LENGTH", b"Content-Length: 0"),
    "CL in a list": make_length_variant(b"Content-Length: 0, LENGTH"),
    "CL in a list, reversed": make_length_variant(b"Content-Length: LENGTH, 0"),
    # Invalid lengths.
    "CL with a plus": make_length_variant(b"Content-Length: +0"),
    "CL below zero": make_length_variant(b"Content-Length: -1"),
    "CL minus zero": make_length_variant(b"Content-Length: -0"),
    "CL in hex": make_length_variant(b"Content-Length: 0x0"),
    "CL with a fraction": make_length_variant(b"Content-Length: 0.0"),
    "CL with an exponent": make_length_variant(b"Content-Length: 0e9"),
    "CL with a space inside": make_length_variant(b"Content-Length: 0 5"),
    "CL with an underscore": make_length_variant(b"Content-Length: 0_0"),
    "CL empty": make_length_variant(b"Content-Length: "),
    "CL in other digits": make_length_variant("Content-Length: \u0660".encode()),
    "CL superscript": make_length_variant(b"Content-Length: \xb2"),
    "CL beyond 64 bits": make_length_variant(b"Content-Length: 18446744073709551616"),
    "CL of thousands of digits": make_length_variant(b"Content-Length: " + b"0" * 5000),
    "CL with a NUL": make_length_variant(b"Content-Length: 0\x00"),
    "CL with a vertical tab": make_length_variant(b"Content-Length: \x0b0"),
    # Invalid names.
    "TE, a space before the colon": make_chunked_variant(b"Transfer-Encoding : chunked"),
    "TE, a tab before the colon": make_chunked_variant(b"Transfer-Encoding\t: chunked"),
    "TE after a NUL": make_chunked_variant(b"Transfer\x00-Encoding: chunked"),
    "TE after a space": make_chunked_variant(b" Transfer-Encoding: chunked"),
    "TE after a form feed": make_chunked_variant(b"\x0cTransfer-Encoding: chunked"),
    "TE folded": make_chunked_variant(b"X: 1\r\n Transfer-Encoding: chunked"),
    "TE, its value folded": make_chunked_variant(b"Transfer-Encoding:\r\n chunked"),
    "a header without a colon": make_chunked_variant(b"Transfer-Encoding chunked"),
    "an empty name": make_chunked_variant(b": chunked"),
    # Invalid encodings, or several.
    "TE twice": make_chunked_variant(CHUNKED_HEADER, b"Transfer-Encoding: identity"),
    "TE twice, chunked last": make_chunked_variant(b"Transfer-Encoding: identity", CHUNKED_HEADER),
    "TE identity": make_chunked_variant(b"Transfer-Encoding: identity"),
    "TE in a list": make_chunked_variant(b"Transfer-Encoding: identity, chunked"),
    "TE gzip and chunked": make_chunked_variant(b"Transfer-Encoding: gzip, chunked"),
    "TE chunked twice": make_chunked_variant(b"Transfer-Encoding: chunked, chunked"),
    "TE with a comma": make_chunked_variant(b"Transfer-Encoding: chunked,"),
    "TE in capitals": make_chunked_variant(b"Transfer-Encoding: CHUNKED"),
    "TE quoted": make_chunked_variant(b'Transfer-Encoding: "chunked"'),
    "TE with a parameter": make_chunked_variant(b"Transfer-Encoding: chunked;q=1"),
    "TE misspelled": make_chunked_variant(b"Transfer-Encoding: xchunked"),
    "TE after a vertical tab": make_chunked_variant(b"Transfer-Encoding: \x0bchunked"),
    "TE with a NUL": make_chunked_variant(b"Transfer-Encoding: chunked\x00"),
    "TE alone, misspelled": make_length_variant(b"Transfer-Encoding: xchunked"),
    "TE alone, identity": make_length_variant(b"Transfer-Encoding: identity"),
    "TE alone, twice": RequestVariant((CHUNKED_HEADER, CHUNKED_HEADER), b"0\r\n\r\nHIDDEN"),
    "TE of HTTP/1.0": RequestVariant((CHUNKED_HEADER,), b"1\r\nx\r\n0\r\n\r\nHIDDEN", request_line=b"POST / HTTP/1.0"),
    # Invalid chunks.
    "chunk of negative size": make_body_variant(CHUNKED_HEADER, body=b"-1\r\nHIDDEN\r\n0\r\n\r\n"),
    "chunk with 0x": make_body_variant(CHUNKED_HEADER, body=b"0x0\r\n\r\nHIDDEN"),
    "chunk with a plus": make_body_variant(CHUNKED_HEADER, body=b"+0\r\n\r\nHIDDEN"),
    "chunk size after a space": make_body_variant(CHUNKED_HEADER, body=b" 0\r\n\r\nHIDDEN"),
    "chunk with an underscore": make_body_variant(CHUNKED_HEADER, body=b"0_0\r\n\r\nHIDDEN"),
    "chunk beyond 64 bits": make_body_variant(CHUNKED_HEADER, body=b"1" + b"0" * 16 + b"\r\nHIDDEN\r\n0\r\n\r\n"),
    "chunk of 20 digits": make_body_variant(CHUNKED_HEADER, body=b"0" * 21 + b"\r\n\r\nHIDDEN"),
    "chunk ended by LF": make_body_variant(CHUNKED_HEADER, body=b"0\n\nHIDDEN"),
    "chunk ended by CR": make_body_variant(CHUNKED_HEADER, body=b"0\r\rHIDDEN"),
    "chunk longer than its size": make_body_variant(CHUNKED_HEADER, body=b"1\r\nxHIDDEN\r\n0\r\n\r\n"),
    "chunk without an end": make_body_variant(CHUNKED_HEADER, body=b"1\r\nx0\r\n\r\nHIDDEN"),
    "an extension with LF": make_body_variant(CHUNKED_HEADER, body=b"1;a\n0\r\n\r\nHIDDEN"),
    "an extension with CR": make_body_variant(CHUNKED_HEADER, body=b"1;a\rb\r\nx\r\n0\r\n\rHIDDEN"),
    "an extension with a request": make_body_variant(CHUNKED_HEADER, body=b"1;ONELINE\r\nx\r\n0\r\n\r\n"),
    "a huge extension": make_body_variant(CHUNKED_HEADER, body=b"1;" + b"a" * 200_000 + b"\r\nx\r\n0\r\n\r\nHIDDEN"),
    "a request as trailers": make_body_variant(CHUNKED_HEADER, body=b"0\r\nHIDDEN"),
    "a length as a trailer": make_body_variant(CHUNKED_HEADER, body=b"1\r\nx\r\n0\r\nContent-Length: 0\r\nX: HIDDEN"),
    # Line ends.
    "LF alone": RequestVariant((), raw=b"POST / HTTP/1.1\nFIELDSLF\nContent-Length: LENGTH\n\nHIDDEN"),
    "CR alone in a header": RequestVariant((b"X: 1\rContent-Length: 0\r\rHIDDENLF",), b""),
    "a request in a header": RequestVariant((b"X: 1\r\n\x00\r\nHIDDENLF",), b""),
    "empty lines before": RequestVariant(
        (b"Content-Length: LENGTH",), raw=b"\r\n\n\r\nPOST / HTTP/1.1\r\nFIELDS\r\nContent-Length: LENGTH\r\n\r\nHIDDEN"
    ),
    # Request lines.
    "a request in the first line": RequestVariant((b"Content-Length: 0",), b"", request_line=b"GET /?ONELINE HTTP/1.1"),
    "two first lines": RequestVariant(
        (b"Content-Length: 0",), b"", request_line=b"GET / HTTP/1.1\r\nGET /hidden HTTP/1.1"
    ),
    "spaces in the target": RequestVariant(
        (b"Content-Length: 0",), b"", request_line=b"GET / HTTP/1.1 /hidden HTTP/1.1"
    ),
    "LF in the target": RequestVariant((b"Content-Length: 0",), b"", request_line=b"GET /\nGET /hidden HTTP/1.1"),
    "CR in the target": RequestVariant((b"Content-Length: 0",), b"", request_line=b"GET /\rGET\r/hidden HTTP/1.1"),
    "NUL in the target": RequestVariant((b"Content-Length: 0",), b"", request_line=b"GET /\x00/hidden HTTP/1.1"),
    "encoded lines in the target": RequestVariant(
        (b"Content-Length: 0",),
        b"",
        request_line=b"GET /%20HTTP/1.1%0d%0aHost:%20x%0d%0a%0d%0aGET%20/hid%64en HTTP/1.1",
    ),
    "a huge target": RequestVariant(
        (b"Content-Length: 0",), b"HIDDEN", request_line=b"GET /" + b"a" * 300_000 + b" HTTP/1.1"
    ),
    "HTTP/0.9": RequestVariant((), raw=b"GET /\r\nHIDDEN"),
    "HTTP/1.0 with keep-alive": RequestVariant(
        (b"Connection: keep-alive", b"Content-Length: LENGTH"), request_line=b"POST / HTTP/1.0"
    ),
    "HTTP/2.0": RequestVariant((b"Content-Length: LENGTH",), request_line=b"POST / HTTP/2.0"),
    "HTTP/1.1 in lower case": RequestVariant((b"Content-Length: LENGTH",), request_line=b"POST / http/1.1"),
    "HTTP/2's preface": RequestVariant((), raw=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nHIDDEN"),
    # Methods without a body, and protocol upgrades.
    "GET with a body": RequestVariant((b"Content-Length: LENGTH",), request_line=b"GET / HTTP/1.1"),
    "HEAD with a body": RequestVariant((b"Content-Length: LENGTH",), request_line=b"HEAD / HTTP/1.1"),
    "CONNECT with a body": RequestVariant((b"Content-Length: LENGTH",), request_line=b"CONNECT / HTTP/1.1"),
    "upgrade with a body": RequestVariant((b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: LENGTH")),
    "upgrade to an unknown protocol": RequestVariant(
        (b"Connection: upgrade", b"Upgrade: x", b"Content-Length: LENGTH")
    ),
    "a WebSocket with a body": RequestVariant(
        (b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 12", b"Content-Length: LENGTH"),
        request_line=b"GET / HTTP/1.1",
    ),
    "lengths as connection headers": RequestVariant(
        (b"Connection: Content-Length, Host, Transfer-Encoding", b"Content-Length: LENGTH")
    ),
    "a body after 100-continue": RequestVariant((b"Expect: 100-continue", b"Content-Length: LENGTH")),
    "a body with an unknown expectation": RequestVariant((b"Expect: 200-ok", b"Content-Length: LENGTH")),
}


def build_request(variant: RequestVariant, host_name: str, hidden_request: bytes, key: str) -> bytes:
    host_and_key_headers = [f"Host: {host_name}".encode(), f"X-API-Key: {key}".encode()]
    hidden_request_line = hidden_request.partition(b"\r\n")[0]
    body = variant.body.replace(b"HIDDEN", hidden_request)
    # If the first chunk contains HIDDEN, set its correct length.
    body = re.sub(rb"^5c\r\n", b"%x\r\n" % len(hidden_request), body)
    request = (
        variant.raw or b"\r\n".join([variant.request_line, *host_and_key_headers, *variant.fields, b"", b""]) + body
    )
    request = request.replace(b"FIELDSLF", b"\n".join(host_and_key_headers)).replace(
        b"FIELDS", b"\r\n".join(host_and_key_headers)
    )
    request = request.replace(b"HIDDENLF", hidden_request.replace(b"\r\n", b"\n")).replace(b"HIDDEN", hidden_request)
    length = len(hidden_request) if variant.raw else len(body)
    return request.replace(b"ONELINE", hidden_request_line).replace(b"LENGTH", str(length).encode())


def send_and_read_statuses(memory_gateway: MemoryGateway, data: bytes) -> list[int]:
    """Send ``data`` and return the statuses of the responses, except for 100 and 400."""
    response_data = b""
    with raw_connection(memory_gateway) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(FIRST_RESPONSE_TIMEOUT_SECONDS)
            while piece := connection.recv(65536):
                response_data += piece
                connection.settimeout(NEXT_RESPONSE_TIMEOUT_SECONDS)
        except (TimeoutError, ConnectionError):
            pass
    return [
        int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", response_data) if status not in (b"100", b"400")
    ]


@pytest.fixture
def other_sandbox(api: httpx.Client) -> dict[str, Any]:
    return create_sandbox(api, name="other")


def check_requests(service: RawService) -> None:
    """Check that all requests that reached ``service`` are unambiguous, and that none is the hidden request."""
    for head in service.heads:
        assert CANONICAL_HEAD_PATTERN.fullmatch(head), head
        assert b"/hidden" not in head.partition(b"\r\n")[0], head
        field_names = [field.partition(b":")[0].lower() for field in head.split(b"\r\n")[1:-2]]
        length_fields = [name for name in field_names if name in (b"content-length", b"transfer-encoding")]
        assert len(length_fields) <= 1 and field_names.count(b"host") == 1, head
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        assert not length or int(length[1]) < 1 << 63, "many services use 64 bits for the length"


@pytest.mark.parametrize("variant", REQUEST_VARIANTS)
def test_a_hidden_request_does_not_reach_a_service(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    sandbox: dict[str, Any],
    other_sandbox: dict[str, Any],
    variant: str,
) -> None:
    with raw_service(memory_gateway, sandbox) as service, raw_service(memory_gateway, other_sandbox) as other_service:
        for number, victim in enumerate((sandbox, other_sandbox), 1):
            victim_host = make_port_host(victim, PORT)
            hidden_request = f"GET /hidden HTTP/1.1\r\nHost: {victim_host}\r\nX-API-Key: {EXEC_KEY}\r\n\r\n".encode()
            statuses = send_and_read_statuses(
                memory_gateway,
                build_request(REQUEST_VARIANTS[variant], make_port_host(sandbox, PORT), hidden_request, EXEC_KEY),
            )
            assert len(statuses) <= 1, "the gateway recognized more than one request"
            # No remaining bytes precede the request of the next client.
            assert api.get("/next", headers={"Host": make_port_host(sandbox, PORT)}).text == "ok"
            targets = [service.parse_request_target(each) for each in range(len(service.heads))]
            assert targets.count("/next") == number and len(targets) <= 2 * number, targets
            check_requests(service)
            assert other_service.heads == []


@pytest.mark.parametrize("variant", REQUEST_VARIANTS)
def test_a_hidden_request_does_not_reach_the_gateway(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], variant: str
) -> None:
    """The hidden request tries to remove the sandbox with an administrator's key."""
    hidden_request = f"DELETE /sandboxes/one HTTP/1.1\r\nHost: gateway\r\nX-API-Key: {ADMIN_KEY}\r\n\r\n".encode()
    with raw_service(memory_gateway, sandbox) as service:
        for host_name in ("gateway", make_port_host(sandbox, PORT)):
            assert (
                len(
                    send_and_read_statuses(
                        memory_gateway, build_request(REQUEST_VARIANTS[variant], host_name, hidden_request, ADMIN_KEY)
                    )
                )
                <= 1
            )
            assert api.get("/sandboxes/one").status_code == 200
        check_requests(service)


@pytest.mark.parametrize("end", [b"\nContent-Length: 0\n\n", b"\r\nContent-Length:\r\n 0\r\n\r\n"])
def test_leniently_parsed_requests_are_forwarded_in_canonical_form(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], other_sandbox: dict[str, Any], end: bytes
) -> None:
    """RFC 9112 allows servers to accept a bare LF as a line end and to unfold header lines, and the gateway does both.

    The bytes after such a request are a separate request, which needs its own key. Services never receive bare LFs or
    folded lines.
    """
    request_with_key = (
        f"POST / HTTP/1.1\r\nHost: {make_port_host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}".encode() + end
    )
    hidden_request = f"GET /hidden HTTP/1.1\r\nHost: {make_port_host(other_sandbox, PORT)}\r\n\r\n".encode()
    with raw_service(memory_gateway, sandbox) as service, raw_service(memory_gateway, other_sandbox) as other_service:
        assert send_and_read_statuses(memory_gateway, request_with_key + hidden_request) == [200, 403]
        check_requests(service)
        assert len(service.heads) == 1 and other_service.heads == []


def test_pipelined_requests_stay_separate(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    """Pipelining is allowed. Each request needs its own key, and has its own body and response."""
    own_headers = f"Host: {make_port_host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}\r\n"
    other_headers = f"Host: {make_port_host(other_sandbox, PORT)}\r\n"
    requests = [
        f"POST /1 HTTP/1.1\r\n{own_headers}Content-Length: 5\r\n\r\nfirst",
        f"GET /2 HTTP/1.1\r\n{other_headers}\r\n",
        f"POST /3 HTTP/1.1\r\n{own_headers}Transfer-Encoding: chunked\r\n\r\n5\r\nthird\r\n0\r\n\r\n",
        f"GET /4 HTTP/1.1\r\n{own_headers}\r\n",
    ]
    with raw_service(memory_gateway, sandbox) as service, raw_service(memory_gateway, other_sandbox) as other_service:
        assert send_and_read_statuses(memory_gateway, "".join(requests).encode()) == [200, 403, 200, 200]
        assert [head.split(b" ")[1] for head in service.heads] == [b"/1", b"/3", b"/4"]
        assert service.bodies == [b"first", b"third", b""]
        assert other_service.heads == []


def test_a_pipelined_request_is_not_in_the_previous_requests_plan_session(
    memory_gateway: MemoryGateway, api: httpx.Client
) -> None:
    with memory_gateway.client(ADMIN_KEY) as client:
        plan_id = client.post("/plans", json={"run": f"pipeline {secrets.token_hex(8)}"}).json()["planID"]
    body = b'{"templateID": "base", "name": "after-plan"}'
    head = f"Host: localhost\r\nX-API-Key: {ADMIN_KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    planned_request = f"POST /plans/{plan_id}/sandboxes HTTP/1.1\r\n".encode() + head + body
    real_request = b"POST /sandboxes HTTP/1.1\r\n" + head + body
    assert send_and_read_statuses(memory_gateway, planned_request + real_request) == [201, 201]
    assert not api.get("/sandboxes/after-plan").json()["sandboxID"].startswith(PLANNED_PREFIX)


def test_each_request_needs_its_own_key(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    request_with_key = f"GET /1 HTTP/1.1\r\nHost: {make_port_host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}\r\n\r\n"
    request_without_key = f"GET /2 HTTP/1.1\r\nHost: {make_port_host(sandbox, PORT)}\r\n\r\n"
    with raw_service(memory_gateway, sandbox) as service:
        assert send_and_read_statuses(
            memory_gateway, (request_with_key + request_without_key + request_with_key + request_without_key).encode()
        ) == [200, 403, 200, 403]
        assert [head.split(b" ")[1] for head in service.heads] == [b"/1", b"/1"]
