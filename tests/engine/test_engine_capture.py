"""Test that captures create snapshots that do not depend on their source."""

from __future__ import annotations

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, InUse, Invalid, NameTaken, NotFound
from sandbox_gateway.records import MemoryMode, Retention
from tests.engine.test_engine_fork import START_COUNTER_COMMAND, read_counter
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def source(runner: EngineRunner) -> str:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    return "source"


def test_a_snapshot_names_its_source(runner: EngineRunner, source: str, world: World) -> None:
    sandbox = runner.get_sandbox(source)
    first_snapshot = runner.do(runner.engine.snapshots.create(source, name="one", description="the first"))
    second_snapshot = runner.do(runner.engine.snapshots.create(source, name="two"))
    assert first_snapshot.source_sandbox == second_snapshot.source_sandbox == sandbox.id
    assert (first_snapshot.parent, second_snapshot.parent) == (sandbox.template_id, first_snapshot.id)
    assert first_snapshot.origin == second_snapshot.origin == sandbox.template_id
    assert runner.get_sandbox(source).head == second_snapshot.id
    assert (first_snapshot.memory is not MemoryMode.NONE) == world.abilities.memory
    assert runner.engine.snapshots.get("one").description == "the first"


@pytest.mark.usefixtures("requires_memory_capture")
def test_only_changed_pages_are_stored(runner: EngineRunner, source: str) -> None:
    runner.shell(source, "head -c 4000000 /dev/urandom >/run/blob")
    snapshot = runner.do(runner.engine.snapshots.create(source))
    assert snapshot.memory in (MemoryMode.WRITTEN, MemoryMode.SOFT_DIRTY, MemoryMode.INCREMENTAL)
    assert 4_000_000 < snapshot.memory_bytes_written < 60_000_000
    assert 0 < snapshot.pause_ms < 5000


def test_a_taken_name_is_refused_without_side_effects(runner: EngineRunner, source: str, world: World) -> None:
    runner.do(runner.engine.snapshots.create(source, name="taken"))
    traces_before = world.read_traces(runner.config)
    for name in ("taken", source, TEMPLATE):
        with pytest.raises(NameTaken):
            runner.do(runner.engine.snapshots.create(source, name=name))
    assert world.read_traces(runner.config) == traces_before


def test_a_snapshot_outlives_its_source(runner: EngineRunner, source: str) -> None:
    runner.shell(source, "echo kept >/root/kept")
    runner.do(runner.engine.snapshots.create(source, name="legacy"))
    runner.do(runner.engine.sandboxes.delete(source))
    fork = runner.do(runner.engine.forks.create("legacy", ForkSpec()))
    assert runner.shell(fork.id, "cat /root/kept").strip() == "kept"


def test_intermediate_snapshots_can_be_deleted(runner: EngineRunner, world: World) -> None:
    ref = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["g0"]))).id
    if world.abilities.memory:
        runner.shell(ref, START_COUNTER_COMMAND)
    for generation in range(1, 6):
        runner.shell(ref, f"echo {generation} >>/root/generations")
        runner.do(runner.engine.snapshots.create(ref, name=f"s{generation}"))
        ref = runner.do(runner.engine.forks.create(f"s{generation}", ForkSpec(names=[f"g{generation}"]))).id
    for generation in range(1, 5):
        runner.do(runner.engine.sandboxes.delete(f"g{generation}"))
    for generation in range(1, 5):
        runner.do(runner.engine.snapshots.delete(f"s{generation}"))
    deepest_fork = runner.do(runner.engine.forks.create("s5", ForkSpec(names=["deepest"])))
    assert runner.shell(deepest_fork.id, "cat /root/generations").split() == list("12345")
    if world.abilities.memory:
        first_count = read_counter(runner, deepest_fork.id)
        assert read_counter(runner, deepest_fork.id) >= first_count > 0
    assert deepest_fork.template_id == runner.engine.templates.get(TEMPLATE).id


def test_deleting_a_snapshot_in_use_names_its_users(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.snapshots.create(source, name="used"))
    forks = runner.do(runner.engine.forks.fork("used", ForkSpec(names=["f1", "f2"])))
    with pytest.raises(InUse, match=r"2 sandboxes .*f1, f2") as refusal:
        runner.do(runner.engine.snapshots.delete("used"))
    assert set(refusal.value.blockers) == {fork.id for fork in forks}
    runner.do(runner.engine.sandboxes.delete("f1"))
    runner.do(runner.engine.sandboxes.delete("f2"))
    assert runner.do(runner.engine.snapshots.delete("used"))
    with pytest.raises(NotFound):
        runner.engine.snapshots.get("used")


