"""Measure how long it takes to clone a running sandbox n times in one all-or-nothing operation."""

from __future__ import annotations

import asyncio
import time

from benchmarks.answers import Answers, recording_answers
from benchmarks.context import Context, KvmXfs, read_available_memory_bytes
from benchmarks.measure import Result, Target
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import Sandbox

_RESERVED_MEMORY_BYTES = 1 << 30
_MIN_BYTES_PER_CLONE = 64 << 20


class Clone:
    name = "clone"
    title = "n clones of a running sandbox at the same time"

    def run(self, ctx: Context) -> Result:
        host = ctx.kvm_xfs
        concurrency = host.config.limits.concurrency
        result = Result(self.name, self.title, {"concurrency": concurrency, "failures": 0})
        rounds_by_count = {1: 2, 4: 1} if ctx.quick else {1: 30, 10: 5, 100: 2}
        with host.temporary_snapshot() as snapshot, host.raw_qemu(snapshot) as raw, recording_answers() as answers:
            source = host.create_sandbox(snapshot.id)
            parts: list[float] = []
            time.sleep(2)
            for requested_count, rounds in rounds_by_count.items():
                count = _limit_clone_count(host, source, requested_count, result)
                floor: list[float] = []
                return_times: list[float] = []
                total_times: list[float] = []
                with ctx.showing_progress(f"n = {count}", rounds) as steps:
                    for _ in range(rounds):
                        floor.append(raw.start_concurrently(count, concurrency))
                        raw.prepare_machines(count)  # stop the raw machines to free memory for the clones
                        _measure_clones(host, source, count, result, answers, return_times, total_times)
                        if count == 1 and len(total_times) > len(parts):
                            parts.append(_measure_parts(host, source, answers))
                        steps.advance()
                _report(result, count, floor, return_times, total_times)
            extra_ms = [total - part for total, part in zip(result.measures["total_1"].samples, parts, strict=True)]
            result.add_measure("parts", "the pause of a capture, plus a fork of it", samples=parts)
            result.add_measure("extra", "n = 1: longer than these parts by", samples=extra_ms, target=Target("p50", 10))
        return result


def _measure_clones(
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


def _measure_parts(host: KvmXfs, source: Sandbox, answers: Answers) -> float:
    """Return the milliseconds of a capture's pause and of a fork of the capture, until the fork has answered."""
    snapshot = host.capture(source)
    answers.forget()
    start = time.perf_counter()
    fork = host.create_sandbox(snapshot.id)
    end = max(time.perf_counter(), answers.wait(1)[-1].end)
    host.delete_sandboxes(fork)
    host.delete_snapshot(snapshot)
    return snapshot.pause_ms + (end - start) * 1000


async def _read_hostnames(host: KvmXfs, sandboxes: list[Sandbox]) -> list[str]:
    semaphore = asyncio.Semaphore(4)

    async def read_hostname(sandbox: Sandbox) -> str:
        async with semaphore:
            try:
                return (await host.live.engine.commands.exec(sandbox.id, ["hostname"])).stdout.decode().strip()
            except GatewayError:
                return ""

    return list(await asyncio.gather(*(read_hostname(sandbox) for sandbox in sandboxes)))


def _limit_clone_count(host: KvmXfs, source: Sandbox, requested_count: int, result: Result) -> int:
    """Return how many clones fit in memory, up to ``requested_count``. The estimate is based on the source's memory."""
    clone_bytes = max(_MIN_BYTES_PER_CLONE, host.live.do(host.live.engine.sandboxes.get_usage(source.id)).memory_bytes)
    max_clones = max(1, (read_available_memory_bytes() - _RESERVED_MEMORY_BYTES) // clone_bytes)
    if max_clones < requested_count:
        result.notes.append(
            f"{max_clones} instead of {requested_count} clones, because each needs {clone_bytes >> 20} MiB of memory"
        )
    return min(max_clones, requested_count)


def _report(
    result: Result, count: int, floor: list[float], return_times: list[float], total_times: list[float]
) -> None:
    result.add_measure(f"floor_{count}", f"floor: {count} x QEMU, with the same concurrency, no gateway", samples=floor)
    result.add_measure(f"returned_{count}", f"n = {count}, until the engine returned", samples=return_times)
    result.add_measure(
        f"total_{count}", f"n = {count}, until all have answered", samples=total_times, floor=f"floor_{count}"
    )
    per_clone = [elapsed / count for elapsed in total_times]
    result.add_measure(f"each_{count}", f"n = {count}, per clone", samples=per_clone)
