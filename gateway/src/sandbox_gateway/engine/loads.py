"""Measure the resource use of running sandboxes, and keep a short history in memory.

The numbers come from the host, not from guests, which could claim anything. The history is lost when the gateway stops.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.base import Load
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState

SAMPLE_INTERVAL_SECONDS = 5.0
HISTORY_SECONDS = 600.0
_MIN_INTERVAL_SECONDS = 1.0
"""Minimum time between two samples: over a shorter time, the CPU use cannot be measured accurately."""
_MAX_AGE_SECONDS = 3 * SAMPLE_INTERVAL_SECONDS
"""Older samples of running sandboxes do not count towards the totals."""

log = Logger("engine")


@dataclass(frozen=True)
class Sample:
    """The resource use of a sandbox at one moment. None: the host cannot measure this resource.

    ``time``: in seconds since 1970; ``cpu_percent``: the average since the previous sample (or since the start of the
    machine), as a percentage of all CPUs of the sandbox. ``received_rate``, ``sent_rate``: the average number of bytes
    per second since the previous sample of the machine.
    """

    time: float
    cpu_percent: float | None
    memory_bytes: int | None
    disk_bytes: int | None
    received_rate: float | None = None
    sent_rate: float | None = None


_NUMBERS_PER_SAMPLE = 6


@dataclass
class _History:
    """The samples of one sandbox. Numbers are packed, because there can be many thousands; NaN stands for None."""

    numbers: array[float] = field(default_factory=lambda: array("d"))
    instance: str = ""
    load: Load = field(default_factory=Load)
    """The last measurement of this instance."""
    measured_at: float = 0.0
    """The time of that measurement, on the monotonic clock."""

    def add(self, sample: Sample) -> None:
        values = (
            sample.time,
            sample.cpu_percent,
            sample.memory_bytes,
            sample.disk_bytes,
            sample.received_rate,
            sample.sent_rate,
        )
        self.numbers.extend(math.nan if value is None else value for value in values)
        earliest_time = sample.time - HISTORY_SECONDS
        expired_count = sum(sampled_at < earliest_time for sampled_at in self.numbers[::_NUMBERS_PER_SAMPLE])
        del self.numbers[: expired_count * _NUMBERS_PER_SAMPLE]

    def iterate_samples(self) -> Iterator[Sample]:
        for index in range(0, len(self.numbers), _NUMBERS_PER_SAMPLE):
            sampled_at, cpu, memory, disk, received, sent = self.numbers[index : index + _NUMBERS_PER_SAMPLE]
            yield Sample(
                sampled_at,
                _to_number(cpu),
                _to_integer(memory),
                _to_integer(disk),
                _to_number(received),
                _to_number(sent),
            )

    @property
    def newest_sample(self) -> Sample | None:
        return next(_History(self.numbers[-_NUMBERS_PER_SAMPLE:]).iterate_samples(), None)


def _to_number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _to_integer(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


class Loads:
    """Samples of running sandboxes, taken every ``SAMPLE_INTERVAL_SECONDS`` and kept for ``HISTORY_SECONDS``."""

    def __init__(self, context: Context) -> None:
        self._host = context.host
        self._index = context.index
        self._histories: dict[str, _History] = {}
        self._has_failed = False

    async def watch(self) -> None:
        """Take samples at regular intervals. Never returns."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)
            for id in self._histories.keys() - self._index.sandboxes.keys():
                del self._histories[id]
            try:
                await self._measure(
                    each for each in self._index.list_running_sandboxes() if not self._has_fresh_sample(each)
                )
            except Exception as error:
                self._log_failure(error)
            else:
                self._has_failed = False

    async def get_history(self, ref: str, start: float = 0, end: float = math.inf) -> Sequence[Sample]:
        """Return the samples of a sandbox from ``start`` to ``end``, oldest first.

        A running sandbox is measured first. A paused sandbox has only samples from before its pause.
        """
        sandbox = self._index.get_sandbox(ref)
        if sandbox.state is SandboxState.RUNNING and end >= time.time() and not self._has_fresh_sample(sandbox):
            await self._measure([sandbox])
        history = self._histories.get(sandbox.id)
        earliest_time = max(start, time.time() - HISTORY_SECONDS)
        return (
            [sample for sample in history.iterate_samples() if earliest_time <= sample.time <= end] if history else []
        )

    def list_current_samples(self) -> Iterator[tuple[Sandbox, Sample]]:
        """Yield the running sandboxes that were measured recently, with their newest samples."""
        earliest_time = time.time() - _MAX_AGE_SECONDS
        for sandbox in self._index.list_running_sandboxes():
            newest_sample = self._find_newest_sample(sandbox)
            if newest_sample is not None and newest_sample.time >= earliest_time:
                yield sandbox, newest_sample

    def _find_newest_sample(self, sandbox: Sandbox) -> Sample | None:
        history = self._histories.get(sandbox.id)
        return history.newest_sample if history else None

    def _has_fresh_sample(self, sandbox: Sandbox) -> bool:
        newest_sample = self._find_newest_sample(sandbox)
        return newest_sample is not None and abs(time.time() - newest_sample.time) < _MIN_INTERVAL_SECONDS

    async def _measure(self, sandboxes: Iterable[Sandbox]) -> None:
        sandboxes = list(sandboxes)
        if not sandboxes:
            return
        loads = await self._host.measure_loads(sandboxes)
        sampled_at, measured_at = time.time(), time.monotonic()
        for sandbox in sandboxes:
            load = loads.get(sandbox.instance)
            # The sandbox may have been removed or rolled back in the meantime.
            current_sandbox = self._index.sandboxes.get(sandbox.id)
            if load is not None and current_sandbox is not None and current_sandbox.instance == sandbox.instance:
                history = self._histories.setdefault(sandbox.id, _History())
                history.add(_build_sample(history, sandbox, load, sampled_at, measured_at))
                history.instance, history.load, history.measured_at = sandbox.instance, load, measured_at

    def _log_failure(self, error: Exception) -> None:
        """Log only the first of consecutive failures, because they are usually the same."""
        if not self._has_failed:
            reason = error.message if isinstance(error, GatewayError) else repr(error)
            log.warning("the resource usage could not be measured", reason=reason)
        self._has_failed = True


