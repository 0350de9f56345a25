"""A client hides a second request inside a request. The hidden request has no effect anywhere.

Each form is a request that different servers parse differently. A server inside a sandbox records the requests that it
receives, and the tests check that they are unambiguous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.api.inside import PORT, RawService, host, raw_connection, raw_service
from tests.api.memory_gateway import ADMIN_KEY, EXEC_KEY, MemoryGateway
from tests.api.test_sandboxes import create_sandbox

FIRST_SECONDS, QUIET_SECONDS = 2, 0.25
"""Timeouts of the first response and of the others. They are short, because some forms are incomplete requests."""
CHUNKED = b"Transfer-Encoding: chunked"
CANONICAL = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[\t -~\x80-\xff]*\r\n)+\r\n")
"""A head that all servers parse in the same way, without bare line ends, folded lines and control characters."""


@dataclass(frozen=True)
class Form:
    """A template of an ambiguous request.

    ``first``: the request line; ``fields``: the headers other than Host and the key; ``body``: contains HIDDEN, a
    placeholder for the hidden request.
    """

    fields: tuple[bytes, ...]
    body: bytes = b"HIDDEN"
    first: bytes = b"POST / HTTP/1.1"
    end: bytes = b"\r\n"
    raw: bytes = b""
    """The whole request, which replaces the other attributes. FIELDS stands for Host and key."""


def make_chunked_form(*fields: bytes, body: bytes = b"0\r\n\r\nHIDDEN") -> Form:
    """Return a form whose body ends before HIDDEN according to its chunks, but after HIDDEN according to its length."""
    return Form((*fields, b"Content-Length: LENGTH"), body)


def make_body_form(*fields: bytes, body: bytes = b"HIDDEN") -> Form:
    return Form(fields, body)


def make_length_form(*fields: bytes) -> Form:
    """Return a form with an unusual length. A server that ignores the length takes HIDDEN for the next request."""
    return Form(fields, b"HIDDEN")


FORMS: dict[str, Form] = {
    # Two lengths.
    "CL.TE": make_chunked_form(CHUNKED),
    "TE.CL": Form((CHUNKED, b"Content-Length: 4"), b"5c\r\nHIDDEN\r\n0\r\n\r\n"),
    "TE before CL": Form((CHUNKED, b"Content-Length: LENGTH"), b"0\r\n\r\nHIDDEN"),
    "CL twice, small first": make_length_form(b"Content-Length: 0", b"Content-Length: LENGTH"),
    "CL twice, small last": make_length_form(b"Content-Length: LENGTH", b"Content-Length: 0"),
    "CL in a list": make_length_form(b"Content-Length: 0, LENGTH"),
    "CL in a list, reversed": make_length_form(b"Content-Length: LENGTH, 0"),
    # Invalid lengths.
    "CL with a plus": make_length_form(b"Content-Length: +0"),
    "CL below zero": make_length_form(b"Content-Length: -1"),
    "CL minus zero": make_length_form(b"Content-Length: -0"),
    "CL in hex": make_length_form(b"Content-Length: 0x0"),
    "CL with a fraction": make_length_form(b"Content-Length: 0.0"),
    "CL with an exponent": make_length_form(b"Content-Length: 0e9"),
    "CL with a space inside": make_length_form(b"Content-Length: 0 5"),
    "CL with an underscore": make_length_form(b"Content-Length: 0_0"),
    "CL empty": make_length_form(b"Content-Length: "),
    "CL in other digits": make_length_form("Content-Length: \u0660".encode()),
    "CL superscript": make_length_form(b"Content-Length: \xb2"),
    "CL beyond 64 bits": make_length_form(b"Content-Length: 18446744073709551616"),
    "CL of thousands of digits": make_length_form(b"Content-Length: " + b"0" * 5000),
    "CL with a NUL": make_length_form(b"Content-Length: 0\x00"),
    "CL with a vertical tab": make_length_form(b"Content-Length: \x0b0"),
    # Invalid names.
    "TE, a space before the colon": make_chunked_form(b"Transfer-Encoding : chunked"),
    "TE, a tab before the colon": make_chunked_form(b"Transfer-Encoding\t: chunked"),
    "TE after a NUL": make_chunked_form(b"Transfer\x00-Encoding: chunked"),
    "TE after a space": make_chunked_form(b" Transfer-Encoding: chunked"),
    "TE with a form feed": make_chunked_form(b"\x0cTransfer-Encoding: chunked"),
    "TE folded": make_chunked_form(b"X: 1\r\n Transfer-Encoding: chunked"),
    "TE, its value folded": make_chunked_form(b"Transfer-Encoding:\r\n chunked"),
    "a header without a colon": make_chunked_form(b"Transfer-Encoding chunked"),
    "an empty name": make_chunked_form(b": chunked"),
    # Invalid encodings, or several.
    "TE twice": make_chunked_form(CHUNKED, b"Transfer-Encoding: identity"),
    "TE twice, chunked last": make_chunked_form(b"Transfer-Encoding: identity", CHUNKED),
    "TE identity": make_chunked_form(b"Transfer-Encoding: identity"),
    "TE in a list": make_chunked_form(b"Transfer-Encoding: identity, chunked"),
    "TE gzip and chunked": make_chunked_form(b"Transfer-Encoding: gzip, chunked"),
    "TE chunked twice": make_chunked_form(b"Transfer-Encoding: chunked, chunked"),
    "TE with a comma": make_chunked_form(b"Transfer-Encoding: chunked,"),
    "TE in capitals": make_chunked_form(b"Transfer-Encoding: CHUNKED"),
    "TE quoted": make_chunked_form(b'Transfer-Encoding: "chunked"'),
    "TE with a parameter": make_chunked_form(b"Transfer-Encoding: chunked;q=1"),
    "TE misspelled": make_chunked_form(b"Transfer-Encoding: xchunked"),
    "TE after a vertical tab": make_chunked_form(b"Transfer-Encoding: \x0bchunked"),
    "TE with a NUL": make_chunked_form(b"Transfer-Encoding: chunked\x00"),
    "TE alone, misspelled": make_length_form(b"Transfer-Encoding: xchunked"),
    "TE alone, identity": make_length_form(b"Transfer-Encoding: identity"),
    "TE alone, twice": Form((CHUNKED, CHUNKED), b"0\r\n\r\nHIDDEN"),
    "TE of HTTP/1.0": Form((CHUNKED,), b"1\r\nx\r\n0\r\n\r\nHIDDEN", first=b"POST / HTTP/1.0"),
    # Invalid chunks.
    "chunk of negative size": make_body_form(CHUNKED, body=b"-1\r\nHIDDEN\r\n0\r\n\r\n"),
    "chunk with 0x": make_body_form(CHUNKED, body=b"0x0\r\n\r\nHIDDEN"),
    "chunk with a plus": make_body_form(CHUNKED, body=b"+0\r\n\r\nHIDDEN"),
    "chunk size after a space": make_body_form(CHUNKED, body=b" 0\r\n\r\nHIDDEN"),
    "chunk with an underscore": make_body_form(CHUNKED, body=b"0_0\r\n\r\nHIDDEN"),
    "chunk beyond 64 bits": make_body_form(CHUNKED, body=b"1" + b"0" * 16 + b"\r\nHIDDEN\r\n0\r\n\r\n"),
    "chunk of 20 digits": make_body_form(CHUNKED, body=b"0" * 21 + b"\r\n\r\nHIDDEN"),
    "chunk ended by LF": make_body_form(CHUNKED, body=b"0\n\nHIDDEN"),
    "chunk ended by CR": make_body_form(CHUNKED, body=b"0\r\rHIDDEN"),
    "chunk longer than its size": make_body_form(CHUNKED, body=b"1\r\nxHIDDEN\r\n0\r\n\r\n"),
    "chunk without an end": make_body_form(CHUNKED, body=b"1\r\nx0\r\n\r\nHIDDEN"),
    "an extension with LF": make_body_form(CHUNKED, body=b"1;a\n0\r\n\r\nHIDDEN"),
    "an extension with CR": make_body_form(CHUNKED, body=b"1;a\rb\r\nx\r\n0\r\n\rHIDDEN"),
    "an extension with a request": make_body_form(CHUNKED, body=b"1;ONELINE\r\nx\r\n0\r\n\r\n"),
    "a huge extension": make_body_form(CHUNKED, body=b"1;" + b"a" * 200_000 + b"\r\nx\r\n0\r\n\r\nHIDDEN"),
    "a request as trailers": make_body_form(CHUNKED, body=b"0\r\nHIDDEN"),
    "a length as a trailer": make_body_form(CHUNKED, body=b"1\r\nx\r\n0\r\nContent-Length: 0\r\nX: HIDDEN"),
    # Line ends.
    "LF alone": Form((), raw=b"POST / HTTP/1.1\nFIELDSLF\nContent-Length: LENGTH\n\nHIDDEN"),
    "CR alone in a header": Form((b"X: 1\rContent-Length: 0\r\rHIDDENLF",), b""),
    "a request in a header": Form((b"X: 1\r\n\x00\r\nHIDDENLF",), b""),
    "empty lines before": Form(
        (b"Content-Length: LENGTH",), raw=b"\r\n\n\r\nPOST / HTTP/1.1\r\nFIELDS\r\nContent-Length: LENGTH\r\n\r\nHIDDEN"
    ),
    # Request lines.
    "a request in the first line": Form((b"Content-Length: 0",), b"", first=b"GET /?ONELINE HTTP/1.1"),
    "two first lines": Form((b"Content-Length: 0",), b"", first=b"GET / HTTP/1.1\r\nGET /hidden HTTP/1.1"),
    "spaces in the target": Form((b"Content-Length: 0",), b"", first=b"GET / HTTP/1.1 /hidden HTTP/1.1"),
    "LF in the target": Form((b"Content-Length: 0",), b"", first=b"GET /\nGET /hidden HTTP/1.1"),
    "CR in the target": Form((b"Content-Length: 0",), b"", first=b"GET /\rGET\r/hidden HTTP/1.1"),
    "NUL in the target": Form((b"Content-Length: 0",), b"", first=b"GET /\x00/hidden HTTP/1.1"),
    "encoded lines in the target": Form(
        (b"Content-Length: 0",), b"", first=b"GET /%20HTTP/1.1%0d%0aHost:%20x%0d%0a%0d%0aGET%20/hid%64en HTTP/1.1"
    ),
    "a huge target": Form((b"Content-Length: 0",), b"HIDDEN", first=b"GET /" + b"a" * 300_000 + b" HTTP/1.1"),
    "HTTP/0.9": Form((), raw=b"GET /\r\nHIDDEN"),
    "HTTP/1.0 with keep-alive": Form((b"Connection: keep-alive", b"Content-Length: LENGTH"), first=b"POST / HTTP/1.0"),
    "HTTP/2.0": Form((b"Content-Length: LENGTH",), first=b"POST / HTTP/2.0"),
    "HTTP/1.1 in lower case": Form((b"Content-Length: LENGTH",), first=b"POST / http/1.1"),
    "HTTP/2's preface": Form((), raw=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nHIDDEN"),
    # Methods without a body, and protocol upgrades.
    "GET with a body": Form((b"Content-Length: LENGTH",), first=b"GET / HTTP/1.1"),
    "HEAD with a body": Form((b"Content-Length: LENGTH",), first=b"HEAD / HTTP/1.1"),
    "CONNECT with a body": Form((b"Content-Length: LENGTH",), first=b"CONNECT / HTTP/1.1"),
    "upgrade with a body": Form((b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: LENGTH")),
    "upgrade to an unknown protocol": Form((b"Connection: upgrade", b"Upgrade: x", b"Content-Length: LENGTH")),
    "a WebSocket with a body": Form(
        (b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 12", b"Content-Length: LENGTH"),
        first=b"GET / HTTP/1.1",
    ),
    "lengths as connection headers": Form(
        (b"Connection: Content-Length, Host, Transfer-Encoding", b"Content-Length: LENGTH")
    ),
    "a body after 100-continue": Form((b"Expect: 100-continue", b"Content-Length: LENGTH")),
    "a body with an unknown expectation": Form((b"Expect: 200-ok", b"Content-Length: LENGTH")),
}


def build_request(form: Form, host_name: str, hidden: bytes, key: str) -> bytes:
    host_and_key = [f"Host: {host_name}".encode(), f"X-API-Key: {key}".encode()]
    first_line = hidden.partition(b"\r\n")[0]
    body = form.body.replace(b"HIDDEN", hidden)
    # If the first chunk contains HIDDEN, set its correct length.
    body = re.sub(rb"^5c\r\n", b"%x\r\n" % len(hidden), body)
    request = form.raw or b"\r\n".join([form.first, *host_and_key, *form.fields, b"", b""]) + body
    request = request.replace(b"FIELDSLF", b"\n".join(host_and_key)).replace(b"FIELDS", b"\r\n".join(host_and_key))
    request = request.replace(b"HIDDENLF", hidden.replace(b"\r\n", b"\n")).replace(b"HIDDEN", hidden)
    length = len(hidden) if form.raw else len(body)
    return request.replace(b"ONELINE", first_line).replace(b"LENGTH", str(length).encode())


def send_and_read_statuses(memory_gateway: MemoryGateway, data: bytes) -> list[int]:
    """Send ``data`` and return the statuses of the responses, omitting 100 and 400."""
    response_data = b""
    with raw_connection(memory_gateway) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(FIRST_SECONDS)
            while piece := connection.recv(65536):
                response_data += piece
                connection.settimeout(QUIET_SECONDS)
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
        assert CANONICAL.fullmatch(head), head
        assert b"/hidden" not in head.partition(b"\r\n")[0], head
        names = [field.partition(b":")[0].lower() for field in head.split(b"\r\n")[1:-2]]
        lengths = [name for name in names if name in (b"content-length", b"transfer-encoding")]
        assert len(lengths) <= 1 and names.count(b"host") == 1, head
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        assert not length or int(length[1]) < 1 << 63, "many services use 64 bits for the length"


@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_request_does_not_reach_a_service(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any], form: str
) -> None:
    with raw_service(memory_gateway, sandbox) as service, raw_service(memory_gateway, other_sandbox) as other_service:
        for number, victim in enumerate((sandbox, other_sandbox), 1):
            hidden = f"GET /hidden HTTP/1.1\r\nHost: {host(victim, PORT)}\r\nX-API-Key: {EXEC_KEY}\r\n\r\n".encode()
            statuses = send_and_read_statuses(
                memory_gateway, build_request(FORMS[form], host(sandbox, PORT), hidden, EXEC_KEY)
            )
            assert len(statuses) <= 1, "the gateway recognized more than one request"
            # No remaining bytes precede the request of the next client.
            assert api.get("/next", headers={"Host": host(sandbox, PORT)}).text == "ok"
            targets = [service.request_target(each) for each in range(len(service.heads))]
            assert targets.count("/next") == number and len(targets) <= 2 * number, targets
            check_requests(service)
            assert other_service.heads == []


@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_request_does_not_reach_the_gateway(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], form: str
) -> None:
    """The hidden request tries to remove the sandbox with an administrator's key."""
    hidden = f"DELETE /sandboxes/one HTTP/1.1\r\nHost: gateway\r\nX-API-Key: {ADMIN_KEY}\r\n\r\n".encode()
    with raw_service(memory_gateway, sandbox) as service:
        for host_name in ("gateway", host(sandbox, PORT)):
            assert (
                len(send_and_read_statuses(memory_gateway, build_request(FORMS[form], host_name, hidden, ADMIN_KEY)))
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
    request_with_key = f"POST / HTTP/1.1\r\nHost: {host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}".encode() + end
    hidden = f"GET /hidden HTTP/1.1\r\nHost: {host(other_sandbox, PORT)}\r\n\r\n".encode()
    with raw_service(memory_gateway, sandbox) as service, raw_service(memory_gateway, other_sandbox) as other_service:
        assert send_and_read_statuses(memory_gateway, request_with_key + hidden) == [200, 403]
        check_requests(service)
        assert len(service.heads) == 1 and other_service.heads == []


def test_pipelined_requests_stay_separate(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    """Pipelining is allowed. Each request needs its own key, and has its own body and response."""
    own_headers = f"Host: {host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}\r\n"
    other_headers = f"Host: {host(other_sandbox, PORT)}\r\n"
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


def test_each_request_needs_its_own_key(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    request_with_key = f"GET /1 HTTP/1.1\r\nHost: {host(sandbox, PORT)}\r\nX-API-Key: {EXEC_KEY}\r\n\r\n"
    request_without_key = f"GET /2 HTTP/1.1\r\nHost: {host(sandbox, PORT)}\r\n\r\n"
    with raw_service(memory_gateway, sandbox) as service:
        assert send_and_read_statuses(
            memory_gateway, (request_with_key + request_without_key + request_with_key + request_without_key).encode()
        ) == [200, 403, 200, 403]
        assert [head.split(b" ")[1] for head in service.heads] == [b"/1", b"/1"]