def test_a_snapshot_deleted_when_unused_is_hidden_until_its_last_user_is_removed(
    runner: EngineRunner, source: str, world: World
) -> None:
    snapshots_before = world.read_traces(runner.config)["snapshots"]
    runner.do(runner.engine.snapshots.create(source, name="going"))
    runner.do(runner.engine.forks.create("going", ForkSpec(names=["user"])))
    assert not runner.do(runner.engine.snapshots.delete("going", when_unused=True))
    with pytest.raises(NotFound):
        runner.engine.snapshots.get("going")
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["going"])))
    runner.do(runner.engine.sandboxes.delete("user"))
    runner.do(runner.engine.sandboxes.delete(source))
    assert world.read_traces(runner.config)["snapshots"] == snapshots_before


def test_a_template_in_use_cannot_be_deleted(runner: EngineRunner, source: str) -> None:
    with pytest.raises(InUse, match="template"):
        runner.do(runner.engine.snapshots.delete(TEMPLATE))


def test_a_disk_only_snapshot_boots_with_the_written_files(runner: EngineRunner, source: str) -> None:
    runner.shell(source, "echo unsynced >/root/unsynced")
    snapshot = runner.do(runner.engine.snapshots.create(source, name="disk", memory="none"))
    assert snapshot.memory is MemoryMode.NONE
    assert runner.shell(source, "echo thawed >/root/thawed && cat /root/thawed").strip() == "thawed"
    fork = runner.do(runner.engine.forks.create("disk", ForkSpec()))
    assert runner.shell(fork.id, "cat /root/unsynced").strip() == "unsynced"


def test_an_unknown_memory_mode_is_refused(runner: EngineRunner, source: str) -> None:
    with pytest.raises(Invalid, match="auto"):
        runner.do(runner.engine.snapshots.create(source, memory="sometimes"))


def test_a_paused_sandbox_cannot_be_captured(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.sandboxes.pause(source))
    with pytest.raises(Conflict, match="resume it first"):
        runner.do(runner.engine.snapshots.create(source))


def test_a_failed_capture_leaves_a_running_source_and_no_files(
    runner: EngineRunner, source: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_before = runner.get_sandbox(source).head
    traces_before = world.read_traces(runner.config)
    world.break_capture(runner.engine.host, monkeypatch)
    with pytest.raises(BackendFailed, match="forced"):
        runner.do(runner.engine.snapshots.create(source, name="broken"))
    monkeypatch.undo()
    assert world.read_traces(runner.config) == traces_before
    assert runner.get_sandbox(source).head == head_before
    assert runner.shell(source, "echo alive").strip() == "alive"
    runner.do(runner.engine.snapshots.create(source, name="broken"))


def test_an_expired_snapshot_is_removed_unless_it_has_forks(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.snapshots.create(source, name="short", expires_in=0.5))
    runner.do(runner.engine.snapshots.create(source, name="kept", expires_in=0.5))
    runner.do(runner.engine.forks.create("kept", ForkSpec(names=["user"])))
    wait_until(lambda: all("short" not in snapshot.names for snapshot in runner.engine.snapshots.list()), 20)
    assert runner.engine.snapshots.get("kept").names == ["kept"]


def test_retention_removes_old_snapshots_that_are_not_in_use(runner: EngineRunner, source: str) -> None:
    rule = Retention(keep_last=1)
    runner.do(runner.engine.snapshots.create(source, name="by-hand"))
    runner.do(runner.engine.snapshots.create(source, name="forked", retention=Retention(keep_last=3)))
    runner.do(runner.engine.forks.create("forked", ForkSpec(names=["user"])))
    runner.do(runner.engine.snapshots.create(source, name="old", retention=Retention(keep_last=3)))
    runner.do(runner.engine.snapshots.create(source, name="new", retention=rule))
    wait_until(lambda: all("old" not in snapshot.names for snapshot in runner.engine.snapshots.list()), 20)
    assert {name for snapshot in runner.engine.snapshots.list() for name in snapshot.names} == {
        "by-hand",
        "forked",
        "new",
    }


def test_lineage_shows_each_object_below_its_origin(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.snapshots.create(source, name="fork-point"))
    runner.do(runner.engine.forks.create("fork-point", ForkSpec(names=["child"])))
    (tree,) = runner.engine.snapshots.build_lineage(TEMPLATE)
    sandbox = next(node for node in tree["children"] if node["names"] == ["source"])
    (snapshot,) = sandbox["children"]
    assert snapshot["names"] == ["fork-point"]
    assert [node["names"] for node in snapshot["children"]] == [["child"]]
