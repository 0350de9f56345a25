"""Test that each kind of host measures the load of its running machines from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.base import Load
from sandbox_gateway.records import Sandbox
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE

_WRITTEN_BYTES = 48 << 20


def test_a_host_measures_cpu_memory_and_disk(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["busy", "idle"])))
    sandboxes = [runner.get_sandbox("busy"), runner.get_sandbox("idle")]
    loads_before = _measure(runner, sandboxes)
    for load, sandbox in ((loads_before[each.instance], each) for each in sandboxes):
        assert 1 << 20 < load.memory_bytes < (sandbox.resources.memory_mb + 512) << 20
        assert 1 << 20 < load.disk_bytes <= sandbox.resources.disk_mb << 20
    runner.shell("busy", f"head -c {_WRITTEN_BYTES} /dev/urandom >/root/file && sync")
    busy, idle = sandboxes

    def measure_disk_growth() -> list[int]:
        loads_after = _measure(runner, sandboxes)
        return [loads_after[each.instance].disk_bytes - loads_before[each.instance].disk_bytes for each in (busy, idle)]

    wait_until(lambda: measure_disk_growth()[0] > _WRITTEN_BYTES * 0.9, seconds=30)
    assert measure_disk_growth()[1] < _WRITTEN_BYTES / 2
    # One sandbox runs a busy loop, and the other one waits.
    runner.shell("busy", "nohup timeout 60 sh -c 'while :; do :; done' >/dev/null 2>&1 &")
    runner.do(runner.engine.loads.get_history("busy"))
    time.sleep(3)
    cpu_percents = [runner.do(runner.engine.loads.get_history(name))[-1].cpu_percent for name in ("busy", "idle")]
    assert all(percent is not None for percent in cpu_percents)
    assert cpu_percents[0] * busy.resources.cpus > 20 and cpu_percents[1] < cpu_percents[0]
    runner.do(runner.engine.sandboxes.pause("busy", memory=False))
    assert runner.do(runner.engine.host.measure_loads([runner.get_sandbox("busy")])) == {}


def _measure(runner: EngineRunner, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
    """Measure until the host could read every value: a busy file system may not answer in time."""
    loads: dict[str, Load] = {}

    def is_complete() -> bool:
        loads.update(runner.do(runner.engine.host.measure_loads(sandboxes)))
        assert loads.keys() == {sandbox.instance for sandbox in sandboxes}
        return all(None not in (load.memory_bytes, load.disk_bytes) for load in loads.values())

    wait_until(is_complete, seconds=60)
    return loads
