"""Measure cold starts: forks that boot from the disk of a snapshot, until the engine returns them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.measure import Result
from benchmarks.raw_qemu import RawQemu
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Sandbox

_COOLDOWN_SECONDS = 0.5


class Boot:
    name = "boot"
    title = "cold start of a template"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=12, quick=2)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        template = host.live.engine.templates.get(TEMPLATE)
        with host.raw_qemu(template) as raw, ctx.showing_progress("cold starts", rounds) as steps:
            for _ in range(rounds):
                _measure_floor(raw, samples)
                time.sleep(_COOLDOWN_SECONDS)
                _measure_boot(host, samples)
                time.sleep(_COOLDOWN_SECONDS)
                steps.advance()
        floor_title = "floor: QEMU and the same kernel until it looks for init"
        result.add_measure("floor", floor_title, samples=samples["floor"])
        result.add_measure("boot", "cold start, until the engine returned", samples=samples["boot"], floor="floor")
        result.add_measure("floor_cpu", f"{floor_title}: CPU time", samples=samples["floor_cpu"])
        result.add_measure("boot_cpu", "cold start: QEMU's CPU time", samples=samples["boot_cpu"], floor="floor_cpu")
        return result


def _measure_floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.prepare_machines(1)
    ms, cpu_ms = machine.boot_until_init()
    machine.stop()
    samples["floor"].append(ms)
    samples["floor_cpu"].append(cpu_ms)


def _measure_boot(host: KvmXfs, samples: dict[str, list[float]]) -> None:
    start = time.perf_counter()
    fork = host.live.engine.forks.fork(TEMPLATE, ForkSpec(cold_start=True))
    (sandbox,) = host.live.do(fork, timeout=300)
    samples["boot"].append((time.perf_counter() - start) * 1000)
    assert isinstance(sandbox, Sandbox)
    samples["boot_cpu"].append(_read_cpu_ms(int(sandbox.host["pid"])))
    host.delete_sandboxes(sandbox)


def _read_cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") * 1000
