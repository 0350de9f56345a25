"""Test check-mode runs on sandboxes that only the plan creates or changes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox_gateway.api.native import shapes
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.errors import Busy, NotFound
from tests.collection import agents
from tests.support import ansible_core_versions
from tests.support.ansible_core_versions import NEWEST, RELEASES
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, MemoryGateway
from tests.support.samples import mark_slow_except

Task = dict[str, Any]
Play = dict[str, Any]
PLUGINS = Path(__file__).parent / "plugins"
SKIPPED = "this task is skipped in check mode"
each_release = pytest.mark.parametrize("core", mark_slow_except((NEWEST,), RELEASES))


@pytest.fixture(scope="module")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("predicted"), log={"level": "warning"}) as server:
        yield server


@pytest.fixture
def gateway(_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield _gateway
    # Otherwise, the tests together would open more sessions than a gateway keeps.
    for key in (ADMIN_KEY, EXEC_KEY):
        with _gateway.client(key) as client:
            for session in client.get("/plans").json():
                client.delete(f"/plans/{session['planID']}").raise_for_status()
    _gateway.clear()


@pytest.fixture
def session_owners(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The owners of all plan sessions that were opened or found."""
    owners: list[str] = []
    original_open = PlanSessions.open

    def open_session(self: PlanSessions, owner: str, run: str) -> Any:
        owners.append(owner)
        return original_open(self, owner, run)

    monkeypatch.setattr(PlanSessions, "open", open_session)
    return owners


@dataclass(frozen=True)
class Result:
    status: str
    """ok, skipped, failed or unreachable"""
    data: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.data.get("msg", ""))


class Run:
    """The results of a run of `ansible-playbook`, by task and host."""

    def __init__(self, output: str, records: list[dict[str, Any]]) -> None:
        self.output = output
        self.results = {(each["task"], each["host"]): Result(each["status"], each["result"]) for each in records}

    def get_results(self, host: str) -> dict[str, Result]:
        return {task: result for (task, each), result in self.results.items() if each == host}

    def read_recap(self, host: str) -> dict[str, int]:
        (line,) = re.findall(rf"^{re.escape(host)} +: (.*)$", self.output, re.MULTILINE)
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}


def run_playbook(
    directory: Path,
    *plays: Play,
    core: str = NEWEST,
    options: tuple[str, ...] = ("--check",),
    hosts: str = "localhost,",
    plan_file: str = "",
) -> Run:
    """``plan_file``: the file in which the callback saves the plan. Without it, the callback is not enabled."""
    playbook, record = directory / "book.yml", directory / "results.jsonl"
    playbook.write_text(json.dumps(plays))
    record.write_text("")
    environment = {
        "ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS / "callback"),
        "ANSIBLE_CALLBACKS_ENABLED": "record_tasks,grove.sandbox.plan" if plan_file else "record_tasks",
        "RECORD_FILE": str(record),
        "GROVE_SANDBOX_PLAN_FILE": plan_file,
    }
    arguments: tuple[str | Path, ...] = ("-i", hosts, *options, playbook)
    process = ansible_core_versions.run_command(core, "playbook", *arguments, cwd=directory, environment=environment)
    output = process.stdout + process.stderr
    assert "Traceback" not in output, output
    return Run(output, [json.loads(line) for line in record.read_text().splitlines()])


def make_planning_play(gateway: MemoryGateway, *tasks: Task) -> Play:
    """Return a play in which modules of this collection plan changes."""
    return {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable},
        "module_defaults": {"group/grove.sandbox.all": {"gateway_url": gateway.url, "gateway_token": ADMIN_KEY}},
        "tasks": list(tasks),
    }


def make_add_host_task(gateway: MemoryGateway, name: str, ref: str, key: str = ADMIN_KEY, **variables: str) -> Task:
    return {
        "ansible.builtin.add_host": {
            "name": name,
            "ansible_connection": "grove.sandbox.sandbox",
            "ansible_host": ref,
            "ansible_sandbox_gateway_url": gateway.url,
            "ansible_sandbox_gateway_token": key,
            **variables,
        }
    }


def create_sandbox(gateway: MemoryGateway, name: str, **fields: Any) -> str:
    with gateway.client() as client:
        response = client.post("/sandboxes", json={"templateID": "base", "name": name, **fields})
        assert response.status_code == 201, response.text
        sandbox_id: str = response.json()["sandboxID"]
        return sandbox_id


