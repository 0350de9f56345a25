"""Test that forks of a snapshot continue from the same state, and are then independent of each other."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NameTaken, NotFound, OverQuota, Unsupported
from sandbox_gateway.records import SandboxState
from tests.support.live import Live
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


def read_counter(live: Live, ref: str) -> int:
    return int(live.shell(ref, "cat /run/counter"))


def test_a_created_sandbox_can_be_used_by_its_name(live: Live) -> None:
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["first"], metadata={"team": "a"})))
    assert live.shell("first", "hostname").strip() == "first"
    assert live.shell(sandbox.id, "id -u").strip() == "0"
    assert live.get_sandbox("first").metadata == {"team": "a"}
    assert live.get_sandbox("first").template_id == live.engine.templates.get(TEMPLATE).id


def test_the_name_defaults_to_the_id(live: Live) -> None:
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    assert sandbox.name == sandbox.id


@pytest.mark.usefixtures("requires_memory_capture")
def test_forks_continue_from_the_sources_memory_while_it_runs(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", START_COUNTER_COMMAND)
    count_before = read_counter(live, "source")
    live.do(live.engine.snapshots.create("source", name="mark"))
    count_at_capture = read_counter(live, "source")
    time.sleep(1)
    forks = live.do(live.engine.forks.fork("mark", ForkSpec(count=3)))
    assert read_counter(live, "source") > count_at_capture
    for fork in forks:
        assert count_before <= read_counter(live, fork.id)
    first_count = read_counter(live, forks[0].id)
    time.sleep(0.5)
    assert read_counter(live, forks[0].id) > first_count


def test_siblings_have_distinct_identities(live: Live) -> None:
    forks = live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    for command in ("hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | od -An -tx1"):
        first_value, second_value = (live.shell(fork.id, command) for fork in forks)
        assert first_value != second_value, command
    assert abs(float(live.shell("a", "date +%s")) - time.time()) < 3


def test_a_file_written_in_one_fork_is_not_in_others(live: Live) -> None:
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    live.shell("a", "echo mine >/root/mine && sync")
    assert live.shell("b", "ls /root/mine 2>/dev/null || echo absent").strip() == "absent"
    assert live.do(live.engine.sandboxes.has_diverged("a"))
    assert not live.do(live.engine.sandboxes.has_diverged("b"))


def test_every_command_gets_the_environment(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["e"], env={"COLOUR": "green"})))
    assert live.shell("e", "echo $COLOUR").strip() == "green"


def test_a_paused_sandbox_starts_at_resume(live: Live) -> None:
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["later"], paused=True)))
    assert sandbox.state is SandboxState.PAUSED
    with pytest.raises(Conflict, match="resume it first"):
        live.shell("later", "true")
    live.do(live.engine.sandboxes.resume("later"))
    assert live.shell("later", "hostname").strip() == "later"


@pytest.mark.usefixtures("requires_memory_capture")
def test_different_resources_require_a_cold_start(live: Live, world: World) -> None:
    if world.abilities.resize_on_fork:
        pytest.skip(f"{world.kind} declares that forks may have other resources")
    with pytest.raises(Unsupported, match="coldStart"):
        live.do(live.engine.forks.create(TEMPLATE, ForkSpec(cpus=2)))
    live.do(
        live.engine.forks.create(
            TEMPLATE, ForkSpec(names=["big"], cpus=2, memory_mb=320, disk_mb=2500, cold_start=True)
        )
    )
    assert live.shell("big", "nproc").strip() == "2"
    assert int(live.shell("big", "awk '/MemTotal/ {print $2}' /proc/meminfo")) > 256 * 1024
    assert int(live.shell("big", "df -m --output=size / | tail -1")) > 2100


def test_a_smaller_disk_is_refused(live: Live) -> None:
    with pytest.raises(Invalid, match="smaller"):
        live.do(live.engine.forks.create(TEMPLATE, ForkSpec(disk_mb=100, cold_start=True)))


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_invalid_counts_are_refused(live: Live, count: int) -> None:
    with pytest.raises(Invalid, match="1 to 1000"):
        live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(count=count)))


@pytest.mark.parametrize("name", ["", "-a", "a b", "ü", "x" * 65, "x" * 10_000, "a/b", "../a"])
def test_invalid_names_are_refused(live: Live, name: str) -> None:
    with pytest.raises(Invalid, match="is not allowed") as refusal:
        live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=[name])))
    assert len(refusal.value.message) < 300


def test_taken_names_are_refused_before_any_work(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["taken"])))
    for names in (["taken"], ["new", "taken"], ["twin", "twin"], [TEMPLATE]):
        with pytest.raises(NameTaken):
            live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(count=len(names), names=names)))
    assert [sandbox.name for sandbox in live.engine.sandboxes.list()] == ["taken"]


def test_a_missing_template_is_reported(live: Live) -> None:
    with pytest.raises(NotFound, match="not found"):
        live.do(live.engine.forks.create("nowhere", ForkSpec()))


def test_an_idempotency_key_creates_one_sandbox(live: Live) -> None:
    first_sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(idempotency_key="k1")))
    second_sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(idempotency_key="k1")))
    assert first_sandbox.id == second_sandbox.id


def test_the_number_of_sandboxes_is_limited(make_live: Any) -> None:
    live = make_live(limits={"sandboxes": 2})
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(count=2)))
    with pytest.raises(OverQuota, match="the limit of 2"):
        live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))


def fail_on_nth_fork(live: Live, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the host's n-th fork fail after its machine has started."""
    original_fork = live.engine.host.fork
    call_count = 0

    async def fail_on_nth_call(*args: Any, **kwargs: Any) -> None:
        nonlocal call_count
        call_count += 1
        call_number = call_count
        await original_fork(*args, **kwargs)
        if call_number == nth:
            raise BackendFailed("forced")

    monkeypatch.setattr(live.engine.host, "fork", fail_on_nth_call)


