"""Attacks of clients and strangers on the members of a fleet."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
from typing import Any

import httpx
import pytest

from sandbox_gateway.fleet.store import Store
from sandbox_gateway.server.connections import MAX_HANDSHAKES
from tests.fleet.world import FleetHost, Objects, World, connect_to_peer_listener
from tests.security.hostile import LoopMonitor, make_chunked_response
from tests.support.guest_services import PORT, make_port_headers, raw_service
from tests.support.memory_gateway import ADMIN_KEY, READ_KEY
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]


def test_a_client_cannot_hold_a_fork_back(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    started = time.monotonic()
    with one.client(ADMIN_KEY) as client:
        headers = {"X-Sandbox-Gateway-Hold": "0123456789abcdef"}
        client.post(f"/snapshots/{objects.names['snapshot']}/fork", json={}, headers=headers).raise_for_status()
    assert time.monotonic() - started < 60, "a held share waits for two minutes"


def test_a_client_cannot_use_the_part_of_a_plan_session(pair: Pair) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    for key in (ADMIN_KEY, READ_KEY):
        with one.client(key) as client:
            prefix = (
                f"/plans/{client.post('/plans', json={'run': f'the-run-of-an-attack-with-{key}'}).json()['planID']}"
            )
            client.patch(f"{prefix}/sandboxes/{name}", json={"metadata": {"a": "b"}}).raise_for_status()
        headers = {"X-Sandbox-Gateway-Part": '{"home": "", "host": "h2", "numbers": [[1, 60000]]}'}
        for host in pair:
            with host.client(key) as client:
                for path in ("part", "objects", "load", "claims"):
                    for method in ("GET", "POST", "DELETE"):
                        answer = client.request(
                            method, f"{prefix}/fleet/{path}", json={"refs": [name]}, headers=headers
                        )
                        assert answer.status_code == 404, (path, method, answer.text)
                # The header is ignored.
                shown = client.get(f"{prefix}/sandboxes/{name}", headers=headers).json()
                assert shown["metadata"] == {"a": "b"}


@pytest.mark.parametrize("path", ["/fleet/holds/0123456789abcdef", "/fleet/knows/sandbox/a", "/fleet/knows/transfer/a"])
def test_clients_cannot_use_the_paths_between_gateways(path: str, pair: Pair) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    for key in (ADMIN_KEY, READ_KEY):
        with one.client(key) as client:
            assert client.get(path).status_code == 404
            assert client.post(path).status_code == (404 if key == ADMIN_KEY else 403)
            # With the headers of a sandbox, the path belongs to a port of that sandbox.
            forwarded = client.get(path, headers=make_port_headers(sandbox))
            assert forwarded.status_code == (403 if key == READ_KEY else 200)
            assert ("frozen" in forwarded.text) == (key == ADMIN_KEY), "the agent of the test answers so"


def test_tiny_chunks_of_a_service_do_not_delay_the_clients_of_the_other_gateway(pair: Pair) -> None:
    """Thousands of them arrive in one read."""
    one, two = pair
    sandbox = Objects(two).sandbox
    service = raw_service(two.gateway, sandbox, make_chunked_response(*[b"x"] * 50_000))
    with service, one.client() as client, LoopMonitor(one.gateway) as loop_monitor:
        response = client.get("/", headers=make_port_headers(sandbox, PORT), timeout=100)
        assert response.text == "x" * 50_000
    assert loop_monitor.longest_block_seconds < 0.05, "a read usually takes a tenth of this, or four times as long"


@pytest.mark.usefixtures("real_times")
def test_names_that_do_not_exist_do_not_end_the_membership(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, anyone can make a gateway look for sandboxes."""
    one, two = world.start("h1", "h2")
    leases = {one.get_directory()._membership.lease}
    transactions: list[int] = []
    transact = Store.transact

    async def count_transaction(store: Store, *arguments: Any) -> Any:
        transactions.append(1)
        return await transact(store, *arguments)

    monkeypatch.setattr(Store, "transact", count_transaction)

    def flood(worker: int) -> int:
        with httpx.Client(base_url=one.gateway.url, timeout=120) as client:
            for number in range(100):
                headers = {"E2b-Sandbox-Id": f"nowhere-{worker}-{number}", "E2b-Sandbox-Port": "80"}
                assert client.get("/x", headers=headers).status_code == 403
        return 100

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        request_count = sum(pool.map(flood, range(16)))
    assert len(transactions) < request_count / 2, "names share requests to etcd"
    assert leases == {one.get_directory()._membership.lease}, "the membership has not ended"
    assert one.get("/fleet")["state"] == "joined" and two.list_running_members() == ["h1", "h2"]


@pytest.mark.usefixtures("real_times")
def test_names_that_do_not_exist_are_answered_at_once_while_etcd_is_away(world: World) -> None:
    one, _ = world.start("h1", "h2")
    world.etcd.stop_answering()
    with one.client() as client:
        client.get("/sandboxes/nowhere")  # notices that etcd is away
        started = time.monotonic()
        for number in range(10):
            assert client.get(f"/sandboxes/nowhere-{number}").status_code == 404
    assert time.monotonic() - started < 15, "waiting for etcd takes two seconds each time"
    world.etcd.answer_again()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


_HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


def test_strangers_cannot_occupy_the_listener_for_gateways(world: World) -> None:
    """The strangers have the address of the gateway, like the sandboxes of its host."""
    host = world.create_host("h1")
    host.server_settings = {"request_seconds": 10, "connections_per_address": 4}
    host.start()
    context = world.get_certificate("h1").create_client_context()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(MAX_HANDSHAKES + 20):
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", host.port), timeout=10)))
            if number % 2:
                connections[-1].sendall(b"\x16\x03\x01\x40\x00\x01")  # the beginning of a handshake
        for _ in range(8):
            assert connect_to_peer_listener(host, context, _HEALTH_REQUEST).startswith(b"HTTP/1.1 200")
        wait_until(lambda: [*map(_is_closed, connections)].count(False) <= MAX_HANDSHAKES)
        assert all(map(_is_closed, connections[:20])), "the oldest ones are closed"
        assert time.monotonic() - started < 10, "the others do not wait until their time is over"
        wait_until(lambda: all(map(_is_closed, connections)))


def test_connections_of_a_gateway_are_counted(world: World) -> None:
    host = world.create_host("h1")
    host.server_settings = {"connections_per_address": 4}
    host.start()
    context = world.get_certificate("h1").create_client_context()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", host.port), timeout=10))
            connection = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
            connection.sendall(_HEALTH_REQUEST.replace(b"close", b"keep-alive"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        try:
            response = connect_to_peer_listener(host, context, _HEALTH_REQUEST)
        except OSError:
            response = b""
        assert response == b"", "the fifth one is closed after its handshake"
    wait_until(lambda: connect_to_peer_listener(host, context, _HEALTH_REQUEST).startswith(b"HTTP/1.1 200"))
