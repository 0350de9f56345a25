"""A sandbox under Ansible, root inside, whose interpreter returns arbitrary data: it wants the next task, the gateway's
key, or the content of a file of the control node, sent to an address of its choice. Its host comes from `add_host` or
from a static inventory: for hosts from our inventory plugin, the plugin itself knows the gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.memory_gateway import EXEC_KEY
from tests.support import ansible_core_versions
from tests.support.liar import LyingGateway, facts_answer, make_answer

pytestmark = pytest.mark.parametrize("core", ansible_core_versions.EACH)

KEY = "key-of-the-gateway"
SECRET = "content-of-a-file"
TASK = {"ansible.builtin.raw": "true"}
PING: dict[str, Any] = {"ansible.builtin.ping": None}


@pytest.fixture
def thief() -> Iterator[LyingGateway]:
    """The address to which the sandbox wants to redirect everything."""
    with LyingGateway().serve() as made:
        yield made


@pytest.fixture
def gateway() -> Iterator[LyingGateway]:
    with LyingGateway().serve() as made:
        yield made


class Files:
    """On the control node: the key, and an unrelated secret file."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text(f"{KEY}\n")
        self.secret = folder / "secret"
        self.secret.write_text(f"{SECRET}\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def add_sandbox(gateway: LyingGateway, files: Files, **more: str) -> dict[str, Any]:
    """A play that makes the sandbox a host as our playbooks do."""
    variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "0123456789ab",
        "ansible_sandbox_gateway_url": gateway.url,
        "ansible_sandbox_gateway_token_file": str(files.key),
        **more,
    }
    task = {"ansible.builtin.add_host": {"name": "guest", **variables}}
    return {"hosts": "localhost", "connection": "local", "tasks": [task]}


def false_facts(thief: LyingGateway, files: Files) -> dict[str, Any]:
    return {
        "ansible_sandbox_gateway_url": thief.url,
        "ansible_sandbox_gateway_token_file": str(files.secret),
        "ansible_sandbox_validate_certs": False,
    }


def check_nothing_stolen(said: str, gateway: LyingGateway, thief: LyingGateway) -> None:
    assert not thief.asked, said
    assert gateway.received_keys() <= {KEY}, "a file's content was sent as a key"


def check_refused(said: str, name: str) -> None:
    """The host is unreachable, with a message that names the variable."""
    assert re.search(r"guest +: ok=\d+ +changed=\d+ +unreachable=1", said), said
    assert name in said and "must not come from facts" in said, said


def test_variables_of_add_host_are_sufficient(core: str, gateway: LyingGateway, files: Files, tmp_path: Path) -> None:
    """This is the control: nothing is rejected as our playbooks use it, also by `delegate_to` from a loop."""
    hosts = add_sandbox(gateway, files)
    (guest,) = hosts["tasks"]
    # Without ansible_host, the name of the host is the name of the sandbox.
    named = {key: value for key, value in guest["ansible.builtin.add_host"].items() if key != "ansible_host"}
    hosts["tasks"].append({"ansible.builtin.add_host": {**named, "name": "named"}})
    delegated = {**TASK, "delegate_to": "{{ item }}", "loop": ["guest", "named"]}
    said = ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        hosts,
        {"hosts": "guest", "tasks": [TASK, TASK]},
        {"hosts": "localhost", "connection": "local", "tasks": [delegated]},
    )
    assert "unreachable=0" in said and "unreachable=1" not in said and "failed=1" not in said, said
    asked = [headers["E2b-Sandbox-Id"] for headers in gateway.asked]
    assert asked == ["0123456789ab"] * 3 + ["named"] and gateway.received_keys() == {KEY}


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
def test_no_single_fact_redirects_tasks(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, name: str
) -> None:
    value = {
        "ansible_sandbox_gateway_url": thief.url,
        "ansible_sandbox_gateway_token": SECRET,
        "ansible_sandbox_validate_certs": False,
        "ansible_sandbox_max_output_mb": 1 << 20,
    }.get(name, str(files.secret))
    gateway.lies["0123456789ab"] = facts_answer(**{name: value})
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_sandbox(gateway, files), {"hosts": "guest", "tasks": [PING, TASK]}
    )
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, name)
    assert len(gateway.asked) == 1, "nothing was sent after the lie"


