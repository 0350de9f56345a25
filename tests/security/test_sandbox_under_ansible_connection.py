"""Root in a sandbox managed by Ansible returns arbitrary data as the results of tasks.

The attacker tries to send the next task, the gateway's key or the contents of a file on the control node to another
address. Most tests define the sandbox as an Ansible host with `add_host` or in a static inventory. For hosts from our
inventory plugin, the plugin itself sets the gateway.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ansible_core_versions
from tests.support.liar import FakeGateway, make_facts_response, make_response
from tests.support.memory_gateway import EXEC_KEY
from tests.support.samples import mark_slow_except

pytestmark = pytest.mark.parametrize(
    "core", mark_slow_except((ansible_core_versions.NEWEST,), ansible_core_versions.RELEASES)
)

KEY = "key-of-the-gateway"
SECRET = "content-of-a-file"
RAW_TASK = {"ansible.builtin.raw": "true"}
PING_TASK: dict[str, Any] = {"ansible.builtin.ping": None}


@pytest.fixture
def attacker_server() -> Iterator[FakeGateway]:
    """The server to which the sandbox tries to redirect requests."""
    with FakeGateway().running() as server:
        yield server


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway().running() as server:
        yield server


class SecretFiles:
    """Two files on the control node, which contain the key and an unrelated secret."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text(f"{KEY}\n")
        self.secret = folder / "secret"
        self.secret.write_text(f"{SECRET}\n")


@pytest.fixture
def secret_files(tmp_path: Path) -> SecretFiles:
    return SecretFiles(tmp_path)


def make_add_host_play(gateway: FakeGateway, secret_files: SecretFiles, **extra_variables: str) -> dict[str, Any]:
    """Return a play that adds the sandbox as a host, as our playbooks do."""
    variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "0123456789ab",
        "ansible_sandbox_gateway_url": gateway.url,
        "ansible_sandbox_gateway_token_file": str(secret_files.key),
        **extra_variables,
    }
    task = {"ansible.builtin.add_host": {"name": "guest", **variables}}
    return {"hosts": "localhost", "connection": "local", "tasks": [task]}


def make_false_facts(attacker_server: FakeGateway, secret_files: SecretFiles) -> dict[str, Any]:
    return {
        "ansible_sandbox_gateway_url": attacker_server.url,
        "ansible_sandbox_gateway_token_file": str(secret_files.secret),
        "ansible_sandbox_validate_certs": False,
    }


def check_nothing_was_stolen(output: str, gateway: FakeGateway, attacker_server: FakeGateway) -> None:
    assert not attacker_server.request_headers, output
    assert gateway.list_received_keys() <= {KEY}, "the contents of a file were sent as a key"


def check_refusal(output: str, name: str) -> None:
    """Check that the host is reported as unreachable, and that the message names the variable."""
    assert re.search(r"guest +: ok=\d+ +changed=\d+ +unreachable=1", output), output
    assert name in output and "must not come from facts" in output, output


def test_variables_of_add_host_are_sufficient(
    core: str, gateway: FakeGateway, secret_files: SecretFiles, tmp_path: Path
) -> None:
    """Check that the variables that our playbooks set are accepted, even with `delegate_to` in a loop."""
    add_host_play = make_add_host_play(gateway, secret_files)
    (guest_task,) = add_host_play["tasks"]
    # Without ansible_host, the name of the host is the name of the sandbox.
    variables_without_host = {
        key: value for key, value in guest_task["ansible.builtin.add_host"].items() if key != "ansible_host"
    }
    add_host_play["tasks"].append({"ansible.builtin.add_host": {**variables_without_host, "name": "named"}})
    delegated_task = {**RAW_TASK, "delegate_to": "{{ item }}", "loop": ["guest", "named"]}
    output = ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        add_host_play,
        {"hosts": "guest", "tasks": [RAW_TASK, RAW_TASK]},
        {"hosts": "localhost", "connection": "local", "tasks": [delegated_task]},
    )
    assert "unreachable=0" in output and "unreachable=1" not in output and "failed=1" not in output, output
    sandbox_ids = [headers["E2b-Sandbox-Id"] for headers in gateway.request_headers]
    assert sandbox_ids == ["0123456789ab"] * 3 + ["named"] and gateway.list_received_keys() == {KEY}


