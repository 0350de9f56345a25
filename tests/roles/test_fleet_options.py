"""Test that the role fleet refuses invalid options with a sentence, before it looks at the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.roles import make_environment

_CASES: list[tuple[dict[str, Any], str]] = [
    ({"hosts": ["h1", "h9"]}, "fleet_hosts is h1, h9: it must consist of names in the inventory"),
    ({"hosts": ["h2", "h3"]}, "fleet_hosts is h2, h3: it must"),
    ({"authority_host": "h9"}, "fleet_authority_host (h9)"),
    ({"registry_host": "h9"}, "fleet_registry_host (h9)"),
    ({"name": "a b"}, "fleet_name is 'a b': use up to 64 letters"),
    ({"address": "10.0.0.1:8701"}, "fleet_address is '10.0.0.1:8701': use the name or the IP address, without a port"),
    ({"address": "0.0.0.0"}, "fleet_address is '0.0.0.0'"),
    ({"address": "h1\nx"}, "fleet_address is"),
    ({"name": "other"}, "find h1, h1 and member: set them as variables of the inventory"),
    ({"listen_address": "eth0"}, "fleet_listen_address is 'eth0': use an IP address"),
    ({"port": 70000}, "are 70000, 2379, 2380, 5000: use four different ports"),
    ({"port": 2379}, "use four different ports from 1 to 65535"),
    ({"labels": {"zone": "a b"}}, 'fleet_labels is {"zone": "a b"}: use up to 64 letters'),
    ({"etcd_endpoints": ["http://10.0.0.9:2379"]}, "fleet_etcd_endpoints is http://10.0.0.9:2379: use"),
    ({"etcd_endpoints": ["https://a:secret@10.0.0.9:2379"]}, "fleet_etcd_endpoints is https://…@10.0.0.9:2379"),
    ({"etcd_endpoints": ["https://10.0.0.9:2379"], "etcd": "member"}, "fleet_etcd is member, but"),
    ({"etcd_endpoints": ["https://10.0.0.9:2379"]}, "fleet_etcd_endpoints is set without fleet_tls_ca"),
    ({"hosts": ["h1", "h2"]}, "2 hosts are members of etcd (h1, h2): use one, three or five"),
    ({"tls_ca": "/etc/ca.pem"}, "fleet_tls_key are '/etc/ca.pem', '' and '': set all three"),
    ({"registry": "https://registry.example"}, "fleet_registry is 'https://registry.example'"),
    ({"registry": "registry.example", "registry_host": "h1"}, "set the first to HOST"),
    ({"gateway_config": {"fleet": {"name": "x"}}}, "gateway_config.fleet may only contain prefix"),
]
"""Options without the prefix of the role, except gateway_config, and a part of the message."""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The message of each case. One play tries all of them on the host h1, in check mode."""
    directory = tmp_path_factory.mktemp("options")
    tasks: list[dict[str, Any]] = []
    # The whole role checks the first case. After that, its facts exist, and the tasks that check options suffice.
    tasks_from: dict[str, str] = {}
    for options, _ in _CASES:
        variables = {
            name if name == "gateway_config" else f"fleet_{name}": value
            for name, value in {"hosts": ["h1", "h2", "h3"], **options}.items()
        }
        include = {"ansible.builtin.include_role": {"name": "grove.sandbox.fleet", **tasks_from}, "vars": variables}
        tasks_from = {"tasks_from": "preflight.yml"}
        message = {"messages": "{{ messages | default([]) + [ansible_failed_result.msg] }}"}
        tasks.append({"block": [include], "rescue": [{"ansible.builtin.set_fact": message}]})
    result_file = directory / "messages.json"
    copy = {"content": "{{ messages | to_json }}", "dest": str(result_file), "mode": "0600"}
    tasks.append({"ansible.builtin.copy": copy, "check_mode": False})
    playbook = directory / "play.json"
    playbook.write_text(json.dumps([{"hosts": "h1", "gather_facts": False, "tasks": tasks}]))
    result = _run_playbook(playbook)
    assert result.returncode == 0, result.stdout + result.stderr
    return [str(each) for each in json.loads(result_file.read_text())]


def _run_playbook(playbook: Path, *options: str) -> subprocess.CompletedProcess[str]:
    connection = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    inventory = playbook.with_name("hosts.json")
    inventory.write_text(json.dumps({"all": {"hosts": dict.fromkeys(("h1", "h2", "h3"), connection)}}))
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "--check",
            "-i",
            str(inventory),
            str(playbook),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=make_environment(playbook.parent),
        check=False,
    )


@pytest.mark.parametrize("index", range(len(_CASES)), ids=[json.dumps(options) for options, _ in _CASES])
def test_an_invalid_option_is_refused_with_a_sentence(messages: list[str], index: int) -> None:
    assert _CASES[index][1] in messages[index]


def test_the_playbook_makes_all_hosts_of_its_group_one_fleet_despite_a_limit(tmp_path: Path) -> None:
    playbook = tmp_path / "play.json"
    variables = {"install_hosts": "h1,h2", "kvm_xfs_host_state_root": str(tmp_path / "state")}
    playbook.write_text(
        json.dumps([{"ansible.builtin.import_playbook": "grove.sandbox.install_fleet", "vars": variables}])
    )
    result = _run_playbook(playbook, "--limit=h1")
    assert "2 hosts are members of etcd (h1, h2)" in " ".join(result.stdout.split())
