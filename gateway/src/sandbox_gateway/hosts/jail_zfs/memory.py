"""Read the memory of a FreeBSD host."""

from __future__ import annotations

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner

_PAGE_COUNTS = ("vm.stats.vm.v_free_count", "vm.stats.vm.v_inactive_count")
_CACHE, _CACHE_MINIMUM = "kstat.zfs.misc.arcstats.size", "kstat.zfs.misc.arcstats.c_min"
_NAMES = ("hw.physmem", "hw.pagesize", *_PAGE_COUNTS, _CACHE, _CACHE_MINIMUM)


async def read_memory(run: CommandRunner) -> tuple[int, int]:
    """Return the host's available memory, without swap space, and its total memory, in bytes.

    ZFS releases its cache when memory is needed, except for a minimum. A value that the kernel lacks counts as zero.
    """
    lines = (await run("sysctl", "-ie", *_NAMES)).splitlines()
    values = {name: int(value) for name, _, value in (line.partition("=") for line in lines)}
    pages = sum(values.get(name, 0) for name in _PAGE_COUNTS) * values.get("hw.pagesize", 0)
    cache = max(0, values.get(_CACHE, 0) - values.get(_CACHE_MINIMUM, 0))
    return pages + cache, values.get("hw.physmem", 0)