@pytest.mark.parametrize(
    "name",
    [
        "ansible_sandbox_gateway_url",
        "ansible_sandbox_gateway_token",
        "ansible_sandbox_gateway_token_file",
        "ansible_sandbox_ca_path",
        "ansible_sandbox_validate_certs",
        "ansible_sandbox_max_output_mb",
    ],
)
def test_a_single_fact_cannot_redirect_tasks(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    name: str,
) -> None:
    value = {
        "ansible_sandbox_gateway_url": attacker_server.url,
        "ansible_sandbox_gateway_token": SECRET,
        "ansible_sandbox_validate_certs": False,
        "ansible_sandbox_max_output_mb": 1 << 20,
    }.get(name, str(secret_files.secret))
    gateway.responses["0123456789ab"] = make_facts_response(**{name: value})
    output = ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        make_add_host_play(gateway, secret_files),
        {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]},
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, name)
    assert len(gateway.request_headers) == 1, "a request was sent after the false facts"


@pytest.mark.parametrize("play_kind", ["add_host", "delegate_to", "handler", "loop"])
def test_facts_cannot_redirect_tasks(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    play_kind: str,
) -> None:
    """Facts that a module returns redirect neither the next task nor tasks on another connection to the host."""
    gateway.responses["0123456789ab"] = make_facts_response(**make_false_facts(attacker_server, secret_files))
    plays: list[dict[str, Any]] = [{"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}]
    if play_kind == "delegate_to":
        delegated_tasks = [
            {**PING_TASK, "delegate_to": "guest", "delegate_facts": True},
            {**RAW_TASK, "delegate_to": "guest"},
        ]
        plays = [{"hosts": "localhost", "connection": "local", "tasks": delegated_tasks}]
    elif play_kind == "handler":
        notifying_task = {**PING_TASK, "changed_when": True, "notify": "next"}
        plays = [{"hosts": "guest", "tasks": [notifying_task], "handlers": [{**RAW_TASK, "name": "next"}]}]
    elif play_kind == "loop":
        plays = [{"hosts": "guest", "tasks": [PING_TASK, {**RAW_TASK, "loop": [1, 2]}]}]
    output = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", make_add_host_play(gateway, secret_files), *plays
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    assert "must not come from facts" in output, output


@pytest.mark.parametrize("sandbox_source", ["name", "address"])
def test_a_fact_cannot_name_another_host(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    sandbox_source: str,
) -> None:
    """Facts can override `inventory_hostname`. They must not redirect tasks to another sandbox or gateway."""
    add_host_play = make_add_host_play(gateway, secret_files)
    (guest_task,) = add_host_play["tasks"]
    variables = guest_task["ansible.builtin.add_host"]
    if sandbox_source == "name":
        # Without ansible_host, the name of the host is the name of the sandbox.
        del variables["ansible_host"]
    # Another host of the operator. The sandbox can name it, and its variables, in facts.
    other_host = {**variables, "name": "other", "ansible_sandbox_gateway_url": attacker_server.url}
    add_host_play["tasks"].append({"ansible.builtin.add_host": other_host})
    sandbox_ref = variables.get("ansible_host", "guest")
    gateway.responses[sandbox_ref] = make_facts_response(
        inventory_hostname="other", ansible_sandbox_gateway_url=attacker_server.url
    )
    output = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_host_play, {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, "ansible_sandbox_gateway_url of host guest")
    gateway.responses[sandbox_ref] = make_facts_response(inventory_hostname="other")
    output = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_host_play, {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    assert [headers["E2b-Sandbox-Id"] for headers in gateway.request_headers] == [sandbox_ref] * 3, output


def test_cached_facts_cannot_redirect_tasks(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, secret_files: SecretFiles, tmp_path: Path
) -> None:
    """A forged fact in the cache is already set before the first task of the next run."""
    gateway.responses["0123456789ab"] = make_facts_response(**make_false_facts(attacker_server, secret_files))
    cache_environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_CACHE_PLUGIN_TIMEOUT": "3600",
    }
    gather_task = {"ansible.builtin.setup": {"gather_subset": "min"}}
    ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        make_add_host_play(gateway, secret_files),
        {"hosts": "guest", "tasks": [gather_task]},
        **cache_environment,
    )
    assert any("ansible_sandbox_gateway_url" in file.read_text() for file in (tmp_path / "facts").iterdir())
    output = ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        make_add_host_play(gateway, secret_files),
        {"hosts": "guest", "tasks": [RAW_TASK]},
        **cache_environment,
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, "ansible_sandbox_gateway_url")


