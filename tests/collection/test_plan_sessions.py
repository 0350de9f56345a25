"""Test that a whole play can be dry-run: each task in check mode sees what the earlier ones would have done."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import PLANNED_ID_PREFIX
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, SESSION_KEY

from sandbox_gateway.engine.plans import sessions
from sandbox_gateway.engine.plans.open_runs import OpenRuns
from sandbox_gateway.errors import Forbidden, NotFound
from tests.collection.runner import Target, Task, check_plan
from tests.support import ansible_core_versions
from tests.support.memory_gateway import ADMIN_KEY, READ_KEY, MemoryGateway


def make_task(module: str, **options: Any) -> Task:
    return {f"grove.sandbox.{module}": options, "register": module}


PLAY = (
    make_task("sandbox", name="box", template="base", metadata={"team": "red"}),
    make_task("sandbox_snapshot", name="before", sandbox="box"),
    make_task("sandbox_fork", snapshot="before", count=3, name_prefix="try"),
    make_task("sandbox", name="{{ sandbox_fork.sandboxes[0].id }}", metadata={"winner": "yes"}),
    {**make_task("sandbox_snapshot", name="after", sandbox="try-1"), "when": "{{ true }}"},
    make_task("sandbox_rollback", sandbox="box", snapshot="after", unless_clean=False),
    make_task("sandbox_info"),
    make_task("sandbox_snapshot_info"),
    make_task("sandbox", name=["try-2", "try-3"], state="absent"),
    make_task("sandbox_snapshot", name="before", state="absent"),
    make_task("sandbox_volume", name="data", size_mb=64, snapshots=["monday"]),
    make_task("sandbox_volume", name="copy", size_mb=128, from_snapshot="data@monday"),
    make_task("sandbox_template", name="base", state="absent"),
    make_task("sandbox", name="box", state="paused"),
)


def test_a_play_is_predicted_as_a_whole(plan_gateway: MemoryGateway, plan_target: Target) -> None:
    with plan_gateway.client() as client:
        before = [client.get(path).json() for path in ("/sandboxes", "/snapshots", "/volumes", "/templates")]
        predicted = plan_target.play(*PLAY, options=("--check", "--diff"))
        assert [client.get(path).json() for path in ("/sandboxes", "/snapshots", "/volumes", "/templates")] == before
    actual = plan_target.play(*PLAY, options=("--diff",))
    for number, (prediction, result) in enumerate(zip(predicted, actual, strict=True)):
        check_plan(prediction, result, f"task {number}")


def test_a_task_that_is_always_in_check_mode_plans_nothing(plan_gateway: MemoryGateway, plan_target: Target) -> None:
    box = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    other = {"grove.sandbox.sandbox": {"name": "other", "template": "base"}}
    find_other = {"grove.sandbox.sandbox_info": {"name": "other"}, "check_mode": True}
    for always in ({**box, "check_mode": True}, {"block": [box], "check_mode": True}):
        _, found, first, second = plan_target.play(other, find_other, always, box, options=("--check",))
        assert [each["name"] for each in found["sandboxes"]] == ["other"], "it does not see the tasks before it"
        assert first["changed"] and second["changed"], "the second task saw a change that no run would have made"
        assert first["sandbox"]["id"] is None and second["sandbox"]["id"].startswith(PLANNED_ID_PREFIX)
    first, second = plan_target.play(box, box, options=("--check",))
    assert first["changed"] and not second["changed"]


BOX: Task = {"grove.sandbox.sandbox": {"name": "{{ box }}", "template": "base"}}
RUN_MODE = {"check_mode": "{{ ansible_check_mode }}"}
VARIABLE_MODE = {"check_mode": "{{ dry }}"}
CHECK_MODE = {"check_mode": True}
CHECK_MODE_PLAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "no keyword": (False, {"tasks": [BOX]}),
    "role": (True, {"roles": [{"role": "mk", **CHECK_MODE}]}),
    "role, depends on the mode": (False, {"roles": [{"role": "mk", **RUN_MODE}]}),
    "dependency": (True, {"roles": ["top"]}),
    "import_role": (True, {"tasks": [{"import_role": {"name": "mk"}, **CHECK_MODE}]}),
    "include_role": (True, {"tasks": [{"include_role": {"name": "mk", "apply": CHECK_MODE}}]}),
    "play": (True, {**CHECK_MODE, "tasks": [{"import_role": {"name": "mk"}}]}),
    "play, depends on the mode": (
        False,
        {"vars": {"dry": RUN_MODE["check_mode"]}, **VARIABLE_MODE, "roles": ["mk"]},
    ),
    "play, variable": (True, {"vars": {"dry": "yes"}, **VARIABLE_MODE, "tasks": [BOX]}),
    "text mentions the mode": (True, {"check_mode": "{{ true or ansible_check_mode }}", "tasks": [BOX]}),
    "block": (False, {"tasks": [{"block": [{**BOX, **RUN_MODE}], **CHECK_MODE}]}),
    "block, depends on the mode": (
        True,
        {"tasks": [{"block": [{**BOX, **CHECK_MODE}], **RUN_MODE}]},
    ),
    "block in block": (
        False,
        {"tasks": [{"block": [{"block": [BOX], **RUN_MODE}], **CHECK_MODE}], **CHECK_MODE},
    ),
    "omitted": (True, {"tasks": [{"block": [{**BOX, "check_mode": "{{ omit }}"}], **CHECK_MODE}]}),
    "omitted, no other": (False, {"tasks": [{**BOX, "check_mode": "{{ omit }}"}]}),
    "variable of the task": (
        False,
        {"tasks": [{**BOX, **VARIABLE_MODE, "vars": {"dry": RUN_MODE["check_mode"]}}]},
    ),
    "item": (True, {"tasks": [{**BOX, "check_mode": "{{ item }}", "loop": [True]}]}),
}
"""For each position of the keyword: whether the task is in check mode even in a real run, and the play."""


@pytest.mark.parametrize("core", ansible_core_versions.RELEASES)
def test_the_innermost_keyword_decides_whether_a_run_changes_something(plan_target: Target, core: str) -> None:
    plan_target.write_file("roles/mk/tasks/main.yml", [BOX])
    plan_target.write_file("roles/top/meta/main.yml", {"dependencies": [{"role": "mk", **CHECK_MODE}]})
    plays: list[dict[str, Any]] = []
    for number, (_is_always, play) in enumerate(CHECK_MODE_PLAYS.values()):
        plays.append({**play, "vars": {"box": f"box-{number}", **play.get("vars", {})}})
        # This task changes something only if the previous task was in check mode.
        plays.append({"tasks": [BOX], "vars": {"box": f"box-{number}"}})
    expected = {place: is_always for place, (is_always, _play) in CHECK_MODE_PLAYS.items()}
    for options in (("--check",), ()):
        results = plan_target.run(
            *plays, options=options, environment=ansible_core_versions.build_release_environment(core)
        )
        changed = {result["sandbox"]["name"]: result["changed"] for result in results if result.get("sandbox")}
        actual = {place: changed.get(f"box-{number}") for number, place in enumerate(CHECK_MODE_PLAYS)}
        assert actual == expected, (options, plan_target.output)


def test_asynchronous_tasks_are_part_of_the_plan(
    plan_gateway: MemoryGateway, plan_target: Target, opened_ids: set[str]
) -> None:
    """The callback also ends their sessions, including the session of a key that no other task uses."""
    key = {"gateway_url": plan_gateway.url, "gateway_token": READ_KEY}
    tasks = (
        {**make_task("sandbox", name="box", template="base"), "async": 60, "poll": 1},
        make_task("sandbox_info", name=["box"]),
        {**make_task("sandbox", name="box", metadata={"team": "red"}, **key), "async": 60, "poll": 0},
        {
            "ansible.builtin.async_status": {"jid": "{{ sandbox.ansible_job_id }}"},
            "register": "job",
            "until": "job is finished",
            "retries": 60,
            "delay": 1,
        },
        {**make_task("sandbox_info", **key), "async": 60, "poll": 1},
    )
    environment = {"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"}
    created, found, _started, refused, listed = plan_target.play(*tasks, options=("--check",), environment=environment)
    assert created["changed"] and created["sandbox"]["id"].startswith(PLANNED_ID_PREFIX), plan_target.output
    assert found["sandboxes"] == [created["sandbox"]]
    assert refused["failure"]["kind"] == "not_found" and listed["sandboxes"] == [], "another key has another session"
    for result in (created, refused, listed):
        assert not {PLAN_KEY, SESSION_KEY} & result.keys(), result
    assert len(opened_ids) == 2 and list_sessions(plan_gateway) == [], plan_target.output


def test_planned_ids_can_be_searched_for(plan_target: Target) -> None:
    """In the query string of the request, the ids follow an encoded character."""
    metadata = {"peer": "{{ sandbox.sandbox.id }}", "peers": "first,{{ sandbox.sandbox.id }}"}
    play = (
        make_task("sandbox", name="box", template="base"),
        {**make_task("sandbox", name="other", template="base", metadata=metadata), "register": "other"},
        make_task("sandbox_info", metadata=metadata),
    )
    for options in (("--check",), ()):
        *_, found = plan_target.play(*play, options=options)
        assert [each["name"] for each in found["sandboxes"]] == ["other"], plan_target.output


def test_sessions_of_finished_runs_make_room_for_new_sessions(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_KEY", 2)
    box = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    for _ in range(4):
        (result,) = plan_target.play(box, options=("--check",))
        assert result["changed"] and not result.get("failed"), result


def test_a_gateway_restart_aborts_the_check_mode_run(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session under the same id lacks the changes of earlier tasks, and would assign the same ids again."""
    original_open = sessions.PlanSessions.open
    owners: list[str] = []

    def open_session(self: sessions.PlanSessions, owner: str, run: str) -> sessions.PlanSession:
        owners.append(owner)
        if len(owners) == 2:
            self._sessions = OpenRuns()  # Sessions are only in memory.
        return original_open(self, owner, run)

    monkeypatch.setattr(sessions.PlanSessions, "open", open_session)
    as_module = {"environment": {"SANDBOX_GATEWAY_URL": plan_gateway.unix_url}, "ignore_errors": True}
    removal = {**make_task("sandbox", name="box", state="absent"), "ignore_errors": True}
    created, *others = plan_target.play(
        {**make_task("sandbox", name="box", template="base"), **as_module},
        removal,
        {**removal, **as_module},
        options=("--check",),
    )
    assert created["changed"] and len(others) == 2, plan_target.output
    for result in others:
        assert "was restarted during this check-mode run" in result["msg"] and result["failure"]["kind"] == "gone", (
            result
        )


