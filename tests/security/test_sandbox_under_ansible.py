"""A sandbox managed by Ansible attacks the control node.

Root in the sandbox, or the owner of its metadata, tries to run code on the control node, fill its memory or write to
its terminal. The tests run on the oldest and the newest release of ansible-core.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ansible_core_versions, faulty_gateway
from tests.support.faulty_gateway import FaultyGateway
from tests.support.liar import (
    END_FRAMES,
    END_STREAM_FLAG,
    START_FRAME,
    FakeGateway,
    make_facts_response,
    make_frame,
    make_output_frame,
    make_response,
)
from tests.support.samples import mark_slow_except

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


pytestmark = pytest.mark.parametrize(
    "core", mark_slow_except((ansible_core_versions.OLDEST,), ansible_core_versions.RELEASES)
)


class HostileTemplates:
    """Templates that create the file ``mark`` when they are evaluated."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "owned"
        pipe_lookup = f"lookup('ansible.builtin.pipe', 'touch {self.mark}')"
        self.texts = {
            "braces": "{{ " + pipe_lookup + " }}",
            "header": f"#jinja2:variable_start_string:'[%',variable_end_string:'%]'\n[% {pipe_lookup} %]",
            "statement": "{% set x = " + pipe_lookup + " %}",
            "line": f"#jinja2:line_statement_prefix:'%'\n% set x = {pipe_lookup}\n",
        }

    @property
    def combined_text(self) -> str:
        return self.texts["header"] + self.texts["braces"] + self.texts["statement"]


@pytest.fixture
def hostile_templates(tmp_path: Path) -> HostileTemplates:
    return HostileTemplates(tmp_path)


class HostileGateway:
    """A gateway that returns ``text`` in all free-text fields. Rejects all changes if ``rejects_changes`` is set."""

    def __init__(self, gateway: FaultyGateway) -> None:
        self.text = ""
        self.rejects_changes = False
        self.url = gateway.url
        self._gateway = gateway
        gateway.intercept, gateway.rewrite = self._refuse, self._rewrite

    def _refuse(self, method: str, _target: str) -> tuple[int, Any] | None:
        if self.rejects_changes and method != "GET":
            return 409, {"message": self.text, "kind": "conflict", "blockers": [self.text]}
        return None

    def _rewrite(self, _method: str, target: str, status: int, data: Any) -> tuple[int, Any]:
        if target.startswith("/sandboxes?") and self.text:
            for each in data:
                each.update(dict.fromkeys(("stateReason", "address", "backend", "parentSandboxID"), self.text))
        return status, data

    def respond_to_all(self, status: int, data: Any) -> None:
        """Respond to every request with ``status`` and ``data``."""
        self._gateway.intercept = lambda *_: (status, data)

    def add_sandbox(self, name: str, metadata: dict[str, str]) -> None:
        self._gateway.request("POST", "/sandboxes", {"templateID": "base", "name": name, "metadata": metadata})