VARIABLE_SETTERS: dict[str, dict[str, Any]] = {
    "set_fact": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}"}},
    "cacheable": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}", "cacheable": True}},
    "sandbox": {"ansible.builtin.set_fact": {"ansible_host": "{{ got.stdout }}"}},
    "register": {**RAW_TASK, "register": "ansible_sandbox_gateway_url"},
    "include_vars": {"ansible.builtin.include_vars": "fetched.yml"},
}


@pytest.mark.parametrize("setter", VARIABLE_SETTERS)
def test_registered_results_cannot_redirect_tasks(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    setter: str,
) -> None:
    """A play assigns a sandbox's output to a connection variable."""
    gateway.responses["0123456789ab"] = make_response(attacker_server.url)
    (tmp_path / "fetched.yml").write_text(json.dumps(make_false_facts(attacker_server, secret_files)))
    tasks = [{**RAW_TASK, "register": "got"}, VARIABLE_SETTERS[setter], RAW_TASK]
    output = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", make_add_host_play(gateway, secret_files), {"hosts": "guest", "tasks": tasks}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, "ansible_host" if setter == "sandbox" else "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("vars_level", ["play", "task"])
def test_play_or_task_vars_are_refused(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    vars_level: str,
) -> None:
    """Play variables can contain facts, and the connection plugin cannot tell whether they do."""
    gateway.responses["0123456789ab"] = make_facts_response(elsewhere=attacker_server.url)
    vars_entry = {"vars": {"ansible_sandbox_gateway_url": "{{ elsewhere | default('" + gateway.url + "') }}"}}
    play = {"hosts": "guest", "tasks": [PING_TASK, {**RAW_TASK, **(vars_entry if vars_level == "task" else {})}]}
    output = ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        make_add_host_play(gateway, secret_files),
        {**play, **(vars_entry if vars_level == "play" else {})},
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("template_kind", ["value", "missing", "hostvars"])
def test_facts_do_not_affect_templates_in_host_vars(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
    template_kind: str,
) -> None:
    """An inventory variable may be a template that uses other inventory variables, which facts must not override."""
    templates = {
        "value": "{{ address }}",
        "missing": "{{ ansible_facts.address | default(ansible_local.address) | default(address) }}",
        "hostvars": "{{ hostvars['guest'].address }}",
    }
    variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "0123456789ab",
        "ansible_sandbox_gateway_url": templates[template_kind],
        "ansible_sandbox_gateway_token_file": "{{ key_file }}",
    }
    inventory_data = {
        "sandboxes": {
            "hosts": {"guest": variables},
            "vars": {"address": gateway.url, "key_file": str(secret_files.key)},
        }
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps(inventory_data))
    gateway.responses["0123456789ab"] = make_facts_response(
        address=attacker_server.url, key_file=str(secret_files.secret), ansible_local={"address": attacker_server.url}
    )
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    assert "ok=2" in output and len(gateway.request_headers) == 2, output
    assert gateway.list_received_keys() == {KEY}


