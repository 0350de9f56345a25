"""Measure what a pool of blank QEMU processes would gain: processes that wait before they create their machine.

QEMU's option -preconfig makes it wait for commands that name the memory and the disk. So a process that was started in
advance could become a fork of any snapshot. The gateway has no such pool; this bench shows whether a pool would pay.
"""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.context import Context
from benchmarks.measure import Result

_COOLDOWN_SECONDS = 0.3


class Blank:
    name = "blank"
    title = "fork from a QEMU process that was started in advance with -preconfig"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=100, quick=5)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        with (
            host.temporary_snapshot() as snapshot,
            host.raw_qemu(snapshot) as raw,
            ctx.showing_progress("forks", rounds) as steps,
        ):
            for number in range(rounds):
                # Alternate the order, because the first start of a round may find warmer caches.
                for is_blank in (True, False) if number % 2 else (False, True):
                    (machine,) = raw.prepare_machines(1)
                    if is_blank:
                        machine.start_blank()
                        time.sleep(_COOLDOWN_SECONDS)
                        samples["blank"].append(machine.load_into_blank())
                    else:
                        samples["floor"].append(machine.start(as_root=True).running_ms)
                    machine.stop()
                    time.sleep(_COOLDOWN_SECONDS)
                samples["gain"].append(samples["floor"][-1] - samples["blank"][-1])
                steps.advance()
        result.add_measure("floor", "floor: QEMU exec, QMP answer, state; no gateway", samples=samples["floor"])
        result.add_measure(
            "blank", "the same from a blank process, started in advance", samples=samples["blank"], floor="floor"
        )
        result.add_measure("gain", "what the blank process saves in a round", samples=samples["gain"])
        return result
