"""Root in a sandbox managed by Ansible returns facts that become options of the next task on the control node.

The attacker tries to obtain the key in the control node's environment. The operator's own settings must still work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ansible_core_versions
from tests.support.liar import FakeGateway, make_facts_response

pytestmark = pytest.mark.parametrize("core", ansible_core_versions.RELEASES)

KEY = "key-of-the-environment"
INFO_MODULE = "grove.sandbox.sandbox_info"
PING_TASK: dict[str, Any] = {"ansible.builtin.ping": None}
REFUSAL_MESSAGE = "SANDBOX_GATEWAY_TOKEN is not used"


@pytest.fixture
def attacker_server() -> Iterator[FakeGateway]:
    """The server to which the sandbox tries to redirect the key."""
    with FakeGateway().running() as server:
        yield server


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway().running() as server:
        yield server


def write_inventory(folder: Path, gateway: FakeGateway, **variables: Any) -> Path:
    """Write an inventory with the sandbox `guest`, whose key differs from the key in the environment."""
    inventory_path = folder / "hosts.yml"
    connection_variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "0123456789ab",
        "ansible_sandbox_gateway_url": gateway.url,
        "ansible_sandbox_gateway_token": "key-of-the-connection",
    }
    control_host = {"control": {"ansible_connection": "local"}}
    groups = {"sandboxes": {"hosts": {"guest": connection_variables}}, "others": {"hosts": control_host}}
    inventory_path.write_text(
        json.dumps({"all": {"children": groups, "vars": {"sandbox_gateway_url": gateway.url, **variables}}})
    )
    return inventory_path


def make_task(**options: Any) -> dict[str, Any]:
    return {INFO_MODULE: options}


def check_refusal(output: str, attacker_server: FakeGateway) -> None:
    assert not attacker_server.request_headers, output
    assert REFUSAL_MESSAGE in output and "gateway_token" in output and "SANDBOX_GATEWAY_URL" in output, output


# --- the operator's settings -----------------------------------------------------------------------------------------


def make_operator_plays(url: str) -> dict[str, dict[str, Any]]:
    """Return {kind of setting: a play in which the operator sets the gateway in this way}."""
    play_vars_options = {"gateway_url": "{{ there }}"}
    group_vars_options = {"gateway_url": "{{ sandbox_gateway_url }}"}
    loop_task = {
        **make_task(gateway_url="{{ each.url }}"),
        "loop": "{{ places }}",
        "loop_control": {"loop_var": "each"},
    }
    include_task = {"ansible.builtin.include_tasks": "tasks.yml"}
    return {
        "literal": {"tasks": [make_task(gateway_url=url)]},
        "group_vars": {"tasks": [make_task(**group_vars_options)]},
        "hostvars": {"tasks": [make_task(gateway_url="{{ hostvars['guest'].sandbox_gateway_url }}")]},
        "vars": {"vars": {"there": "{{ sandbox_gateway_url }}"}, "tasks": [make_task(**play_vars_options)]},
        "vars_files": {"vars_files": ["vars.yml"], "tasks": [make_task(**play_vars_options)]},
        "vars of a task": {"tasks": [{**make_task(**play_vars_options), "vars": {"there": url}}]},
        "vars of a block": {"tasks": [{"vars": {"there": url}, "block": [make_task(**play_vars_options)]}]},
        "args": {"tasks": [{INFO_MODULE: {}, "args": group_vars_options}]},
        "module_defaults": {
            "module_defaults": {"group/grove.sandbox.all": group_vars_options},
            "tasks": [make_task()],
        },
        "module_defaults of a task": {"tasks": [{**make_task(), "module_defaults": {INFO_MODULE: group_vars_options}}]},
        "loop": {"vars": {"places": [{"url": url}]}, "tasks": [loop_task]},
        "with_items": {
            "vars": {"places": [url]},
            "tasks": [{**make_task(gateway_url="{{ item }}"), "with_items": "{{ places }}"}],
        },
        "include_tasks": {"tasks": [{**include_task, "vars": {"there": url}}]},
        "include_tasks in a loop": {
            "vars": {"places": ["http://192.0.2.1:1", url]},
            "tasks": [{**include_task, "vars": {"there": "{{ item }}"}, "loop": "{{ places[1:] }}"}],
        },
        "role": {"roles": [{"role": "ours", "there": "{{ sandbox_gateway_url }}"}], "tasks": []},
        "delegate_to": {"hosts": "guest", "tasks": [{**make_task(**group_vars_options), "delegate_to": "control"}]},
        "as a module": {"tasks": [{**make_task(**group_vars_options), "environment": {"ANY": "thing"}}]},
        "environment": {"environment": {"SANDBOX_GATEWAY_URL": "{{ sandbox_gateway_url }}"}, "tasks": [make_task()]},
    }


def test_the_operators_variables_are_sufficient(core: str, gateway: FakeGateway, tmp_path: Path) -> None:
    """Check that the key in the environment is sent to the operator's address, however that address is set."""
    (tmp_path / "vars.yml").write_text(json.dumps({"there": gateway.url}))
    (tmp_path / "tasks.yml").write_text(json.dumps([make_task(gateway_url="{{ there }}")]))
    role_directory = tmp_path / "roles" / "ours" / "tasks"
    role_directory.mkdir(parents=True)
    (role_directory / "main.yml").write_text(json.dumps([make_task(gateway_url="{{ there }}")]))
    plays_by_setting = make_operator_plays(gateway.url)
    plays = [{"name": name, "hosts": "control", **play} for name, play in plays_by_setting.items()]
    output = ansible_core_versions.run_plays(
        core, tmp_path, write_inventory(tmp_path, gateway), *plays, SANDBOX_GATEWAY_TOKEN=KEY
    )
    assert "failed=0" in output and "failed=1" not in output and "unreachable=1" not in output, output
    assert len(gateway.request_headers) == len(plays_by_setting) and gateway.list_received_keys() == {KEY}, output


