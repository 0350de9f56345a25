"""Test that a run that applies a saved plan does exactly what the plan contains."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import Conflict
from tests.collection.runner import HERE, Result, Target, Task, check_plan
from tests.collection.test_plan_sessions import PLAY, make_task
from tests.support import ansible_core_versions
from tests.support.memory_gateway import MemoryGateway
from tests.support.plan_files import sign
from tests.support.samples import mark_slow_except

ENABLED_CALLBACKS = {"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"}


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def make_plan(plan_target: Target, plan_path: Path, *tasks: Task, **keywords: Any) -> list[Result]:
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    results = plan_target.play(*tasks, options=("--check", "--diff"), environment=environment, **keywords)
    assert json.loads(plan_path.read_text())["problems"] == [], plan_target.output
    return results


def apply_plan(plan_target: Target, plan_path: Path, *tasks: Task, **keywords: Any) -> list[Result]:
    return plan_target.play(
        *tasks, options=("--diff",), environment={"GROVE_SANDBOX_APPLY": str(plan_path)}, **keywords
    )


def read_state(plan_gateway: MemoryGateway) -> list[Any]:
    with plan_gateway.client() as client:
        return [client.get(path).json() for path in ("/sandboxes", "/snapshots", "/volumes", "/templates")]


BOX = make_task("sandbox", name="box", template="base")


@pytest.mark.parametrize("strategy", ["linear", "free"])
def test_a_play_is_applied_as_planned(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path, strategy: str
) -> None:
    predicted = make_plan(plan_target, plan_path, *PLAY, keywords={"strategy": strategy})
    actual = apply_plan(plan_target, plan_path, *PLAY, keywords={"strategy": strategy})
    for number, (prediction, result) in enumerate(zip(predicted, actual, strict=True)):
        check_plan(prediction, result, f"task {number}")
    state = read_state(plan_gateway)
    repeated = apply_plan(plan_target, plan_path, BOX, make_task("sandbox", name="box", metadata={"team": "blue"}))
    assert not repeated[0]["changed"] and "this task changed nothing" in repeated[1]["msg"]
    assert read_state(plan_gateway) == state


HOSTS = "h1,h2"
BOX_OF_HOST = make_task("sandbox", name="of-{{ inventory_hostname }}", template="base")
CAPTURE_OF_HOST = make_task("sandbox_snapshot", name="at-{{ inventory_hostname }}", sandbox="{{ sandbox.sandbox.id }}")
PLAYS_BY_FEATURE: dict[str, list[dict[str, Any]]] = {
    "host_pinned": [{"strategy": "host_pinned", "tasks": [BOX_OF_HOST, CAPTURE_OF_HOST]}],
    "serial": [{"serial": 1, "tasks": [BOX_OF_HOST, CAPTURE_OF_HOST]}],
    "delegate_to": [{"tasks": [BOX_OF_HOST, {**CAPTURE_OF_HOST, "delegate_to": "h1"}]}],
    "include_role": [{"tasks": [{"include_role": {"name": "box"}}, CAPTURE_OF_HOST]}],
    "import_role": [{"tasks": [{"import_role": {"name": "box"}}, CAPTURE_OF_HOST]}],
    "include_tasks": [{"tasks": [{"include_tasks": "box.yml"}, CAPTURE_OF_HOST]}],
    "two plays": [{"tasks": [BOX_OF_HOST]}, {"tasks": [CAPTURE_OF_HOST]}],
    "import_playbook": [{"import_playbook": "first.yml"}, {"tasks": [CAPTURE_OF_HOST]}],
}


@pytest.mark.parametrize("feature", mark_slow_except(("serial", "import_playbook"), PLAYS_BY_FEATURE))
def test_tasks_on_two_hosts_share_a_session_and_a_plan(plan_target: Target, plan_path: Path, feature: str) -> None:
    plan_target.write_file("box.yml", [BOX_OF_HOST])
    plan_target.write_file("roles/box/tasks/main.yml", [BOX_OF_HOST])
    plan_target.write_playbook("first.yml", {"hosts": HOSTS, "tasks": [BOX_OF_HOST]})
    # A later play finds what the tasks of both hosts have planned.
    fork = make_task("sandbox_fork", snapshot="at-{{ item }}", names=["fork-{{ item }}"])
    last = {"hosts": "h2", "tasks": [{**fork, "loop": HOSTS.split(",")}]}
    plays = [play if "import_playbook" in play else {"hosts": HOSTS, **play} for play in PLAYS_BY_FEATURE[feature]]
    for options, environment in (
        (("--check",), {"GROVE_SANDBOX_PLAN_FILE": str(plan_path)}),
        ((), {"GROVE_SANDBOX_APPLY": str(plan_path)}),
    ):
        results = plan_target.run(
            *plays, last, options=("-i", f"{HOSTS},", *options), environment={**ENABLED_CALLBACKS, **environment}
        )
        changed = [result["changed"] for result in results if "sandbox" in result or "snapshot" in result]
        assert changed == [True] * 4 and results[-1]["changed"], plan_target.output
        assert plan_target.output.count("failed=0") == 2, plan_target.output
    assert "All changes in the plan were made" in plan_target.output, plan_target.output


def test_all_ways_to_run_a_task_are_planned_and_applied(plan_target: Target, plan_path: Path) -> None:
    loop = {
        "grove.sandbox.sandbox_snapshot": {"name": "{{ item }}", "sandbox": "box"},
        "loop": ["one", "two"],
        "register": "captures",
    }
    module_task = {"grove.sandbox.sandbox": {"name": "box", "metadata": {"a": "b"}}, "environment": {"NOTHING": "x"}}
    forks = {
        "grove.sandbox.sandbox_fork": {"snapshot": "{{ captures.results[1].snapshot.id }}", "names": ["fork"]},
        "register": "forks",
    }
    retried_task = {
        "grove.sandbox.sandbox": {"name": "{{ forks.sandbox.id }}", "state": "paused"},
        "retries": 3,
        "delay": 0,
        "until": "{{ true }}",
    }
    play = (BOX, loop, module_task, forks, retried_task)
    make_plan(plan_target, plan_path, *play)
    entries = json.loads(plan_path.read_text())["entries"]
    assert [[action["verb"] for action in entry["actions"]] for entry in entries] == [
        ["create"],
        ["capture"],
        ["capture"],
        ["update"],
        ["fork"],
        ["pause"],
    ]
    for result in apply_plan(plan_target, plan_path, *play):
        assert not result.get("failed"), result


def test_another_clients_change_stops_the_task_before_it_does_anything(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path
) -> None:
    plan_target.play(BOX)
    play = (
        make_task("sandbox_snapshot", name="before", sandbox="box"),
        make_task("sandbox_fork", snapshot="before", count=2, name_prefix="try"),
    )
    make_plan(plan_target, plan_path, *play)
    with plan_gateway.client() as client:
        client.patch("/sandboxes/box", json={"metadata": {"touched": "yes"}}).raise_for_status()
    state = read_state(plan_gateway)
    first, second = apply_plan(plan_target, plan_path, *play)
    assert "sandbox 'box' has changed since the plan was made" in first["msg"]
    assert first["failure"]["kind"] == "not_planned" and second["failed"]
    assert read_state(plan_gateway) == state


def test_a_foreign_snapshot_in_place_of_the_planned_one_stops_the_host(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path
) -> None:
    """Otherwise the next task would remove a sandbox whose state nobody has approved."""
    plan_target.play(BOX)
    play = (make_task("sandbox_snapshot", name="keep", sandbox="box"), make_task("sandbox", name="box", state="absent"))
    make_plan(plan_target, plan_path, *play)
    with plan_gateway.client() as client:
        client.post("/sandboxes/box/snapshots", json={"name": "keep"}).raise_for_status()
    state = read_state(plan_gateway)
    for result in apply_plan(plan_target, plan_path, *play):
        assert result["failure"]["kind"] == "not_planned", result
    assert read_state(plan_gateway) == state


def test_many_hosts_change_one_sandbox(plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path) -> None:
    """The hosts run in a different order from the check-mode run. Afterwards, the callback ends the applied run."""
    plan_target.play(BOX)
    hosts = ",".join(f"h{number}" for number in range(6))
    task = {"grove.sandbox.sandbox_snapshot": {"name": "by-{{ inventory_hostname }}", "sandbox": "box"}}
    play = {"hosts": hosts, "tasks": [task]}
    options = ("-i", f"{hosts},")
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    plan_target.run(play, options=(*options, "--check"), environment=environment)
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan_path)}
    results = plan_target.run({**play, "order": "reverse_inventory"}, options=options, environment=environment)
    assert [result["changed"] for result in results] == [True] * 6, plan_target.output
    with plan_gateway.client() as client:
        assert client.get("/applied-runs").json() == []


def test_any_of_the_hosts_that_declare_the_same_objects_can_create_them(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path
) -> None:
    """The first host of the check-mode run is the last one in the run, so it uses objects of the other host."""
    last_host = "{{ ansible_check_mode | ternary('h2', 'h1') }}"
    wait = {
        "ansible.builtin.command": "sleep {{ 3 if inventory_hostname == last_host else 0 }}",
        "vars": {"last_host": last_host},
        "check_mode": False,
    }
    tasks = [
        wait,
        BOX,
        make_task("sandbox_snapshot", name="before", sandbox="{{ sandbox.sandbox.id }}"),
        {**make_task("sandbox", name="box", metadata={"new": "yes"}), "when": "sandbox_snapshot is changed"},
        make_task("sandbox_fork", snapshot="before", names=["of-{{ inventory_hostname }}"]),
    ]
    play = {"hosts": "h1,h2", "strategy": "free", "tasks": tasks}
    options = ("-i", "h1,h2,")
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    plan_target.run(play, options=(*options, "--check"), environment=environment)
    entries = json.loads(plan_path.read_text())["entries"]
    assert [entry["host"] for entry in entries if entry["created"].keys() & {"box", "before"}] == ["h1", "h1"]
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan_path)}
    plan_target.run(play, options=options, environment=environment)
    assert "All changes in the plan were made" in plan_target.output, plan_target.output
    assert plan_target.output.count("failed=0") == 2, plan_target.output


def test_hosts_create_the_same_objects_at_the_same_time(plan_target: Target, plan_path: Path) -> None:
    boxes = make_task("sandbox", name=[f"box{number}" for number in range(4)], template="base")
    tasks = [boxes, make_task("sandbox_snapshot", name="before", sandbox="box1")]
    hosts = ",".join(f"h{number}" for number in range(5))
    play, options = {"hosts": hosts, "tasks": tasks}, ("-i", f"{hosts},")
    for mode, environment in (
        ("--check", {"GROVE_SANDBOX_PLAN_FILE": str(plan_path)}),
        ("--diff", {"GROVE_SANDBOX_APPLY": str(plan_path)}),
    ):
        results = plan_target.run(play, options=(*options, mode), environment={**ENABLED_CALLBACKS, **environment})
        assert sorted(result["changed"] for result in results) == [False] * 8 + [True] * 2, plan_target.output


def test_a_plan_can_cover_several_gateways(plan_target: Target, plan_path: Path) -> None:
    """Their plan sessions and applied runs have the same ids."""
    other = MemoryGateway(plan_path.parent, log={"level": "warning"})
    try:
        other.build_template("base")
        urls = [plan_target.url, other.unix_url]
        create = {
            "grove.sandbox.sandbox": {"name": "box", "template": "base", "gateway_url": "{{ item }}"},
            "loop": urls,
            "register": "boxes",
        }
        update = {
            "grove.sandbox.sandbox": {
                "name": "{{ item.1.sandbox.id }}",
                "metadata": {"a": "b"},
                "gateway_url": "{{ item.0 }}",
            },
            "loop": "{{ urls | zip(boxes.results) }}",
        }
        values = {"PEER": "{{ boxes.results[0].sandbox.id }}"}
        introduce = make_task(
            "sandbox", name="friend", template="base", env=values, metadata=values, gateway_url=other.unix_url
        )
        keywords = {"vars": {"urls": urls}}
        make_plan(plan_target, plan_path, create, update, introduce, keywords=keywords)
        *results, friend = apply_plan(plan_target, plan_path, create, update, introduce, keywords=keywords)
        for result in results:
            assert [item["changed"] for item in result["results"]] == [True, True], plan_target.output
        assert friend["changed"], plan_target.output
    finally:
        other.end()


def test_names_can_contain_the_ids_of_new_sandboxes(plan_target: Target, plan_path: Path) -> None:
    ident = "{{ box.sandbox.id }}"
    shared_volume = [{"name": "shared", "path": "/srv/shared"}]
    tasks = [
        {**BOX, "register": "box"},
        make_task("sandbox_snapshot", name=f"snap-{ident}", sandbox="box"),
        make_task("sandbox_snapshot", name=f"again-{ident}", sandbox="box", when_changed=True),
        make_task("sandbox_fork", snapshot=f"snap-{ident}", names=[f"fork-{ident}"]),
        make_task("sandbox", name=f"fork-{ident}", metadata={"a": "b"}),
        make_task("sandbox_fork", sandbox=f"fork-{ident}", names=[f"{ident}-copy"]),
        make_task("sandbox_rollback", sandbox=f"{ident}-copy", snapshot=f"snap-{ident}", unless_clean=False),
        make_task("sandbox_volume", name=[f"data-{ident}", "shared"], size_mb=64, snapshots=[f"v-{ident}"]),
        make_task("sandbox_volume", name=f"data-{ident}", size_mb=128),
        make_task("sandbox_volume", name="clone", from_snapshot=f"data-{ident}@v-{ident}", size_mb=128),
        make_task("sandbox_volume", name=f"data-{ident}", size_mb=192),
        make_task("sandbox", name=f"first-{ident}", template="base", volumes=shared_volume),
        make_task("sandbox", name="second", template="base", volumes=shared_volume),
        make_task("sandbox", name=[f"{ident}-copy", f"fork-{ident}"], state="absent"),
        make_task("sandbox_snapshot", name=f"snap-{ident}", state="absent", when_unused=True),
    ]
    results = make_plan(plan_target, plan_path, *tasks)
    assert not [each["msg"] for each in results if each.get("failed")]
    results = apply_plan(plan_target, plan_path, *tasks)
    assert not [each["msg"] for each in results if each.get("failed")]
    assert [number for number, each in enumerate(results) if not each["changed"]] == [2], "the box has not diverged"


def test_a_skipped_task_is_not_said_to_be_undone(plan_target: Target, plan_path: Path) -> None:
    change = make_task("sandbox", name="box", template="base", metadata={"a": "b"})
    tasks = [{**BOX, "tags": "first"}, {**change, "tags": "second"}]
    make_plan(plan_target, plan_path, *tasks)
    (result,) = plan_target.run(
        {"tasks": [{"ignore_errors": True, **task} for task in tasks]},
        options=("--tags", "second"),
        environment={"GROVE_SANDBOX_APPLY": str(plan_path)},
    )
    assert "sandbox 'box' does not exist, because this run has not carried out the task" in result["msg"], result


@pytest.mark.parametrize("strategy", ["linear", "free"])
def test_hosts_can_be_named_by_the_ids_of_new_sandboxes(plan_target: Target, plan_path: Path, strategy: str) -> None:
    host = {"name": "on-{{ item.id }}", "groups": "new", "ansible_connection": "local"}
    create = [
        make_task("sandbox", name=["one", "two"], template="base"),
        {"ansible.builtin.add_host": host, "loop": "{{ sandbox.sandboxes }}"},
    ]
    own_id = "{{ inventory_hostname[3:] }}"
    change = [
        make_task("sandbox", name=own_id, metadata={"host": "{{ inventory_hostname }}"}),
        make_task("sandbox", name=own_id, state="paused"),
    ]
    plays = ({"tasks": create}, {"hosts": "new", "strategy": strategy, "tasks": change})
    plan_target.run(
        *plays, options=("--check",), environment={**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    )
    results = plan_target.run(*plays, environment={**ENABLED_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan_path)})
    assert [result["changed"] for result in results] == [True] * 6, plan_target.output
    assert "All changes in the plan were made" in plan_target.output


def test_the_plan_can_be_an_extra_variable(plan_target: Target, plan_path: Path) -> None:
    make_plan(plan_target, plan_path, BOX)
    variables = plan_path.with_name("variables.json")
    variables.write_text(json.dumps({"grove_sandbox_plan": json.loads(plan_path.read_text())}))
    capture = make_task("sandbox_snapshot", name="before", sandbox="box")
    created, refused = plan_target.play(BOX, capture, options=("-e", f"@{variables}"))
    assert created["changed"] and "does not contain" in refused["msg"]


@pytest.mark.parametrize("core", ansible_core_versions.RELEASES)
def test_a_plan_can_be_applied_in_another_checkout(plan_target: Target, plan_path: Path, core: str) -> None:
    plan_target.write_file("shared/mk/tasks/main.yml", [BOX])
    for checkout in ("one", "deep/er/two"):
        plan_target.write_file(f"{checkout}/tasks/cat.yml", [make_task("sandbox", name="cat", template="base")])
        plan_target.write_playbook(f"{checkout}/plays/import/site.yml", {"roles": ["mk"]})
        plan_target.write_playbook(
            f"{checkout}/plays/site.yml", {"tasks": [{"ansible.builtin.import_tasks": "../tasks/cat.yml"}]}
        )
    environment = {
        "ANSIBLE_ROLES_PATH": str(plan_target.scratch / "shared"),
        **ansible_core_versions.build_release_environment(core),
    }
    plan_target.run_playbooks(
        *("one/plays/site.yml", "one/plays/import/site.yml"),
        options=("--check",),
        environment={**environment, **ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)},
    )
    entries = json.loads(plan_path.read_text())["entries"]
    assert [entry["path"] for entry in entries] == ["../tasks/cat.yml:3", "role://mk/tasks/main.yml:3"]
    created = plan_target.run_playbooks(
        *("deep/er/two/plays/site.yml", "deep/er/two/plays/import/site.yml"),
        environment={**environment, "GROVE_SANDBOX_APPLY": str(plan_path)},
    )
    assert [result["changed"] for result in created] == [True, True], plan_target.output


FAULTS = {
    "truncated": "PLAN is truncated, or it is not JSON. Make a new plan",
    "edited": "PLAN has been edited since it was made: its digest does not match. Make a new plan",
    "missing": "PLAN does not exist. Make it first",
    "expired": "PLAN expired at 2020-01-02T00:00:00Z. Make a new plan",
    "newer": "PLAN has format 4, but this release reads only format 3. Use the release that made the plan",
    "incomplete": "the plan is incomplete (",
    "for another gateway": "the plan was made for a different gateway: this task changed nothing",
}
"""The beginning of the message, in which PLAN stands for the plan with its path."""


@pytest.mark.parametrize("fault", mark_slow_except(("edited", "incomplete"), FAULTS))
def test_a_faulty_plan_stops_every_task(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path, tmp_path_factory: Any, fault: str
) -> None:
    failing_task = make_task("sandbox", name="box", template="missing")
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    tasks = (BOX, {**failing_task, "ignore_errors": False}) if fault == "incomplete" else (BOX,)
    plan_target.play(*tasks, options=("--check",), environment=environment)
    text = plan_path.read_text()
    document = {key: value for key, value in json.loads(text).items() if key != "digest"}
    if fault == "truncated":
        plan_path.write_text(text[:-20])
    elif fault == "edited":
        plan_path.write_text(text.replace('"box"', '"cat"'))
    elif fault == "missing":
        plan_path.unlink()
    elif fault == "expired":
        times = {"created_at": "2020-01-01T00:00:00Z", "expires_at": "2020-01-02T00:00:00Z"}
        plan_path.write_bytes(sign({**document, **times}))
    elif fault == "newer":
        plan_path.write_bytes(sign({**document, "format": 4}))
    with contextlib.ExitStack() as stack:
        if fault == "for another gateway":
            plan_gateway = MemoryGateway(tmp_path_factory.mktemp("other"), log={"level": "warning"})
            stack.callback(plan_gateway.end)
            plan_gateway.build_template("base")
            plan_target = Target(plan_gateway.unix_url, plan_target.scratch)
        state = read_state(plan_gateway)
        (result,) = apply_plan(plan_target, plan_path, BOX)
        sentence = FAULTS[fault].replace("PLAN", f"the plan {str(plan_path)!r}")
        assert result["failed"] and result["msg"].startswith(sentence), result
        assert read_state(plan_gateway) == state


def test_apply_is_refused_where_it_cannot_be_enforced(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path
) -> None:
    make_plan(plan_target, plan_path, BOX)
    environment = {"GROVE_SANDBOX_APPLY": str(plan_path)}
    state = read_state(plan_gateway)
    (result,) = plan_target.play(BOX, options=("--check",), environment=environment)
    assert "a check-mode run cannot apply a plan" in result["msg"]
    (result,) = plan_target.play({**BOX, "async": 60, "poll": 1}, environment=environment)
    assert "async" in result["msg"]
    assert read_state(plan_gateway) == state


NO_LOG_TASKS: dict[str, tuple[Task, bool]] = {
    "changes": (make_task("sandbox", name="box", template="base", metadata={"a": "hidden"}), True),
    "refused": (make_task("sandbox_snapshot", name="old", sandbox="source", description="new"), True),
    "unreachable gateway": (make_task("sandbox", name="box", gateway_url="unix:///hidden.sock"), True),
    "unexpected refusal": (
        make_task("sandbox_rollback", sandbox="source-hidden", snapshot="old", backup_name="old"),
        True,
    ),
    "no changes": (make_task("sandbox", name="hidden", state="absent"), False),
}
"""Tasks with the word "hidden" in what the plan must not contain, and whether a run might change something or fail."""


@pytest.mark.parametrize("kind", NO_LOG_TASKS)
def test_the_plan_contains_nothing_of_a_task_with_no_log(plan_target: Target, plan_path: Path, kind: str) -> None:
    task, is_problem = NO_LOG_TASKS[kind]
    plan_target.play(
        make_task("sandbox", name=["source", "source-hidden"], template="base"),
        make_task("sandbox_snapshot", name="old", sandbox="source", description="hidden"),
        make_task("sandbox_rollback", sandbox="source-hidden", snapshot="old"),
    )
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    plan_target.play({**task, "no_log": True}, options=("--check",), environment=environment)
    problems = json.loads(plan_path.read_text())["problems"]
    assert len(problems) == is_problem and all("it has no_log" in problem for problem in problems), problems
    table = re.sub("(?s).*PLAY RECAP", "", plan_target.output)
    assert "hidden" not in plan_path.read_text() + table, table
    if not is_problem:
        (result,) = apply_plan(plan_target, plan_path, {**task, "no_log": True})
        assert not result["changed"] and not result.get("failed"), plan_target.output


def test_an_asynchronous_task_makes_the_plan_incomplete(plan_target: Target, plan_path: Path) -> None:
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    plan_target.play({**BOX, "async": 60, "poll": 1}, options=("--check",), environment=environment)
    (problem,) = json.loads(plan_path.read_text())["problems"]
    assert "asynchronous" in problem and "play.yml" in problem


PACKAGE: Task = {"ansible.builtin.package": {"use": "grove.sandbox.sandbox", "name": "box", "template": "base"}}
"""A task whose action starts a module of the collection without the module's own action plugin."""


