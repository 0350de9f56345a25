"""Uploads of files for builds: who may send them, what is stored, and when it is removed."""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from sandbox_gateway.api.access import signed_urls
from sandbox_gateway.engine import build_files
from sandbox_gateway.engine.image_steps import build_archive_path, name_unchecked_archive
from sandbox_gateway.hosts.base import Room
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.waiting import wait_until

DIGEST, OTHER_DIGEST = "0123456789abcdef" * 4, "f" * 64
NAME, OTHER_NAME = name_unchecked_archive(DIGEST), name_unchecked_archive(OTHER_DIGEST)
"""The names of the archives that are uploaded to signed URLs."""
EMPTY_DIGEST = hashlib.sha256().hexdigest()
"""The digest of an archive without entries."""


@pytest.fixture
def archive_directory(memory_gateway: MemoryGateway) -> Iterator[Path]:
    """The directory with the archives."""
    directory = memory_gateway.root / "build-files"
    yield directory
    assert list(directory.glob(".*")) == [], "an upload has left something behind"
    assert memory_gateway.engine.transfers._active_count == memory_gateway.engine.build_files._uploading_bytes == 0
    for path in directory.iterdir():
        path.unlink()


def list_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def request_upload_url(gateway: MemoryGateway, digest: str = DIGEST) -> dict[str, Any]:
    """Request the URL of an upload as the client does, for a build that has not started."""
    with gateway.client(ADMIN_KEY) as client:
        template_id = client.post("/v3/templates", json={"name": "uploading"}).json()["templateID"]
        response = client.get(f"/templates/{template_id}/files/{digest}")
    assert response.status_code == 201, response.text
    upload_data: dict[str, Any] = response.json()
    return upload_data


def upload_archive(gateway: MemoryGateway, contents: Any = b"archive", digest: str = DIGEST) -> httpx.Response:
    return httpx.put(request_upload_url(gateway, digest)["url"], content=contents)


def start_build(api: httpx.Client, name: str, digest: str = DIGEST) -> tuple[httpx.Response, str]:
    """Start a build with a COPY step. Returns the response and, if the build has started, its log."""
    announced_build = api.post("/v3/templates", json={"name": name}).json()
    steps = [{"type": "COPY", "args": ["a", "/srv/", "", ""], "filesHash": digest, "force": False}]
    path = f"/templates/{announced_build['templateID']}/builds/{announced_build['buildID']}"
    response = api.post(f"/v2{path}", json={"fromImage": "app", "steps": steps})
    log = api.get(f"{path}/logs", params={"follow": True}).text if response.status_code == 202 else ""
    return response, log


def test_a_build_gets_the_uploaded_files(
    memory_gateway: MemoryGateway, api: httpx.Client, archive_directory: Path
) -> None:
    answer = request_upload_url(memory_gateway)
    assert answer["present"] is False and answer["url"].startswith(f"{memory_gateway.url}/build-files/{DIGEST}?")
    refusal, _ = start_build(api, "copied")
    assert (refusal.status_code, refusal.json()["kind"]) == (409, "conflict")
    contents = bytes(range(256)) * 20_000
    assert httpx.put(answer["url"], content=contents).status_code == 204
    assert (archive_directory / NAME).read_bytes() == contents
    assert (archive_directory / NAME).stat().st_mode & 0o777 == 0o600
    assert archive_directory.stat().st_mode & 0o777 == 0o700
    assert request_upload_url(memory_gateway)["present"] is True
    os.utime(archive_directory / NAME, (1, 1))
    build_response, log = start_build(api, "copied")
    assert build_response.status_code == 202 and f"uploading {len(contents)} bytes of files" in log and "ready" in log
    assert time.time() - (archive_directory / NAME).stat().st_mtime < 60, "the build has not marked the archive as used"
    api.post("/sandboxes", json={"templateID": "copied", "name": "copy"}).raise_for_status()
    result = api.post("/sandboxes/copy/exec", json={"args": ["read", build_archive_path(NAME)]}).json()
    assert result["stdout"].encode("latin-1") == contents


