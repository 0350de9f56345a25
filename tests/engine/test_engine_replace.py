"""Test operations that stop or replace a sandbox's machine: rollback, promote, pause, resume and timeouts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.records import NetworkPolicy, OnTimeout, SandboxState
from tests.engine.test_engine_fork import START_COUNTER_COMMAND, read_counter
from tests.support.live import Live
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def source(live: Live) -> str:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    return "source"


def test_rollback_restores_files_and_keeps_the_id(live: Live, source: str) -> None:
    source_id = live.get_sandbox(source).id
    live.shell(source, "echo good >/root/state")
    live.do(live.engine.snapshots.create(source, name="good"))
    assert not live.do(live.engine.sandboxes.has_diverged(source))
    live.shell(source, "echo bad >/root/state")
    assert live.do(live.engine.sandboxes.has_diverged(source))
    sandbox = live.do(live.engine.sandboxes.rollback(source, "good"))
    assert sandbox.id == source_id
    assert live.shell(source, "cat /root/state").strip() == "good"
    assert live.shell(source, "hostname").strip() == source
    assert live.get_sandbox(source).head == live.engine.snapshots.get("good").id
    assert not live.do(live.engine.sandboxes.has_diverged(source))


def test_a_sandbox_removed_during_a_lookup_causes_no_internal_error(live: Live, source: str) -> None:
    engine, sandbox = live.engine, live.get_sandbox(source)
    live.do(engine.sandboxes.delete(source))
    for lookup in (engine.host.has_diverged(sandbox, engine.snapshots.get(sandbox.head)), engine.host.usage(sandbox)):
        with pytest.raises(GatewayError):
            live.do(lookup)


@pytest.mark.usefixtures("requires_memory_capture")
def test_rollback_restores_memory(live: Live, source: str) -> None:
    live.shell(source, START_COUNTER_COMMAND)
    live.do(live.engine.snapshots.create(source, name="early"))
    count_at_capture = read_counter(live, source)
    time.sleep(2)
    later_count = read_counter(live, source)
    live.do(live.engine.sandboxes.rollback(source, "early"))
    assert read_counter(live, source) < later_count
    assert read_counter(live, source) >= count_at_capture - 20


def test_rollback_to_an_older_snapshot_keeps_newer_ones(live: Live, source: str) -> None:
    live.shell(source, "echo 1 >/root/n")
    live.do(live.engine.snapshots.create(source, name="old"))
    live.shell(source, "echo 2 >/root/n")
    live.do(live.engine.snapshots.create(source, name="new"))
    live.do(live.engine.sandboxes.rollback(source, "old"))
    assert live.shell(source, "cat /root/n").strip() == "1"
    live.do(live.engine.sandboxes.rollback(source, "new"))
    assert live.shell(source, "cat /root/n").strip() == "2"
    live.do(live.engine.sandboxes.rollback(source, "old"))
    live.do(live.engine.snapshots.create(source, name="again"))
    assert live.engine.snapshots.get("again").parent == live.engine.snapshots.get("old").id


def test_a_sandbox_can_be_rolled_back_to_a_snapshot_of_another_sandbox(live: Live, source: str) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["other"])))
    live.shell("other", "echo theirs >/root/theirs")
    live.do(live.engine.snapshots.create("other", name="theirs"))
    live.do(live.engine.sandboxes.rollback(source, "theirs"))
    assert live.shell(source, "cat /root/theirs; hostname").split() == ["theirs", source]


def test_rollback_to_a_missing_snapshot_changes_nothing(live: Live, source: str) -> None:
    with pytest.raises(NotFound, match="not found"):
        live.do(live.engine.sandboxes.rollback(source, "nowhere"))
    assert live.shell(source, "echo alive").strip() == "alive"


def test_a_failed_rollback_leaves_the_old_machine_running(
    live: Live, source: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.do(live.engine.snapshots.create(source, name="mark"))
    live.shell(source, "echo later >/root/later")
    traces_before = world.read_traces(live.config)

    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise BackendFailed("forced")

    for step, owner in (("identify", live.engine.agents), ("save", live.engine.host)):
        monkeypatch.setattr(owner, step, refuse)
        with pytest.raises(BackendFailed, match="forced"):
            live.do(live.engine.sandboxes.rollback(source, "mark"))
        monkeypatch.undo()
        assert live.shell(source, "cat /root/later").strip() == "later"
        assert world.read_traces(live.config) == traces_before


def test_promote_replaces_the_source_with_its_fork(live: Live, source: str) -> None:
    source_id = live.get_sandbox(source).id
    (fork,) = live.do(live.engine.forks.clone(source, ForkSpec(names=["winner"])))
    live.shell(fork.id, "echo won >/root/result")
    source_sandbox = live.do(live.engine.sandboxes.promote("winner"))
    assert source_sandbox.id == source_id
    assert live.shell(source, "cat /root/result; hostname").split() == ["won", source]
    assert live.shell("winner", "cat /root/result").strip() == "won"


def test_promoting_a_sandbox_over_itself_is_refused(live: Live, source: str) -> None:
    with pytest.raises(Invalid, match="itself"):
        live.do(live.engine.sandboxes.promote(source, source))


def test_a_paused_sandbox_can_be_resumed(live: Live, source: str, world: World) -> None:
    live.shell(source, "echo kept >/root/kept")
    if world.abilities.memory:
        live.shell(source, START_COUNTER_COMMAND)
    live.do(live.engine.sandboxes.pause(source))
    assert live.get_sandbox(source).state is SandboxState.PAUSED
    with pytest.raises(Conflict):
        live.do(live.engine.sandboxes.pause(source))
    assert not world.read_traces(live.config)["processes"]
    live.do(live.engine.sandboxes.resume(source))
    assert live.shell(source, "cat /root/kept").strip() == "kept"
    if world.abilities.memory:
        assert read_counter(live, source) > 0
    with pytest.raises(Conflict, match="already running"):
        live.do(live.engine.sandboxes.resume(source))


def test_a_sandbox_paused_without_memory_boots_from_its_disk(live: Live, source: str) -> None:
    live.shell(source, "echo kept >/root/kept")
    live.do(live.engine.sandboxes.pause(source, memory=False))
    live.do(live.engine.sandboxes.resume(source))
    assert live.shell(source, "cat /root/kept").strip() == "kept"


def test_killing_a_paused_sandbox_removes_its_capture(live: Live, source: str, world: World) -> None:
    snapshots_before = world.read_traces(live.config)["snapshots"]
    live.do(live.engine.sandboxes.pause(source))
    live.do(live.engine.sandboxes.delete(source))
    assert world.read_traces(live.config)["snapshots"] == snapshots_before


def test_an_expired_sandbox_is_killed_or_paused(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["dies"], timeout=1)))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["sleeps"], timeout=1, on_timeout=OnTimeout.PAUSE)))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["stays"], timeout=1)))
    live.do(live.engine.sandboxes.set_timeout("stays", None))
    wait_until(lambda: {each.name for each in live.engine.sandboxes.list()} == {"sleeps", "stays"})
    wait_until(lambda: live.get_sandbox("sleeps").state is SandboxState.PAUSED)
    assert live.do(live.engine.sandboxes.resume("sleeps")).end_at is not None, "its timeout did not start again"
    wait_until(lambda: live.get_sandbox("sleeps").state is SandboxState.PAUSED)
    live.do(live.engine.sandboxes.resume("sleeps", timeout=None))
    assert live.shell("sleeps", "hostname").strip() == "sleeps"


def test_a_negative_timeout_is_refused(live: Live) -> None:
    with pytest.raises(Invalid, match="timeout"):
        live.do(live.engine.forks.create(TEMPLATE, ForkSpec(timeout=-5)))


def test_the_name_and_metadata_can_be_changed(live: Live, source: str) -> None:
    live.do(live.engine.sandboxes.update(source, name="renamed", metadata={"a": "b"}))
    assert live.get_sandbox("renamed").metadata == {"a": "b"}
    with pytest.raises(NotFound):
        live.get_sandbox(source)


def test_a_sandbox_whose_machine_stops_unexpectedly_can_be_resumed_from_its_disk(
    live: Live, source: str, world: World
) -> None:
    live.shell(source, "echo kept >/root/kept && sync")
    live.shell(source, f"(sleep 0.2; {world.halt_command}) >/dev/null 2>&1 &")
    wait_until(lambda: live.get_sandbox(source).state is SandboxState.PAUSED)
    assert "ended" in live.get_sandbox(source).state_reason
    live.do(live.engine.sandboxes.resume(source))
    assert live.shell(source, "cat /root/kept").strip() == "kept"


def test_a_command_fails_when_its_machine_stops(live: Live, source: str, world: World) -> None:
    started_at = time.monotonic()
    with pytest.raises(
        BackendFailed, match=r"stopped during the command|connection to the sandbox was lost|cannot be reached"
    ):
        live.do(live.engine.commands.exec(source, ["sh", "-c", f"{world.halt_command}; sleep 100"], timeout=120))
    assert time.monotonic() - started_at < 60


def test_a_network_policy_survives_a_rollback(live: Live, source: str) -> None:
    live.do(live.engine.snapshots.create(source, name="mark"))
    live.do(live.engine.sandboxes.set_network(source, NetworkPolicy(allow_internet=False)))
    live.do(live.engine.sandboxes.rollback(source, "mark"))
    assert not live.get_sandbox(source).network.allow_internet
