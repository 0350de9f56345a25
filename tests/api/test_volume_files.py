"""Export and import of volumes over HTTP: permissions, results, and what a refused import leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.test_transfers import interrupt_import, make_foreign_file
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway


@pytest.fixture(autouse=True)
def snapshot(memory_gateway: MemoryGateway, api: httpx.Client) -> Iterator[dict[str, Any]]:
    """The snapshot `monday` of the volume `data`, in which the file `/color` is `blue`."""
    api.post("/volumes", json={"name": "data", "sizeMB": 64}).raise_for_status()
    mount = {"name": "data", "path": "/data"}
    options = {"templateID": "base", "name": "writer", "volumeMounts": [mount]}
    api.post("/sandboxes", json=options).raise_for_status()
    write_color(api, "blue")
    yield api.post("/volumes/data/snapshots", json={"name": "monday"}).json()
    assert memory_gateway.host.partial_imports == set()
    assert all(source.is_closed for source in memory_gateway.host.sources)
    assert memory_gateway.engine.transfers._active_count == 0


def write_color(api: httpx.Client, color: str) -> None:
    api.post("/sandboxes/writer/exec", json={"args": ["write", "/data/color", color]}).raise_for_status()


def read_color(api: httpx.Client, volume: str) -> str:
    name = f"reader-of-{volume}"
    mount = {"name": volume, "path": "/data"}
    api.post("/sandboxes", json={"templateID": "base", "name": name, "volumeMounts": [mount]}).raise_for_status()
    output: str = api.post(f"/sandboxes/{name}/exec", json={"args": ["read", "/data/color"]}).json()["stdout"]
    return output


def export_volume(api: httpx.Client, volume: str = "data", snapshot: str = "monday") -> bytes:
    response = api.get(f"/volumes/{volume}/snapshots/{snapshot}/export")
    assert response.status_code == 200, response.text
    return response.content


def import_volume(api: httpx.Client, file: bytes, **params: Any) -> httpx.Response:
    return api.post("/volumes/import", content=file, params=params)


def test_an_imported_volume_has_the_captured_files(api: httpx.Client, snapshot: dict[str, Any]) -> None:
    write_color(api, "red")
    file = export_volume(api)
    response = import_volume(api, file, name="copy")
    assert response.status_code == 201, response.text
    volume = response.json()
    assert (volume["name"], volume["sizeMB"], volume["fromSnapshot"]) == ("copy", 64, "")
    signer = api.get("/signer").json()["fingerprint"]
    assert volume["imported"] == {"snapshotID": snapshot["snapshotID"], "signer": signer, "omittedMemory": ""}
    assert read_color(api, "copy") == "blue"
    refusal = import_volume(api, file)
    assert (refusal.status_code, refusal.json()["kind"]) == (409, "name_taken"), "the name in the file is data"


def test_only_an_admin_exports_and_imports_volumes(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    file = export_volume(api)
    for key in (READ_KEY, EXEC_KEY):
        with memory_gateway.client(key) as client:
            for path in ("snapshots/monday/export", "snapshots/%6donday/%65xport"):
                assert client.get(f"/volumes/data/{path}").status_code == 403
            assert import_volume(client, file, name="stolen").status_code == 403
    with memory_gateway.client(ADMIN_KEY) as client:
        assert import_volume(client, file, name="copy").status_code == 201


def test_a_file_is_imported_only_as_what_it_contains(api: httpx.Client) -> None:
    refusal = api.post("/snapshots/import", content=export_volume(api), params={"name": "copy"})
    assert refusal.status_code == 400 and "`sandboxctl volume import`" in refusal.json()["message"]
    refusal = import_volume(api, api.get("/snapshots/base/export").content, name="copy")
    assert refusal.status_code == 400 and "`sandboxctl snapshot import`" in refusal.json()["message"]
    refusal = import_volume(api, make_foreign_file()[0], name="copy")
    assert refusal.json()["kind"] == "untrusted"
    for status_code, path in ((404, "/volumes/data/snapshots/tuesday/export"), (404, "/volumes/x/snapshots/y/export")):
        assert api.get(path).status_code == status_code


def test_an_import_of_a_volume_continues_with_the_rest_of_its_file(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_volume(api)
    interrupted = interrupt_import(
        memory_gateway, api, file, len(file) - 20, monkeypatch, route="/volumes/import?name=copy"
    )
    size = interrupted["receivedBytes"]
    response = import_volume(api, file[size:], name="copy", resume=interrupted["id"], offset=size)
    assert response.status_code == 201, response.text
    assert memory_gateway.host.partial_imports == set() and api.get("/interrupted-imports").json() == []
    assert read_color(api, "copy") == "blue"
    refusal = api.get("/volumes/data/snapshots/monday/export", params={"offset": 5, "digest": "0" * 64})
    assert refusal.status_code == 409


def test_a_truncated_file_leaves_nothing_behind(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    file = export_volume(api)
    for size in (0, 10, len(file) // 2, len(file) - 1):
        assert import_volume(api, file[:size], name="copy").status_code == 400
        assert memory_gateway.host.partial_imports == set()
    assert [volume["name"] for volume in api.get("/volumes").json()] == ["data"]
