"""Measure how long a capture stops a running sandbox, and how much it writes for the pages that changed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.context import Context, KvmXfs, Steps
from benchmarks.measure import Result, Target
from benchmarks.ping import Ping
from benchmarks.raw_qemu import RawMachine
from benchmarks.timers import milliseconds
from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Layout
from sandbox_gateway.records import Snapshot

_DIRTY_MB = 2
_MOST_WRITTEN = 10 << 20
_BETWEEN_SECONDS = 0.3
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PHASES = {
    "stop": "stop the guest",
    "devices": "device state",
    "disk": "reflink of the disk",
    "pages": "find and copy pages",
    "continue": "continue the guest",
}

# Keeps rewriting the same memory with new content: a busy sandbox whose working set does not grow.
_WORK = f"""
import ctypes, time
size = {_DIRTY_MB} << 20
memory = ctypes.create_string_buffer(size)
turn = 0
while True:
    turn += 1
    ctypes.memset(memory, turn % 255 + 1, size)
    time.sleep(0.1)
"""


class Pause:
    name = "pause"
    title = "capture of a running sandbox"

    def run(self, ctx: Context) -> Result:
        rounds, watched = ctx.rounds(full=60, quick=6), ctx.rounds(full=30, quick=4)
        settings = {"captures": rounds, "watched": watched, "guest_rewrites_mb": _DIRTY_MB}
        result = Result(self.name, self.title, settings)
        taken, seen = _Captures(), _Waits()
        host = ctx.kvm_xfs
        bar = ctx.steps("captures", rounds + watched)
        with host.source(_WORK) as source, host.raw(source) as raw, bar as steps:
            (machine,) = raw.machines(1)
            machine.start()
            machine.connect()
            machine.execute("stop")
            while len(taken.snapshots) < rounds:
                _capture_some(host, source, machine, rounds, taken, steps)
            machine.end()
            while len(seen.captures) < watched:
                _watch_some(host, source, watched, seen, steps)
        _report(result, taken, seen)
        return result


@dataclass
class _Captures:
    """The data of each capture, at the same index in all lists. No pings are sent during these captures."""

    snapshots: list[Snapshot] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)


@dataclass
class _Waits:
    """The longest waits for an answer in ms: during captures, and during an equally long period just before each."""

    captures: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)


def _capture_some(
    host: KvmXfs, source: Snapshot, machine: RawMachine, rounds: int, taken: _Captures, steps: Steps
) -> None:
    """Capture one sandbox repeatedly, until there are ``rounds`` captures or it has dirtied too much memory."""
    sandbox, previous = host.sandbox(source.id), source
    time.sleep(1)
    while len(taken.snapshots) < rounds:
        floor = _time_smallest_capture(machine, host)
        time.sleep(_BETWEEN_SECONDS)
        snapshot, total = milliseconds(lambda: host.snapshot(sandbox))
        if not _is_small(snapshot, fresh=previous is source):
            break
        taken.snapshots.append(snapshot)
        taken.floor.append(floor)
        taken.total.append(total)
        taken.changed.append(_count_changed_bytes(host, previous, snapshot))
        if previous is not source:
            host.forget(previous)
        previous = snapshot
        steps.done()
    host.kill(sandbox)


def _watch_some(host: KvmXfs, source: Snapshot, rounds: int, seen: _Waits, steps: Steps) -> None:
    """Capture as above, with pings.

    These captures are separate because the guest spends much time on answering pings.
    """
    sandbox = host.sandbox(source.id)
    windows: list[tuple[float, float]] = []
    time.sleep(1)
    with Ping(str(sandbox.host["address"])) as ping:
        while len(seen.captures) + len(windows) < rounds:
            time.sleep(_BETWEEN_SECONDS)
            start = time.monotonic()
            snapshot = host.snapshot(sandbox)
            end = time.monotonic()
            small = _is_small(snapshot, fresh=not windows)
            host.forget(snapshot)
            if not small:
                break
            windows.append((start, end))
            steps.done()
    for start, end in windows:
        seen.captures.append(ping.longest_wait(start, end))
        seen.quiet.append(ping.longest_wait(start - min(end - start, _BETWEEN_SECONDS), start))
    host.kill(sandbox)


def _is_small(snapshot: Snapshot, *, fresh: bool) -> bool:
    """Return whether a capture wrote little memory.

    Raises RuntimeError if the first capture of a sandbox wrote too much.
    """
    small = snapshot.memory_bytes_written <= _MOST_WRITTEN
    if fresh and not small:
        raise RuntimeError(
            f"a fresh sandbox dirtied {snapshot.memory_bytes_written >> 20} MiB, but this bench is about "
            f"captures of at most {_MOST_WRITTEN >> 20} MiB"
        )
    return small


def _report(result: Result, taken: _Captures, seen: _Waits) -> None:
    pauses = [snapshot.pause_ms for snapshot in taken.snapshots]
    result.measure("floor", "floor: the same commands over bare QMP, no page copied", samples=taken.floor)
    result.measure("pause", "source pause, as the host saw it", samples=pauses, floor="floor", target=Target("p50", 10))
    phases = [snapshot.host["phases_ms"] for snapshot in taken.snapshots]
    result.parts("pause", _PHASES, {key: [each[key] for each in phases if key in each] for key in _PHASES})
    result.measure("quiet", "floor: longest wait for a ping, no capture", samples=seen.quiet)
    result.measure("outside", "longest wait for a ping, during a capture", samples=seen.captures, floor="quiet")
    result.measure("total", "capture, until the snapshot is on the disk", samples=taken.total)
    result.measure("changed", "floor: memory changed since the previous capture", "bytes", samples=taken.changed)
    written = [snapshot.memory_bytes_written for snapshot in taken.snapshots]
    result.measure("written", "memory written for a capture", "bytes", samples=written, floor="changed")
    disk = [snapshot.disk_bytes_unique for snapshot in taken.snapshots]
    result.measure("disk", "disk blocks that only the capture uses", "bytes", samples=disk)
    result.settings["memory_mode"] = sorted({snapshot.memory.value for snapshot in taken.snapshots})


def _time_smallest_capture(machine: RawMachine, host: KvmXfs) -> float:
    """Return the milliseconds of the smallest possible capture: the same commands, an empty set of pages, a clean
    disk.
    """
    state, image = host.mount_point / "bare.state", host.mount_point / "bare.img"
    descriptors = [os.open(machine.files.disk, os.O_RDONLY)]
    descriptors += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in (state, image)]
    disk, device_state, clone = descriptors
    try:
        os.fsync(disk)
        lent = machine.pass_descriptor(device_state)
        machine.execute("cont")
        time.sleep(_BETWEEN_SECONDS)
        start = time.perf_counter()
        machine.execute("stop")
        machine.execute("xen-save-devices-state", {"filename": lent, "live": False})
        reflink.clone_fd(disk, clone)
        machine.execute("cont")
        end = time.perf_counter()
        machine.execute("stop")  # a running guest would slow down the next measurement
        machine.execute("remove-fd", {"fdset-id": int(lent.rsplit("/", 1)[1])})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        state.unlink()
        image.unlink()
    return (end - start) * 1000


def _count_changed_bytes(host: KvmXfs, previous: Snapshot, snapshot: Snapshot) -> float:
    """Return the bytes of the pages that differ between two snapshots. Reads only blocks that the two do not share."""
    layout = Layout(host.config.host.state_root)
    before, after = (layout.snapshot(each) / "memory.img" for each in (previous, snapshot))
    ranges = sorted(_own_ranges(before) | _own_ranges(after))
    different = 0
    with before.open("rb") as old, after.open("rb") as new:
        done = 0
        for start, end in ranges:
            start = max(start, done)
            if start < end:
                different += _different_pages(old.fileno(), new.fileno(), start, end - start)
                done = end
    return different * _PAGE


def _own_ranges(image: Path) -> set[tuple[int, int]]:
    return {(extent.logical, extent.logical + extent.length) for extent in reflink.extents(image) if not extent.shared}


def _different_pages(old: int, new: int, offset: int, length: int) -> int:
    one, other = (np.frombuffer(os.pread(fd, length, offset), dtype=np.uint8) for fd in (old, new))
    size = min(len(one), len(other)) // _PAGE * _PAGE
    return int((one[:size] != other[:size]).reshape(-1, _PAGE).any(axis=1).sum())
