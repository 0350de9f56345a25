"""Test operations that stop or replace a sandbox's machine: rollback, promote, pause, resume and timeouts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.records import NetworkPolicy, OnTimeout, SandboxState
from tests.engine.test_engine_fork import START_COUNTER_COMMAND, read_counter
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def source(runner: EngineRunner) -> str:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    return "source"


def test_rollback_restores_files_and_keeps_the_id(runner: EngineRunner, source: str) -> None:
    source_id = runner.get_sandbox(source).id
    runner.shell(source, "echo good >/root/state")
    runner.do(runner.engine.snapshots.create(source, name="good"))
    assert not runner.do(runner.engine.sandboxes.has_diverged(source))
    runner.shell(source, "echo bad >/root/state")
    assert runner.do(runner.engine.sandboxes.has_diverged(source))
    sandbox = runner.do(runner.engine.sandboxes.rollback(source, "good"))
    assert sandbox.id == source_id
    assert runner.shell(source, "cat /root/state").strip() == "good"
    assert runner.shell(source, "hostname").strip() == source
    assert runner.get_sandbox(source).head == runner.engine.snapshots.get("good").id
    assert not runner.do(runner.engine.sandboxes.has_diverged(source))


def test_a_sandbox_removed_during_a_lookup_causes_no_internal_error(runner: EngineRunner, source: str) -> None:
    engine, sandbox = runner.engine, runner.get_sandbox(source)
    runner.do(engine.sandboxes.delete(source))
    host, head = engine.host, engine.snapshots.get(sandbox.head)
    for lookup in (host.has_diverged(sandbox, head), host.measure_usage(sandbox)):
        with pytest.raises(GatewayError):
            runner.do(lookup)


@pytest.mark.usefixtures("requires_memory_capture")
def test_rollback_restores_memory(runner: EngineRunner, source: str) -> None:
    runner.shell(source, START_COUNTER_COMMAND)
    runner.do(runner.engine.snapshots.create(source, name="early"))
    count_at_capture = read_counter(runner, source)
    time.sleep(2)
    later_count = read_counter(runner, source)
    runner.do(runner.engine.sandboxes.rollback(source, "early"))
    assert read_counter(runner, source) < later_count
    assert read_counter(runner, source) >= count_at_capture - 20


def test_rollback_to_an_older_snapshot_keeps_newer_ones(runner: EngineRunner, source: str) -> None:
    runner.shell(source, "echo 1 >/root/n")
    runner.do(runner.engine.snapshots.create(source, name="old"))
    runner.shell(source, "echo 2 >/root/n")
    runner.do(runner.engine.snapshots.create(source, name="new"))
    runner.do(runner.engine.sandboxes.rollback(source, "old"))
    assert runner.shell(source, "cat /root/n").strip() == "1"
    runner.do(runner.engine.sandboxes.rollback(source, "new"))
    assert runner.shell(source, "cat /root/n").strip() == "2"
    runner.do(runner.engine.sandboxes.rollback(source, "old"))
    runner.do(runner.engine.snapshots.create(source, name="again"))
    assert runner.engine.snapshots.get("again").parent == runner.engine.snapshots.get("old").id


def test_a_sandbox_can_be_rolled_back_to_a_snapshot_of_another_sandbox(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["other"])))
    runner.shell("other", "echo theirs >/root/theirs")
    runner.do(runner.engine.snapshots.create("other", name="theirs"))
    runner.do(runner.engine.sandboxes.rollback(source, "theirs"))
    assert runner.shell(source, "cat /root/theirs; hostname").split() == ["theirs", source]


def test_rollback_to_a_missing_snapshot_changes_nothing(runner: EngineRunner, source: str) -> None:
    with pytest.raises(NotFound, match="not found"):
        runner.do(runner.engine.sandboxes.rollback(source, "nowhere"))
    assert runner.shell(source, "echo alive").strip() == "alive"


def test_a_failed_rollback_leaves_the_old_machine_running(
    runner: EngineRunner, source: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.do(runner.engine.snapshots.create(source, name="mark"))
    runner.shell(source, "echo later >/root/later")
    traces_before = world.read_traces(runner.config)

    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise BackendFailed("forced")

    for step, owner in (("identify", runner.engine.agents), ("save", runner.engine.host)):
        monkeypatch.setattr(owner, step, refuse)
        with pytest.raises(BackendFailed, match="forced"):
            runner.do(runner.engine.sandboxes.rollback(source, "mark"))
        monkeypatch.undo()
        assert runner.shell(source, "cat /root/later").strip() == "later"
        assert world.read_traces(runner.config) == traces_before


def test_promote_replaces_the_source_with_its_fork(runner: EngineRunner, source: str) -> None:
    source_id = runner.get_sandbox(source).id
    (fork,) = runner.do(runner.engine.forks.clone(source, ForkSpec(names=["winner"])))
    runner.shell(fork.id, "echo won >/root/result")
    source_sandbox = runner.do(runner.engine.sandboxes.promote("winner"))
    assert source_sandbox.id == source_id
    assert runner.shell(source, "cat /root/result; hostname").split() == ["won", source]
    assert runner.shell("winner", "cat /root/result").strip() == "won"


def test_promoting_a_sandbox_over_itself_is_refused(runner: EngineRunner, source: str) -> None:
    with pytest.raises(Invalid, match="itself"):
        runner.do(runner.engine.sandboxes.promote(source, source))


def test_a_paused_sandbox_can_be_resumed(runner: EngineRunner, source: str, world: World) -> None:
    runner.shell(source, "echo kept >/root/kept")
    if world.abilities.memory:
        runner.shell(source, START_COUNTER_COMMAND)
    runner.do(runner.engine.sandboxes.pause(source))
    assert runner.get_sandbox(source).state is SandboxState.PAUSED
    with pytest.raises(Conflict):
        runner.do(runner.engine.sandboxes.pause(source))
    assert not world.read_traces(runner.config)["processes"]
    runner.do(runner.engine.sandboxes.resume(source))
    assert runner.shell(source, "cat /root/kept").strip() == "kept"
    if world.abilities.memory:
        assert read_counter(runner, source) > 0
    with pytest.raises(Conflict, match="already running"):
        runner.do(runner.engine.sandboxes.resume(source))


def test_a_sandbox_paused_without_memory_boots_from_its_disk(runner: EngineRunner, source: str) -> None:
    runner.shell(source, "echo kept >/root/kept")
    runner.do(runner.engine.sandboxes.pause(source, memory=False))
    runner.do(runner.engine.sandboxes.resume(source))
    assert runner.shell(source, "cat /root/kept").strip() == "kept"


def test_killing_a_paused_sandbox_removes_its_capture(runner: EngineRunner, source: str, world: World) -> None:
    snapshots_before = world.read_traces(runner.config)["snapshots"]
    runner.do(runner.engine.sandboxes.pause(source))
    runner.do(runner.engine.sandboxes.delete(source))
    assert world.read_traces(runner.config)["snapshots"] == snapshots_before


def test_an_expired_sandbox_is_killed_or_paused(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["dies"], timeout=1)))
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["sleeps"], timeout=1, on_timeout=OnTimeout.PAUSE)))
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["stays"], timeout=1)))
    runner.do(runner.engine.sandboxes.set_timeout("stays", None))
    wait_until(lambda: {each.name for each in runner.engine.sandboxes.list()} == {"sleeps", "stays"})
    wait_until(lambda: runner.get_sandbox("sleeps").state is SandboxState.PAUSED)
    assert runner.do(runner.engine.sandboxes.resume("sleeps")).end_at is not None, "its timeout did not start again"
    wait_until(lambda: runner.get_sandbox("sleeps").state is SandboxState.PAUSED)
    runner.do(runner.engine.sandboxes.resume("sleeps", timeout=None))
    assert runner.shell("sleeps", "hostname").strip() == "sleeps"


def test_a_negative_timeout_is_refused(runner: EngineRunner) -> None:
    with pytest.raises(Invalid, match="timeout"):
        runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(timeout=-5)))


def test_the_name_and_metadata_can_be_changed(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.sandboxes.update(source, name="renamed", metadata={"a": "b"}))
    assert runner.get_sandbox("renamed").metadata == {"a": "b"}
    with pytest.raises(NotFound):
        runner.get_sandbox(source)


def test_a_sandbox_whose_machine_stops_unexpectedly_can_be_resumed_from_its_disk(
    runner: EngineRunner, source: str, world: World
) -> None:
    runner.shell(source, "echo kept >/root/kept && sync")
    runner.shell(source, f"(sleep 0.2; {world.halt_command}) >/dev/null 2>&1 &")
    wait_until(lambda: runner.get_sandbox(source).state is SandboxState.PAUSED)
    assert "stopped" in runner.get_sandbox(source).state_reason
    runner.do(runner.engine.sandboxes.resume(source))
    assert runner.shell(source, "cat /root/kept").strip() == "kept"


def test_a_command_fails_when_its_machine_stops(runner: EngineRunner, source: str, world: World) -> None:
    started_at = time.monotonic()
    with pytest.raises(
        BackendFailed, match=r"stopped during the command|connection to the sandbox was lost|cannot be reached"
    ):
        runner.do(runner.engine.commands.exec(source, ["sh", "-c", f"{world.halt_command}; sleep 100"], timeout=120))
    assert time.monotonic() - started_at < 60


def test_a_network_policy_survives_a_rollback(runner: EngineRunner, source: str) -> None:
    runner.do(runner.engine.snapshots.create(source, name="mark"))
    runner.do(runner.engine.sandboxes.set_network(source, NetworkPolicy(allow_internet=False)))
    runner.do(runner.engine.sandboxes.rollback(source, "mark"))
    assert not runner.get_sandbox(source).network.allow_internet
