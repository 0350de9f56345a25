"""Measure the cost of an idle fork: its private memory and unshared disk blocks."""

from __future__ import annotations

import os
import time

from benchmarks.context import MEMORY_MB, Context, KvmXfs
from benchmarks.measure import Result
from benchmarks.raw_qemu import read_memory
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
        with host.source() as snapshot, host.raw_qemu(snapshot) as raw, ctx.steps("steps", 3) as steps:
            machines = raw.machines(count)
            for machine in machines:
                machine.start_without_guest()
            time.sleep(1)
            qemu_pss = [dict(read_memory(machine.pid))["Pss"] for machine in machines]
            raw.machines(count)
            steps.advance()
            bytes_before = _used_bytes(host)
            forks = host.live.do(host.live.engine.forks.fork(snapshot.id, ForkSpec(count=count)))
            time.sleep(seconds)
            steps.advance()
            running = [fork for fork in forks if isinstance(fork, Sandbox)]
            costs = [host.live.do(host.live.engine.sandboxes.usage(fork.id)) for fork in running]
            private = [dict(read_memory(fork.host["pid"]))["Private_Dirty"] for fork in running]
            growth = (_used_bytes(host) - bytes_before) / count
            steps.advance()
        result.measure("floor", "floor: memory (PSS) of QEMU without a guest", "bytes", samples=qemu_pss)
        pss = [cost.memory_bytes for cost in costs]
        result.measure("pss", "memory (PSS) of an idle fork", "bytes", samples=pss, floor="floor")
        result.measure("private", "its private dirty memory", "bytes", samples=private)
        disk = [cost.disk_bytes for cost in costs]
        result.measure("disk", "its unshared disk blocks", "bytes", samples=disk)
        result.measure("grown", "growth of the file system per fork, records included", "bytes", samples=[growth])
        return result


def _used_bytes(host: KvmXfs) -> int:
    """Sync the file system of the state root and return how many bytes it uses."""
    os.sync()
    status = os.statvfs(host.mount_point)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
