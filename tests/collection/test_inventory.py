"""Test the inventory plugin with real gateways, using `ansible-inventory` and plays."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection import agents
from tests.collection.runner import find_ansible_playbook
from tests.support import session
from tests.support.memory_gateway import EXEC_KEY, READ_KEY, MemoryGateway

MALICIOUS_EXPRESSION = "{{ lookup('ansible.builtin.pipe', 'touch EVIL') }}"
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def _east_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("east")) as server:
        yield server


@pytest.fixture
def east_gateway(_east_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield _east_gateway
    _east_gateway.clear()


@pytest.fixture(scope="module")
def _west_gateway(tmp_path_factory: pytest.TempPathFactory, _east_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("west")) as server:
        yield server


@pytest.fixture
def west_gateway(_west_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield _west_gateway
    _west_gateway.clear()


def create_sandbox(gateway: MemoryGateway, name: str, template: str = "base", **fields: Any) -> str:
    with gateway.client() as api:
        response = api.post("/sandboxes", json={"templateID": template, "name": name, **fields})
        assert response.status_code == 201, response.text
        sandbox_id: str = response.json()["sandboxID"]
        return sandbox_id


class Inventory:
    """An inventory file in its own directory. ``output`` is the output of the last command."""

    def __init__(self, directory: Path, **content: Any) -> None:
        self.directory = directory
        self.file = directory / "sandboxes.yml"
        self.write(**content)
        self.output = ""

    def write(self, **content: Any) -> None:
        self.file.write_text(yaml.safe_dump({"plugin": "grove.sandbox.sandboxes", **content}))

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = Path(find_ansible_playbook()).with_name(command[0])
        result = subprocess.run(
            [str(program), "-i", str(self.file), *command[1:]],
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
                "ANSIBLE_HOME": str(self.directory / "home"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
                "COLUMNS": "1000",
                "LC_ALL": "C.UTF-8",
                **environment,
            },
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.output = result.stdout + result.stderr
        return result

    def list_hosts(self, **environment: str) -> dict[str, dict[str, Any]]:
        """Return the variables of each host, with the names of its groups in ``groups``."""
        run = self.run("ansible-inventory", "--list", **environment)
        assert run.returncode == 0, self.output
        # Since ansible-core 2.19, text that is not a template is listed in this form.
        inventory = json.loads(run.stdout, object_hook=lambda entry: entry.get("__ansible_unsafe", entry))
        hosts: dict[str, dict[str, Any]] = {
            host: {**variables, "groups": []} for host, variables in inventory["_meta"]["hostvars"].items()
        }
        for group, members in inventory.items():
            for host in members.get("hosts", []):
                hosts[host]["groups"].append(group)
        return hosts

    def play(self, *tasks: dict[str, Any], hosts: str = "all", **environment: str) -> str:
        """Run a play, which must succeed, and return its output."""
        playbook = self.directory / "book.yml"
        playbook.write_text(json.dumps([{"hosts": hosts, "gather_facts": False, "tasks": tasks}]))
        run = self.run("ansible-playbook", str(playbook), **environment)
        assert run.returncode == 0, self.output
        return run.stdout


def test_sandboxes_become_hosts_with_groups_and_variables(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    sandbox_id = create_sandbox(east_gateway, "web", metadata={"team": "blue-green", "note": ""})
    with east_gateway.client() as api:
        golden_id = api.post("/sandboxes/web/snapshots", json={"name": "golden"}).json()["snapshotID"]
        api.post(f"/snapshots/{golden_id}/fork", json={"name": "fork"}).raise_for_status()
    create_sandbox(east_gateway, "asleep")
    with east_gateway.client() as api:
        api.post("/sandboxes/asleep/pause").raise_for_status()
    inventory = Inventory(tmp_path, gateways=[{"url": east_gateway.unix_url}], python_interpreter=PYTHON)
    hosts = inventory.list_hosts()
    assert hosts.keys() >= {"web", "asleep"} and len(hosts) == 3
    web = hosts["web"]
    assert set(web["groups"]) == {
        *("template_base", "head_golden", "state_running", "gateway_default"),
        *("metadata_team_blue_green", "metadata_note"),
    }
    assert web["ansible_connection"] == "grove.sandbox.sandbox" and web["ansible_host"] == sandbox_id
    assert web["ansible_python_interpreter"] == PYTHON
    assert web["grove_sandbox"]["metadata"] == {"team": "blue-green", "note": ""}
    assert web["grove_sandbox"]["template"] == "base" and web["grove_sandbox"]["head"] == "golden"
    (fork,) = hosts.keys() - {"web", "asleep"}
    assert "head_golden" in hosts[fork]["groups"] and "template_base" in hosts[fork]["groups"]
    assert {"state_paused", "template_base"} <= set(hosts["asleep"]["groups"])
    inventory.write(
        gateways=[{"url": east_gateway.unix_url}],
        filters={"state": "running", "metadata": {"team": "b*"}},
        group_by=["state"],
    )
    (only_host,) = inventory.list_hosts().items()
    assert only_host[0] == "web" and only_host[1]["groups"] == ["state_running"]


def test_tasks_run_in_the_sandboxes(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    for name in ("a", "b"):
        create_sandbox(east_gateway, name, metadata={"side": name})
    inventory = Inventory(tmp_path, gateways=[{"url": east_gateway.unix_url}], python_interpreter=PYTHON)
    side_expression = "{{ grove_sandbox.metadata.side }}"
    inventory.play(
        {
            "ansible.builtin.copy": {
                "content": f"{side_expression}\n",
                "dest": f"{tmp_path}/said-{{{{ inventory_hostname }}}}",
            }
        },
        hosts="template_base",
    )
    for name in ("a", "b"):
        assert (tmp_path / f"said-{name}").read_text() == f"{name}\n"


def test_groups_and_variables_are_composed(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(east_gateway, "web", metadata={"user": "nobody", "rank": "3"})
    inventory = Inventory(
        tmp_path,
        gateways=[{"url": east_gateway.unix_url}],
        compose={"ansible_user": "grove_sandbox.metadata.user", "half": "grove_sandbox.memory_mb / 2"},
        groups={"high": "grove_sandbox.metadata.rank | int > 2", "low": "grove_sandbox.metadata.rank | int < 2"},
        keyed_groups=[{"key": "grove_sandbox.metadata.rank", "prefix": "rank"}],
        strict=True,
    )
    web = inventory.list_hosts()["web"]
    assert web["ansible_user"] == "nobody" and web["half"] == 128.0
    assert {"high", "rank_3"} <= set(web["groups"]) and "low" not in web["groups"]
    inventory.write(gateways=[{"url": east_gateway.unix_url}], compose={"x": "grove_sandbox.nothing.here"}, strict=True)
    assert inventory.run("ansible-inventory", "--list").returncode != 0
    assert "Could not set x for host web" in inventory.output
    inventory.write(gateways=[{"url": east_gateway.unix_url}], compose={"x": "grove_sandbox.nothing.here"})
    assert "x" not in inventory.list_hosts()["web"]


def test_text_from_a_gateway_is_not_evaluated(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    malicious_text = MALICIOUS_EXPRESSION.replace("EVIL", str(tmp_path / "evil"))
    create_sandbox(east_gateway, "web", metadata={"team": malicious_text, malicious_text: "{% raw %}"})
    inventory = Inventory(
        tmp_path,
        gateways=[{"url": east_gateway.unix_url}],
        python_interpreter=PYTHON,
        compose={"team": "grove_sandbox.metadata.team", "twice": "team"},
        groups={"evil": "grove_sandbox.metadata.team == 'x'"},
        keyed_groups=[{"key": "grove_sandbox.metadata.team", "prefix": "team"}],
    )
    hosts = inventory.list_hosts()
    text = json.dumps(hosts["web"])
    assert malicious_text in text.replace('\\"', '"')
    assert all(re.fullmatch(r"\w+", group) for group in hosts["web"]["groups"]), hosts["web"]["groups"]
    output = inventory.play(
        {"ansible.builtin.debug": {"var": "grove_sandbox"}},
        {"ansible.builtin.debug": {"msg": "{{ team }} {{ grove_sandbox.metadata.team }}"}},
        {"ansible.builtin.command": "echo {{ team | quote }}", "register": "said"},
        {"ansible.builtin.debug": {"var": "said.stdout"}},
    )
    assert not (tmp_path / "evil").exists()
    assert "lookup(" in output


@pytest.mark.parametrize("name", ["localhost", "all", "state_running", "high"])
def test_a_sandbox_cannot_replace_another_host(east_gateway: MemoryGateway, tmp_path: Path, name: str) -> None:
    sandbox_id = create_sandbox(east_gateway, name)
    inventory = Inventory(
        tmp_path, gateways=[{"url": east_gateway.unix_url}], groups={"high": "grove_sandbox.memory_mb > 1"}, strict=True
    )
    hosts = inventory.list_hosts()
    assert hosts.keys() == {sandbox_id} and "high" in hosts[sandbox_id]["groups"]
    # Tasks for localhost still run on the control node.
    assert inventory.play({"ansible.builtin.debug": {"msg": "{{ ansible_connection }}"}}, hosts="localhost").count(
        '"local"'
    )


def test_several_gateways_are_listed(east_gateway: MemoryGateway, west_gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(east_gateway, "web"), create_sandbox(west_gateway, "web"), create_sandbox(west_gateway, "db")
    key_file = tmp_path / "west.key"
    key_file.write_text(EXEC_KEY + "\n")
    gateways: list[dict[str, Any]] = [
        {
            "name": "east",
            "url": "{{ lookup('ansible.builtin.env', 'EAST') }}",
            "token": "{{ lookup('env', 'EAST_KEY') }}",
        },
        {"name": "west", "url": west_gateway.url, "token_file": "west.key"},
    ]
    environment = {"EAST": east_gateway.url, "EAST_KEY": EXEC_KEY}
    inventory = Inventory(tmp_path, gateways=gateways, strict=True, python_interpreter=PYTHON)
    hosts = inventory.list_hosts(**environment)
    assert hosts.keys() == {"web.east", "web.west", "db.west"}
    assert "gateway_west" in hosts["db.west"]["groups"]
    assert EXEC_KEY not in inventory.output
    assert hosts["db.west"]["ansible_sandbox_gateway_token_file"] == str(key_file)
    # Each task reaches its own gateway, with a key that is not in any variable.
    task = {
        "ansible.builtin.copy": {"content": "{{ ansible_host }}", "dest": f"{tmp_path}/at-{{{{ inventory_hostname }}}}"}
    }
    output = inventory.play(task, {"ansible.builtin.debug": {"var": "hostvars"}}, **environment)
    for host, variables in hosts.items():
        assert (tmp_path / f"at-{host}").read_text() == variables["ansible_host"]
    assert EXEC_KEY not in output
    inventory.write(gateways=gateways, hostname="name", strict=True)
    assert inventory.list_hosts(**environment).keys() == {"web", "web.west", "db"}
    assert "a host web already exists" in inventory.output
    inventory.write(gateways=[gateways[0], {**gateways[1], "name": "east"}])
    assert inventory.run("ansible-inventory", "--list").returncode != 0 and "the same name" in inventory.output
    inventory.write(gateways=[{"url": east_gateway.url}, {"url": west_gateway.url}])
    assert inventory.run("ansible-inventory", "--list").returncode != 0 and "has no name" in inventory.output


def test_unreachable_gateways_are_reported(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(east_gateway, "web")
    reachable_gateway = {"name": "good", "url": east_gateway.url, "token": EXEC_KEY}
    unreachable_gateways: list[tuple[dict[str, Any], str]] = [
        ({"name": "bad", "url": "http://127.0.0.1:9"}, "nothing listens on that port"),
        ({"name": "bad", "url": east_gateway.url, "token": "not-a-known-key-0000"}, "does not accept the key"),
        ({"name": "bad", "url": f"unix://{tmp_path}/x.sock"}, "check that sandbox-gateway is running"),
        (
            {"name": "bad", "url": east_gateway.url, "token_file": "/nowhere/key"},
            "the key file /nowhere/key cannot be read",
        ),
        ({"name": "bad", "url": "gopher://x"}, "is not the address of a gateway"),
    ]
    inventory = Inventory(tmp_path)
    for entry, message in unreachable_gateways:
        inventory.write(gateways=[reachable_gateway, entry])
        assert inventory.list_hosts().keys() == {"web.good"}
        assert (
            "the sandboxes of gateway bad are not in the inventory" in inventory.output and message in inventory.output
        )
        inventory.write(gateways=[reachable_gateway, entry], strict=True)
        assert inventory.run("ansible-inventory", "--list").returncode != 0
        assert message in inventory.output and "Traceback" not in inventory.output
        assert "not-a-known-key-0000" not in inventory.output and EXEC_KEY not in inventory.output
    inventory.write(gateways=[{"url": east_gateway.unix_url, "tokn": "x"}])
    assert inventory.run("ansible-inventory", "--list").returncode != 0 and "unknown keys (tokn)" in inventory.output


def test_the_cache_stores_hosts_without_keys(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(east_gateway, "web", metadata={"team": "{{ 1 }}"})
    cache_options = {
        "cache": True,
        "cache_plugin": "ansible.builtin.jsonfile",
        "cache_connection": str(tmp_path / "cache"),
        "cache_timeout": 3600,
    }
    gateway_entry = {"url": east_gateway.url, "token": EXEC_KEY}
    inventory = Inventory(tmp_path, gateways=[gateway_entry], python_interpreter=PYTHON, **cache_options)
    first_hosts = inventory.list_hosts()
    (file,) = (tmp_path / "cache").iterdir()
    text = file.read_text()
    assert EXEC_KEY not in text and READ_KEY not in text and "ansible_unsafe" not in text
    assert "access" not in text.lower(), "the cache must not contain access tokens"
    cache_contents = json.loads(text)
    assert "web" in json.dumps(cache_contents) and "team" in json.dumps(cache_contents)
    create_sandbox(east_gateway, "late")
    assert inventory.list_hosts() == first_hosts
    # The key comes from the file, not from the cache: tasks still run.
    inventory.play({"ansible.builtin.raw": "true"})
    assert inventory.run("ansible-inventory", "--list", "--flush-cache").returncode == 0
    assert '"late"' in inventory.output
    assert inventory.list_hosts().keys() == {"web", "late"}
    # A gateway that could not be reached is queried again.
    inventory.write(gateways=[{**gateway_entry, "url": "http://127.0.0.1:9"}], **cache_options)
    assert inventory.list_hosts() == {}
    inventory.write(gateways=[gateway_entry], **cache_options)
    assert inventory.list_hosts().keys() == {"web", "late"}


def test_environment_variables_select_the_gateway(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(east_gateway, "web")
    inventory = Inventory(tmp_path, python_interpreter=PYTHON)
    environment = {"SANDBOX_GATEWAY_URL": east_gateway.url, "SANDBOX_GATEWAY_TOKEN": EXEC_KEY}
    assert inventory.list_hosts(**environment).keys() == {"web"}
    assert EXEC_KEY not in inventory.output
    inventory.play({"ansible.builtin.ping": None}, **environment)


def test_a_sandbox_cannot_redirect_its_tasks(east_gateway: MemoryGateway, tmp_path: Path) -> None:
    """Facts take precedence over inventory variables, and a hostile sandbox controls its facts."""
    create_sandbox(east_gateway, "web")
    victim_id = create_sandbox(east_gateway, "victim")
    inventory = Inventory(tmp_path, gateways=[{"url": east_gateway.url, "token": EXEC_KEY}], python_interpreter=PYTHON)
    facts = {
        "ansible_host": victim_id,
        "ansible_connection": "local",
        "ansible_sandbox_gateway_url": "http://127.0.0.1:9",
        "ansible_sandbox_gateway_token_file": "/etc/hostname",
        "ansible_sandbox_validate_certs": False,
    }
    module_file = tmp_path / "library" / "false_facts.py"
    module_file.parent.mkdir()
    module_file.write_text(f"#!{PYTHON}\nprint({json.dumps({'changed': False, 'ansible_facts': facts})!r})\n")
    output = inventory.play(
        {"false_facts": None},
        {"ansible.builtin.raw": "echo hosts=$(hostname)"},
        {"ansible.builtin.debug": {"msg": "{{ ansible_host }} {{ ansible_sandbox_gateway_url }}"}},
        hosts="web",
        ANSIBLE_LIBRARY=str(module_file.parent),
    )
    assert victim_id not in output.partition("Removed restricted key")[0]
    with east_gateway.client() as api:
        actual_id = api.get("/sandboxes/web").json()["sandboxID"]
    assert f'"{actual_id} ' in output


def test_files_of_other_plugins_are_rejected(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path)
    inventory.file = tmp_path / "hosts.yml"
    inventory.write()
    assert inventory.run("ansible-inventory", "--list", ANSIBLE_INVENTORY_ENABLED="grove.sandbox.sandboxes").returncode
    inventory.file = tmp_path / "prod.sandboxes.yaml"
    inventory.file.write_text("plugin: another.one.entirely\n")
    assert inventory.run("ansible-inventory", "--list", ANSIBLE_INVENTORY_ENABLED="grove.sandbox.sandboxes").returncode
    assert "Incorrect plugin name" in inventory.output


def find_documented_files() -> list[Any]:
    """Return the inventory files in the documentation and in the plugin's examples."""
    pages = [session.REPOSITORY / "docs" / "inventory.md", session.REPOSITORY / "plugins/inventory/sandboxes.py"]
    parameters = []
    for page in pages:
        for text in re.findall(
            r"^plugin: grove\.sandbox\.sandboxes\n(?:(?!```|---|\"\"\").*\n)*", page.read_text(), re.M
        ):
            parameters.append(pytest.param(yaml.safe_load(text), id=f"{page.stem}-{len(parameters)}"))
    return parameters


@pytest.mark.parametrize("content", find_documented_files())
def test_documented_inventory_files_work(east_gateway: MemoryGateway, tmp_path: Path, content: dict[str, Any]) -> None:
    """The files are used unchanged, except for the addresses of gateways, the keys and the certificates."""
    create_sandbox(east_gateway, "web", metadata={"team": "blue", "user": "nobody"})
    for gateway in content.get("gateways", []):
        gateway.update(url=east_gateway.url, token=EXEC_KEY)
        for key in ("token_file", "ca_path"):
            gateway.pop(key, None)
    if "cache_connection" in content:
        content["cache_connection"] = str(tmp_path / "cache")
    del content["plugin"]
    inventory = Inventory(tmp_path, **{**content, "strict": True})
    hosts = inventory.list_hosts(SANDBOX_GATEWAY_URL=east_gateway.unix_url)
    assert hosts, "the inventory must list the sandbox"
    assert all(host.partition(".")[0] == "web" for host in hosts)
