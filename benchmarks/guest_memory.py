"""Let a guest rewrite its memory, and count the pages that have changed between two captures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.context import TEMPLATE, KvmXfs
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.records import Sandbox, Snapshot

_REWRITE_PROGRAM = """
import os, sys
block = os.urandom(1 << 20)
with open("/dev/shm/blob", "r+b" if os.path.exists("/dev/shm/blob") else "wb") as blob:
    for number in range(int(sys.argv[1])):
        blob.write(block[number:] + block[:number])
"""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def start_large_sandbox(host: KvmXfs, memory_mb: int, files_mb: int) -> Sandbox:
    """Boot a sandbox with ``memory_mb`` MiB of memory, of which ``rewrite_memory`` may use ``files_mb`` MiB."""
    spec = ForkSpec(memory_mb=memory_mb, cold_start=True)
    sandbox = host.live.do(host.live.engine.forks.create(TEMPLATE, spec), timeout=300)
    _run_in_sandbox(host, sandbox, ["mount", "-o", f"remount,size={files_mb}M", "/dev/shm"])
    return sandbox


def rewrite_memory(host: KvmXfs, sandbox: Sandbox, size_mb: int) -> None:
    """Write new contents to the first ``size_mb`` MiB of a file in the guest's memory."""
    _run_in_sandbox(host, sandbox, ["python3", "-c", _REWRITE_PROGRAM, str(size_mb)])


def _run_in_sandbox(host: KvmXfs, sandbox: Sandbox, argv: list[str]) -> None:
    result = host.live.do(host.live.engine.commands.exec(sandbox.id, argv, timeout=120))
    if result.exit_code != 0:
        raise RuntimeError(f"{argv[0]} failed: {result.stderr.decode(errors='replace')}")


def count_changed_bytes(
    host: KvmXfs, previous: Snapshot, snapshot: Snapshot, *, file: Literal["memory", "disk"] = "memory"
) -> float:
    """Return the size in bytes of the pages that differ between two snapshots. Reads only unshared blocks."""
    layout = Layout(host.config.host.state_root)
    old_image, new_image = (getattr(layout.snapshot(each), file) for each in (previous, snapshot))
    ranges = sorted(_find_unshared_ranges(old_image) | _find_unshared_ranges(new_image))
    page_count = 0
    with old_image.open("rb") as old, new_image.open("rb") as new:
        position = 0
        for start, end in ranges:
            start = max(start, position)
            if start < end:
                page_count += _count_changed_pages(old.fileno(), new.fileno(), start, end - start)
                position = end
    return page_count * _PAGE_BYTES


def _find_unshared_ranges(image: Path) -> set[tuple[int, int]]:
    return {
        (extent.logical, extent.logical + extent.length)
        for extent in reflink.walk_extents(image)
        if not extent.is_shared
    }


def _count_changed_pages(old_fd: int, new_fd: int, offset: int, length: int) -> int:
    old_bytes, new_bytes = (np.frombuffer(os.pread(fd, length, offset), dtype=np.uint8) for fd in (old_fd, new_fd))
    size = min(len(old_bytes), len(new_bytes)) // _PAGE_BYTES * _PAGE_BYTES
    return int((old_bytes[:size] != new_bytes[:size]).reshape(-1, _PAGE_BYTES).any(axis=1).sum())
