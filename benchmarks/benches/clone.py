"""Measure how long it takes to clone a running sandbox n times in one all-or-nothing operation."""

from __future__ import annotations

import asyncio
import time

from benchmarks.answers import Answers, watching
from benchmarks.context import Context, KvmXfs, available_memory
from benchmarks.measure import Result
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import Sandbox

_RESERVED_BYTES = 1 << 30
_MIN_BYTES_PER_CLONE = 64 << 20


class Clone:
    name = "clone"
    title = "n clones of a running sandbox at the same time"

    def run(self, ctx: Context) -> Result:
        host = ctx.kvm_xfs
        concurrency = host.config.limits.concurrency
        result = Result(self.name, self.title, {"concurrency": concurrency, "failures": 0})
        plan = {1: 2, 4: 1} if ctx.quick else {1: 10, 10: 5, 50: 2}
        with host.source() as snapshot, host.raw_qemu(snapshot) as raw, watching() as answers:
            source = host.create_sandbox(snapshot.id)
            time.sleep(2)
            for requested, rounds in plan.items():
                count = _limit_count(host, source, requested, result)
                floor: list[float] = []
                return_times: list[float] = []
                total_times: list[float] = []
                with ctx.steps(f"n = {count}", rounds) as steps:
                    for _ in range(rounds):
                        floor.append(raw.start_concurrently(count, concurrency))
                        raw.machines(count)  # stop the raw machines, so that their memory is free for the clones
                        _clone(host, source, count, result, answers, return_times, total_times)
                        steps.advance()
                _report(result, count, floor, return_times, total_times)
        return result


def _clone(
    host: KvmXfs,
    source: Sandbox,
    count: int,
    result: Result,
    answers: Answers,
    return_times: list[float],
    total_times: list[float],
) -> None:
    """Measure the time until ``count`` clones have answered. Then check that each clone works, and remove it."""
    answers.forget()
    start = time.perf_counter()
    results = host.live.do(host.live.engine.forks.clone(source.id, ForkSpec(count=count)), timeout=600)
    end = time.perf_counter()
    return_times.append((end - start) * 1000)
    exchanges = answers.wait(count)
    if len(exchanges) < count:
        result.notes.append(
            f"{count - len(exchanges)} of {count} clones did not answer, so the results of n = {count} do not "
            "include this round"
        )
    else:
        total_times.append((max(end, exchanges[-1].end) - start) * 1000)
    clones = [each for each in results if isinstance(each, Sandbox)]
    names = host.live.do(_read_hostnames(host, clones), timeout=600)
    result.settings["failures"] += max(count - len(set(names)), count - len(exchanges))
    host.delete_sandboxes(*clones)


async def _read_hostnames(host: KvmXfs, sandboxes: list[Sandbox]) -> list[str]:
    semaphore = asyncio.Semaphore(4)

    async def read_hostname(sandbox: Sandbox) -> str:
        async with semaphore:
            try:
                return (await host.live.engine.commands.exec(sandbox.id, ["hostname"])).stdout.decode().strip()
            except GatewayError:
                return ""

    return list(await asyncio.gather(*(read_hostname(sandbox) for sandbox in sandboxes)))


def _limit_count(host: KvmXfs, source: Sandbox, requested: int, result: Result) -> int:
    """Return how many clones fit in memory, at most ``requested``, estimated from the memory of the source."""
    clone_bytes = max(_MIN_BYTES_PER_CLONE, host.live.do(host.live.engine.sandboxes.usage(source.id)).memory_bytes)
    max_clones = max(1, (available_memory() - _RESERVED_BYTES) // clone_bytes)
    if max_clones < requested:
        result.notes.append(
            f"{max_clones} instead of {requested} clones, because each needs {clone_bytes >> 20} MiB of memory"
        )
    return min(max_clones, requested)


def _report(
    result: Result, count: int, floor: list[float], return_times: list[float], total_times: list[float]
) -> None:
    result.measure(f"floor_{count}", f"floor: {count} x QEMU, with the same concurrency, no gateway", samples=floor)
    result.measure(f"returned_{count}", f"n = {count}, until the engine returned", samples=return_times)
    result.measure(
        f"total_{count}", f"n = {count}, until all have answered", samples=total_times, floor=f"floor_{count}"
    )
    per_clone = [elapsed / count for elapsed in total_times]
    result.measure(f"each_{count}", f"n = {count}, per clone", samples=per_clone)
