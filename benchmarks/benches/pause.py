"""Measure how long a capture stops a running sandbox, and how much it writes for the pages that changed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from benchmarks.context import Context, KvmXfs, Steps, create_busy_program
from benchmarks.guest_memory import count_changed_bytes
from benchmarks.measure import Result, Target, compute_percentile
from benchmarks.ping import Ping
from benchmarks.raw_qemu import RawMachine
from benchmarks.timers import time_call
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.records import Snapshot

_DIRTY_MB = 2
_MAX_WRITTEN_BYTES = 10 << 20
_COOLDOWN_SECONDS = 0.3
_PHASE_TITLES = {
    "stop": "stop the guest",
    "devices": "device state",
    "disk": "reflink of the disk",
    "pages": "find and copy pages",
    "continue": "resume the guest",
}

_BUSY_PROGRAM = create_busy_program(_DIRTY_MB, pause_seconds=0.1)


class Pause:
    name = "pause"
    title = "capture of a running sandbox"

    def run(self, ctx: Context) -> Result:
        rounds, ping_rounds = ctx.choose(full=60, quick=6), ctx.choose(full=30, quick=4)
        settings = {"captures": rounds, "watched": ping_rounds, "guest_rewrites_mb": _DIRTY_MB}
        result = Result(self.name, self.title, settings)
        captures, waits = _Captures(), _Waits()
        host = ctx.kvm_xfs
        progress = ctx.showing_progress("captures", rounds + ping_rounds)
        with host.temporary_snapshot(_BUSY_PROGRAM) as source, host.raw_qemu(source) as raw, progress as steps:
            (machine,) = raw.prepare_machines(1)
            machine.start()
            machine.wait_until_connected()
            machine.execute("stop")
            while len(captures.snapshots) < rounds:
                _capture_repeatedly(host, source, machine, rounds, captures, steps)
            machine.stop()
            while len(waits.during_captures) < ping_rounds:
                _capture_with_pings(host, source, ping_rounds, waits, steps)
        _report(result, captures, waits)
        return result


@dataclass
class _Captures:
    """The measurements of captures without pings. Each list has one item per capture."""

    snapshots: list[Snapshot] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    changed_bytes: list[float] = field(default_factory=list)


@dataclass
class _Waits:
    """The longest waits for a reply to a ping, in ms, during each capture and in an equally long period before it."""

    during_captures: list[float] = field(default_factory=list)
    before_captures: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """The pauses of these captures, in ms, by the host's clock."""


def _capture_repeatedly(
    host: KvmXfs, source: Snapshot, machine: RawMachine, rounds: int, captures: _Captures, steps: Steps
) -> None:
    """Capture one sandbox repeatedly, until there are ``rounds`` captures or a capture has written too much memory."""
    sandbox, previous = host.create_sandbox(source.id), source
    time.sleep(1)
    while len(captures.snapshots) < rounds:
        floor_ms = _time_smallest_capture(machine, host)
        time.sleep(_COOLDOWN_SECONDS)
        snapshot, total_ms = time_call(lambda: host.capture(sandbox))
        if not _is_small(snapshot, is_first=previous is source):
            break
        captures.snapshots.append(snapshot)
        captures.floor_ms.append(floor_ms)
        captures.total_ms.append(total_ms)
        captures.changed_bytes.append(count_changed_bytes(host, previous, snapshot))
        if previous is not source:
            host.delete_snapshot(previous)
        previous = snapshot
        steps.advance()
    host.delete_sandboxes(sandbox)


def _capture_with_pings(host: KvmXfs, source: Snapshot, rounds: int, waits: _Waits, steps: Steps) -> None:
    """Capture one sandbox repeatedly while it is pinged.

    These captures are separate because answering pings takes much of the guest's time.
    """
    sandbox = host.create_sandbox(source.id)
    windows: list[tuple[float, float]] = []
    time.sleep(1)
    with Ping(str(sandbox.host["address"])) as ping:
        while len(waits.during_captures) + len(windows) < rounds:
            time.sleep(_COOLDOWN_SECONDS)
            start = time.monotonic()
            snapshot = host.capture(sandbox)
            end = time.monotonic()
            is_small = _is_small(snapshot, is_first=not windows)
            host.delete_snapshot(snapshot)
            if not is_small:
                break
            windows.append((start, end))
            waits.pauses.append(snapshot.pause_ms)
            steps.advance()
    for start, end in windows:
        waits.during_captures.append(ping.find_longest_wait(start, end))
        waits.before_captures.append(ping.find_longest_wait(start - min(end - start, _COOLDOWN_SECONDS), start))
    host.delete_sandboxes(sandbox)