def test_a_template_is_built_again_while_its_files_are_stored(
    memory_gateway: MemoryGateway, api: httpx.Client, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest in (DIGEST, OTHER_DIGEST):
        assert upload_archive(memory_gateway, digest=digest).status_code == 204
    start_build(api, "again")
    template = api.get("/templates/again").json()
    assert DIGEST in template["recipe"]["setup"][0]
    assert api.post("/templates/again").status_code == 200, "the build has not changed"
    assert api.post("/templates", json={"name": "again", **template["recipe"]}).status_code == 200
    start_build(api, "again", OTHER_DIGEST)
    assert api.get("/templates/again").json()["digest"] != template["digest"]
    monkeypatch.setattr(memory_gateway.host, "compute_guest_digest", lambda: "a newer guest")
    (archive_directory / OTHER_NAME).unlink()
    refusal = api.post("/templates/again")
    assert refusal.status_code == 409
    assert "build the template again with the client, so that it uploads the files" in refusal.json()["message"]


def test_a_url_has_the_address_that_the_client_used(memory_gateway: MemoryGateway, archive_directory: Path) -> None:
    with memory_gateway.client(ADMIN_KEY) as client:
        for headers, address in (
            ({"Host": "gateway.test:8700"}, "http://gateway.test:8700/build-files/"),
            ({"Host": "gateway.test", "X-Forwarded-Proto": "https"}, "https://gateway.test/build-files/"),
            ({"Host": "gateway.test", "X-Forwarded-Proto": "file"}, "http://gateway.test/build-files/"),
        ):
            assert client.get(f"/templates/base/files/{DIGEST}", headers=headers).json()["url"].startswith(address)


def change_signature(url: str) -> str:
    return url[:-1] + ("0" if url[-1] != "0" else "1")


def change_expiration(url: str) -> str:
    return url.replace("expires=", "expires=1")


def change_digest(url: str) -> str:
    return url.replace(DIGEST, OTHER_DIGEST)


def send_head(gateway: MemoryGateway, url: str, length: int = 1000) -> str:
    """Send the head of an upload without its body. Returns the first line of the response."""
    parts = urlsplit(url)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode())
        return client.recv(4096).decode().partition("\r\n")[0]


@pytest.mark.parametrize("change", [change_signature, change_expiration, change_digest])
def test_a_url_with_another_signature_is_refused_before_the_body_is_read(
    memory_gateway: MemoryGateway, archive_directory: Path, change: Any
) -> None:
    assert " 401 " in send_head(memory_gateway, change(request_upload_url(memory_gateway)["url"]))
    assert list_names(archive_directory) == []


def test_an_expired_url_is_refused_before_the_body_is_read(
    memory_gateway: MemoryGateway, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_urls, "_UPLOAD_SECONDS", -1)
    assert " 401 " in send_head(memory_gateway, request_upload_url(memory_gateway)["url"])
    refusal = upload_archive(memory_gateway)
    assert refusal.status_code == 401 and "has expired" in refusal.json()["message"]
    assert list_names(archive_directory) == []


def test_a_signature_is_valid_only_for_an_upload(memory_gateway: MemoryGateway, archive_directory: Path) -> None:
    query = urlsplit(request_upload_url(memory_gateway)["url"]).query
    path = f"/build-files/{DIGEST}"
    for method, target in (
        ("GET", path),
        ("DELETE", path),
        ("PUT", "/templates/base/alias"),
        ("PUT", f"{path}/"),
        ("PUT", f"/plans/{'f' * 32}{path}"),
        ("PUT", f"/applied-runs/{'f' * 32}{path}"),
        ("GET", f"/templates/base/files/{DIGEST}"),
    ):
        assert httpx.request(method, f"{memory_gateway.url}{target}?{query}").status_code == 401, target
    assert list_names(archive_directory) == []


def test_only_an_admin_gets_urls_and_uploads_without_one(
    memory_gateway: MemoryGateway, archive_directory: Path
) -> None:
    for key, statuses in ((READ_KEY, (403, 403)), (EXEC_KEY, (403, 403)), ("", (401, 401)), (ADMIN_KEY, (201, 204))):
        with memory_gateway.client(key) as client:
            responses = (
                client.get(f"/templates/base/files/{DIGEST}"),
                client.put(f"/build-files/{EMPTY_DIGEST}", content=bytes(1024)),
            )
        assert tuple(response.status_code for response in responses) == statuses
    assert list_names(archive_directory) == [EMPTY_DIGEST]


