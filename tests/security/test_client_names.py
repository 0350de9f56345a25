"""A client passes paths as names. The API rejects them, and names never become part of paths on the host."""

from __future__ import annotations

import json
import posixpath
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import check_name
from tests.security.routes import Target
from tests.support.gateway import Gateway

INVALID_NAMES = [
    *("..", ".", "../x", "../../../../etc/passwd", "/etc/passwd", "a/../b", "a/b", "a\\..\\b", "a\x00", "a\x00/../x"),
    *("a\n", "a\r", "a b", " a", "a ", "~", "~root", "$HOME", "`id`", "$(id)", "a;b", "a|b", "a&b", "-rf", "--help"),
    *(".partial-x", ".damaged", "a@b", "a%2fb", "%2e%2e", "a:b", "a*", "a?", "[a]", "{a}", "{{ a }}", "'a'", '"a"'),
    *("\u2024\u2024/x", "\uff0e\uff0e", "\u2215", "a\u202eb", "\u0430", "e\u0301", "a" * 65, "a" * 100_000, "_a", "-a"),
    *("\ufeffa", "a\u2028", "\u0661", "a\x7f", "a\x85", "\udcff"),
]
TEMPLATE_NAME_PATHS = ("/templates", "/templates/spare/alias")
"""The requests that accept NAME:TAG as a name."""
INVALID_TAGGED_NAMES = [
    *("a:", ":b", ":", "a:b:c", "a::b", "a:../b", "a:/b", "../a:b", "/a:b", "a:b/", "a:..", "a:.b", "a:-b", "a:b c"),
    *("a:b\n", "a\n:b", "a:\x00", "a:b@c", "a:%2e%2e", "a:$(id)", "a:" + "b" * 64, "a" * 65 + ":b", "a:\u2215"),
]
NAME_FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/sandboxes", {"templateID": "base"}, "name"),
    ("PATCH", "/sandboxes/one", {}, "name"),
    ("POST", "/sandboxes/one/snapshots", {}, "name"),
    ("POST", "/sandboxes/one/clone", {}, "names"),
    ("POST", "/snapshots/taken/fork", {}, "names"),
    ("POST", "/templates", {}, "name"),
    ("PUT", "/templates/spare/alias", {}, "alias"),
    ("POST", "/volumes", {}, "name"),
    ("POST", "/volumes/data/snapshots", {}, "name"),
    ("POST", "/v1/sandboxes/one/branch", {}, "tag"),
    ("POST", "/v1/snapshots", {"rootfs": "/nowhere"}, "tag"),
    ("POST", "/v1/snapshots/taken/compact", {}, "to"),
]
REFERENCE_FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/sandboxes", {}, "templateID"),
    ("POST", "/sandboxes/one/rollback", {}, "snapshotID"),
    ("POST", "/sandboxes/one/promote", {}, "source"),
    ("POST", "/volumes", {"name": "new"}, "fromSnapshot"),
    ("POST", "/volumes/data/rollback", {"force": True}, "snapshot"),
    ("POST", "/v1/sandboxes", {}, "snapshot_tag"),
]
INVALID_MOUNT_PATHS = [
    *("..", "/..", "/data/..", "/data/../etc", "/./x", "//x", "/x/", "data", "", "/", "/etc", "/proc/1/root", "/sys/x"),
    *(
        "/dev/x",
        "/run/x",
        "/x y",
        "/x\ny",
        "/x\x00",
        "/x,rw",
        "/x\\040y",
        "/" + "a" * 256,
        "/x#",
        "/x'",
        "/~",
        "/\u00e9",
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), NAME_FIELDS, ids=lambda value: str(value)[:40])
def test_paths_are_refused_as_names(target: Target, method: str, path: str, body: dict[str, Any], field: str) -> None:
    with target.gateway.client() as admin:
        accepts_tags = path in TEMPLATE_NAME_PATHS
        names = [name for name in INVALID_NAMES if not (accepts_tags and name == "a:b")]
        for name in (*names, *INVALID_TAGGED_NAMES):
            payload = {**body, field: [name] if field == "names" else name}
            content = json.dumps(payload)
            response = admin.request(method, path, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 and response.json()["kind"] in ("invalid", "unsupported"), (
                name[:50],
                response.text[:200],
            )


@pytest.mark.parametrize(("method", "path", "body", "field"), REFERENCE_FIELDS, ids=lambda value: str(value)[:40])
def test_paths_are_refused_as_references(
    target: Target, method: str, path: str, body: dict[str, Any], field: str
) -> None:
    with target.gateway.client() as admin:
        for name in (each for each in INVALID_NAMES if "\udcff" not in each):
            response = admin.request(method, path, json={**body, field: name})
            assert response.status_code in (400, 404), (name[:50], response.text[:200])


def test_paths_are_refused_as_references_in_urls(target: Target) -> None:
    with target.gateway.client() as admin:
        for name in (
            each for each in INVALID_NAMES if "\udcff" not in each and each not in (".", "..") and len(each) < 1000
        ):
            for kind in ("sandboxes", "snapshots", "templates", "volumes", "v1/sandboxes", "v1/snapshots"):
                for method in ("GET", "DELETE"):
                    response = admin.request(method, f"/{kind}/{quote(name, safe='')}")
                    assert 400 <= response.status_code < 500 or response.is_redirect, (kind, name)


@pytest.mark.parametrize("path", INVALID_MOUNT_PATHS)
def test_volumes_cannot_be_mounted_over_system_directories(target: Target, path: str) -> None:
    with target.gateway.client() as admin:
        mount = {"name": "data", "path": path}
        for route, body in (
            ("/sandboxes/one/volumes", mount),
            ("/sandboxes", {"templateID": "base", "volumeMounts": [mount]}),
            ("/sandboxes/one/clone", {"volumeMounts": [mount]}),
            ("/snapshots/taken/fork", {"volumeMounts": [mount]}),
        ):
            response = admin.post(route, json=body)
            assert response.status_code in (400, 409) and response.json()["kind"] in ("invalid", "conflict")


@given(st.text(max_size=70) | st.text("abc019_.-/\\ \x00%", max_size=70))
@example("a..")
@example("a\n")
@settings(max_examples=300, deadline=None)
def test_an_accepted_name_is_a_single_path_component(name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        return
    assert name.isascii() and posixpath.basename(posixpath.normpath(f"/root/{name}")) == name
    assert posixpath.normpath(f"/root/{name}") == f"/root/{name}" and not name.startswith((".", "-"))
    assert 1 <= len(name) <= 64


@given(st.text(max_size=40) | st.text("ab/._-@ \n\\", max_size=40).map(lambda text: f"/{text}"))
@example("/etc/..")
@example("/a\n")
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_accepted_mount_path_is_normalized(path: str) -> None:
    try:
        check_mount_paths([path])
    except Invalid:
        return
    assert path.isascii() and path.startswith("/") and posixpath.normpath(path) == path
    assert not any(letter in path for letter in " \t\n\r\\\0,;'\"#")
    assert path.split("/")[1] not in ("proc", "sys", "dev", "run")


def test_names_do_not_become_paths_on_a_real_disk(shared_gateway: Gateway) -> None:
    """Most of these names are valid, but would be harmful if they were used as file names."""
    root, client = shared_gateway.state_root, shared_gateway.client
    entries_before = {path.name for path in root.parent.iterdir() if path != root}
    names = ["manifest.json", "volume.img", "snapshots", "volumes", "a..", "x.-_", "0" * 12, "CON", "a" * 64]
    created_volumes = []
    try:
        for name in names:
            response = client.post("/volumes", json={"name": name, "sizeMB": 64})
            assert response.status_code == 201, response.text
            created_volumes.append(response.json())
            assert client.post(f"/volumes/{name}/snapshots", json={"name": name}).status_code == 201
        for invalid_name in ("../x", "/tmp/x", "a/b", ".partial-x"):
            assert client.post("/volumes", json={"name": invalid_name}).status_code == 400
        for directory in (each for each in (root / "volumes").rglob("*") if each.is_dir()):
            path_parts = directory.relative_to(root / "volumes").parts
            # volumes/ID and volumes/ID/snapshots/ID
            assert all(part == "snapshots" if depth == 1 else is_id(part) for depth, part in enumerate(path_parts)), (
                directory
            )
        file_names = {path.name for path in (root / "volumes").rglob("*") if path.is_file()}
        assert file_names <= {"volume.img", "manifest.json"}, file_names
    finally:
        for volume in created_volumes:
            client.delete(f"/volumes/{volume['volumeID']}?withSnapshots=true")
    # Gateways of other tests create and remove entries with other names in the same directory.
    assert not {path.name for path in root.parent.iterdir()} & {"x", "etc", "tmp", *names} - entries_before


def is_id(name: str) -> bool:
    return len(name) == 12 and all(letter in "0123456789abcdef" for letter in name)