@pytest.mark.parametrize(
    "source",
    mark_slow_except(
        ("extra variable", "no plan"),
        ["environment", "configuration file", "extra variable", "check-mode run", "no plan"],
    ),
)
def test_a_module_without_its_action_plugin_changes_nothing(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path, source: str
) -> None:
    make_plan(plan_target, plan_path, BOX)
    options: tuple[str, ...] = ()
    environment = {}
    if source == "environment":
        environment = {"GROVE_SANDBOX_APPLY": str(plan_path)}
    elif source == "configuration file":
        configuration = plan_path.with_name("ansible.cfg")
        configuration.write_text(f"[grove_sandbox]\napply = {plan_path}\n")
        environment = {"ANSIBLE_CONFIG": str(configuration)}
    elif source == "extra variable":
        variables = plan_path.with_name("variables.json")
        variables.write_text(json.dumps({"grove_sandbox_plan": plan_path.read_text()}))
        options = ("-e", f"@{variables}")
    elif source == "check-mode run":
        options = ("--check",)
    state = read_state(plan_gateway)
    (result,) = plan_target.play(PACKAGE, options=options, environment=environment)
    assert "started without its action plugin" in result["msg"] and result["failure"]["kind"] == "invalid", result
    assert read_state(plan_gateway) == state
    info_task = {"ansible.builtin.package": {"use": "grove.sandbox.sandbox_info", "name": "box"}}
    (result,) = plan_target.play(info_task, options=options, environment=environment)
    assert result["sandboxes"] == [] and not result.get("failed"), result


