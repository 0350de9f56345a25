"""Test that forks of a snapshot continue from the same state, and are then independent of each other."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NameTaken, NotFound, OverQuota, Unsupported
from sandbox_gateway.records import SandboxState
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, World

# A process that counts in memory and writes the count to a file. It must be cheap, because some machines emulate every
# instruction.
COUNTER_PROGRAM = """
import os, time
count = 0
while True:
    count += 1
    with open("/run/counter.new", "w") as file:
        file.write(str(count))
    os.replace("/run/counter.new", "/run/counter")
    time.sleep(0.1)
"""
START_COUNTER_COMMAND = (
    f"python3 -c '{COUNTER_PROGRAM}' </dev/null >/dev/null 2>&1 & while ! [ -e /run/counter ]; do sleep 0.1; done"
)


def read_counter(runner: EngineRunner, ref: str) -> int:
    return int(runner.shell(ref, "cat /run/counter"))


def test_a_created_sandbox_can_be_used_by_its_name(runner: EngineRunner) -> None:
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["first"], metadata={"team": "a"})))
    assert runner.shell("first", "hostname").strip() == "first"
    assert runner.shell(sandbox.id, "id -u").strip() == "0"
    assert runner.get_sandbox("first").metadata == {"team": "a"}
    assert runner.get_sandbox("first").template_id == runner.engine.templates.get(TEMPLATE).id


def test_the_name_defaults_to_the_id(runner: EngineRunner) -> None:
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec()))
    assert sandbox.name == sandbox.id


@pytest.mark.usefixtures("requires_memory_capture")
def test_forks_continue_from_the_sources_memory_while_it_runs(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", START_COUNTER_COMMAND)
    count_before = read_counter(runner, "source")
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    count_at_capture = read_counter(runner, "source")
    time.sleep(1)
    forks = runner.do(runner.engine.forks.fork("mark", ForkSpec(count=3)))
    assert read_counter(runner, "source") > count_at_capture
    for fork in forks:
        assert count_before <= read_counter(runner, fork.id)
    first_count = read_counter(runner, forks[0].id)
    time.sleep(0.5)
    assert read_counter(runner, forks[0].id) > first_count


def test_siblings_have_distinct_identities(runner: EngineRunner) -> None:
    forks = runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    for command in ("hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | od -An -tx1"):
        first_value, second_value = (runner.shell(fork.id, command) for fork in forks)
        assert first_value != second_value, command
    assert abs(float(runner.shell("a", "date +%s")) - time.time()) < 3


def test_a_file_written_in_one_fork_is_not_in_other_forks(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    runner.shell("a", "echo mine >/root/mine && sync")
    assert runner.shell("b", "ls /root/mine 2>/dev/null || echo absent").strip() == "absent"
    assert runner.do(runner.engine.sandboxes.has_diverged("a"))
    assert not runner.do(runner.engine.sandboxes.has_diverged("b"))


def test_every_command_gets_the_environment(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["e"], env={"COLOUR": "green"})))
    assert runner.shell("e", "echo $COLOUR").strip() == "green"


def test_a_paused_sandbox_starts_at_resume(runner: EngineRunner) -> None:
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["later"], paused=True)))
    assert sandbox.state is SandboxState.PAUSED
    with pytest.raises(Conflict, match="resume it first"):
        runner.shell("later", "true")
    runner.do(runner.engine.sandboxes.resume("later"))
    assert runner.shell("later", "hostname").strip() == "later"


@pytest.mark.usefixtures("requires_memory_capture")
def test_different_resources_require_a_cold_start(runner: EngineRunner, world: World) -> None:
    if world.abilities.resize_on_fork:
        pytest.skip(f"{world.kind} declares that forks may have other resources")
    with pytest.raises(Unsupported, match="coldStart"):
        runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(cpus=2)))
    runner.do(
        runner.engine.forks.create(
            TEMPLATE, ForkSpec(names=["big"], cpus=2, memory_mb=320, disk_mb=2500, cold_start=True)
        )
    )
    assert runner.shell("big", "nproc").strip() == "2"
    assert int(runner.shell("big", "awk '/MemTotal/ {print $2}' /proc/meminfo")) > 256 * 1024
    assert int(runner.shell("big", "df -m --output=size / | tail -1")) > 2100


def test_a_smaller_disk_is_refused(runner: EngineRunner) -> None:
    with pytest.raises(Invalid, match="smaller"):
        runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(disk_mb=100, cold_start=True)))


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_invalid_counts_are_refused(runner: EngineRunner, count: int) -> None:
    with pytest.raises(Invalid, match="1 to 1000"):
        runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=count)))


@pytest.mark.parametrize("name", ["", "-a", "a b", "ü", "x" * 65, "x" * 10_000, "a/b", "../a"])
def test_invalid_names_are_refused(runner: EngineRunner, name: str) -> None:
    with pytest.raises(Invalid, match="is not allowed") as refusal:
        runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=[name])))
    assert len(refusal.value.message) < 300


def test_taken_names_are_refused_before_any_work(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["taken"])))
    for names in (["taken"], ["new", "taken"], ["twin", "twin"], [TEMPLATE]):
        with pytest.raises(NameTaken):
            runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=len(names), names=names)))
    assert [sandbox.name for sandbox in runner.engine.sandboxes.list()] == ["taken"]


def test_a_missing_template_is_reported(runner: EngineRunner) -> None:
    with pytest.raises(NotFound, match="not found"):
        runner.do(runner.engine.forks.create("nowhere", ForkSpec()))


def test_an_idempotency_key_creates_one_sandbox(runner: EngineRunner) -> None:
    first_sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(idempotency_key="k1")))
    second_sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(idempotency_key="k1")))
    assert first_sandbox.id == second_sandbox.id


def test_the_number_of_sandboxes_is_limited(make_runner: Any) -> None:
    runner = make_runner(limits={"sandboxes": 2})
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=2)))
    with pytest.raises(OverQuota, match="the limit of 2"):
        runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec()))


def fail_on_nth_fork(runner: EngineRunner, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the host's n-th fork fail after its machine has started."""
    original_fork = runner.engine.host.fork
    call_count = 0

    async def fail_on_nth_call(*args: Any, **kwargs: Any) -> None:
        nonlocal call_count
        call_count += 1
        call_number = call_count
        await original_fork(*args, **kwargs)
        if call_number == nth:
            raise BackendFailed("forced")

    monkeypatch.setattr(runner.engine.host, "fork", fail_on_nth_call)


