"""A sandbox under Ansible, root inside, whose interpreter returns what it likes: it wants the next task, the gateway's
key, or the content of a file of the control node, sent to an address of its choice. Its host is one of `add_host` or of
a static inventory: of those that our inventory plugin lists, the plugin itself knows the gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.served import EXEC_KEY
from tests.collection.conftest import seeded
from tests.collection.double_gateway import serve
from tests.support import cores
from tests.support.liar import Liar, facts, printed

pytestmark = pytest.mark.parametrize("core", cores.EACH)

KEY = "key-of-the-gateway"
SECRET = "content-of-a-file"
TASK = {"ansible.builtin.raw": "true"}
PING: dict[str, Any] = {"ansible.builtin.ping": None}


@pytest.fixture
def thief() -> Iterator[Liar]:
    """Where the sandbox wants it all to go."""
    with Liar().serve() as made:
        yield made


@pytest.fixture
def gateway() -> Iterator[Liar]:
    with Liar().serve() as made:
        yield made


class Files:
    """On the control node: the key, and one that is nobody's business."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text(f"{KEY}\n")
        self.secret = folder / "secret"
        self.secret.write_text(f"{SECRET}\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def added(gateway: Liar, files: Files, **more: str) -> dict[str, Any]:
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


def lies(thief: Liar, files: Files) -> dict[str, Any]:
    return {
        "ansible_sandbox_gateway_url": thief.url,
        "ansible_sandbox_gateway_token_file": str(files.secret),
        "ansible_sandbox_validate_certs": False,
    }


def unharmed(said: str, gateway: Liar, thief: Liar) -> None:
    assert not thief.asked, said
    assert gateway.keys() <= {KEY}, "a file's content was sent as a key"


def refused(said: str, name: str) -> None:
    """The host is unreachable, in a sentence that names the variable."""
    assert re.search(r"guest +: ok=\d+ +changed=\d+ +unreachable=1", said), said
    assert name in said and "must not come from facts" in said, said


def test_what_add_host_says_is_enough(core: str, gateway: Liar, files: Files, tmp_path: Path) -> None:
    """The control: as our playbooks use it, nothing is refused; also by `delegate_to`, from a loop."""
    hosts = added(gateway, files)
    (guest,) = hosts["tasks"]
    # The sandbox of a host without ansible_host has its name.
    named = {key: value for key, value in guest["ansible.builtin.add_host"].items() if key != "ansible_host"}
    hosts["tasks"].append({"ansible.builtin.add_host": {**named, "name": "named"}})
    delegated = {**TASK, "delegate_to": "{{ item }}", "loop": ["guest", "named"]}
    said = cores.play(
        core,
        tmp_path,
        "localhost,",
        hosts,
        {"hosts": "guest", "tasks": [TASK, TASK]},
        {"hosts": "localhost", "connection": "local", "tasks": [delegated]},
    )
    assert "unreachable=0" in said and "unreachable=1" not in said and "failed=1" not in said, said
    asked = [headers["E2b-Sandbox-Id"] for headers in gateway.asked]
    assert asked == ["0123456789ab"] * 3 + ["named"] and gateway.keys() == {KEY}


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
def test_each_fact_alone(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, name: str) -> None:
    value = {
        "ansible_sandbox_gateway_url": thief.url,
        "ansible_sandbox_gateway_token": SECRET,
        "ansible_sandbox_validate_certs": False,
        "ansible_sandbox_max_output_mb": 1 << 20,
    }.get(name, str(files.secret))
    gateway.lies["0123456789ab"] = facts(**{name: value})
    said = cores.play(core, tmp_path, "localhost,", added(gateway, files), {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    refused(said, name)
    assert len(gateway.asked) == 1, "nothing was sent after the lie"


@pytest.mark.parametrize("way", ["add_host", "delegate_to", "handler", "loop"])
def test_facts(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, way: str) -> None:
    """Returned by any module, they take neither the next task, nor that of another way to the host."""
    gateway.lies["0123456789ab"] = facts(**lies(thief, files))
    plays: list[dict[str, Any]] = [{"hosts": "guest", "tasks": [PING, TASK]}]
    if way == "delegate_to":
        delegated = [{**PING, "delegate_to": "guest", "delegate_facts": True}, {**TASK, "delegate_to": "guest"}]
        plays = [{"hosts": "localhost", "connection": "local", "tasks": delegated}]
    elif way == "handler":
        told = {**PING, "changed_when": True, "notify": "next"}
        plays = [{"hosts": "guest", "tasks": [told], "handlers": [{**TASK, "name": "next"}]}]
    elif way == "loop":
        plays = [{"hosts": "guest", "tasks": [PING, {**TASK, "loop": [1, 2]}]}]
    said = cores.play(core, tmp_path, "localhost,", added(gateway, files), *plays)
    unharmed(said, gateway, thief)
    assert "must not come from facts" in said, said


@pytest.mark.parametrize("way", ["name", "address"])
def test_a_fact_that_names_another_host(
    core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, way: str
) -> None:
    """`inventory_hostname` is a variable that facts override: it must not lead tasks to another sandbox or gateway."""
    hosts = added(gateway, files)
    (guest,) = hosts["tasks"]
    variables = guest["ansible.builtin.add_host"]
    if way == "name":
        # Its sandbox has its name.
        del variables["ansible_host"]
    # A host of the operator's with other variables, as far as the sandbox can name them in facts.
    other = {**variables, "name": "other", "ansible_sandbox_gateway_url": thief.url}
    hosts["tasks"].append({"ansible.builtin.add_host": other})
    sandbox = variables.get("ansible_host", "guest")
    gateway.lies[sandbox] = facts(inventory_hostname="other", ansible_sandbox_gateway_url=thief.url)
    said = cores.play(core, tmp_path, "localhost,", hosts, {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    refused(said, "ansible_sandbox_gateway_url of host guest")
    gateway.lies[sandbox] = facts(inventory_hostname="other")
    said = cores.play(core, tmp_path, "localhost,", hosts, {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    assert [headers["E2b-Sandbox-Id"] for headers in gateway.asked] == [sandbox] * 3, said


def test_facts_that_are_cached(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path) -> None:
    """A lie of yesterday, in the cache of facts, counts before the first task of today."""
    gateway.lies["0123456789ab"] = facts(**lies(thief, files))
    cache = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_CACHE_PLUGIN_TIMEOUT": "3600",
    }
    gather = {"ansible.builtin.setup": {"gather_subset": "min"}}
    cores.play(core, tmp_path, "localhost,", added(gateway, files), {"hosts": "guest", "tasks": [gather]}, **cache)
    assert any("ansible_sandbox_gateway_url" in file.read_text() for file in (tmp_path / "facts").iterdir())
    said = cores.play(core, tmp_path, "localhost,", added(gateway, files), {"hosts": "guest", "tasks": [TASK]}, **cache)
    unharmed(said, gateway, thief)
    refused(said, "ansible_sandbox_gateway_url")


SET: dict[str, dict[str, Any]] = {
    "set_fact": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}"}},
    "cacheable": {"ansible.builtin.set_fact": {"ansible_sandbox_gateway_url": "{{ got.stdout }}", "cacheable": True}},
    "sandbox": {"ansible.builtin.set_fact": {"ansible_host": "{{ got.stdout }}"}},
    "register": {**TASK, "register": "ansible_sandbox_gateway_url"},
    "include_vars": {"ansible.builtin.include_vars": "fetched.yml"},
}


@pytest.mark.parametrize("way", SET)
def test_results(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, way: str) -> None:
    """What a play itself keeps of what a sandbox printed, under a name of the connection's."""
    gateway.lies["0123456789ab"] = printed(thief.url)
    (tmp_path / "fetched.yml").write_text(json.dumps(lies(thief, files)))
    tasks = [{**TASK, "register": "got"}, SET[way], TASK]
    said = cores.play(core, tmp_path, "localhost,", added(gateway, files), {"hosts": "guest", "tasks": tasks})
    unharmed(said, gateway, thief)
    refused(said, "ansible_host" if way == "sandbox" else "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("where", ["play", "task"])
def test_vars_of_a_play(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, where: str) -> None:
    """They see facts, and nobody can tell them from facts."""
    gateway.lies["0123456789ab"] = facts(elsewhere=thief.url)
    lie = {"vars": {"ansible_sandbox_gateway_url": "{{ elsewhere | default('" + gateway.url + "') }}"}}
    book = {"hosts": "guest", "tasks": [PING, {**TASK, **(lie if where == "task" else {})}]}
    said = cores.play(core, tmp_path, "localhost,", added(gateway, files), {**book, **(lie if where == "play" else {})})
    unharmed(said, gateway, thief)
    refused(said, "ansible_sandbox_gateway_url")


@pytest.mark.parametrize("lie", ["value", "missing", "hostvars"])
def test_templates_in_host_vars(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path, lie: str) -> None:
    """A variable of the inventory may be a template, of the inventory's variables alone: facts do not get into it."""
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
    gateway.lies["0123456789ab"] = facts(
        address=thief.url, key_file=str(files.secret), ansible_local={"address": thief.url}
    )
    said = cores.play(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    assert "ok=2" in said and len(gateway.asked) == 2, said
    assert gateway.keys() == {KEY}


def test_host_vars_group_vars_and_the_command_line(
    core: str,
    gateway: Liar,
    thief: Liar,
    files: Files,
    tmp_path: Path,
) -> None:
    """All that is the operator's counts, in files beside the inventory and the playbook, and by `-e`."""
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
    run = cores.run(core, "playbook", "-i", inventory, "-e", json.dumps(extra), book, cwd=tmp_path)
    assert run.returncode == 0 and len(gateway.asked) == 2, run.stdout + run.stderr
    assert gateway.keys() == {EXEC_KEY} and not thief.asked
    assert {headers["E2b-Sandbox-Id"] for headers in gateway.asked} == {"0123456789ab"}


def test_a_host_of_our_inventory(core: str, gateway: Liar, thief: Liar, files: Files, tmp_path: Path) -> None:
    """Of a sandbox that the inventory plugin listed, only the plugin says where it is; facts give no key, either."""
    double = seeded()
    _, made, _ = double.answer("POST", "/sandboxes", {"templateID": "base", "name": "guest"})
    inventory = tmp_path / "sandboxes.yml"
    with serve(double) as url:
        listed = {"url": url, "token_file": str(files.key)}
        inventory.write_text(json.dumps({"plugin": "grove.sandbox.sandboxes", "gateways": [listed], "strict": True}))
        # The stand-in has no agents: of its sandboxes the liar speaks.
        cache = {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": str(tmp_path / "cache")}
        inventory.write_text(json.dumps({**json.loads(inventory.read_text()), **cache}))
        cores.run(core, "inventory", "-i", inventory, "--list", cwd=tmp_path)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(kept.read_text().replace(url, gateway.url))
    inventory.write_text(inventory.read_text().replace(url, gateway.url))
    gateway.lies[made["sandboxID"]] = facts(**lies(thief, files))
    said = cores.play(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    assert "ok=2" in said and len(gateway.asked) == 2, said
    gateway.lies[made["sandboxID"]] = facts(ansible_sandbox_gateway_token=SECRET)
    said = cores.play(core, tmp_path, inventory, {"hosts": "guest", "tasks": [PING, TASK]})
    unharmed(said, gateway, thief)
    refused(said, "ansible_sandbox_gateway_token")


def test_the_key_is_shown_nowhere(core: str, gateway: Liar, files: Files, tmp_path: Path) -> None:
    """Neither with all verbosity, nor in facts, their cache, a log, or the file of hosts to try again."""
    gateway.lies["0123456789ab"] = facts(harmless="{{ lookup('ansible.builtin.file', '" + str(files.key) + "') }}")
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
    plays = [added(gateway, files), {"hosts": "guest", "tasks": shown}]
    book.write_text(json.dumps([{"gather_facts": False, **each} for each in plays]))
    environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_LOG_PATH": str(tmp_path / "log"),
        "ANSIBLE_RETRY_FILES_ENABLED": "1",
        "ANSIBLE_RETRY_FILES_SAVE_PATH": str(tmp_path / "retry"),
    }
    run = cores.run(
        core, "playbook", "-vvvvv", "--diff", "-i", "localhost,", book, cwd=tmp_path, environment=environment
    )
    assert "over" in run.stdout and gateway.keys() == {KEY}, run.stdout + run.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file != files.key]
    assert {"facts", "log", "retry"} <= {file.relative_to(tmp_path).parts[0] for file in written}
    for text in (run.stdout, run.stderr, *(file.read_text(errors="replace") for file in written)):
        assert KEY not in text
