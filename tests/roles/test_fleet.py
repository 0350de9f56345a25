"""Test the role fleet with three hosts: containers that share the network of this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.roles.container import Container, running_container, unpack_debian
from tests.support import session
from tests.support.roles import PlayResult, make_environment, read_result

pytestmark = [pytest.mark.in_order, pytest.mark.slow]

_NAMES = ("h1", "h2", "h3")
_CONNECTIONS = session.REPOSITORY / "molecule/gateway_systemd/connection_plugins"
_FILES = "/etc/sandbox-gateway/fleet"
_SECRET = "/etc/sandbox-gateway/fleet-secret"


class Fleet:
    """Three hosts, and the inventory and the playbook that make them a fleet. The registry is on h2."""

    def __init__(self, directory: Path, containers: dict[str, Container]) -> None:
        self._directory = directory
        self.containers = containers
        block = 64 + int(session.get_run_id(), 36) % 128
        self.addresses = {name: f"127.{block}.{session.LANE}.{number}" for number, name in enumerate(_NAMES, 1)}
        ports = ("fleet_port", "fleet_etcd_client_port", "fleet_etcd_peer_port", "fleet_registry_port")
        self.variables: dict[str, Any] = {
            **{name: session.allocate_port() for name in ports},
            "fleet_hosts": [*_NAMES],
            "fleet_registry_host": "h2",
        }
        hosts = {name: self._describe_host(name) for name in _NAMES}
        (directory / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))

    def _describe_host(self, name: str) -> dict[str, Any]:
        container = self.containers[name]
        pid_file = self._directory / f"{name}.pid"
        pid_file.write_text(str(container.init_pid))
        gateway_config = {
            "kvm_xfs": {"accelerator": "tcg"},
            "network": {**session.allocate_network(), "pool": 0},
        }
        return {
            "ansible_connection": "machine",
            "ansible_machine_pid_file": str(pid_file),
            "ansible_machine_directory": str(container.directory),
            "ansible_python_interpreter": "/usr/bin/python3",
            "fleet_address": self.addresses[name],
            "fleet_labels": {"zone": name},
            "gateway_config": gateway_config,
            "install_gateway_config": gateway_config,  # for playbooks, which set gateway_config
        }

    def apply(self, *options: str, **variables: Any) -> PlayResult:
        """Apply the role to all hosts. ``options``: of ansible-playbook. Times out after twenty minutes."""
        playbook = self._directory / "play.json"
        play = {
            "hosts": "all",
            "gather_facts": False,
            "vars": {**self.variables, **{f"fleet_{name}": value for name, value in variables.items()}},
            "roles": ["grove.sandbox.fleet"],
        }
        playbook.write_text(json.dumps([play]))
        return self.run_playbook(str(playbook), *options)

    def run_playbook(self, playbook: str, *options: str) -> PlayResult:
        program = Path(sys.executable).with_name("ansible-playbook")
        result = subprocess.run(
            [str(program), "-i", str(self._directory / "hosts.json"), playbook, *options],
            capture_output=True,
            text=True,
            timeout=1200,
            env={
                **make_environment(self._directory),
                "ANSIBLE_CONNECTION_PLUGINS": str(_CONNECTIONS),
                "ANSIBLE_PIPELINING": "1",
            },
            check=False,
        )
        return read_result(result)

    def run(self, host: str, *argv: str) -> str:
        return self.containers[host].run(*argv)

    def request(self, host: str, path: str) -> Any:
        """Return the answer of a host's gateway."""
        return json.loads(self.run(host, sys.executable, "-c", _REQUEST, path))

    def list_members(self, host: str) -> dict[str, str]:
        """Return the state of each host that the gateway of ``host`` knows."""
        return {each["name"]: each["state"] for each in self.request(host, "/fleet")["hosts"]}

    def list_cordoned_hosts(self) -> list[str]:
        return [each["name"] for each in self.request("h1", "/fleet")["hosts"] if each["cordoned"]]

    def list_secrets(self) -> list[str]:
        """Return the secrets that all hosts share."""
        login = json.loads(self.run("h1", "cat", f"{_FILES}/registry.json"))
        (entry,) = login["auths"].values()
        keys = [line.split()[2] for line in self.run("h1", "cat", "/etc/sandbox-gateway/keys").splitlines()]
        return [self.run("h1", "base64", _SECRET).strip(), entry["auth"], *keys]

    def get_url(self, host: str, port: str) -> str:
        return f"https://{self.addresses[host]}:{self.variables[port]}"