@pytest.mark.parametrize("way", ["add_host", "delegate_to", "handler", "loop"])
def test_facts_cannot_redirect_tasks(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, way: str
) -> None:
    """Facts from any module redirect neither the next task nor a task of another connection to the host."""
    gateway.lies["0123456789ab"] = facts_answer(**false_facts(thief, files))
    plays: list[dict[str, Any]] = [{"hosts": "guest", "tasks": [PING, TASK]}]
    if way == "delegate_to":
        delegated = [{**PING, "delegate_to": "guest", "delegate_facts": True}, {**TASK, "delegate_to": "guest"}]
        plays = [{"hosts": "localhost", "connection": "local", "tasks": delegated}]
    elif way == "handler":
        told = {**PING, "changed_when": True, "notify": "next"}
        plays = [{"hosts": "guest", "tasks": [told], "handlers": [{**TASK, "name": "next"}]}]
    elif way == "loop":
        plays = [{"hosts": "guest", "tasks": [PING, {**TASK, "loop": [1, 2]}]}]
    said = ansible_core_versions.run_plays(core, tmp_path, "localhost,", add_sandbox(gateway, files), *plays)
    check_nothing_stolen(said, gateway, thief)
    assert "must not come from facts" in said, said


@pytest.mark.parametrize("way", ["name", "address"])
def test_a_fact_cannot_name_another_host(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, way: str
) -> None:
    """`inventory_hostname` is a variable that facts override. It must not lead tasks to another sandbox or gateway."""
    hosts = add_sandbox(gateway, files)
    (guest,) = hosts["tasks"]
    variables = guest["ansible.builtin.add_host"]
    if way == "name":
        # The name of its host is the name of its sandbox.
        del variables["ansible_host"]
    # Another host of the operator, with other variables, as far as the sandbox can name them in facts.
    other = {**variables, "name": "other", "ansible_sandbox_gateway_url": thief.url}
    hosts["tasks"].append({"ansible.builtin.add_host": other})
    sandbox = variables.get("ansible_host", "guest")
    gateway.lies[sandbox] = facts_answer(inventory_hostname="other", ansible_sandbox_gateway_url=thief.url)
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", hosts, {"hosts": "guest", "tasks": [PING, TASK]}
    )
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, "ansible_sandbox_gateway_url of host guest")
    gateway.lies[sandbox] = facts_answer(inventory_hostname="other")
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", hosts, {"hosts": "guest", "tasks": [PING, TASK]}
    )
    check_nothing_stolen(said, gateway, thief)
    assert [headers["E2b-Sandbox-Id"] for headers in gateway.asked] == [sandbox] * 3, said


def test_cached_facts_cannot_redirect_tasks(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path
) -> None:
    """An earlier false fact in the cache takes effect before today's first task."""
    gateway.lies["0123456789ab"] = facts_answer(**false_facts(thief, files))
    cache = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_CACHE_PLUGIN_TIMEOUT": "3600",
    }
    gather = {"ansible.builtin.setup": {"gather_subset": "min"}}
    ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_sandbox(gateway, files), {"hosts": "guest", "tasks": [gather]}, **cache
    )
    assert any("ansible_sandbox_gateway_url" in file.read_text() for file in (tmp_path / "facts").iterdir())
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_sandbox(gateway, files), {"hosts": "guest", "tasks": [TASK]}, **cache
    )
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, "ansible_sandbox_gateway_url")


SET: dict[str, dict[str, Any]] = {
    "set_fact": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}"}},
    "cacheable": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}", "cacheable": True}},
    "sandbox": {"ansible.builtin.set_fact": {"ansible_host": "{{ got.stdout }}"}},
    "register": {**TASK, "register": "ansible_sandbox_gateway_url"},
    "include_vars": {"ansible.builtin.include_vars": "fetched.yml"},
}


