"""Read how much guest code a QEMU process has translated. Without KVM, this explains time and memory of a fork."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

from benchmarks.context import KvmXfs
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox


class TranslatedCode(NamedTuple):
    """Blocks of guest code that a QEMU process has translated, and the size of the result in bytes."""

    block_count: int
    size: int


def find_machine(host: KvmXfs, sandbox: Sandbox) -> Machine:
    assert isinstance(host.host, KvmXfsHost)
    return host.host._machines.require_running(sandbox).machine


def read_translated_code(host: KvmXfs, sandbox: Sandbox) -> TranslatedCode:
    """Return what the sandbox's machine has translated since it started. With KVM, this is nothing."""
    return host.live.do(_query(find_machine(host, sandbox)))


async def _query(machine: Machine) -> TranslatedCode:
    try:
        answer = cast("dict[str, str]", await machine.execute("x-query-jit"))
    except BackendFailed:
        return TranslatedCode(0, 0)
    text = answer["human-readable-text"]
    block_count, size = re.search(r"TB count\s+(\d+)", text), re.search(r"gen code size\s+(\d+)", text)
    if block_count is None or size is None:
        raise RuntimeError(f"x-query-jit returned no numbers: {text}")
    return TranslatedCode(int(block_count[1]), int(size[1]))
