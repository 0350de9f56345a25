"""Measure captures, and single forks of another client, while a client creates many forks."""

from __future__ import annotations

import asyncio
import time

from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.start_slots import Requester, requester
from sandbox_gateway.records import Sandbox, Snapshot

_COOLDOWN_SECONDS = 0.3


class Crowd:
    name = "crowd"
    title = "captures, and another client's forks, while many forks are created"

    def run(self, ctx: Context) -> Result:
        forks, rounds = ctx.choose(full=50, quick=4), ctx.choose(full=3, quick=1)
        result = Result(self.name, self.title, {"forks": forks, "rounds": rounds})
        quiet_pauses: list[float] = []
        busy_pauses: list[float] = []
        lone_forks: list[float] = []
        forks_in_crowd: list[float] = []
        crowds: list[float] = []
        host = ctx.kvm_xfs
        with host.temporary_snapshot() as snapshot, ctx.showing_progress("rounds", rounds) as steps:
            source = host.create_sandbox(snapshot.id)
            for _ in range(rounds):
                for _ in range(ctx.choose(full=10, quick=3)):
                    time.sleep(_COOLDOWN_SECONDS)
                    captured = host.capture(source)
                    quiet_pauses.append(captured.pause_ms)
                    host.delete_snapshot(captured)
                    lone_forks.append(host.live.do(_fork_once(host, snapshot)))
                busy_pauses += host.live.do(_capture_during_forks(host, snapshot, source, forks), timeout=600)
                times, elapsed = host.live.do(_fork_in_crowd(host, snapshot, forks), timeout=600)
                forks_in_crowd += times
                crowds.append(elapsed)
                steps.advance()
        result.add_measure("quiet", "floor: source pause, no other requests", samples=quiet_pauses)
        result.add_measure(
            "busy", f"source pause, while {forks} forks start", samples=busy_pauses, floor="quiet",
            target=Target("ratio", 2),
        )  # fmt: skip
        result.add_measure("alone", "a fork of one client, no other requests", samples=lone_forks)
        title = f"a fork of one client, while {forks} forks of another client start"
        result.add_measure("beside", title, samples=forks_in_crowd, floor="alone")
        result.add_measure("crowd", f"until these {forks} forks exist", samples=crowds)
        return result


async def _capture_during_forks(host: KvmXfs, snapshot: Snapshot, source: Sandbox, count: int) -> list[float]:
    """Capture ``source`` until ``count`` forks of ``snapshot`` exist, and return the pauses.

    The last capture may end after the forks.
    """
    engine = host.live.engine
    pauses: list[float] = []
    task = asyncio.create_task(engine.forks.fork(snapshot.id, ForkSpec(count=count)))
    while not task.done():
        captured = await engine.snapshots.create(source.id)
        pauses.append(captured.pause_ms)
        await engine.snapshots.delete(captured.id)
    for fork in await task:
        if isinstance(fork, Sandbox):
            await engine.sandboxes.delete(fork.id)
    return pauses


async def _fork_in_crowd(host: KvmXfs, snapshot: Snapshot, count: int) -> tuple[list[float], float]:
    """Create single forks as another client until ``count`` forks of the first client exist.

    Return the times of the single forks, and that of the many forks, in milliseconds.
    """
    engine = host.live.engine
    times: list[float] = []
    start = time.perf_counter()
    requester.set(Requester("crowd", "1"))
    task = asyncio.create_task(engine.forks.fork(snapshot.id, ForkSpec(count=count)))
    requester.set(Requester("other", "2"))
    while not task.done():
        times.append(await _fork_once(host, snapshot))
    forks = await task
    elapsed = (time.perf_counter() - start) * 1000
    for fork in forks:
        if isinstance(fork, Sandbox):
            await engine.sandboxes.delete(fork.id)
    return times, elapsed


async def _fork_once(host: KvmXfs, snapshot: Snapshot) -> float:
    """Create a fork, and return the time in milliseconds. Then delete the fork."""
    engine = host.live.engine
    start = time.perf_counter()
    fork = await engine.forks.create(snapshot.id, ForkSpec())
    elapsed = (time.perf_counter() - start) * 1000
    await engine.sandboxes.delete(fork.id)
    return elapsed
