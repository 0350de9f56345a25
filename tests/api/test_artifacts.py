"""Pushing snapshots to a registry and pulling them: what is transferred, what is refused, and what is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine.transfer import artifact_format, registry_client
from sandbox_gateway.engine.transfer.manifest import parse_manifest
from sandbox_gateway.engine.transfer.signing import Signer
from sandbox_gateway.hosts.base import Room, SnapshotPart
from tests.support.artifact_registry import (
    Registry,
    get_signer,
    read,
    registry_started,
    running_gateway,
    take,
    wait_for,
    write,
)
from tests.support.images import PASSWORD, USER, write_auth_file
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.waiting import wait_until
from tests.unit.engine.snapshot_file_samples import make_manifest_fields

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_started(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
def own_registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry that the test may kill."""
    with registry_started(tmp_path / "registry") as registry:
        yield registry


@pytest.fixture(scope="module")
def _gateways(
    tmp_path_factory: pytest.TempPathFactory, shared_registry: Registry
) -> Iterator[tuple[MemoryGateway, MemoryGateway]]:
    with contextlib.ExitStack() as stack:
        roots = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
        first, second = (stack.enter_context(running_gateway(root, shared_registry)) for root in roots)
        yield first, second


@pytest.fixture
def first(_gateways: tuple[MemoryGateway, MemoryGateway]) -> Iterator[httpx.Client]:
    """A client of a gateway with the sandbox `source`."""
    with _gateways[0].client() as client:
        client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
        yield client
    _gateways[0].clear()


@pytest.fixture
def second(_gateways: tuple[MemoryGateway, MemoryGateway]) -> Iterator[httpx.Client]:
    """A client of a different gateway."""
    with _gateways[1].client() as client:
        yield client
    _gateways[1].clear()


@pytest.fixture
def reference(shared_registry: Registry) -> str:
    """A reference that no other test uses."""
    return f"{shared_registry.address}/team/env-{random.randrange(1 << 40)}:before"


def fill(gateway: MemoryGateway, count: int, first_seed: int = 0) -> None:
    """Write ``count`` values of 1 MiB to the sandbox `source`."""
    gateway.machine("source").state.update({f"{number}": make_text(first_seed + number) for number in range(count)})


def make_text(seed: int, size: int = MIB) -> str:
    """Return text that hardly can be compressed to less than three quarters of its size."""
    return random.Random(seed).randbytes(size * 3 // 4 // 3 * 3).hex()[:size]


def push(client: httpx.Client, ref: str, reference: str, **fields: Any) -> dict[str, Any]:
    transfer = wait_for(client, client.post(f"/snapshots/{ref}/push", json={"reference": reference, **fields}))
    assert transfer["status"] == "ready", transfer
    return transfer


def pull(client: httpx.Client, reference: str, kind: str = "snapshots", **fields: Any) -> dict[str, Any]:
    transfer = wait_for(client, client.post(f"/{kind}/pull", json={"reference": reference, **fields}))
    assert transfer["status"] == "ready", transfer
    return transfer


def test_a_pulled_snapshot_is_forked_after_the_original_is_gone(first: httpx.Client, reference: str) -> None:
    write(first, "color", "blue")
    snapshot = take(first)
    transfer = push(first, "taken", reference)
    assert transfer["snapshotID"] == snapshot["snapshotID"] and transfer["chunks"] == transfer["chunksDone"] > 0
    first.delete("/sandboxes/source").raise_for_status()
    first.delete("/snapshots/taken").raise_for_status()
    pulled_id = pull(first, reference)["snapshotID"]
    pulled_snapshot = first.get("/snapshots/taken").json()
    assert pulled_snapshot["snapshotID"] == pulled_id != snapshot["snapshotID"] and pulled_snapshot["memory"] == "full"
    origin = {"snapshotID": snapshot["snapshotID"], "signer": get_signer(first), "omittedMemory": ""}
    assert pulled_snapshot["imported"] == origin
    first.post("/snapshots/taken/fork", json={"name": "copy"}).raise_for_status()
    assert read(first, "color", "copy") == "blue"
    for operation in ("snapshot.push", "snapshot.pull"):
        assert f'operation="{operation}",outcome="ok"' in first.get("/metrics").text


def test_an_artifact_is_a_valid_oci_image_that_describes_itself(
    first: httpx.Client, shared_registry: Registry, reference: str
) -> None:
    snapshot = take(first)
    transfer = push(first, "taken", reference)
    manifest = shared_registry.read_manifest(reference)
    assert manifest["artifactType"] == "application/vnd.grove.sandbox.snapshot.v1"
    assert manifest["annotations"] == {"org.opencontainers.image.title": "taken"}
    assert {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])} <= {
        *shared_registry.list_blobs()
    }
    described = first.get("/artifacts", params={"reference": reference}).json()
    assert (described["snapshotID"], described["names"], described["digest"], described["trusted"]) == (
        snapshot["snapshotID"],
        ["taken"],
        transfer["digest"],
        True,
    )
    by_digest = f"{reference.rpartition(':')[0]}@{transfer['digest']}"
    assert first.get("/artifacts", params={"reference": by_digest}).json()["snapshotID"] == snapshot["snapshotID"]