_REQUEST = """
import sys, httpx
transport = httpx.HTTPTransport(uds="/run/sandbox-gateway/gateway.sock")
print(httpx.Client(transport=transport).get("http://gateway" + sys.argv[1]).text)
"""


@pytest.fixture(scope="module")
def fleet(xfs_root: Path) -> Iterator[Fleet]:
    directory = session.get_run_dir() / "fleet"
    directory.mkdir()
    unpack_debian(xfs_root / "h1")
    with contextlib.ExitStack() as stack:
        containers = {}
        for name in _NAMES:
            root, state_root = xfs_root / name, xfs_root / f"{name}-state"
            if name != "h1":
                subprocess.run(["cp", "-a", "--reflink=always", str(xfs_root / "h1"), str(root)], check=True)
            state_root.mkdir()
        for name in _NAMES:
            containers[name] = stack.enter_context(running_container(xfs_root / name, xfs_root / f"{name}-state"))
        yield Fleet(directory, containers)
    for name in _NAMES:
        shutil.rmtree(xfs_root / name)
        shutil.rmtree(xfs_root / f"{name}-state")
    shutil.rmtree(directory)


def _list_own_tasks(result: PlayResult) -> list[str]:
    """Return the tasks of the role that changed something, except for the start of services.

    Check mode cannot know the services of packages that are not installed.
    """
    names = [name.removeprefix("grove.sandbox.fleet : ") for name in result.changed_task_names if "fleet : " in name]
    return [name for name in names if not name.startswith("Start ")]


def test_check_mode_changes_nothing_and_predicts_the_run(fleet: Fleet) -> None:
    prediction = fleet.apply("--check", "--diff")
    assert not prediction.failed, prediction.output
    for name in _NAMES:
        fleet.run(name, "test", "!", "-e", "/etc/sandbox-gateway", "-a", "!", "-e", "/usr/bin/etcd")
    run = fleet.apply("--diff")
    assert not run.failed, run.output
    assert _list_own_tasks(run) == _list_own_tasks(prediction)
    for secret in fleet.list_secrets():
        assert secret not in prediction.output + run.output


def test_every_gateway_knows_all_hosts(fleet: Fleet) -> None:
    for name in _NAMES:
        assert fleet.list_members(name) == dict.fromkeys(_NAMES, "running")
    labels = {each["name"]: each["labels"] for each in fleet.request("h3", "/fleet")["hosts"]}
    assert labels == {name: {"zone": name} for name in _NAMES}


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    run = fleet.apply()
    assert (run.failed, run.changed_task_names) == (False, []), run.output


def test_the_hosts_share_the_secret_and_the_keys_but_no_private_key(fleet: Fleet) -> None:
    for path in (_SECRET, "/etc/sandbox-gateway/keys", f"{_FILES}/registry.json", f"{_FILES}/ca.pem"):
        assert len({fleet.run(name, "sha256sum", path) for name in _NAMES}) == 1, path
    for path in (_SECRET, f"{_FILES}/host.key", f"{_FILES}/registry.json"):
        assert {fleet.run(name, "stat", "--format=%a %U", path).strip() for name in _NAMES} == {"600 root"}, path
    assert len({fleet.run(name, "sha256sum", f"{_FILES}/host.key") for name in _NAMES}) == len(_NAMES)
    with_authority_key = [name for name in _NAMES if "ca.key" in fleet.run(name, "ls", _FILES)]
    assert with_authority_key == ["h1"]


def test_etcd_has_three_members_and_refuses_strangers(fleet: Fleet) -> None:
    endpoint = fleet.get_url("h2", "fleet_etcd_client_port")
    certificate = ("--cert", f"{_FILES}/host.pem", "--key", f"{_FILES}/host.key")
    command = ("env", "ETCDCTL_API=3", "etcdctl", "--endpoints", endpoint, "--cacert", f"{_FILES}/ca.pem")
    members = fleet.run("h1", *command, *certificate, "member", "list")
    assert sorted(line.split(", ")[2] for line in members.splitlines()) == [*_NAMES]
    with pytest.raises(AssertionError, match=r"bad certificate|context deadline exceeded"):
        fleet.run("h1", *command, "--command-timeout=5s", "member", "list")


