"""A client manipulates host names and ports in requests to the data plane.

Its requests reach only the requested port of the sandbox that it may use, never a service on the host or in another
sandbox, nor the gateway itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from sandbox_gateway.api.data_plane.proxy import AddressFormats
from sandbox_gateway.errors import Invalid
from tests.support.guest_services import (
    PORT,
    RawService,
    Service,
    get_machine_address,
    make_request_head,
    raw_connection,
    raw_service,
    read_response,
)
from tests.support.memory_gateway import EXEC_KEY, MemoryGateway, create_sandbox

KEY = f"X-API-Key: {EXEC_KEY}"
HOST_PORT = 47114


@pytest.fixture
def other_sandbox(api: httpx.Client) -> dict[str, Any]:
    return create_sandbox(api, name="other")


@contextlib.contextmanager
def guarded_services(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> Iterator[RawService]:
    """Run a service in ``sandbox`` that may receive requests, and three others that must not receive any."""
    host_service = RawService()
    with (
        raw_service(memory_gateway, sandbox) as service,
        raw_service(memory_gateway, sandbox, port=PORT + 1) as next_port_service,
        raw_service(memory_gateway, other_sandbox) as other_service,
        Service("127.0.0.1", HOST_PORT, host_service.listen),
    ):
        yield service
        assert (
            host_service.connection_count == next_port_service.connection_count == other_service.connection_count == 0
        )


def list_hostile_hosts(sandbox_id: str, other_id: str, other_address: str, gateway_port: int) -> list[str]:
    valid_host = f"{PORT}-{sandbox_id}.sandbox.local"
    return [
        *(f"{HOST_PORT}-127.0.0.1.sandbox.local", f"{HOST_PORT}-localhost.sandbox.local", f"127.0.0.1:{HOST_PORT}"),
        *(
            f"{gateway_port}-{sandbox_id}.sandbox.local",
            f"localhost:{gateway_port}",
            f"{PORT}-{other_address}.sandbox.local",
            f"{other_address}:{PORT}",
        ),
        *(
            f"{valid_host}@127.0.0.1:{HOST_PORT}",
            f"127.0.0.1:{HOST_PORT}@{valid_host}",
            f"user:pass@{valid_host}",
            f"{valid_host}#@127.0.0.1",
        ),
        *(
            f"{valid_host}.127.0.0.1.nip.io",
            f"{valid_host}.evil.example",
            f"evil.{valid_host}",
            f"{valid_host}/../{other_id}",
            f"{valid_host}%2e",
            "[::1]",
        ),
        *(
            f"[::ffff:127.0.0.1]:{HOST_PORT}",
            f"[{valid_host}]",
            f"{valid_host}:",
            f"{valid_host}:{HOST_PORT}0",
            f"{valid_host}:x",
            f"{valid_host}:-1",
        ),
        *(
            f"{valid_host}..",
            f".{valid_host}",
            f"{PORT}-{sandbox_id}..sandbox.local",
            f"{PORT}--{sandbox_id}.sandbox.local",
            f"{PORT}_{sandbox_id}.sandbox.local",
        ),
        *(
            f"{PORT}-{sandbox_id},{PORT}-{other_id}.sandbox.local",
            f"{PORT}-{sandbox_id} {other_id}.sandbox.local",
            f"{valid_host},{valid_host}",
            f"{valid_host} x",
        ),
        *(
            f"{PORT + 1}, {PORT}-{sandbox_id}.sandbox.local",
            f"-{PORT}-{sandbox_id}.sandbox.local",
            f"+{PORT}-{sandbox_id}.sandbox.local",
        ),
        *(
            f"0x{PORT:x}-{sandbox_id}.sandbox.local",
            f"{PORT}.0-{sandbox_id}.sandbox.local",
            f"{PORT}e0-{sandbox_id}.sandbox.local",
        ),
        *(
            f"0-{sandbox_id}.sandbox.local",
            f"65536-{sandbox_id}.sandbox.local",
            f"{65536 + PORT}-{sandbox_id}.sandbox.local",
            f"-1-{sandbox_id}.sandbox.local",
        ),
        *(
            f"{2**32 + PORT}-{sandbox_id}.sandbox.local",
            f"{2**64 + PORT}-{sandbox_id}.sandbox.local",
            "9" * 5000 + f"-{sandbox_id}.sandbox.local",
        ),
        *(
            f"{PORT}-{sandbox_id[:-1]}.sandbox.local",
            f"{PORT}-{sandbox_id}0.sandbox.local",
            f"{PORT}-%6fne.sandbox.local",
            f"{PORT}-*.sandbox.local",
        ),
        *(
            f"{PORT}-.sandbox.local",
            f"{PORT}-{'a' * 60_000}.sandbox.local",
            "sandbox.local",
            ".sandbox.local",
            "-.sandbox.local",
            "",
        ),
        *(
            f"{PORT}-{sandbox_id}.sandbox.local\x0b",
            f"{PORT}-{sandbox_id}\xad.sandbox.local",
            f"{PORT}-\xb2{sandbox_id}.sandbox.local",
        ),
    ]


def test_host_names_reach_only_their_own_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    host_names = list_hostile_hosts(
        sandbox["sandboxID"],
        other_sandbox["sandboxID"],
        get_machine_address(memory_gateway, other_sandbox),
        memory_gateway.port,
    )
    with guarded_services(memory_gateway, sandbox, other_sandbox) as service:
        for name in host_names:
            request = f"GET / HTTP/1.1\r\nHost: {name}\r\n{KEY}\r\n\r\n".encode("latin-1")
            with raw_connection(memory_gateway, request) as connection:
                status = read_response(connection)[0]
            assert status in (400, 404, 502), (name[:100], status)
        assert service.connection_count == 0
        # The sandbox's own names work in all spellings that DNS allows.
        valid_host = f"{PORT}-{sandbox['sandboxID']}.sandbox.local"
        for count, name in enumerate(
            (valid_host, valid_host.upper(), f"{valid_host}.", f"{valid_host}:8700", f"{valid_host}.:443"), 1
        ):
            with raw_connection(memory_gateway, make_request_head("GET /", f"Host: {name}", KEY)) as connection:
                assert read_response(connection)[0] == 200, name
            assert len(service.heads) == count
            host_header = service.parse_request_headers()["host"]
            assert host_header == name


@pytest.mark.parametrize("forged_part", ["ref", "port"])
def test_headers_reach_only_their_own_sandbox(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    sandbox: dict[str, Any],
    other_sandbox: dict[str, Any],
    forged_part: str,
) -> None:
    id, other_address = sandbox["sandboxID"], get_machine_address(memory_gateway, other_sandbox)
    refs = [
        *(
            "127.0.0.1",
            "localhost",
            other_address,
            f"{other_address}:{PORT}",
            f"{id}@{other_address}",
            f"{id}#",
            f"{id}/../{id}",
            "../one",
        ),
        *(
            f"{id}, {other_sandbox['sandboxID']}",
            f"{id};",
            "%6f%6e%65",
            f"{id}.",
            "*",
            ".",
            "..",
            "-",
            "a" * 129,
            "[::1]",
            "\xe9",
        ),
        *("http://127.0.0.1", f"//{other_address}", f"{id}\\", f"{id}?", f"{id}\x7f"),
    ]
    ports = [
        *("0", "65536", str(65536 + PORT), str(2**32 + PORT), "-1", f"+{PORT}", f"{PORT}.0", f"{PORT}e0", hex(PORT)),
        *(
            f"{PORT},{PORT}",
            f"{PORT} {PORT}",
            f"{PORT};",
            f"{PORT}@127.0.0.1:{HOST_PORT}",
            "",
            "x",
            "\xb2",
            f"{PORT}/x",
        ),
        *("0" * 5 + str(PORT), "9" * 5000, f"{PORT}#", f"{PORT}\\"),
    ]
    pairs = [(ref, str(PORT)) for ref in refs] if forged_part == "ref" else [(id, port) for port in ports]
    with guarded_services(memory_gateway, sandbox, other_sandbox) as service:
        for ref, port in pairs:
            headers = ("Host: gateway", f"E2b-Sandbox-Id: {ref}", f"E2b-Sandbox-Port: {port}", KEY)
            with raw_connection(memory_gateway, make_request_head("GET /", *headers)) as connection:
                assert read_response(connection)[0] in (400, 502), (ref, port)
        assert service.connection_count == 0
        headers = ("Host: gateway", f"E2b-Sandbox-Id: {id}", f"E2b-Sandbox-Port: {PORT}", KEY)
        with raw_connection(memory_gateway, make_request_head("GET /", *headers)) as connection:
            assert read_response(connection)[0] == 200


def test_host_ports_are_not_sandbox_ports(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    with guarded_services(memory_gateway, sandbox, other_sandbox):
        for port in (HOST_PORT, memory_gateway.port, 22):
            response = api.get("/health", headers={"Host": f"{port}-one.sandbox.local"})
            assert response.status_code == 502 and "nothing is listening" in response.json()["message"]


def test_request_targets_reach_only_their_own_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any], other_sandbox: dict[str, Any]
) -> None:
    """A request target that names a host is rejected, or forwarded unchanged as a path."""
    host_header = f"Host: {PORT}-{sandbox['sandboxID']}.sandbox.local"
    other_host = f"{PORT}-{other_sandbox['sandboxID']}.sandbox.local"
    with guarded_services(memory_gateway, sandbox, other_sandbox) as service:
        for target in (
            *(
                f"http://127.0.0.1:{HOST_PORT}/",
                f"http://{other_host}/",
                f"https://{other_host}/",
                f"{other_host}:80",
                "*",
            ),
            *(f"@{other_host}/", f"127.0.0.1:{HOST_PORT}", "file:///etc/passwd", "unix:/run/x", "?x", "#x"),
        ):
            with raw_connection(memory_gateway, make_request_head(f"GET {target}", host_header, KEY)) as connection:
                assert read_response(connection)[0] in (400, 501), target
        assert service.connection_count == 0
        for count, target in enumerate(
            (f"//127.0.0.1:{HOST_PORT}/", f"/@{other_host}/", "/../../x", "/\\\\x", "/http://x"), 1
        ):
            with raw_connection(memory_gateway, make_request_head(f"GET {target}", host_header, KEY)) as connection:
                assert read_response(connection)[0] == 200
            assert len(service.heads) == count and service.parse_request_target() == target, (
                "the target is forwarded unchanged as a path"
            )


_host_name_strategy = st.text("0123456789abcdef-.:@[]%/ \tSANDBOXsandboxlcal", max_size=60) | st.builds(
    "{}-{}.{}{}".format,
    st.integers(-10, 1 << 40) | st.text(max_size=5),
    st.text(max_size=20),
    st.sampled_from(["sandbox.local", "SANDBOX.LOCAL", "sandbox.local.", "sandboxalocal", "local", "x.sandbox.local"]),
    st.sampled_from(["", ":1", ":99999", ":", ":x", "@x", "/", "."]),
)


@given(_host_name_strategy)
@example("3000-one.sandbox.local")
@example("65535-one.sandbox.local.:443")
@settings(max_examples=500, deadline=None)
def test_sandbox_host_names_are_parsed_unambiguously(name: str) -> None:
    raw_name = name.encode("utf-8").decode("latin-1")
    headers = Headers(raw=[(b"host", raw_name.encode("latin-1"))])
    try:
        address = AddressFormats("sandbox.local").find_target(headers, "/")
    except Invalid:
        return
    if address is None:
        return
    assert 1 <= address.port <= 65535 and address.is_named_by_host
    first_label, _, domain_and_port = raw_name.lower().partition(".")
    assert (
        domain_and_port.rpartition(":")[0].rstrip(".") == "sandbox.local"
        or domain_and_port.rstrip(".") == "sandbox.local"
    )
    port, _, ref = first_label.partition("-")
    assert (int(port), ref) == (address.port, address.ref) and "." not in address.ref
