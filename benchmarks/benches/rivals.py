"""Compare snapshot, fork and rollback with virsh, QEMU's savevm and a hand-written playbook, on the same guest."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable

from benchmarks.context import TEMPLATE, Context
from benchmarks.measure import Result
from benchmarks.ping import Ping
from benchmarks.rivals.jails import jail_playbooks
from benchmarks.rivals.libvirt import Libvirt
from benchmarks.rivals.machines import RIVAL_KINDS, Guest, rival_machine
from benchmarks.rivals.ours import our_machine
from benchmarks.rivals.rival import FORK_COUNT, ForkingRival, Rival, VirtualMachine
from benchmarks.timers import time_call
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from tests.support import session

_COOLDOWN_SECONDS = 0.3
_SETTLE_SECONDS = 3.0
_RIVAL_UID = 699_999
"""The user id of the rivals' QEMU processes. The gateway's QEMU processes have higher user ids."""
_TITLES = {
    "snapshot": "snapshot, until its source answers",
    "pause": "longest wait for a ping during a snapshot",
    "written": "bytes written for a snapshot",
    "fork_1": "one fork, until it answers",
    f"fork_{FORK_COUNT}": f"{FORK_COUNT} forks, until all answer",
    "rollback": "rollback, until it answers",
}
_MACHINE_ONLY_OPERATIONS = ("pause", "written")
_PLAYBOOK_NOTE = (
    "playbooks: ZFS is zfs-fuse, and tests/freebsd_shim emulates FreeBSD's commands on Linux. Each operation is one "
    "run of ansible-playbook"
)


class Rivals:
    name = "rivals"
    title = "the same work with virsh, QEMU and a hand-written playbook"

    def run(self, ctx: Context) -> Result:
        settings = {
            "rounds": ctx.choose(full=30, quick=2),
            "min_rounds": ctx.choose(full=10, quick=2),
            "seconds": ctx.choose(full=30, quick=4),
            "concurrency": ctx.kvm_xfs.config.limits.concurrency,
            "not_offered": {},
        }
        run = _Run(ctx, Result(self.name, self.title, settings, notes=[_PLAYBOOK_NOTE]))
        run.measure_machines()
        try:
            run.measure_playbooks()
        except Exception:  # The machines' results are complete, and took much longer to measure.
            run.result.failure = traceback.format_exc()
        return run.report()


class _Run:
    """Measures the rivals one after the other, each for a limited time."""

    def __init__(self, ctx: Context, result: Result) -> None:
        self._ctx = ctx
        self.result = result
        self._settings = result.settings
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._rivals: list[Rival] = []

    def measure_machines(self) -> None:
        host = self._ctx.kvm_xfs
        with our_machine(host, _SETTLE_SECONDS) as machine:
            self._measure_machine(machine)
        template = host.live.engine.templates.get(TEMPLATE)
        platform = host.host.platform
        guest = Guest(Layout(host.config.host.state_root).snapshot(template), platform, template.resources)
        directory = host.mount_point / "libvirt"
        with Libvirt(
            directory, tap_count=FORK_COUNT + 1, uid=_RIVAL_UID, has_kvm=platform.accelerator == "kvm"
        ) as libvirt:
            for kind in RIVAL_KINDS:
                self._ctx.print_progress(f"booting the source of {kind.title}")
                concurrency = self._settings["concurrency"]
                files = host.mount_point / kind.key
                with rival_machine(
                    kind, libvirt, files, guest, concurrency=concurrency, settle_seconds=_SETTLE_SECONDS
                ) as machine:
                    self._measure_machine(machine)

    def _measure_machine(self, machine: VirtualMachine) -> None:
        self._rivals.append(machine)
        rounds, seconds = self._settings["rounds"], self._settings["seconds"]
        min_rounds = self._settings["min_rounds"]
        self._repeat(machine, "rounds", rounds, min_rounds, seconds, lambda: self._run_round(machine))
        if isinstance(machine, ForkingRival):
            fork_rounds = self._ctx.choose(full=3, quick=1)
            self._repeat(
                machine, f"{FORK_COUNT} forks", fork_rounds, fork_rounds, seconds, lambda: self._fork_many(machine)
            )
        with Ping(machine.address, prefix=machine.prefix) as ping:
            # Separate rounds, because answering pings takes much of an emulated guest's time.
            windows: list[tuple[float, float]] = []
            self._repeat(
                machine, "pauses", min_rounds, min_rounds, seconds, lambda: _measure_snapshot_window(machine, windows)
            )
        waits = [ping.find_longest_wait(start, end + _COOLDOWN_SECONDS / 2) for start, end in windows]
        self._samples[f"{machine.key}_pause"] += waits

    def _repeat(
        self, rival: Rival, title: str, rounds: int, min_rounds: int, seconds: float, work: Callable[[], None]
    ) -> None:
        """Call ``work`` ``rounds`` times, or stop after ``seconds`` if it has been called ``min_rounds`` times."""
        start = time.monotonic()
        with self._ctx.showing_progress(f"{rival.title}: {title}", rounds) as steps:
            for number in range(rounds):
                work()
                steps.advance()
                if number + 1 >= min_rounds and time.monotonic() - start > seconds:
                    return

    def _run_round(self, rival: Rival) -> None:
        """Time a snapshot, one fork of it, and a rollback to it. Removes everything afterwards."""
        self._time(rival, "snapshot", rival.snapshot)
        if isinstance(rival, VirtualMachine):
            self._samples[f"{rival.key}_written"].append(rival.count_written_bytes())
        if isinstance(rival, ForkingRival):
            forking_rival = rival
            self._time(rival, "fork_1", lambda: forking_rival.fork(1))
            rival.remove_forks()
        self._time(rival, "rollback", rival.rollback)
        rival.remove_snapshot()

    def _fork_many(self, rival: ForkingRival) -> None:
        rival.snapshot()
        time.sleep(_COOLDOWN_SECONDS)
        self._time(rival, f"fork_{FORK_COUNT}", lambda: rival.fork(FORK_COUNT))
        rival.remove_forks()
        rival.rollback()
        rival.remove_snapshot()

    def measure_playbooks(self) -> None:
        scratch = session.get_run_dir() / "rivals"
        scratch.mkdir()
        ctx = self._ctx
        rounds, many_rounds = ctx.choose(full=10, quick=1), ctx.choose(full=2, quick=1)
        ctx.print_progress("building a jail template on a separate pool (zfs-fuse, emulated FreeBSD commands)")
        with jail_playbooks(scratch, _SETTLE_SECONDS) as playbooks, ctx.showing_progress("playbooks", rounds) as steps:
            self._rivals += playbooks
            for number in range(rounds):
                self._samples["play_nothing"].append(_time_and_wait(playbooks[0].run_empty_playbook))
                for playbook in playbooks:
                    self._run_round(playbook)
                    if number < many_rounds:
                        self._fork_many(playbook)
                steps.advance()

    def _time(self, rival: Rival, operation: str, work: Callable[[], None]) -> None:
        self._samples[f"{rival.key}_{operation}"].append(_time_and_wait(work))

    def report(self) -> Result:
        """Add the measures in the order of the operations, and return the result.

        The measures of this software are the floors of the rivals' measures.
        """
        result = self.result
        for operation, title in _TITLES.items():
            for rival in self._rivals:
                if operation in _MACHINE_ONLY_OPERATIONS and not isinstance(rival, VirtualMachine):
                    continue
                key = f"{rival.key}_{operation}"
                floor = f"{rival.baseline_key}_{operation}" if rival.baseline_key else ""
                samples = self._samples[key]
                if operation == "written":
                    result.add_measure(key, f"{title}: {rival.title}", "bytes", samples=samples, floor=floor)
                else:
                    result.add_measure(key, f"{title}: {rival.title}", samples=samples, floor=floor)
                if operation in rival.not_offered:
                    self._settings["not_offered"][key] = rival.not_offered[operation]
        result.add_measure("play_nothing", "a playbook that does nothing", samples=self._samples["play_nothing"])
        keys_by_reason: dict[str, list[str]] = defaultdict(list)
        for key, reason in self._settings["not_offered"].items():
            keys_by_reason[reason].append(key)
        result.notes += [f"not offered ({', '.join(keys)}): {reason}" for reason, keys in keys_by_reason.items()]
        return result


def _time_and_wait(work: Callable[[], None]) -> float:
    """Run ``work`` and return its duration in milliseconds. Waits afterwards to let the machine become idle."""
    _, elapsed = time_call(work)
    time.sleep(_COOLDOWN_SECONDS)
    return elapsed


def _measure_snapshot_window(machine: VirtualMachine, windows: list[tuple[float, float]]) -> None:
    """Take a snapshot, append its start and end times to ``windows``, and remove the snapshot."""
    time.sleep(_COOLDOWN_SECONDS)
    start = time.monotonic()
    machine.snapshot()
    windows.append((start, time.monotonic()))
    time.sleep(_COOLDOWN_SECONDS)
    machine.remove_snapshot()
