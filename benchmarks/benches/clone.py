"""Clone a running sandbox into n siblings: all of them or none."""

from __future__ import annotations

import asyncio
import time

from benchmarks.answers import Answers, watching
from benchmarks.context import Context, KvmXfs, available_memory
from benchmarks.measure import Result
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import Sandbox

_SPARE = 1 << 30
_EACH_AT_LEAST = 64 << 20


class Clone:
    name = "clone"
    title = "clone of a running sandbox, n at once"

    def run(self, ctx: Context) -> Result:
        host = ctx.kvm_xfs
        at_once = host.config.limits.concurrency
        result = Result(self.name, self.title, {"concurrency": at_once, "failures": 0})
        plan = {1: 2, 4: 1} if ctx.quick else {1: 10, 10: 5, 50: 2}
        with host.source() as snapshot, host.raw(snapshot) as raw, watching() as answers:
            source = host.sandbox(snapshot.id)
            time.sleep(2)
            for wanted, rounds in plan.items():
                count = _fitting_count(host, source, wanted, result)
                floor: list[float] = []
                returned: list[float] = []
                total: list[float] = []
                with ctx.steps(f"n = {count}", rounds) as steps:
                    for _ in range(rounds):
                        floor.append(raw.start_together(count, at_once))
                        raw.machines(count)  # end the raw machines, so that their memory is free for the clones
                        _clone(host, source, count, result, answers, returned, total)
                        steps.done()
                _report(result, count, floor, returned, total)
        return result


def _clone(
    host: KvmXfs,
    source: Sandbox,
    count: int,
    result: Result,
    answers: Answers,
    returned: list[float],
    total: list[float],
) -> None:
    """Time ``count`` siblings until all have answered. Then check that each sibling works, and remove it."""
    answers.forget()
    start = time.perf_counter()
    made = host.live.do(host.live.engine.forks.clone(source.id, ForkSpec(count=count)), timeout=600)
    end = time.perf_counter()
    returned.append((end - start) * 1000)
    answered = answers.wait(count)
    if len(answered) < count:
        result.notes.append(
            f"{count - len(answered)} of {count} clones did not answer: the results of n = {count} do not "
            "include this round"
        )
    else:
        total.append((max(end, answered[-1].end) - start) * 1000)
    clones = [each for each in made if isinstance(each, Sandbox)]
    names = host.live.do(_hostnames(host, clones), timeout=600)
    result.settings["failures"] += max(count - len(set(names)), count - len(answered))
    host.kill(*clones)


async def _hostnames(host: KvmXfs, sandboxes: list[Sandbox]) -> list[str]:
    gate = asyncio.Semaphore(4)

    async def read_hostname(sandbox: Sandbox) -> str:
        async with gate:
            try:
                return (await host.live.engine.commands.exec(sandbox.id, ["hostname"])).stdout.decode().strip()
            except GatewayError:
                return ""

    return list(await asyncio.gather(*(read_hostname(sandbox) for sandbox in sandboxes)))


def _fitting_count(host: KvmXfs, source: Sandbox, wanted: int, result: Result) -> int:
    """Return how many siblings fit in memory, estimated from the memory use of the source."""
    each = max(_EACH_AT_LEAST, host.live.do(host.live.engine.sandboxes.usage(source.id)).memory_bytes)
    fit = max(1, (available_memory() - _SPARE) // each)
    if fit < wanted:
        result.notes.append(f"{fit} instead of {wanted} clones, because each needs {each >> 20} MiB of memory")
    return min(fit, wanted)


def _report(result: Result, count: int, floor: list[float], returned: list[float], total: list[float]) -> None:
    result.measure(f"floor_{count}", f"floor: {count} x QEMU, with the same concurrency, no gateway", samples=floor)
    result.measure(f"returned_{count}", f"n = {count}, until the engine returned", samples=returned)
    result.measure(f"total_{count}", f"n = {count}, until all have answered", samples=total, floor=f"floor_{count}")
    each = [taken / count for taken in total]
    result.measure(f"each_{count}", f"n = {count}, per clone", samples=each)
