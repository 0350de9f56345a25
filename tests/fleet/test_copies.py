"""Copies of snapshots and templates on other hosts."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine.transfer import transfers
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.errors import Conflict, Unsupported
from sandbox_gateway.records import Snapshot
from tests.fleet.world import FleetHost, World
from tests.support.memory_gateway import EXEC_KEY
from tests.support.memory_host import MemoryHost
from tests.support.waiting import wait_until


def _start(world: World) -> tuple[FleetHost, FleetHost, FleetHost]:
    """Start three hosts. Only the first one has the template `base` and the snapshot `before`."""
    one, two, three = world.start("h1", "h2", "h3")
    one.gateway.build_template()
    one.post("/sandboxes", {"templateID": "base", "name": "web"})
    one.post("/sandboxes/web/snapshots", {"name": "before"})
    for host in (two, three):
        wait_until(lambda host=host: host.list_known_hosts("before") == ["h1"])  # type: ignore[misc]
    return one, two, three


def test_a_copy_has_the_same_names_and_can_be_forked_on_its_host(world: World) -> None:
    one, two, three = _start(world)
    original = one.get("/snapshots/before")
    copy = two.post("/snapshots/before/copy?host=h3")
    assert copy["names"] == original["names"] and copy["snapshotID"] != original["snapshotID"]
    assert copy["imported"]["snapshotID"] == original["snapshotID"]
    assert three.post("/snapshots/before/copy?host=h3", status=200)["snapshotID"] == copy["snapshotID"]
    wait_until(lambda: two.list_known_hosts("before") == ["h1", "h3"])
    fork = {"names": ["a", "b"], "placement": {"antiAffinity": True}}
    forks = two.post("/snapshots/before/fork", fork)["sandboxes"]
    assert {each["sandboxHost"] for each in forks} == {"h1", "h3"}
    template = one.post("/snapshots/base/copy?host=h2")
    assert template["names"] == ["base"]
    assert two.post("/sandboxes", {"templateID": "base"})["sandboxHost"] == "h2"


def test_a_copy_of_a_copy_is_a_copy_of_the_original(world: World) -> None:
    """All of them may have the same name, because they have the same contents. The first host is down."""
    one, two, three = _start(world)
    original = one.get("/snapshots/before")
    two.post("/snapshots/before/copy?host=h3")
    wait_until(lambda: two.list_known_hosts("before") == ["h1", "h3"])
    one.end()
    wait_until(lambda: two.list_running_members() == ["h2", "h3"])
    copy = two.post("/snapshots/before/copy?host=h2")
    assert copy["names"] == ["before"] and copy["imported"]["snapshotID"] == original["snapshotID"]
    wait_until(lambda: three.list_known_hosts("before") == ["h1", "h2", "h3"])
    assert [host.get("/fleet")["conflicts"] for host in (two, three)] == [[], []]


def test_requests_that_cannot_be_carried_out_are_refused(world: World) -> None:
    one, two, _ = _start(world)
    refused = one.post("/snapshots/before/copy?host=h9", status=404)
    assert "the fleet has no host 'h9': use one of h1, h2, h3" in refused["message"]
    assert one.post("/snapshots/none/copy?host=h2", status=404)["kind"] == "not_found"
    with two.client(EXEC_KEY) as client:
        assert client.post("/snapshots/before/copy", params={"host": "h2"}).status_code == 403
    one.post("/volumes", {"name": "data"})
    mounts = [{"name": "data", "path": "/data"}]
    one.post("/sandboxes", {"templateID": "base", "name": "with-volume", "volumeMounts": mounts})
    one.post("/sandboxes/with-volume/snapshots", {"name": "both", "volumes": ["data"]})
    wait_until(lambda: two.list_known_hosts("both") == ["h1"])
    refused = two.post("/snapshots/both/copy?host=h2", status=400)
    assert "host 'h1' does not export the snapshot: " in refused["message"] and "includes volumes" in refused["message"]
    plan = one.post("/plans", {"run": "0" * 32}, 200)["planID"]
    assert one.post(f"/plans/{plan}/snapshots/before/copy?host=h2", status=400)["kind"] == "unsupported"
    assert two.list_known_hosts("before") == ["h1"]
    assert [each["names"] for each in two.get("/snapshots") if each["sandboxHost"] == "h2"] == []


def _record_bases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each export adds the name of its base; "" if it is whole."""
    bases: list[str] = []
    open_snapshot = MemoryHost.open_snapshot

    async def record(host: MemoryHost, snapshot: Snapshot, *, base: Snapshot | None = None, **options: Any) -> Any:
        bases.append("" if base is None else base.names[0])
        return await open_snapshot(host, snapshot, base=base, **options)

    monkeypatch.setattr(MemoryHost, "open_snapshot", record)
    return bases


