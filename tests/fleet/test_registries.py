"""Pushes and pulls in a fleet, with a real registry."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _sandbox, _snapshot

from tests.collection.test_artifact_modules import changed, run_task, run_thrice
from tests.fleet.world import FleetHost, World, created_world
from tests.support.artifact_registry import Registry, take, wait_for
from tests.support.certificates import Authority
from tests.support.etcd import running_etcd
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def registry_world(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[World]:
    root = tmp_path_factory.mktemp("fleet")
    registry = Registry(root / "registry")
    registry.start()
    with running_etcd(root / "etcd") as server, created_world(root, server, authority) as world:
        world.registry = registry.address
        for host in world.start("h1", "h2"):
            host.gateway.build_template()
        world.hosts[1].post("/sandboxes", {"templateID": "base", "name": "source"})
        yield world
    registry.kill()


@pytest.fixture
def hosts(registry_world: World) -> Pair:
    """Two hosts; the second one has the sandbox `source`."""
    one, two = registry_world.hosts
    return one, two


@pytest.fixture
def reference(registry_world: World) -> str:
    return f"{registry_world.registry}/team/env-{next(_numbers)}:before"


def test_a_push_is_followed_and_cancelled_through_every_gateway(hosts: Pair, reference: str) -> None:
    one, two = hosts
    snapshot = take(two.client(), f"taken-{next(_numbers)}")
    with one.client() as client:
        response = client.post(f"/snapshots/{snapshot['snapshotID']}/push", json={"reference": reference})
        assert response.headers["x-sandbox-host"] == "h2"
        transfer = wait_for(client, response)
        assert transfer["status"] == "ready", transfer
        shown = client.get(f"/transfers/{transfer['transferID']}")
        assert shown.headers["x-sandbox-host"] == "h2" and shown.json() == transfer
        assert client.delete(f"/transfers/{transfer['transferID']}").status_code == 204
        unknown = client.get("/transfers/0123456789abcdef")
        assert (unknown.status_code, unknown.headers["x-sandbox-host"]) == (404, "h1")


def test_a_snapshot_on_another_host_is_pushed_once(hosts: Pair, reference: str) -> None:
    one, two = hosts
    name = f"pushed-{next(_numbers)}"
    options: dict[str, Any] = {"name": [name], "sandbox": ["source"], "push_to": reference}
    results = [run_task(_snapshot, one.gateway, **options) for _ in range(2)]
    assert [(each.get("msg"), each["changed"]) for each in results] == [(None, True), (None, False)]
    artifact = one.get("/artifacts", reference=reference)
    assert artifact["trusted"] and artifact["snapshotID"] == two.get(f"/snapshots/{name}")["snapshotID"]
    for host, tag in zip(hosts, ("second", "third"), strict=True):
        assert run_thrice(_snapshot, host.gateway, name=[name], push_to=f"{reference}-{tag}") == changed("push")


def test_a_push_in_a_plan_session_is_found_through_every_gateway(hosts: Pair, reference: str) -> None:
    one, two = hosts
    snapshot = take(two.client(), f"taken-{next(_numbers)}")
    prefix = f"/plans/{one.post('/plans', {'run': 'a-run-that-plans-a-push-1'}, 200)['planID']}"
    path = f"{prefix}/snapshots/{snapshot['snapshotID']}/push"
    with one.client() as client:
        pushed = client.post(path, json={"reference": reference})
        assert pushed.headers["x-sandbox-host"] == "h2" and pushed.status_code < 300, pushed.text
    transfer = f"{prefix}/transfers/{pushed.json()['transferID']}"
    for host in hosts:
        assert host.get(transfer) == pushed.json()
        with host.client() as client:
            assert client.get(f"{prefix}/transfers/0123456789abcdef").status_code == 404
            assert client.get(transfer.removeprefix(prefix)).status_code == 404


def test_members_trust_what_another_member_has_pushed(hosts: Pair, reference: str) -> None:
    one, two = hosts
    snapshot = take(two.client(), f"taken-{next(_numbers)}")
    with two.client() as client:
        wait_for(client, client.post(f"/snapshots/{snapshot['snapshotID']}/push", json={"reference": reference}))
    signers = {each["name"]: each["signer"] for each in one.get("/fleet")["hosts"]}
    assert signers == {"h1": one.get("/signer")["fingerprint"], "h2": two.get("/signer")["fingerprint"]}
    assert signers["h1"] != signers["h2"]
    with one.client() as client:
        # The copy may have the name of its origin.
        transfer = wait_for(client, client.post("/snapshots/pull", json={"reference": reference}))
        assert transfer["status"] == "ready", transfer
        copy = one.get(f"/snapshots/{transfer['snapshotID']}")
        assert copy["names"] == snapshot["names"] and copy["imported"]["signer"] == signers["h2"]
        # forkd's tags stand for all copies.
        flat = f"flat-{snapshot['snapshotID']}"
        assert client.post(f"/v1/snapshots/{copy['names'][0]}/compact", json={"to": flat}).status_code == 201
        for host, id in ((one, copy["snapshotID"]), (two, snapshot["snapshotID"])):
            assert host.get(f"/snapshots/{id}")["names"] == [*snapshot["names"], flat]
        assert client.delete(f"/v1/snapshots/{flat}").status_code == 204
        for host, id in ((one, copy["snapshotID"]), (two, snapshot["snapshotID"])):
            assert host.get(f"/snapshots/{id}")["names"] == snapshot["names"]
    assert one.get("/fleet")["conflicts"] == two.get("/fleet")["conflicts"] == []


def test_a_task_forks_both_copies_of_a_snapshot(hosts: Pair, reference: str) -> None:
    one, two = hosts
    snapshot = f"taken-{next(_numbers)}"
    take(two.client(), snapshot)
    with two.client() as client:
        wait_for(client, client.post(f"/snapshots/{snapshot}/push", json={"reference": reference}))
    with one.client() as client:
        assert wait_for(client, client.post("/snapshots/pull", json={"reference": reference}))["status"] == "ready"
    names = [f"{snapshot}-a", f"{snapshot}-b"]
    options: dict[str, Any] = {"snapshot": snapshot, "names": names, "placement": {"anti_affinity": True}}
    assert len(one.get("/snapshots", name=snapshot)) == 2
    created = run_task(_fork, one.gateway, **options)
    assert created["changed"] and sorted(each["sandbox_host"] for each in created["sandboxes"]) == ["h1", "h2"], created
    assert len({each["forked_from"] for each in created["sandboxes"]}) == 2
    for host in hosts:
        assert run_task(_fork, host.gateway, **options)["outcomes"] == []
        result = run_task(_sandbox, host.gateway, name=names, snapshot=snapshot)
        assert not result["changed"] and not result.get("failed"), result


def test_what_arrives_cannot_get_a_name_of_another_host(hosts: Pair, reference: str) -> None:
    one, two = hosts
    with two.client() as client:
        snapshot = take(client, f"taken-{next(_numbers)}")
        wait_for(client, client.post(f"/snapshots/{snapshot['snapshotID']}/push", json={"reference": reference}))
        file = client.get(f"/snapshots/{snapshot['snapshotID']}/export").raise_for_status().content
        two.post("/volumes", {"name": "data"})
        two.post("/volumes/data/snapshots", {"name": "mark"})
        volume_file = client.get("/volumes/data/snapshots/mark/export").raise_for_status().content
    assert one.get("/volumes/data")["sandboxHost"] == "h2"
    with one.client() as client:
        for refused in (
            client.post("/snapshots/pull", json={"reference": reference, "name": "source"}),
            client.post("/snapshots/import", params={"name": "source"}, content=file),
            client.post("/volumes/import", content=volume_file),
        ):
            assert (refused.status_code, refused.json()["kind"]) == (409, "name_taken"), refused.text
            assert "of host h2" in refused.json()["message"]
        client.post("/volumes/import", params={"name": "own"}, content=volume_file).raise_for_status()
        client.post("/snapshots/import", params={"name": "own-2"}, content=file).raise_for_status()


def test_the_name_of_an_import_is_claimed_before_it_is_complete(hosts: Pair) -> None:
    one, two = hosts
    text = random.Random(1).randbytes(3 << 20).hex()
    two.gateway.machine("source").state.update({f"{number}": text for number in range(2)})
    with two.client() as client:
        snapshot = take(client, "exported")
        file = client.get(f"/snapshots/{snapshot['snapshotID']}/export").raise_for_status().content
    statuses = []

    def send() -> Iterator[bytes]:
        yield file[:-1000]
        wait_until(lambda: two.list_known_hosts("arriving"))
        with two.client() as client:
            statuses.append(client.post("/volumes", json={"name": "arriving"}).status_code)
        yield file[-1000:]

    with one.client() as client:
        response = client.post("/snapshots/import", params={"name": "arriving"}, content=send())
    assert (response.status_code, statuses) == (201, [409]), response.text