def list_sessions(gateway: MemoryGateway) -> list[Any]:
    """Return the sessions of all keys."""
    open_sessions = []
    for key in (None, ADMIN_KEY, READ_KEY):
        with gateway.client(key) as client:
            open_sessions += client.get("/plans").json()
    return open_sessions


def make_playbook(gateway: MemoryGateway, *further_tasks: Task) -> dict[str, Any]:
    """Return a play that opens a session in each way: in this process, with another key, and as a module."""
    box = {"name": "box", "template": "base"}
    tasks = [
        {"grove.sandbox.sandbox": {**box, "gateway_url": gateway.unix_url}},
        {"grove.sandbox.sandbox_info": {"gateway_url": gateway.url, "gateway_token": READ_KEY}},
        {
            "grove.sandbox.sandbox": box,
            "environment": {"SANDBOX_GATEWAY_URL": gateway.url, "SANDBOX_GATEWAY_TOKEN": ADMIN_KEY},
        },
        *further_tasks,
    ]
    return {"hosts": "all", "connection": "local", "tasks": tasks}


@pytest.fixture
def opened_ids(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ids of all sessions that were opened."""
    ids = set()
    original_open = sessions.PlanSessions.open

    def open_session(self: sessions.PlanSessions, owner: str, run: str) -> sessions.PlanSession:
        session = original_open(self, owner, run)
        ids.add(session.id)
        return session

    monkeypatch.setattr(sessions.PlanSessions, "open", open_session)
    return ids


@pytest.mark.parametrize("core", ansible_core_versions.RELEASES)
@pytest.mark.parametrize("should_fail", [False, True], ids=["succeeds", "fails"])
def test_the_callback_ends_the_sessions_of_a_run(
    plan_gateway: MemoryGateway, tmp_path: Path, opened_ids: set[str], core: str, should_fail: bool
) -> None:
    """The second playbook needs the session of the first playbook, unless the first one fails."""
    failing: Task = {"ansible.builtin.fail": {}}
    checks = (
        {"grove.sandbox.sandbox": {"name": "box", "template": "base", "gateway_url": plan_gateway.unix_url}},
        {"ansible.builtin.debug": {"msg": "the second playbook has run"}},
    )
    for name, play in (
        ("first.yml", make_playbook(plan_gateway, *([failing] if should_fail else []))),
        ("second.yml", make_playbook(plan_gateway, *checks)),
    ):
        (tmp_path / name).write_text(json.dumps([{"gather_facts": False, **play}]))
    process = ansible_core_versions.run_command(
        core,
        "playbook",
        "--check",
        "-i",
        "target,",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
        "first.yml",
        "second.yml",
        cwd=tmp_path,
        environment={"ANSIBLE_CALLBACKS_ENABLED": "grove.sandbox.plan"},
    )
    assert process.returncode == (2 if should_fail else 0), process.stdout + process.stderr
    assert ("the second playbook has run" in process.stdout) is not should_fail, process.stdout
    assert len(opened_ids) == 3 and list_sessions(plan_gateway) == [], process.stdout + process.stderr


def test_without_the_callback_sessions_expire(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_target.run({**make_playbook(plan_gateway), "module_defaults": {}}, options=("--check",))
    assert len(list_sessions(plan_gateway)) == 3
    monkeypatch.setattr(sessions, "IDLE_SECONDS", 0.0)
    assert list_sessions(plan_gateway) == []


def test_only_verbose_output_shows_an_error_when_a_session_ends(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise NotFound("plan", "of another run")

    with monkeypatch.context() as patch:
        patch.setattr(sessions.PlanSessions, "close", refuse)
        for options in (("--check",), ("--check", "-v")):
            (result,) = plan_target.play(
                PLAY[0], options=options, environment={"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"}
            )
            assert result["changed"] and "failed=0" in plan_target.output
            is_shown = "was not ended" in plan_target.output and "plan 'of another run' not found" in plan_target.output
            assert is_shown is ("-v" in options), plan_target.output


@pytest.mark.parametrize("status", [403, 404])
def test_without_plan_sessions_each_task_is_predicted_alone(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An older gateway lacks the route. It refuses a read-only key before it looks for the route."""
    error = Forbidden("the key 'looker' has scope read") if status == 403 else NotFound("route", "POST /plans")

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sessions.PlanSessions, "open", refuse)
    results = plan_target.play(PLAY[0], PLAY[1], options=("--check", "--diff"))
    assert results[0]["changed"] and not results[0].get("failed")
    assert results[1]["failure"]["kind"] == "not_found", "the sandbox does not exist yet"