def _build_sample(history: _History, sandbox: Sandbox, load: Load, sampled_at: float, measured_at: float) -> Sample:
    """Return a sample with the averages since the last measurement in ``history``."""
    is_first = history.instance != sandbox.instance
    last_load = Load() if is_first else history.load
    elapsed_seconds = load.running_seconds if is_first else measured_at - history.measured_at

    def compute_rate(count: float | None, last_count: float | None) -> float | None:
        if count is None or last_count is None or elapsed_seconds <= 0:
            return None
        return max(0.0, (count - last_count) / elapsed_seconds)

    if load.cpu_percent is not None:
        cpu_percent: float | None = load.cpu_percent
    else:
        cpu_rate = compute_rate(load.cpu_seconds, 0 if is_first else last_load.cpu_seconds)
        cpu_percent = None if cpu_rate is None else 100 * cpu_rate
    return Sample(
        sampled_at,
        None if cpu_percent is None else cpu_percent / sandbox.resources.cpus,
        load.memory_bytes,
        load.disk_bytes,
        compute_rate(load.received_bytes, last_load.received_bytes),
        compute_rate(load.sent_bytes, last_load.sent_bytes),
    )


def sum_samples(samples: Iterable[tuple[Sandbox, Sample]]) -> dict[str, float]:
    """Return the total resource use of sandboxes.

    ``cpus``, ``memory_bytes``, ``disk_bytes``, and in bytes per second ``received_rate`` and ``sent_rate``.
    """
    sums = dict.fromkeys(("cpus", "memory_bytes", "disk_bytes", "received_rate", "sent_rate"), 0.0)
    for sandbox, sample in samples:
        sums["cpus"] += (sample.cpu_percent or 0) / 100 * sandbox.resources.cpus
        sums["memory_bytes"] += sample.memory_bytes or 0
        sums["disk_bytes"] += sample.disk_bytes or 0
        sums["received_rate"] += sample.received_rate or 0
        sums["sent_rate"] += sample.sent_rate or 0
    return sums
