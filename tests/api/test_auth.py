"""Access to the control plane with keys and their scopes, and over the unix socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_gateway.api.access.auth import Keys, Permission, determine_required_permission
from sandbox_gateway.errors import Invalid
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox

KEY = "0123456789abcdef"


def write_key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_is_parsed(tmp_path: Path) -> None:
    keys = Keys.load(write_key_file(tmp_path / "keys", f"# keys\n\nci  exec  {KEY}\nops admin {KEY}x\n"))
    caller = keys.find(KEY)
    assert len(keys) == 2 and caller and (caller.name, caller.permission) == ("ci", Permission.EXEC)
    assert keys.find(KEY[:-1]) is None and keys.find("") is None


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("ci exec", "2 words instead of 3"),
        (f"ci root {KEY}", "read, exec or admin"),
        (f"c/i exec {KEY}", "not allowed"),
        ("ci exec short", "at least 16"),
        (f"ci exec {KEY}\nci read {KEY}y", "twice"),
    ],
)
def test_errors_in_key_files_name_the_line(tmp_path: Path, text: str, expected_text: str) -> None:
    with pytest.raises(Invalid, match=expected_text) as error_info:
        Keys.load(write_key_file(tmp_path / "keys", text))
    assert "line" in error_info.value.message and KEY not in error_info.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_readable_by_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(Invalid, match="chmod 600"):
        Keys.load(write_key_file(tmp_path / "keys", f"ci exec {KEY}", mode))


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="does not exist"):
        Keys.load(tmp_path / "keys")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_file_owned_by_another_user_is_refused(tmp_path: Path) -> None:
    key_file = write_key_file(tmp_path / "keys", f"ci exec {KEY}")
    os.chown(key_file, 12345, 12345)
    with pytest.raises(Invalid, match="chown root"):
        Keys.load(key_file)


def test_each_route_requires_the_right_scope() -> None:
    assert determine_required_permission("GET", "/sandboxes") is Permission.READ
    assert determine_required_permission("POST", "/sandboxes/one/exec") is Permission.EXEC
    for method, path in (("POST", "/sandboxes"), ("DELETE", "/sandboxes/exec"), ("POST", "/snapshots/exec/fork")):
        assert determine_required_permission(method, path) is Permission.ADMIN
    assert determine_required_permission("POST", "/templates/x/exec") is Permission.ADMIN


def test_requests_without_a_valid_key_are_refused(memory_gateway: MemoryGateway) -> None:
    with memory_gateway.client("") as keyless_client:
        assert keyless_client.get("/health").status_code == 200
        for route in ("/sandboxes", "/openapi.json", "/metrics", "/nowhere", "/events"):
            response = keyless_client.get(route)
            assert response.status_code == 401, route
            assert response.json()["kind"] == "unauthorized" and response.headers["www-authenticate"]
        assert keyless_client.post("/sandboxes", content=b"{bad").status_code == 401
        wrong_key_response = keyless_client.get("/sandboxes", headers={"X-API-Key": "wrong-key-0123456789"})
        assert wrong_key_response.status_code == 401 and "is unknown" in wrong_key_response.json()["message"]
        assert keyless_client.get("/sandboxes", headers={"Authorization": f"Bearer {READ_KEY}"}).status_code == 200
        assert keyless_client.get("/sandboxes", headers={"Authorization": f"Basic {READ_KEY}"}).status_code == 401


def test_health_describes_the_host_only_to_callers_with_a_key(memory_gateway: MemoryGateway) -> None:
    with memory_gateway.client("") as keyless_client, memory_gateway.client(READ_KEY) as reader:
        public_fields = {"status", "sandboxes", "version", "backend"}
        assert keyless_client.get("/health").json().keys() == public_fields
        wrong_key_header = {"X-API-Key": "wrong-key-0123456789"}
        assert keyless_client.get("/health", headers=wrong_key_header).json().keys() == public_fields
        detailed_health = reader.get("/health").json()
        assert detailed_health.keys() == public_fields | {"gatewayID", "room"}
        assert detailed_health["room"]["diskTotalBytes"] == memory_gateway.host.available_room.disk_total


def test_headers_cannot_make_a_caller_local(memory_gateway: MemoryGateway) -> None:
    spoofed_headers = {
        "X-Forwarded-For": "unix",
        "X-Real-Ip": "",
        "Forwarded": "for=unix",
        "Host": "gateway",
        "X-Local": "1",
    }
    with memory_gateway.client("") as keyless_client:
        assert keyless_client.get("/sandboxes", headers=spoofed_headers).status_code == 401


def test_requests_need_a_key_with_sufficient_scope(memory_gateway: MemoryGateway) -> None:
    with (
        memory_gateway.client(ADMIN_KEY) as admin,
        memory_gateway.client(EXEC_KEY) as runner,
        memory_gateway.client(READ_KEY) as reader,
    ):
        create_sandbox(admin, name="one")
        assert reader.get("/sandboxes/one").status_code == runner.get("/sandboxes/one").status_code == 200
        body = {"args": ["exit", "0"]}
        assert runner.post("/sandboxes/one/exec", json=body).status_code == 200
        response = reader.post("/sandboxes/one/exec", json=body)
        assert response.status_code == 403 and response.json()["kind"] == "forbidden"
        assert "'looker'" in response.json()["message"]
        for caller in (runner, reader):
            assert caller.delete("/sandboxes/one").status_code == 403
            assert caller.post("/sandboxes", json={"templateID": "base"}).status_code == 403


def test_only_the_owner_may_use_the_socket(memory_gateway: MemoryGateway) -> None:
    assert memory_gateway.socket.stat().st_mode & 0o777 == 0o600
