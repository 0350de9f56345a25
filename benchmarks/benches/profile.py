"""Show where the time of a cold fork and of its first command goes, without KVM.

QEMU translates each block of guest code when it first runs in a process. This bench counts these blocks, and QEMU's CPU
time, from the start of a fork until its agent has answered, during its first command, and during another command.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from benchmarks.context import Context, KvmXfs
from benchmarks.cpu_time import read_cpu_ms
from benchmarks.measure import Result
from benchmarks.timers import time_call
from benchmarks.translation import find_machine, read_translated_code
from sandbox_gateway.records import Sandbox

_SETTLE_SECONDS = 0.5
_TITLES = {
    "answered": "a cold fork, until its agent has answered",
    "first": "its first command",
    "again": "another command",
}


class Profile:
    name = "profile"
    title = "code that QEMU translates for a cold fork and its first command"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=30, quick=3)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        with host.temporary_snapshot() as snapshot, ctx.showing_progress("forks", rounds) as steps:
            for _ in range(rounds):
                sandbox, milliseconds = time_call(lambda: host.create_sandbox(snapshot.id))
                _record(samples, "answered", milliseconds, _Usage(0, 0), _read_usage(host, sandbox))
                for key in ("first", "again"):
                    time.sleep(_SETTLE_SECONDS)  # the guest ends other work, so that only the command is measured
                    usage = _read_usage(host, sandbox)
                    milliseconds = _time_command(host, sandbox)
                    _record(samples, key, milliseconds, usage, _read_usage(host, sandbox))
                host.delete_sandboxes(sandbox)
                steps.advance()
        for key, title in _TITLES.items():
            floor = "" if key == "again" else "again"
            result.add_measure(key, title, samples=samples[f"{key}.ms"], floor=floor)
            result.add_measure(f"{key}_cpu", f"{title}: QEMU's CPU time", samples=samples[f"{key}.cpu"])
            result.add_measure(
                f"{key}_blocks", f"{title}: translated blocks", "count", samples=samples[f"{key}.blocks"]
            )
        if not any(samples["answered.blocks"]):
            result.notes.append("this machine runs guests with KVM, which translates nothing")
        return result


def _time_command(host: KvmXfs, sandbox: Sandbox) -> float:
    execution = host.live.engine.commands.exec(sandbox.id, ["true"])
    result, milliseconds = time_call(lambda: host.live.do(execution))
    if result.exit_code != 0:
        raise RuntimeError(f"the fork could not run a command: {result}")
    return milliseconds


class _Usage(NamedTuple):
    """The CPU time of all threads of a QEMU process since its start, and the blocks that it has translated."""

    cpu_ms: float
    blocks: int


def _read_usage(host: KvmXfs, sandbox: Sandbox) -> _Usage:
    cpu_ms = read_cpu_ms(find_machine(host, sandbox).pid)
    return _Usage(cpu_ms, read_translated_code(host, sandbox).block_count)


def _record(samples: dict[str, list[float]], key: str, milliseconds: float, before: _Usage, after: _Usage) -> None:
    samples[f"{key}.ms"].append(milliseconds)
    samples[f"{key}.cpu"].append(after.cpu_ms - before.cpu_ms)
    samples[f"{key}.blocks"].append(after.blocks - before.blocks)
