"""Test the gateway role without a supervisor: installation, configuration, restart, upgrade and removal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.roles.upgrade import NEWER_VERSION, read_counter
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.roles import PlayResult, play

pytestmark = pytest.mark.in_order


class Installation:
    """An installation of the gateway that the role creates under ``root``, with its state in ``state_root``."""

    def __init__(self, root: Path, state_root: Path) -> None:
        network = session.allocate_network()
        self.root = root
        self.state_root = state_root
        self.prefix = network["prefix"]
        self.socket = root / "run" / "gw.sock"
        self.pid_file = root / "run" / "gw.pid"
        self.config_file = root / "etc" / "config.toml"
        self.key_file = root / "etc" / "keys"
        self.collections = session.COLLECTIONS
        self.variables: dict[str, Any] = {
            "gateway_install_dir": str(root / "install"),
            "gateway_link_dir": str(root / "bin"),
            "gateway_config_dir": str(root / "etc"),
            "gateway_state_root": str(state_root),
            "gateway_socket": str(self.socket),
            "gateway_socket_group": "",
            "gateway_supervisor": "none",
            "gateway_log_file": str(root / "log" / "gateway.log"),
            "gateway_pid_file": str(self.pid_file),
            "gateway_config": {
                "host": {"cache_root": str(session.get_cache_dir())},
                "kvm_xfs": {"accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
                "network": {**network, "pool": 1},
            },
        }

    def apply(
        self,
        check: bool = False,
        config: dict[str, Any] | None = None,
        collections: Path | None = None,
        **options: Any,
    ) -> PlayResult:
        variables = {**self.variables, **{f"gateway_{name}": value for name, value in options.items()}}
        if config:
            variables["gateway_config"] = {**self.variables["gateway_config"], **config}
        command_prefix = ("env", f"ANSIBLE_COLLECTIONS_PATH={collections or self.collections}")
        return play("gateway", variables, check=check, directory=self.root, command_prefix=command_prefix)

    def read_pid(self) -> int:
        return int(self.pid_file.read_text())

    def open_client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://gateway", timeout=120)

    def execute(self, *argv: str) -> str:
        """Run a program in the sandbox ``lives``, check that it succeeds, and return its output."""
        with self.open_client() as client:
            result = client.post("/sandboxes/lives/exec", json={"args": argv}).json()
        assert result["exitCode"] == 0, result
        return str(result["stdout"])

    def read_version(self) -> str:
        with self.open_client() as client:
            return str(client.get("/health").json()["version"])


@pytest.fixture(scope="module")
def installation(xfs_root: Path, shared_gateway: Gateway, template: str) -> Iterator[Installation]:
    """The installation that all tests in this file share. It has a memory root and the template."""
    root = session.get_run_dir() / "role"
    (root / "bin").mkdir(parents=True)
    installation = Installation(root, xfs_root / "role")
    (root / "memory").mkdir(mode=0o700)
    installation.variables["gateway_config"]["kvm_xfs"]["memory_root"] = str(root / "memory")
    installation.state_root.mkdir()
    subprocess.run(
        ["cp", "-a", "--reflink=always", str(shared_gateway.state_root / "templates"), str(installation.state_root)],
        check=True,
        timeout=60,
    )
    yield installation
    installation.apply(state="absent", remove_data=True)
    shutil.rmtree(root)


def test_check_mode_installs_nothing(installation: Installation) -> None:
    run = installation.apply(check=True)
    assert not run.failed, run.output
    assert run.changed_count > 0
    assert not (installation.root / "install").exists()
    assert not installation.config_file.exists()


def test_the_role_installs_and_starts_the_gateway(installation: Installation) -> None:
    run = installation.apply()
    assert not run.failed, run.output
    with installation.open_client() as client:
        assert client.get("/health").json()["status"] == "ok"
    program = installation.root / "bin" / "sandboxctl"
    result = subprocess.run(
        [str(program), "--url", f"unix://{installation.socket}", "--json", "template", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [item["names"] for item in json.loads(result.stdout)] == [["debian"]]


def test_a_second_run_changes_nothing(installation: Installation) -> None:
    pid_before = installation.read_pid()
    second_run = installation.apply()
    assert (second_run.failed, second_run.changed_task_names) == (False, []), second_run.output
    check_run = installation.apply(check=True)
    assert (check_run.failed, check_run.changed_task_names) == (False, []), check_run.output
    assert installation.read_pid() == pid_before


def test_only_root_can_read_the_log(installation: Installation) -> None:
    path = installation.root / "log" / "gateway.log"
    assert path.read_text().count('"event": "listening"') == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_secret_and_preserved(installation: Installation) -> None:
    assert stat.S_IMODE(installation.key_file.stat().st_mode) == 0o600
    name, scope, key = installation.key_file.read_text().split()
    assert (name, scope) == ("admin", "admin")
    assert re.fullmatch("e2b_[0-9a-f]{48}", key), "some releases of E2B's client accept only this form"

    run = installation.apply(keys=[{"name": "ci", "scope": "exec"}, {"name": "admin", "scope": "admin"}])
    assert not run.failed, run.output
    key_entries = [line.split() for line in installation.key_file.read_text().splitlines()]
    assert [line[:2] for line in key_entries] == [["ci", "exec"], ["admin", "admin"]]
    assert key_entries[1][2] == key
    assert key_entries[0][2] != key
    assert key not in run.output
    assert key_entries[0][2] not in run.output

    duplicate_run = installation.apply(keys=[{"name": "a"}, {"name": "a"}])
    assert duplicate_run.failed
    assert "needs a unique name" in duplicate_run.message


def test_sandboxes_survive_a_new_configuration(installation: Installation) -> None:
    with installation.open_client() as client:
        response = client.post("/sandboxes", json={"templateID": "debian", "name": "lives", "timeout": -1})
        assert response.status_code == 201, response.text
    pid_before = installation.read_pid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    run = installation.apply(config={"server": {"listen": f"127.0.0.1:{port}"}, "limits": {"sandboxes": 7}})
    assert not run.failed, run.output
    assert "grove.sandbox.gateway : Write the configuration" in run.changed_task_names
    assert installation.read_pid() != pid_before
    config = tomllib.loads(installation.config_file.read_text())
    assert config["limits"] == {"sandboxes": 7}
    assert config["server"]["socket"] == str(installation.socket)
    key = installation.key_file.read_text().split()[2]
    response = httpx.get(f"http://127.0.0.1:{port}/sandboxes/lives", headers={"X-API-Key": key}, timeout=60)
    assert response.json()["state"] == "running"
    assert httpx.get(f"http://127.0.0.1:{port}/sandboxes/lives", timeout=60).status_code == 401
    with installation.open_client() as client:
        result = client.post("/sandboxes/lives/exec", json={"args": ["cat", "/proc/uptime"]}).json()
        assert result["exitCode"] == 0, result


def test_sandboxes_survive_an_upgrade(installation: Installation, newer_collections: Path) -> None:
    old_version, count_before = installation.read_version(), read_counter(installation.execute)
    check_run = installation.apply(check=True, collections=newer_collections)
    assert not check_run.failed, check_run.output
    assert "grove.sandbox.gateway : Copy the package" in check_run.changed_task_names
    assert installation.read_version() == old_version

    installation.collections = newer_collections
    upgrade_run = installation.apply()
    assert not upgrade_run.failed, upgrade_run.output
    assert installation.read_version() == NEWER_VERSION != old_version
    assert read_counter(installation.execute).is_continuation_of(count_before), (
        "the process must continue with its memory"
    )


def test_a_gateway_does_not_leave_its_fleet_by_mistake(installation: Installation) -> None:
    config_text = installation.config_file.read_text()
    installation.config_file.write_text(f"{config_text}\n[fleet]\n")
    try:
        for check in (True, False):
            run = installation.apply(check=check)
            assert run.failed and "role fleet with fleet_state=absent" in run.message
        assert installation.config_file.read_text().endswith("[fleet]\n")
        run = installation.apply(check=True, leave_fleet=True)
        assert not run.failed and run.changed_task_names == ["grove.sandbox.gateway : Write the configuration"], (
            run.output
        )
    finally:
        installation.config_file.write_text(config_text)


def test_startup_errors_are_reported(installation: Installation) -> None:
    run = installation.apply(config={"server": {"listen": "0.0.0.0:1"}, "nonsense": {"a": 1}})
    assert run.failed
    assert "nonsense: unknown key" in run.message
    assert not installation.apply().failed


def test_a_crashed_gateway_is_started_again(installation: Installation) -> None:
    os.kill(installation.read_pid(), signal.SIGKILL)
    run = installation.apply()
    assert not run.failed, run.output
    with installation.open_client() as client:
        assert client.get("/sandboxes/lives").json()["state"] == "running"


def test_removal_is_refused_while_a_sandbox_runs(installation: Installation) -> None:
    run = installation.apply(state="absent")
    assert run.failed
    assert run.message.startswith("Sandboxes are still running (1: lives). Kill or pause them first")
    with installation.open_client() as client:
        assert client.get("/health").status_code == 200


def test_paused_sandboxes_survive_removal_and_reinstallation(installation: Installation) -> None:
    with installation.open_client() as client:
        assert client.post("/sandboxes/lives/pause").status_code == 204
    run = installation.apply(state="absent")
    assert not run.failed, run.output
    assert not (installation.root / "install").exists()
    assert not installation.config_file.exists()
    assert list((installation.state_root / "sandboxes").iterdir())
    assert installation.apply(state="absent").changed_task_names == []

    assert not installation.apply().failed
    with installation.open_client() as client:
        assert client.get("/sandboxes/lives").json()["state"] == "paused"
        assert client.post("/sandboxes/lives/resume", json={}).status_code == 201


def test_everything_is_removed_on_request(installation: Installation) -> None:
    memory_root = installation.root / "memory"
    assert len(list(memory_root.iterdir())) == 1
    os.kill(installation.read_pid(), signal.SIGKILL)
    run = installation.apply(state="absent", remove_data=True)
    assert not run.failed, run.output
    assert [path.name for path in installation.state_root.iterdir()] == []
    assert list(memory_root.iterdir()) == []
    assert installation.apply(state="absent", remove_data=True).changed_task_names == []
