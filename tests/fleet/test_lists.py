"""Lists and events of all hosts."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.fleet import merging
from sandbox_gateway.fleet.peers import Peers
from tests.fleet.world import FleetHost, World
from tests.support.memory_gateway import READ_KEY
from tests.support.waiting import wait_until


def _fill(hosts: list[FleetHost], count: int) -> list[str]:
    """Create sandboxes on alternating hosts, and return their names, oldest first."""
    names = [f"s{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        host = hosts[number % len(hosts)]
        host.post("/sandboxes", {"templateID": "base", "name": name})
    return names


def _read_pages(client: httpx.Client, path: str, **query: Any) -> list[Any]:
    items, token, pages = [], "", 0
    while pages == 0 or token:
        response = client.get(path, params={**query, **({"nextToken": token} if token else {})})
        assert response.status_code == 200, response.text
        page = response.json()
        assert len(page) <= query["limit"]
        items += page
        token = response.headers.get("x-next-token", "")
        pages += 1
    return items


@pytest.fixture
def hosts(world: World) -> list[FleetHost]:
    """Three hosts that have the template `base`."""
    hosts = world.start("h1", "h2", "h3")
    for host in hosts:
        host.gateway.build_template()
    return hosts


def test_sandboxes_of_the_same_second_keep_the_order_of_their_host(hosts: list[FleetHost]) -> None:
    """The lists for forkd contain times in whole seconds."""
    body = {"snapshot_tag": "base", "n": 12, "placement": {"host": "h2"}}
    ids = [each["id"] for each in hosts[0].post("/v1/sandboxes", body)]
    for host in hosts:
        assert [each["id"] for each in host.get("/v1/sandboxes")] == ids


def test_lists_of_all_hosts_are_merged_with_stable_pages(hosts: list[FleetHost]) -> None:
    names = _fill(hosts, 14)
    for host in hosts:
        for path in ("/sandboxes", "/v2/sandboxes"):
            assert [each["name"] for each in host.get(path)] == names
    with hosts[1].client(READ_KEY) as client:
        for limit in (1, 3, 7, 14, 100):
            items = _read_pages(client, "/sandboxes", limit=limit)
            assert [each["name"] for each in items] == names
            assert {each["sandboxHost"] for each in items} == {"h1", "h2", "h3"}
            items = _read_pages(client, "/sandboxes", limit=limit, order="desc")
            assert [each["name"] for each in items] == names[::-1]
        # A page continues at any gateway, although entries come and go.
        first = client.get("/sandboxes", params={"limit": 5})
    with hosts[0].client() as client:
        client.delete(f"/sandboxes/{names[2]}").raise_for_status()
        client.post("/sandboxes", json={"templateID": "base", "name": "last"}).raise_for_status()
        query = {"limit": 100, "nextToken": first.headers["x-next-token"]}
        assert [each["name"] for each in client.get("/sandboxes", params=query).json()] == [*names[5:], "last"]
        assert [each["name"] for each in client.get("/sandboxes", params={"name": "s07"}).json()] == ["s07"]
        refused = client.get("/sandboxes", params={"state": "asleep"})
        assert (refused.status_code, refused.json()["kind"]) == (400, "invalid")
        assert client.get("/sandboxes", params={"limit": "x"}).status_code == 400


def test_each_kind_of_list_is_merged(hosts: list[FleetHost]) -> None:
    names = _fill(hosts, 3)
    for host, name in zip(hosts, names, strict=True):
        host.post(f"/sandboxes/{name}/snapshots", {"name": f"snapshot-{host.name}"})
        host.post("/volumes", {"name": f"volume-{host.name}"})
    one = hosts[0]
    assert [each["names"] for each in one.get("/snapshots")] == [[f"snapshot-h{number}"] for number in (1, 2, 3)]
    assert [each["name"] for each in one.get("/volumes")] == [f"volume-h{number}" for number in (1, 2, 3)]
    assert [each["sandboxHost"] for each in one.get("/templates", name="base")] == ["h1", "h2", "h3"]
    assert len(one.get("/v1/sandboxes")) == 3
    assert len(one.get("/v1/snapshots")) == 6
    assert len(one.get("/lineage", flat=True)) == 9
    assert len(one.get("/lineage")) == 3
    assert len(one.get("/lineage", root="snapshot-h3", flat=True)) == 1
    with one.client() as client:
        pages = _read_pages(client, "/volumes", limit=2)
        assert [each["name"] for each in pages] == [f"volume-h{number}" for number in (1, 2, 3)]


def test_a_list_names_the_hosts_that_did_not_answer(world: World, hosts: list[FleetHost]) -> None:
    names = _fill(hosts, 6)
    hosts[2].end()
    wait_until(lambda: hosts[0].list_running_members() == ["h1", "h2"])
    hosts[1].gateway.loop.call_soon_threadsafe(time.sleep, 4)
    with hosts[0].client() as client:
        response = client.get("/sandboxes")
        assert response.status_code == 200
        assert response.headers["x-sandbox-hosts-missing"] == "h3"
        assert [each["name"] for each in response.json()] == [
            name for number, name in enumerate(names) if number % 3 < 2
        ]
    world.start("h4")
    with hosts[0].client() as client:
        response = client.get("/v1/sandboxes")
        assert (len(response.json()), response.headers["x-sandbox-hosts-missing"]) == (4, "h3")


def test_events_of_all_hosts_arrive_in_one_stream(hosts: list[FleetHost]) -> None:
    def count_queues() -> list[int]:
        return [len(host.gateway.engine.events._queues) for host in hosts]

    queue_counts = count_queues()
    with (
        ThreadPoolExecutor(1) as threads,
        hosts[0].client(READ_KEY) as client,
        client.stream("GET", "/events", timeout=60) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines) == ": connected"

        def read() -> set[str]:
            seen: set[str] = set()
            while len(seen) < 3:
                line = next(lines)
                if line.startswith("data: ") and (name := json.loads(line[6:]).get("name")):
                    seen.add(name)
            return seen

        names = threads.submit(read)
        wait_until(lambda: all(map(int.__gt__, count_queues(), queue_counts)))
        assert _fill(hosts, 3) == ["s00", "s01", "s02"]
        assert names.result(60) == {"s00", "s01", "s02"}
    # The streams of the other hosts end with the client's.
    wait_until(lambda: count_queues() == queue_counts)


def test_an_invalid_request_for_events_is_refused(hosts: list[FleetHost]) -> None:
    with hosts[0].client() as client:
        refused = client.get("/events", params={"operation": "x" * 65})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid")


def test_a_host_that_sends_its_list_too_slowly_is_missing(
    hosts: list[FleetHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Peers.request

    async def send_slowly(peers: Peers, host: str, *arguments: Any, **options: Any) -> Any:
        if host == "h3":
            await asyncio.sleep(60)
        return await request(peers, host, *arguments, **options)

    monkeypatch.setattr(Peers, "request", send_slowly)
    monkeypatch.setattr(merging, "_FULL_LIST_SECONDS", 5.0)
    with hosts[0].client() as client:
        response = client.get("/templates")
    assert response.headers["x-sandbox-hosts-missing"] == "h3"
    assert [each["sandboxHost"] for each in response.json()] == ["h1", "h2"]


def test_removing_a_template_removes_all_its_copies(hosts: list[FleetHost]) -> None:
    one, two, three = hosts
    with two.client() as client:
        assert client.put("/templates/base/alias", json={"alias": "other"}).status_code == 200
    for host in hosts:
        assert host.get("/templates/other")["sandboxHost"] == host.name
    three.post("/sandboxes", {"templateID": "base", "name": "user"})
    with one.client() as client:
        refused = client.delete("/templates/base")
        assert (refused.status_code, refused.headers["x-sandbox-host"]) == (409, "h3")
        three.client().delete("/sandboxes/user").raise_for_status()
        assert client.delete("/templates/base").status_code == 204
    assert [host.get("/templates") for host in hosts] == [[], [], []]