def test_a_second_push_sends_only_what_has_changed(
    first: httpx.Client, second: httpx.Client, _gateways: tuple[MemoryGateway, MemoryGateway], reference: str
) -> None:
    """The second gateway, which has the first snapshot, also fetches only the changed chunk."""
    fill(_gateways[0], 8)
    take(first, "one")
    first_push = push(first, "one", reference)
    assert first_push["transferredBytes"] > 3 * MIB
    signer = get_signer(first)
    first_pull = pull(second, reference, trust=[signer])
    assert first_pull["transferredBytes"] > 3 * MIB

    write(first, "5", make_text(99))
    take(first, "two")
    second_push = push(first, "two", f"{reference}-2")
    # The value of 1 MiB is in two chunks, which are compressed to little more than half of their size.
    assert 0 < second_push["transferredBytes"] < 2 * MIB * 0.6 + (32 << 10), second_push
    assert second_push["chunksReused"] >= second_push["chunks"] - 2
    second_pull = pull(second, f"{reference}-2", trust=[signer])
    assert 0 < second_pull["transferredBytes"] <= second_push["transferredBytes"]
    second.post("/snapshots/two/fork", json={"name": "copy"}).raise_for_status()
    assert [read(second, f"{number}", "copy") for number in range(8)] == [
        make_text(99 if number == 5 else number) for number in range(8)
    ]
    assert list((_gateways[1].root / "pulled-blobs").iterdir()) == [], "blobs are kept only for interrupted pulls"


def test_an_unchanged_snapshot_is_pushed_again_without_its_bytes(first: httpx.Client, reference: str) -> None:
    write(first, "value", make_text(1))
    take(first)
    digest = push(first, "taken", reference)["digest"]
    again = push(first, "taken", reference)
    assert (again["digest"], again["transferredBytes"]) == (digest, 0)


def test_a_template_takes_the_name_from_its_predecessor(
    first: httpx.Client, second: httpx.Client, reference: str
) -> None:
    response = wait_for(first, first.post("/templates/base/push", json={"reference": reference}))
    assert response["status"] == "ready"
    trust = [get_signer(first)]
    pulled_ids = [pull(second, reference, "templates", name="tool", trust=trust)["snapshotID"] for _ in range(2)]
    assert second.get("/templates/tool").json()["templateID"] == pulled_ids[1]
    assert second.get(f"/templates/{pulled_ids[0]}").status_code == 404
    pull(second, reference, "templates", name="tool:v2", trust=trust)
    second.post("/sandboxes", json={"templateID": "tool:v2", "name": "copy"}).raise_for_status()
    second.delete("/sandboxes/copy").raise_for_status()
    refusal = second.post("/snapshots/pull", json={"reference": reference, "trust": trust}).json()
    assert refusal["kind"] == "invalid" and "sandboxctl template pull" in refusal["message"]
    second.post("/sandboxes", json={"templateID": "base", "name": "busy"}).raise_for_status()
    body = {"reference": reference, "trust": trust, "name": "busy"}
    assert second.post("/templates/pull", json=body).json()["kind"] == "name_taken"
    take(first)
    assert first.post("/templates/taken/push", json={"reference": reference}).json()["kind"] == "not_found"


