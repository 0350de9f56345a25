"""Measure how the pause of a capture grows with the amount of memory that has changed since the last capture."""

from __future__ import annotations

from benchmarks.context import Context, KvmXfs
from benchmarks.guest_memory import rewrite_memory, start_large_sandbox
from benchmarks.measure import Result, Target
from sandbox_gateway.records import Sandbox, Snapshot

_MEMORY_MB = 1792
_SIZES_MB = (10, 64, 256, 1024)
_SLOW_SIZE_MB = 1024


class Dirty:
    name = "dirty"
    title = "pause of a capture, by the size of the changed memory"

    def run(self, ctx: Context) -> Result:
        rounds = {size: ctx.choose(full=10 if size >= _SLOW_SIZE_MB else 30, quick=3) for size in _SIZES_MB}
        result = Result(self.name, self.title, {"guest_memory_mb": _MEMORY_MB, "captures": rounds})
        host = ctx.kvm_xfs
        memory_modes: dict[int, list[str]] = {}
        with ctx.showing_progress("captures", sum(rounds.values())) as steps:
            sandbox = start_large_sandbox(host, _MEMORY_MB, _SLOW_SIZE_MB + 256)
            try:
                for size in _SIZES_MB:
                    snapshots = []
                    _rewrite_and_capture(host, sandbox, size)  # the first capture includes what the boot has written
                    for _ in range(rounds[size]):
                        snapshots.append(_rewrite_and_capture(host, sandbox, size))
                        steps.advance()
                    memory_modes[size] = sorted({snapshot.memory.value for snapshot in snapshots})
                    _report(result, size, snapshots)
            finally:
                host.live.remove_all()
        result.settings["memory_mode"] = memory_modes
        return result


def _rewrite_and_capture(host: KvmXfs, sandbox: Sandbox, size_mb: int) -> Snapshot:
    """Rewrite ``size_mb`` MiB of memory and capture the sandbox. Returns the snapshot, which is already deleted."""
    rewrite_memory(host, sandbox, size_mb)
    snapshot = host.capture(sandbox)
    host.delete_snapshot(snapshot)
    return snapshot


def _report(result: Result, size: int, snapshots: list[Snapshot]) -> None:
    is_floor = size == _SIZES_MB[0]
    result.add_measure(
        f"pause_{size}",
        f"source pause (sum of its stops), {size} MiB changed",
        samples=[snapshot.pause_ms for snapshot in snapshots],
        floor="" if is_floor else f"pause_{_SIZES_MB[0]}",
        target=None if is_floor else Target("ratio", 1.5),
    )
    longest_stops = [max(snapshot.host["stops_ms"]) for snapshot in snapshots]
    result.add_measure(f"longest_{size}", f"longest single stop, {size} MiB changed", samples=longest_stops)
    stop_counts = [len(snapshot.host["stops_ms"]) for snapshot in snapshots]
    result.add_measure(f"stops_{size}", f"number of stops, {size} MiB changed", "count", samples=stop_counts)
    written_bytes = [snapshot.memory_bytes_written for snapshot in snapshots]
    result.add_measure(f"written_{size}", f"memory written, {size} MiB changed", "bytes", samples=written_bytes)