CREATE_TASKS = ({"grove.sandbox.sandbox": {"name": "try", "template": "base"}, "register": "created"},)
PREDICTED_ID = "{{ created.sandbox.id }}"


def make_guest_tasks(directory: Path) -> list[Task]:
    """Return a task for each kind of action plugin that uses the connection."""
    (directory / "source").write_text("{{ 1 + 1 }}")
    target = directory / "target"
    target.mkdir(exist_ok=True)
    tasks: dict[str, Any] = {
        "command": {"cmd": f"touch {target}/command"},
        "shell": {"cmd": f"touch {target}/shell"},
        "setup": {"gather_subset": "!all"},
        "gather_facts": {},
        "copy": {"src": str(directory / "source"), "dest": f"{target}/copy"},
        "template": {"src": str(directory / "source"), "dest": f"{target}/template"},
        "raw": f"touch {target}/raw",
        "ping": {},
        "script": f"{directory}/source",
        "stat": {"path": "/"},
        "file": {"path": f"{target}/file", "state": "touch"},
        "unarchive": {"src": str(directory / "source"), "dest": str(target)},
        "assemble": {"src": str(target), "dest": f"{target}/assembled"},
        "fetch": {"src": "/etc/hostname", "dest": f"{directory}/fetched"},
        "package": {"name": "bash"},
        "service": {"name": "cron"},
        "wait_for_connection": {"timeout": 3, "sleep": 1},
    }
    return [{"name": name, f"ansible.builtin.{name}": args} for name, args in tasks.items()]


@each_release
@pytest.mark.parametrize("strategy", ["linear", "free"])
@pytest.mark.parametrize("check_mode", [None, False])
def test_tasks_on_a_predicted_host_are_skipped(
    core: str, gateway: MemoryGateway, tmp_path: Path, strategy: str, check_mode: bool | None
) -> None:
    tasks = make_guest_tasks(tmp_path)
    keywords = {} if check_mode is None else {"check_mode": check_mode}
    plays = [
        make_planning_play(gateway, *CREATE_TASKS, make_add_host_task(gateway, "guest", PREDICTED_ID)),
        {"hosts": "guest", "strategy": strategy, "gather_facts": True, "tasks": tasks, **keywords},
    ]
    run = run_playbook(tmp_path, *plays, core=core)
    results = run.get_results("guest")
    assert set(results) == {"Gathering Facts", *(task["name"] for task in tasks)}, run.output
    assert {result.status for result in results.values()} == {"skipped"}, run.output
    recap = run.read_recap("guest")
    assert recap["skipped"] == len(tasks) + 1 and recap["ok"] == recap["failed"] == recap["unreachable"] == 0
    # In check mode, these skip themselves on every host.
    own_skips = set() if check_mode is False else {"raw", "fetch", "wait_for_connection", "assemble"}
    for name in set(results) - own_skips:
        assert results[name].message == f"sandbox try exists only in the plan: {SKIPPED}", (name, run.output)
    assert not list((tmp_path / "target").iterdir())
    assert "WARNING" not in run.output, run.output