def test_only_gateways_may_use_the_registry(fleet: Fleet) -> None:
    url = fleet.get_url("h2", "fleet_registry_port")
    allowed = fleet.run("h3", sys.executable, "-c", _USE_REGISTRY, url, f"{_FILES}/ca.pem", f"{_FILES}/registry.json")
    assert allowed.split() == ["401", "200"]


_USE_REGISTRY = """
import json, ssl, sys, httpx
url, ca, login = sys.argv[1:]
(entry,) = json.load(open(login))["auths"].values()
client = httpx.Client(verify=ssl.create_default_context(cafile=ca))
print(client.get(url + "/v2/").status_code)
print(client.get(url + "/v2/", headers={"Authorization": "Basic " + entry["auth"]}).status_code)
"""


def test_another_secret_is_not_replaced(fleet: Fleet) -> None:
    fleet.run("h3", "cp", "--preserve", _SECRET, "/root/secret")
    fleet.run("h3", "sh", "-c", f"head -c 32 /dev/urandom >{_SECRET}")
    checksum = fleet.run("h3", "sha256sum", _SECRET)
    run = fleet.apply("--limit=h3")
    assert run.failed and f"{_SECRET} is not the secret of h1" in run.message, run.output
    assert fleet.run("h3", "sha256sum", _SECRET) == checksum
    fleet.run("h3", "mv", "/root/secret", _SECRET)


def test_other_members_of_etcd_are_refused(fleet: Fleet) -> None:
    run = fleet.apply("--limit=h3", etcd_peer_port=session.allocate_port())
    assert run.failed and "This role does not change the members of a cluster" in run.message, run.output


def test_a_certificate_is_replaced(fleet: Fleet) -> None:
    """The host is prepared alone, and the authority signs its certificate without being in the play."""
    fleet.run("h3", "rm", f"{_FILES}/host.pem")
    pid = fleet.run("h3", "systemctl", "show", "--property=MainPID", "sandbox-gateway", "etcd")
    run = fleet.apply("--limit=h3")
    assert not run.failed, run.output
    assert fleet.run("h3", "systemctl", "show", "--property=MainPID", "sandbox-gateway", "etcd") != pid
    assert fleet.list_members("h1") == dict.fromkeys(_NAMES, "running")


def test_a_rolling_upgrade_changes_only_hosts_with_another_release(fleet: Fleet) -> None:
    options = ("-e", json.dumps({**fleet.variables, "install_hosts": "all"}))
    run = fleet.run_playbook("grove.sandbox.rolling_upgrade", *options)
    assert (run.failed, run.changed_task_names) == (False, []), run.output
    fleet.run("h2", "sh", "-c", "echo older >/opt/sandbox-gateway/installed")
    prediction = fleet.run_playbook("grove.sandbox.rolling_upgrade", *options, "--check")
    assert not prediction.failed and "Would cordon h2, and move 0 sandboxes" in prediction.output, prediction.output
    assert fleet.list_cordoned_hosts() == []
    run = fleet.run_playbook("grove.sandbox.rolling_upgrade", *options)
    assert not run.failed and "h2 is cordoned, and has no sandboxes" in run.output, run.output
    assert run.changed_task_names.count("Let the host get new sandboxes again") == 1
    assert fleet.list_cordoned_hosts() == []
    assert fleet.list_members("h1") == dict.fromkeys(_NAMES, "running")
    assert "older" not in fleet.run("h2", "cat", "/opt/sandbox-gateway/installed")


def test_a_host_leaves_the_fleet(fleet: Fleet) -> None:
    run = fleet.apply("--limit=h3", state="absent")
    assert not run.failed, run.output
    assert fleet.list_members("h1") == dict.fromkeys(("h1", "h2"), "running")
    assert fleet.request("h3", "/health")["status"] == "ok"
    fleet.run("h3", "sh", "-c", f"! systemctl is-active etcd && test -e {_SECRET} -a ! -e {_FILES}/host.key")
    second_run = fleet.apply("--limit=h3", state="absent", remove_data=True)
    own_tasks = [name for name in second_run.changed_task_names if "Remove the data" not in name]
    assert (second_run.failed, own_tasks) == (False, []), second_run.output
    fleet.run("h3", "test", "!", "-e", _SECRET, "-a", "!", "-e", "/var/lib/etcd/sandbox-fleet")
