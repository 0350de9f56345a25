"""Run a member of a fleet that has no objects: ``python -m benchmarks.simulation.router ROOT SECTION``.

SECTION is [fleet] as JSON. When the gateway has loaded its view of the fleet, it prints a JSON object:

* ``port``: its TCP port.
* ``load_ms``: the time from the first request for the view until the view could be used.
* ``stall_ms``: the longest time in which it did nothing else meanwhile.
* ``memory_before``, ``memory``: its resident memory without and with the view, in bytes.

It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

from sandbox_gateway.fleet.directory import Directory
from sandbox_gateway.fleet.view import FleetView
from sandbox_gateway.server import heap
from tests.fleet.times import PATIENT_TIMES, set_times
from tests.support.memory_gateway import MemoryGateway

_BEAT_SECONDS = 0.002


class _StallMeter:
    """Finds the longest time in which an event loop does nothing else, with a precision of a few milliseconds."""

    def __init__(self) -> None:
        self.longest_ms = 0.0

    async def run(self) -> None:
        last_beat = time.perf_counter()
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            beat = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (beat - last_beat - _BEAT_SECONDS) * 1000)
            last_beat = beat


def _read_memory_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    root, section = sys.argv[1:]
    set_times(PATIENT_TIMES)
    heap.configure_allocator()
    may_follow = asyncio.Event()
    follow_at_once = FleetView.follow

    async def follow(view: FleetView) -> None:
        await may_follow.wait()
        await follow_at_once(view)

    async def measure_load(view: FleetView) -> dict[str, float]:
        memory_before = _read_memory_bytes()
        meter = _StallMeter()
        beat = asyncio.create_task(meter.run())
        started_at = time.perf_counter()
        may_follow.set()
        await view.loaded.wait()
        load_ms = (time.perf_counter() - started_at) * 1000
        await asyncio.sleep(10 * _BEAT_SECONDS)
        beat.cancel()
        return {
            "load_ms": load_ms,
            "stall_ms": meter.longest_ms,
            "memory_before": memory_before,
            "memory": _read_memory_bytes(),
        }

    # Otherwise, the start of the gateway would count.
    FleetView.follow = follow  # type: ignore[method-assign]
    gateway = MemoryGateway(Path(root), fleet=json.loads(section))
    directory = gateway.engine._context.name_claims
    assert isinstance(directory, Directory)
    figures = asyncio.run_coroutine_threadsafe(measure_load(directory._view), gateway.loop).result()
    print(json.dumps({"port": gateway.port, **figures}), flush=True)
    sys.stdin.read()
    gateway.end()


if __name__ == "__main__":
    main()
