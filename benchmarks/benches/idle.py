"""Measure the cost of an idle fork: its private memory and unshared disk blocks."""

from __future__ import annotations

import os
import time

from benchmarks.context import MEMORY_MB, Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import read_memory_usage
from benchmarks.translation import read_translated_code
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Sandbox


class Idle:
    name = "idle"
    title = "an idle fork"

    def run(self, ctx: Context) -> Result:
        count, idle_seconds = ctx.choose(full=10, quick=3), ctx.choose(full=15, quick=3)
        host = ctx.kvm_xfs
        settings = {"forks": count, "seconds_idle": idle_seconds, "guest_memory_mb": MEMORY_MB}
        result = Result(self.name, self.title, settings)
        with (
            host.temporary_snapshot() as snapshot,
            host.raw_qemu(snapshot) as raw,
            ctx.showing_progress("steps", 3) as steps,
        ):
            machines = raw.prepare_machines(count)
            for machine in machines:
                machine.start_without_guest()
            time.sleep(1)
            qemu_pss_bytes = [dict(read_memory_usage(machine.pid))["Pss"] for machine in machines]
            raw.prepare_machines(count)
            steps.advance()
            bytes_before = _measure_used_bytes(host)
            forks = host.live.do(host.live.engine.forks.fork(snapshot.id, ForkSpec(count=count)))
            time.sleep(idle_seconds)
            steps.advance()
            running_forks = [fork for fork in forks if isinstance(fork, Sandbox)]
            usages = [host.live.do(host.live.engine.sandboxes.get_usage(fork.id)) for fork in running_forks]
            code_bytes = [read_translated_code(host, fork).size for fork in running_forks]
            private_bytes = [dict(read_memory_usage(fork.host["pid"]))["Private_Dirty"] for fork in running_forks]
            growth_bytes = (_measure_used_bytes(host) - bytes_before) / count
            steps.advance()
        result.add_measure("floor", "floor: memory (PSS) of QEMU without a guest", "bytes", samples=qemu_pss_bytes)
        pss_bytes = [usage.memory_bytes for usage in usages]
        result.add_measure(
            "pss",
            "memory (PSS) of an idle fork",
            "bytes",
            samples=pss_bytes,
            floor="floor",
            target=Target("ratio", 1.5),
        )
        result.add_measure("private", "its private dirty memory", "bytes", samples=private_bytes)
        result.add_measure("code", "the code that QEMU translated for it", "bytes", samples=code_bytes)
        disk_bytes = [usage.disk_bytes for usage in usages]
        result.add_measure("disk", "its unshared disk blocks", "bytes", samples=disk_bytes)
        result.add_measure(
            "grown", "growth of the file system per fork, records included", "bytes", samples=[growth_bytes]
        )
        return result


def _measure_used_bytes(host: KvmXfs) -> int:
    """Return how many bytes the file system of the state root uses, after writing all data to the disk."""
    os.sync()
    status = os.statvfs(host.mount_point)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
