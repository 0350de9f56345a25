"""Measure the cost of an idle fork: private memory and unshared blocks."""

from __future__ import annotations

import os
import time

from benchmarks.context import MEMORY_MB, Context, KvmXfs
from benchmarks.measure import Result
from benchmarks.raw_qemu import memory_of
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Sandbox


class Idle:
    name = "idle"
    title = "an idle fork"

    def run(self, ctx: Context) -> Result:
        count, seconds = ctx.rounds(full=10, quick=3), ctx.rounds(full=15, quick=3)
        host = ctx.kvm_xfs
        settings = {"forks": count, "seconds_idle": seconds, "guest_memory_mb": MEMORY_MB}
        result = Result(self.name, self.title, settings)
        with host.source() as snapshot, host.raw(snapshot) as raw, ctx.steps("steps", 3) as steps:
            machines = raw.machines(count)
            for machine in machines:
                machine.idle()
            time.sleep(1)
            empty = [dict(memory_of(machine.pid))["Pss"] for machine in machines]
            raw.machines(count)
            steps.done()
            before = _used_bytes(host)
            forks = host.live.do(host.live.engine.forks.fork(snapshot.id, ForkSpec(count=count)))
            time.sleep(seconds)
            steps.done()
            running = [fork for fork in forks if isinstance(fork, Sandbox)]
            costs = [host.live.do(host.live.engine.sandboxes.usage(fork.id)) for fork in running]
            private = [dict(memory_of(fork.host["pid"]))["Private_Dirty"] for fork in running]
            grown = (_used_bytes(host) - before) / count
            steps.done()
        result.measure("floor", "floor: memory (PSS) of a QEMU that holds no guest", "bytes", samples=empty)
        pss = [cost.memory_bytes for cost in costs]
        result.measure("pss", "memory (PSS) of an idle fork", "bytes", samples=pss, floor="floor")
        result.measure("private", "its own memory (private, dirty)", "bytes", samples=private)
        disk = [cost.disk_bytes for cost in costs]
        result.measure("disk", "its own disk blocks (not shared)", "bytes", samples=disk)
        result.measure("grown", "growth of the file system per fork, records included", "bytes", samples=[grown])
        return result


def _used_bytes(host: KvmXfs) -> int:
    """Return the bytes in use on the state's file system, once all data is on the disk."""
    os.sync()
    found = os.statvfs(host.mount_point)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