@pytest.mark.parametrize(
    ("change", "has_callback"),
    [
        ("edited", False),
        ("replaced", True),
        pytest.param("edited", True, marks=pytest.mark.slow),
        pytest.param("replaced", False, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_changes_during_the_run_stops_the_next_task(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path, change: str, has_callback: bool
) -> None:
    play = (BOX, make_task("sandbox_snapshot", name="before", sandbox="box"))
    make_plan(plan_target, plan_path, *play)
    text = plan_path.read_text()
    other = plan_path.with_name("other.json")
    if change == "edited":
        other.write_text(text.replace('"before"', '"behind"'))
    else:
        # Plans that are made within one second are equal.
        while plan_path.read_text() == text:
            make_plan(plan_target, plan_path, *play)
        other.write_text(plan_path.read_text())
        plan_path.write_text(text)
    assert other.read_text() != text
    copy_plan = {"ansible.builtin.command": {"argv": ["cp", str(other), str(plan_path)]}}
    created, _, refused = plan_target.play(
        play[0],
        copy_plan,
        play[1],
        environment={"GROVE_SANDBOX_APPLY": str(plan_path), **(ENABLED_CALLBACKS if has_callback else {})},
    )
    assert created["changed"] and refused["failed"], plan_target.output
    assert ("has been edited" if change == "edited" else "replaced") in refused["msg"]
    assert "In the plan, but not made:" not in plan_target.output
    with plan_gateway.client() as client:
        assert client.get("/snapshots").json() == []


@pytest.mark.parametrize("has_callback", [False, True])
def test_the_callback_loads_the_plan_for_all_tasks(plan_target: Target, plan_path: Path, has_callback: bool) -> None:
    make_plan(plan_target, plan_path, BOX)
    environment = {"GROVE_SANDBOX_APPLY": str(plan_path), "ANSIBLE_ACTION_PLUGINS": str(HERE / "plugins" / "action")}
    (result,) = plan_target.play(
        {"loaded_plans": {}}, environment={**environment, **(ENABLED_CALLBACKS if has_callback else {})}
    )
    assert result["paths"] == [str(plan_path)] * has_callback


def test_the_callback_lists_changes_that_were_not_needed(plan_target: Target, plan_path: Path) -> None:
    plan_target.play(BOX, make_task("sandbox_snapshot", name="golden", sandbox="box"))
    roll_back = make_task("sandbox_rollback", sandbox="box", snapshot="golden", backup_name="before")
    make_plan(plan_target, plan_path, roll_back)
    assert "Plan: 1 to create, 1 to roll back" in plan_target.output, plan_target.output
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan_path)}
    (result,) = plan_target.play(roll_back, environment=environment)
    assert not result["changed"] and "All changes in the plan were made" not in plan_target.output, plan_target.output
    title = "In the plan, but not needed, because the sandboxes had not diverged:"
    entry = r"target: grove\.sandbox\.sandbox_rollback \(play\.yml:\d+\): box, before"
    assert re.search(rf"{title}\n  {entry}\n", plan_target.output), plan_target.output


def test_the_callback_lists_omitted_changes_at_the_end_of_the_run(
    plan_gateway: MemoryGateway, plan_target: Target, plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that fails for one of its objects has not made all of its changes."""
    plan_target.play(make_task("sandbox", name=["one", "two"], template="base"))
    update = make_task("sandbox", name=["one", "two"], metadata={"a": "b"}, continue_on_error=True)
    for name, task in (("first.yml", BOX), ("second.yml", {**update, "ignore_errors": True})):
        plan_target.write_playbook(name, {"tasks": [task]})
    names = ("first.yml", "second.yml")
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
    plan_target.run_playbooks(*names, options=("--check",), environment=environment)
    environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan_path)}
    sandboxes = plan_gateway.engine.sandboxes
    original_update = sandboxes.update

    async def update_one(ref: str, **fields: Any) -> Any:
        if sandboxes.get(ref).name == "two":
            raise Conflict("this sandbox cannot change now")
        return await original_update(ref, **fields)

    monkeypatch.setattr(sandboxes, "update", update_one)
    plan_target.run_playbooks(*names, environment=environment)
    assert plan_target.output.count("In the plan, but not made:") == 1, plan_target.output
    _, _, omitted = plan_target.output.partition("In the plan, but not made:\n")
    assert re.fullmatch(r"target: grove\.sandbox\.sandbox \(second\.yml:\d+\): two", omitted.strip()), (
        plan_target.output
    )


@pytest.mark.parametrize("core", ansible_core_versions.RELEASES)
def test_a_task_that_fails_before_its_action_makes_the_plan_incomplete(
    plan_target: Target, plan_path: Path, core: str
) -> None:
    """Its condition uses a value that only the run can know. The failure is ignored or rescued."""
    address = "{{ sandbox.sandbox.address | length }}"

    def make_other(name: str, **keywords: Any) -> Task:
        return {**make_task("sandbox", name=name, template="base"), "name": name, "register": "other", **keywords}

    tasks = [
        {**BOX, "name": "known"},
        make_other("condition", when=f"{address[3:-3]} > 0"),
        make_other("item", loop=["1"], vars={"length": address}, when="length | int > 0"),
        make_other("hidden", loop=address, no_log=True),
        make_other("failed-by-the-playbook", failed_when=True),
        {**make_task("sandbox_info", name=[address]), "name": "without changes"},
        {
            "block": [make_other("rescued", vars={"length": address}, when="length | int > 0", ignore_errors=False)],
            "rescue": [{"ansible.builtin.debug": {}}],
        },
    ]
    environment = {
        **ENABLED_CALLBACKS,
        **ansible_core_versions.build_release_environment(core),
        "GROVE_SANDBOX_PLAN_FILE": str(plan_path),
    }
    play = {"tasks": [{"ignore_errors": True, **task} for task in tasks]}
    plan_target.run(play, options=("--check",), environment=environment)
    problems = json.loads(plan_path.read_text())["problems"]
    names = [match[1] for each in problems if (match := re.match("the changes of task '([^']+)' .play.yml:", each))]
    assert names == ["condition", "item", "hidden", "rescued"], plan_target.output
    assert problems[2].endswith(") are unknown: it has no_log, so its plan must not be saved"), problems
