"""Measure how much captures write, compared with the memory that has changed, in each mode that finds changed pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.context import Context, KvmXfs
from benchmarks.guest_memory import count_changed_bytes, rewrite_memory, start_large_sandbox
from benchmarks.measure import Result, Target
from sandbox_gateway.hosts.kvm_xfs import capture
from sandbox_gateway.records import MemoryMode

_MEMORY_MB = 512
_FILES_MB = 256
_WRITTEN_MB = 500
_CHANGED_MB = 5
_MODES = (MemoryMode.WRITTEN, MemoryMode.COMPARE, MemoryMode.LIVE)
_SMALLEST_LIVE_BYTES = 256 << 10


class Changed:
    name = "changed"
    title = f"memory written for a capture of a guest that has written {_WRITTEN_MB} MB"

    def run(self, ctx: Context) -> Result:
        count = ctx.choose(full=5, quick=2)
        settings = {"guest_memory_mb": _MEMORY_MB, "written_mb": _WRITTEN_MB, "changed_mb": _CHANGED_MB}
        result = Result(self.name, self.title, {**settings, "captures": count})
        host = ctx.kvm_xfs
        with ctx.showing_progress("modes", len(_MODES)) as steps:
            for mode in _MODES:
                with _mode_forced(host, mode):
                    changed_bytes, written_bytes = _capture_in_a_row(host, mode, count)
                steps.advance()
                result.add_measure(
                    f"changed_{mode}", f"floor: memory that has changed, {mode}", "bytes", samples=changed_bytes
                )
                result.add_measure(
                    f"written_{mode}", f"memory written, {mode}", "bytes", samples=written_bytes,
                    floor=f"changed_{mode}", target=Target("ratio", 1.1),
                )  # fmt: skip
        return result


@contextlib.contextmanager
def _mode_forced(host: KvmXfs, mode: MemoryMode) -> Iterator[None]:
    """Let sandboxes that start in this context be captured in ``mode``, whatever the size of their changes."""
    tracking, limit = host.host._write_tracking, capture.MAX_SINGLE_STOP_BYTES
    best_mode = tracking._best_mode
    tracking._best_mode = MemoryMode.WRITTEN if mode is MemoryMode.LIVE else mode
    capture.MAX_SINGLE_STOP_BYTES = _SMALLEST_LIVE_BYTES if mode is MemoryMode.LIVE else 1 << 40
    try:
        yield
    finally:
        tracking._best_mode, capture.MAX_SINGLE_STOP_BYTES = best_mode, limit


def _capture_in_a_row(host: KvmXfs, mode: MemoryMode, count: int) -> tuple[list[float], list[float]]:
    """Return the bytes that have changed before each capture, and the bytes that it has written."""
    changed_bytes: list[float] = []
    written_bytes: list[float] = []
    try:
        sandbox = start_large_sandbox(host, _MEMORY_MB, _FILES_MB)
        for _ in range(_WRITTEN_MB // _FILES_MB + 1):
            rewrite_memory(host, sandbox, _WRITTEN_MB // 2)
        previous = host.capture(sandbox)
        for _ in range(count):
            rewrite_memory(host, sandbox, _CHANGED_MB)
            snapshot = host.capture(sandbox)
            if snapshot.memory is not mode:
                raise RuntimeError(f"the capture used the mode {snapshot.memory}, not {mode}: {snapshot.host}")
            changed_bytes.append(count_changed_bytes(host, previous, snapshot))
            written_bytes.append(snapshot.memory_bytes_written)
            host.delete_snapshot(previous)
            previous = snapshot
    finally:
        host.live.remove_all()
    return changed_bytes, written_bytes
