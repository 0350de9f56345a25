"""The members of the fleet."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.engine.room import RoomReport
from sandbox_gateway.fleet import membership
from sandbox_gateway.fleet.records import HostRecord
from sandbox_gateway.fleet.store import Store
from sandbox_gateway.server import serving
from tests.fleet.world import FleetHost, World
from tests.support.etcd import running_etcd
from tests.support.memory_gateway import MemoryGateway
from tests.support.session import REPOSITORY
from tests.support.waiting import wait_until


def _find_host(observer: FleetHost, name: str) -> dict[str, object]:
    return next(host for host in observer.get("/fleet")["hosts"] if host["name"] == name)


def _start_and_fail(host: FleetHost) -> str:
    """Return why a gateway did not start."""
    with pytest.raises(RuntimeError, match="the gateway did not start") as caught:
        host.start()
    return str(caught.value)


def test_members_see_each_other_with_their_platform_and_load(world: World) -> None:
    one, two = world.create_host("h1", labels={"zone": "a"}), world.create_host("h2")
    for host in (one, two):
        host.start()
    world.wait_for_members([one, two])
    shown = _find_host(two, "h1")
    assert shown["state"] == "running"
    assert (shown["kind"], shown["platform"], shown["labels"]) == ("memory", {"accelerator": "memory"}, {"zone": "a"})
    assert shown["address"] == f"127.0.0.1:{one.port}"
    assert (shown["memoryFreeBytes"], shown["memoryTotalBytes"]) == (8 << 30, 16 << 30)
    assert shown["sandboxes"] == 0
    one.gateway.build_template()
    one.post("/sandboxes", {"templateID": "base"})
    wait_until(lambda: _find_host(two, "h1")["sandboxes"] == 1)
    assert two.get("/fleet")["state"] == "joined"


def test_a_gateway_joins_only_when_it_has_been_imported(world: World) -> None:
    """The import takes seconds on a busy machine. The lease that begins with the membership could end meanwhile."""
    host = world.create_host("h1")
    script = """
import sys
from sandbox_gateway.fleet.membership import Membership
join = Membership.join
async def report_and_join(membership):
    print("imported" if "sandbox_gateway.api.app" in sys.modules else "not imported", flush=True)
    await join(membership)