def _is_small(snapshot: Snapshot, *, is_first: bool) -> bool:
    """Return whether a capture wrote at most _MAX_WRITTEN_BYTES of memory.

    Raises RuntimeError if the first capture of a sandbox wrote more.
    """
    is_small = snapshot.memory_bytes_written <= _MAX_WRITTEN_BYTES
    if is_first and not is_small:
        raise RuntimeError(
            f"the first capture of a sandbox wrote {snapshot.memory_bytes_written >> 20} MiB, but this bench "
            f"measures captures of at most {_MAX_WRITTEN_BYTES >> 20} MiB: increase the limit or change _BUSY_PROGRAM"
        )
    return is_small


def _report(result: Result, captures: _Captures, waits: _Waits) -> None:
    pauses = [snapshot.pause_ms for snapshot in captures.snapshots]
    result.add_measure("floor", "floor: the same commands over bare QMP, no page copied", samples=captures.floor_ms)
    result.add_measure(
        "pause", "source pause, measured by the host", samples=pauses, floor="floor", target=Target("ratio", 1.15)
    )
    phases = [snapshot.host["phases_ms"] for snapshot in captures.snapshots]
    result.add_parts(
        "pause", _PHASE_TITLES, {key: [each[key] for each in phases if key in each] for key in _PHASE_TITLES}
    )
    spread = compute_percentile(pauses, 95) / compute_percentile(pauses, 50)
    result.add_measure(
        "spread", "p95 of the pause, divided by its p50", "count", samples=[spread], target=Target("p50", 2)
    )
    result.add_measure("quiet", "floor: longest wait for a ping, no capture", samples=waits.before_captures)
    result.add_measure(
        "outside", "longest wait for a ping, during a capture", samples=waits.during_captures, floor="quiet"
    )
    during, before, pause = (
        compute_percentile(each, 50) for each in (waits.during_captures, waits.before_captures, waits.pauses)
    )
    result.add_measure(
        "disagreement", "p50 of these waits minus p50 of their floor, compared with the pause of these captures",
        samples=[abs(during - before - pause)], target=Target("p50", 2),
    )  # fmt: skip
    result.add_measure("total", "capture, until the snapshot is on the disk", samples=captures.total_ms)
    result.add_measure(
        "changed", "floor: memory changed since the previous capture", "bytes", samples=captures.changed_bytes
    )
    written_bytes = [snapshot.memory_bytes_written for snapshot in captures.snapshots]
    result.add_measure(
        "written", "memory written for a capture", "bytes", samples=written_bytes, floor="changed",
        target=Target("ratio", 1.1),
    )  # fmt: skip
    disk_bytes = [snapshot.disk_bytes_unique for snapshot in captures.snapshots]
    result.add_measure("disk", "disk blocks that only the capture uses", "bytes", samples=disk_bytes)
    result.settings["memory_mode"] = sorted({snapshot.memory.value for snapshot in captures.snapshots})


def _time_smallest_capture(machine: RawMachine, host: KvmXfs) -> float:
    """Return the duration of the smallest possible capture in milliseconds.

    It executes the same commands as the host, but copies no pages, and the disk is already flushed.
    """
    state, image = host.mount_point / "bare.state", host.mount_point / "bare.img"
    descriptors = [os.open(machine.files.disk, os.O_RDONLY)]
    descriptors += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in (state, image)]
    disk, device_state, clone = descriptors
    try:
        os.fsync(disk)
        filename = machine.pass_descriptor(device_state)
        machine.execute("cont")
        time.sleep(_COOLDOWN_SECONDS)
        start = time.perf_counter()
        machine.execute("stop")
        machine.execute("xen-save-devices-state", {"filename": filename, "live": False})
        reflink.clone_fd(disk, clone)
        machine.execute("cont")
        end = time.perf_counter()
        machine.execute("stop")  # a running guest would slow down the next measurement
        machine.execute("remove-fd", {"fdset-id": int(filename.rsplit("/", 1)[1])})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        state.unlink()
        image.unlink()
    return (end - start) * 1000
