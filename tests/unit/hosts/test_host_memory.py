"""The free memory of a host, according to FreeBSD's sysctl or Linux's /proc/meminfo."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandbox_gateway.hosts.jail_zfs import host_memory as jail_host_memory
from sandbox_gateway.hosts.kvm_xfs import host_memory as kvm_host_memory

_SYSCTL_OUTPUT = """\
hw.physmem=17179869184
hw.pagesize=4096
vm.stats.vm.v_free_count=1000
vm.stats.vm.v_inactive_count=500
kstat.zfs.misc.arcstats.size=900000
kstat.zfs.misc.arcstats.c_min=400000
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("output", "expected_free"),
    [(_SYSCTL_OUTPUT, 1500 * 4096 + 500_000), ("\n".join(_SYSCTL_OUTPUT.splitlines()[:4]), 1500 * 4096)],
)
async def test_free_memory_on_freebsd_includes_most_of_the_zfs_cache(output: str, expected_free: int) -> None:
    async def run_sysctl(*argv: str) -> str:
        assert argv[:2] == ("sysctl", "-ie")
        return output

    runner: Any = run_sysctl
    assert await jail_host_memory.read_memory(runner) == (expected_free, 16 << 30)


def test_a_linux_host_has_free_memory() -> None:
    free, total = kvm_host_memory.read_memory()
    assert 0 < free < total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
