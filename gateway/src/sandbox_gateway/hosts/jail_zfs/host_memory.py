"""Read the memory of a FreeBSD host."""

from __future__ import annotations

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner

_PAGE_COUNT_NAMES = ("vm.stats.vm.v_free_count", "vm.stats.vm.v_inactive_count")
_CACHE_SIZE_NAME, _MIN_CACHE_SIZE_NAME = "kstat.zfs.misc.arcstats.size", "kstat.zfs.misc.arcstats.c_min"
_SYSCTL_NAMES = ("hw.physmem", "hw.pagesize", *_PAGE_COUNT_NAMES, _CACHE_SIZE_NAME, _MIN_CACHE_SIZE_NAME)


async def read_memory(run: CommandRunner) -> tuple[int, int]:
    """Return the host's available memory, without swap space, and its total memory, in bytes.

    The ZFS cache, except for its minimum size, counts as available, because ZFS releases it when memory is needed. A
    value that the kernel does not report counts as zero.
    """
    lines = (await run("sysctl", "-ie", *_SYSCTL_NAMES)).splitlines()
    values = {name: int(value) for name, _, value in (line.partition("=") for line in lines)}
    free_bytes = sum(values.get(name, 0) for name in _PAGE_COUNT_NAMES) * values.get("hw.pagesize", 0)
    cache_bytes = max(0, values.get(_CACHE_SIZE_NAME, 0) - values.get(_MIN_CACHE_SIZE_NAME, 0))
    return free_bytes + cache_bytes, values.get("hw.physmem", 0)