@each_release
def test_a_real_host_alongside_a_predicted_one_is_reached(core: str, gateway: MemoryGateway, tmp_path: Path) -> None:
    """This includes a sandbox whose machine the plan does not change, and one created during the check-mode run."""
    for name in ("real", "updated"):
        create_sandbox(gateway, name)
    run = run_playbook(
        tmp_path,
        make_planning_play(
            gateway,
            *CREATE_TASKS,
            {"grove.sandbox.sandbox": {"name": "updated", "metadata": {"team": "red"}}},
            {"grove.sandbox.sandbox_snapshot": {"name": "before", "sandbox": "updated"}},
            {"grove.sandbox.sandbox": {"name": "late", "template": "base"}, "check_mode": False},
            make_add_host_task(gateway, "predicted", PREDICTED_ID),
            make_add_host_task(gateway, "late", "late", ansible_python_interpreter=sys.executable),
            make_add_host_task(gateway, "real", "real", ansible_python_interpreter=sys.executable),
            make_add_host_task(gateway, "updated", "updated", ansible_python_interpreter=sys.executable),
        ),
        {
            "hosts": ["predicted", "late", "real", "updated"],
            "tasks": [
                {"name": "ping", "ansible.builtin.ping": {}},
                {"name": "command", "ansible.builtin.command": "true", "check_mode": False},
                {"meta": "reset_connection"},
                {"name": "loop", "ansible.builtin.ping": {"data": "{{ item }}"}, "loop": ["a", "b"]},
                {"name": "local", "ansible.builtin.assert": {"that": "ansible_host is defined"}},
                {
                    "name": "fact",
                    "ansible.builtin.debug": {"msg": "{{ ansible_facts.system | default('unknown') }}"},
                },
            ],
        },
        make_planning_play(
            gateway,
            {"name": "delegated", "ansible.builtin.ping": {}, "delegate_to": "predicted"},
            {"name": "delegated to real", "ansible.builtin.ping": {}, "delegate_to": "real"},
        ),
        core=core,
    )
    for host in ("late", "real", "updated"):
        results = run.get_results(host)
        assert results["ping"].data["ping"] == "pong" and results["command"].data["rc"] == 0, run.output
        assert results["fact"].message == "Linux"
        assert run.read_recap(host)["skipped"] == 0
    predicted = run.get_results("predicted")
    assert [predicted[task].status for task in ("ping", "command", "local", "fact")] == [
        *("skipped", "skipped"),
        *("ok", "ok"),
    ]
    assert predicted["fact"].message == "unknown"
    assert run.read_recap("predicted")["failed"] == run.read_recap("predicted")["unreachable"] == 0
    assert run.read_recap("predicted")["skipped"] == 4
    local = run.get_results("localhost")
    assert local["delegated"].status == "skipped" and SKIPPED in local["delegated"].message
    assert local["delegated to real"].status == "ok"


def test_the_plan_contains_a_sandboxs_tasks_that_run_on_the_control_node(
    gateway: MemoryGateway, tmp_path: Path
) -> None:
    """Root in the sandbox can return anything, so the results of modules that run there are not in the plan."""
    create_sandbox(gateway, "real")
    # This is 127.0.0.1, but does not count as a loopback address.
    remote_url = f"http://2130706433:{gateway.port}"

    def make_task(name: str, gateway_url: str, key: str, **keywords: Any) -> Task:
        options = {"name": name, "sandbox": "{{ ansible_host }}", "gateway_url": gateway_url, "gateway_token": key}
        return {"name": name, "grove.sandbox.sandbox_snapshot": options, **keywords}

    def make_play(host: str, *tasks: Task) -> Play:
        return {"hosts": host, "gather_facts": False, "tasks": list(tasks)}

    run = run_playbook(
        tmp_path,
        make_planning_play(
            gateway,
            *CREATE_TASKS,
            make_add_host_task(gateway, "guest", PREDICTED_ID),
            make_add_host_task(gateway, "real", "real", ansible_python_interpreter=sys.executable),
        ),
        make_play("guest", make_task("before", remote_url, ADMIN_KEY), make_task("skipped", gateway.url, ADMIN_KEY)),
        make_play("real", make_task("at-once", remote_url, EXEC_KEY), make_task("inside", gateway.url, ADMIN_KEY)),
        make_play("guest", make_task("skipped-too", gateway.url, ADMIN_KEY, check_mode=False)),
        plan_file="plan.json",
    )
    statuses = {task: result.status for (task, host), result in run.results.items() if host != "localhost"}
    outside, inside = ("before", "at-once"), ("skipped", "inside", "skipped-too")
    assert statuses == {**dict.fromkeys((*outside, *inside), "ok"), **dict.fromkeys(inside[::2], "skipped")}, run.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [entry["task"] for entry in plan["entries"][1:]] == list(outside), run.output
    assert [re.sub(r"\(.*?\) ", "", problem) for problem in plan["problems"]] == [
        f"the changes of task '{name}' are unknown: its module runs inside a sandbox, which can report anything: "
        "add delegate_to: localhost"
        for name in inside
    ]
    with gateway.client(EXEC_KEY) as client:
        assert client.get("/plans").json() == [], "the callback has not ended the session"