def test_the_environments_key_goes_only_to_gateways_of_the_operator(
    core: str, gateway: FakeGateway, tmp_path: Path
) -> None:
    """An address in the environment is trusted, even if another variable has the same value."""
    with FakeGateway().running() as other_gateway:
        tasks = [
            make_task(),
            {"ansible.builtin.set_fact": {"got": gateway.url}},
            make_task(gateway_url="{{ got }}"),
            make_task(gateway_url=other_gateway.url),
        ]
        play = {"hosts": "control", "tasks": tasks}
        environment = {"SANDBOX_GATEWAY_URL": gateway.url, "SANDBOX_GATEWAY_TOKEN": KEY}
        output = ansible_core_versions.run_plays(
            core, tmp_path, write_inventory(tmp_path, gateway), play, **environment
        )
        assert "ok=4" in output, output
        assert len(gateway.request_headers) == 2 and len(other_gateway.request_headers) == 1, output
        assert gateway.list_received_keys() == other_gateway.list_received_keys() == {KEY}


def test_a_key_in_the_task_goes_to_the_tasks_address(core: str, gateway: FakeGateway, tmp_path: Path) -> None:
    """A task may set both a key and an address. If the environment contains no key, any address is allowed."""
    set_fact_task = {"ansible.builtin.set_fact": {"got": gateway.url}}
    keyed_play = {
        "hosts": "control",
        "tasks": [set_fact_task, make_task(gateway_url="{{ got }}", gateway_token="key-of-the-task")],
    }
    output = ansible_core_versions.run_plays(
        core, tmp_path, write_inventory(tmp_path, gateway), keyed_play, SANDBOX_GATEWAY_TOKEN=KEY
    )
    assert "failed=0" in output and gateway.list_received_keys() == {"key-of-the-task"}, output
    play_without_key = {"hosts": "control", "tasks": [set_fact_task, make_task(gateway_url="{{ got }}")]}
    output = ansible_core_versions.run_plays(core, tmp_path, write_inventory(tmp_path, gateway), play_without_key)
    assert "failed=0" in output and len(gateway.request_headers) == 2, output
    assert gateway.list_received_keys() == {"key-of-the-task"}, output