def test_a_failure_in_the_seventh_of_ten_clones_leaves_nothing(
    live: Live, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    traces_before = world.read_traces(live.config)
    fail_on_nth_fork(live, 7, monkeypatch)
    with pytest.raises(BackendFailed, match="forced"):
        live.do(live.engine.forks.clone("source", ForkSpec(count=10)))
    live.collect()
    assert [sandbox.name for sandbox in live.engine.sandboxes.list()] == ["source"]
    assert world.read_traces(live.config) == traces_before
    assert live.shell("source", "echo alive").strip() == "alive"


def test_a_non_atomic_fork_returns_the_successful_forks(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_nth_fork(live, 2, monkeypatch)
    results = live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(count=3, atomic=False)))
    assert sum(isinstance(result, BackendFailed) for result in results) == 1
    assert len(live.engine.sandboxes.list()) == 2


def test_a_cancelled_fork_leaves_nothing(live: Live, world: World) -> None:
    traces_before = world.read_traces(live.config)

    async def cancel_fork() -> None:
        task = asyncio.create_task(live.engine.forks.fork(TEMPLATE, ForkSpec(count=4)))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    live.do(cancel_fork())
    assert live.engine.sandboxes.list() == []
    assert world.read_traces(live.config) == traces_before


def test_a_clones_capture_is_removed_with_the_last_clone(live: Live, world: World) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "echo now >/root/now")
    snapshots_before = world.read_traces(live.config)["snapshots"]
    clones = live.do(live.engine.forks.clone("source", ForkSpec(count=2)))
    assert [live.shell(clone.id, "cat /root/now").strip() for clone in clones] == ["now", "now"]
    assert {clone.parent_sandbox for clone in clones} == {live.get_sandbox("source").id}
    live.do(live.engine.sandboxes.delete("source"))
    for clone in clones:
        live.do(live.engine.sandboxes.delete(clone.id))
    assert world.read_traces(live.config)["snapshots"] == snapshots_before


def test_progress_is_reported(live: Live) -> None:
    async def collect_progress() -> list[int]:
        done_counts = []
        with live.engine.events.subscribed() as events:
            fork_task = asyncio.create_task(live.engine.forks.fork(TEMPLATE, ForkSpec(count=2, operation="abc")))
            while len(done_counts) < 2:
                event = await events.get()
                if event.type == "fork.progress" and event.data["operation"] == "abc":
                    done_counts.append(event.data["done"])
        await fork_task
        return done_counts

    assert live.do(collect_progress()) == [1, 2]
