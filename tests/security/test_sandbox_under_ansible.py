"""A sandbox under Ansible, root inside or owner of its metadata, that wants code to run on the control node, to fill
its memory, or to write on its terminal. On the oldest and the newest release of ansible-core.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.conftest import seeded
from tests.collection.double_gateway import DoubleGateway, serve
from tests.support import cores
from tests.support.liar import ENDED, LAST, STARTED, Liar, frame, output, printed

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


pytestmark = pytest.mark.parametrize("core", cores.EACH)


class Trap:
    """Templates that make a file, ``mark``, where somebody evaluates them."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "owned"
        run = f"lookup('ansible.builtin.pipe', 'touch {self.mark}')"
        self.texts = {
            "braces": "{{ " + run + " }}",
            "header": f"#jinja2:variable_start_string:'[%',variable_end_string:'%]'\n[% {run} %]",
            "statement": "{% set x = " + run + " %}",
            "line": f"#jinja2:line_statement_prefix:'%'\n% set x = {run}\n",
        }

    @property
    def all(self) -> str:
        return self.texts["header"] + self.texts["braces"] + self.texts["statement"]


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


class Hostile(DoubleGateway):
    """Of whose sandboxes every text is ``text`` that decides nothing; with ``refuse`` it refuses all that changes."""

    text = ""
    refuse = False

    def answer(
        self, method: str, target: str, body: dict[str, Any] | None, key: str = ""
    ) -> tuple[int, Any, dict[str, str]]:
        if self.refuse and method != "GET":
            return 409, {"message": self.text, "kind": "conflict", "blockers": [self.text]}, {}
        status, data, headers = super().answer(method, target, body, key)
        if target.startswith("/sandboxes?") and self.text:
            for each in data:
                each.update(dict.fromkeys(("stateReason", "address", "backend", "parentSandboxID"), self.text))
        return status, data, headers


@pytest.fixture
def gateway() -> Hostile:
    """With a sandbox called web."""
    made = Hostile()
    made.__dict__.update(seeded().__dict__)
    return made