# --- a sandbox's settings --------------------------------------------------------------------------------------------


def make_sandbox_plays() -> dict[str, dict[str, Any]]:
    """Return plays in which a fact becomes an address. Each play contains a task that must fail."""
    forged_options = {"gateway_url": "{{ there }}"}
    group_vars_options = {"gateway_url": "{{ sandbox_gateway_url }}"}
    include_task = {"ansible.builtin.include_tasks": "tasks.yml"}
    return {
        "fact": {"tasks": [make_task(**forged_options)]},
        "group_vars overridden": {"tasks": [make_task(**group_vars_options)]},
        "ansible_facts": {"tasks": [make_task(gateway_url="{{ ansible_facts.there }}")]},
        "hostvars": {
            "hosts": "control",
            "tasks": [make_task(gateway_url="{{ hostvars['guest'].sandbox_gateway_url }}")],
        },
        "hidden": {"tasks": [make_task(gateway_url="{{ lookup('ansible.builtin.vars', 'sandbox_gateway_url') }}")]},
        "default": {"tasks": [make_task(gateway_url="{{ there | default(omit) }}")]},
        "vars": {"vars": {"mine": "{{ there }}"}, "tasks": [make_task(gateway_url="{{ mine }}")]},
        "args": {"tasks": [{INFO_MODULE: {}, "args": forged_options}]},
        "module_defaults": {"module_defaults": {"group/grove.sandbox.all": group_vars_options}, "tasks": [make_task()]},
        "module_defaults of a task": {"tasks": [{**make_task(), "module_defaults": {INFO_MODULE: forged_options}}]},
        "loop": {"tasks": [{**make_task(gateway_url="{{ item }}"), "loop": "{{ several }}"}]},
        "with_items": {"tasks": [{**make_task(gateway_url="{{ item }}"), "with_items": "{{ several }}"}]},
        "include_tasks": {"tasks": [{**include_task, "vars": {"there": "{{ sandbox_gateway_url }}"}}]},
        "include_tasks in a loop": {
            "tasks": [{**include_task, "vars": {"there": "{{ item }}"}, "loop": "{{ several }}"}]
        },
        "the item of an include": {"tasks": [{"ansible.builtin.include_tasks": "item.yml", "loop": "{{ several }}"}]},
        "the item of an include, in vars": {
            "tasks": [{"ansible.builtin.include_tasks": "vars_item.yml", "loop": "{{ several }}"}]
        },
        "role": {"roles": [{"role": "ours", "there": "{{ sandbox_gateway_url }}"}], "tasks": []},
        "set_fact": {
            "tasks": [{"ansible.builtin.set_fact": {"kept": "{{ there }}"}}, make_task(gateway_url="{{ kept }}")]
        },
        "register": {
            "tasks": [
                {"ansible.builtin.command": "echo {{ there }}", "register": "got"},
                make_task(gateway_url="{{ got.stdout }}"),
            ]
        },
        "include_vars": {
            "tasks": [{"ansible.builtin.include_vars": "fetched.yml"}, make_task(gateway_url="{{ fetched }}")]
        },
        "as a module": {"tasks": [{**make_task(**forged_options), "environment": {"ANY": "thing"}}]},
        "environment": {"environment": {"SANDBOX_GATEWAY_URL": "{{ there }}"}, "tasks": [make_task()]},
        "certificates": {"tasks": [make_task(gateway_url="{{ trusted }}", validate_certs="{{ check }}")]},
        "authorities": {"tasks": [make_task(gateway_url="{{ trusted }}", ca_path="{{ several[0] }}")]},
    }


