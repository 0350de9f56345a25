"""Moves of sandboxes to other hosts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.fleet import move_recovery
from sandbox_gateway.api.fleet.move_requests import MoveClient
from sandbox_gateway.errors import Conflict, GatewayError, NoSpace, NotFound, Unsupported
from sandbox_gateway.fleet.moves import MoveDirectory
from sandbox_gateway.fleet.peers import HostUnavailable
from sandbox_gateway.fleet.records import MoveRecord
from sandbox_gateway.fleet.store import StoreUnavailable
from sandbox_gateway.hosts.base import Endpoint
from sandbox_gateway.records import Departure, NetworkPolicy, Sandbox, SandboxState, parse_record
from tests.cli.running import Outcome, Run, run_sandboxctl
from tests.fleet.world import FleetHost, Held, World
from tests.support.exported_files import iterate_pieces, read_export
from tests.support.memory_gateway import EXEC_KEY
from tests.support.memory_host import MemoryHost
from tests.support.waiting import wait_until


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `sandboxctl` at a gateway, given with ``host``."""

    def run_command(*args: str, host: FleetHost) -> Outcome:
        return run_sandboxctl(monkeypatch, capsys, *args, url=host.gateway.unix_url)

    return run_command


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_recovery, "_RETRY_SECONDS", 0.1)


def _start(world: World, *names: str) -> list[FleetHost]:
    """Start hosts. Only the first one has the template `base`."""
    hosts = world.start(*names)
    hosts[0].gateway.build_template()
    for host in hosts[1:]:
        wait_until(lambda host=host: host.list_known_hosts("base") == [names[0]])  # type: ignore[misc]
    return hosts


def _create(host: FleetHost, name: str = "web", **fields: Any) -> dict[str, Any]:
    """Create a sandbox in which a key has a value."""
    sandbox: dict[str, Any] = host.post("/sandboxes", {"templateID": "base", "name": name, **fields})
    _exec(host, name, "write", "key", "value")
    return sandbox


def _exec(host: FleetHost, ref: str, *args: str) -> str:
    output: str = host.post(f"/sandboxes/{ref}/exec", {"args": args}, 200)["stdout"]
    return output


def _move(host: FleetHost, ref: str, target: str = "", status: int = 200, **fields: Any) -> Any:
    return host.post(f"/sandboxes/{ref}/move", {**({"host": target} if target else {}), **fields}, status)


def _list_rest(*hosts: FleetHost) -> list[str]:
    """Return what remains of moves: hidden snapshots, marks and machines without a sandbox."""
    rest = []
    for host in hosts:
        index = host.gateway.engine.index
        rest += [f"{host.name}: {each.kind} {each.id}" for each in index.snapshots.values() if each.is_hidden]
        rest += [f"{host.name}: moving {id}" for id in [*index.arrivals, *index.departing_ids]]
        instances = {each.instance for each in index.sandboxes.values()}
        rest += [f"{host.name}: machine {each}" for each in host.host.machines if each not in instances]
        rest += [f"{host.name}: record {id}" for id in host.host.saved_sandboxes if id not in index.sandboxes]
    return rest


def _list_hosts(host: FleetHost) -> dict[str, str]:
    """Return the host of each sandbox in the list of a gateway, which contains each once."""
    entries = host.get("/sandboxes")
    assert len(entries) == len({each["sandboxID"] for each in entries})
    return {each["name"]: each["sandboxHost"] for each in entries}


def test_a_running_sandbox_keeps_everything(world: World) -> None:
    one, _, three = hosts = _start(world, "h1", "h2", "h3")
    before = _create(one, timeout=3600, metadata={"team": "blue"}, envVars={"A": "1"})
    details = one.get("/sandboxes/web")
    moved = _move(three, "web", "h2")
    assert moved["sandboxHost"] == "h2"
    for host in hosts:
        wait_until(lambda host=host: host.list_known_hosts("web") == ["h2"])  # type: ignore[misc]
        assert host.list_known_hosts(before["sandboxID"]) == ["h2"]
        after = host.get("/sandboxes/web")
        changed = {key for key in details if details[key] != after.get(key)}
        # The template is not on the new host, so its name is not known there.
        assert changed == {"sandboxHost", "startedAt", "address", "generation", "alias"}
        assert _exec(host, "web", "read", "key") == "value"
        assert _list_hosts(host) == {"web": "h2"}
        assert host.get_directory().list_conflicts() == []
    assert _list_rest(*hosts) == [] and not one.host.machines
    # The name is taken, and becomes free with the sandbox.
    assert one.post("/sandboxes", {"templateID": "base", "name": "web"}, 409)["kind"] == "name_taken"
    with one.client() as client:
        assert client.delete("/sandboxes/web").status_code == 204
    wait_until(lambda: one.list_known_hosts("web") == [])
    _create(one)