Membership.join = report_and_join
from tests.fleet import gateway_process
gateway_process.main()
"""
    argv = [sys.executable, "-c", script, str(world.root / "h1"), json.dumps({"fleet": host.create_section()}), "0"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "imported\n"
            assert process.stdout.readline().strip().isdigit()
        finally:
            process.kill()


def test_a_gateway_that_ends_leaves_at_once(world: World) -> None:
    one, two = world.start("h1", "h2")
    assert membership.LEASE_SECONDS > 30, "its lease does not end by itself while this test waits"
    two.end()
    wait_until(lambda: one.list_running_members() == ["h1"])
    assert _find_host(one, "h2")["state"] == "absent"
    two.start()
    world.wait_for_members([one, two])


def test_a_gateway_ends_although_others_keep_connections_to_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE_SECONDS", 25)
    one, two = world.start("h1", "h2")
    two.gateway.build_template()
    assert [each["sandboxHost"] for each in one.get("/templates")] == ["h2"]
    started_at = time.monotonic()
    two.end()
    assert time.monotonic() - started_at < 20


@pytest.mark.usefixtures("real_times")
def test_a_gateway_that_hangs_is_noticed_within_ten_seconds(world: World) -> None:
    one, two = world.start("h1", "h2")
    assert membership.LEASE_SECONDS <= 8
    started_at = time.monotonic()
    with two.hanging():
        wait_until(lambda: one.list_running_members() == ["h1"])
        assert time.monotonic() - started_at > 2, "a short pause does not end a membership"
    world.wait_for_members([one, two])


def test_a_host_that_cannot_measure_its_load_stays_a_member(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = world.start("h1")
    is_measuring, renewals = threading.Event(), []
    renew = Store.renew_lease

    async def measure_forever() -> RoomReport:
        is_measuring.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def count(store: Store, lease: int) -> bool:
        renewals.append(lease)
        return await renew(store, lease)

    monkeypatch.setattr(one.gateway.engine.room, "report", measure_forever)
    assert is_measuring.wait(30)
    monkeypatch.setattr(Store, "renew_lease", count)
    wait_until(lambda: len(renewals) > 2)
    assert len({*renewals}) == 1 and one.list_running_members() == ["h1"]


def test_the_id_of_a_host_is_on_the_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync

    def record_and_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    path = tmp_path / "fleet-host-id"
    host_id = membership._load_host_id(path)
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert membership._load_host_id(path) == host_id and len(synced) == 2


def test_members_stay_while_etcd_is_away(world: World, request: pytest.FixtureRequest) -> None:
    one, two = world.start("h1", "h2")
    world.etcd.kill()
    request.getfixturevalue("real_times")
    wait_until(lambda: not one.get("/fleet")["isCurrent"])
    wait_until(lambda: one.get("/fleet")["state"] == "etcd does not answer")
    time.sleep(8)
    assert one.list_running_members() == ["h1", "h2"]
    world.etcd.start()
    wait_until(lambda: all(host.get("/fleet")["isCurrent"] for host in (one, two)))
    world.wait_for_members([one, two])
    wait_until(lambda: one.get("/fleet")["state"] == "joined")


def test_a_gateway_starts_without_etcd_and_joins_later(world: World) -> None:
    world.etcd.kill()
    one = world.create_host("h1")
    one.start()
    assert one.get("/fleet")["state"] == "etcd does not answer"
    assert one.get("/sandboxes") == []
    world.etcd.start()
    wait_until(lambda: one.list_running_members() == ["h1"])


def test_members_join_an_empty_etcd_again(world: World) -> None:
    one, two = world.start("h1", "h2")
    world.etcd.kill()
    with running_etcd(world.root / "empty") as empty:
        empty.kill()
        empty.port = world.etcd.port
        empty.start()
        for host in (one, two):
            wait_until(lambda host=host: host.get("/fleet")["isCurrent"])  # type: ignore[misc]
        world.wait_for_members([one, two])


def test_a_gateway_with_another_secret_is_refused(world: World) -> None:
    world.start("h1")
    secret_file = world.write_secret(world.root / "other", bytes(32))
    reason = _start_and_fail(world.create_host("h2", secret_file=str(secret_file)))
    assert re.search(r"has another secret than .*: copy the secret of a member", reason)
    assert SECRET_PATTERN.search(reason) is None


SECRET_PATTERN = re.compile("(00){8}|0001020304")


@pytest.mark.parametrize(
    ("size", "mode", "message"),
    [(31, 0o600, "31 bytes long instead of 32"), (32, 0o640, "other users can read"), (None, 0, "does not exist")],
)
def test_an_unusable_secret_file_is_refused(world: World, size: int | None, mode: int, message: str) -> None:
    path = world.root / "other"
    if size is not None:
        world.write_secret(path, bytes(size)).chmod(mode)
    assert message in _start_and_fail(world.create_host("h1", secret_file=str(path)))
    assert not path.exists() or size is not None


def test_another_host_with_the_same_name_is_refused_even_after_the_first_has_gone(world: World) -> None:
    (one,) = world.start("h1")
    impostor = world.create_host("h1")
    impostor._root = world.root / "impostor"
    impostor._root.mkdir()
    assert "another host" in _start_and_fail(impostor)
    (two,) = world.start("h2")[:1]
    with two.client() as client:
        response = client.delete("/fleet/hosts/h1")
        assert (response.status_code, response.json()["kind"]) == (409, "conflict")
        one.end()
        wait_until(lambda: _find_host(two, "h1")["state"] == "absent")
        assert "choose another fleet.name" in _start_and_fail(impostor)
        assert client.delete("/fleet/hosts/h1").status_code == 204
    impostor.start()
    world.wait_for_members([impostor, two])


def test_another_domain_is_refused(world: World) -> None:
    world.start("h1")
    host = world.create_host("h2")
    with pytest.raises(RuntimeError, match=r"server\.domain is 'b\.example', but the fleet's is 'sandbox\.local'"):
        MemoryGateway(host._root, fleet=host.create_section(), server={"domain": "b.example"})


def test_a_host_with_running_sandboxes_keeps_its_own_secret(world: World) -> None:
    one = world.create_host("h1")
    one.start(in_fleet=False)
    one.gateway.build_template()
    one.post("/sandboxes", {"templateID": "base", "name": "old"})
    own_secret = one.gateway.engine.secret.key
    world.keep_objects(one)
    one.end()
    assert "1 running sandboxes that know only its tokens (old)" in _start_and_fail(one)
    assert (one._root / "secret").read_bytes() == own_secret
    # The host founds the fleet with its own secret.
    one._settings["secret_file"] = str(world.write_secret(world.root / "own", own_secret))
    one.start()
    assert one.get("/sandboxes/old")["name"] == "old"


def test_a_host_is_cordoned(world: World) -> None:
    one, two = world.start("h1", "h2")
    with one.client() as client:
        assert client.patch("/fleet/hosts/h2", json={"cordoned": True}).status_code == 204
        assert client.patch("/fleet/hosts/h9", json={"cordoned": True}).status_code == 404
    wait_until(lambda: _find_host(two, "h2")["cordoned"])
    two.end()
    two.start()
    world.wait_for_members([one, two])
    assert _find_host(one, "h2")["cordoned"], "a restart does not end it"
    assert [_read_cordoned_metric(host) for host in (one, two)] == [0, 1]


def _read_cordoned_metric(host: FleetHost) -> float:
    with host.client() as client:
        lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("sandbox_gateway_host_cordoned ")]
    return float(line.split()[1])


def test_several_gateways_change_the_record_of_a_host_at_the_same_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = world.start("h1", "h2")
    transact, signers = Store.transact, ["0" * 64]

    async def change_first(store: Store, compare: Any, success: Any, failure: Any = ()) -> Any:
        if compare and signers:
            key = two.get_directory()._keys.host("h2")
            host = HostRecord(host_id=two.get_directory()._view.hosts["h2"].host_id, signer=signers.pop())
            await store.put(key, host.dump())
        return await transact(store, compare, success, failure)

    with monkeypatch.context() as patch, one.client() as client:
        patch.setattr(Store, "transact", change_first)
        client.patch("/fleet/hosts/h2", json={"cordoned": True}).raise_for_status()
    wait_until(lambda: _find_host(one, "h2")["cordoned"])
    assert _find_host(one, "h2")["signer"] == "0" * 64, "the change of the other gateway is not lost"


def test_records_are_renewed_less_often_in_a_large_fleet(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_RENEW_SECONDS", 0.02)
    monkeypatch.setattr(membership, "_MAX_RECORD_AGE_SECONDS", 0.0)
    monkeypatch.setattr(membership, "_RECORD_AGE_SECONDS_PER_MEMBER", 0.0)
    written_keys: list[str] = []
    put = Store.put

    async def count(store: Store, key: str, value: bytes, lease: int = 0) -> None:
        written_keys.append(key)
        await put(store, key, value, lease)

    monkeypatch.setattr(Store, "put", count)
    world.start("h1")
    start = len(written_keys)
    wait_until(lambda: len(written_keys) > start + 10)
    # As with one member in a fleet in which the whole time for all members is long.
    monkeypatch.setattr(membership, "_RECORD_AGE_SECONDS_PER_MEMBER", 1000.0)
    time.sleep(0.5)
    end = len(written_keys)
    time.sleep(0.5)
    assert len(written_keys) == end and {*written_keys} == {"/grove.sandbox/members/h1"}