@pytest.fixture(scope="module")
def _faulty_gateway() -> Iterator[FaultyGateway]:
    with faulty_gateway.running_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(_faulty_gateway: FaultyGateway) -> Iterator[HostileGateway]:
    yield HostileGateway(_faulty_gateway)
    _faulty_gateway.reset()


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses_cache", [False, True], ids=["uncached", "cached"])
def test_metadata_is_not_evaluated_as_a_template(
    core: str, gateway: HostileGateway, hostile_templates: HostileTemplates, tmp_path: Path, uses_cache: bool
) -> None:
    """Covers variables, the results of `compose`, `groups` and `keyed_groups`, and cached inventories."""
    gateway.add_sandbox("web", dict(hostile_templates.texts))
    gateway.text = hostile_templates.texts["header"]
    inventory = tmp_path / "sandboxes.yml"
    inventory_data: dict[str, Any] = {
        "plugin": "grove.sandbox.sandboxes",
        "gateways": [{"url": gateway.url}],
        "strict": True,
        "compose": {
            **{f"composed_{name}": f"grove_sandbox.metadata.{name}" for name in hostile_templates.texts},
            "joined": "grove_sandbox.metadata.values() | join('')",
            "cut": "grove_sandbox.metadata.header[0:]",
            "inside": "{'list': [grove_sandbox.metadata.header]}",
        },
        "groups": {"any": "grove_sandbox.metadata.header | length > 3"},
        "keyed_groups": [{"key": "grove_sandbox.metadata.header"}, {"key": "grove_sandbox.address"}],
    }
    if uses_cache:
        inventory_data |= {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": "cache"}
    inventory.write_text(json.dumps(inventory_data))
    variable_names = [
        *inventory_data["compose"],
        "group_names",
        *(f"grove_sandbox.metadata.{name}" for name in hostile_templates.texts),
    ]
    variable_names += [f"grove_sandbox.{name}" for name in ("address", "backend", "state_reason", "parent_sandbox_id")]
    tasks = [
        *({"ansible.builtin.debug": {"msg": f"{{{{ {name} }}}}"}} for name in variable_names),
        *({"ansible.builtin.debug": {"var": name}} for name in variable_names),
        {"ansible.builtin.debug": {"msg": "{{ grove_sandbox }}"}},
        {"ansible.builtin.set_fact": {"again": "{{ grove_sandbox }}"}},
        {"ansible.builtin.debug": {"msg": "{{ again.metadata.header }}{{ hostvars.web.joined }}"}},
    ]
    for _ in range(2 if uses_cache else 1):
        output = ansible_core_versions.run_plays(core, tmp_path, inventory, {"hosts": "any", "tasks": tasks})
        assert f"ok={len(tasks)}" in output, output
        assert output.count("variable_start_string") > 5, output
        assert not hostile_templates.mark.exists(), output


@pytest.mark.parametrize("key", ["__ansible_unsafe", "__ansible_vault", "__ansible_type"])
def test_metadata_is_not_decoded_as_ansibles_own_json(
    core: str, gateway: HostileGateway, tmp_path: Path, key: str
) -> None:
    """Some keys have a special meaning in Ansible's own JSON, which is the format of its caches."""
    gateway.add_sandbox("web", {key: "_AnsibleTaggedStr", "value": "{{ 1 }}", "tags": "TrustedAsTemplate"})
    gateway.add_sandbox("other", {})
    inventory = tmp_path / "sandboxes.yml"
    cache_options = {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": "cache"}
    inventory_data = {
        "plugin": "grove.sandbox.sandboxes",
        "gateways": [{"url": gateway.url}],
        "strict": True,
        **cache_options,
    }
    inventory.write_text(json.dumps(inventory_data))
    for _ in range(2):
        completed_process = ansible_core_versions.run_command(
            core, "inventory", "-i", inventory, "--graph", cwd=tmp_path
        )
        assert completed_process.returncode == 0, completed_process.stderr
        assert "--web" in completed_process.stdout and "--other" in completed_process.stdout, completed_process.stderr
    task = {"grove.sandbox.sandbox_info": {"gateway_url": gateway.url}, "register": "found"}
    show_names_task = {
        "ansible.builtin.debug": {"msg": "{{ found.sandboxes | map(attribute='name') | sort | join(' ') }}"}
    }
    local_play = {
        "hosts": "localhost",
        "connection": "local",
        "tasks": [task, {**task, "environment": {"A": "b"}}, show_names_task],
    }
    output = ansible_core_versions.run_plays(core, tmp_path, "localhost,", local_play)
    assert "other web" in output, output


EXECUTION_MODES: dict[str, dict[str, Any]] = {
    "in process": {},
    "as a module": {"environment": {"ANY": "thing"}},
    "asynchronously": {"async": 60, "poll": 1},
}


@pytest.mark.parametrize("mode", EXECUTION_MODES)
def test_results_are_not_evaluated_as_templates(
    core: str, gateway: HostileGateway, hostile_templates: HostileTemplates, tmp_path: Path, mode: str
) -> None:
    """Covers the results of modules that succeed or fail, with and without a loop."""
    gateway.add_sandbox("web", dict(hostile_templates.texts))
    gateway.rejects_changes, gateway.text = True, hostile_templates.combined_text
    common_options = {**EXECUTION_MODES[mode], "ignore_errors": True}
    info_task = {"grove.sandbox.sandbox_info": {"gateway_url": gateway.url}, **common_options}
    rejected_task = {
        "grove.sandbox.sandbox": {"gateway_url": gateway.url, "name": "web", "state": "absent"},
        **common_options,
    }
    tasks: list[dict[str, Any]] = [
        {**info_task, "register": "found"},
        {**rejected_task, "register": "refused", "diff": True},
        {**rejected_task, "register": "loop", "loop": [1]},
    ]
    expressions = ["found.sandboxes[0].metadata." + name for name in hostile_templates.texts]
    expressions += [
        "found.sandboxes[0].address",
        "refused.msg",
        "refused.failure.message",
        "refused.failure.blockers[0]",
    ]
    expressions += ["loop.results[0].msg", "loop.results[0].failure.message", "found", "refused", "loop"]
    for value in expressions:
        tasks.append({"ansible.builtin.debug": {"msg": f"{{{{ {value} }}}}"}})
        tasks.append({"ansible.builtin.set_fact": {"kept": f"{{{{ {value} }}}}"}})
        tasks.append({"ansible.builtin.debug": {"msg": "{{ kept }}"}})
    output = ansible_core_versions.run_plays(
        core, tmp_path, "localhost,", {"hosts": "localhost", "connection": "local", "tasks": tasks}
    )
    assert f"ok={len(tasks)}" in output, output
    assert output.count("variable_start_string") > len(expressions), output
    assert not hostile_templates.mark.exists(), output


RECORDING_ACTION = """
import json
from pathlib import Path
from ansible.utils.unsafe_proxy import AnsibleUnsafe
from ansible_collections.grove.sandbox.plugins.action.{module} import ActionModule as GatewayActionModule
try:
    from ansible._internal._datatag._tags import TrustedAsTemplate
except ImportError:  # before ansible-core 2.19
    TrustedAsTemplate = None

def list_strings(value):
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in list_strings(each)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in list_strings(each)]
    return [value] if isinstance(value, str) else []

def is_unsafe(text):
    return not TrustedAsTemplate.is_tagged_on(text) if TrustedAsTemplate else isinstance(text, AnsibleUnsafe)

class ActionModule(GatewayActionModule):
    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        with Path({file!r}).open("a") as file:
            for text in list_strings(result):
                print(json.dumps([is_unsafe(text), text]), file=file)
        return result
"""
"""An action plugin that runs one of ours and records each string of its result before Ansible marks it as unsafe."""


def test_action_results_are_marked_as_unsafe(
    core: str, gateway: HostileGateway, hostile_templates: HostileTemplates, tmp_path: Path
) -> None:
    """ansible-core also marks the results of tasks. This test checks what the plugins do on their own."""
    gateway.add_sandbox("web", dict(hostile_templates.texts))
    gateway.rejects_changes, gateway.text = True, hostile_templates.combined_text
    file, plugins = tmp_path / "strings", tmp_path / "action_plugins"
    plugins.mkdir()
    tasks: dict[str, dict[str, str]] = {"sandbox_info": {}, "sandbox": {"name": "web", "state": "absent"}}
    for module in tasks:
        (plugins / f"record_{module}.py").write_text(RECORDING_ACTION.format(module=module, file=str(file)))
    ansible_core_versions.run_plays(
        core,
        tmp_path,
        "localhost,",
        {
            "hosts": "localhost",
            "connection": "local",
            "tasks": [
                {f"record_{module}": {"gateway_url": gateway.url, **arguments}, "ignore_errors": True}
                for module, arguments in tasks.items()
            ],
        },
    )
    strings = [json.loads(line) for line in file.read_text().splitlines()]
    assert {*hostile_templates.texts.values(), hostile_templates.combined_text} <= {text for _, text in strings}
    assert [text for is_unsafe, text in strings if not is_unsafe] == []


@pytest.mark.parametrize("uses_cache", [False, True], ids=["uncached", "cached"])
def test_facts_are_not_evaluated_as_templates(
    core: str, hostile_templates: HostileTemplates, tmp_path: Path, uses_cache: bool
) -> None:
    """Covers facts that `setup` and other modules return from a sandbox, and cached facts."""
    facts = {**hostile_templates.texts, "nested": [dict(hostile_templates.texts)]}
    fake_gateway = FakeGateway({"guest": make_facts_response(**facts, **{hostile_templates.texts["braces"]: "name"})})
    values = [*hostile_templates.texts, "nested", "nested[0].header", "nested[0]['braces']"]
    expressions = [f"{scope}{value}" for value in values for scope in ("", "ansible_facts.", "hostvars.guest.")]
    expressions += ["ansible_facts", "ansible_facts.values() | join('')", "header ~ braces", "ansible_facts.header[0:]"]
    tasks: list[dict[str, Any]] = [
        *({"ansible.builtin.debug": {"msg": f"{{{{ {value} }}}}"}} for value in expressions),
        *({"ansible.builtin.debug": {"var": value}} for value in expressions),
        {"ansible.builtin.set_fact": {"again": "{{ ansible_facts }}"}},
        {"ansible.builtin.debug": {"msg": "{{ again.header }}{{ again.nested }}"}},
    ]
    environment = {
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
    }
    inventory = tmp_path / "hosts.yml"
    with fake_gateway.running():
        variables = {"ansible_connection": "grove.sandbox.sandbox", "ansible_sandbox_gateway_url": fake_gateway.url}
        inventory.write_text(json.dumps({"all": {"hosts": {"guest": variables}}}))
        setup_play = {"hosts": "guest", "tasks": [{"ansible.builtin.setup": {}}, {"ansible.builtin.ping": {}}]}
        play = {"hosts": "guest", "tasks": tasks}
        if uses_cache:
            ansible_core_versions.run_plays(core, tmp_path, inventory, setup_play, **environment)
            output = ansible_core_versions.run_plays(core, tmp_path, inventory, play, **environment)
        else:
            output = ansible_core_versions.run_plays(core, tmp_path, inventory, setup_play, play)
    assert f"ok={len(tasks) if uses_cache else len(tasks) + 2}" in output, output
    assert output.count("variable_start_string") > len(expressions), output
    assert not hostile_templates.mark.exists(), output


ASYNC_MODES: dict[str, dict[str, Any]] = {
    "synchronously": {},
    "with polling": {"async": 60, "poll": 1},
    "in the background": {"async": 60, "poll": 0},
}


def make_hostile_results(hostile_templates: HostileTemplates) -> dict[str, dict[str, Any]]:
    """Return {host: the result of each of its modules}. The results also answer ``async_wrapper``."""
    texts = hostile_templates.texts
    status = {"changed": True, "rc": 0, "started": 1, "finished": 1, "ansible_job_id": "j1.1", "results_file": "/r"}
    local_variables = {"ansible_connection": "local", "ansible_host": "localhost"}
    new_host = {"host_name": "other", "groups": ["added"], "host_vars": local_variables}
    trusted_text = {
        "__ansible_type": "_AnsibleTaggedStr",
        "value": texts["braces"],
        "tags": [{"__ansible_type": "TrustedAsTemplate"}],
    }
    return {
        "texts": {
            **status,
            "ansible_job_id": texts["header"],
            "condition": f"lookup('ansible.builtin.pipe', 'touch {hostile_templates.mark}')",
            "diff": {"before": texts["header"]},
            "failure": {"message": texts["header"]},
            "msg": texts["header"],
            "results_file": texts["braces"],
            "stderr": texts["line"],
            "stdout": hostile_templates.combined_text,
            "stdout_lines": list(texts.values()),
            "warnings": [texts["braces"]],
            texts["braces"]: texts["header"],
        },
        "other": {
            **status,
            "_ansible_delegated_vars": local_variables,
            "add_group": "added",
            "add_host": new_host,
            "ansible_delegated_vars": {"other": local_variables},
            "ansible_facts": local_variables,
            "parent_groups": ["all"],
        },
        "trusted": {**status, "stdout_lines": [trusted_text, {"__ansible_unsafe": texts["braces"]}]},
    }


@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_module_results_of_a_sandbox_are_not_evaluated(
    core: str, hostile_templates: HostileTemplates, tmp_path: Path, mode: str
) -> None:
    """Root in the sandbox has replaced its Python interpreter, which returns any result in place of the module's.

    Covers modules of Ansible and of this collection, delegated tasks, and results that name hosts.
    """
    touched_file = tmp_path / "touched"
    results = make_hostile_results(hostile_templates)
    fake_gateway = FakeGateway({host: make_response(json.dumps(result)) for host, result in results.items()})
    modules: dict[str, dict[str, Any]] = {
        "ansible.builtin.command": {"argv": ["true"]},
        "ansible.builtin.setup": {},
        "grove.sandbox.sandbox_info": {"gateway_url": "unix:///run/inside.sock"},
    }
    show_tasks: list[dict[str, Any]] = [
        {"ansible.builtin.set_fact": {"kept": "{{ result }}"}},
        {
            "ansible.builtin.debug": {"msg": "{{ item }}{{ result }}{{ kept }}{{ kept.stdout | default('') }}"},
            "loop": "{{ [result.msg | default('')] + result.stdout_lines | default([]) }}",
        },
        {"ansible.builtin.assert": {"that": ["{{ result.condition | default('false') }}"]}},
    ]
    status_task = {
        "ansible.builtin.async_status": {"jid": "{{ result.ansible_job_id }}"},
        "register": "result",
        "until": "result.finished | default(1) | int == 1",
        "retries": 2,
        "delay": 0,
    }

    def make_tasks(**options: Any) -> list[dict[str, Any]]:
        tasks = []
        for name, arguments in modules.items():
            tasks.append({name: arguments, "register": "result", **ASYNC_MODES[mode], **options})
            tasks += show_tasks
            if mode == "in the background":
                tasks += [{**status_task, **options}, *show_tasks]
        return [{**task, "ignore_errors": True} for task in tasks]

    inventory = tmp_path / "hosts.yml"
    with fake_gateway.running():
        variables = {"ansible_connection": "grove.sandbox.sandbox", "ansible_sandbox_gateway_url": fake_gateway.url}
        hosts: dict[str, Any] = {host: {} for host in results}
        inventory.write_text(json.dumps({"sandboxes": {"hosts": hosts, "vars": variables}}))
        output = ansible_core_versions.run_plays(
            core,
            tmp_path,
            inventory,
            {"hosts": "sandboxes", "tasks": make_tasks()},
            {"hosts": "localhost", "connection": "local", "tasks": make_tasks(delegate_to="texts")},
            # If the results could change the connection, this task would run on the control node.
            {"hosts": "sandboxes", "tasks": [{"ansible.builtin.raw": f"touch {touched_file}"}]},
            {"hosts": "added", "tasks": [{"ansible.builtin.raw": f"touch {touched_file}"}]},
        )
    assert not hostile_templates.mark.exists(), output
    assert not touched_file.exists(), output
    task_count = len(make_tasks())
    for host, ok_count in (("texts", task_count + 1), ("other", task_count + 1), ("localhost", task_count)):
        assert re.search(rf"^{host} +: ok={ok_count} ", output, re.MULTILINE), output
    assert output.count("variable_start_string") > 2 * task_count, output


# --- responses of an agent -------------------------------------------------------------------------------------------


def yield_endless_response() -> Iterator[bytes]:
    """Yield 64 MiB of output, far more than the limit of 2 MiB that the test sets."""
    yield START_FRAME
    piece = make_output_frame(bytes(64 << 10))
    for _ in range(1 << 10):
        yield piece
    yield END_FRAMES


def yield_oversized_response() -> Iterator[bytes]:
    yield START_FRAME + struct.pack(">BI", 0, (4 << 30) - 1)
    for _ in range(1 << 10):
        yield bytes(64 << 10)


def yield_response_with_trailing_data() -> Iterator[bytes]:
    yield START_FRAME + END_FRAMES
    for _ in range(1 << 10):
        yield bytes(64 << 10)


def make_response_with_end(end_event: dict[str, Any]) -> bytes:
    return START_FRAME + make_frame({"event": {"end": end_event}}) + make_frame(b"{}", END_STREAM_FLAG)


def list_invalid_responses(hostile_templates: HostileTemplates) -> dict[str, tuple[Any, str]]:
    """Return {name: (the agent's response, part of the task's expected error message)}."""
    digits = b'{"event":{"end":{"exited":true,"exitCode":' + b"9" * 5000 + b"}}}"
    invalid_response_error = "sent an invalid response"
    text = hostile_templates.combined_text
    return {
        "honest": (make_response(text), ""),
        "refuses": ((500, text), "pipe"),
        "refuses-at-the-end": (START_FRAME + make_frame({"error": {"message": text}}, END_STREAM_FLAG), "pipe"),
        "digits": (START_FRAME + make_frame(digits), invalid_response_error),
        "exit-code": (make_response_with_end({"exitCode": text}), invalid_response_error),
        "status": (make_response_with_end({"exited": False, "status": [text]}), invalid_response_error),
        "pid": (make_frame({"event": {"start": {"pid": text}}}), invalid_response_error),
        "no-pid": (make_frame({"event": {"start": text}}), invalid_response_error),
        "list": (make_frame(json.dumps([text]).encode()), invalid_response_error),
        "event": (make_frame({"event": text}), invalid_response_error),
        "output": (make_frame({"event": {"data": {"stdout": {"a": text}}}}), invalid_response_error),
        "base64": (make_frame({"event": {"data": {"stdout": "abcde" + text}}}), invalid_response_error),
        "no-json": (make_frame(text.encode()), invalid_response_error),
        "deep": (make_frame(b"[" * (1 << 20)), invalid_response_error),
        "error": (make_frame({"error": text}, END_STREAM_FLAG), invalid_response_error),
        "error-message": (make_frame({"error": {"message": {"a": text}}}, END_STREAM_FLAG), invalid_response_error),
        "terminal": ((500, f"red{ESCAPE}blue"), "red]0;owned[2J31mblue"),
        "announced": (yield_oversized_response, invalid_response_error),
        "after-the-end": (yield_response_with_trailing_data, invalid_response_error),
        "endless": (yield_endless_response, "it printed more than 2 MiB"),
    }


def test_invalid_responses_of_an_agent_affect_only_its_host(
    core: str, hostile_templates: HostileTemplates, tmp_path: Path
) -> None:
    """An invalid response affects only its host. It is not evaluated as a template, and needs little memory."""
    cases = list_invalid_responses(hostile_templates)
    fake_gateway = FakeGateway({name: answer for name, (answer, _) in cases.items()})
    results_file = tmp_path / "results.json"
    with fake_gateway.running():
        hosts = {name: {} for name in cases}
        variables = {
            "ansible_connection": "grove.sandbox.sandbox",
            "ansible_sandbox_gateway_url": fake_gateway.url,
            "ansible_sandbox_max_output_mb": 2,
        }
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(json.dumps({"sandboxes": {"hosts": hosts, "vars": variables}}))
        results_expression = "groups.sandboxes | map('extract', hostvars, 'result')"
        results_template = f"{{{{ dict(groups.sandboxes | zip({results_expression})) | to_json }}}}"
        ignore_options = {"ignore_errors": True, "ignore_unreachable": True}
        raw_task = {"ansible.builtin.raw": "true", "register": "result", **ignore_options}
        debug_tasks = [
            {"ansible.builtin.debug": {"msg": f"{{{{ {value} }}}}"}}
            for value in ("result", *(f"result.{name} | default('')" for name in ("msg", "stdout", "exception")))
        ]
        output = ansible_core_versions.run_plays(
            core,
            tmp_path,
            inventory,
            {"hosts": "sandboxes", "tasks": [raw_task, *debug_tasks]},
            {
                "hosts": "localhost",
                "connection": "local",
                "tasks": [{"ansible.builtin.copy": {"content": results_template, "dest": str(results_file)}}],
            },
        )
    assert not hostile_templates.mark.exists(), output
    host_results = json.loads(results_file.read_text())
    for name, (_, expected_message) in cases.items():
        result = host_results[name]
        assert "Unexpected failure" not in result.get("msg", ""), (name, result)
        assert bool(result.get("unreachable")) is (expected_message != "" and name != "endless"), (name, result)
        assert expected_message in result.get("msg", ""), (name, result)
    assert host_results["honest"]["stdout"] == hostile_templates.combined_text and host_results["endless"]["failed"]
    for name in ("announced", "after-the-end", "endless"):
        assert fake_gateway.sent_bytes[name] < 16 << 20, f"{name}: {fake_gateway.sent_bytes[name]} bytes were read"
    assert not set(ESCAPE) & {"\x1b", "\x07", "\x9b"} & set(output + json.dumps(host_results, ensure_ascii=False))


def test_quoted_text_contains_no_terminal_codes(core: str, gateway: HostileGateway, tmp_path: Path) -> None:
    """Ansible prints the warnings of an inventory plugin unchanged."""
    gateway.respond_to_all(502, {"message": f"the sandbox says {ESCAPE}hello", "kind": "backend_failed"})
    inventory = tmp_path / "sandboxes.yml"
    inventory.write_text(json.dumps({"plugin": "grove.sandbox.sandboxes", "gateways": [{"url": gateway.url}]}))
    completed_process = ansible_core_versions.run_command(core, "inventory", "-i", inventory, "--list", cwd=tmp_path)
    assert "the sandbox says" in " ".join(completed_process.stderr.split()) and "hello" in completed_process.stderr, (
        completed_process.stderr
    )
    assert not {"\x1b", "\x07", "\x9b"} & set(completed_process.stdout + completed_process.stderr)


def test_a_module_does_not_receive_the_key_from_the_environment(core: str, tmp_path: Path) -> None:
    """A task that runs in a sandbox sends its options there, where root can read them."""
    key = "key-of-the-environment"
    fake_gateway = FakeGateway({"web": make_response(json.dumps({"changed": False}))})
    with fake_gateway.running():
        variables = {"ansible_connection": "grove.sandbox.sandbox", "ansible_sandbox_gateway_url": fake_gateway.url}
        variables["ansible_python_interpreter"] = "/usr/bin/python3"
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(json.dumps({"all": {"hosts": {"web": variables}}}))
        task = {"grove.sandbox.sandbox_info": {"gateway_url": "unix:///run/inside.sock"}}
        output = ansible_core_versions.run_plays(
            core, tmp_path, inventory, {"hosts": "web", "tasks": [task]}, SANDBOX_GATEWAY_TOKEN=key
        )
    assert "ok=1" in output, output
    assert fake_gateway.list_received_keys() == {key}, "the gateway did not receive the key"
    assert fake_gateway.bodies and not any(key.encode() in body for body in fake_gateway.bodies)
