"""Plan sessions, and runs that apply a plan, with objects on several hosts."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _sandbox

from sandbox_gateway.api.fleet import runs
from sandbox_gateway.api.fleet.runs import FleetRuns
from sandbox_gateway.engine.plans.applied_runs import AppliedRun, AppliedRuns
from sandbox_gateway.engine.plans.open_runs import OpenRuns
from sandbox_gateway.engine.plans.sessions import PlanSessions
from tests.collection.test_artifact_modules import run_task
from tests.fleet.world import FleetHost, Objects, World
from tests.support.memory_gateway import READ_KEY
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]
_numbers = itertools.count()


@pytest.fixture(params=["plan session", "run that applies a plan"])
def run(request: pytest.FixtureRequest, pair: Pair) -> tuple[str, str]:
    """The noun for a run in errors, and the prefix of its paths, at the gateway of h1."""
    one, _ = pair
    name = f"a-run-of-a-test-in-a-fleet-{next(_numbers)}"
    if request.param == "plan session":
        return request.param, f"/plans/{one.post('/plans', {'run': name}, 200)['planID']}"
    return request.param, f"/applied-runs/{one.post('/applied-runs', {'run': name}, 200)['runID']}"


def test_a_run_reads_the_objects_of_all_hosts(pair: Pair, run: tuple[str, str]) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    _, prefix = run
    for kind, name in objects.names.items():
        path = "sandboxes" if kind == "sandbox" else f"{kind}s"
        assert one.get(f"{prefix}/{path}/{name}")["sandboxHost"] == "h2"
        assert [each["sandboxHost"] for each in one.get(f"{prefix}/{path}", name=name)] == ["h2"]


def _list_changes(objects: Objects) -> list[tuple[str, str, dict[str, Any] | None]]:
    names = objects.names
    return [
        ("PATCH", f"/sandboxes/{names['sandbox']}", {"metadata": {"a": "b"}}),
        ("POST", f"/sandboxes/{names['sandbox']}/snapshots", {"name": f"second-{names['snapshot']}"}),
        ("POST", f"/sandboxes/{names['sandbox']}/clone", {"names": [f"clone-{names['sandbox']}"]}),
        ("POST", f"/snapshots/{names['snapshot']}/fork", {"names": [f"fork-{names['sandbox']}"]}),
        ("POST", "/sandboxes", {"templateID": names["snapshot"], "name": f"new-{names['sandbox']}"}),
        ("PATCH", f"/sandboxes/new-{names['sandbox']}", {"name": f"renamed-{names['sandbox']}"}),
        ("PATCH", f"/volumes/{names['volume']}", {"sizeMB": 4096}),
        ("POST", f"/volumes/{names['volume']}/snapshots", {"name": "second"}),
        ("DELETE", f"/sandboxes/fork-{names['sandbox']}", None),
        ("DELETE", f"/templates/{names['template']}", None),
    ]


_LISTS = {"/sandboxes": "sandboxID", "/snapshots": "snapshotID", "/templates": "templateID", "/volumes": "name"}


def _read_all(host: FleetHost, prefix: str = "") -> dict[str, Any]:
    return {path: sorted(host.get(prefix + path), key=lambda each: each[key]) for path, key in _LISTS.items()}


def _describe(host: FleetHost, prefix: str, objects: Objects) -> list[dict[str, Any]]:
    """Return the values that are the same in a prediction and after the run."""
    number = objects.names["sandbox"].partition("-")[2]
    keys = ("name", "names", "sandboxHost", "state", "metadata", "sizeMB")
    entries = [
        {key: entry[key] for key in keys if key in entry} for path in _LISTS for entry in host.get(prefix + path)
    ]
    return sorted((each for each in entries if f"-{number}'" in str(each)), key=str)


def test_a_plan_session_predicts_changes_of_objects_of_other_hosts(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    before = _read_all(two)
    prefix = _open_plan(one)
    described = []
    for run_prefix in (prefix, ""):
        with one.client() as client:
            for method, path, body in _list_changes(objects):
                response = client.request(method, run_prefix + path, json=body)
                assert response.status_code < 300, (path, response.text)
                assert response.headers["x-sandbox-host"] == "h2", path
                assert "x-sandbox-gateway-plan-ids" not in response.headers
        described.append(_describe(one, run_prefix, objects))
        if run_prefix:
            assert _read_all(two) == before, "a session changes nothing"
    assert described[0] == described[1]
    assert {each["sandboxHost"] for each in described[0]} == {"h2"}


def _open_plan(host: FleetHost, name: str = "") -> str:
    body = {"run": name or f"a-run-of-a-test-in-a-fleet-{next(_numbers)}"}
    return f"/plans/{host.post('/plans', body, 200)['planID']}"


def _open_applied_run(host: FleetHost, name: str = "") -> str:
    body = {"run": name or f"a-run-of-a-test-in-a-fleet-{next(_numbers)}"}
    return f"/applied-runs/{host.post('/applied-runs', body, 200)['runID']}"


def _create_on(host: FleetHost, target: str, name: str, prefix: str = "", status: int = 201) -> Any:
    body = {"templateID": "base", "name": name, "placement": {"host": target}}
    return host.post(f"{prefix}/sandboxes", body, status)


def _get_status(host: FleetHost, path: str) -> int:
    with host.client() as client:
        return client.get(path).status_code


def test_a_plan_session_places_sandboxes_like_the_run(pair: Pair) -> None:
    one, two = pair
    prefix = _open_plan(one)
    number = next(_numbers)
    names = [f"placed-in-plan-{number}-{index}" for index in range(4)]
    hosts = []
    for run_prefix in (prefix, ""):
        path = f"{run_prefix}/snapshots/base/fork"
        forks = one.post(path, {"names": names, "placement": {"strategy": "spread"}})["sandboxes"]
        hosts.append({each["name"]: each["sandboxHost"] for each in forks})
        if run_prefix:
            assert len({each["sandboxID"] for each in forks}) == 4, "ids are unique on all hosts"
            assert all(_get_status(one, f"/sandboxes/{name}") == 404 for name in names)
            for each in forks:
                shown = one.get(f"{prefix}/sandboxes/{each['sandboxID']}")
                assert (shown["name"], shown["sandboxHost"]) == (each["name"], each["sandboxHost"])
    assert hosts[0] == hosts[1] and sorted(hosts[0].values()) == ["h1", "h1", "h2", "h2"]
    refused = one.post(f"{prefix}/snapshots/base/fork", {"count": 3, "placement": {"antiAffinity": True}}, 507)
    assert "each on a host of its own" in refused["message"]
    refused = _create_on(one, "h9", "nowhere", prefix, 409)
    assert "h1 (not the requested host)" in refused["message"]
    del two


def test_a_plan_session_counts_the_machines_that_it_would_start_on_each_host(world: World) -> None:
    one, two = world.start("h1", "h2")
    for host in (one, two):
        host.gateway.build_template()
        # Room for five machines, besides the reserve of 256 MiB.
        host.host.available_room = replace(host.host.available_room, memory_free=(256 + 5 * 64) << 20)
    wait_until(lambda: all(each["memoryFreeBytes"] < 1 << 30 for each in one.get("/fleet")["hosts"]))
    wait_until(lambda: one.list_known_hosts("base") == ["h1", "h2"])
    prefix = _open_plan(one)
    path, placement = f"{prefix}/snapshots/base/fork", {"strategy": "pack"}
    for count in (3, 4, 3):
        forks = one.post(path, {"count": count, "placement": placement})["sandboxes"]
        assert len(forks) == count
    refused = one.post(path, {"count": 1, "placement": placement}, 507)
    assert "h1 (room for 0), h2 (room for 0)" in refused["message"]
    with one.client() as client:
        client.delete(f"{prefix}/sandboxes/{forks[0]['sandboxID']}").raise_for_status()
    freed = one.post(path, {"count": 1, "placement": placement})["sandboxes"]
    assert freed[0]["sandboxHost"] == forks[0]["sandboxHost"]
    assert one.get("/sandboxes") == [] and not one.host.machines and not two.host.machines


def test_names_are_unique_in_a_plan_session_on_all_hosts(pair: Pair) -> None:
    one, _ = pair
    prefix = _open_plan(one)
    name, other = f"unique-{next(_numbers)}", f"other-{next(_numbers)}"
    _create_on(one, "h2", name, prefix)
    for host in ("h1", "h2"):
        assert _create_on(one, host, name, prefix, 409)["kind"] == "name_taken"
    # The name becomes free on one host, and is used on the other one.
    with one.client() as client:
        client.patch(f"{prefix}/sandboxes/{name}", json={"name": other}).raise_for_status()
        assert _create_on(one, "h1", name, prefix)["sandboxHost"] == "h1"
        assert _create_on(one, "h2", name, prefix, 409)["kind"] == "name_taken"
        assert one.get(f"{prefix}/sandboxes/{name}")["sandboxHost"] == "h1"
        assert one.get(f"{prefix}/sandboxes/{other}")["sandboxHost"] == "h2"
        assert client.patch(f"{prefix}/sandboxes/{other}", json={"name": name}).status_code == 409
        client.delete(f"{prefix}/sandboxes/{name}").raise_for_status()
        client.patch(f"{prefix}/sandboxes/{other}", json={"name": name}).raise_for_status()
        assert one.get(f"{prefix}/sandboxes/{name}")["sandboxHost"] == "h2"
    # The same with an object that really exists.
    real = f"real-{next(_numbers)}"
    _create_on(one, "h2", real)
    prefix = _open_plan(one)
    assert "of host h2" in _create_on(one, "h1", real, prefix, 409)["message"]
    with one.client() as client:
        client.delete(f"{prefix}/sandboxes/{real}").raise_for_status()
    assert _get_status(one, f"{prefix}/sandboxes/{real}") == 404
    assert _create_on(one, "h1", real, prefix)["sandboxHost"] == "h1"
    assert one.get(f"{prefix}/sandboxes/{real}")["sandboxHost"] == "h1"
    assert one.get(f"/sandboxes/{real}")["sandboxHost"] == "h2"


def test_one_of_two_hosts_gets_a_name_that_both_want_at_once(pair: Pair) -> None:
    one, _ = pair
    prefix = _open_plan(one)
    for host in ("h1", "h2"):
        _create_on(one, host, f"first-{host}-{next(_numbers)}", prefix)
    names = [f"wanted-{next(_numbers)}" for _ in range(10)]

    def create(name: str, host: str) -> int:
        with one.client() as client:
            body = {"templateID": "base", "name": name, "placement": {"host": host}}
            return client.post(f"{prefix}/sandboxes", json=body).status_code

    with ThreadPoolExecutor(4) as threads:
        for name in names:
            statuses = [*threads.map(create, [name] * 4, ["h1", "h2", "h1", "h2"])]
            assert sorted(statuses) == [201, 409, 409, 409], name
            assert len(one.get(f"{prefix}/sandboxes", name=name)) == 1


def test_a_session_is_the_same_at_every_gateway(pair: Pair) -> None:
    one, two = pair
    run, name = f"a-run-at-two-gateways-{next(_numbers)}", f"shared-{next(_numbers)}"
    opened = one.post("/plans", {"run": run}, 200)
    assert two.post("/plans", {"run": run}, 200) == {**opened, "objects": 0}
    prefix = f"/plans/{opened['planID']}"
    created = _create_on(two, "h2", name, prefix)
    assert created["sandboxHost"] == "h2"
    for host in pair:
        assert host.get(f"{prefix}/sandboxes/{name}")["sandboxID"] == created["sandboxID"]
        assert [each["name"] for each in host.get(f"{prefix}/sandboxes", name=name)] == [name]
        assert host.get(prefix)["objects"] > 0
        assert [each["planID"] for each in host.get("/plans")].count(opened["planID"]) == 1
    with two.client() as client:
        assert client.delete(prefix).status_code == 204
        wait_until(lambda: all(_get_status(host, f"{prefix}/sandboxes") == 404 for host in pair))
        assert client.post("/plans", json={"run": run}).status_code == 410
    applied = one.post("/applied-runs", {"run": run}, 200)
    assert two.post("/applied-runs", {"run": run}, 200)["openedAt"] == applied["openedAt"]


def test_the_changes_of_a_run_do_not_count_on_any_host(pair: Pair) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    prefix = _open_applied_run(one)
    generation = one.get(f"/sandboxes/{name}")["generation"]
    with one.client() as client:
        for number in range(3):
            client.patch(f"{prefix}/sandboxes/{name}", json={"metadata": {"a": str(number)}}).raise_for_status()
        assert two.get(f"/sandboxes/{name}")["generation"] == generation + 3
        for host in pair:
            assert host.get(f"{prefix}/sandboxes/{name}")["generation"] == generation
        assert one.get(f"{prefix}/sandboxes", name=name)[0]["generation"] == generation
        # Someone else changes it.
        client.patch(f"/sandboxes/{name}", json={"metadata": {}}).raise_for_status()
    assert one.get(f"{prefix}/sandboxes/{name}")["generation"] == generation + 1
    forks = one.post(f"{prefix}/snapshots/base/fork", {"count": 2, "placement": {"antiAffinity": True}})["sandboxes"]
    assert sorted(each["sandboxHost"] for each in forks) == ["h1", "h2"]


def test_pinned_hosts(pair: Pair) -> None:
    one, _ = pair
    names = [f"pinned-{next(_numbers)}" for _ in range(3)]
    body = {"names": names, "placement": {"hosts": ["h2", "h1", "h2"], "strategy": "pack"}}
    forks = one.post("/snapshots/base/fork", body)["sandboxes"]
    hosts = {each["name"]: each["sandboxHost"] for each in forks}
    assert hosts == dict(zip(names, ["h2", "h1", "h2"], strict=True))
    for hosts_field, status, sentence in (
        (["h2"], 400, "placement.hosts must contain one host for each new sandbox"),
        (["h9", "h1"], 409, "h9 (it does not have the snapshot)"),
        ([], 400, "hosts"),
    ):
        refused = one.post("/snapshots/base/fork", {"count": 2, "placement": {"hosts": hosts_field}}, status)
        assert sentence in refused["message"]
    placement = {"hosts": ["h1", "h2"], "host": "h1"}
    refused = one.post("/snapshots/base/fork", {"count": 2, "placement": placement}, 409)
    assert "h2 (not the requested host)" in refused["message"]


def test_a_part_stays_open_as_long_as_its_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    opened_homes: list[str] = []
    ended_homes: list[str] = []
    monkeypatch.setattr(runs, "_KEEP_OPEN_SHARE", 0.0)
    for registry in (PlanSessions, AppliedRuns):
        for method, homes in (("open_part", opened_homes), ("end_part", ended_homes)):
            _record_homes(registry, method, homes, monkeypatch)
    for open_run in (_open_plan, _open_applied_run):
        prefix = open_run(one)
        with one.client() as client:
            client.patch(f"{prefix}/sandboxes/{name}", json={"metadata": {"a": "b"}}).raise_for_status()
            client.get(f"{prefix}/snapshots/base").raise_for_status()
            wait_until(lambda: opened_homes.count(opened_homes[-1]) > 1)
            client.delete(prefix).raise_for_status()
            wait_until(lambda: ended_homes[-1:] == opened_homes[-1:])


def _record_homes(registry: Any, method: str, homes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the runs for which other gateways call a method about a part."""
    original = getattr(registry, method)

    def record(self: Any, owner: str, id: str, home: str) -> Any:
        homes.append(home)
        return original(self, owner, id, home)

    monkeypatch.setattr(registry, method, record)


