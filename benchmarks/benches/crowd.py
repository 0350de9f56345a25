"""Measure how long a capture stops its sandbox while another client creates many forks."""

from __future__ import annotations

import asyncio
import time

from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Sandbox, Snapshot

_COOLDOWN_SECONDS = 0.3


class Crowd:
    name = "crowd"
    title = "capture of a running sandbox while many forks are created"

    def run(self, ctx: Context) -> Result:
        forks, rounds = ctx.choose(full=50, quick=4), ctx.choose(full=3, quick=1)
        result = Result(self.name, self.title, {"forks": forks, "rounds": rounds})
        quiet_pauses: list[float] = []
        busy_pauses: list[float] = []
        host = ctx.kvm_xfs
        with host.temporary_snapshot() as snapshot, ctx.showing_progress("rounds", rounds) as steps:
            source = host.create_sandbox(snapshot.id)
            for _ in range(rounds):
                for _ in range(ctx.choose(full=10, quick=3)):
                    time.sleep(_COOLDOWN_SECONDS)
                    captured = host.capture(source)
                    quiet_pauses.append(captured.pause_ms)
                    host.delete_snapshot(captured)
                busy_pauses += host.live.do(_capture_during_forks(host, snapshot, source, forks), timeout=600)
                steps.advance()
        result.add_measure("quiet", "floor: source pause, no other requests", samples=quiet_pauses)
        result.add_measure(
            "busy", f"source pause, while {forks} forks start", samples=busy_pauses, floor="quiet",
            target=Target("ratio", 2),
        )  # fmt: skip
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
