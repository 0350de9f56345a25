"""Measure how long it takes to clone a running sandbox n times in one all-or-nothing operation."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict

from benchmarks.answers import Answers, recording_answers
from benchmarks.context import Context, KvmXfs, read_available_memory_bytes
from benchmarks.cpu_time import read_cpu_ms
from benchmarks.measure import Result, Target
from benchmarks.timers import FunctionRef, Span, Timers, split_time
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.kvm_xfs.capture import Capture
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import Sandbox

_RESERVED_MEMORY_BYTES = 1 << 30
_MIN_BYTES_PER_CLONE = 64 << 20
_MANY = 4
"""From this number of clones, the cores are busy, so that the CPU time of the clones is a floor."""
_TIMED_FUNCTIONS: dict[str, FunctionRef] = {
    "sync": (Captures, "_sync_guest"),
    "prepare": (Capture, "_prepare"),
    "pause": (Capture, "_capture_while_stopped"),
    "pages": (Capture, "_complete_image"),
    "fork": (MachineLifecycle, "fork"),
    "save": (KvmXfsHost, "save"),
}
_PART_TITLES = {
    "sync": "flush the guest's file system",
    "prepare": "clone the previous memory image, and list the written pages",
    "pause": "the pause",
    "pages": "write the pages",
    "fork": "start the clone, until its agent has answered",
    "save": "write the records of the source and of the clone",
    "rest": "everything else",
}


class Clone:
    name = "clone"
    title = "n clones of a running sandbox at the same time"

    def run(self, ctx: Context) -> Result:
        host = ctx.kvm_xfs
        concurrency = host.config.limits.concurrency
        result = Result(self.name, self.title, {"concurrency": concurrency, "failures": 0})
        rounds_by_count = {1: 2, 4: 1} if ctx.quick else {1: 30, 10: 5, 100: 2}
        timers = Timers()
        with (
            host.temporary_snapshot() as snapshot,
            host.raw_qemu(snapshot) as raw,
            timers.recording(_TIMED_FUNCTIONS),
            recording_answers() as answers,
        ):
            source = host.create_sandbox(snapshot.id)
            parts: list[float] = []
            phases: dict[str, list[float]] = defaultdict(list)
            cpu_times: list[float] = []
            time.sleep(2)
            for requested_count, rounds in rounds_by_count.items():
                count = _limit_clone_count(host, source, requested_count, result)
                samples: dict[str, list[float]] = defaultdict(list)
                with ctx.showing_progress(f"n = {count}", rounds) as steps:
                    for _ in range(rounds):
                        samples["floor"].append(raw.start_concurrently(count, concurrency))
                        raw.prepare_machines(count)  # stop the raw machines to free memory for the clones
                        timers.take()
                        span = _measure_clones(host, source, count, result, answers, samples)
                        if count == 1 and span is not None:
                            spans = {key: calls for key, calls in timers.take().items() if key in _PART_TITLES}
                            for key, value in split_time(span, spans).items():
                                phases[key].append(value)
                            parts.append(_measure_parts(host, source, answers))
                        steps.advance()
                _report(result, count, samples)
                if count >= _MANY:
                    _compare_with_cpu_time(result, count, cpu_times)
                if count == 1:
                    cpu_times = samples["cpu"]
                    result.add_parts("total_1", _PART_TITLES, phases)
            extra_ms = [total - part for total, part in zip(result.measures["total_1"].samples, parts, strict=True)]
            result.add_measure("parts", "the pause of a capture, plus a fork of it", samples=parts)
            result.add_measure("extra", "n = 1: longer than these parts by", samples=extra_ms, target=Target("p50", 10))
        result.notes += timers.describe_missing_functions()
        return result


def _measure_clones(
    host: KvmXfs,
    source: Sandbox,
    count: int,
    result: Result,
    answers: Answers,
    samples: dict[str, list[float]],
) -> Span | None:
    """Measure the time until ``count`` clones have answered. Then check that each clone works, and remove it.

    Adds the times, and the CPU time of a single clone's QEMU process, to ``samples``.

    Returns the measured time, or None if a clone did not answer.
    """
    answers.forget()
    start = time.perf_counter()
    results = host.live.do(host.live.engine.forks.clone(source.id, ForkSpec(count=count)), timeout=600)
    end = time.perf_counter()
    samples["returned"].append((end - start) * 1000)
    exchanges = answers.wait(count)
    span = None
    if len(exchanges) < count:
        result.notes.append(
            f"{count - len(exchanges)} of {count} clones did not answer, so the results of n = {count} do not "
            "include this round"
        )
    else:
        span = Span(start, max(end, exchanges[-1].end))
        samples["total"].append(span.ms)
    clones = [each for each in results if isinstance(each, Sandbox)]
    if count == 1 and clones:
        samples["cpu"].append(read_cpu_ms(int(clones[0].host["pid"])))
    names = host.live.do(_read_hostnames(host, clones), timeout=600)
    result.settings["failures"] += max(count - len(set(names)), count - len(exchanges))
    host.delete_sandboxes(*clones)
    return span


def _compare_with_cpu_time(result: Result, count: int, cpu_times: list[float]) -> None:
    """Compare the time for ``count`` clones with the CPU time of as many single clones, spread over all cores."""
    cores = os.cpu_count() or 1
    ideal_times = [each * count / cores for each in cpu_times]
    result.add_measure(
        f"cpu_{count}", f"floor: {count} x the CPU time of one clone, on {cores} cores", samples=ideal_times
    )
    result.add_measure(
        f"wall_{count}", f"n = {count}, compared with this CPU time", samples=result.measures[f"total_{count}"].samples,
        floor=f"cpu_{count}", target=Target("ratio", 1.3),
    )  # fmt: skip


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


def _report(result: Result, count: int, samples: dict[str, list[float]]) -> None:
    result.add_measure(
        f"floor_{count}", f"floor: {count} x QEMU, with the same concurrency, no gateway", samples=samples["floor"]
    )
    result.add_measure(f"returned_{count}", f"n = {count}, until the engine returned", samples=samples["returned"])
    result.add_measure(
        f"total_{count}", f"n = {count}, until all have answered", samples=samples["total"], floor=f"floor_{count}"
    )
    per_clone = [elapsed / count for elapsed in samples["total"]]
    result.add_measure(f"each_{count}", f"n = {count}, per clone", samples=per_clone)