def test_a_part_is_not_opened_on_a_host_whose_clock_is_wrong(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    prefix = _open_plan(one)
    path, body = f"{prefix}/sandboxes/{name}", {"metadata": {"a": "b"}}
    with one.client() as client:
        opened_at = datetime.fromisoformat(client.get(prefix).json()["openedAt"]).timestamp()
        monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: opened_at - 10, monotonic=time.monotonic))
        refused = client.patch(path, json=body)
        assert refused.status_code == 409
        assert "the clock of host 'h2' is 10 s behind the clock of host 'h1'" in refused.json()["message"]
        monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: opened_at - 0.5, monotonic=time.monotonic))
        started = time.monotonic()
        client.patch(path, json=body).raise_for_status()
        assert time.monotonic() - started >= 0.5, "otherwise, planned objects would seem to be older than the session"


def test_a_gateway_of_an_older_release_has_no_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]

    async def ignore(*_: Any) -> bool:
        return False

    monkeypatch.setattr(FleetRuns, "carry_out", ignore)
    with one.client() as client:
        refused = client.patch(f"{_open_plan(one)}/sandboxes/{name}", json={"metadata": {}})
    assert (refused.status_code, refused.json()["kind"]) == (400, "unsupported")
    assert "the gateway of host 'h2' is too old" in refused.json()["message"]


