"""Names and ids in the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

import httpx
import pytest

from sandbox_gateway.fleet import membership
from sandbox_gateway.fleet.directory import Directory
from sandbox_gateway.fleet.store import Store, StoreUnavailable
from tests.fleet.world import FleetHost, Held, World, running_process
from tests.support.etcd import Etcd, running_etcd
from tests.support.memory_gateway import ADMIN_KEY
from tests.support.waiting import wait_until


def _read_keys(etcd: Etcd) -> dict[str, int]:
    """Return the names and ids in etcd, as REF/HOST, with the id of their lease."""

    async def load() -> dict[str, int]:
        store = Store([etcd.endpoint])
        try:
            prefix = "/grove.sandbox/objects/"
            return {entry.key.removeprefix(prefix): entry.lease for entry in (await store.load(prefix))[0]}
        finally:
            store.close()

    return asyncio.run(load())


def _create(host: FleetHost, name: str | None = None) -> httpx.Response:
    with host.client() as client:
        return client.post("/sandboxes", json={"templateID": "base", "name": name}, timeout=60)


def _start_with_templates(world: World, *names: str) -> list[FleetHost]:
    hosts = world.start(*names)
    for host in hosts:
        host.gateway.build_template()
    return hosts


def test_a_name_is_unique_in_the_fleet_until_it_is_released(world: World) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    sandbox = _create(one, "web").json()
    refused = _create(two, "web")
    assert (refused.status_code, refused.json()["kind"]) == (409, "name_taken")
    assert "'web' (a sandbox of host h1)" in refused.json()["message"]
    assert not two.gateway.engine.index.sandboxes and not two.host.machines, "nothing is left of the refused one"
    with one.client() as client:
        assert client.patch(f"/sandboxes/{sandbox['sandboxID']}", json={"name": "app"}).status_code == 200
    wait_until(lambda: "web/h1" not in _read_keys(world.etcd))
    assert _create(two, "web").status_code == 201
    assert _create(two, "app").status_code == 409
    with one.client() as client:
        assert client.patch("/sandboxes/app", json={"name": "web"}).status_code == 409
        assert client.delete("/sandboxes/app").status_code == 204
        assert client.post("/sandboxes", json={"templateID": "base", "name": "app"}).status_code == 201
    wait_until(lambda: {"app/h1", "web/h2"} <= _read_keys(world.etcd).keys())


def test_all_keys_of_committed_objects_lose_their_lease(world: World) -> None:
    (one,) = _start_with_templates(world, "h1")
    sandbox = _create(one, "web").json()["sandboxID"]
    snapshot = one.post(f"/sandboxes/{sandbox}/snapshots", {"name": "before"})["snapshotID"]
    unnamed = one.post(f"/sandboxes/{sandbox}/snapshots")["snapshotID"]
    one.post("/volumes", {"name": "data"})
    expected = {f"{ref}/h1" for ref in ("web", sandbox, "before", snapshot, unnamed, "data", "base")}
    wait_until(lambda: expected <= {key for key, lease in _read_keys(world.etcd).items() if not lease})
    assert len(_read_keys(world.etcd)) == len(expected) + 2, "the ids of the template and of the volume"
    with one.client() as client:
        client.delete(f"/sandboxes/{sandbox}").raise_for_status()
        client.delete("/snapshots/before").raise_for_status()
        client.delete(f"/snapshots/{unnamed}").raise_for_status()
        client.delete("/volumes/data").raise_for_status()
    wait_until(lambda: len(_read_keys(world.etcd)) == 2)


def test_of_many_concurrent_requests_for_a_name_one_succeeds(world: World) -> None:
    hosts = _start_with_templates(world, "h1", "h2", "h3")
    with ThreadPoolExecutor(12) as threads:
        for number in range(5):
            name = f"web-{number}"
            responses = [*threads.map(lambda host, name=name: _create(host, name), hosts * 4)]  # type: ignore[misc]
            assert sorted(response.status_code for response in responses) == [201, *[409] * 11]
    assert len(hosts[0].get("/sandboxes")) == 5
    wait_until(lambda: len({key for key in _read_keys(world.etcd) if key.startswith("web-")}) == 5)


def test_names_of_volumes_and_snapshots_are_unique_but_templates_may_have_copies(world: World) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    one.post("/volumes", {"name": "data"})
    assert two.post("/volumes", {"name": "data"}, 409)["kind"] == "name_taken"
    for host, name in ((one, "web"), (two, "app")):
        assert _create(host, name).status_code == 201
    one.post("/sandboxes/web/snapshots", {"name": "before"})
    assert two.post("/sandboxes/app/snapshots", {"name": "before"}, 409)["kind"] == "name_taken"
    assert _create(two, "before").status_code == 409
    assert _create(two, "base").status_code == 409
    two.gateway.build_template("base", packages=["git"])
    assert one.get("/fleet")["conflicts"] == []


def test_a_fork_with_many_names_is_claimed_in_several_transactions(world: World) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    one.host.available_room = replace(one.host.available_room, memory_free=15 << 30)
    wait_until(lambda: one.get("/fleet")["hosts"][0]["memoryFreeBytes"] == 15 << 30)
    names = [f"n{number}" for number in range(150)]
    assert _create(two, "n149").status_code == 201
    placement = {"host": "h1"}
    refused = one.post("/snapshots/base/fork", {"names": names, "placement": placement}, 409)
    assert "'n149' (a sandbox of host h2)" in refused["message"]
    assert not one.host.machines
    wait_until(lambda: not any(key.startswith("n1/") for key in _read_keys(world.etcd)))
    assert len(one.post("/snapshots/base/fork", {"names": names[:149], "placement": placement})["sandboxes"]) == 149
    wait_until(lambda: len(_read_keys(world.etcd)) == 2 * 2 + 2 + 2 * 149)


def test_a_failed_creation_releases_its_name(world: World) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    one.host.failing_names = {"web"}
    assert _create(one, "web").status_code == 500
    wait_until(lambda: "web/h1" not in _read_keys(world.etcd))
    assert _create(two, "web").status_code == 201


@pytest.mark.usefixtures("real_times")
def test_while_etcd_is_away_only_new_names_are_refused(world: World) -> None:
    (one,) = _start_with_templates(world, "h1")
    sandbox = _create(one, "web").json()["sandboxID"]
    world.etcd.stop_answering()
    try:
        started_at = time.monotonic()
        refused = _create(one, "app")
        assert time.monotonic() - started_at < 15, "the answer does not wait for etcd"
        assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
        assert "new sandboxes and new names must wait until it is back" in refused.json()["message"]
        assert "retry-after" in refused.headers
        assert one.post("/sandboxes/web/snapshots", {"name": "before"}, 503)["kind"] == "unavailable"
        with one.client() as client:
            assert client.post("/sandboxes/web/exec", json={"args": ["write", "a", "b"]}).status_code == 200
            unnamed = client.post("/sandboxes/web/snapshots")
            assert unnamed.status_code == 201, "what has no name needs none"
            rollback = client.post("/sandboxes/web/rollback", json={"snapshotID": unnamed.json()["snapshotID"]})
            assert rollback.status_code == 200
            assert client.post("/sandboxes/web/pause").status_code == 204
            assert client.post("/sandboxes/web/resume").status_code == 201
            assert client.delete("/sandboxes/web").status_code == 204
    finally:
        world.etcd.answer_again()
    wait_until(lambda: f"{unnamed.json()['snapshotID']}/h1" in _read_keys(world.etcd))
    wait_until(lambda: not {"web/h1", f"{sandbox}/h1", "app/h1"} & _read_keys(world.etcd).keys())
    wait_until(lambda: _create(one, "app").status_code == 201)


def test_a_gateway_without_etcd_finds_objects_that_it_has_not_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start_with_templates(world, "h1", "h2")

    def fail(*_: object) -> NoReturn:
        raise StoreUnavailable("etcd does not answer")

    # Only this gateway is separated from etcd.
    store = one.get_directory()._store
    monkeypatch.setattr(one.get_directory()._view, "_apply", lambda *_, **__: None)
    monkeypatch.setattr(store, "_send", fail)
    store._set_away("no answer in time")
    assert _create(two, "web").status_code == 201
    with one.client() as client:
        assert client.get("/sandboxes/nowhere").status_code == 404
        assert client.get("/sandboxes/web").json()["sandboxHost"] == "h2"
        assert client.delete("/sandboxes/web").status_code == 204
        assert client.get("/sandboxes/web").status_code == 404
        with two.hanging():
            assert client.get("/sandboxes/web").status_code == 503, "h2 may have it"


def test_an_empty_etcd_is_filled_from_the_hosts(world: World) -> None:
    hosts = _start_with_templates(world, "h1", "h2")
    for host, name in zip(hosts, ("web", "app"), strict=True):
        assert _create(host, name).status_code == 201
    wait_until(lambda: len(_read_keys(world.etcd)) == 8 and not any(_read_keys(world.etcd).values()))
    keys = _read_keys(world.etcd).keys()
    world.etcd.kill()
    with running_etcd(world.root / "empty") as empty:
        empty.kill()
        empty.port = world.etcd.port
        empty.start()
        wait_until(lambda: _read_keys(empty).keys() == keys)
        assert _create(hosts[0], "app").status_code == 409


def test_a_gateway_that_starts_publishes_what_it_has_and_deletes_what_is_stale(world: World) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    assert _create(one, "web").status_code == 201
    world.keep_objects(one)
    wait_until(lambda: not any(_read_keys(world.etcd).values()))
    keys = _read_keys(world.etcd).keys()
    one.end()
    assert _create(two, "web").status_code == 409, "the objects of a host that is down keep their names"

    async def put_stale_key() -> None:
        store = Store([world.etcd.endpoint])
        await store.put("/grove.sandbox/objects/stale/h1", b'{"kind":"sandbox","id":"0123456789ab"}')
        store.close()

    asyncio.run(put_stale_key())
    one.start()
    wait_until(lambda: _read_keys(world.etcd).keys() == keys)


def _read_event(lines: Iterator[str], type: str) -> Any:
    """Return the data of the next event of this type."""
    deadline = time.monotonic() + 60
    is_next = False
    for line in lines:
        if is_next:
            return json.loads(line.removeprefix("data: "))
        is_next = line == f"event: {type}"
        assert time.monotonic() < deadline, f"no event {type}"
    return None


def test_the_same_name_on_two_hosts_that_join_is_reported(world: World) -> None:
    hosts = [world.create_host(name) for name in ("h1", "h2")]
    for host in hosts:
        host.start(in_fleet=False)
        host.gateway.build_template()
        assert _create(host, "web").status_code == 201
        with host.client() as client:
            client.post("/sandboxes/web/pause").raise_for_status()
        world.keep_objects(host)
        host.end()
    one, two = hosts
    one.start()
    with one.client() as client, client.stream("GET", "/events", timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        two.start()
        event = _read_event(lines, "fleet.name_conflict")
        assert (event["name"], event["hosts"]) == ("web", ["h1", "h2"])
    wait_until(lambda: one.get("/fleet")["conflicts"] and two.get("/fleet")["conflicts"])
    (sentence,) = two.get("/fleet")["conflicts"]
    assert "the sandbox 'web' of host h2 has the same name as a sandbox of host h1: rename or remove one" in sentence
    for host in hosts:
        assert host.get("/sandboxes/web")["name"] == "web", "nothing is deleted"
    with two.client() as client:
        assert client.patch("/sandboxes/web", json={"name": "other"}).status_code == 200
    wait_until(lambda: not one.get("/fleet")["conflicts"] and not two.get("/fleet")["conflicts"])


@pytest.mark.usefixtures("real_times")
def test_a_claim_of_a_gateway_that_is_killed_before_the_commit_ends(world: World) -> None:
    (one,) = _start_with_templates(world, "h1")
    with running_process(world, "h2", fork_seconds=60) as (process, port):

        def create() -> None:
            body = {"templateID": "base", "name": "web"}
            with contextlib.suppress(httpx.TransportError):
                httpx.post(
                    f"http://127.0.0.1:{port}/sandboxes", json=body, headers={"X-API-Key": ADMIN_KEY}, timeout=60
                )

        with ThreadPoolExecutor(1) as threads:
            request = threads.submit(create)
            wait_until(lambda: _read_keys(world.etcd).get("web/h2"))
            assert _create(one, "web").status_code == 409
            process.kill()
            request.result()
    assert membership.LEASE_SECONDS <= 8, "the name must become free within ten seconds"
    wait_until(lambda: "web/h2" not in _read_keys(world.etcd))
    assert _create(one, "web").status_code == 201
    # What it had committed is still there, and goes when it starts again without it.
    assert "base/h2" in _read_keys(world.etcd)
    stale = {key for key in _read_keys(world.etcd) if key.endswith("/h2")}
    with running_process(world, "h2", fork_seconds=0):
        wait_until(lambda: not (stale - {"base/h2"}) & _read_keys(world.etcd).keys())


def test_a_name_that_is_used_again_at_once_is_not_released(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    _create(one, "web").raise_for_status()
    wait_until(lambda: _read_keys(world.etcd).get("web/h1") == 0)
    directory, transact = one.get_directory(), Store.transact
    asyncio.run_coroutine_threadsafe(directory._publishing.acquire(), one.gateway.loop).result(20)
    with one.client() as client:
        client.delete("/sandboxes/web").raise_for_status()
    forks = Held(one, "fork", monkeypatch)

    async def answer_late(store: Store, compare: Any, *operations: Any) -> Any:
        outcome = await transact(store, compare, *operations)
        if compare and store is directory._store and directory._publishing.locked():
            directory._publishing.release()
            await asyncio.sleep(1)  # meanwhile, the deletion of the old sandbox is published
        return outcome

    monkeypatch.setattr(Store, "transact", answer_late)
    with ThreadPoolExecutor(1) as threads:
        try:
            creation = threads.submit(_create, one, "web")
            wait_until(lambda: forks.count)
            assert _read_keys(world.etcd).get("web/h1"), "the claim of the new sandbox"
            assert _create(two, "web").status_code == 409
        finally:
            forks.release()
        assert creation.result().status_code == 201
    sandbox = one.get("/sandboxes/web")["sandboxID"]
    wait_until(lambda: {"web/h1": 0, f"{sandbox}/h1": 0}.items() <= _read_keys(world.etcd).items())


def test_no_name_is_claimed_without_a_lease(world: World) -> None:
    (one,) = _start_with_templates(world, "h1")
    directory, loop = one.get_directory(), one.gateway.loop

    async def block() -> None:
        await directory._publishing.acquire()
        directory._refs_in_flight = {"web"}

    def lose_lease() -> None:
        directory._membership.lease = 0
        directory._refs_in_flight = set()
        directory._publishing.release()

    asyncio.run_coroutine_threadsafe(block(), loop).result(20)
    with ThreadPoolExecutor(1) as threads:
        creation = threads.submit(_create, one, "web")
        wait_until(lambda: directory._claimed_ids)
        time.sleep(0.5)
        loop.call_soon_threadsafe(lose_lease)
        refused = creation.result()
    assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable"), "the name could never become free"
    assert "web/h1" not in _read_keys(world.etcd)


def test_names_are_claimed_again_if_the_lease_ends_while_a_sandbox_starts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start_with_templates(world, "h1", "h2")
    forks = Held(one, "fork", monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        try:
            creation = threads.submit(_create, one, "web")
            wait_until(lambda: _read_keys(world.etcd).get("web/h1"))
            lease = _read_keys(world.etcd)["web/h1"]
            _end_lease(world.etcd, lease)
            wait_until(lambda: _read_keys(world.etcd).get("web/h1", lease) != lease)
            assert _read_keys(world.etcd)["web/h1"] != 0, "it is not committed yet"
            assert _create(two, "web").status_code == 409
        finally:
            forks.release()
        assert creation.result().status_code == 201
    wait_until(lambda: _read_keys(world.etcd).get("web/h1") == 0)


def _end_lease(etcd: Etcd, lease: int) -> None:
    async def end() -> None:
        store = Store([etcd.endpoint])
        await store.revoke_lease(lease)
        store.close()

    asyncio.run(end())


def test_the_id_of_an_object_stays_published_while_it_gets_another_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = _start_with_templates(world, "h1")
    sandbox = _create(one, "web").json()["sandboxID"]
    wait_until(lambda: _read_keys(world.etcd).get(f"{sandbox}/h1") == 0)
    leases: list[int] = []
    save = one.host.save

    async def read_and_save(*arguments: Any) -> None:
        leases.append((await asyncio.to_thread(_read_keys, world.etcd))[f"{sandbox}/h1"])
        await save(*arguments)

    monkeypatch.setattr(one.host, "save", read_and_save)
    with one.client() as client:
        client.patch("/sandboxes/web", json={"name": "app"}).raise_for_status()
    assert leases == [0]


def test_a_gateway_that_ends_publishes_what_it_has_just_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_forever(_: Directory) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Directory, "publish_changes", wait_forever)
    (one,) = _start_with_templates(world, "h1")
    _create(one, "web").raise_for_status()
    one.end()
    assert _read_keys(world.etcd).get("web/h1") == 0, "the objects of a host that is down keep their names"


def test_at_most_one_wait_for_etcd_in_a_creation(world: World) -> None:
    (one,) = _start_with_templates(world, "h1")
    _create(one, "web").raise_for_status()
    waits: list[str] = []
    request = Store._request

    async def count(store: Store, path: str, body: Any) -> Any:
        task = asyncio.current_task()
        coroutine = getattr(task.get_coro(), "__qualname__", "") if task else ""
        if path == "/kv/txn" and not any(name in coroutine for name in ("publish", "keep_alive", "renew_record")):
            waits.append(coroutine)
        return await request(store, path, body)

    Store._request = count  # type: ignore[method-assign]
    try:
        _create(one, "app").raise_for_status()
        assert len(waits) == 1, waits
        one.post("/snapshots/base/fork", {"names": ["a", "b", "c"]})
        assert len(waits) == 2, waits
        one.post("/sandboxes/web/clone", {"count": 2})
        assert len(waits) == 3, waits
    finally:
        Store._request = request  # type: ignore[method-assign]
