"""Test that a whole play can be dry-run: each task in check mode sees what the earlier ones would have done."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_gateway.engine.plans import sessions
from sandbox_gateway.errors import Forbidden, NotFound
from tests.api.memory_gateway import MemoryGateway
from tests.collection.runner import Target, Task, check_plan


def step(module: str, **options: Any) -> Task:
    return {f"grove.sandbox.{module}": options, "register": module}


PLAY = (
    step("sandbox", name="box", template="base", metadata={"team": "red"}),
    step("sandbox_snapshot", name="before", sandbox="box"),
    step("sandbox_fork", snapshot="before", count=3, name_prefix="try"),
    step("sandbox", name="{{ sandbox_fork.sandboxes[0].id }}", metadata={"winner": "yes"}),
    {**step("sandbox_snapshot", name="after", sandbox="try-1"), "when": "{{ true }}"},
    step("sandbox_rollback", sandbox="box", snapshot="after", unless_clean=False),
    step("sandbox_info"),
    step("sandbox_snapshot_info"),
    step("sandbox", name=["try-2", "try-3"], state="absent"),
    step("sandbox_snapshot", name="before", state="absent"),
    step("sandbox_volume", name="data", size_mb=64, snapshots=["monday"]),
    step("sandbox_volume", name="copy", size_mb=128, from_snapshot="data@monday"),
    step("sandbox_template", name="base", state="absent"),
    step("sandbox", name="box", state="paused"),
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
    for always in ({**box, "check_mode": True}, {"block": [box], "check_mode": True}):
        first, second = plan_target.play(always, box, options=("--check",))
        assert first["changed"] and second["changed"], "the second task saw a change that no run would have made"
    first, second = plan_target.play(box, box, options=("--check",))
    assert first["changed"] and not second["changed"]


def test_sessions_of_ended_runs_make_place_for_new_ones(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_KEY", 2)
    box = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    for _ in range(4):
        (result,) = plan_target.play(box, options=("--check",))
        assert result["changed"] and not result.get("failed"), result


@pytest.mark.parametrize("status", [403, 404])
def test_without_plan_sessions_each_task_is_predicted_alone(
    plan_gateway: MemoryGateway, plan_target: Target, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An older gateway does not know the route, and refuses it without looking for it if the key may only read."""
    error = Forbidden("the key 'looker' has scope read") if status == 403 else NotFound("route", "POST /plans")

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sessions.PlanSessions, "open", refuse)
    results = plan_target.play(PLAY[0], PLAY[1], options=("--check", "--diff"))
    assert results[0]["changed"] and not results[0].get("failed")
    assert results[1]["failure"]["kind"] == "not_found", "the sandbox does not exist yet"
