"""Freed memory is returned to the system.

The test measures a separate process, because the allocator's settings cannot be undone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.server import heap, serving

_PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from sandbox_gateway.server import heap

if sys.argv[1] == "bounded":
    heap.configure_allocator()

def measure_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def hold(_):
    pages = np.ones(20 << 20, dtype=np.uint8)
    barrier.wait()
    return int(pages[0])

barrier = threading.Barrier(6)
bytes_before = measure_resident_bytes()
with ThreadPoolExecutor(6) as pool:
    for _ in range(3):
        list(pool.map(hold, range(6)))
    print(measure_resident_bytes() - bytes_before)
"""
_PEAK_BYTES = 6 * (20 << 20)


def _measure_memory_growth(mode: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, timeout=60, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="requires /proc and glibc")
def test_memory_of_captures_is_returned_to_the_system() -> None:
    assert _measure_memory_growth("bounded") < _PEAK_BYTES // 4
    assert _measure_memory_growth("default") > _PEAK_BYTES // 2, (
        "the library now returns memory on its own: heap.py is no longer needed"
    )


async def test_the_daemon_configures_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Configured(Exception):
        pass

    def configure() -> None:
        raise Configured

    monkeypatch.setattr(heap, "configure_allocator", configure)
    with pytest.raises(Configured):
        await serving.run(Config())
