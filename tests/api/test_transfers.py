"""Export and import of snapshots over HTTP: permissions, results, and what a refused import leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, run

from sandbox_gateway.engine.transfer import interrupted, transfers
from sandbox_gateway.engine.transfer.container import Encoder, compress_chunk
from sandbox_gateway.engine.transfer.manifest import parse_manifest
from sandbox_gateway.engine.transfer.signing import Signer
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.hosts.base import Room, SnapshotPart
from sandbox_gateway.records import Snapshot
from tests.api.test_errors import check_refusal
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.memory_host import MemoryHost, MemorySource, MemoryTarget
from tests.support.waiting import wait_until
from tests.unit.engine.snapshot_file_samples import CHUNKS, FILE, make_manifest_fields


@pytest.fixture
def snapshot(memory_gateway: MemoryGateway, api: httpx.Client) -> Iterator[dict[str, Any]]:
    """A snapshot of a sandbox in which the key `color` is `blue`."""
    sandbox = api.post("/sandboxes", json={"templateID": "base", "name": "source"}).json()
    api.post(f"/sandboxes/{sandbox['sandboxID']}/exec", json={"args": ["write", "color", "blue"]}).raise_for_status()
    yield api.post("/sandboxes/source/snapshots", json={"name": "taken", "description": "Blue"}).json()
    assert memory_gateway.host.partial_imports == set()
    assert all(source.is_closed for source in memory_gateway.host.sources)
    assert memory_gateway.engine.transfers._active_count == 0


def export_snapshot(api: httpx.Client, ref: str = "taken", **params: str) -> bytes:
    response = api.get(f"/snapshots/{ref}/export", params=params)
    assert response.status_code == 200, response.text
    return response.content


def import_snapshot(api: httpx.Client, file: bytes, **params: Any) -> httpx.Response:
    return api.post("/snapshots/import", content=file, params=params)


def make_foreign_file() -> tuple[bytes, str]:
    """Return a file that another gateway signed, and the fingerprint of the signer."""
    signer = Signer(b"f" * 32)
    encoder = Encoder(signer)
    head = encoder.encode_head(parse_manifest(json.dumps(make_manifest_fields()).encode()))
    chunks = [chunk for chunk in CHUNKS if chunk[0] != 2]
    chunks.insert(2, (2, 0, b'{"color": "green"}'.ljust(4096)))
    return b"".join(
        [head, *(encoder.encode_chunk(compress_chunk(*chunk)) for chunk in chunks), encoder.encode_end()]
    ), signer.fingerprint


def read_color(api: httpx.Client, sandbox: str) -> str:
    result = api.post(f"/sandboxes/{sandbox}/exec", json={"args": ["read", "color"]}).json()
    output: str = result["stdout"]
    return output


def test_an_imported_snapshot_is_forked_after_the_original_is_gone(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    api.delete("/sandboxes/source").raise_for_status()
    api.delete("/snapshots/taken").raise_for_status()
    response = import_snapshot(api, file)
    assert response.status_code == 201, response.text
    imported_snapshot = response.json()
    assert imported_snapshot["snapshotID"] != snapshot["snapshotID"]
    assert (imported_snapshot["names"], imported_snapshot["description"], imported_snapshot["memory"]) == (
        ["taken"],
        "Blue",
        "full",
    )
    fingerprint = api.get("/signer").json()["fingerprint"]
    origin = {"snapshotID": snapshot["snapshotID"], "signer": fingerprint, "omittedMemory": ""}
    assert imported_snapshot["imported"] == api.get("/snapshots/taken").json()["imported"] == origin
    api.post("/snapshots/taken/fork", json={"name": "copy"}).raise_for_status()
    assert read_color(api, "copy") == "blue"
    assert (memory_gateway.root / "signing-key").stat().st_mode & 0o777 == 0o600


def test_the_extents_may_change_while_they_are_read(
    api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache makes the kernel report data in extents that were holes before they were read."""
    original_extents, calls = MemorySource.extents, []

    def list_growing_extents(source: MemorySource, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        calls.append(part)
        if calls.count(part) > 1:
            source.contents[part] += b"new"
        return original_extents(source, part)

    monkeypatch.setattr(MemorySource, "extents", list_growing_extents)
    assert import_snapshot(api, export_snapshot(api), name="copy").status_code == 201


def test_a_template_is_imported_as_a_template(api: httpx.Client) -> None:
    response = import_snapshot(api, export_snapshot(api, "base"), name="base-copy")
    assert response.json()["kind"] == "template"
    assert api.get("/templates/base-copy").json()["recipe"] == {}
    sandbox = api.post("/sandboxes", json={"templateID": "base-copy", "name": "copy"}).json()
    assert sandbox["templateID"] == response.json()["snapshotID"]


def test_only_the_disk_is_exported_or_imported(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_snapshot(api)
    assert import_snapshot(api, export_snapshot(api, memory="none"), name="exported-disk").json()["memory"] == "none"
    monkeypatch.setattr(memory_gateway.host, "import_problem", "it was captured with QEMU 1, but this host has 2")
    imported_snapshot = import_snapshot(api, file, name="imported-disk").json()
    assert imported_snapshot["memory"] == "none"
    assert imported_snapshot["imported"]["omittedMemory"] == "it was captured with QEMU 1, but this host has 2"


def test_only_an_admin_exports_and_imports(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    for key in (READ_KEY, EXEC_KEY):
        with memory_gateway.client(key) as client:
            for path in ("/snapshots/taken/export", "/snapshots/taken/%65xport", "/snapshots/%74aken/export"):
                assert client.get(path).status_code == 403
            assert client.get("/snapshots/taken/export/", follow_redirects=True).status_code == 403
            assert import_snapshot(client, file, name="stolen").status_code == 403
    with memory_gateway.client(ADMIN_KEY) as client:
        assert import_snapshot(client, file, name="copy").status_code == 201


def test_a_plan_session_exports_nothing_and_predicts_an_import(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    with memory_gateway.client(READ_KEY) as client:
        plan = client.post("/plans", json={"run": "a test of transfers"}).json()["planID"]
        client.base_url = httpx.URL(f"{memory_gateway.url}/plans/{plan}")
        refusal = client.get("/snapshots/taken/export")
        assert (refusal.status_code, refusal.json()["kind"]) == (400, "unsupported")
        assert import_snapshot(client, file[:4096], name="planned").status_code == 201
        assert client.get("/snapshots/planned").json()["imported"]["snapshotID"] == snapshot["snapshotID"]
        assert import_snapshot(client, file[:4096]).json()["kind"] == "name_taken"
        assert import_snapshot(client, file[:20], name="cut").json()["kind"] == "invalid"
        client.delete(f"{memory_gateway.url}/plans/{plan}")
    assert api.get("/snapshots/planned").status_code == 404


def test_an_unknown_signer_must_be_trusted_explicitly(api: httpx.Client, snapshot: dict[str, Any]) -> None:
    file, fingerprint = make_foreign_file()
    for trust in ((), ("0" * 64,)):
        refusal = import_snapshot(api, file, trust=trust)
        assert (refusal.status_code, refusal.json()["kind"]) == (403, "untrusted")
        message = refusal.json()["message"]
        assert f"signed with the key {fingerprint}" in message and f"'trust: {fingerprint}'" in message
    assert import_snapshot(api, file, trust=["yes"]).json()["kind"] == "invalid"
    assert import_snapshot(api, file, name="foreign", trust=["0" * 64, fingerprint]).status_code == 201
    api.post("/snapshots/foreign/fork", json={"name": "green"}).raise_for_status()
    assert read_color(api, "green") == "green"


def test_a_damaged_file_leaves_nothing_behind(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    state = memory_gateway.engine.index.snapshots.keys() | set()
    changed_file = bytearray(file)
    changed_file[-1] ^= 1
    for damaged_file in (b"", b"noise", file[:100], file[:-1], bytes(changed_file), file + b"\0"):
        refusal = import_snapshot(api, damaged_file, name="damaged")
        assert (refusal.status_code, refusal.json()["kind"]) == (400, "invalid"), refusal.text
    assert memory_gateway.engine.index.snapshots.keys() == state and memory_gateway.host.partial_imports == set()
    assert import_snapshot(api, file, name="damaged").status_code == 201


def test_a_name_that_is_taken_or_invalid_is_refused(api: httpx.Client, snapshot: dict[str, Any]) -> None:
    file = export_snapshot(api)
    assert import_snapshot(api, file).json()["kind"] == "name_taken"
    assert import_snapshot(api, file, name="../x").json()["kind"] == "invalid"


def test_an_import_without_room_is_refused(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_snapshot(api)
    full_room = Room(disk_free=512 << 20, disk_total=100 << 30, memory_free=8 << 30, memory_total=16 << 30)
    monkeypatch.setattr(memory_gateway.host, "available_room", full_room)
    refusal = import_snapshot(api, file, name="large")
    assert (refusal.status_code, refusal.json()["kind"]) == (507, "no_space")


def test_transfers_are_limited_and_a_lost_client_cancels_its_import(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    clients = []
    for number in range(2):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(memory_gateway.socket))
        head = f"POST /snapshots/import?name=open-{number} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
        client.sendall(head.encode() + file[:50])
        clients.append(client)
    wait_until(lambda: memory_gateway.engine.transfers._active_count == 2)
    for refusal in (import_snapshot(api, file, name="third"), api.get("/snapshots/taken/export")):
        assert (refusal.status_code, refusal.json()["kind"]) == (429, "busy")
    for client in clients:
        client.close()
    wait_until(lambda: memory_gateway.engine.transfers._active_count == 0)
    assert import_snapshot(api, file, name="third").status_code == 201


def test_a_client_that_stops_reading_an_export_releases_the_snapshot(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    with api.stream("GET", "/snapshots/taken/export") as response:
        next(response.iter_raw(16))
    wait_until(lambda: memory_gateway.engine.transfers._active_count == 0)
    assert memory_gateway.host.sources[-1].is_closed


def test_interrupted_imports_are_listed_and_discarded(
    api: httpx.Client, memory_gateway: MemoryGateway, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Target(MemoryTarget):
        async def suspend(self) -> str:
            return "a token"

        def resume(self, snapshot: Snapshot, sizes: Mapping[SnapshotPart, int]) -> None:
            raise AssertionError("nothing continues this import")

    async def begin(record: Snapshot, *_: object, **__: object) -> Target:
        return Target(record, memory_gateway.host)

    monkeypatch.setattr(memory_gateway.host, "begin_import", begin)
    assert api.get("/interrupted-imports").json() == []
    file = api.get(f"/snapshots/{snapshot['snapshotID']}/export").content
    for cut in (len(file) - 50, len(file) - 40):
        assert import_snapshot(api, file[:cut], name="copy").status_code == 400
        (partial_import,) = api.get("/interrupted-imports").json()
        assert partial_import["snapshotID"] == snapshot["snapshotID"] and partial_import["resumeToken"] == "a token"
        assert partial_import["signer"] == api.get("/signer").json()["fingerprint"]
    path = f"/interrupted-imports/{partial_import['id']}"
    assert (api.delete(path).status_code, api.delete(path).status_code) == (204, 404)
    assert api.get("/interrupted-imports").json() == []


def interrupt_import(
    gateway: MemoryGateway,
    api: httpx.Client,
    file: bytes,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    route: str = "/snapshots/import?name=copy",
    offset: int = 0,
) -> dict[str, Any]:
    """Send the bytes of a file from ``offset`` to ``size``, close the connection, and return the interrupted import."""
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    earlier_bytes = {each["receivedBytes"] for each in api.get("/interrupted-imports").json()}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(gateway.socket))
        client.sendall(f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n".encode())
        client.sendall(file[offset:size])
        wait_until(lambda: gateway.engine.transfers._active_count == 1)
        time.sleep(0.2)
    wait_until(lambda: gateway.engine.transfers._active_count == 0)
    (interrupted_import,) = api.get("/interrupted-imports").json()
    assert interrupted_import["receivedBytes"] not in earlier_bytes
    result: dict[str, Any] = interrupted_import
    return result


def record_skipped_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each continued export adds the number of bytes that the client already has."""
    sizes: list[int] = []
    original_skip = Export.skip

    async def skip(export: Export, size: int, digest: str) -> None:
        await original_skip(export, size, digest)
        sizes.append(size)

    monkeypatch.setattr(Export, "skip", skip)
    return sizes


def test_an_import_continues_with_the_rest_of_its_file(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_snapshot(api)
    first = interrupt_import(memory_gateway, api, file, len(file) - 300, monkeypatch)
    size = first["receivedBytes"]
    assert 0 < size <= len(file) - 300 and first["receivedDigest"] == hashlib.sha256(file[:size]).hexdigest()
    assert (first["snapshotID"], first["resumeToken"]) == (snapshot["snapshotID"], "")
    path = f"/snapshots/import?name=copy&resume={first['id']}"
    for wrong_offset in (0, size - 1, size + 1):
        refusal = api.post(f"{path}&offset={wrong_offset}", content=file[wrong_offset:])
        assert refusal.status_code == 409 and f"send the file from byte {size}" in refusal.json()["message"]
    refusal = api.post(f"/snapshots/import?name=taken&resume={first['id']}&offset={size}", content=file[size:])
    assert refusal.json()["kind"] == "name_taken"
    refusal = api.post(f"/volumes/import?resume={first['id']}&offset={size}", content=file[size:])
    assert "`sandboxctl snapshot import`" in refusal.json()["message"]
    second = interrupt_import(
        memory_gateway, api, file, len(file) - 20, monkeypatch, route=f"{path}&offset={size}", offset=size
    )
    assert second["id"] == first["id"] and second["receivedBytes"] > size
    imported_snapshot = api.post(f"{path}&offset={second['receivedBytes']}", content=file[second["receivedBytes"] :])
    assert imported_snapshot.status_code == 201, imported_snapshot.text
    assert imported_snapshot.json()["snapshotID"] == first["id"]
    api.post("/snapshots/copy/fork", json={"name": "fork"}).raise_for_status()
    assert read_color(api, "fork") == "blue"
    assert api.get("/interrupted-imports").json() == []
    assert api.post(f"{path}&offset={size}", content=b"").json()["kind"] == "not_found"


@pytest.mark.parametrize("end", ["damaged", "incomplete", "discarded", "replaced"])
def test_an_interrupted_import_that_cannot_continue_leaves_nothing_behind(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    snapshot: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    file = export_snapshot(api)
    partial_import = interrupt_import(memory_gateway, api, file, len(file) - 300, monkeypatch)
    assert memory_gateway.host.partial_imports == {partial_import["id"]}
    size = partial_import["receivedBytes"]
    path = f"/snapshots/import?name=copy&resume={partial_import['id']}&offset={size}"
    if end == "damaged":
        assert api.post(path, content=file[size:-1] + bytes([file[-1] ^ 1])).json()["kind"] == "invalid"
    elif end == "incomplete":
        assert "is incomplete: it ends after" in api.post(path, content=file[size:-1]).json()["message"]
    elif end == "discarded":
        assert api.delete(f"/interrupted-imports/{partial_import['id']}").status_code == 204
    else:
        assert import_snapshot(api, file, name="copy").json()["snapshotID"] != partial_import["id"]
    assert memory_gateway.host.partial_imports == set() and api.get("/interrupted-imports").json() == []
    assert api.get("/snapshots/copy").status_code == (200 if end == "replaced" else 404)
    assert memory_gateway.engine.room._pending_imports == []


def test_few_interrupted_imports_are_kept_and_not_for_long(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupted, "_MAX_IMPORTS", 1)
    first, second = export_snapshot(api, "base"), export_snapshot(api)
    first_import = interrupt_import(memory_gateway, api, first, len(first) - 300, monkeypatch)
    monkeypatch.setattr(interrupted, "KEPT_SECONDS", 3.0)
    second_import = interrupt_import(memory_gateway, api, second, len(second) - 250, monkeypatch)
    assert second_import["id"] != first_import["id"]
    assert memory_gateway.host.partial_imports == {second_import["id"]}
    wait_until(lambda: memory_gateway.host.partial_imports == set())
    assert api.get("/interrupted-imports").json() == []


def test_an_unknown_signer_cannot_continue_an_import(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fingerprint = make_foreign_file()
    route = f"/snapshots/import?name=copy&trust={fingerprint}"
    partial_import = interrupt_import(memory_gateway, api, file, len(file) - 200, monkeypatch, route=route)
    size = partial_import["receivedBytes"]
    path = f"/snapshots/import?name=copy&resume={partial_import['id']}&offset={size}"
    assert api.post(path, content=file[size:]).json()["kind"] == "untrusted"
    assert api.post(f"{path}&trust={fingerprint}", content=file[size:]).status_code == 201


def test_the_rest_of_an_export_is_returned(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = export_snapshot(api)
    for size in (1, 21, 22, len(file) // 2, len(file) - 1, len(file)):
        params = {"offset": str(size), "digest": hashlib.sha256(file[:size]).hexdigest()}
        response = api.get("/snapshots/taken/export", params=params)
        assert (response.status_code, response.content) == (206, file[size:])
    for size, prefix in ((20, file[1:21]), (len(file) + 1, file + b"x"), (10, b"")):
        params = {"offset": str(size), "digest": hashlib.sha256(prefix).hexdigest() if prefix else ""}
        refusal = api.get("/snapshots/taken/export", params=params)
        assert (refusal.status_code, refusal.json()["kind"]) == (409, "conflict")
        assert "export the snapshot from the beginning" in refusal.json()["message"]


def test_a_module_continues_interrupted_transfers(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    snapshot: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped_sizes = record_skipped_sizes(monkeypatch)
    path, file = tmp_path / "file", export_snapshot(api)
    (tmp_path / ".file.partial").write_bytes(file[:1000])
    assert run_snapshot(memory_gateway, name=["taken"], export_to=str(path))["changed"]
    assert path.read_bytes() == file and skipped_sizes == [1000]
    partial_import = interrupt_import(memory_gateway, api, file, len(file) - 300, monkeypatch)
    result = run_snapshot(memory_gateway, name=["copy"], import_from=str(path))
    assert result["changed"] and result["snapshot"]["id"] == partial_import["id"]
    assert api.get("/interrupted-imports").json() == []


def test_a_host_that_cannot_transfer_snapshots_says_so(tmp_path: Path) -> None:
    host = MemoryHost()
    host.abilities = dataclasses.replace(host.abilities, transfer=False)  # type: ignore[misc]
    gateway = MemoryGateway(tmp_path, host)
    try:
        gateway.build_template()
        with gateway.client() as client:
            for response in (
                client.get("/snapshots/base/export"),
                import_snapshot(client, FILE),
                client.get("/signer"),
            ):
                assert (response.status_code, response.json()["kind"]) == (400, "unsupported")
                assert "can neither export nor import" in response.json()["message"]
        assert not (tmp_path / "signing-key").exists()
    finally:
        gateway.end()


def run_snapshot(gateway: MemoryGateway, *, check: bool = False, **options: Any) -> dict[str, Any]:
    defaults = {name: option.get("default") for name, option in _snapshot.ARGUMENTS.items()}
    # Each check-mode run has its own plan session.
    file = options.get("export_to") or options["import_from"]
    params = {"gateway_url": gateway.unix_url, **({"check_run": f"a check-mode run with {file}"} if check else {})}
    return run(_snapshot, {**defaults, **params, **options}, check_mode=check)


@pytest.mark.parametrize("check", [True, False], ids=["check mode", "run"])
def test_a_host_that_cannot_export_takes_no_snapshot_for_an_export(tmp_path: Path, check: bool) -> None:
    """Otherwise, the run would take the snapshot and then fail."""
    host = MemoryHost()
    host.abilities = dataclasses.replace(host.abilities, transfer=False)  # type: ignore[misc]
    gateway = MemoryGateway(tmp_path, host)
    try:
        gateway.build_template()
        with gateway.client() as client:
            client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
            options = {"name": ["new"], "sandbox": ["source"], "export_to": str(tmp_path / "file")}
            refusal = run_snapshot(gateway, check=check, **options)
            assert refusal["failure"]["kind"] == "unsupported" and not refusal["changed"]
            assert "can neither export nor import" in refusal["msg"]
            assert client.get("/snapshots/new").status_code == 404
    finally:
        gateway.end()


def test_no_snapshot_is_taken_for_an_export_to_a_missing_directory(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], tmp_path: Path
) -> None:
    options = {"name": ["new"], "sandbox": ["source"], "export_to": str(tmp_path / "exports" / "file")}
    predicted_result = run_snapshot(memory_gateway, check=True, **options)
    assert predicted_result["changed"], "an earlier task of the run may create the directory"
    refusal = run_snapshot(memory_gateway, **options)
    assert not refusal["changed"] and f"create the directory {tmp_path}/exports first" in refusal["msg"]
    assert api.get("/snapshots/new").status_code == 404
    (tmp_path / "exports").mkdir()
    assert run_snapshot(memory_gateway, **options)["changed"]


def test_check_mode_does_not_predict_that_a_file_will_be_missing(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], tmp_path: Path
) -> None:
    file = str(tmp_path / "file")
    assert run_snapshot(memory_gateway, check=True, name=["taken"], export_to=file)["changed"]
    refusal = run_snapshot(memory_gateway, check=True, name=["copy"], import_from=file)
    assert refusal["failed"] and "does not exist" in refusal["msg"]
    assert refusal[PLAN_KEY]["unknown"] == [f"only if no earlier task of the run writes {file}"]
    assert run_snapshot(memory_gateway, name=["taken"], export_to=file)["changed"]
    assert run_snapshot(memory_gateway, name=["copy"], import_from=file)["changed"]


def test_a_check_mode_run_predicts_transfers_and_makes_none(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(export_snapshot(api))
    source_count = len(memory_gateway.host.sources)

    def run_check(kind: Any, **options: Any) -> dict[str, Any]:
        defaults = {name: option.get("default") for name, option in kind.ARGUMENTS.items()}
        params = {"gateway_url": memory_gateway.unix_url, "check_run": "a check-mode run with transfers"}
        return run(kind, {**defaults, **params, **options}, check_mode=True)

    import_result = run_check(_snapshot, name=["copy"], import_from=str(tmp_path / "file"))
    assert import_result["changed"] and import_result["snapshot"]["imported_from"] == snapshot["snapshotID"]
    assert import_result["snapshot"]["id"].startswith("known-after-apply-")
    fork = run_check(_fork, snapshot="copy", names=["fork"])
    assert fork["changed"], fork
    assert not run_check(_snapshot, name=["copy"], import_from=str(tmp_path / "file"))["changed"]
    export_result = run_check(_snapshot, name=["taken"], export_to=str(tmp_path / "new"))
    assert export_result["changed"] and export_result["outcomes"][0]["actions"] == ["export"]
    (tmp_path / "foreign").write_bytes(make_foreign_file()[0])
    refusal = run_check(_snapshot, name=["foreign"], import_from=str(tmp_path / "foreign"))
    assert refusal["failure"]["kind"] == "untrusted", "the signer is known in check mode"
    assert not (tmp_path / "new").exists()
    assert len(memory_gateway.host.sources) == source_count and api.get("/snapshots/copy").status_code == 404


def test_a_module_waits_until_another_transfer_ends(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    pieces: list[bytes] = []
    engine_transfers = memory_gateway.engine.transfers
    engine_transfers._active_count = 2
    threading.Timer(1, setattr, (engine_transfers, "_active_count", 0)).start()
    client = Client(memory_gateway.unix_url)
    client.download("/snapshots/taken/export", pieces.append)
    wait_until(lambda: engine_transfers._active_count == 0)
    engine_transfers._active_count = 2
    threading.Timer(1, setattr, (engine_transfers, "_active_count", 0)).start()
    imported_snapshot = client.upload("/snapshots/import", lambda: iter(pieces), name="copy")
    assert imported_snapshot["imported"]["snapshotID"] == snapshot["snapshotID"]


def test_a_snapshot_with_volumes_is_not_exported(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    api.post("/volumes", json={"name": "data"}).raise_for_status()
    mounts = [{"name": "data", "path": "/data"}]
    api.post("/sandboxes", json={"templateID": "base", "name": "one", "volumeMounts": mounts}).raise_for_status()
    api.post("/sandboxes/one/snapshots", json={"name": "both", "volumes": ["data"]}).raise_for_status()
    message = check_refusal(api.get("/snapshots/both/export"), 400, "unsupported")
    assert "includes volumes, which neither a file nor an artifact can contain" in message
    assert "take a snapshot of the sandbox without volumes" in message


def make_jail_file(gateway: MemoryGateway, guid: int) -> bytes:
    """Return the beginning of a file of a jail host that needs the snapshot with this guid."""
    base = {"guid": guid, "snapshot_id": "ba9876543210", "names": ["monday"]}
    stream_part = {"name": "stream", "size": 5000, "data_bytes": 5000}
    fields = make_manifest_fields(host_kind="jail_zfs", platform=None, line=False, base=base, parts=[stream_part])
    return Encoder(gateway.engine.transfers.get_signer()).encode_head(parse_manifest(json.dumps(fields).encode()))


def test_a_file_needs_the_memory_of_its_base_only_if_its_own_can_be_restored(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    file = api.get("/snapshots/base/export", params={"memory": "none"}).content
    copy = import_snapshot(api, file, name="copy").json()
    assert copy["memory"] == "none"
    encoder = Encoder(memory_gateway.engine.transfers.get_signer())
    base = {"snapshot_id": copy["snapshotID"], "parts": ["disk", "memory"]}
    fields = make_manifest_fields(base=base, names=["small"])
    head = encoder.encode_head(parse_manifest(json.dumps(fields).encode()))
    message = check_refusal(import_snapshot(api, head), 409, "conflict")
    assert f"needs the memory of snapshot {copy['snapshotID']}, which is not available on this host" in message
    memory_gateway.host.import_problem = "the CPU differs"
    # Its memory is omitted, so it is refused only because it is not complete.
    assert "is incomplete" in check_refusal(import_snapshot(api, head), 400, "invalid")
    assert api.get("/snapshots/small").status_code == 404


def test_a_base_is_a_snapshot_of_the_signer_of_the_file(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any]
) -> None:
    """Otherwise, a signer could put its own data under the changes of another signer's snapshot."""
    attacker, owner = Signer(b"a" * 32), Signer(b"o" * 32)
    memory_gateway.engine.transfers.list_fleet_signers = lambda: [attacker.fingerprint, owner.fingerprint]

    def make_file(signer: Signer, name: str, base: dict[str, Any] | None) -> bytes:
        data = json.dumps({"key": name}).encode()
        parts = [{"name": each, "size": len(data), "data_bytes": len(data)} for each in ("kernel", "initrd", "disk")]
        id = "ba9876543210" if base is None else "0123456789ab"
        fields = make_manifest_fields(snapshot_id=id, names=[name], platform=None, line=False, parts=parts, base=base)
        encoder = Encoder(signer)
        records = [encoder.encode_head(parse_manifest(json.dumps(fields).encode()))]
        records += [encoder.encode_chunk(compress_chunk(part, 0, data)) for part in range(3)]
        return b"".join([*records, encoder.encode_end()])

    base = {"snapshot_id": "ba9876543210", "parts": ["disk"]}
    assert import_snapshot(api, make_file(attacker, "false-base", None)).status_code == 201
    check_refusal(import_snapshot(api, make_file(owner, "one", base)), 404, "not_found")
    true_base = import_snapshot(api, make_file(owner, "true-base", None)).json()
    imported = import_snapshot(api, make_file(owner, "one", base)).json()
    assert imported["parentSnapshotID"] == true_base["snapshotID"]
    # The ids of this gateway are bases only of its own files.
    own = {"snapshot_id": snapshot["snapshotID"], "parts": ["disk"]}
    check_refusal(import_snapshot(api, make_file(owner, "two", own)), 404, "not_found")
    own_signer = memory_gateway.engine.transfers.get_signer()
    assert import_snapshot(api, make_file(own_signer, "three", own)).status_code == 201


def test_a_host_that_cannot_export_what_has_changed_refuses(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = api.get("/snapshots/taken/export", params={"since": "taken"})
    assert (refusal.status_code, refusal.json()["kind"]) == (400, "invalid")
    abilities = dataclasses.replace(memory_gateway.host.abilities, incremental_transfer=False)
    monkeypatch.setattr(memory_gateway.host, "abilities", abilities)
    refusal = api.get("/snapshots/taken/export", params={"since": "base"})
    assert (refusal.status_code, refusal.json()["kind"]) == (400, "unsupported")
    assert "this host cannot export what has changed" in refusal.json()["message"]
    assert api.get("/snapshots/taken/export", params={"since": "nothing"}).status_code == 404


def test_a_plan_session_predicts_whether_a_base_fits(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, template = memory_gateway.host, memory_gateway.engine.snapshots.get("base")
    api.post("/sandboxes", json={"templateID": "base", "name": "other"}).raise_for_status()
    api.post("/sandboxes/other/snapshots", json={"name": "unrelated"}).raise_for_status()
    monkeypatch.setattr(host, "abilities", dataclasses.replace(host.abilities, any_transfer_base=False))
    ids_by_guid = {5: [template.id]}

    async def find_export_bases(snapshot: Snapshot) -> dict[str, int]:
        return {template.id: 5} if snapshot.names == ["taken"] else {}

    async def find_import_bases(guid: int, origin_id: str) -> list[str]:
        return ids_by_guid.get(guid, [])

    monkeypatch.setattr(host, "find_export_bases", find_export_bases)
    monkeypatch.setattr(host, "find_import_bases", find_import_bases)
    with memory_gateway.client(ADMIN_KEY) as client:
        plan = client.post("/plans", json={"run": "a test of base snapshots"}).json()["planID"]
        client.base_url = httpx.URL(f"{memory_gateway.url}/plans/{plan}")
        client.post("/sandboxes/source/snapshots", json={"name": "later"}).raise_for_status()

        def export(ref: str, since: str) -> tuple[int, str]:
            response = client.get(f"/snapshots/{ref}/export", params={"since": since})
            return response.status_code, response.json()["kind"] if response.content else ""

        assert export("taken", "base") == export("later", "taken") == export("later", "base") == (204, "")
        assert export("taken", "unrelated") == export("later", "unrelated") == (400, "invalid")
        assert export("later", "nothing") == (404, "not_found")
        refusal = import_snapshot(client, make_jail_file(memory_gateway, 6), name="unknown-base").json()
        assert refusal["kind"] == "not_found"
        assert "differs from snapshot 'monday' (ba9876543210)" in refusal["message"]
        imported = import_snapshot(client, make_jail_file(memory_gateway, 5), name="copy").json()
        assert (imported["parentSnapshotID"], imported["templateID"]) == (template.id, template.id)
        assert export("copy", "base") == (204, "")
        # Another file of the same run may contain the base.
        whole_base = Encoder(memory_gateway.engine.transfers.get_signer()).encode_head(
            parse_manifest(json.dumps(make_manifest_fields(snapshot_id="ba9876543210")).encode())
        )
        planned_base = import_snapshot(client, whole_base, name="planned-base").json()
        imported = import_snapshot(client, make_jail_file(memory_gateway, 6), name="second").json()
        assert imported["parentSnapshotID"] == planned_base["snapshotID"]
        client.delete(f"{memory_gateway.url}/plans/{plan}")
    assert api.get("/snapshots/copy").status_code == 404
