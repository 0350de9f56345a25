"""Test the ``plan`` callback in real runs. A test action writes the journal of these runs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_file

from tests.collection.runner import HERE, Target, Task
from tests.support import ansible_core_versions
from tests.support.ansible_core_versions import NEWEST, OLDEST

GATEWAY_ID = "0123456789abcdef"
FAILING_TASK: Task = {"ansible.builtin.fail": {"msg": "no"}}
UNREACHABLE_TASK: Task = {
    "ansible.builtin.ping": {},
    "vars": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1},
}
TASK_WITHOUT_RESULT: Task = {"ansible.builtin.meta": "noop"}


def make_journal_task(name: str, line: int, *, removes: bool = False) -> Task:
    """Return a task that predicts the creation or the removal of a sandbox."""
    entry = {
        "host": "target",
        "task": f"Declare {name}",
        "path": f"play.yml:{line}",
        "gateway": GATEWAY_ID,
        "gateway_url": "unix:///run/gateway.sock",
        "actions": [
            {
                "verb": "remove" if removes else "create",
                "changes": [
                    {
                        "kind": "sandbox",
                        "name": name,
                        "before": {"cpus": 1} if removes else None,
                        "after": None if removes else {"cpus": 1},
                    }
                ],
                "request": {"name": name},
            }
        ],
        "reads": {f"/sandboxes/{name}": ""},
        "created": {} if removes else {name: "known-after-apply-0001"},
        "costs": {"memory_mb": -256 if removes else 512},
        "unknown": [],
        "failure": None,
    }
    return {"journal": {"entry": json.dumps(entry)}}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target("unix:///run/gateway.sock", tmp_path)


def run(target: Target, *tasks: Task, check: bool = True, **variables: str) -> str:
    """Run the tasks with the callback, and return the output after the recap."""
    environment = {
        "ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan",
        "ANSIBLE_ACTION_PLUGINS": str(HERE / "plugins" / "action"),
        **variables,
    }
    target.play(*tasks, options=("--check",) if check else (), environment=environment)
    return re.sub(r"(?s).*PLAY RECAP[^\n]*\n[^\n]*\n", "", target.output).strip()


TABLE = """\
Gateway unix:///run/gateway.sock
  sandboxes
    + box  Declare box (play.yml:3)  512 MiB memory
    - old  Declare old (play.yml:9)  -256 MiB memory