def test_an_archive_without_a_signed_url_must_have_its_digest(
    memory_gateway: MemoryGateway, api: httpx.Client, archive_directory: Path
) -> None:
    path = f"/build-files/{EMPTY_DIGEST}"
    assert api.put(path, content=bytes(1024)).status_code == 204
    inode = (archive_directory / EMPTY_DIGEST).stat().st_ino
    info = tarfile.TarInfo("a")
    info.size = 3
    other_archive = info.tobuf(tarfile.PAX_FORMAT) + b"abc".ljust(512, b"\0") + bytes(1024)
    for contents, reason in (
        (other_archive, f"but the client announced {EMPTY_DIGEST}: upload the files again"),
        (other_archive[:-600], "it is not complete. Upload the files again"),
        (b"x" * 1024, "the archive is damaged"),
        (gzip.compress(other_archive), "the archive is damaged"),
    ):
        refusal = api.put(path, content=contents)
        assert (refusal.status_code, refusal.json()["kind"]) == (400, "invalid") and reason in refusal.json()["message"]
        assert list_names(archive_directory) == [EMPTY_DIGEST]
    assert (archive_directory / EMPTY_DIGEST).stat().st_ino == inode, "a refused archive has replaced a stored one"


def test_an_upload_to_a_signed_url_does_not_replace_a_checked_archive(
    memory_gateway: MemoryGateway, api: httpx.Client, archive_directory: Path
) -> None:
    body = {"dockerfile": "FROM oci:/srv/images/app:1\nCOPY a /c/", "digests": {"a": EMPTY_DIGEST}}
    assert upload_archive(memory_gateway, b"other files", EMPTY_DIGEST).status_code == 204
    assert api.post("/dockerfiles", json=body).json()["missingDigests"] == [EMPTY_DIGEST]
    assert api.put(f"/build-files/{EMPTY_DIGEST}", content=bytes(1024)).status_code == 204
    assert upload_archive(memory_gateway, b"other files", EMPTY_DIGEST).status_code == 204
    assert (archive_directory / EMPTY_DIGEST).read_bytes() == bytes(1024)
    assert api.post("/dockerfiles", json=body).json()["missingDigests"] == []


def test_a_plan_session_stores_no_files(memory_gateway: MemoryGateway, archive_directory: Path) -> None:
    with memory_gateway.client(READ_KEY) as client:
        plan = client.post("/plans", json={"run": "a test of uploads"}).json()["planID"]
        response = client.get(f"/plans/{plan}/templates/base/files/{DIGEST}")
        assert (response.status_code, response.json()["kind"]) == (400, "unsupported")
        assert client.put(f"/plans/{plan}/build-files/{DIGEST}", content=b"x").status_code == 204
        body = {"dockerfile": "FROM app\nCOPY a b /c/", "digests": {"a": DIGEST, "b": OTHER_DIGEST}}
        assert client.post(f"/plans/{plan}/dockerfiles", json=body).json()["missingDigests"] == [OTHER_DIGEST]
    assert list_names(archive_directory) == []
    with memory_gateway.client(ADMIN_KEY) as client:
        assert client.post("/dockerfiles", json=body).json()["missingDigests"] == [DIGEST, OTHER_DIGEST]


def test_the_number_of_uploads_in_a_plan_session_is_limited(
    memory_gateway: MemoryGateway, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_files, "_MAX_ANNOUNCED", 1)
    with memory_gateway.client(READ_KEY) as client:
        plan = client.post("/plans", json={"run": "a test of many uploads"}).json()["planID"]
        responses = [client.put(f"/plans/{plan}/build-files/{digest}") for digest in (DIGEST, OTHER_DIGEST)]
    assert responses[0].status_code == 204
    assert "more than 1 uploads: split the play" in responses[1].json()["message"]


