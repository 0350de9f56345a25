"""What clients of a fleet try to get through a member."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import httpx
import pytest

from sandbox_gateway.fleet.store import Store
from tests.api.inside import make_port_headers
from tests.api.memory_gateway import ADMIN_KEY, READ_KEY
from tests.fleet.test_forwarding import Objects
from tests.fleet.world import FleetHost, World

Pair = tuple[FleetHost, FleetHost]


def test_a_client_cannot_hold_a_fork_back(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    started = time.monotonic()
    with one.client(ADMIN_KEY) as client:
        headers = {"X-Sandbox-Gateway-Hold": "0123456789abcdef"}
        client.post(f"/snapshots/{objects.names['snapshot']}/fork", json={}, headers=headers).raise_for_status()
    assert time.monotonic() - started < 15, "a held share waits for two minutes"


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


def test_names_that_do_not_exist_do_not_end_the_membership(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, anyone can make a gateway look for sandboxes."""
    one, two = world.start("h1", "h2")
    transactions: list[int] = []
    transact = Store.transact

    async def count_transaction(store: Store, *arguments: Any) -> Any:
        transactions.append(1)
        return await transact(store, *arguments)

    monkeypatch.setattr(Store, "transact", count_transaction)

    def flood(worker: int) -> int:
        with httpx.Client(base_url=one.gateway.url, timeout=60) as client:
            for number in range(100):
                headers = {"E2b-Sandbox-Id": f"nowhere-{worker}-{number}", "E2b-Sandbox-Port": "80"}
                assert client.get("/x", headers=headers).status_code == 403
        return 100

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        request_count = sum(pool.map(flood, range(16)))
    assert len(transactions) < request_count / 2, "names share requests to etcd"
    assert one.get("/fleet")["state"] == "joined" and two.list_running_members() == ["h1", "h2"]


def test_names_that_do_not_exist_are_answered_at_once_while_etcd_is_away(world: World) -> None:
    one, _ = world.start("h1", "h2")
    world.etcd.kill()
    with one.client() as client:
        client.get("/sandboxes/nowhere")  # notices that etcd is away
        started = time.monotonic()
        for number in range(5):
            assert client.get(f"/sandboxes/nowhere-{number}").status_code == 404
    assert time.monotonic() - started < 2
