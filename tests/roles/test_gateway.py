"""The role gateway without a supervisor: install, configure, start, change, restart, remove."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.roles.upgrade import NEWER, read_counter
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.roles import Played, play

Apply = Callable[..., Played]


class Installed:
    """An installation by the role below one directory."""

    def __init__(self, root: Path, state_root: Path) -> None:
        network = session.network()
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
                "host": {"cache_root": str(session.cache_dir())},
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
    ) -> Played:
        variables = {**self.variables, **{f"gateway_{name}": value for name, value in options.items()}}
        if config:
            variables["gateway_config"] = {**self.variables["gateway_config"], **config}
        inside = ("env", f"ANSIBLE_COLLECTIONS_PATH={collections or self.collections}")
        return play("gateway", variables, check=check, into=self.root, inside=inside)

    def pid(self) -> int:
        return int(self.pid_file.read_text())

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://gateway", timeout=120)

    def execute(self, *argv: str) -> str:
        """The output of a program that must succeed in the sandbox ``lives``."""
        with self.client() as client:
            said = client.post("/sandboxes/lives/exec", json={"args": argv}).json()
        assert said["exitCode"] == 0, said
        return str(said["stdout"])

    def version(self) -> str:
        with self.client() as client:
            return str(client.get("/health").json()["version"])


@pytest.fixture(scope="module")
def installed(xfs_root: Path, shared_gateway: Gateway, template: str) -> Iterator[Installed]:
    """One installation for the tests of this file, which depend on their order; its state holds the template."""
    root = session.run_dir() / "role"
    (root / "bin").mkdir(parents=True)
    installed = Installed(root, xfs_root / "role")
    installed.state_root.mkdir()
    subprocess.run(
        ["cp", "-a", "--reflink=always", str(shared_gateway.state_root / "templates"), str(installed.state_root)],
        check=True,
        timeout=60,
    )
    yield installed
    installed.apply(state="absent", remove_data=True)
    shutil.rmtree(root)


def test_check_mode_before_the_installation(installed: Installed) -> None:
    done = installed.apply(check=True)
    assert not done.failed, done.output
    assert done.changed > 0
    assert not (installed.root / "install").exists()
    assert not installed.config_file.exists()


def test_installation_and_start(installed: Installed) -> None:
    done = installed.apply()
    assert not done.failed, done.output
    with installed.client() as client:
        assert client.get("/health").json()["status"] == "ok"
    program = installed.root / "bin" / "sandboxctl"
    listed = subprocess.run(
        [str(program), "--url", f"unix://{installed.socket}", "--json", "template", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [item["names"] for item in json.loads(listed.stdout)] == [["debian"]]


def test_a_second_run_changes_nothing(installed: Installed) -> None:
    before = installed.pid()
    again = installed.apply()
    assert (again.failed, again.changed_task_names) == (False, []), again.output
    checked = installed.apply(check=True)
    assert (checked.failed, checked.changed_task_names) == (False, []), checked.output
    assert installed.pid() == before


def test_only_root_can_read_the_log(installed: Installed) -> None:
    path = installed.root / "log" / "gateway.log"
    assert path.read_text().count('"event": "listening"') == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_secret_and_kept(installed: Installed) -> None:
    assert stat.S_IMODE(installed.key_file.stat().st_mode) == 0o600
    name, scope, key = installed.key_file.read_text().split()
    assert (name, scope, len(key)) == ("admin", "admin", 48)

    done = installed.apply(keys=[{"name": "ci", "scope": "exec"}, {"name": "admin", "scope": "admin"}])
    assert not done.failed, done.output
    lines = [line.split() for line in installed.key_file.read_text().splitlines()]
    assert [line[:2] for line in lines] == [["ci", "exec"], ["admin", "admin"]]
    assert lines[1][2] == key
    assert lines[0][2] != key
    assert key not in done.output
    assert lines[0][2] not in done.output

    doubled = installed.apply(keys=[{"name": "a"}, {"name": "a"}])
    assert doubled.failed
    assert "needs a unique name" in doubled.message


def test_sandboxes_survive_a_new_configuration(installed: Installed) -> None:
    with installed.client() as client:
        made = client.post("/sandboxes", json={"templateID": "debian", "name": "lives", "timeout": -1})
        assert made.status_code == 201, made.text
    before = installed.pid()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = installed.apply(config={"server": {"listen": f"127.0.0.1:{port}"}, "limits": {"sandboxes": 7}})
    assert not done.failed, done.output
    assert "grove.sandbox.gateway : Write the configuration" in done.changed_task_names
    assert installed.pid() != before
    written = tomllib.loads(installed.config_file.read_text())
    assert written["limits"] == {"sandboxes": 7}
    assert written["server"]["socket"] == str(installed.socket)
    key = installed.key_file.read_text().split()[2]
    answer = httpx.get(f"http://127.0.0.1:{port}/sandboxes/lives", headers={"X-API-Key": key}, timeout=60)
    assert answer.json()["state"] == "running"
    assert httpx.get(f"http://127.0.0.1:{port}/sandboxes/lives", timeout=60).status_code == 401
    with installed.client() as client:
        said = client.post("/sandboxes/lives/exec", json={"args": ["cat", "/proc/uptime"]}).json()
        assert said["exitCode"] == 0, said


def test_sandboxes_survive_an_upgrade(installed: Installed, newer_collections: Path) -> None:
    older, counted = installed.version(), read_counter(installed.execute)
    predicted = installed.apply(check=True, collections=newer_collections)
    assert not predicted.failed, predicted.output
    assert "grove.sandbox.gateway : Copy the package" in predicted.changed_task_names
    assert installed.version() == older

    installed.collections = newer_collections
    upgraded = installed.apply()
    assert not upgraded.failed, upgraded.output
    assert installed.version() == NEWER != older
    assert read_counter(installed.execute).continued_from(counted), "not only is it there: the same memory goes on"


def test_startup_errors_are_reported(installed: Installed) -> None:
    done = installed.apply(config={"server": {"listen": "0.0.0.0:1"}, "nonsense": {"a": 1}})
    assert done.failed
    assert "nonsense: unknown key" in done.message
    assert not installed.apply().failed


def test_a_crashed_gateway_is_started_again(installed: Installed) -> None:
    os.kill(installed.pid(), signal.SIGKILL)
    done = installed.apply()
    assert not done.failed, done.output
    with installed.client() as client:
        assert client.get("/sandboxes/lives").json()["state"] == "running"


def test_removal_is_refused_while_a_sandbox_runs(installed: Installed) -> None:
    done = installed.apply(state="absent")
    assert done.failed
    assert done.message.startswith("1 sandboxes run (lives): kill or pause them first")
    with installed.client() as client:
        assert client.get("/health").status_code == 200


def test_paused_sandboxes_survive_removal_and_reinstallation(installed: Installed) -> None:
    with installed.client() as client:
        assert client.post("/sandboxes/lives/pause").status_code == 204
    done = installed.apply(state="absent")
    assert not done.failed, done.output
    assert not (installed.root / "install").exists()
    assert not installed.config_file.exists()
    assert list((installed.state_root / "sandboxes").iterdir())
    assert installed.apply(state="absent").changed_task_names == []

    assert not installed.apply().failed
    with installed.client() as client:
        assert client.get("/sandboxes/lives").json()["state"] == "paused"
        assert client.post("/sandboxes/lives/resume", json={}).status_code == 201


def test_everything_is_removed_on_request(installed: Installed) -> None:
    os.kill(installed.pid(), signal.SIGKILL)
    done = installed.apply(state="absent", remove_data=True)
    assert not done.failed, done.output
    assert [path.name for path in installed.state_root.iterdir()] == []
    assert installed.apply(state="absent", remove_data=True).changed_task_names == []
