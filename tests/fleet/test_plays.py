"""Plays in check mode and for real at one gateway of a fleet, with sandboxes on two hosts, and saved plans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.collection.runner import Result, Target, Task, check_plan
from tests.fleet.world import FleetHost
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]
_numbers = itertools.count()
_CALLBACKS = {"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"}


@pytest.fixture
def target(pair: Pair, tmp_path: Path) -> Iterator[Target]:
    """A target at the gateway of h1, with names that no other test uses. Both hosts have `base`."""
    one, _ = pair
    for host in pair:
        wait_until(lambda host=host: host.list_known_hosts("base") == ["h1", "h2"])  # type: ignore[misc]
    yield Target(one.gateway.unix_url, tmp_path, prefix=f"play{next(_numbers)}-")
    with one.client() as client:
        client.patch("/fleet/hosts/h2", json={"cordoned": False}).raise_for_status()


def _make_task(module: str, **options: Any) -> Task:
    task = {f"grove.sandbox.{module}": {key: value for key, value in options.items() if key != "register"}}
    return {**task, "register": options["register"]} if "register" in options else task


def _make_play(target: Target) -> list[Task]:
    """Return tasks that build on one another, on both hosts."""
    name = target.make_name
    forks = [name("fork-1"), name("fork-2"), name("fork-3"), name("fork-4")]
    return [
        _make_task("sandbox", name=name("web"), template="base", placement={"host": "h2"}, register="web"),
        _make_task("sandbox", name="{{ web.sandbox.id }}", metadata={"role": "web"}),
        _make_task("sandbox_snapshot", name=name("before"), sandbox=name("web"), register="before"),
        _make_task("sandbox_fork", snapshot="base", names=forks, placement={"strategy": "spread"}, register="forks"),
        _make_task("sandbox_fork", snapshot=name("before"), count=2, name_prefix=name("try"), register="tries"),
        _make_task("sandbox", name="{{ tries.sandboxes[1].id }}", metadata={"winner": "yes"}),
        _make_task("sandbox", name=forks, metadata={"of": "{{ web.sandbox.id }}"}),
        _make_task("sandbox_rollback", sandbox=name("web"), snapshot=name("before"), unless_clean=False),
        _make_task("sandbox", name="{{ forks.sandboxes[3].id }}", state="paused"),
        _make_task("sandbox", name=forks[0], state="absent"),
        _make_task("sandbox", name=forks[0], template="base", placement={"host": "h2"}, register="again"),
        _make_task("sandbox_info", name=[forks[0], forks[3], name("web")]),
    ]


def _plan(target: Target, plan: Path, *tasks: Task) -> list[Result]:
    environment = {**_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan)}
    results = target.play(*tasks, options=("--check", "--diff"), environment=environment)
    assert json.loads(plan.read_text())["problems"] == [], target.output
    return results


def _apply(target: Target, plan: Path, *tasks: Task) -> list[Result]:
    environment = {**_CALLBACKS, "GROVE_SANDBOX_APPLY": str(plan)}
    return target.play(*tasks, options=("--diff",), environment=environment)


def _list_hosts(result: Result) -> list[str]:
    return [each["sandbox_host"] for each in result.get("sandboxes", [])]


def _compare(predicted: list[Result], actual: list[Result]) -> None:
    for number, (prediction, result) in enumerate(zip(predicted, actual, strict=True)):
        assert not result.get("failed"), (number, result.get("msg"))
        assert not prediction.get("failed"), (number, prediction.get("msg"))
        check_plan(prediction, result, f"task {number}")
        assert _list_hosts(prediction) == _list_hosts(result), number


def test_check_mode_predicts_a_play_on_two_hosts(pair: Pair, target: Target) -> None:
    one, two = pair
    tasks = _make_play(target)
    known_ids = {each["sandboxID"] for each in one.get("/sandboxes")}
    predicted = target.play(*tasks, options=("--check", "--diff"), environment=_CALLBACKS)
    assert {each["sandboxID"] for each in one.get("/sandboxes")} == known_ids
    wait_until(lambda: not one.get("/plans") and not two.get("/plans"))
    actual = target.play(*tasks, options=("--diff",))
    _compare(predicted, actual)
    assert _list_hosts(actual[3]) in (["h1", "h1", "h2", "h2"], ["h2", "h2", "h1", "h1"])
    assert _list_hosts(actual[0]) == _list_hosts(actual[10]) == ["h2"]
    assert {*_list_hosts(actual[4])} == {"h2"}, "the snapshot is on h2"


def test_a_saved_plan_is_applied_on_the_planned_hosts(pair: Pair, target: Target, tmp_path: Path) -> None:
    one, two = pair
    tasks = _make_play(target)
    predicted = _plan(target, tmp_path / "plan.json", *tasks)
    hosts = _list_hosts(predicted[3])
    # Without the plan, the run would now choose the hosts in the other order.
    first = one if hosts[0] == "h1" else two
    room = first.host.available_room
    first.host.available_room = replace(room, memory_free=room.memory_free // 2)
    try:
        wait_until(lambda: len({each["memoryFreeBytes"] for each in one.get("/fleet")["hosts"]}) == 2)
        (other,) = target.play(tasks[3], options=("--check",), environment=_CALLBACKS)
        assert _list_hosts(other)[0] != hosts[0]
        actual = _apply(target, tmp_path / "plan.json", *tasks)
    finally:
        first.host.available_room = room
    _compare(predicted, actual)
    assert "All changes in the plan were made" in target.output, target.output
    repeated = _apply(target, tmp_path / "plan.json", tasks[3])
    assert not repeated[0]["changed"]


def test_a_plan_is_refused_if_a_host_or_an_object_has_changed(pair: Pair, target: Target, tmp_path: Path) -> None:
    one, two = pair
    names = [target.make_name("a"), target.make_name("b")]
    fork = _make_task("sandbox_fork", snapshot="base", names=names, placement={"strategy": "spread"})
    _plan(target, tmp_path / "plan.json", fork)
    with one.client() as client:
        client.patch("/fleet/hosts/h2", json={"cordoned": True}).raise_for_status()
        wait_until(lambda: one.get("/fleet")["hosts"][1]["cordoned"])
        (refused,) = _apply(target, tmp_path / "plan.json", fork)
        assert refused["failed"] and "h2 (cordoned)" in refused["msg"], refused
        assert not refused["changed"]
        client.patch("/fleet/hosts/h2", json={"cordoned": False}).raise_for_status()
        wait_until(lambda: not one.get("/fleet")["hosts"][1]["cordoned"])
    # The other gateway uses its own copy of the template.
    (refused,) = _apply(Target(two.gateway.unix_url, tmp_path), tmp_path / "plan.json", fork)
    assert refused["failure"]["kind"] == "not_planned" and not refused["changed"], refused
    name = target.make_name("web")
    two.post("/sandboxes", {"templateID": "base", "name": name})
    update = _make_task("sandbox", name=name, metadata={"a": "b"})
    _plan(target, tmp_path / "plan.json", update)
    with two.client() as client:
        client.patch(f"/sandboxes/{name}", json={"metadata": {"c": "d"}}).raise_for_status()
    (refused,) = _apply(target, tmp_path / "plan.json", update)
    assert refused["failure"]["kind"] == "not_planned" and "has changed since the plan was made" in refused["msg"]
    assert two.get(f"/sandboxes/{name}")["metadata"] == {"c": "d"}