def test_parts_can_be_idle_for_longer_than_runs() -> None:
    async def open_both() -> None:
        open_runs: OpenRuns[AppliedRun] = OpenRuns()
        now = asyncio.get_running_loop().time()
        home, part = AppliedRun("1", "a"), AppliedRun("2", "a", home="h")
        for run in (home, part):
            open_runs.touch(run)
        part.used_at = home.used_at = now - 15
        assert open_runs.list_idle_runs(10) == [home]
        assert open_runs.find_next_idle_time(10) == now - 5
        home.used_at = now
        assert open_runs.find_next_idle_time(10) == now + 5
        assert open_runs.list_idle_runs(7) == [part]

    asyncio.run(open_both())


@pytest.mark.parametrize("open_run", [_open_plan, _open_applied_run])
def test_a_run_ends_if_a_gateway_forgets_its_part(world: World, open_run: Any) -> None:
    one, two = world.start("h1", "h2")
    two.gateway.build_template()
    two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    prefix = open_run(one)
    with one.client() as client:
        client.patch(f"{prefix}/sandboxes/web", json={"metadata": {"a": "b"}}).raise_for_status()
        world.keep_objects(two)
        two.end()
        wait_until(lambda: one.list_running_members() == ["h1"])
        refused = client.patch(f"{prefix}/sandboxes/web", json={"metadata": {}})
        assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
        two.start()
        world.wait_for_members([one, two])
        for method, body in (("PATCH", {"metadata": {}}), ("GET", None)):
            refused = client.request(method, f"{prefix}/sandboxes/web", json=body)
            assert refused.status_code == 410, refused.text
            assert "has ended on host 'h2'" in refused.json()["message"]
        # The run's home is forgotten, too.
        world.keep_objects(one)
    one.end()
    one.start()
    world.wait_for_members([one, two])
    assert _get_status(two, f"{prefix}/sandboxes") in (404, 410)


