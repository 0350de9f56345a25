"""A client without a valid key attacks every route of the control plane."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from sandbox_gateway.api.access.auth import OPEN_PATHS
from tests.security.hostile import LoopMonitor
from tests.security.routes import (
    METHODS,
    OVERRIDE_HEADERS,
    SAMPLED_SPELLINGS,
    SPELLINGS,
    Caller,
    Target,
    list_route_templates,
    list_routes,
)
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.samples import mark_slow_except

INVALID_KEY_HEADERS: dict[str, dict[str, str]] = {
    "no key": {},
    "a wrong key": {"X-API-Key": "wrong-key-0123456789"},
    "an incomplete key": {"X-API-Key": ADMIN_KEY[:-1]},
    "a key with another digit": {"X-API-Key": f"{ADMIN_KEY}0"},
    "a key in capitals": {"X-API-Key": ADMIN_KEY.upper()},
    "two keys in one": {"X-API-Key": f"{ADMIN_KEY}, {ADMIN_KEY}"},
    "a key in another scheme": {"Authorization": f"Token {ADMIN_KEY}"},
    "a key as a cookie": {"Cookie": f"X-API-Key={ADMIN_KEY}"},
    "the name of a key": {"X-API-Key": "root"},
}


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The shared target. Checks that the attack has neither changed it nor reached any agent."""
    state_before = shared_target.read_state()
    yield shared_target
    assert shared_target.read_state() == state_before and shared_target.events == shared_target.agent_calls == []


def check_request_is_refused(target: Target, caller: Caller, method: str, request_target: str, **headers: str) -> None:
    status, body = caller.request(method, request_target, **headers)
    path = unquote(request_target.partition("?")[0])
    details = f"{method} {request_target} {headers}: {status} {body[:100]}"
    if path in OPEN_PATHS:
        assert status in (200, 405), details
    else:
        # 400: the server itself rejected an invalid request.
        assert status in (400, 401), details
    assert "one" not in body.split('"') and not any(secret in body for secret in target.secrets), details


def test_route_templates_include_every_router() -> None:
    templates = list_route_templates()
    assert len(templates) >= 50
    assert {("DELETE", "/sandboxes/{ref}"), ("POST", "/v2/sandboxes"), ("GET", "/openapi.json")} <= set(templates)
    assert {path for _, path in templates} >= OPEN_PATHS


@pytest.mark.parametrize("key", INVALID_KEY_HEADERS)
def test_requests_without_a_valid_key_have_no_effect(target: Target, key: str) -> None:
    caller = Caller(target.gateway, INVALID_KEY_HEADERS[key])
    for route in list_routes(target):
        for method in METHODS if key == "no key" else (route.method,):
            check_request_is_refused(target, caller, method, route.path)
    caller.close()


@pytest.mark.parametrize("spelling", mark_slow_except(SAMPLED_SPELLINGS, SPELLINGS))
def test_every_spelling_of_a_route_requires_a_key(target: Target, spelling: str) -> None:
    caller = Caller(target.gateway, {})
    for route in list_routes(target):
        check_request_is_refused(target, caller, route.method, SPELLINGS[spelling](route.path))
    caller.close()


def _format_header(header: dict[str, str]) -> str:
    return "=".join(next(iter(header.items())))


@pytest.mark.parametrize("header", mark_slow_except(OVERRIDE_HEADERS[::6], OVERRIDE_HEADERS), ids=_format_header)
def test_headers_cannot_be_used_instead_of_a_key(target: Target, header: dict[str, str]) -> None:
    caller = Caller(target.gateway, {})
    for route in list_routes(target):
        check_request_is_refused(target, caller, route.method, route.path, **header)
    caller.close()


@pytest.mark.parametrize("key", ["", ADMIN_KEY])
def test_bodies_of_tiny_chunks_do_not_delay_other_clients(memory_gateway: MemoryGateway, key: str) -> None:
    """Tens of thousands of chunks fit into a single read. On 20 connections, they once delayed `/health` by 19 s."""
    request_head = (
        f"POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    with (
        socket.create_connection(("127.0.0.1", memory_gateway.port), timeout=30) as connection,
        LoopMonitor(memory_gateway) as loop_monitor,
    ):
        connection.sendall(request_head + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        response_data = b""
        while b'"memory"' not in response_data:
            piece = connection.recv(65536)
            assert piece, response_data
            response_data += piece
    assert response_data.startswith(b"HTTP/1.1 40"), response_data
    assert loop_monitor.longest_block_seconds < 0.1
