"""Prewarmed forks are kept ready, claimed by new sandboxes, and discarded when they are no longer needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import Invalid, NoSpace, Unsupported
from sandbox_gateway.hosts.base import Abilities, Room
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import NetworkPolicy, Sandbox
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost

pytestmark = pytest.mark.anyio


class _Host(MemoryHost):
    """A host that records which sandboxes got a network policy. While ``is_full`` is true, saving a record fails."""

    def __init__(self) -> None:
        super().__init__()
        self.sandboxes_with_policy: list[str] = []
        self.is_full = False

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        if sandbox.network != NetworkPolicy():
            self.sandboxes_with_policy.append(sandbox.name)
        await super().claim(fork, sandbox)

    async def save(self, sandbox: Sandbox) -> None:
        if self.is_full:
            raise NoSpace("no space left")
        await super().save(sandbox)


@pytest.fixture
def host() -> _Host:
    return _Host()


@pytest.fixture
async def engine(tmp_path: Path, host: _Host) -> AsyncIterator[Engine]:
    """An engine with a sandbox `a` and its snapshot `s`."""
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        yield engine


def count_ready_forks(engine: Engine, ref: str = "s") -> int:
    return engine.prewarm.get_level(engine.snapshots.get(ref)).ready


async def keep_forks_ready(engine: Engine, count: int, ref: str = "s") -> None:
    await engine.prewarm.set_target(ref, count)
    await wait_until(lambda: count_ready_forks(engine, ref) == count)


async def test_a_fork_claims_a_prewarmed_machine_and_another_is_started(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1)
    fork_count_before = host.fork_count
    sandbox = await create(engine, "b", "s")
    assert host.claim_count == 1
    assert host.machines[sandbox.instance].identity["sandboxID"] == sandbox.id
    assert (sandbox.head, sandbox.forked_from) == (engine.snapshots.get("s").id,) * 2
    await wait_until(lambda: count_ready_forks(engine) == 1)
    assert host.fork_count == fork_count_before + 1


async def test_forks_are_started_cold_if_too_few_are_ready(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 2)
    sandboxes = await engine.forks.fork("s", ForkSpec(count=3))
    assert len({each.instance for each in sandboxes if isinstance(each, Sandbox)}) == 3
    assert host.claim_count >= 2


async def test_forks_that_differ_from_the_snapshot_are_started_cold(engine: Engine, host: _Host) -> None:
    await engine.volumes.create("v", 64)
    await keep_forks_ready(engine, 1)
    await create(engine, "mounting", "s", mounts=[MountSpec("v", "/data")])
    await create(engine, "booting", "s", cold_start=True)
    await create(engine, "paused", "s", paused=True)
    assert host.claim_count == 0 and count_ready_forks(engine) == 1


async def test_a_claim_gets_the_network_policy_of_its_sandbox(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1)
    await create(engine, "b", "s", network=NetworkPolicy(allow_internet=False))
    assert host.sandboxes_with_policy == ["b"]


async def test_a_rollback_and_a_resume_claim_prewarmed_machines(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1)
    sandbox_before = engine.sandboxes.get("a")
    sandbox_after = await engine.sandboxes.rollback("a", "s")
    assert host.claim_count == 1 and sandbox_after.id == sandbox_before.id
    assert sandbox_after.instance != sandbox_before.instance and sandbox_before.instance not in host.machines
    assert host.machines[sandbox_after.instance].identity["sandboxID"] == sandbox_before.id


async def test_template_forks_run_and_snapshot_forks_are_held(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1, "t")
    instance = engine.prewarm._ready_forks[engine.snapshots.get("t").id][0].instance
    assert host.machines[instance].identity, "a fork of a template has been identified"
    await keep_forks_ready(engine, 1)
    instance = engine.prewarm._ready_forks[engine.snapshots.get("s").id][0].instance
    assert not host.machines[instance].identity, "a fork of a snapshot is untouched"


async def test_a_failed_claim_falls_back_to_a_cold_fork(engine: Engine, host: _Host) -> None:
    class _SingleUseNames(set[str]):
        """A set from which each name is removed once it has been looked up."""

        def __contains__(self, name: object) -> bool:
            return super().__contains__(name) and not self.discard(str(name))

    await keep_forks_ready(engine, 1)
    host.failing_names = _SingleUseNames({"b"})
    sandbox = await create(engine, "b", "s")
    assert host.claim_count == 1 and host.machines[sandbox.instance].identity["sandboxID"] == sandbox.id
    await wait_until(lambda: count_ready_forks(engine) == 1)
    assert len(host.machines) == 3, "the failed claim left a machine"


async def test_a_claim_that_cannot_be_committed_leaves_no_machine(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1)
    host.is_full = True
    with pytest.raises(NoSpace):
        await create(engine, "b", "s")
    host.is_full = False
    await wait_until(lambda: count_ready_forks(engine) == 1)
    assert len(host.machines) == 2 and "b" not in [each.name for each in engine.sandboxes.list()]


async def test_a_stopped_machine_is_replaced_instead_of_claimed(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 1)
    fork = engine.prewarm._ready_forks[engine.snapshots.get("s").id][0]
    await host.machines.pop(fork.instance).stop()
    sandbox = await create(engine, "b", "s")
    assert sandbox.instance != fork.instance and host.claim_count == 0
    await wait_until(lambda: count_ready_forks(engine) == 1)


async def _delete_snapshot(engine: Engine) -> None:
    await engine.snapshots.delete("s")


async def _set_target_to_zero(engine: Engine) -> None:
    await engine.prewarm.set_target("s", 0)


@pytest.mark.parametrize("reduce_demand", [_delete_snapshot, _set_target_to_zero], ids=["deleted", "target 0"])
async def test_surplus_forks_are_discarded(
    engine: Engine, host: _Host, reduce_demand: Callable[[Engine], Awaitable[None]]
) -> None:
    await keep_forks_ready(engine, 2)
    await reduce_demand(engine)
    await wait_until(lambda: len(host.machines) == 1)


async def test_forks_are_discarded_while_the_host_is_short_of_memory(engine: Engine, host: _Host) -> None:
    await keep_forks_ready(engine, 2)
    reserve_mb = engine.config.prewarm.free_memory_mb
    host.available_room = replace(host.available_room, memory_free=(reserve_mb - 1) << 20)
    await wait_until(lambda: count_ready_forks(engine) == 0 and len(host.machines) == 1)
    host.available_room = replace(host.available_room, memory_free=(reserve_mb + 256) << 20)
    await wait_until(lambda: count_ready_forks(engine) == 2)


async def test_requests_take_precedence_over_prewarming(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with engine.prewarm.request_start_counted():
        await engine.prewarm.set_target("s", 1)
        await asyncio.sleep(0.05)
        assert count_ready_forks(engine) == 0
    await wait_until(lambda: count_ready_forks(engine) == 1)


async def test_a_failed_prewarm_is_retried_later(engine: Engine, host: _Host, caplog: pytest.LogCaptureFixture) -> None:
    message = "an unknown instance"

    async def fail(*_: object, **__: object) -> None:
        raise NoSpace(message)

    original_fork, host.fork = host.fork, fail  # type: ignore[method-assign]
    await engine.prewarm.set_target("s", 1)
    await wait_until(lambda: "a fork could not be prewarmed" in caplog.messages)
    host.fork = original_fork  # type: ignore[method-assign]
    await wait_until(lambda: count_ready_forks(engine) == 1)


async def test_closing_the_engine_discards_the_forks(tmp_path: Path, host: _Host) -> None:
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s", prewarm=2)
        await wait_until(lambda: count_ready_forks(engine) == 2)
    assert len(host.machines) == 1


async def test_invalid_targets_are_refused(engine: Engine) -> None:
    await engine.snapshots.create("a", name="disk", memory="none")
    with pytest.raises(Invalid, match=r"a prewarm count of 65 is out of range: use 0 to 64 \(prewarm.maximum\)"):
        await engine.prewarm.set_target("s", 65)
    with pytest.raises(Unsupported, match="a snapshot without memory cannot be prewarmed"):
        await engine.prewarm.set_target("disk", 1)
    with pytest.raises(Unsupported, match="a snapshot without memory cannot be prewarmed"):
        await engine.snapshots.create("a", name="other", memory="none", prewarm=1)
    assert [each.names for each in engine.snapshots.list()] == [["s"], ["disk"]], "nothing was captured"


async def test_a_target_for_which_the_host_has_no_room_is_refused(engine: Engine, host: _Host) -> None:
    await engine.prewarm.set_target("s", 2)
    room = host.available_room
    host.available_room = replace(room, memory_free=0)
    for request in (
        engine.prewarm.set_target("s", 3),
        engine.snapshots.create("a", name="other", prewarm=1),
        engine.templates.build("new", Recipe(), prewarm=1),
    ):
        with pytest.raises(NoSpace, match="less than"):
            await request
    assert [each.names for each in engine.snapshots.list()] == [["s"]], "nothing was captured"
    assert (await engine.prewarm.set_target("s", 1)).target == 1, "fewer forks need no room"
    host.available_room = room
    assert (await engine.prewarm.set_target("s", 3)).target == 3


async def test_a_host_that_cannot_hold_machines_refuses_to_prewarm(tmp_path: Path) -> None:
    class _HostWithoutPrewarming(MemoryHost):
        abilities = Abilities(memory=True, resize_on_fork=False, independent_snapshots=True)

    async with opened_engine(tmp_path, _HostWithoutPrewarming()) as engine:
        with pytest.raises(Unsupported, match="a memory host cannot prewarm forks"):
            await engine.prewarm.set_target("t", 1)
        await engine.prewarm.set_target("t", 0)


async def test_no_fork_is_started_during_a_claim(engine: Engine, host: _Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_gateway.engine.prewarm._DELAY_AFTER_CLAIM_SECONDS", 0.5)
    await keep_forks_ready(engine, 1)
    fork_count_before = host.fork_count
    await create(engine, "b", "s")
    await asyncio.sleep(0.2)
    assert host.fork_count == fork_count_before, "a fork was started while the claimed sandbox runs its first command"
    await wait_until(lambda: count_ready_forks(engine) == 1)


async def test_if_one_of_several_records_cannot_be_saved_no_sandbox_remains(engine: Engine, host: _Host) -> None:
    save_count = 0
    original_save = host.save

    async def fail_second(sandbox: Sandbox) -> None:
        nonlocal save_count
        save_count += 1
        if save_count == 2:
            raise NoSpace("no space left")
        await original_save(sandbox)

    host.save = fail_second  # type: ignore[method-assign]
    initial_record_count = len(host.saved_sandboxes)
    with pytest.raises(NoSpace):
        await engine.forks.fork("s", ForkSpec(count=3))
    assert save_count == 3 and len(host.saved_sandboxes) == initial_record_count and len(host.machines) == 1
    assert [each.name for each in engine.sandboxes.list()] == ["a"]


async def test_nothing_is_measured_while_nothing_is_prewarmed(
    engine: Engine, host: _Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement_count = 0
    original_room = host.measure_room

    async def count_measurement() -> Room:
        nonlocal measurement_count
        measurement_count += 1
        return await original_room()

    monkeypatch.setattr(host, "measure_room", count_measurement)
    engine.prewarm._change_event.set()
    await wait_until(lambda: not engine.prewarm._change_event.is_set())
    assert measurement_count == 0
    await keep_forks_ready(engine, 1)
    assert measurement_count > 0