@pytest.mark.parametrize("way", SET)
def test_registered_results_cannot_redirect_tasks(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, way: str
) -> None:
    """A play registers a sandbox's output under the name of a connection variable."""
    gateway.lies["0123456789ab"] = make_answer(thief.url)
    (tmp_path / "fetched.yml").write_text(json.dumps(false_facts(thief, files)))
    tasks = [{**TASK, "register": "got"}, SET[way], TASK]
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_sandbox(gateway, files), {"hosts": "guest", "tasks": tasks}
    )
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, "ansible_host" if way == "sandbox" else "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("where", ["play", "task"])
def test_vars_of_a_play_are_refused(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, where: str
) -> None:
    """A play's variables see facts, and cannot be distinguished from facts."""
    gateway.lies["0123456789ab"] = facts_answer(elsewhere=thief.url)
    lie = {"vars": {"ansible_sandbox_gateway_url": "{{ elsewhere | default('" + gateway.url + "') }}"}}
    book = {"hosts": "guest", "tasks": [PING, {**TASK, **(lie if where == "task" else {})}]}
    said = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", add_sandbox(gateway, files), {**book, **(lie if where == "play" else {})}
    )
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("lie", ["value", "missing", "hostvars"])
def test_templates_in_host_vars(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path, lie: str
) -> None:
    """A variable of the inventory may be a template, but only of inventory variables. Facts cannot get into it."""
    templates = {
        "value": "{{ address }}",
        "missing": "{{ ansible_facts.address | default(ansible_local.address) | default(address) }}",
        "hostvars": "{{ hostvars['guest'].address }}",
    }
    variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "0123456789ab",
        "ansible_sandbox_gateway_url": templates[lie],
        "ansible_sandbox_gateway_token_file": "{{ key_file }}",
    }
    hosts = {"sandboxes": {"hosts": {"guest": variables}, "vars": {"address": gateway.url, "key_file": str(files.key)}}}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps(hosts))
    gateway.lies["0123456789ab"] = facts_answer(
        address=thief.url, key_file=str(files.secret), ansible_local={"address": thief.url}
    )
    said = ansible_core_versions.run_plays(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    check_nothing_stolen(said, gateway, thief)
    assert "ok=2" in said and len(gateway.asked) == 2, said
    assert gateway.received_keys() == {KEY}


def test_host_vars_group_vars_and_the_command_line(
    core: str,
    gateway: LyingGateway,
    thief: LyingGateway,
    files: Files,
    tmp_path: Path,
) -> None:
    """All variables of the operator apply: in files beside the inventory and the playbook, and by `-e`."""
    places = {
        "group_vars/all.yml": {"ansible_sandbox_gateway_url": thief.url},
        "group_vars/sandboxes.yml": {"ansible_sandbox_gateway_url": gateway.url},
        "host_vars/guest.yml": {"ansible_connection": "grove.sandbox.sandbox", "ansible_host": "{{ an_id }}"},
    }
    for name, variables in places.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(variables))
    inventory, book = tmp_path / "hosts.yml", tmp_path / "book.yml"
    inventory.write_text(json.dumps({"sandboxes": {"hosts": {"guest": None}}}))
    book.write_text(json.dumps([{"hosts": "guest", "gather_facts": False, "tasks": [TASK, TASK]}]))
    extra = {"an_id": "0123456789ab", "ansible_sandbox_gateway_token": EXEC_KEY}
    run = ansible_core_versions.run_command(
        core, "playbook", "-i", inventory, "-e", json.dumps(extra), book, cwd=tmp_path
    )
    assert run.returncode == 0 and len(gateway.asked) == 2, run.stdout + run.stderr
    assert gateway.received_keys() == {EXEC_KEY} and not thief.asked
    assert {headers["E2b-Sandbox-Id"] for headers in gateway.asked} == {"0123456789ab"}