def add(gateway: DoubleGateway, name: str, metadata: dict[str, str]) -> None:
    status, made, _ = gateway.answer("POST", "/sandboxes", {"templateID": "base", "name": name, "metadata": metadata})
    assert status == 201, made


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["asked", "cached"])
def test_metadata_is_no_template(core: str, gateway: Hostile, trap: Trap, tmp_path: Path, cached: bool) -> None:
    """In variables, in what `compose`, `groups` and `keyed_groups` make of them, and from a cache."""
    add(gateway, "web", dict(trap.texts))
    gateway.text = trap.texts["header"]
    inventory = tmp_path / "sandboxes.yml"
    with serve(gateway) as url:
        content: dict[str, Any] = {
            "plugin": "grove.sandbox.sandboxes",
            "gateways": [{"url": url}],
            "strict": True,
            "compose": {
                **{f"composed_{name}": f"grove_sandbox.metadata.{name}" for name in trap.texts},
                "joined": "grove_sandbox.metadata.values() | join('')",
                "cut": "grove_sandbox.metadata.header[0:]",
                "inside": "{'list': [grove_sandbox.metadata.header]}",
            },
            "groups": {"any": "grove_sandbox.metadata.header | length > 3"},
            "keyed_groups": [{"key": "grove_sandbox.metadata.header"}, {"key": "grove_sandbox.address"}],
        }
        if cached:
            content |= {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": "cache"}
        inventory.write_text(json.dumps(content))
        names = [*content["compose"], "group_names", *(f"grove_sandbox.metadata.{name}" for name in trap.texts)]
        names += [f"grove_sandbox.{name}" for name in ("address", "backend", "state_reason", "parent_sandbox_id")]
        tasks = [
            *({"ansible.builtin.debug": {"msg": f"{{{{ {name} }}}}"}} for name in names),
            *({"ansible.builtin.debug": {"var": name}} for name in names),
            {"ansible.builtin.debug": {"msg": "{{ grove_sandbox }}"}},
            {"ansible.builtin.set_fact": {"again": "{{ grove_sandbox }}"}},
            {"ansible.builtin.debug": {"msg": "{{ again.metadata.header }}{{ hostvars.web.joined }}"}},
        ]
        for _ in range(2 if cached else 1):
            said = cores.play(core, tmp_path, inventory, {"hosts": "any", "tasks": tasks})
            assert f"ok={len(tasks)}" in said, said
            assert said.count("variable_start_string") > 5, said
            assert not trap.mark.exists(), said


@pytest.mark.parametrize("key", ["__ansible_unsafe", "__ansible_vault", "__ansible_type"])
def test_metadata_is_no_mark_of_ansible(core: str, gateway: Hostile, tmp_path: Path, key: str) -> None:
    """Some keys of mappings are marks to Ansible's own JSON, which a cache is read with."""
    add(gateway, "web", {key: "_AnsibleTaggedStr", "value": "{{ 1 }}", "tags": "TrustedAsTemplate"})
    add(gateway, "other", {})
    inventory = tmp_path / "sandboxes.yml"
    with serve(gateway) as url:
        cache = {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": "cache"}
        content = {"plugin": "grove.sandbox.sandboxes", "gateways": [{"url": url}], "strict": True, **cache}
        inventory.write_text(json.dumps(content))
        for _ in range(2):
            found = cores.run(core, "inventory", "-i", inventory, "--graph", cwd=tmp_path)
            assert found.returncode == 0 and "--web" in found.stdout and "--other" in found.stdout, found.stderr
        task = {"grove.sandbox.sandbox_info": {"gateway_url": url}, "register": "found"}
        said = {"ansible.builtin.debug": {"msg": "{{ found.sandboxes | map(attribute='name') | sort | join(' ') }}"}}
        local = {
            "hosts": "localhost",
            "connection": "local",
            "tasks": [task, {**task, "environment": {"A": "b"}}, said],
        }
        names = cores.play(core, tmp_path, "localhost,", local)
    assert "other web" in names, names


WAYS: dict[str, dict[str, Any]] = {
    "in process": {},
    "as a module": {"environment": {"ANY": "thing"}},
    "asynchronously": {"async": 60, "poll": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_results_are_no_templates(core: str, gateway: Hostile, trap: Trap, tmp_path: Path, way: str) -> None:
    """What a module returns, whether it succeeds or fails, alone or in a loop."""
    add(gateway, "web", dict(trap.texts))
    gateway.refuse, gateway.text = True, trap.all
    with serve(gateway) as url:
        common = {**WAYS[way], "ignore_errors": True}
        info = {"grove.sandbox.sandbox_info": {"gateway_url": url}, **common}
        refused = {"grove.sandbox.sandbox": {"gateway_url": url, "name": "web", "state": "absent"}, **common}
        tasks: list[dict[str, Any]] = [
            {**info, "register": "found"},
            {**refused, "register": "refused", "diff": True},
            {**refused, "register": "loop", "loop": [1]},
        ]
        values = ["found.sandboxes[0].metadata." + name for name in trap.texts]
        values += [
            "found.sandboxes[0].address",
            "refused.msg",
            "refused.failure.message",
            "refused.failure.blockers[0]",
        ]
        values += ["loop.results[0].msg", "loop.results[0].failure.message", "found", "refused", "loop"]
        for value in values:
            tasks.append({"ansible.builtin.debug": {"msg": f"{{{{ {value} }}}}"}})
            tasks.append({"ansible.builtin.set_fact": {"kept": f"{{{{ {value} }}}}"}})
            tasks.append({"ansible.builtin.debug": {"msg": "{{ kept }}"}})
        said = cores.play(core, tmp_path, "localhost,", {"hosts": "localhost", "connection": "local", "tasks": tasks})
    assert f"ok={len(tasks)}" in said, said
    assert said.count("variable_start_string") > len(values), said
    assert not trap.mark.exists(), said


# --- what an agent answers -------------------------------------------------------------------------------------------


def endless() -> Iterator[bytes]:
    """64 MiB, which is the largest that a test cares to send."""
    yield STARTED
    piece = output(bytes(64 << 10))
    for _ in range(1 << 10):
        yield piece
    yield ENDED


def announced() -> Iterator[bytes]:
    yield STARTED + struct.pack(">BI", 0, (4 << 30) - 1)
    for _ in range(1 << 10):
        yield bytes(64 << 10)


def after_the_end() -> Iterator[bytes]:
    yield STARTED + ENDED
    for _ in range(1 << 10):
        yield bytes(64 << 10)


def ending(end: dict[str, Any]) -> bytes:
    return STARTED + frame({"event": {"end": end}}) + frame(b"{}", LAST)


def lies(trap: Trap) -> dict[str, tuple[Any, str]]:
    """By name: the answer of the agent, and what the task is to say of it."""
    digits = b'{"event":{"end":{"exited":true,"exitCode":' + b"9" * 5000 + b"}}}"
    nonsense = "does not answer as agents do"
    text = trap.all
    return {
        "honest": (printed(text), ""),
        "refuses": ((500, text), "pipe"),
        "refuses-at-the-end": (STARTED + frame({"error": {"message": text}}, LAST), "pipe"),
        "digits": (STARTED + frame(digits), nonsense),
        "exit-code": (ending({"exitCode": text}), nonsense),
        "status": (ending({"exited": False, "status": [text]}), nonsense),
        "pid": (frame({"event": {"start": {"pid": text}}}), nonsense),
        "no-pid": (frame({"event": {"start": text}}), nonsense),
        "list": (frame(json.dumps([text]).encode()), nonsense),
        "event": (frame({"event": text}), nonsense),
        "output": (frame({"event": {"data": {"stdout": {"a": text}}}}), nonsense),
        "base64": (frame({"event": {"data": {"stdout": "abcde" + text}}}), nonsense),
        "no-json": (frame(text.encode()), nonsense),
        "deep": (frame(b"[" * (1 << 20)), nonsense),
        "error": (frame({"error": text}, LAST), nonsense),
        "error-message": (frame({"error": {"message": {"a": text}}}, LAST), nonsense),
        "terminal": ((500, f"red{ESCAPE}blue"), "red]0;owned[2J31mblue"),
        "announced": (announced, nonsense),
        "after-the-end": (after_the_end, nonsense),
        "endless": (endless, "it printed more than 2 MiB"),
    }


def test_an_agent_that_lies(core: str, trap: Trap, tmp_path: Path) -> None:
    """Each lie is a sentence of its host, which is no template, and costs a bounded amount of memory."""
    told = lies(trap)
    liar = Liar({name: lie for name, (lie, _) in told.items()})
    results = tmp_path / "results.json"
    with liar.serve():
        hosts = {name: {} for name in told}
        variables = {
            "ansible_connection": "grove.sandbox.sandbox",
            "ansible_sandbox_gateway_url": liar.url,
            "ansible_sandbox_max_output_mb": 2,
        }
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(json.dumps({"sandboxes": {"hosts": hosts, "vars": variables}}))
        collected = "{{ dict(groups.sandboxes | zip(groups.sandboxes | map('extract', hostvars, 'said'))) | to_json }}"
        asked = {"ansible.builtin.raw": "true", "register": "said", "ignore_errors": True, "ignore_unreachable": True}
        quoted = [
            {"ansible.builtin.debug": {"msg": f"{{{{ {value} }}}}"}}
            for value in ("said", "said.msg | default('')", "said.stdout | default('')", "said.exception | default('')")
        ]
        shown = cores.play(
            core,
            tmp_path,
            inventory,
            {"hosts": "sandboxes", "tasks": [asked, *quoted]},
            {
                "hosts": "localhost",
                "connection": "local",
                "tasks": [{"ansible.builtin.copy": {"content": collected, "dest": str(results)}}],
            },
        )
    assert not trap.mark.exists(), shown
    said = json.loads(results.read_text())
    for name, (_, sentence) in told.items():
        result = said[name]
        assert "Unexpected failure" not in result.get("msg", ""), (name, result)
        assert bool(result.get("unreachable")) is (sentence != "" and name != "endless"), (name, result)
        assert sentence in result.get("msg", ""), (name, result)
    assert said["honest"]["stdout"] == trap.all and said["endless"]["failed"]
    for name in ("announced", "after-the-end", "endless"):
        assert liar.taken[name] < 16 << 20, f"{name}: {liar.taken[name]} bytes were taken"
    assert not set(ESCAPE) & {"\x1b", "\x07", "\x9b"} & set(shown + json.dumps(said, ensure_ascii=False))


def test_what_a_gateway_quotes_stays_off_the_terminal(core: str, gateway: Hostile, tmp_path: Path) -> None:
    """A warning of the inventory is printed as it is."""

    def refuse(*_: Any) -> tuple[int, Any, dict[str, str]]:
        return 502, {"message": f"the sandbox says {ESCAPE}hello", "kind": "backend_failed"}, {}

    gateway.answer = refuse  # type: ignore[method-assign]
    inventory = tmp_path / "sandboxes.yml"
    with serve(gateway) as url:
        inventory.write_text(json.dumps({"plugin": "grove.sandbox.sandboxes", "gateways": [{"url": url}]}))
        found = cores.run(core, "inventory", "-i", inventory, "--list", cwd=tmp_path)
    assert "the sandbox says" in " ".join(found.stderr.split()) and "hello" in found.stderr, found.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(found.stdout + found.stderr)


def test_a_module_is_not_given_the_key_of_the_environment(core: str, tmp_path: Path) -> None:
    """A task of ours that runs in a sandbox sends its options there, where root reads them."""
    key = "key-of-the-environment"
    liar = Liar({"web": printed(json.dumps({"changed": False}))})
    with liar.serve():
        variables = {"ansible_connection": "grove.sandbox.sandbox", "ansible_sandbox_gateway_url": liar.url}
        variables["ansible_python_interpreter"] = "/usr/bin/python3"
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(json.dumps({"all": {"hosts": {"web": variables}}}))
        task = {"grove.sandbox.sandbox_info": {"gateway_url": "unix:///run/inside.sock"}}
        said = cores.play(core, tmp_path, inventory, {"hosts": "web", "tasks": [task]}, SANDBOX_GATEWAY_TOKEN=key)
    assert "ok=1" in said, said
    assert liar.keys() == {key}, "the gateway gets it"
    assert liar.bodies and not any(key.encode() in body for body in liar.bodies)