CHANGES: dict[str, tuple[list[Task], str]] = {
    "paused": ([{"sandbox": {"name": "paused", "state": "paused"}}], "the plan pauses sandbox paused, so a run"),
    "removed": (
        [{"sandbox": {"name": "removed", "state": "absent"}}],
        "the plan removes sandbox removed, so a run",
    ),
    "waking": (
        [{"sandbox": {"name": "waking", "state": "paused"}}],
        f"the plan pauses sandbox waking, and this task would resume it: {SKIPPED}",
    ),
    "restarted": (
        [{"sandbox": {"name": "restarted", "state": "paused"}}, {"sandbox": {"name": "restarted", "state": "running"}}],
        f"the plan starts a new machine for sandbox restarted: {SKIPPED}",
    ),
    "rolled-back": (
        [
            {"sandbox_snapshot": {"name": "before", "sandbox": "rolled-back"}},
            {"sandbox_rollback": {"sandbox": "rolled-back", "snapshot": "before", "unless_clean": False}},
        ],
        f"the plan starts a new machine for sandbox rolled-back: {SKIPPED}",
    ),
    "mounted": (
        [
            {"sandbox_volume": {"name": "data", "size_mb": 64}},
            {"sandbox": {"name": "mounted", "volumes": [{"name": "data", "path": "/srv/data"}]}},
        ],
        f"the plan changes the volumes of sandbox mounted: {SKIPPED}",
    ),
    "network": (
        [{"sandbox": {"name": "network", "network": {"allow_internet": False}}}],
        f"the plan changes the network of sandbox network: {SKIPPED}",
    ),
    "replaced": (
        [{"sandbox": {"name": "replaced", "template": "base", "memory_mb": 512, "cold_start": True, "recreate": True}}],
        f"sandbox replaced exists only in the plan: {SKIPPED}",
    ),
}
"""For each name of a sandbox, tasks that plan a change, and a part of the message of a task in the sandbox."""


def test_changes_to_real_sandboxes_are_respected(gateway: MemoryGateway, tmp_path: Path) -> None:
    for name in CHANGES:
        create_sandbox(gateway, name, **({"lifecycle": {"autoResume": True}} if name == "waking" else {}))
    changes = [
        {f"grove.sandbox.{module}": args for module, args in task.items()}
        for tasks, _ in CHANGES.values()
        for task in tasks
    ]
    hosts = [make_add_host_task(gateway, name, name, ansible_python_interpreter=sys.executable) for name in CHANGES]
    guest_play = {
        "hosts": list(CHANGES),
        "gather_facts": False,
        "ignore_unreachable": True,
        "tasks": [
            {"name": "planned", "ansible.builtin.ping": {}},
            {"name": "always in check mode", "ansible.builtin.ping": {}, "check_mode": True},
            {"name": "for real", "ansible.builtin.ping": {}, "check_mode": False},
        ],
    }
    run = run_playbook(tmp_path, make_planning_play(gateway, *changes, *hosts), guest_play)
    for name, (_, message) in CHANGES.items():
        results = run.get_results(name)
        expected_status = "skipped" if SKIPPED in message else "unreachable"
        for task in ("planned", "always in check mode"):
            assert results[task].status == expected_status, (name, run.output)
            assert message in results[task].message, (name, results[task].message)
        assert results["for real"].status == "ok", (name, run.output)


@each_release
@pytest.mark.parametrize("has_plan", [False, True], ids=["without a plan", "with a plan"])
def test_a_check_mode_run_resumes_no_sandbox(core: str, has_plan: bool, gateway: MemoryGateway, tmp_path: Path) -> None:
    """Only a task that must act on the real sandbox resumes it."""
    create_sandbox(gateway, "asleep", lifecycle={"autoResume": True})
    create_sandbox(gateway, "stopped")
    sandbox_paths = ("/sandboxes/asleep", "/sandboxes/stopped")
    with gateway.client() as client:
        for path in sandbox_paths:
            client.post(f"{path}/pause").raise_for_status()
        sandboxes = [client.get(path).json() for path in sandbox_paths]
    tasks = make_guest_tasks(tmp_path)
    hosts = [
        make_add_host_task(gateway, name, name, ansible_python_interpreter=sys.executable)
        for name in ("asleep", "stopped", "missing")
    ]
    local_play = make_planning_play(
        gateway,
        *(CREATE_TASKS if has_plan else ()),
        *hosts,
        {"name": "delegated", "ansible.builtin.ping": {}, "delegate_to": "asleep"},
    )
    ping = {"name": "stopped ping", "ansible.builtin.ping": {}, "ignore_unreachable": True}
    run = run_playbook(
        tmp_path,
        local_play,
        {"hosts": "asleep", "gather_facts": True, "tasks": tasks},
        {"hosts": ["stopped", "missing"], "gather_facts": False, "tasks": [ping]},
        core=core,
    )
    results = run.get_results("asleep")
    assert set(results) == {"Gathering Facts", *(task["name"] for task in tasks)}, run.output
    assert {result.status for result in results.values()} == {"skipped"}, run.output
    message = f"sandbox asleep is paused, and this task would resume it: {SKIPPED}"
    for result in (results["Gathering Facts"], results["command"], run.results["delegated", "localhost"]):
        assert result.status == "skipped" and result.message == message, run.output
    assert not list((tmp_path / "target").iterdir())
    for host, reason in (("stopped", "is paused: resume it first"), ("missing", "not found")):
        (result,) = run.get_results(host).values()
        assert result.status == "unreachable" and reason in result.message, run.output
    assert ("plan session" in run.results["stopped ping", "missing"].message) is has_plan
    with gateway.client() as client:
        assert [client.get(path).json() for path in sandbox_paths] == sandboxes
    real_task = {"name": "for real", "ansible.builtin.command": "true", "check_mode": False}
    run = run_playbook(
        tmp_path, local_play, {"hosts": "asleep", "gather_facts": False, "tasks": [real_task]}, core=core
    )
    assert run.results["for real", "asleep"].status == "ok", run.output
    with gateway.client() as client:
        assert client.get("/sandboxes/asleep").json()["state"] == "running"


