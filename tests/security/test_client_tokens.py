"""A client uses one sandbox's tokens for another sandbox's agent, code interpreter and other ports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from e2b.sandbox.signature import get_signature

from sandbox_gateway.api.access.ports import derive_port_token
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    RawService,
    make_port_headers,
    make_port_headers_with_host,
    make_request_head,
    raw_connection,
    raw_service,
    read_response,
)
from tests.support.memory_gateway import EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox

CODE_PORT = 49999
PORTS = (AGENT_PORT, CODE_PORT, PORT)
TOKEN_PLACES: dict[str, Callable[[str], dict[str, str]]] = {
    "X-Access-Token": lambda token: {"X-Access-Token": token},
    "E2B-Traffic-Access-Token": lambda token: {"E2B-Traffic-Access-Token": token},
    "Cube-Traffic-Access-Token": lambda token: {"Cube-Traffic-Access-Token": token},
    "X-API-Key": lambda token: {"X-API-Key": token},
    "Bearer": lambda token: {"Authorization": f"Bearer {token}"},
    "Basic": lambda token: {"Authorization": f"Basic {token}"},
    "Cookie": lambda token: {"Cookie": f"X-Access-Token={token}; e2b-traffic-access-token={token}"},
    "everywhere": lambda token: {
        "X-Access-Token": token,
        "E2B-Traffic-Access-Token": token,
        "Cube-Traffic-Access-Token": token,
        "X-API-Key": token,
        "Authorization": f"Bearer {token}",
    },
}
"""The places for a token in a request."""


def list_tokens(sandbox: dict[str, Any]) -> list[str]:
    envd_token: str = sandbox["envdAccessToken"]
    return [
        envd_token,
        sandbox["trafficAccessToken"],
        derive_port_token(envd_token, CODE_PORT),
        f"{envd_token},{envd_token}",
    ]


@contextlib.contextmanager
def guarded_ports(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> Iterator[None]:
    """Run a service on each of PORTS in ``sandbox``, and check at the end that none received a request."""
    with contextlib.ExitStack() as stack:
        services: list[RawService] = [
            stack.enter_context(raw_service(memory_gateway, sandbox, port=port)) for port in PORTS
        ]
        yield
        assert [service.heads for service in services] == [[], [], []]


@pytest.fixture
def other_sandbox(api: httpx.Client, sandbox: dict[str, Any]) -> dict[str, Any]:
    """A clone of ``sandbox``, so that the two differ as little as possible."""
    clone: dict[str, Any] = api.post("/sandboxes/one/clone", json={"names": ["other"]}).json()["sandboxes"][0]
    return clone


@pytest.mark.parametrize("place", TOKEN_PLACES)
@pytest.mark.parametrize("make_headers", [make_port_headers, make_port_headers_with_host], ids=["by header", "by host"])
def test_tokens_do_not_open_ports_of_another_sandbox(
    memory_gateway: MemoryGateway,
    keyless_client: httpx.Client,
    sandbox: dict[str, Any],
    other_sandbox: dict[str, Any],
    place: str,
    make_headers: Any,
) -> None:
    with guarded_ports(memory_gateway, other_sandbox):
        for token in list_tokens(sandbox):
            for port in PORTS:
                for path in ("/", "/files?path=/etc/shadow", "/identity", "/mounts", "/execute"):
                    headers = make_headers(other_sandbox, port, **TOKEN_PLACES[place](token))
                    for method in ("GET", "POST"):
                        assert keyless_client.request(method, path, headers=headers).status_code in (401, 403), (
                            port,
                            method,
                            path,
                        )
                query = urlencode({"token": token, "access_token": token, "x-access-token": token})
                assert keyless_client.get(f"/?{query}", headers=make_headers(other_sandbox, port)).status_code in (
                    401,
                    403,
                )


@pytest.mark.parametrize("port", PORTS)
def test_tokens_do_not_open_websockets_to_another_sandbox(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], other_sandbox: dict[str, Any], port: int
) -> None:
    upgrade_headers = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: " + "A" * 22 + "==",
    )
    with guarded_ports(memory_gateway, other_sandbox):
        for token in list_tokens(sandbox):
            request = make_request_head(
                "GET /",
                *upgrade_headers,
                **make_port_headers_with_host(other_sandbox, port),
                **TOKEN_PLACES["everywhere"](token),
            )
            with raw_connection(memory_gateway, request) as connection:
                assert read_response(connection)[0] in (401, 403)


def test_signed_urls_do_not_work_for_another_sandbox(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    with guarded_ports(memory_gateway, other_sandbox):
        for token in (*list_tokens(sandbox), READ_KEY):
            for operation, method in (("read", "GET"), ("write", "POST")):
                signature = get_signature("/x", operation, None, token)["signature"]
                for port in PORTS:
                    url = f"/files?path=/x&signature={signature}"
                    assert keyless_client.request(
                        method, url, headers=make_port_headers_with_host(other_sandbox, port)
                    ).status_code == (401 if port == AGENT_PORT else 403)


def test_requests_with_conflicting_names_reach_only_the_authorized_sandbox(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    token_header = {"X-Access-Token": sandbox["envdAccessToken"]}
    with guarded_ports(memory_gateway, other_sandbox), raw_service(memory_gateway, sandbox) as service:
        headers = make_port_headers(other_sandbox, PORT) | make_port_headers_with_host(sandbox, PORT) | token_header
        assert keyless_client.get("/", headers=headers).status_code == 200 and len(service.heads) == 1
        assert (
            keyless_client.get(
                "/",
                headers=make_port_headers(sandbox, PORT)
                | make_port_headers_with_host(other_sandbox, PORT)
                | token_header,
            ).status_code
            == 403
        )
        headers_of_both_sandboxes = (
            *make_port_headers(sandbox, PORT).items(),
            *make_port_headers(other_sandbox, PORT).items(),
        )
        repeated_headers = [*headers_of_both_sandboxes, *token_header.items()]
        keyless_client.get("/", headers=repeated_headers)
        keyless_client.get("/", headers=repeated_headers[::-1])


def test_tokens_stay_invalid_when_the_sandbox_name_is_reused(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    api.delete("/sandboxes/one")
    successor = create_sandbox(api, name="one")
    # The name of this sandbox is the id of the removed one.
    namesake = create_sandbox(api, name=sandbox["sandboxID"])
    for new_sandbox in (successor, namesake):
        with guarded_ports(memory_gateway, new_sandbox):
            for token in list_tokens(sandbox):
                for ref in (new_sandbox["sandboxID"], new_sandbox["name"], sandbox["sandboxID"], "one"):
                    for port in PORTS:
                        headers = make_port_headers({"sandboxID": ref}, port, **TOKEN_PLACES["everywhere"](token))
                        assert keyless_client.get("/", headers=headers).status_code in (401, 403, 502)


def test_tokens_do_not_grant_access_to_the_gateways_api(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    volume = api.post("/volumes", json={"name": "data"}).json()
    for token in (*list_tokens(sandbox), volume["token"]):
        for place in TOKEN_PLACES.values():
            for method, path in (("GET", "/sandboxes"), ("POST", "/sandboxes/one/exec"), ("DELETE", "/sandboxes/one")):
                assert keyless_client.request(method, path, headers=place(token)).status_code == 401
    assert api.get("/sandboxes/one").status_code == 200
    with guarded_ports(memory_gateway, sandbox):
        for place in TOKEN_PLACES.values():
            for port in PORTS:
                assert keyless_client.get(
                    "/", headers=make_port_headers(sandbox, port) | place(volume["token"])
                ).status_code in (401, 403)


def test_a_read_key_cannot_access_ports(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with guarded_ports(memory_gateway, sandbox):
        for place in TOKEN_PLACES.values():
            for port in PORTS:
                assert keyless_client.get(
                    "/", headers=make_port_headers(sandbox, port) | place(READ_KEY)
                ).status_code in (
                    401,
                    403,
                )


def test_the_same_requests_succeed_with_a_key(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    """Check that the attacks above fail because of their tokens, not because of their form."""
    for port in PORTS:
        with raw_service(memory_gateway, sandbox, port=port) as service:
            for make_headers in (make_port_headers, make_port_headers_with_host):
                assert (
                    keyless_client.get("/", headers=make_headers(sandbox, port, **{"X-API-Key": EXEC_KEY})).status_code
                    == 200
                )
            assert len(service.heads) == 2


def test_only_the_access_token_signs_a_url_with_the_gateways_address(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    """The gateway searches all sandboxes for the access token that signed a URL. It must not accept other secrets."""
    other_tokens = [token for each in (sandbox, other_sandbox) for token in list_tokens(each)[1:]]
    with guarded_ports(memory_gateway, sandbox), guarded_ports(memory_gateway, other_sandbox):
        for token in (*other_tokens, READ_KEY, EXEC_KEY, "", sandbox["sandboxID"], f":{sandbox['envdAccessToken']}"):
            for operation, method in (("read", "GET"), ("write", "POST")):
                signature = get_signature("/x", operation, None, token or "x")["signature"]
                for headers in ({}, *(place(sandbox["envdAccessToken"]) for place in TOKEN_PLACES.values())):
                    query = urlencode({"path": "/x", "signature": signature})
                    status = keyless_client.request(method, f"/files?{query}", headers=headers).status_code
                    assert status == 401, (method, token, headers)
    with guarded_ports(memory_gateway, other_sandbox), raw_service(memory_gateway, sandbox, port=AGENT_PORT) as agent:
        signature = get_signature("/x", "read", None, sandbox["envdAccessToken"])["signature"]
        query = urlencode({"path": "/x", "signature": signature})
        assert keyless_client.get(f"/files?{query}").status_code == 200 and len(agent.heads) == 1
        # Headers that name another sandbox, or another port of this one, are not combined with the signature.
        for port in PORTS:
            for make_headers in (make_port_headers, make_port_headers_with_host):
                response = keyless_client.get(f"/files?{query}", headers=make_headers(other_sandbox, port))
                assert response.status_code in (401, 403)
        assert len(agent.heads) == 1