def test_operator_variables_from_all_sources_apply(
    core: str,
    gateway: FakeGateway,
    attacker_server: FakeGateway,
    secret_files: SecretFiles,
    tmp_path: Path,
) -> None:
    """The variables are set in files next to the inventory and the playbook, and on the command line."""
    variable_files = {
        "group_vars/all.yml": {"ansible_sandbox_gateway_url": attacker_server.url},
        "group_vars/sandboxes.yml": {"ansible_sandbox_gateway_url": gateway.url},
        "host_vars/guest.yml": {"ansible_connection": "grove.sandbox.sandbox", "ansible_host": "{{ an_id }}"},
    }
    for name, variables in variable_files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(variables))
    inventory, playbook = tmp_path / "hosts.yml", tmp_path / "book.yml"
    inventory.write_text(json.dumps({"sandboxes": {"hosts": {"guest": None}}}))
    playbook.write_text(json.dumps([{"hosts": "guest", "gather_facts": False, "tasks": [RAW_TASK, RAW_TASK]}]))
    extra_variables = {"an_id": "0123456789ab", "ansible_sandbox_gateway_token": EXEC_KEY}
    completed_process = ansible_core_versions.run_command(
        core, "playbook", "-i", inventory, "-e", json.dumps(extra_variables), playbook, cwd=tmp_path
    )
    assert completed_process.returncode == 0 and len(gateway.request_headers) == 2, (
        completed_process.stdout + completed_process.stderr
    )
    assert gateway.list_received_keys() == {EXEC_KEY} and not attacker_server.request_headers
    assert {headers["E2b-Sandbox-Id"] for headers in gateway.request_headers} == {"0123456789ab"}


def test_facts_cannot_redirect_hosts_of_the_inventory_plugin(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, secret_files: SecretFiles, tmp_path: Path
) -> None:
    """Only the inventory plugin decides which address its sandboxes have. Facts cannot set the key either."""
    sandbox = {"sandboxID": "0123456789ab", "name": "guest", "templateID": "base", "snapshotID": "base"}
    gateway.sandboxes = [{**sandbox, "backend": "kvm_xfs"}]
    inventory = tmp_path / "sandboxes.yml"
    gateway_entry = {"url": gateway.url, "token_file": str(secret_files.key)}
    inventory.write_text(json.dumps({"plugin": "grove.sandbox.sandboxes", "gateways": [gateway_entry], "strict": True}))
    gateway.responses[sandbox["sandboxID"]] = make_facts_response(**make_false_facts(attacker_server, secret_files))
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    assert "ok=2" in output and len([each for each in gateway.request_headers if "E2b-Sandbox-Id" in each]) == 2, output
    gateway.responses[sandbox["sandboxID"]] = make_facts_response(ansible_sandbox_gateway_token=SECRET)
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING_TASK, RAW_TASK]}
    )
    check_nothing_was_stolen(output, gateway, attacker_server)
    check_refusal(output, "ansible_sandbox_gateway_token")


def test_a_gateway_that_lists_a_foreign_sandbox_does_not_receive_the_sandboxs_key(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, secret_files: SecretFiles, tmp_path: Path
) -> None:
    """A gateway that lists another gateway's sandbox id receives neither the tasks nor the key for that sandbox."""
    sandbox = {"sandboxID": "0123456789ab", "name": "guest", "templateID": "base", "snapshotID": "base"}
    gateway.sandboxes, attacker_server.sandboxes = [sandbox], [{**sandbox, "name": "other"}]
    inventory = tmp_path / "sandboxes.yml"
    gateways = [
        {"name": "ours", "url": gateway.url, "token_file": str(secret_files.key)},
        {"name": "theirs", "url": attacker_server.url, "token": "key-of-the-other"},
    ]
    inventory_data = {"plugin": "grove.sandbox.sandboxes", "gateways": gateways, "strict": True}
    inventory.write_text(json.dumps(inventory_data))
    plays = [{"hosts": "guest.ours", "tasks": [RAW_TASK]}]
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory, *plays, {"hosts": "other.theirs", "tasks": [RAW_TASK]}
    )
    assert output.count("unreachable=0") == 2, output
    for server, key in ((gateway, KEY), (attacker_server, "key-of-the-other")):
        task_headers = [headers for headers in server.request_headers if "E2b-Sandbox-Id" in headers]
        assert [headers["E2b-Sandbox-Id"] for headers in task_headers] == [
            "0123456789ab"
        ] and server.list_received_keys() == {key}
    # The host's own key goes to the gateway where the inventory found that host.
    host_variables = {"ansible_sandbox_gateway_token": EXEC_KEY}
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "guest.ours.yml").write_text(json.dumps(host_variables))
    ansible_core_versions.run_plays(core, tmp_path, inventory, *plays)
    assert gateway.list_received_keys() == {KEY, EXEC_KEY} and attacker_server.list_received_keys() == {
        "key-of-the-other"
    }