def test_a_sandbox_moves_there_and_back(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    for host in ("h2", "h1", "h2"):
        assert _move(one, "web", host)["sandboxHost"] == host
        assert _exec(two, "web", "read", "key") == "value"
    unchanged = two.get("/sandboxes/web")
    assert _move(one, "web", "h2")["startedAt"] == unchanged["startedAt"], "it is there already"
    assert _list_rest(one, two) == []


def test_a_paused_sandbox_stays_paused(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    one.post("/sandboxes/web/pause", status=204)
    one.post("/snapshots/base/fork", {"names": ["later"], "paused": True})
    for name in ("web", "later"):
        assert _move(one, name)["state"] == "paused"
    assert not two.host.machines and not one.host.saved_sandboxes
    for name in ("web", "later"):
        two.post(f"/sandboxes/{name}/resume", {})
    assert _exec(one, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []
    assert one.get("/snapshots/base")["names"] == ["base"], "the template stays"


def test_placement_chooses_a_host_with_room_that_is_not_cordoned(world: World) -> None:
    one, two, three, four = _start(world, "h1", "h2", "h3", "h4")
    for host, free in ((two, 20 << 30), (three, 12 << 30), (four, 10 << 30)):
        host.host.available_room = replace(host.host.available_room, memory_free=free)
    for name in ("h2", "h3", "h4"):
        wait_until(lambda name=name: _find_host(one, name)["memoryFreeBytes"] >= 10 << 30)  # type: ignore[misc]
    _create(one)
    _create(one, "other")
    _set_cordoned(one, "h2", True)
    # The host that seems to be the best has no room after all.
    three.host.available_room = replace(three.host.available_room, memory_free=0)
    assert _move(one, "web")["sandboxHost"] == "h4"
    refused = _move(one, "other", "h2", 409)
    assert refused["message"].startswith("host 'h2' is cordoned")
    assert one.get("/sandboxes/other")["state"] == "running"
    _set_cordoned(one, "h3", True)
    _set_cordoned(one, "h4", True)
    refused = _move(one, "other", status=409)
    assert "h2 (cordoned), h3 (cordoned), h4 (cordoned)" in refused["message"]


def _find_host(observer: FleetHost, name: str) -> Any:
    return next(host for host in observer.get("/fleet")["hosts"] if host["name"] == name)


def _set_cordoned(host: FleetHost, name: str, cordoned: bool) -> None:
    with host.client() as client:
        client.patch(f"/fleet/hosts/{name}", json={"cordoned": cordoned}).raise_for_status()
    wait_until(lambda: _find_host(host, name)["cordoned"] == cordoned)


def test_requests_that_cannot_be_carried_out_change_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _start(world, "h1", "h2")
    one.post("/volumes", {"name": "data"})
    one.post("/volumes", {"name": "cache"})
    mounts = [{"name": "data", "path": "/data"}, {"name": "cache", "path": "/cache"}]
    _create(one, "with-volumes", volumeMounts=mounts)
    refused = _move(two, "with-volumes", "h2", 409)
    assert "mounts the volumes data, cache, and volumes do not move: detach the volumes" in refused["message"]
    assert refused["blockers"] == ["data", "cache"]
    _create(one)
    assert "the fleet has no host 'h9': use one of h2" in _move(one, "web", "h9", 404)["message"]
    assert _move(one, "none", "h2", 404)["kind"] == "not_found"
    assert _move(one, "web", "h2", 400, memory="some")["kind"] == "invalid"
    with one.client(EXEC_KEY) as client:
        assert client.post("/sandboxes/web/move", json={"host": "h2"}).status_code == 403
    plan = one.post("/plans", {"run": "0" * 32}, 200)["planID"]
    assert one.post(f"/plans/{plan}/sandboxes/web/move", {"host": "h2"}, 400)["kind"] == "unsupported"
    one.post("/sandboxes/web/pause", {"memory": False}, 204)
    assert "resume it, then move it" in _move(one, "web", "h2", 409)["message"]
    one.post("/sandboxes/web/resume", {})
    with monkeypatch.context() as patch:
        patch.setattr(two.host, "check_network", _refuse)
        assert _move(one, "web", "h2", 400)["message"] == "host 'h2': no domain names"
    machines = {**one.host.machines}
    two.end()
    wait_until(lambda: _find_host(one, "h2")["state"] == "absent")
    assert "h2 (its gateway does not run)" in _move(one, "web", "h2", 409)["message"]
    assert one.host.machines == machines and _list_rest(one) == []


def test_memory_moves_only_to_hosts_of_the_same_platform(
    world: World, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    two = world.create_host("h2", _OtherPlatform())
    two.start()
    (one,) = _start(world, "h1")
    world.wait_for_members([one, two])
    _create(one)
    refused = run("move", "web", host=one)
    assert refused.code == 4
    assert "h2 (it cannot restore the memory, because its platform differs; --no-memory moves only" in refused.err
    assert one.get("/sandboxes/web")["state"] == "running"
    starts = two.gateway.engine.machines.start_counts
    assert run("move", "web", "--no-memory", "--json", host=one).json["sandboxHost"] == "h2"
    assert starts["boot"] == 1 and starts["memory"] == 0
    assert _exec(one, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


def _refuse(policy: NetworkPolicy) -> None:
    raise Unsupported("no domain names")


class _OtherPlatform(MemoryHost):
    def describe_platform(self) -> dict[str, str]:
        return {"accelerator": "other"}


class _HostWithoutMemory(MemoryHost):
    """Like a jail host: it captures only files, also those of a stopped machine."""

    abilities = replace(
        MemoryHost.abilities, memory=False, atomic_capture=True, independent_snapshots=False, prewarm=False
    )

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        if sandbox.instance not in self.machines:
            raise Conflict("its machine is not running")
        return super().get_endpoint(sandbox)

    async def capture(self, sandbox: Any, snapshot: Any, **options: Any) -> Any:
        if sandbox.instance in self.machines:
            return await super().capture(sandbox, snapshot, **options)
        self.disks[snapshot.id] = dict(self.disks[sandbox.instance])
        return snapshot.model_copy(update={"resources": sandbox.resources})


def test_a_host_without_memory_sends_the_files_of_a_stopped_sandbox(world: World) -> None:
    one, two = (world.create_host(name, _HostWithoutMemory()) for name in ("h1", "h2"))
    for host in (one, two):
        host.start()
    world.wait_for_members([one, two])
    one.gateway.build_template()
    wait_until(lambda: two.list_known_hosts("base") == ["h1"])
    _create(one)
    _create(one, "stopped")
    one.post("/sandboxes/stopped/pause", status=204)
    for name, state in (("web", "running"), ("stopped", "paused")):
        assert _move(two, name, "h2")["state"] == state
    two.post("/sandboxes/stopped/resume", {})
    for name in ("web", "stopped"):
        assert _exec(one, name, "read", "key") == "value"
    # The machines need the snapshots that have arrived.
    assert len(_list_rest(one, two)) == 2
    for name in ("web", "stopped"):
        with one.client() as client:
            client.delete(f"/sandboxes/{name}").raise_for_status()
    assert _list_rest(one, two) == []


def test_a_sandbox_that_cannot_be_started_goes_on_where_it_was(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    two.host.failing_names = {"web"}
    refused = _move(one, "web", "h2", 500)
    assert refused["message"] == "host 'h2': no machine for web"
    assert one.get("/sandboxes/web")["state"] == "running"
    assert _exec(two, "web", "read", "key") == "value"
    wait_until(lambda: two.list_known_hosts("web") == ["h1"] == one.list_known_hosts("web"))
    assert _list_rest(one, two) == []
    two.host.failing_names = set()
    assert _move(one, "web", "h2")["sandboxHost"] == "h2", "it can be tried again"


def test_nobody_changes_a_sandbox_that_moves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _start(world, "h1", "h2")
    id = _create(one)["sandboxID"]
    held = Held(two, "fork", monkeypatch)
    with one.client() as client, two.client() as other:
        move = _start_thread(lambda: _move(one, "web", "h2"))
        wait_until(lambda: held.count == 1)
        # The move is committed, but the target has not created the sandbox yet.
        wait_until(lambda: one.list_known_hosts(id) == ["h2"])
        for each in (client, other):
            for path, body in (("resume", {}), ("pause", {}), ("move", {"host": "h2"}), ("snapshots", {})):
                answer = each.post(f"/sandboxes/web/{path}", json=body)
                assert answer.status_code == 429 and "is" in answer.json()["message"], answer.text
                assert "moved" in answer.json()["message"]
            assert each.delete("/sandboxes/web").status_code == 429
        assert _list_hosts(one) == {"web": "h1"}
        held.release()
        move.join(30)
    assert _exec(one, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


def _start_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_client_that_goes_away_before_the_commit_aborts_the_move(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    held = Held(two, "begin_import", monkeypatch)
    with one.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/sandboxes/web/move", json={"host": "h2"}, timeout=5)
    assert held.count == 1
    wait_until(lambda: one.get("/sandboxes/web")["state"] == "running")
    held.release()
    assert _exec(two, "web", "read", "key") == "value"
    wait_until(lambda: _list_rest(one, two) == [])
    assert _list_hosts(two) == {"web": "h1"}


@pytest.mark.parametrize("method", ["commit", "begin"])
def test_etcd_is_away(world: World, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """If etcd does not answer when the move is to be committed, nobody runs the sandbox until it does."""
    one, two = _start(world, "h1", "h2")
    _create(one)
    work = getattr(MoveDirectory, method)

    async def carry_out_and_fail(*arguments: Any) -> None:
        await work(*arguments)
        raise StoreUnavailable("etcd does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(MoveDirectory, method, carry_out_and_fail)
        one.client().post("/sandboxes/web/move", json={"host": "h2"})
    location = "h2" if method == "commit" else "h1"
    wait_until(lambda: _list_rest(one, two) == [])
    wait_until(lambda: _list_hosts(one) == {"web": location} == _list_hosts(two))
    assert _exec(one, "web", "read", "key") == "value"
    # The key of the move is removed.
    wait_until(lambda: one.client().post("/sandboxes/web/move", json={"host": "h2"}).status_code == 200)
    assert _exec(one, "web", "read", "key") == "value"


def test_the_host_of_each_sandbox_is_drained(world: World, run: Run) -> None:
    one, two, three = _start(world, "h1", "h2", "h3")
    one.post("/volumes", {"name": "data"})
    _create(one, "with-volume", volumeMounts=[{"name": "data", "path": "/data"}])
    for name in ("a", "b"):
        _create(one, name)
    one.post("/sandboxes/b/pause", status=204)
    wait_until(lambda: two.list_known_hosts("b") == ["h1"])
    drained = run("host", "drain", "h1", host=two)
    assert drained.code == 4, drained.err
    assert "a: moved to h" in drained.out and "b: moved to h" in drained.out
    assert "1 sandbox remains on h1, which is cordoned:\n  with-volume: sandbox with-volume mounts" in drained.err
    assert _list_hosts(two)["with-volume"] == "h1"
    with one.client() as client:
        client.delete("/sandboxes/with-volume").raise_for_status()
    drained = run("host", "drain", "h1", "--json", host=three)
    assert drained.code == 0 and drained.json == {"host": "h1", "moved": [], "remaining": []}
    assert _find_host(two, "h1")["cordoned"]
    assert "h1" not in _list_hosts(one).values()
    refused = run("host", "drain", "h9", host=one)
    assert refused.code == 3
    one.end()
    wait_until(lambda: _find_host(two, "h1")["state"] == "absent")
    refused = run("host", "drain", "h1", host=two)
    assert refused.code == 1 and "the gateway of host h1 does not answer" in refused.err


@pytest.mark.parametrize("failing", ["send_first_pass", "read_first_pass", ""])
def test_a_running_sandbox_is_sent_before_it_is_paused(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """If that fails, such as with a target that has an older release, all data is sent in the pause."""
    one, two = _start(world, "h1", "h2")
    _create(one)
    _exec(one, "web", "write", "early", "sent first")
    states: list[tuple[str, str]] = []
    open_snapshot = MemoryHost.open_snapshot

    async def record(host: MemoryHost, snapshot: Any, *, base: Any = None, **options: Any) -> Any:
        states.append((one.gateway.engine.sandboxes.get("web").state.value, "whole" if base is None else "rest"))
        return await open_snapshot(host, snapshot, base=base, **options)

    async def fail(*_: Any) -> Any:
        raise Unsupported("there is no such route")

    async def fail_to_read(*_: Any) -> Any:
        raise Unsupported("there is no such route")
        yield b""

    monkeypatch.setattr(MemoryHost, "open_snapshot", record)
    if failing:
        monkeypatch.setattr(MoveClient, failing, fail if failing == "send_first_pass" else fail_to_read)
    _move(one, "web", "h2")
    assert states == ([("paused", "whole")] if failing else [("running", "whole"), ("paused", "rest")])
    assert _exec(two, "web", "read", "early") == "sent first"
    assert _list_rest(one, two) == []


def test_without_room_for_two_captures_there_is_no_first_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    room = one.gateway.engine.moves.first_passes._room
    require, checks = room.require_room_for_capture, []

    async def require_once(*arguments: Any, **options: Any) -> None:
        checks.append(sum(each.is_hidden for each in one.gateway.engine.index.snapshots.values()))
        if checks[-1]:
            raise NoSpace("the disk is nearly full")
        await require(*arguments, **options)

    monkeypatch.setattr(room, "require_room_for_capture", require_once)
    _move(one, "web", "h2")
    assert checks == [0, 1, 0], "the first capture was not removed before the pause"
    assert _exec(two, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


def test_a_sandbox_that_is_paused_during_the_first_pass_stays_paused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    send_first_pass = MoveClient.send_first_pass

    async def send_and_pause(client: MoveClient, sandbox: str, order: Any) -> None:
        await send_first_pass(client, sandbox, order)
        await one.gateway.engine.sandboxes.pause(sandbox)

    monkeypatch.setattr(MoveClient, "send_first_pass", send_and_pause)
    assert _move(one, "web", "h2")["state"] == "paused"
    assert not two.host.machines
    one.post("/sandboxes/web/resume", status=201)
    assert _exec(two, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


@pytest.mark.parametrize("error", [Unsupported("no reflinks"), NoSpace("no room"), NotFound("first pass", "1")])
def test_a_target_that_cannot_use_the_first_pass_gets_all_data(
    world: World, monkeypatch: pytest.MonkeyPatch, error: GatewayError
) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    bases: list[bool] = []
    begin_import = MemoryHost.begin_import

    async def refuse(host: MemoryHost, *arguments: Any, base: Any = None, **options: Any) -> Any:
        bases.append(base is not None)
        if base is not None:
            raise error
        return await begin_import(host, *arguments, base=base, **options)

    monkeypatch.setattr(MemoryHost, "begin_import", refuse)
    _move(one, "web", "h2")
    assert bases == [False, True, False]
    assert _exec(two, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


def test_a_new_first_pass_replaces_the_one_of_an_earlier_move(world: World) -> None:
    one, two = _start(world, "h1", "h2")
    id = _create(one)["sandboxID"]
    passes = one.gateway.engine.moves.first_passes
    received = two.gateway.engine.moves.first_passes

    files: list[list[bytes]] = []

    async def read(move: str) -> None:
        async with passes.captured(id, move, memory=True):
            files.append(await read_export(passes.export(id, move, memory=True)))

    for move in "12":
        one.gateway.run_in_loop(read(move))

    async def receive_both() -> None:
        receiving = (received.receive(id, move, iterate_pieces(file)) for move, file in zip("12", files, strict=True))
        await asyncio.gather(*receiving)
        for move in "12":
            await received.forget(id, move)

    two.gateway.run_in_loop(receive_both())
    wait_until(lambda: _list_rest(one, two) == [])


def test_a_first_pass_whose_move_ends_early_is_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)

    async def fail(*_: Any) -> None:
        raise Conflict("it cannot be paused")

    with monkeypatch.context() as patch:
        patch.setattr(one.gateway.engine.moves, "depart", fail)
        _move(one, "web", "h2", 409)
    wait_until(lambda: _list_rest(one, two) == [])
    assert _exec(two, "web", "read", "key") == "value"
    # It did not end: the source has died.
    first_passes = two.gateway.engine.moves.first_passes
    monkeypatch.setattr(move_recovery.MoveRecovery, "_find", lambda *_: asyncio.sleep(0, "a move"))
    monkeypatch.setattr("sandbox_gateway.engine.first_passes._MAX_HOLD_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(one.gateway.engine.moves, "depart", fail)
        one.client().post("/sandboxes/web/move", json={"host": "h2"})
    wait_until(lambda: first_passes.list_received() == [] and not _list_hidden(two))


def _list_hidden(host: FleetHost) -> list[str]:
    return [each.id for each in host.gateway.engine.index.snapshots.values() if each.is_hidden]


def test_a_target_that_has_lost_the_sandbox_before_it_created_it_does_not_get_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start(world, "h1", "h2")
    _create(one)
    target_moves = two.gateway.engine.moves

    async def lose_and_fail(id: str, move: str, *, must_start: bool) -> None:
        await target_moves.discard_arrival(id, move)
        raise Conflict("the disk is gone")

    async def fail(*_: Any) -> bool:
        raise StoreUnavailable("etcd does not answer")

    monkeypatch.setattr(target_moves, "adopt", lose_and_fail)
    with monkeypatch.context() as patch:
        patch.setattr(MoveDirectory, "give_back", fail)
        _move(one, "web", "h2", 503)
    wait_until(lambda: _list_hosts(two) == {"web": "h1"})
    wait_until(lambda: one.get("/sandboxes/web")["state"] == "running")
    assert _exec(two, "web", "read", "key") == "value"
    assert _list_rest(one, two) == []


def test_a_sandbox_that_was_deleted_after_its_move_does_not_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = _start(world, "h1", "h2")
    id = _create(one)["sandboxID"]

    async def fail(client: MoveClient, sandbox: str, move: MoveRecord) -> Any:
        raise HostUnavailable(f"host {move.target!r} does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(MoveClient, "ask_target", fail)
        _move(one, "web", "h2", 503)
        two.gateway.run_in_loop(two.gateway.engine.sandboxes.delete(id))
    wait_until(lambda: _list_rest(one, two) == [])
    assert _list_hosts(one) == {} == _list_hosts(two)


def test_an_older_release_refuses_the_record_of_a_sandbox_that_moves() -> None:
    """It could otherwise resume a sandbox that its target has."""
    sandbox = Sandbox(name="web", state=SandboxState.PAUSED, departure=Departure(move="1", target="h2"))
    record = sandbox.model_dump(mode="json")
    assert record["state"] not in [each.value for each in SandboxState]
    assert parse_record(Sandbox, record) == sandbox
    assert sandbox.model_copy(update={"departure": None}).model_dump(mode="json")["state"] == "paused"


def test_a_sandbox_is_departing_until_its_host_has_resumed_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the gateway is killed while it takes the sandbox back, it does so after its start."""
    one, two = _start(world, "h1", "h2")
    id = _create(one)["sandboxID"]
    two.host.failing_names = {"web"}
    held = Held(one, "fork", monkeypatch)
    move = threading.Thread(target=_move, args=(one, "web", "h2", 500))
    move.start()
    wait_until(lambda: held.count == 1)
    assert one.host.saved_sandboxes[id].departure is not None
    held.release()
    move.join(60)
    record = one.host.saved_sandboxes[id]
    assert (record.departure, record.state) == (None, SandboxState.RUNNING)
    assert _exec(one, "web", "read", "key") == "value"
    wait_until(lambda: _list_rest(one, two) == [])