Plan: 1 to create, 1 to remove; 256 MiB of memory."""
TASKS = (make_journal_task("box", 3), make_journal_task("old", 9, removes=True))


def test_a_check_mode_run_prints_and_saves_its_plan(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output = run(target, *TASKS, GROVE_SANDBOX_PLAN_FILE=str(path), GROVE_SANDBOX_PLAN_LIFETIME="7200")
    document = _plan_file.load(str(path))
    assert document["playbooks"] == ["play.yml"] and document["problems"] == []
    assert document["gateways"] == {GATEWAY_ID: "unix:///run/gateway.sock"}
    assert [entry["task"] for entry in document["entries"]] == ["Declare box", "Declare old"]
    lifetime = _plan_file._parse_time(document["expires_at"]) - _plan_file._parse_time(document["created_at"])
    assert lifetime.total_seconds() == 7200
    assert output == (
        f"{TABLE}\n\nThe plan is in {path}. Its digest begins with {document['digest'][:12]}.\n"
        f"It can be applied until {document['expires_at']}."
    )


def test_a_run_without_check_mode_prints_and_saves_nothing(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an old plan")
    assert run(target, *TASKS, check=False, GROVE_SANDBOX_PLAN_FILE=str(path)) == ""
    assert path.read_text() == "an old plan"


def test_a_check_mode_run_without_changes_prints_one_line(target: Target) -> None:
    assert run(target, {"ansible.builtin.debug": {}}) == "The plan contains no changes."


def test_a_check_mode_run_whose_changes_are_unknown_says_why(target: Target) -> None:
    """The items of a loop have the same problem."""
    problem = "the changes of task 'Hide it' (play.yml:3) are unknown: it has no_log, so its plan must not be saved"
    task = {"journal": {"entry": json.dumps({"task": "Hide it", "path": "play.yml:3", "problem": problem})}}
    output = run(target, {**task, "loop": [1, 2]})
    assert output == f"The plan contains no changes.\n\nThe plan is incomplete:\n  {problem}"


def test_skipped_tasks_that_could_change_something_are_listed(target: Target) -> None:
    """The run carries them out if their conditions depend on results that only the run has."""
    skipped = {"name": "Keep it", "when": False, "grove.sandbox.sandbox_snapshot": {"name": "s", "sandbox": "a"}}
    looped = {
        "name": "Fork it",
        "when": "item > 1",
        "loop": [1, 2],
        "grove.sandbox.sandbox_fork": {"snapshot": "s", "names": ["a"], "gateway_url": "unix:///nowhere"},
        "ignore_errors": True,
    }
    harmless = {"when": False, "grove.sandbox.sandbox_info": {}}
    title = "Skipped, so not in the plan. The run may find that their conditions are true:"
    for check, titles in ((True, [title]), (False, [])):
        target.run(
            {"tasks": [skipped, looped, harmless]},
            options=("--check",) if check else (),
            environment={"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"},
        )
        assert re.findall(title, target.output) == titles, target.output
        lines = re.findall(r"^  (\w+ it) \(play\.yml:\d+\) on target$", target.output, re.MULTILINE)
        assert lines == ["Keep it", "Fork it"] * check


def test_options_can_also_come_from_the_configuration_file(target: Target, tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("[grove_sandbox]\nplan_file = from-ini.json\nplan_lifetime = 60\n")
    assert "It can be applied until " in run(target, TASKS[0], ANSIBLE_CONFIG=str(tmp_path / "ansible.cfg"))
    assert (tmp_path / "from-ini.json").exists()


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ((TASKS[0], {**FAILING_TASK, "ignore_errors": False}), "a task failed on host target"),
        ((TASKS[0], UNREACHABLE_TASK), "host target was unreachable"),
        ((TASKS[0], FAILING_TASK), ""),
        (({"block": [FAILING_TASK], "rescue": [TASKS[0]], "ignore_errors": False}, TASK_WITHOUT_RESULT), ""),
    ],
    ids=["failed", "unreachable", "ignored", "rescued"],
)
def test_failures_that_end_a_host_make_the_plan_unusable(
    target: Target, tmp_path: Path, tasks: tuple[Task, ...], problem: str
) -> None:
    path = tmp_path / "plan.json"
    output = run(target, *tasks, GROVE_SANDBOX_PLAN_FILE=str(path))
    document = _plan_file.load(str(path))
    assert document["problems"] == [problem] * bool(problem)
    assert [entry["task"] for entry in document["entries"]] == ["Declare box"]
    assert ("It cannot be applied, because it is incomplete." in output) is bool(problem)
    assert (f"The plan is incomplete:\n  {problem}\n" in output) is bool(problem)
    assert ("can be applied until" in output) is not bool(problem)


@pytest.mark.parametrize(("core", "strategy"), [(OLDEST, "free"), (NEWEST, "linear")])
def test_the_lookup_knows_the_failures_of_earlier_plays(
    target: Target, tmp_path: Path, core: str, strategy: str
) -> None:
    """Each host finishes the first plays in a different way. The last play publishes the plan on another host."""

    def restrict_to_host(host: str, task: Task) -> Task:
        return {**task, "when": f"inventory_hostname == '{host}'"}

    outcome_tasks = [
        restrict_to_host("failed", FAILING_TASK),
        restrict_to_host("ignored", {**FAILING_TASK, "ignore_errors": True}),
        {"block": [restrict_to_host("rescued", FAILING_TASK)], "rescue": [TASK_WITHOUT_RESULT]},
        {"block": [restrict_to_host("failed_in_rescue", FAILING_TASK)], "rescue": [FAILING_TASK]},
        restrict_to_host("unreachable", UNREACHABLE_TASK),
        restrict_to_host("ignored", {**UNREACHABLE_TASK, "ignore_unreachable": True}),
        restrict_to_host("ended", {"ansible.builtin.meta": "end_host"}),
        restrict_to_host("missing", {"ansible.builtin.include_tasks": "missing.yml"}),
    ]
    hosts = ("failed", "ignored", "rescued", "failed_in_rescue", "unreachable", "ended", "missing", "handled", "last")
    handlers = {
        "tasks": [
            restrict_to_host("handled", {"ansible.builtin.command": "true", "check_mode": False, "notify": "fail"})
        ],
        "handlers": [{"name": "fail", **FAILING_TASK}],
    }
    published_path, saved_path = tmp_path / "published.json", tmp_path / "saved.json"
    publish = {
        "ansible.builtin.copy": {
            "content": "{{ lookup('grove.sandbox.plan') | to_json }}",
            "dest": str(published_path),
        },
        "check_mode": False,
    }
    target.run(
        {"hosts": "all:!last", "strategy": strategy, "tasks": outcome_tasks},
        {"hosts": "all:!last", "strategy": strategy, **handlers},
        {"hosts": "last", "tasks": [publish]},
        options=("-i", ",".join(hosts), "--check", "-e", f"ansible_python_interpreter={sys.executable}"),
        environment={
            "ANSIBLE_CALLBACKS_ENABLED": "grove.sandbox.plan",
            "GROVE_SANDBOX_PLAN_FILE": str(saved_path),
            **ansible_core_versions.build_release_environment(core),
        },
    )
    assert saved_path.exists(), target.output
    for path in (published_path, saved_path):
        assert sorted(json.loads(path.read_text())["problems"]) == [
            "a task failed on host failed",
            "a task failed on host failed_in_rescue",
            "a task failed on host handled",
            "a task failed on host missing",
            "host unreachable was unreachable",
        ], target.output


def test_a_plan_is_incomplete_until_the_run_has_reached_its_last_playbook(target: Target, tmp_path: Path) -> None:
    """Ansible evaluates the keywords of a play when it begins the playbook."""
    path = tmp_path / "plan.json"
    target.write_playbook("first.yml", {"tasks": [TASKS[0]]})
    target.write_playbook("broken.yml", {"tasks": [TASKS[1]], "serial": "{{ missing }}"})
    environment = {
        "ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan",
        "ANSIBLE_ACTION_PLUGINS": str(HERE / "plugins" / "action"),
        "GROVE_SANDBOX_PLAN_FILE": str(path),
    }
    problem = "the check-mode run has not reached broken.yml"
    for names, problems in ((("first.yml", "broken.yml"), [problem]), (("first.yml", "first.yml"), [])):
        target.run_playbooks(*names, options=("--check",), environment=environment)
        assert _plan_file.load(str(path))["problems"] == problems, target.output
    problem = "The plan is incomplete:\n  the check-mode run has not reached first.yml\n"
    assert target.output.count(problem) == 1, target.output


def test_failing_to_save_a_plan_is_an_error_and_leaves_no_old_plan(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run(target, TASKS[0], GROVE_SANDBOX_PLAN_FILE=str(path))
    assert path.exists()
    output = run(target, TASKS[0], GROVE_SANDBOX_PLAN_FILE=str(path), GROVE_SANDBOX_PLAN_LIFETIME="0")
    assert "[ERROR]: plan_lifetime must be from 1 to 31536000 seconds, not 0" in output
    assert not path.exists()


@pytest.mark.parametrize("kind", ["text", "directory", "pipe"])
def test_only_a_plan_is_replaced_by_a_plan(target: Target, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "precious"
    if kind == "text":
        path.write_text("- hosts: all\n")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    mode = path.stat().st_mode
    output = run(target, TASKS[0], GROVE_SANDBOX_PLAN_FILE=str(path))
    assert f"[ERROR]: '{path}' exists, but is not a plan, so it is kept: set plan_file to a different file" in output
    assert path.stat().st_mode == mode and (kind != "text" or path.read_text() == "- hosts: all\n")


def test_colours_are_shown_only_on_a_terminal_or_if_forced(target: Target, tmp_path: Path) -> None:
    log = tmp_path / "log"
    variables = {"ANSIBLE_NOCOLOR": "0", "ANSIBLE_FORCE_COLOR": "1", "ANSIBLE_LOG_PATH": str(log)}
    assert "\033[0;32m+ box\033[0m  Declare box" in run(target, TASKS[0], **variables)
    assert "\033[0;32m+ box" not in log.read_text() and "+ box  Declare box" in log.read_text()
    assert "\033" not in run(target, TASKS[0])
