"""Read the memory size of a Linux host."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def read_memory() -> tuple[int, int]:
    """Return the host's available memory (usable without swapping) and its total memory, in bytes."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return free, total