def test_only_the_disk_is_pushed_or_pulled(
    first: httpx.Client,
    second: httpx.Client,
    _gateways: tuple[MemoryGateway, MemoryGateway],
    reference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(first)
    push(first, "taken", f"{reference}-disk", memory="none")
    trust = [get_signer(first)]
    pull(second, f"{reference}-disk", name="disk", trust=trust)
    assert second.get("/snapshots/disk").json()["memory"] == "none"
    push(first, "taken", reference)
    monkeypatch.setattr(_gateways[1].host, "import_problem", "it was captured with QEMU 1, but this host has 2")
    transfer = pull(second, reference, name="other", trust=trust)
    snapshot = second.get("/snapshots/other").json()
    assert snapshot["memory"] == "none" and snapshot["imported"]["omittedMemory"].startswith("it was captured")
    assert transfer["chunks"] == 3, "the memory and the device state are not fetched"


def test_an_unknown_signer_must_be_trusted_explicitly(
    first: httpx.Client, second: httpx.Client, reference: str
) -> None:
    take(first)
    push(first, "taken", reference)
    for trust in ([], ["0" * 64]):
        refusal = second.post("/snapshots/pull", json={"reference": reference, "trust": trust})
        assert (refusal.status_code, refusal.json()["kind"]) == (403, "untrusted")
    assert second.get("/artifacts", params={"reference": reference}).json()["trusted"] is False
    pull(second, reference, trust=[get_signer(first)])


def test_a_tag_that_was_moved_names_the_new_snapshot(first: httpx.Client, reference: str) -> None:
    write(first, "color", "blue")
    take(first, "one")
    write(first, "color", "red")
    two = take(first, "two")
    old_digest = push(first, "one", reference)["digest"]
    push(first, "two", reference)
    assert first.get("/artifacts", params={"reference": reference}).json()["snapshotID"] == two["snapshotID"]
    pull(first, f"{reference.rpartition(':')[0]}@{old_digest}", name="old")
    first.post("/snapshots/old/fork", json={"name": "copy"}).raise_for_status()
    assert read(first, "color", "copy") == "blue"


def test_only_an_admin_pushes_and_pulls(
    first: httpx.Client, _gateways: tuple[MemoryGateway, MemoryGateway], reference: str
) -> None:
    take(first)
    push(first, "taken", reference)
    body = {"reference": reference}
    for key in (READ_KEY, EXEC_KEY):
        with _gateways[0].client(key) as client:
            for path in ("/snapshots/taken/push", "/snapshots/pull", "/templates/base/push", "/templates/pull"):
                assert client.post(path, json=body).status_code == 403
            assert client.get("/artifacts", params=body).status_code == 403
            plan = client.post("/plans", json={"run": f"a run of {key} with artifacts"}).json()["planID"]
            for path in ("/snapshots/pull", "/templates/pull"):
                assert client.post(f"/plans/{plan}{path}", json=body).status_code == 403
            assert client.get(f"/plans/{plan}/artifacts", params=body).status_code == 403
    with _gateways[0].client(ADMIN_KEY) as client:
        pull(client, reference, name="copy")


def test_a_plan_session_transfers_nothing(
    first: httpx.Client, _gateways: tuple[MemoryGateway, MemoryGateway], shared_registry: Registry, reference: str
) -> None:
    snapshot = take(first)
    push(first, "taken", reference)
    sources, blobs = len(_gateways[0].host.sources), shared_registry.list_blobs().keys()
    with _gateways[0].client(ADMIN_KEY) as client:
        plan = client.post("/plans", json={"run": "a run with artifacts"}).json()["planID"]
        client.base_url = httpx.URL(f"{_gateways[0].url}/plans/{plan}")
        planned_push = client.post("/snapshots/taken/push", json={"reference": f"{reference}-planned"}).json()
        assert (planned_push["status"], planned_push["transferredBytes"]) == ("ready", 0)
        planned_pull = client.post("/snapshots/pull", json={"reference": reference, "name": "planned"}).json()
        assert planned_pull["status"] == "ready"
        planned_snapshot = client.get("/snapshots/planned").json()
        assert planned_snapshot["snapshotID"] == planned_pull["snapshotID"]
        assert planned_snapshot["imported"]["snapshotID"] == snapshot["snapshotID"]
        assert client.post("/snapshots/pull", json={"reference": reference}).json()["kind"] == "name_taken"
        missing_body = {"reference": f"{reference}-missing"}
        assert client.post("/snapshots/pull", json=missing_body).json()["kind"] == "not_found"
    assert first.get("/snapshots/planned").status_code == 404
    assert first.get("/artifacts", params={"reference": f"{reference}-planned"}).status_code == 404
    assert len(_gateways[0].host.sources) == sources and shared_registry.list_blobs().keys() == blobs


@pytest.mark.parametrize(
    "bad_reference",
    ["registry.example/team/env:before", "team/env:before", "env", "oci:/srv/x", "", "x" * 2000, "docker://x"],
)
def test_other_registries_are_not_contacted(first: httpx.Client, bad_reference: str) -> None:
    take(first)
    for path in ("/snapshots/taken/push", "/snapshots/pull"):
        assert first.post(path, json={"reference": bad_reference}).json()["kind"] == "invalid"
    assert first.get("/artifacts", params={"reference": bad_reference}).json()["kind"] == "invalid"


def test_what_cannot_be_pushed_or_pulled_is_refused(
    first: httpx.Client,
    _gateways: tuple[MemoryGateway, MemoryGateway],
    shared_registry: Registry,
    reference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(first)
    digest = push(first, "taken", reference)["digest"]
    by_digest = f"{reference.rpartition(':')[0]}@{digest}"
    assert first.post("/snapshots/taken/push", json={"reference": by_digest}).json()["kind"] == "invalid"
    assert first.post("/snapshots/missing/push", json={"reference": reference}).json()["kind"] == "not_found"
    assert first.post("/snapshots/pull", json={"reference": f"{reference}x"}).json()["kind"] == "not_found"
    assert first.post("/snapshots/pull", json={"reference": reference}).json()["kind"] == "name_taken"
    assert first.post("/snapshots/pull", json={"reference": reference, "name": "../x"}).json()["kind"] == "invalid"
    body = {"reference": reference, "name": "copy", "registryUsername": "joe"}
    assert first.post("/snapshots/pull", json=body).json()["kind"] == "invalid"
    first.post("/volumes", json={"name": "data"}).raise_for_status()
    mounts = [{"name": "data", "path": "/data"}]
    first.post("/sandboxes", json={"templateID": "base", "name": "vol", "volumeMounts": mounts}).raise_for_status()
    first.post("/sandboxes/vol/snapshots", json={"name": "with-data", "volumes": ["data"]}).raise_for_status()
    assert first.post("/snapshots/with-data/push", json={"reference": reference}).json()["kind"] == "unsupported"
    full_room = Room(disk_free=512 << 20, disk_total=100 << 30, memory_free=8 << 30, memory_total=16 << 30)
    monkeypatch.setattr(_gateways[0].host, "available_room", full_room)
    transfer = wait_for(first, first.post("/snapshots/pull", json={"reference": reference, "name": "large"}))
    assert transfer["error"]["kind"] == "no_space" and first.get("/snapshots/large").status_code == 404
    monkeypatch.setattr(_gateways[0].engine.transfers, "_active_count", 2)
    for path, name in (("/snapshots/taken/push", {}), ("/snapshots/pull", {"name": "copy"})):
        assert first.post(path, json={"reference": reference, **name}).json()["kind"] == "busy"
    monkeypatch.undo()
    # An image is not a snapshot.
    manifest = shared_registry.read_manifest(reference)
    del manifest["artifactType"]
    put_manifest(shared_registry, f"{reference}-image", manifest)
    assert "not a snapshot" in first.post("/snapshots/pull", json={"reference": f"{reference}-image"}).json()["message"]


def put_manifest(registry: Registry, reference: str, manifest: dict[str, Any]) -> None:
    repository, _, tag = reference.removeprefix(f"{registry.address}/").partition(":")
    headers = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
    url = f"http://{registry.address}/v2/{repository}/manifests/{tag}"
    httpx.put(url, headers=headers, content=json.dumps(manifest)).raise_for_status()


def test_wrong_bytes_and_missing_blobs_are_refused(
    own_registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_client, "_RETRY_DELAYS", (0.01,))
    reference = f"{own_registry.address}/team/env:before"
    with running_gateway(tmp_path / "source", own_registry) as gateway, gateway.client() as client:
        client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
        write(client, "value", make_text(1))
        take(client)
        push(client, "taken", reference)
        trust = [get_signer(client)]
    # Without this setting, blobs that a refused pull has fetched would not be fetched again.
    with running_gateway(tmp_path / "gateway", own_registry, kept_mb=0) as gateway, gateway.client() as client:
        manifest = own_registry.read_manifest(reference)
        blobs = own_registry.list_blobs()
        for number, descriptor in enumerate([manifest["config"], *manifest["layers"]]):
            path = blobs[descriptor["digest"]]
            contents = path.read_bytes()
            changed_contents = bytearray(contents)
            changed_contents[len(contents) // 2] ^= 1
            damages = [bytes(changed_contents), contents[:-1], contents + b"x"]
            for damaged_contents in damages if number < 3 else damages[:1]:
                path.write_bytes(damaged_contents)
                transfer = attempt_pull(client, reference, trust)
                assert transfer["kind"] in ("invalid", "backend_failed"), transfer
            path.unlink()
            error = attempt_pull(client, reference, trust)
            # The registry answers with status 500 or 404.
            assert error["kind"] in ("conflict", "backend_failed"), error
            path.write_bytes(contents)
            assert client.get("/snapshots/taken").status_code == 404
        # Valid blobs in the wrong order, one too few, and one too many.
        layers = manifest["layers"]
        for wrong_layers in ([*reversed(layers)], layers[1:], [*layers, layers[0]]):
            put_manifest(own_registry, f"{reference}-wrong", {**manifest, "layers": wrong_layers})
            assert attempt_pull(client, f"{reference}-wrong", trust)["kind"] == "invalid"
        pull(client, reference, trust=trust)
        client.post("/snapshots/taken/fork", json={"name": "copy"}).raise_for_status()
        assert read(client, "value", "copy") == make_text(1)


def put_blob(registry: Registry, repository: str, data: bytes) -> None:
    uploads_url = f"http://{registry.address}/v2/{repository}/blobs/uploads/"
    location = httpx.post(uploads_url).raise_for_status().headers["location"]
    digest = artifact_format.compute_blob_digest(data)
    httpx.put(httpx.URL(location).copy_merge_params({"digest": digest}), content=data).raise_for_status()


@pytest.mark.parametrize("announced_bytes", [8192, 4096])
def test_a_part_with_more_data_than_announced_is_refused(
    first: httpx.Client, shared_registry: Registry, reference: str, announced_bytes: int
) -> None:
    """The artifact is signed by a gateway that the administrator trusts."""
    signer = Signer(b"f" * 32)
    parts = [{"name": name, "size": 1 << 20, "data_bytes": 1} for name in ("kernel", "initrd", "disk")]
    manifest = parse_manifest(json.dumps(make_manifest_fields(platform=None, line=False, parts=parts)).encode())
    disk = b'{"color": "green"}'.ljust(8192).ljust(1 << 20, b"\0")
    chunk = artifact_format.Place(SnapshotPart.DISK, 2, 0, len(disk)), hashlib.sha256(disk).hexdigest()
    contents = artifact_format.build_contents(manifest, [0, 0, announced_bytes], [], [chunk])
    config, blob = artifact_format.encode_config(contents, signer), artifact_format.compress_chunk(disk)
    repository = reference.removeprefix(f"{shared_registry.address}/").partition(":")[0]
    for each in (config, blob):
        put_blob(shared_registry, repository, each)
    layers = [artifact_format.describe_blob(blob, artifact_format.CHUNK_TYPE)]
    put_manifest(shared_registry, reference, json.loads(artifact_format.encode_index(config, layers, {})))
    body = {"reference": reference, "name": "foreign", "trust": [signer.fingerprint]}
    transfer = wait_for(first, first.post("/snapshots/pull", json=body))
    if announced_bytes == 8192:
        assert transfer["status"] == "ready", transfer
        first.post("/snapshots/foreign/fork", json={"name": "copy"}).raise_for_status()
        assert read(first, "color", "copy") == "green"
    else:
        assert transfer["error"]["kind"] == "invalid" and "more data than" in transfer["error"]["message"]
        assert first.get("/snapshots/foreign").status_code == 404


def attempt_pull(client: httpx.Client, reference: str, trust: list[str]) -> dict[str, Any]:
    """Return the error of a pull, which may come in the response or later."""
    response = client.post("/snapshots/pull", json={"reference": reference, "trust": trust}, timeout=60)
    error: dict[str, Any] = response.json() if response.status_code != 202 else wait_for(client, response)["error"]
    assert error is not None
    return error


def test_a_registry_that_is_killed_during_a_push_is_awaited(own_registry: Registry, tmp_path: Path) -> None:
    reference = f"{own_registry.address}/team/env:before"
    with running_gateway(tmp_path / "gateway", own_registry) as gateway, gateway.client() as client:
        client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
        fill(gateway, 12)
        take(client)
        response = client.post("/snapshots/taken/push", json={"reference": reference})
        wait_until(lambda: len(own_registry.list_blobs()) >= 2)
        own_registry.kill()
        time.sleep(1)
        assert client.get(f"/transfers/{response.json()['transferID']}").json()["status"] == "running"
        own_registry.start()
        assert wait_for(client, response)["status"] == "ready"
        client.delete("/sandboxes/source").raise_for_status()
        client.delete("/snapshots/taken").raise_for_status()
        pull(client, reference)
        client.post("/snapshots/taken/fork", json={"name": "copy"}).raise_for_status()
        assert read(client, "11", "copy") == make_text(11)


def test_an_interrupted_transfer_continues_where_it_was(
    own_registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry dies during a push and during a pull. Both fail, and neither transfers a blob twice."""
    monkeypatch.setattr(registry_client, "_RETRY_DELAYS", (0.1,))
    patch = pytest.MonkeyPatch()
    reference = f"{own_registry.address}/team/env:before"
    with running_gateway(tmp_path / "gateway", own_registry) as gateway, gateway.client() as client:
        client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
        fill(gateway, 24)
        take(client)

        def kill_after_twelve(method_name: str) -> None:
            method, calls = getattr(registry_client.RegistryClient, method_name), itertools.count()

            async def call(*arguments: Any) -> Any:
                if next(calls) == 12:
                    own_registry.kill()
                return await method(*arguments)

            patch.setattr(registry_client.RegistryClient, method_name, call)

        def interrupt(response: httpx.Response) -> int:
            """Wait until a transfer has failed. Return the transferred bytes."""
            transfer = wait_for(client, response)
            patch.undo()
            own_registry.start()
            assert transfer["error"]["kind"] == "backend_failed" and transfer["chunksDone"] < transfer["chunks"]
            transferred: int = transfer["transferredBytes"]
            return transferred

        kill_after_twelve("put_blob")
        interrupted_bytes = interrupt(client.post("/snapshots/taken/push", json={"reference": reference}))
        assert client.get("/artifacts", params={"reference": reference}).status_code == 404
        transfer = push(client, "taken", reference)
        total_bytes = sum(path.stat().st_size for path in own_registry.list_blobs().values())
        sent_bytes = interrupted_bytes + transfer["transferredBytes"]
        # Each worker may have sent a part of one blob in vain, or a blob whose receipt was not confirmed.
        assert total_bytes - 4 * MIB <= sent_bytes <= total_bytes + 9 * MIB
        assert transfer["chunksReused"] >= 5
        client.delete("/sandboxes/source").raise_for_status()
        client.delete("/snapshots/taken").raise_for_status()

        kill_after_twelve("get_blob")
        interrupted_bytes = interrupt(client.post("/snapshots/pull", json={"reference": reference}))
        kept_paths = [*(gateway.root / "pulled-blobs").iterdir()]
        assert len(kept_paths) >= 5 and client.get("/snapshots/taken").status_code == 404
        kept_bytes = sum(path.stat().st_size for path in kept_paths)
        # The disk may damage what is kept.
        kept_paths[0].write_bytes(b"x" * kept_paths[0].stat().st_size)
        transfer = wait_for(client, client.post("/snapshots/pull", json={"reference": reference}))
        assert transfer["error"]["kind"] == "backend_failed" and "this host's disk" in transfer["error"]["message"]
        assert transfer["transferredBytes"] <= total_bytes - kept_bytes
        transfer = pull(client, reference)
        assert 0 < transfer["transferredBytes"] < 2 * MIB, "only the damaged blob is fetched again"
        assert list((gateway.root / "pulled-blobs").iterdir()) == []
        client.post("/snapshots/taken/fork", json={"name": "copy"}).raise_for_status()
        assert read(client, "23", "copy") == make_text(23)


@pytest.mark.parametrize("kind", ["snapshot", "template"])
def test_a_pull_that_is_cancelled_while_it_commits_is_completed(
    first: httpx.Client,
    reference: str,
    _gateways: tuple[MemoryGateway, MemoryGateway],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    gateway = _gateways[0]
    ref = "base" if kind == "template" else take(first)["snapshotID"]
    transfer = wait_for(first, first.post(f"/{kind}s/{ref}/push", json={"reference": reference}))
    assert transfer["status"] == "ready", transfer
    artifacts, commit_import = gateway.engine.artifacts, gateway.engine.transfers.commit_import
    earlier_paths = {*(gateway.root / "pulled-blobs").iterdir()}

    async def commit_and_cancel(*arguments: Any) -> None:
        (running,) = (each for each in artifacts.list_transfers() if each.status == "running")
        assert running.task is not None
        running.task.cancel()
        await commit_import(*arguments)

    monkeypatch.setattr(gateway.engine.transfers, "commit_import", commit_and_cancel)
    transfer = wait_for(first, first.post(f"/{kind}s/pull", json={"reference": reference, "name": "pulled"}))
    assert transfer["status"] == "ready" and transfer["error"] is None
    pulled_snapshot = first.get("/snapshots/pulled").raise_for_status().json()
    assert pulled_snapshot["snapshotID"] == transfer["snapshotID"]
    assert {*(gateway.root / "pulled-blobs").iterdir()} <= earlier_paths
    first.delete("/snapshots/pulled").raise_for_status()


def test_a_transfer_that_was_refused_is_not_listed(
    first: httpx.Client, reference: str, _gateways: tuple[MemoryGateway, MemoryGateway]
) -> None:
    take(first)
    push(first, "taken", reference)
    transfers = first.get("/transfers").json()
    assert first.post("/snapshots/pull", json={"reference": reference}).status_code == 409, "the name is taken"
    with contextlib.ExitStack() as stack:
        for _ in range(_gateways[0].engine.config.limits.transfers):
            stack.enter_context(_gateways[0].engine.transfers.slot_held())
        assert first.post("/snapshots/taken/push", json={"reference": reference}).status_code in (429, 503)
    assert first.get("/transfers").json() == transfers


def test_a_transfer_can_be_cancelled(
    first: httpx.Client, shared_registry: Registry, reference: str, _gateways: tuple[MemoryGateway, MemoryGateway]
) -> None:
    fill(_gateways[0], 20, 100)
    take(first)
    response = first.post("/snapshots/taken/push", json={"reference": reference})
    path = f"/transfers/{response.json()['transferID']}"
    assert [each["transferID"] for each in first.get("/transfers").json()][-1] == response.json()["transferID"]
    assert first.delete(path).status_code == 204
    transfer = first.get(path).json()
    assert (transfer["status"], transfer["error"]["kind"]) == ("error", "conflict")
    assert first.delete(path).status_code == 204, "a finished transfer is not cancelled"
    assert first.get("/transfers/none").status_code == 404
    assert _gateways[0].engine.transfers._active_count == 0
    push(first, "taken", reference)


def test_what_interrupted_pulls_keep_is_limited(own_registry: Registry, tmp_path: Path) -> None:
    """A start removes partial files, old blobs, and the oldest ones that exceed the maximum."""
    directory = tmp_path / "gateway" / "pulled-blobs"
    directory.mkdir(parents=True)
    now = time.time()
    for name, age in ((".partial-1", 0), ("a" * 64, 100), ("b" * 64, 90_000), ("c" * 64, 50), ("d" * 64, 10)):
        path = directory / name
        path.write_bytes(bytes(MIB * 3 // 4))
        os.utime(path, (now - age, now - age))
    with running_gateway(tmp_path / "gateway", own_registry, kept_mb=2):
        assert sorted(path.name[0] for path in directory.iterdir()) == ["c", "d"]


def test_credentials_come_from_the_request_or_the_configuration(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry", with_password=True)
    registry.start()
    try:
        reference = f"{registry.address}/team/env:before"
        auth_file = write_auth_file(tmp_path / "auth", registry.address)
        with running_gateway(tmp_path / "one", registry) as gateway, gateway.client() as client:
            client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
            take(client)
            login = {"registryUsername": USER, "registryPassword": PASSWORD}
            for wrong_login in ({}, {**login, "registryPassword": "wrong"}):
                body = {"reference": reference, **wrong_login}
                transfer = wait_for(client, client.post("/snapshots/taken/push", json=body))
                assert transfer["error"]["kind"] == "invalid" and "refuses access" in transfer["error"]["message"]
            push(client, "taken", reference, **login)
            pull(client, reference, name="copy", **login)
            assert client.get("/artifacts", params={"reference": reference}).json()["kind"] == "invalid"
            assert PASSWORD not in json.dumps([client.get("/transfers").json(), client.get("/snapshots").json()])
            signer = get_signer(client)
        other_gateway = running_gateway(tmp_path / "two", registry, auth_file=str(auth_file))
        with other_gateway as gateway, gateway.client() as client:
            pull(client, reference, name="copy", trust=[signer])
            auth_file.write_text("{}")
            assert "skopeo login" in client.post("/snapshots/pull", json={"reference": reference}).json()["message"]
    finally:
        registry.kill()
