"""Measure how long a rollback takes, and for how long the sandbox does not answer."""

from __future__ import annotations

import time

from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result
from benchmarks.ping import Ping

_COOLDOWN_SECONDS = 0.5


class Rollback:
    name = "rollback"
    title = "rollback of a running sandbox"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=30, quick=4)
        result = Result(self.name, self.title, {"rounds": rounds})
        host = ctx.kvm_xfs
        floor: list[float] = []
        windows: list[tuple[float, float]] = []
        with host.temporary_snapshot() as snapshot, host.raw_qemu(snapshot) as raw:
            sandbox = host.create_sandbox(snapshot.id)
            with Ping(str(sandbox.host["address"])) as ping, ctx.showing_progress("rollbacks", rounds) as steps:
                host.live.call(host.live.engine.background.start, _follow_address(host, ping, rounds))
                for _ in range(rounds):
                    (machine,) = raw.prepare_machines(1)
                    floor.append(machine.start().running_ms)
                    machine.stop()
                    time.sleep(_COOLDOWN_SECONDS)
                    start = time.monotonic()
                    host.live.do(host.live.engine.sandboxes.rollback(sandbox.id, snapshot.id))
                    windows.append((start, time.monotonic()))
                    steps.advance()
                time.sleep(_COOLDOWN_SECONDS)
        outages = [ping.find_longest_wait(start, end + _COOLDOWN_SECONDS / 2) for start, end in windows]
        quiet_waits = [ping.find_longest_wait(start - _COOLDOWN_SECONDS / 2, start) for start, _ in windows]
        result.add_measure("floor", "floor: QEMU exec, QMP answer, device state; no gateway", samples=floor)
        durations = [(end - start) * 1000 for start, end in windows]
        result.add_measure("rollback", "rollback, until the old machine is removed", samples=durations, floor="floor")
        result.add_measure("quiet", "longest wait for a ping reply, without a rollback", samples=quiet_waits)
        result.add_measure("outage", "longest wait for a ping reply during a rollback", samples=outages, floor="quiet")
        return result


async def _follow_address(host: KvmXfs, ping: Ping, change_count: int) -> None:
    """Ping the sandbox's new address whenever it changes, like a client that queries the gateway for the address."""
    with host.live.engine.events.subscribed() as events:
        while change_count:
            event = await events.get()
            if event.type == "sandbox.replaced":
                ping.change_address(host.live.engine.agents.get_endpoint(event.data["sandboxID"])[0])
                change_count -= 1