@pytest.mark.usefixtures("real_times")
def test_no_run_begins_while_etcd_is_away(world: World) -> None:
    one, two = world.start("h1", "h2")
    two.gateway.build_template()
    two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    prefix = _open_plan(one, "a-run-that-has-begun-1")
    world.etcd.stop_answering()
    refused = one.post("/plans", {"run": "a-run-that-begins-now-1"}, 503)
    assert refused["kind"] == "unavailable"
    # A session goes on, and so does the part that it opens now.
    with one.client() as client:
        client.patch(f"{prefix}/sandboxes/web", json={"metadata": {"a": "b"}}).raise_for_status()
        assert client.get(f"{prefix}/sandboxes/web").json()["metadata"] == {"a": "b"}
    world.etcd.answer_again()


def test_a_plan_session_knows_the_names_of_all_hosts(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    plan = one.post("/plans", {"run": f"a-run-with-names-{next(_numbers)}"}, 200)["planID"]
    with one.client() as client:
        for path, body in (
            ("/sandboxes", {"templateID": "base", "name": objects.names["volume"]}),
            ("/volumes", {"name": objects.names["sandbox"]}),
        ):
            refused = client.post(f"/plans/{plan}{path}", json=body)
            assert (refused.status_code, refused.json()["kind"]) == (409, "name_taken"), refused.text
            assert "of host h2" in refused.json()["message"]


def test_a_read_key_gets_no_more_through_a_plan_session(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    with one.client(READ_KEY) as client:
        plan = client.post("/plans", json={"run": "a-run-of-a-reader-1"}).json()["planID"]
        path = f"/plans/{plan}/snapshots/{objects.names['snapshot']}/export"
        assert client.get(path).status_code == 403
        upload = f"/plans/{plan}/templates/{objects.names['template']}/files/{'0' * 64}"
        assert client.get(upload).status_code == 403
        shown = client.get(f"/plans/{plan}/sandboxes/{objects.names['sandbox']}").json()
        assert "envdAccessToken" not in shown


def _run_sandbox_task(host: FleetHost, *, check: bool, **options: Any) -> Any:
    return run_task(_sandbox, host.gateway, check=check, **options)


def test_check_mode_predicts_what_the_module_does_on_the_other_host(pair: Pair) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    for check in (True, False):
        result = _run_sandbox_task(one, check=check, name=[name])
        assert not result.get("failed") and not result["changed"], "it exists on h2"
        for host in pair:
            result = _run_sandbox_task(host, check=check, name=[name], template="base", recreate=True)
            assert not result.get("failed") and not result["changed"], "h1 has a copy of its template"
    for check in (True, False):
        assert _run_sandbox_task(one, check=check, name=[name], state="absent")["changed"]
    with two.client() as client:
        assert client.get(f"/sandboxes/{name}").status_code == 404


def test_a_module_does_not_take_the_sandboxes_of_a_silent_host_for_missing(world: World) -> None:
    one, two = world.start("h1", "h2")
    for host in (one, two):
        host.gateway.build_template()
    two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    two.end()
    wait_until(lambda: one.list_running_members() == ["h1"])
    for names in (["web"], ["web", "db"]):
        for state in ("absent", "running"):
            result = _run_sandbox_task(one, check=False, name=names, state=state, gateway_timeout=4)
            assert result["failed"] and result["failure"]["kind"] == "unavailable", result
            assert "h2" in result["msg"]
    with one.client() as client:
        answer = client.get("/sandboxes", params={"name": "other"})
        assert answer.json() == [] and "x-sandbox-hosts-missing" not in answer.headers, "h2 does not have this name"