def test_only_what_differs_from_the_nearest_ancestor_there_is_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = _start(world)
    for name in ("monday", "tuesday", "wednesday"):
        one.post("/sandboxes/web/exec", {"args": ["write", name, "done"]}, 200)
        one.post("/sandboxes/web/snapshots", {"name": name})
    wait_until(lambda: two.list_known_hosts("wednesday") == ["h1"])
    bases = _record_bases(monkeypatch)
    monday = two.post("/snapshots/monday/copy?host=h2")
    # Its parent, tuesday, is not there.
    wednesday = two.post("/snapshots/wednesday/copy?host=h2")
    assert wednesday["parentSnapshotID"] == monday["snapshotID"]
    three.post("/snapshots/base/copy?host=h3")
    wait_until(lambda: one.list_known_hosts("base") == ["h1", "h3"])
    three.post("/snapshots/tuesday/copy?host=h3")
    assert [base for base in bases if base] == ["monday", "base"]
    for host, name in (("h2", "wednesday"), ("h3", "tuesday")):
        body = {"templateID": name, "name": f"fork-{host}", "placement": {"host": host}}
        wait_until(lambda host=host, name=name: host in one.list_known_hosts(name))  # type: ignore[misc]
        one.post("/sandboxes", body)
        for key, value in (("monday", "done"), ("tuesday", "done")):
            answer = one.post(f"/sandboxes/fork-{host}/exec", {"args": ["read", key]}, 200)
            assert answer["stdout"] == value


def test_an_interrupted_copy_continues_with_its_own_base(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, _ = _start(world)
    one.post("/sandboxes/web/exec", {"args": ["write", "noise", os.urandom(4000).hex()]}, 200)
    one.post("/sandboxes/web/snapshots", {"name": "later"})
    wait_until(lambda: two.list_known_hosts("later") == ["h1"])
    two.post("/snapshots/before/copy?host=h2")
    with one.client() as client:
        file = client.get("/snapshots/later/export", params={"since": "before"}).content
    with monkeypatch.context() as patch:
        _stop_after(patch, len(file) - 10)
        two.post("/snapshots/later/copy?host=h2", status=503)
    (kept,) = two.get("/interrupted-imports")
    with monkeypatch.context() as patch:
        # The base of the rest must not change.
        patch.setattr(two.gateway.engine.transfers.bases, "has_copy", lambda *_, **__: False)
        sizes = _stop_after(patch, 1 << 40)
        two.post("/snapshots/later/copy?host=h2")
    assert sizes == [len(file) - kept["receivedBytes"]]


def test_a_source_that_sends_only_whole_files_is_no_obstacle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one with an older release."""
    one, two, _ = _start(world)
    one.post("/sandboxes/web/snapshots", {"name": "later"})
    wait_until(lambda: two.list_known_hosts("later") == ["h1"])
    two.post("/snapshots/before/copy?host=h2")

    async def refuse(*_: Any) -> int:
        raise Unsupported("only jail hosts can export what has changed since another snapshot")

    monkeypatch.setattr(one.gateway.engine.transfers.bases, "require_export_base", refuse)
    assert two.post("/snapshots/later/copy?host=h2")["names"] == ["later"]


def _stop_after(monkeypatch: pytest.MonkeyPatch, size: int) -> list[int]:
    """Make exports fail after ``size`` bytes. Returns a list to which each export adds how much it has sent."""
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    sizes: list[int] = []
    read_pieces = Export.read_pieces

    async def read_some(export: Export) -> Any:
        sizes.append(0)
        async for piece in read_pieces(export):
            yield piece[: size - sizes[-1]]
            sizes[-1] += len(piece)
            if sizes[-1] >= size:
                raise OSError("the connection is lost")

    monkeypatch.setattr(Export, "read_pieces", read_some)
    return sizes


def test_an_interrupted_copy_continues_where_it_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, _ = _start(world)
    with one.client() as client:
        file = client.get("/snapshots/before/export").content
    with monkeypatch.context() as patch:
        _stop_after(patch, len(file) - 10)
        with two.client() as client, pytest.raises(httpx.HTTPStatusError):
            client.post("/snapshots/before/copy", params={"host": "h2"}).raise_for_status()
    (kept,) = two.get("/interrupted-imports")
    assert 0 < kept["receivedBytes"] < len(file)
    with monkeypatch.context() as patch:
        sizes = _stop_after(patch, 1 << 40)
        two.post("/snapshots/before/copy?host=h2")
    assert sizes == [len(file) - kept["receivedBytes"]]
    assert two.get("/interrupted-imports") == []


def test_a_copy_begins_again_if_the_source_would_send_other_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = _start(world)
    with one.client() as client:
        file = client.get("/snapshots/before/export").content
    with monkeypatch.context() as patch:
        _stop_after(patch, len(file) - 10)
        two.post("/snapshots/before/copy?host=h2", status=503)
    assert len(two.get("/interrupted-imports")) == 1

    async def skip(export: Export, size: int, digest: str) -> None:
        raise Conflict("the bytes differ")

    monkeypatch.setattr(Export, "skip", skip)
    two.post("/snapshots/before/copy?host=h2")
    assert two.get("/interrupted-imports") == []