def test_a_failure_in_the_seventh_of_ten_clones_leaves_nothing(
    runner: EngineRunner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    traces_before = world.read_traces(runner.config)
    fail_on_nth_fork(runner, 7, monkeypatch)
    with pytest.raises(BackendFailed, match="forced"):
        runner.do(runner.engine.forks.clone("source", ForkSpec(count=10)))
    runner.collect()
    assert [sandbox.name for sandbox in runner.engine.sandboxes.list()] == ["source"]
    assert world.read_traces(runner.config) == traces_before
    assert runner.shell("source", "echo alive").strip() == "alive"


def test_a_non_atomic_fork_returns_the_successful_forks(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_nth_fork(runner, 2, monkeypatch)
    results = runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=3, atomic=False)))
    assert sum(isinstance(result, BackendFailed) for result in results) == 1
    assert len(runner.engine.sandboxes.list()) == 2


def test_a_cancelled_fork_leaves_nothing(runner: EngineRunner, world: World) -> None:
    traces_before = world.read_traces(runner.config)

    async def cancel_fork() -> None:
        task = asyncio.create_task(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=4)))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runner.do(cancel_fork())
    assert runner.engine.sandboxes.list() == []
    assert world.read_traces(runner.config) == traces_before


def test_a_clones_capture_is_removed_with_the_last_clone(runner: EngineRunner, world: World) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "echo now >/root/now")
    snapshots_before = world.read_traces(runner.config)["snapshots"]
    clones = runner.do(runner.engine.forks.clone("source", ForkSpec(count=2)))
    assert [runner.shell(clone.id, "cat /root/now").strip() for clone in clones] == ["now", "now"]
    assert {clone.parent_sandbox for clone in clones} == {runner.get_sandbox("source").id}
    runner.do(runner.engine.sandboxes.delete("source"))
    for clone in clones:
        runner.do(runner.engine.sandboxes.delete(clone.id))
    assert world.read_traces(runner.config)["snapshots"] == snapshots_before


def test_progress_is_reported(runner: EngineRunner) -> None:
    async def collect_progress() -> list[int]:
        done_counts = []
        with runner.engine.events.subscribed() as events:
            fork_task = asyncio.create_task(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=2, operation="abc")))
            while len(done_counts) < 2:
                event = await events.get()
                if event.type == "fork.progress" and event.data["operation"] == "abc":
                    done_counts.append(event.data["done"])
        await fork_task
        return done_counts

    assert runner.do(collect_progress()) == [1, 2]
