"""The engine measures running sandboxes, and keeps a bounded history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox_gateway.engine import loads
from sandbox_gateway.errors import BackendFailed, NotFound
from sandbox_gateway.hosts.base import Load
from sandbox_gateway.records import Sandbox
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    """A host that returns ``load`` as the load of each machine, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(memory_bytes=5 << 20, disk_bytes=7 << 20, cpu_seconds=3.0, running_seconds=6.0)
        self.measured_names: list[list[str]] = []
        self.measurement_fails = False

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        self.measured_names.append([sandbox.name for sandbox in sandboxes])
        if self.measurement_fails:
            raise BackendFailed("the load cannot be read")
        return {sandbox.instance: self.load for sandbox in sandboxes if sandbox.instance in self.machines}


@pytest.fixture
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "SAMPLE_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(loads, "_MIN_INTERVAL_SECONDS", 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace both clocks of the module. The only element of the returned list is the current time."""
    now = [1000.0]
    monkeypatch.setattr(loads, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    return now


async def test_a_request_measures_a_running_sandbox(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "one", cpus=2, cold_start=True)
        time_before = time.time()
        (sample,) = await engine.loads.get_history("one")
        assert time_before <= sample.time <= time.time()
        # The average since the start of the machine: half of one of its two CPUs.
        assert (sample.cpu_percent, sample.memory_bytes, sample.disk_bytes) == (25.0, 5 << 20, 7 << 20)
        assert list(await engine.loads.get_history("one")) == [sample] and len(host.measured_names) == 1, (
            "the sample is fresh"
        )
        assert await engine.loads.get_history("one", end=time_before - 1) == [] and len(host.measured_names) == 1
        with pytest.raises(NotFound):
            await engine.loads.get_history("two")


async def test_cpu_use_is_the_average_since_the_last_sample(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "one", cpus=2, cold_start=True)
        for current_time, cpu_seconds in ((1000.0, 3.0), (1010.0, 23.0), (1020.0, 23.0)):
            clock[0] = current_time
            host.load = Load(cpu_seconds=cpu_seconds, running_seconds=6.0)
            samples = await engine.loads.get_history("one")
        assert [sample.cpu_percent for sample in samples] == [25.0, 100.0, 0.0]
        assert {sample.memory_bytes for sample in samples} == {None}, "values that were not measured are None"
        snapshot = await engine.snapshots.create("one")
        await engine.sandboxes.rollback(sandbox.id, snapshot.id)
        clock[0] = 1030.0
        host.load = Load(cpu_seconds=1.0, running_seconds=5.0)
        samples = await engine.loads.get_history("one")
        assert [sample.cpu_percent for sample in samples] == [25.0, 100.0, 0.0, 10.0], "the machine is a new one"
        clock[0] = 1040.0
        host.load = Load(cpu_percent=150)
        assert (await engine.loads.get_history("one"))[-1].cpu_percent == 75.0
        host.load = Load()
        clock[0] = 1050.0
        assert (await engine.loads.get_history("one"))[-1].cpu_percent is None


async def test_network_rates_are_the_averages_since_the_last_sample_of_the_machine(
    tmp_path: Path, clock: list[float]
) -> None:
    """The counters of a machine need not start at zero, because another one may have used the same interface."""
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "one", cold_start=True)
        for current_time, received, sent in ((1000.0, 7000, 500), (1010.0, 8000, 500), (1020.0, 8000, 600)):
            clock[0] = current_time
            host.load = Load(received_bytes=received, sent_bytes=sent, running_seconds=6.0)
            samples = await engine.loads.get_history("one")
        assert [(each.received_rate, each.sent_rate) for each in samples] == [(None, None), (100.0, 0.0), (0.0, 10.0)]
        sums = loads.sum_samples(engine.loads.list_current_samples())
        assert (sums["received_rate"], sums["sent_rate"]) == (0.0, 10.0)
        snapshot = await engine.snapshots.create("one")
        await engine.sandboxes.rollback(sandbox.id, snapshot.id)
        clock[0] = 1030.0
        assert (await engine.loads.get_history("one"))[-1].received_rate is None
        clock[0] = 1040.0
        host.load = Load()
        assert (await engine.loads.get_history("one"))[-1].received_rate is None


async def test_the_history_is_bounded_and_filtered(tmp_path: Path, clock: list[float]) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await create(engine, "one")
        for number in range(300):
            clock[0] = 1000.0 + 5 * number
            await engine.loads.get_history("one")
        samples = await engine.loads.get_history("one")
        assert len(samples) == loads.HISTORY_SECONDS / 5 + 1
        assert samples[0].time == clock[0] - loads.HISTORY_SECONDS and samples[-1].time == clock[0]
        filtered_samples = await engine.loads.get_history("one", start=clock[0] - 20, end=clock[0] - 10)
        assert [sample.time - clock[0] for sample in filtered_samples] == [-20, -15, -10]


@pytest.mark.usefixtures("short_intervals")
async def test_only_running_sandboxes_are_measured_regularly(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        assert host.measured_names == []
        running_sandbox = await create(engine, "one")
        await create(engine, "two")
        await engine.sandboxes.pause("two")
        await wait_until(lambda: host.measured_names.count(["one"]) > 5)
        host.measured_names.clear()
        await wait_until(lambda: len(host.measured_names) > 5)
        assert {name for names in host.measured_names for name in names} == {"one"}
        sample_count = len(await engine.loads.get_history("two"))
        assert len(await engine.loads.get_history("two")) == sample_count, (
            "the history of a paused sandbox does not grow"
        )
        assert [(sandbox.id, sample.memory_bytes) for sandbox, sample in engine.loads.list_current_samples()] == [
            (running_sandbox.id, 5 << 20)
        ]
        await engine.sandboxes.delete("one")
        await engine.sandboxes.delete("two")
        await wait_until(lambda: not engine.loads._histories)


@pytest.mark.usefixtures("short_intervals")
async def test_a_failed_measurement_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = _Host()
    host.measurement_fails = True
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "one")
        await wait_until(lambda: len(host.measured_names) > 5)
        assert caplog.text.count("the resource usage could not be measured") == 1
        assert list(engine.loads.list_current_samples()) == []
        host.measurement_fails = False
        await wait_until(lambda: list(engine.loads.list_current_samples()))


def test_a_history_needs_little_memory() -> None:
    """The history of 1000 sandboxes over ten minutes must not need more than a few MiB."""
    history = loads._History()
    for number in range(120):
        history.add(loads.Sample(5.0 * number, 1.0, 1 << 30, None))
    assert history.numbers.itemsize * len(history.numbers) < 6000
    assert history.newest_sample == loads.Sample(595.0, 1.0, 1 << 30, None)