def test_an_invalid_digest_is_refused(api: httpx.Client, archive_directory: Path) -> None:
    for digest in ("x", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", f"..%2f{DIGEST[5:]}"):
        assert api.get(f"/templates/base/files/{digest}").status_code in (400, 404)
        assert api.put(f"/build-files/{digest}", content=b"x").status_code in (400, 404)
    assert api.get(f"/templates/base/files/{DIGEST[:-1]}").status_code == 400
    assert api.get(f"/templates/missing/files/{DIGEST}").status_code == 404
    assert list_names(archive_directory) == []


def test_an_archive_that_is_too_large_is_refused(
    memory_gateway: MemoryGateway, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gateway.engine.build_files, "_max_bytes", 3_000_000)
    url = request_upload_url(memory_gateway)["url"]
    assert " 413 " in send_head(memory_gateway, url, 3_000_001)
    refusal = httpx.put(url, content=iter([bytes(1_000_000)] * 4))
    assert (refusal.status_code, refusal.json()["kind"]) == (413, "over_quota")
    assert "limits.upload_mb" in refusal.json()["message"] and list_names(archive_directory) == []
    assert httpx.put(url, content=iter([bytes(1_000_000)] * 3)).status_code == 204


def test_an_upload_without_room_is_refused(
    memory_gateway: MemoryGateway, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_room = Room(disk_free=513 << 20, disk_total=100 << 30, memory_free=8 << 30, memory_total=16 << 30)
    monkeypatch.setattr(memory_gateway.host, "available_room", full_room)
    url = request_upload_url(memory_gateway)["url"]
    assert " 507 " in send_head(memory_gateway, url, 2 << 20)
    assert list_names(archive_directory) == []
    assert httpx.put(url, content=b"small").status_code == 204


def test_the_number_of_uploads_is_limited_and_the_last_of_two_wins(
    memory_gateway: MemoryGateway, archive_directory: Path
) -> None:
    release_events = [threading.Event(), threading.Event()]
    responses: list[httpx.Response] = []

    def send_upload(number: int) -> None:
        def generate_contents() -> Iterator[bytes]:
            yield b"begin "
            release_events[number].wait(20)
            yield b"%d" % number

        responses.append(upload_archive(memory_gateway, generate_contents()))

    threads = [threading.Thread(target=send_upload, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: memory_gateway.engine.transfers._active_count == 2)
    refusal = upload_archive(memory_gateway)
    assert (refusal.status_code, refusal.json()["kind"]) == (429, "busy")
    for number in (1, 0):
        release_events[number].set()
        threads[number].join()
        assert (archive_directory / NAME).read_bytes() == b"begin %d" % number
    assert [response.status_code for response in responses] == [204, 204]


def test_a_client_that_disconnects_leaves_nothing(memory_gateway: MemoryGateway, archive_directory: Path) -> None:
    assert upload_archive(memory_gateway, b"before").status_code == 204
    parts = urlsplit(request_upload_url(memory_gateway)["url"])
    with socket.create_connection(("127.0.0.1", memory_gateway.port)) as client:
        head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
        client.sendall(head.encode() + bytes(2_000_000))
        wait_until(lambda: len(list_names(archive_directory)) == 2)
    wait_until(lambda: list_names(archive_directory) == [NAME])
    assert (archive_directory / NAME).read_bytes() == b"before"


def test_unused_archives_and_partial_uploads_are_removed(
    memory_gateway: MemoryGateway, archive_directory: Path
) -> None:
    (archive_directory / ".partial-0123").touch()
    for name, age in ((NAME, 90_000), (OTHER_NAME, 80_000), (DIGEST, 90_000), (OTHER_DIGEST, 80_000)):
        (archive_directory / name).touch()
        os.utime(archive_directory / name, (time.time() - age,) * 2)
    memory_gateway.engine.build_files.open()
    memory_gateway.engine.build_files._remove_unused_archives()
    assert list_names(archive_directory) == [OTHER_NAME, OTHER_DIGEST]


def test_the_size_of_all_archives_is_limited(
    memory_gateway: MemoryGateway, archive_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gateway.engine.build_files, "_max_bytes", 100)
    digests = [f"{number}" * 64 for number in range(6)]
    paths = [archive_directory / name_unchecked_archive(digest) for digest in digests]
    for digest in digests[:4]:
        assert upload_archive(memory_gateway, bytes(100), digest).status_code == 204
    refusal = upload_archive(memory_gateway, bytes(100), digests[4])
    assert (refusal.status_code, refusal.json()["kind"]) == (413, "over_quota")
    for path, age in ((paths[2], 9000), (paths[1], 5000)):
        os.utime(path, (time.time() - age,) * 2)
    assert upload_archive(memory_gateway, bytes(100), digests[4]).status_code == 204
    assert list_names(archive_directory) == [paths[number].name for number in (0, 1, 3, 4)]