def test_facts_cannot_redirect_the_key(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, tmp_path: Path
) -> None:
    """Facts never decide where the environment's key is sent. Each task's error message says what to do instead."""
    gateway.responses["0123456789ab"] = make_facts_response(
        there=attacker_server.url,
        sandbox_gateway_url=attacker_server.url,
        several=[attacker_server.url],
        check=False,
        places=[attacker_server.url],
    )
    (tmp_path / "tasks.yml").write_text(json.dumps([make_task(gateway_url="{{ there }}")]))
    (tmp_path / "item.yml").write_text(json.dumps([make_task(gateway_url="{{ item }}")]))
    (tmp_path / "vars_item.yml").write_text(json.dumps([make_task(gateway_url="{{ vars['item'] }}")]))
    (tmp_path / "fetched.yml").write_text(json.dumps({"fetched": attacker_server.url}))
    role_directory = tmp_path / "roles" / "ours" / "tasks"
    role_directory.mkdir(parents=True)
    (role_directory / "main.yml").write_text(json.dumps([make_task(gateway_url="{{ there }}")]))
    plays_by_setting = make_sandbox_plays()
    # The tasks for the sandbox run on the control node.
    plays = [
        {
            "name": name,
            "hosts": "guest",
            "vars": {"ansible_connection": "local"},
            "ignore_errors": True,
            **play,
        }
        for name, play in plays_by_setting.items()
    ]
    plays = [{**play, "vars": {"ansible_connection": "local", **play["vars"]}} for play in plays]
    inventory_path = write_inventory(tmp_path, gateway, trusted=gateway.url, check=True)
    first_play = {"hosts": "guest", "tasks": [PING_TASK]}
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory_path, first_play, *plays, SANDBOX_GATEWAY_TOKEN=KEY
    )
    check_refusal(output, attacker_server)
    assert not {KEY} & gateway.list_received_keys(), output
    outputs_by_setting = {
        name: output.partition(f"PLAY [{name}]")[2].partition("PLAY [")[0] for name in plays_by_setting
    }
    accepted_play_names = [
        name for name, play_output in outputs_by_setting.items() if REFUSAL_MESSAGE not in play_output
    ]
    assert not accepted_play_names, output


def test_facts_of_a_delegated_task_cannot_redirect_the_key(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, tmp_path: Path
) -> None:
    """The facts that a delegated task returns become facts of the host that delegates it."""
    gateway.responses["0123456789ab"] = make_facts_response(sandbox_gateway_url=attacker_server.url)
    tasks = [{**PING_TASK, "delegate_to": "guest"}, make_task(gateway_url="{{ sandbox_gateway_url }}")]
    play = {"hosts": "control", "tasks": tasks}
    output = ansible_core_versions.run_plays(
        core, tmp_path, write_inventory(tmp_path, gateway), play, SANDBOX_GATEWAY_TOKEN=KEY
    )
    check_refusal(output, attacker_server)
    assert not {KEY} & gateway.list_received_keys() and "failed=1" in output


def test_cached_facts_cannot_redirect_the_key(
    core: str, gateway: FakeGateway, attacker_server: FakeGateway, tmp_path: Path
) -> None:
    gateway.responses["0123456789ab"] = make_facts_response(sandbox_gateway_url=attacker_server.url)
    cache_environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "SANDBOX_GATEWAY_TOKEN": KEY,
    }
    inventory_path = write_inventory(tmp_path, gateway)
    gather_task = {"ansible.builtin.setup": {"gather_subset": "min"}}
    ansible_core_versions.run_plays(
        core, tmp_path, inventory_path, {"hosts": "guest", "tasks": [gather_task]}, **cache_environment
    )
    task = {**make_task(gateway_url="{{ sandbox_gateway_url }}"), "delegate_to": "control"}
    output = ansible_core_versions.run_plays(
        core, tmp_path, inventory_path, {"hosts": "guest", "tasks": [task]}, **cache_environment
    )
    check_refusal(output, attacker_server)