def test_a_host_of_our_inventory(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path
) -> None:
    """For a sandbox from the inventory plugin, only the plugin decides its address. Facts cannot set the key either."""
    made = {"sandboxID": "0123456789ab", "name": "guest", "templateID": "base", "snapshotID": "base"}
    gateway.listed = [{**made, "backend": "kvm_xfs"}]
    inventory = tmp_path / "sandboxes.yml"
    listed = {"url": gateway.url, "token_file": str(files.key)}
    inventory.write_text(json.dumps({"plugin": "grove.sandbox.sandboxes", "gateways": [listed], "strict": True}))
    gateway.lies[made["sandboxID"]] = facts_answer(**false_facts(thief, files))
    said = ansible_core_versions.run_plays(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    check_nothing_stolen(said, gateway, thief)
    assert "ok=2" in said and len([each for each in gateway.asked if "E2b-Sandbox-Id" in each]) == 2, said
    gateway.lies[made["sandboxID"]] = facts_answer(ansible_sandbox_gateway_token=SECRET)
    said = ansible_core_versions.run_plays(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    check_nothing_stolen(said, gateway, thief)
    check_refused(said, "ansible_sandbox_gateway_token")


def test_a_gateway_that_lists_a_foreign_sandbox(
    core: str, gateway: LyingGateway, thief: LyingGateway, files: Files, tmp_path: Path
) -> None:
    """A gateway that later lists another's sandbox id gets no task for that sandbox, and no key except its own."""
    mine = {"sandboxID": "0123456789ab", "name": "guest", "templateID": "base", "snapshotID": "base"}
    gateway.listed, thief.listed = [mine], [{**mine, "name": "other"}]
    inventory = tmp_path / "sandboxes.yml"
    gateways = [
        {"name": "ours", "url": gateway.url, "token_file": str(files.key)},
        {"name": "theirs", "url": thief.url, "token": "key-of-the-other"},
    ]
    content = {"plugin": "grove.sandbox.sandboxes", "gateways": gateways, "strict": True}
    inventory.write_text(json.dumps(content))
    plays = [{"hosts": "guest.ours", "tasks": [TASK]}]
    said = ansible_core_versions.run_plays(
        core, tmp_path, inventory, *plays, {"hosts": "other.theirs", "tasks": [TASK]}
    )
    assert said.count("unreachable=0") == 2, said
    for place, key in ((gateway, KEY), (thief, "key-of-the-other")):
        tasks = [headers for headers in place.asked if "E2b-Sandbox-Id" in headers]
        assert [headers["E2b-Sandbox-Id"] for headers in tasks] == ["0123456789ab"] and place.received_keys() == {key}
    # The host's own key goes to the gateway where the inventory found that host.
    own = {"ansible_sandbox_gateway_token": EXEC_KEY}
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "guest.ours.yml").write_text(json.dumps(own))
    ansible_core_versions.run_plays(core, tmp_path, inventory, *plays)
    assert gateway.received_keys() == {KEY, EXEC_KEY} and thief.received_keys() == {"key-of-the-other"}


def test_the_key_is_never_shown(core: str, gateway: LyingGateway, files: Files, tmp_path: Path) -> None:
    """The key appears neither at full verbosity, nor in facts, their cache, a log, or the file of hosts to retry."""
    gateway.lies["0123456789ab"] = facts_answer(
        harmless="{{ lookup('ansible.builtin.file', '" + str(files.key) + "') }}"
    )
    shown = [
        PING,
        {"ansible.builtin.debug": {"var": "hostvars"}},
        {"ansible.builtin.debug": {"msg": "{{ harmless }}"}},
        {"ansible.builtin.debug": {"var": "vars"}},
        {**TASK, "register": "said"},
        {"ansible.builtin.debug": {"var": "said"}},
        {"ansible.builtin.copy": {"content": "x", "dest": "/nowhere/x"}, "ignore_errors": True},
        {"ansible.builtin.fail": {"msg": "over"}},
    ]
    book = tmp_path / "book.yml"
    plays = [add_sandbox(gateway, files), {"hosts": "guest", "tasks": shown}]
    book.write_text(json.dumps([{"gather_facts": False, **each} for each in plays]))
    environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_LOG_PATH": str(tmp_path / "log"),
        "ANSIBLE_RETRY_FILES_ENABLED": "1",
        "ANSIBLE_RETRY_FILES_SAVE_PATH": str(tmp_path / "retry"),
    }
    run = ansible_core_versions.run_command(
        core, "playbook", "-vvvvv", "--diff", "-i", "localhost,", book, cwd=tmp_path, environment=environment
    )
    assert "over" in run.stdout and gateway.received_keys() == {KEY}, run.stdout + run.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file != files.key]
    assert {"facts", "log", "retry"} <= {file.relative_to(tmp_path).parts[0] for file in written}
    for text in (run.stdout, run.stderr, *(file.read_text(errors="replace") for file in written)):
        assert KEY not in text
