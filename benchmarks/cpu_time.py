"""Read the CPU time that a process has used."""

from __future__ import annotations

from pathlib import Path


def read_cpu_ms(pid: int) -> float:
    """Return the CPU time of all threads of a process that still run, in milliseconds."""
    # The clock ticks of /proc/PID/stat are too coarse; these files are in nanoseconds.
    nanoseconds = sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
    return nanoseconds / 1e6
