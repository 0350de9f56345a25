"""Count the pages that a migration of a running machine loses.

A capture could read the memory of a running machine from QEMU's migration stream, because QEMU itself tracks writes.
This bench migrates a machine to a second QEMU process, and compares the memory of both processes after QEMU has stopped
the first one. They must be equal. As a control, it also migrates a machine that was stopped before.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict

import numpy as np

from benchmarks.context import Context, create_busy_program
from benchmarks.measure import Result
from benchmarks.raw_qemu import RawMachine, RawQemu
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram

_TIMEOUT_SECONDS = 60
_INTERVAL_SECONDS = 0.01
_MAX_RUNNING_SECONDS = 10
"""After this time, the source is stopped, in case it writes faster than QEMU sends."""
_DIRTY_MB = 4
_BUSY_PROGRAM = create_busy_program(_DIRTY_MB, pause_seconds=0.02)


class Migration:
    name = "migration"
    title = "memory after a migration of a running machine"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=10, quick=2)
        result = Result(self.name, self.title, {"rounds": rounds, "guest_rewrites_mb": _DIRTY_MB})
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        with (
            host.temporary_snapshot(_BUSY_PROGRAM) as snapshot,
            host.raw_qemu(snapshot) as raw,
            ctx.showing_progress("migrations", 2 * rounds) as steps,
        ):
            for _ in range(rounds):
                for key in ("stopped", "running"):
                    samples[key].append(_count_lost_pages(raw, is_running=key == "running"))
                    steps.advance()
        result.add_measure(
            "stopped", "pages that differ after the migration of a stopped machine", "count", samples=samples["stopped"]
        )
        result.add_measure(
            "running", "pages that differ after the migration of a running machine", "count", samples=samples["running"]
        )
        # One page contains the generation id, which differs between the two processes.
        exact_count = sum(count <= max(samples["stopped"]) for count in samples["running"])
        result.notes.append(f"{exact_count} of {rounds} migrations of a running machine copied all of its memory")
        return result


def _count_lost_pages(raw: RawQemu, *, is_running: bool) -> int:
    """Migrate a machine, and return how many pages of the other machine differ from it."""
    source, target = raw.prepare_machines(2)
    source.start()
    target.start_as_migration_target()
    time.sleep(0.5)
    if not is_running:
        source.execute("stop")
    source_socket, target_socket = socket.socketpair()
    with source_socket, target_socket:
        target.pass_named_descriptor(target_socket.fileno(), "migration")
        target.execute("migrate-incoming", {"uri": "fd:migration"})
        source.pass_named_descriptor(source_socket.fileno(), "migration")
        source.execute("migrate-set-parameters", {"max-bandwidth": 1 << 40, "downtime-limit": 10})
        source.execute("migrate", {"uri": "fd:migration"})
    _wait_until_migrated(source, target)
    ram = Ram(source.pid, source.files.memory)
    memory = np.empty(ram.end, dtype=np.uint8)
    ram.read(ram.list_all_pages(), memory)
    copy = np.fromfile(target.files.memory, dtype=np.uint8)
    raw.prepare_machines(2)  # stops both
    return int((memory.view(np.uint64) != copy.view(np.uint64)).reshape(-1, PAGE_BYTES // 8).any(axis=1).sum())


def _wait_until_migrated(source: RawMachine, target: RawMachine) -> None:
    start_time = time.monotonic()
    deadline = start_time + _TIMEOUT_SECONDS
    is_stopped = False
    while (status := source.execute("query-migrate")["status"]) != "completed":
        if status in ("failed", "cancelled") or time.monotonic() > deadline:
            raise RuntimeError(f"the migration did not complete: {status}")
        if not is_stopped and time.monotonic() > start_time + _MAX_RUNNING_SECONDS:
            source.execute("stop")
            is_stopped = True
        time.sleep(_INTERVAL_SECONDS)
    while target.execute("query-status")["status"] == "inmigrate":
        if time.monotonic() > deadline:
            raise RuntimeError("the target has not loaded the migrated state")
        time.sleep(_INTERVAL_SECONDS)