def test_a_check_mode_run_does_not_resume_a_sandbox_paused_in_the_meantime(
    gateway: MemoryGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the connection plugin, it looks as if a request would not resume the sandbox."""
    original_shape = shapes.LifecycleShape
    monkeypatch.setattr(shapes, "LifecycleShape", lambda **fields: original_shape(**{**fields, "auto_resume": False}))
    create_sandbox(gateway, "asleep", lifecycle={"autoResume": True})
    with gateway.client() as client:
        client.post("/sandboxes/asleep/pause").raise_for_status()
    host = make_add_host_task(gateway, "asleep", "asleep", ansible_python_interpreter=sys.executable)
    ping = {"name": "ping", "ansible.builtin.ping": {}}
    run = run_playbook(
        tmp_path, make_planning_play(gateway, host), {"hosts": "asleep", "gather_facts": False, "tasks": [ping]}
    )
    result = run.results["ping", "asleep"]
    assert result.status == "unreachable" and "is paused: resume it first" in result.message, run.output
    with gateway.client() as client:
        assert client.get("/sandboxes/asleep").json()["state"] == "paused"


def test_a_real_run_uses_no_plan(gateway: MemoryGateway, tmp_path: Path, session_owners: list[str]) -> None:
    guest_tasks = [
        {"name": "ping", "ansible.builtin.ping": {}},
        {"name": "predicted ping", "ansible.builtin.ping": {}, "check_mode": True},
        {"name": "wait", "ansible.builtin.wait_for_connection": {"timeout": 60}},
    ]
    host = make_add_host_task(gateway, "guest", PREDICTED_ID, ansible_python_interpreter=sys.executable)
    run = run_playbook(
        tmp_path,
        make_planning_play(gateway, *CREATE_TASKS, host),
        {"hosts": "guest", "gather_facts": False, "tasks": guest_tasks},
        options=(),
    )
    assert {result.status for result in run.get_results("guest").values()} == {"ok"}, run.output
    assert len(run.get_results("guest")) == 3 and not session_owners


def test_a_connection_with_a_different_key_is_unreachable(
    gateway: MemoryGateway, tmp_path: Path, session_owners: list[str]
) -> None:
    create_sandbox(gateway, "real")
    create_sandbox(gateway, "gone")
    run = run_playbook(
        tmp_path,
        make_planning_play(
            gateway,
            *CREATE_TASKS,
            {"grove.sandbox.sandbox": {"name": "gone", "state": "absent"}},
            *(
                make_add_host_task(gateway, name, ref, EXEC_KEY, ansible_python_interpreter=sys.executable)
                for name, ref in (("predicted", PREDICTED_ID), ("named", "try"), ("real", "real"))
            ),
        ),
        {"hosts": ["predicted", "named", "real"], "gather_facts": False, "tasks": [{"ansible.builtin.ping": {}}]},
    )
    for host in ("predicted", "named"):
        (result,) = run.get_results(host).values()
        assert result.status == "unreachable" and "use the same gateway and the same key" in result.message, run.output
    (result,) = run.get_results("real").values()
    assert result.status == "ok" and set(session_owners) == {"root", "runner"}


def refuse_route(owner: str) -> None:
    raise NotFound("route", "POST /plans")


def refuse_runner(owner: str) -> None:
    if owner == "runner":
        raise Busy("the limit of 8 plan sessions for the key 'runner' has been reached")


@pytest.mark.parametrize("refuse", [refuse_route, refuse_runner])
def test_without_a_session_real_hosts_are_reached(
    gateway: MemoryGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    original_open = PlanSessions.open

    def open_session(self: PlanSessions, owner: str, run: str) -> Any:
        refuse(owner)
        return original_open(self, owner, run)

    monkeypatch.setattr(PlanSessions, "open", open_session)
    create_sandbox(gateway, "real")
    host = make_add_host_task(gateway, "real", "real", EXEC_KEY, ansible_python_interpreter=sys.executable)
    play = {"hosts": "real", "gather_facts": False, "tasks": [{"ansible.builtin.ping": {}}]}
    run = run_playbook(tmp_path, make_planning_play(gateway, *CREATE_TASKS, host), play)
    (result,) = run.get_results("real").values()
    assert result.status == "ok", run.output


def test_a_check_mode_run_without_planned_changes_opens_no_session(
    gateway: MemoryGateway, tmp_path: Path, session_owners: list[str]
) -> None:
    create_sandbox(gateway, "real")
    inventory = write_inventory(gateway, tmp_path)
    ping = {"hosts": "real", "gather_facts": False, "tasks": [{"ansible.builtin.ping": {}}]}
    run = run_playbook(tmp_path, ping, {**ping, "pre_tasks": [{"meta": "refresh_inventory"}]}, hosts=str(inventory))
    assert run.read_recap("real")["ok"] == 2 and not session_owners, run.output


def write_inventory(gateway: MemoryGateway, directory: Path, token: str = ADMIN_KEY) -> Path:
    inventory = directory / "sandboxes.yml"
    content = {
        "plugin": "grove.sandbox.sandboxes",
        "gateways": [{"url": gateway.url, "token": token}],
        "strict": True,
        "python_interpreter": sys.executable,
        "cache": True,
        "cache_plugin": "ansible.builtin.jsonfile",
        "cache_connection": str(directory / "cache"),
    }
    inventory.write_text(yaml.safe_dump(content))
    return inventory


@each_release
def test_a_refreshed_inventory_shows_the_plan(
    core: str, gateway: MemoryGateway, tmp_path: Path, session_owners: list[str]
) -> None:
    create_sandbox(gateway, "real")
    create_sandbox(gateway, "gone")
    inventory = write_inventory(gateway, tmp_path)
    plays = (
        {"hosts": "gone", "gather_facts": False, "tasks": [{"name": "first parse", "ansible.builtin.ping": {}}]},
        make_planning_play(
            gateway,
            *CREATE_TASKS,
            {"grove.sandbox.sandbox": {"name": "gone", "state": "absent"}},
            {"meta": "refresh_inventory"},
        ),
        {
            "hosts": "template_base",
            "gather_facts": False,
            "tasks": [
                {"name": "show", "ansible.builtin.debug": {"var": "grove_sandbox"}},
                {"name": "ping", "ansible.builtin.ping": {}},
            ],
        },
    )
    run = run_playbook(tmp_path, *plays, core=core, hosts=str(inventory))
    assert run.results["first parse", "gone"].status == "ok" and ("show", "gone") not in run.results, run.output
    shown = run.results["show", "try"].data["grove_sandbox"]
    assert shown["id"].startswith("known-after-apply-") and shown["address"] is None and shown["created_at"] is None
    assert run.results["ping", "try"].status == "skipped" and SKIPPED in run.results["ping", "try"].message
    assert run.results["ping", "real"].status == "ok"
    cached_text = "".join(file.read_text() for file in (tmp_path / "cache").iterdir())
    assert "gone" in cached_text and "known-after-apply" not in cached_text and '"try"' not in cached_text
    session_count = len(session_owners)
    process = ansible_core_versions.run_command(core, "inventory", "-i", inventory, "--list", cwd=tmp_path)
    assert set(json.loads(process.stdout)["_meta"]["hostvars"]) == {"real", "gone"}
    assert len(session_owners) == session_count > 0
    run = run_playbook(tmp_path, *plays, core=core, hosts=str(inventory), options=())
    assert run.results["ping", "try"].status == "ok" and ("show", "gone") not in run.results, run.output
