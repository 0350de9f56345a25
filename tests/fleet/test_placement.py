"""Where new sandboxes go."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.api.fleet.placing import Placer
from sandbox_gateway.errors import Conflict, NoSpace
from sandbox_gateway.fleet.placement import Candidate, Strategy, Wishes, place
from sandbox_gateway.fleet.records import HostRecord, Load, MemberRecord
from sandbox_gateway.fleet.store import Store
from tests.fleet.world import FleetHost, Held, World, running_process
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.waiting import wait_until

_MACHINE = 64 << 20


def _candidate(name: str, room: int, *, cordoned: bool = False, reserved: int = 0, **labels: str) -> Candidate:
    load = Load(memory_free=room * _MACHINE, memory_total=64 << 30, max_sandboxes=1000)
    member = MemberRecord(host_id="0", address="x:1", kind="memory", labels=labels, load=load)
    return Candidate(name, member, HostRecord(host_id="0", cordoned=cordoned), reserved * _MACHINE)


_GONE = Candidate("gone", None, HostRecord(host_id="0"), 0)


@pytest.mark.parametrize(
    ("count", "wishes", "shares"),
    [
        (1, Wishes(), {"b": 1}),
        (12, Wishes(), {"b": 5, "c": 7}),
        (1, Wishes(strategy="spread"), {"c": 1}),
        (6, Wishes(strategy="spread"), {"a": 2, "b": 2, "c": 2}),
        (12, Wishes(strategy="spread"), {"a": 3, "b": 4, "c": 5}),
        (4, Wishes(strategy="pack"), {"a": 3, "b": 1}),
        (3, Wishes(strategy="pack"), {"a": 3}),
        (3, Wishes(anti_affinity=True), {"a": 1, "b": 1, "c": 1}),
        (2, Wishes(host="a"), {"a": 2}),
        (2, Wishes(labels={"zone": "1"}), {"a": 2}),
    ],
)
def test_shares(count: int, wishes: Wishes, shares: dict[str, int]) -> None:
    candidates = [
        _candidate("a", 5, reserved=2, zone="1"),
        _candidate("b", 5, zone="2"),
        _candidate("c", 9),
        _candidate("d", 20, cordoned=True),
        _GONE,
    ]
    assert place(count, candidates, wishes, "b") == shares


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.sampled_from(get_args(Strategy)),
    st.booleans(),
)
def test_each_sandbox_gets_the_best_host_that_has_room(
    sizes: list[tuple[int, int]], count: int, strategy: Strategy, anti_affinity: bool
) -> None:
    candidates = [_candidate(f"h{number}", room, reserved=used) for number, (room, used) in enumerate(sizes)]
    rooms = {each.name: min(each.count_room(), 1 if anti_affinity else count) for each in candidates}
    free = {each.name: each.free_memory for each in candidates}
    shares: dict[str, int] = {}
    for _ in range(min(count, sum(rooms.values()))):
        keys: dict[Strategy, Callable[[str], Any]] = {
            "local": lambda name: (name != "h1", -free[name], name),
            "spread": lambda name: (shares.get(name, 0), -free[name], name),
            "pack": lambda name: (free[name], name),
        }
        best = min((name for name in rooms if shares.get(name, 0) < rooms[name]), key=keys[strategy])
        shares[best] = shares.get(best, 0) + 1
    wishes = Wishes(strategy=strategy, anti_affinity=anti_affinity)
    if sum(shares.values()) < count:
        with pytest.raises(NoSpace):
            place(count, candidates, wishes, "h1")
    else:
        assert [*place(count, candidates, wishes, "h1").items()] == [*shares.items()]


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_many_sandboxes_on_many_hosts_are_placed_quickly(strategy: Strategy) -> None:
    """Placing 1,000 sandboxes on 1,000 hosts takes only a few times as long as placing one."""
    candidates = [_candidate(f"h{number}", 100 + number % 7) for number in range(1000)]

    def measure(count: int) -> float:
        times = []
        for _ in range(5):
            start = time.process_time()
            place(count, candidates, Wishes(strategy=strategy), "h1")
            times.append(time.process_time() - start)
        return min(times)

    assert measure(1000) < 12 * measure(1)


@pytest.mark.parametrize(
    ("count", "wishes", "error", "message"),
    [
        (1, Wishes(host="d"), Conflict, r"host 'd' is cordoned.*sandboxctl host uncordon d"),
        (1, Wishes(host="x"), Conflict, r"no host can take the sandbox: a \(not the requested host\)"),
        (1, Wishes(host="gone"), Conflict, r"gone \(its gateway does not run\)"),
        (1, Wishes(labels={"zone": "3"}), Conflict, r"a \(its label 'zone' is '1'\), b \(it has no label 'zone'\)"),
        (5, Wishes(), NoSpace, r"no room for the 5 sandboxes: a \(room for 3\), b \(room for 1\), d \(cordoned\)"),
        (1, Wishes(host="v"), Conflict, r"v \(it does not have the volume 'data'\)"),
        (3, Wishes(anti_affinity=True), NoSpace, r"each on a host of its own: a \(room for 1\), b \(room for 1\)"),
    ],
)
def test_refusals_name_the_reason_for_each_host(
    count: int, wishes: Wishes, error: type[Exception], message: str
) -> None:
    candidates = [_candidate("a", 3, zone="1"), _candidate("b", 1), _candidate("d", 9, cordoned=True), _GONE]
    candidates.append(replace(_candidate("v", 9), missing_volume="data"))
    with pytest.raises(error, match=message):
        place(count, candidates, wishes, "a")


def _start(world: World, *names: str) -> list[FleetHost]:
    hosts = world.start(*names)
    for host in hosts:
        host.gateway.build_template()
    for host in hosts:
        wait_until(lambda host=host: host.list_known_hosts("base") == [*names])  # type: ignore[misc]
    return hosts


def _count_by_host(sandboxes: list[dict[str, Any]]) -> dict[str, int]:
    return Counter(sandbox["sandboxHost"] for sandbox in sandboxes)


def test_a_sandbox_is_created_here_unless_its_placement_says_otherwise(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    assert one.post("/sandboxes", {"templateID": "base"})["sandboxHost"] == "h1"
    body = {"templateID": "base", "name": "web", "placement": {"host": "h2"}}
    assert one.post("/sandboxes", body)["sandboxHost"] == "h2"
    refused = one.post("/sandboxes", {"templateID": "base", "placement": {"host": "h9"}}, 409)
    assert "h1 (not the requested host), h2 (not the requested host)" in refused["message"]
    assert one.post("/sandboxes", {"templateID": "base", "placement": {"strategy": "random"}}, 400)["kind"] == "invalid"
    assert one.post("/sandboxes/web/clone", {"count": 1, "placement": {"host": "h1"}}, 400)["kind"] == "unsupported"
    with one.client() as client:
        client.patch("/fleet/hosts/h1", json={"cordoned": True}).raise_for_status()
        wait_until(lambda: one.get("/fleet")["hosts"][0]["cordoned"])
        assert client.post("/sandboxes", json={"templateID": "base"}).json()["sandboxHost"] == "h2"
    # A snapshot that only one host has.
    two.post("/sandboxes/web/snapshots", {"name": "before"})
    assert one.post("/snapshots/before/fork", {"count": 2})["sandboxes"][0]["sandboxHost"] == "h2"
    assert len(one.post("/v1/sandboxes", {"snapshot_tag": "before", "n": 2})) == 2


def test_a_sandbox_is_created_on_the_host_of_its_volume(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    two.post("/volumes", {"name": "data"})
    one.post("/volumes", {"name": "logs"})
    body = {"templateID": "base", "volumeMounts": [{"name": "data", "path": "/data"}]}
    assert one.post("/sandboxes", body)["sandboxHost"] == "h2"
    forks = {"count": 4, "volumeMounts": body["volumeMounts"]}
    assert _count_by_host(one.post("/snapshots/base/fork", forks)["sandboxes"]) == {"h2": 4}
    refused = one.post("/sandboxes", {**body, "placement": {"host": "h1"}}, 409)
    assert "h1 (it does not have the volume 'data'), h2 (not the requested host)" in refused["message"]
    both = [{"name": "data", "path": "/data"}, {"name": "logs", "path": "/logs"}]
    refused = two.post("/sandboxes", {"templateID": "base", "volumeMounts": both}, 409)
    assert "h1 (it does not have the volume 'data'), h2 (it does not have the volume 'logs')" in refused["message"]
    missing = one.post("/sandboxes", {"templateID": "base", "volumeMounts": [{"name": "none", "path": "/x"}]}, 404)
    assert "none" in missing["message"]


def test_a_template_is_built_on_the_host_of_its_parent(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    two.gateway.build_template("env", template="base")
    wait_until(lambda: one.list_known_hosts("env") == ["h2"])
    one.gateway.build_template("child", template="env")
    assert one.get("/templates/child")["sandboxHost"] == "h2"
    assert one.post("/templates", {"name": "other", "template": "none"}, 404)["kind"] == "not_found"


def test_a_placement_without_a_fleet_is_refused(tmp_path: Any) -> None:
    gateway = MemoryGateway(tmp_path)
    try:
        gateway.build_template()
        with gateway.client() as client:
            response = client.post("/sandboxes", json={"templateID": "base", "placement": {"host": "h1"}})
            assert (response.status_code, response.json()["kind"]) == (400, "unsupported")
            response = client.post("/snapshots/base/fork", json={"placement": {}})
            assert "has only its own host ([fleet] in its configuration)" in response.json()["message"]
            assert "sandboxHost" not in client.post("/sandboxes", json={"templateID": "base"}).json()
    finally:
        gateway.end()


def test_a_fork_is_spread_over_all_hosts(world: World) -> None:
    hosts = _start(world, "h1", "h2", "h3")
    names = [f"s{number}" for number in range(10)]
    result = hosts[0].post("/snapshots/base/fork", {"names": names, "metadata": {"a": "b"}})
    assert sorted(_count_by_host(result["sandboxes"]).values()) == [3, 3, 4]
    assert sorted(sandbox["name"] for sandbox in result["sandboxes"]) == sorted(names)
    assert all(sandbox["metadata"] == {"a": "b"} for sandbox in result["sandboxes"])
    assert len(hosts[1].get("/sandboxes")) == 10
    body = {"count": 3, "placement": {"antiAffinity": True}}
    assert _count_by_host(hosts[2].post("/snapshots/base/fork", body)["sandboxes"]) == {"h1": 1, "h2": 1, "h3": 1}
    body = {"count": 4, "placement": {"antiAffinity": True}}
    assert hosts[2].post("/snapshots/base/fork", body, 507)["kind"] == "no_space"
    assert len(hosts[1].post("/v1/sandboxes", {"snapshot_tag": "base", "n": 6})) == 6
    assert {len(host.host.machines) for host in hosts} <= {6, 7}


def test_an_idempotency_key_is_refused_where_it_would_not_hold(world: World) -> None:
    one, _ = _start(world, "h1", "h2")
    with one.client() as client:
        headers = {"Idempotency-Key": "a-key"}
        refused = client.post("/snapshots/base/fork", json={"count": 2}, headers=headers)
        assert refused.status_code == 400 and "Idempotency-Key: not supported" in refused.json()["message"]
        body = {"count": 2, "placement": {"host": "h2"}}
        answers = [client.post("/snapshots/base/fork", json=body, headers=headers).json() for _ in range(2)]
    assert [each["sandboxID"] for each in answers[0]["sandboxes"]] == [
        each["sandboxID"] for each in answers[1]["sandboxes"]
    ]


def test_a_fork_is_all_or_none_over_all_hosts(world: World) -> None:
    hosts = _start(world, "h1", "h2", "h3")
    names = [f"s{number}" for number in range(9)]
    for failing in hosts:
        failing.host.failing_names = {*names}
        refused = hosts[0].post("/snapshots/base/fork", {"names": names}, 500)
        assert "no machine for s" in refused["message"]
        failing.host.failing_names = set()
        wait_until(lambda: not any(host.host.machines for host in hosts))
        assert hosts[0].get("/sandboxes") == []
    # A name that is taken on one host only.
    hosts[2].post("/sandboxes", {"templateID": "base", "name": "s8", "placement": {"host": "h3"}})
    assert hosts[0].post("/snapshots/base/fork", {"names": names}, 409)["kind"] == "name_taken"
    wait_until(lambda: sum(len(host.host.machines) for host in hosts) == 1)
    with hosts[0].client() as client:
        client.delete("/sandboxes/s8").raise_for_status()
    wait_until(lambda: hosts[0].client().post("/snapshots/base/fork", json={"names": names}).status_code == 201)


@pytest.mark.usefixtures("real_times")
def test_a_fork_is_aborted_if_etcd_is_away_when_it_is_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _start(world, "h1", "h2")
    forks = [Held(host, "fork", monkeypatch) for host in hosts]
    with ThreadPoolExecutor(1) as threads, hosts[0].client() as client:
        response = threads.submit(client.post, "/snapshots/base/fork", json={"names": ["a", "b"]}, timeout=60)
        wait_until(lambda: all(each.count for each in forks))
        world.etcd.stop_answering()
        for each in forks:
            each.release()
        wait_until(lambda: all(host.host.machines for host in hosts))
        time.sleep(6)
        assert [len(host.gateway.engine.index.sandboxes) for host in hosts] == [0, 0], "nobody decides alone"
        world.etcd.answer_again()
        assert response.result().status_code in (409, 503)
    wait_until(lambda: not any(host.host.machines for host in hosts))
    assert hosts[1].get("/sandboxes") == []


def test_two_requests_never_reserve_the_same_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _start(world, "h1", "h2")
    for host in hosts:
        # Room for eight machines, besides the reserve of 256 MiB.
        host.host.available_room = replace(host.host.available_room, memory_free=(256 + 8 * 64) << 20)
    wait_until(lambda: all(each["memoryFreeBytes"] < 1 << 30 for each in hosts[0].get("/fleet")["hosts"]))

    def create(number: int) -> int:
        with hosts[number % 2].client() as client:
            body = {"count": 3, "placement": {"host": "h1"}}
            return client.post("/snapshots/base/fork", json=body).status_code

    forks = Held(hosts[0], "fork", monkeypatch)
    with ThreadPoolExecutor(6) as threads:
        try:
            creations = [threads.submit(create, number) for number in range(6)]
            wait_until(lambda: sum(each.done() for each in creations) >= 4 and forks.count >= 6)
        finally:
            forks.release()
        assert sorted(each.result() for each in creations) == [201, 201, 507, 507, 507, 507]
    assert len(hosts[0].host.machines) == 6
    wait_until(lambda: not any(each["memoryReservedBytes"] for each in hosts[0].get("/fleet")["hosts"]))
    for host in hosts:
        host.host.fork_seconds = 1.5
    # Without a requested host, the other one is tried.
    with ThreadPoolExecutor(6) as threads, hosts[0].client() as client:
        answers = [threads.submit(client.post, "/sandboxes", json={"templateID": "base"}) for _ in range(12)]
        assert [each.result().status_code for each in answers] == [201] * 12


async def test_the_next_host_is_the_one_that_the_idempotency_key_prefers() -> None:
    tried: list[str] = []

    class FullHosts:
        async def forward(self, host: str, scope: Any, receive: Any, send: Any, body: bytes) -> None:
            tried.append(host)
            await send({"type": "http.response.start", "status": 507, "headers": []})

    class NoRuns:
        async def address(self, scope: Any, host: str, body: bytes) -> Any:
            return scope

    placer = Placer(None, SimpleNamespace(name="b"), FullHosts(), NoRuns())  # type: ignore[arg-type]
    candidates = [_candidate("a", 1), _candidate("b", 2), _candidate("c", 5)]

    def rank(key: str) -> list[str]:
        return sorted("abc", key=lambda name: hashlib.sha256(f"{key} {name}".encode()).digest(), reverse=True)

    key = next(key for number in range(100) if rank(key := str(number)) == ["c", "a", "b"])
    scope = {"type": "http", "headers": [(b"idempotency-key", key.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await placer._run_on_one("c", 2, candidates, Wishes(), b"", scope, None, send)  # type: ignore[arg-type]
    # The sandboxes would be on a and b, where the key does not hold.
    assert tried == ["c"] and sent[0]["status"] == 507


def test_a_fork_of_a_gateway_that_is_killed_before_the_decision_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = _start(world, "h1")
    forks = Held(one, "fork", monkeypatch)
    with running_process(world, "h2") as (process, port):
        wait_until(lambda: one.list_known_hosts("base") == ["h1", "h2"])
        url, headers = f"http://127.0.0.1:{port}/snapshots/base/fork", {"X-API-Key": ADMIN_KEY}

        def fork() -> None:
            with contextlib.suppress(httpx.TransportError):
                httpx.post(url, json={"names": ["a", "b"]}, headers=headers, timeout=60)

        with ThreadPoolExecutor(1) as threads:
            request = threads.submit(fork)
            wait_until(lambda: forks.count)
            process.kill()
            request.result()
    forks.release()
    wait_until(lambda: not one.host.machines)
    time.sleep(5)
    assert not one.host.machines and one.get("/sandboxes") == []
    assert _read_decisions(world) in ([], [b"abort"])


def _read_decisions(world: World) -> list[bytes]:
    async def load() -> list[bytes]:
        store = Store([world.etcd.endpoint])
        try:
            return [entry.value for entry in (await store.load("/grove.sandbox/decisions/"))[0]]
        finally:
            store.close()

    return asyncio.run(load())
