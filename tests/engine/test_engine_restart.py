"""Test that a restarted gateway adopts running machines and completes or undoes interrupted operations."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Conflict
from sandbox_gateway.records import SandboxState
from tests.engine.test_engine_fork import START_COUNTER_COMMAND, read_counter
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World


def test_running_sandboxes_are_adopted_with_names_and_lineage(make_runner: Any, world: World) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], metadata={"k": "v"}, timeout=3600)))
    if world.abilities.memory:
        runner.shell("source", START_COUNTER_COMMAND)
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.do(runner.engine.forks.fork("mark", ForkSpec(names=["f1", "f2"])))
    runner.do(runner.engine.sandboxes.pause("f2"))
    sandboxes, lineage = runner.engine.sandboxes.list(), runner.engine.snapshots.build_lineage()
    traces_before = world.read_traces(runner.config)
    runner.close()

    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.engine.sandboxes.list() == sandboxes
    assert runner_after_restart.engine.snapshots.build_lineage() == lineage
    assert world.read_traces(runner_after_restart.config) == traces_before
    assert runner_after_restart.shell("f1", "hostname").strip() == "f1"
    if world.abilities.memory:
        assert read_counter(runner_after_restart, "source") > 0
    runner_after_restart.do(runner_after_restart.engine.snapshots.create("f1", name="after"))
    runner_after_restart.do(runner_after_restart.engine.sandboxes.resume("f2"))
    assert runner_after_restart.shell("f2", "hostname").strip() == "f2"


def test_additional_names_of_a_snapshot_survive_a_restart(make_runner: Any) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    snapshot = runner.do(runner.engine.snapshots.create("source", name="mark"))
    for name in ("flat", "old"):
        runner.do(runner.engine.snapshots.add_name("mark", name))
    assert runner.do(runner.engine.snapshots.remove_name("old"))
    runner.close()
    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.engine.snapshots.get(snapshot.id).names == ["mark", "flat"]
    runner_after_restart.do(runner_after_restart.engine.forks.create("flat", ForkSpec(names=["fork"])))
    assert runner_after_restart.do(runner_after_restart.engine.snapshots.remove_name("flat"))
    assert not runner_after_restart.do(runner_after_restart.engine.snapshots.remove_name("mark")), "it is the last name"


def test_a_second_gateway_on_the_same_state_is_refused(make_runner: Any) -> None:
    runner = make_runner()
    with pytest.raises(Conflict, match="another gateway"):
        make_runner(config=runner.config)
    assert runner.engine.templates.get(TEMPLATE)


@pytest.mark.parametrize("policy", mark_slow_except(("start",), ("start", "stay")))
def test_a_sandbox_is_restarted_or_stays_paused_after_a_power_cut(make_runner: Any, world: World, policy: str) -> None:
    runner = make_runner(restart=policy)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["victim"])))
    runner.shell("victim", "echo kept >/root/kept && sync")
    runner.close()
    world.cut_power(runner.config)
    runner_after_restart = make_runner(config=runner.config)
    if policy == "start":
        wait_until(lambda: runner_after_restart.get_sandbox("victim").state is SandboxState.RUNNING, 120)
    else:
        assert runner_after_restart.get_sandbox("victim").state is SandboxState.PAUSED
        assert "host went down" in runner_after_restart.get_sandbox("victim").state_reason
        runner_after_restart.do(runner_after_restart.engine.sandboxes.resume("victim"))
    assert runner_after_restart.shell("victim", "cat /root/kept").strip() == "kept"


def test_damaged_records_are_quarantined_at_startup(make_runner: Any, world: World) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["fine"])))
    for name in ("good", "torn", "short", "empty"):
        runner.do(runner.engine.snapshots.create("fine", name=name))
    snapshot_ids = {name: runner.engine.snapshots.get(name).id for name in ("good", "torn", "short", "empty")}
    runner.close()
    world.damage_snapshots(runner.config, **{name: snapshot_ids[name] for name in ("torn", "short", "empty")})
    runner_after_restart = make_runner(config=runner.config)
    assert [snapshot.names for snapshot in runner_after_restart.engine.snapshots.list()] == [["good"]]
    assert runner_after_restart.shell("fine", "echo alive").strip() == "alive"
    runner_after_restart.do(runner_after_restart.engine.forks.create("good", ForkSpec()))


def test_a_duplicate_name_stays_with_the_older_object(make_runner: Any, world: World) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    older_snapshot = runner.do(runner.engine.snapshots.create("source", name="older"))
    newer_snapshot = runner.do(runner.engine.snapshots.create("source", name="newer"))
    runner.close()
    world.rewrite_record(runner.config, newer_snapshot, names=["older"])
    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.engine.snapshots.get("older").id == older_snapshot.id
    assert runner_after_restart.engine.snapshots.get(newer_snapshot.id).names == []


def test_records_of_a_newer_gateway_are_readable(make_runner: Any, world: World) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    snapshot = runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.close()
    world.rewrite_record(runner.config, snapshot, a_field_of_the_future={"x": 1})
    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.engine.snapshots.get("mark").id == snapshot.id


def test_each_change_is_counted_and_the_count_survives_a_restart(make_runner: Any, world: World) -> None:
    """A saved plan relies on this count: an object with the same generation is the same as when the plan was made.

    The removal of a snapshot gives its children another parent. This is not a change, because their contents stay the
    same.
    """
    runner = make_runner()
    engine = runner.engine
    runner.do(engine.volumes.create("data", 64))
    runner.do(engine.volumes.create_snapshot("data", "mark"))
    runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["box"])))
    runner.do(engine.snapshots.create("box", name="mark-1"))

    def read_generations() -> dict[str, int]:
        return {
            "sandbox": runner.get_sandbox("box").generation,
            "snapshot": engine.snapshots.get("mark-1").generation,
            "template": engine.templates.get(TEMPLATE).generation,
            "volume": engine.volumes.get("data").generation,
            "volume snapshot": engine.volumes.list_snapshots("data")[0].generation,
        }

    prewarm_changes = [
        (lambda ref=ref, count=count: engine.prewarm.set_target(ref, count), kind)
        for ref, kind in (("mark-1", "snapshot"), (TEMPLATE, "template"))
        for count in (1, 0)
        if world.abilities.prewarm
    ]
    changes: list[tuple[Any, str]] = [
        (lambda: engine.sandboxes.update("box", metadata={"a": "b"}), "sandbox"),
        (lambda: engine.sandboxes.set_timeout("box", 3600), "sandbox"),
        (lambda: engine.sandboxes.rollback("box", "mark-1"), "sandbox"),
        (lambda: engine.snapshots.create("box", name="mark-2"), "sandbox"),
        (lambda: engine.snapshots.delete("mark-2"), ""),
        (lambda: engine.sandboxes.pause("box"), "sandbox"),
        (lambda: engine.sandboxes.resume("box"), "sandbox"),
        (lambda: engine.volumes.grow("data", 128), "volume"),
        (lambda: engine.volumes.rollback("data", "mark"), "volume"),
        *prewarm_changes,
    ]
    for change, changed_kind in changes:
        before = read_generations()
        runner.do(change())
        after = read_generations()
        assert {kind for kind, value in after.items() if value > before[kind]} == {changed_kind} - {""}
        assert all(value >= before[kind] for kind, value in after.items())
    assert runner.get_sandbox("box").head == engine.snapshots.get("mark-1").id
    expected = read_generations()
    runner.close()
    runner = make_runner(config=runner.config)
    engine = runner.engine
    assert read_generations() == expected