@pytest.mark.parametrize("key_source", ["file", "environment", "inventory"])
def test_the_key_is_never_shown(
    core: str, gateway: FakeGateway, secret_files: SecretFiles, tmp_path: Path, key_source: str
) -> None:
    """The key does not appear in verbose output, facts, caches, the log, or the list of hosts to retry."""
    gateway.sandboxes = [{"sandboxID": "0123456789ab", "name": "guest", "templateID": "base", "snapshotID": "base"}]
    gateway.responses["0123456789ab"] = make_facts_response(
        harmless="{{ lookup('ansible.builtin.file', '" + str(secret_files.key) + "') }}",
        variable="{{ lookup('ansible.builtin.env', 'SANDBOX_GATEWAY_TOKEN') }}",
    )
    tasks = [
        PING_TASK,
        {"ansible.builtin.debug": {"var": "hostvars"}},
        {"ansible.builtin.debug": {"msg": "{{ harmless }}{{ variable }}"}},
        {"ansible.builtin.debug": {"var": "vars"}},
        {**RAW_TASK, "register": "said"},
        {"ansible.builtin.debug": {"var": "said"}},
        {"ansible.builtin.copy": {"content": "x", "dest": "/nowhere/x"}, "ignore_errors": True},
        {"ansible.builtin.fail": {"msg": "over"}},
    ]
    plays = [{"hosts": "guest", "tasks": tasks}]
    environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_LOG_PATH": str(tmp_path / "log"),
        "ANSIBLE_RETRY_FILES_ENABLED": "1",
        "ANSIBLE_RETRY_FILES_SAVE_PATH": str(tmp_path / "retry"),
    }
    inventory: Path | str = "localhost,"
    if key_source == "inventory":
        inventory = tmp_path / "sandboxes.yml"
        inventory_data = {
            "plugin": "grove.sandbox.sandboxes",
            "gateways": [{"url": gateway.url, "token": KEY}],
            "strict": True,
            "cache": True,
            "cache_plugin": "ansible.builtin.jsonfile",
            "cache_connection": str(tmp_path / "hosts"),
        }
        inventory.write_text(json.dumps(inventory_data))
    else:
        add_host_play = make_add_host_play(gateway, secret_files)
        if key_source == "environment":
            environment |= {"SANDBOX_GATEWAY_TOKEN": KEY, "SANDBOX_GATEWAY_URL": gateway.url}
            del add_host_play["tasks"][0]["ansible.builtin.add_host"]["ansible_sandbox_gateway_token_file"]
            for options in ({}, {"environment": {"ANY": "thing"}}):  # The second task runs as a module.
                info_task = {"grove.sandbox.sandbox_info": None, "register": "found", **options}
                add_host_play["tasks"] += [info_task, {"ansible.builtin.debug": {"var": "found"}}]
        plays.insert(0, add_host_play)
    playbook = tmp_path / "book.yml"
    playbook.write_text(json.dumps([{"gather_facts": False, **each} for each in plays]))
    completed_process = ansible_core_versions.run_command(
        *(core, "playbook", "-vvvvv", "--diff", "-i", inventory, "-e", f"ansible_python_interpreter={sys.executable}"),
        playbook,
        cwd=tmp_path,
        environment=environment,
    )
    assert "over" in completed_process.stdout and gateway.list_received_keys() == {KEY}, (
        completed_process.stdout + completed_process.stderr
    )
    own_files = {secret_files.key, inventory}
    written_files = [file for file in tmp_path.rglob("*") if file.is_file() and file not in own_files]
    folders = {"facts", "log", "retry"} | ({"hosts"} if key_source == "inventory" else set())
    assert folders <= {file.relative_to(tmp_path).parts[0] for file in written_files}, completed_process.stdout
    for text in (
        completed_process.stdout,
        completed_process.stderr,
        *(file.read_text(errors="replace") for file in written_files),
    ):
        assert KEY not in text
