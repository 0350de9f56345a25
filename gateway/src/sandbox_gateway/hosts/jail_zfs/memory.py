"""Read the memory of a FreeBSD host."""

from __future__ import annotations

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner

_PAGES = ("vm.stats.vm.v_free_count", "vm.stats.vm.v_inactive_count")
_CACHE, _CACHE_MINIMUM = "kstat.zfs.misc.arcstats.size", "kstat.zfs.misc.arcstats.c_min"
_NAMES = ("hw.physmem", "hw.pagesize", *_PAGES, _CACHE, _CACHE_MINIMUM)


async def read_memory(run: CommandRunner) -> tuple[int, int]:
    """Return the bytes of memory that the host can use without swapping, and of all its memory.

    ZFS releases its cache when memory is needed, except for a minimum. Kernels without a value count as zero.
    """
    lines = (await run("sysctl", "-ie", *_NAMES)).splitlines()
    values = {name: int(value) for name, _, value in (line.partition("=") for line in lines)}
    pages = sum(values.get(name, 0) for name in _PAGES) * values.get("hw.pagesize", 0)
    cache = max(0, values.get(_CACHE, 0) - values.get(_CACHE_MINIMUM, 0))
    return pages + cache, values.get("hw.physmem", 0)
