"""Tests for the limits on connections, and for reserving file descriptors for essential work."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sandbox_gateway.api.metrics import Metrics
from sandbox_gateway.config import Config, Server
from sandbox_gateway.server import connections
from sandbox_gateway.server.connections import Connections, CountedSocket

UNLIMITED = resource.RLIM_INFINITY


def make_connections(limit: int = 10, **server_options: Any) -> Connections:
    return Connections(Server.model_validate(server_options), limit, Metrics(cast(Any, None)))


@pytest.fixture
def sockets() -> Iterator[list[CountedSocket]]:
    """The sockets of connections that have been admitted. They are closed after the test."""
    sockets: list[CountedSocket] = []
    yield sockets
    for each in sockets:
        each.close()


def admit_connections(server_connections: Connections, sockets: list[CountedSocket], *addresses: str) -> list[bool]:
    """Return which connections are admitted. Their sockets are added to ``sockets``."""

    async def admit_all() -> list[bool]:
        results = []
        for number, address in enumerate(addresses):
            connection = CountedSocket()
            results.append(server_connections.admit(connection, (address, number)))
            if results[-1]:
                sockets.append(connection)
            else:
                connection.close()
        return results

    return asyncio.run(admit_all())


def test_connections_are_limited_per_address_and_in_total(sockets: list[CountedSocket]) -> None:
    server_connections = make_connections(4, connections_per_address=2)
    addresses = [*["192.0.2.1"] * 3, *["192.0.2.2"] * 3, "192.0.2.3"]
    results = admit_connections(server_connections, sockets, *addresses)
    assert results == [True, True, False] * 2 + [False]
    sockets[0].close()
    assert admit_connections(server_connections, sockets, "192.0.2.3") == [True] and len(server_connections) == 4


def test_the_limit_per_address_can_be_disabled(sockets: list[CountedSocket]) -> None:
    server_connections = make_connections(4, connections_per_address=0)
    assert admit_connections(server_connections, sockets, *["192.0.2.1"] * 5) == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("first_address", "second_address", "is_same_client"),
    [
        ("2001:db8::1", "2001:db8::ffff:1:2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_ipv6_clients_are_counted_by_network(
    first_address: str, second_address: str, is_same_client: bool, sockets: list[CountedSocket]
) -> None:
    """IPv6 clients in the same /64 count as one, because a client usually has a whole /64."""
    server_connections = make_connections(connections_per_address=1)
    results = admit_connections(server_connections, sockets, first_address, second_address)
    assert results == [True, not is_same_client]


@pytest.mark.parametrize(
    ("limits", "new_limit", "max_connections"),
    [
        ((1024, 1 << 20), 4096 * 2 + 256 + 24 * 1000, 4096),
        ((1 << 20, 1 << 20), None, 4096),
        ((1024, UNLIMITED), 4096 * 2 + 256 + 24 * 1000, 4096),
        ((UNLIMITED, UNLIMITED), None, 4096),
        ((1024, 1024), None, 256),
        ((256, 20_000), 20_000, 4096),
    ],
)
def test_descriptors_are_reserved(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], new_limit: int | None, max_connections: int
) -> None:
    """If the process may open only a few descriptors, half of them are reserved."""
    new_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, pair: new_limits.append(pair))
    assert connections.reserve_descriptors(Config()) == max_connections
    assert new_limits == ([(new_limit, limits[1])] if new_limit else [])
