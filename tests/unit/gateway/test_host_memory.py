"""The memory that a host has left, according to FreeBSD's sysctl or Linux's /proc/meminfo."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandbox_gateway.hosts.jail_zfs import memory
from sandbox_gateway.hosts.kvm_xfs import meminfo

_SYSCTL = """\
hw.physmem=17179869184
hw.pagesize=4096
vm.stats.vm.v_free_count=1000
vm.stats.vm.v_inactive_count=500
kstat.zfs.misc.arcstats.size=900000
kstat.zfs.misc.arcstats.c_min=400000
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("output", "free"), [(_SYSCTL, 1500 * 4096 + 500_000), ("\n".join(_SYSCTL.splitlines()[:4]), 1500 * 4096)]
)
async def test_a_freebsd_host_can_use_free_pages_and_most_of_the_cache_of_zfs(output: str, free: int) -> None:
    async def run(*argv: str) -> str:
        assert argv[:2] == ("sysctl", "-ie")
        return output

    runner: Any = run
    assert await memory.read_memory(runner) == (free, 16 << 30)


def test_a_linux_host_has_free_memory() -> None:
    free, total = meminfo.read_memory()
    assert 0 < free < total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
