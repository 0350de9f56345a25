"""Measure snapshot, fork and rollback beside virsh, QEMU's savevm and a hand-written playbook, on the same guest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.measure import Result
from benchmarks.ping import Ping
from benchmarks.rivals.jails import HandWrittenPlaybook, OurPlaybook, jail_playbooks
from benchmarks.rivals.libvirt import Libvirt
from benchmarks.rivals.machines import KINDS, Guest, rival_machine
from benchmarks.rivals.ours import Ours, ours
from benchmarks.rivals.rival import MANY, OPERATIONS, Rival
from benchmarks.timers import milliseconds
from sandbox_gateway.hosts.kvm_xfs.image.layout import Layout
from tests.support import session

_BETWEEN_SECONDS = 0.3
_SETTLE_SECONDS = 3.0
_MIN_ROUNDS = 3
_UID = 699_999
"""The user that the rivals' QEMU runs as, beside those of our sandboxes."""
_TITLES = {
    "snapshot": "snapshot, until it is usable and its source answers",
    "pause": "longest wait for a ping during a snapshot",
    "written": "written for a snapshot",
    "fork_1": "fork x 1, until it answers",
    f"fork_{MANY}": f"fork x {MANY}, until all answer",
    "rollback": "rollback, until it answers",
}
_JAILS = (
    "playbooks: ZFS is zfs-fuse, and tests/freebsd_shim emulates FreeBSD's commands on Linux. Each operation is one "
    "run of ansible-playbook"
)


class Rivals:
    name = "rivals"
    title = "the same work by virsh, QEMU and a hand-written playbook"

    def run(self, ctx: Context) -> Result:
        settings = {
            "rounds": ctx.rounds(full=30, quick=3),
            "seconds": ctx.rounds(full=40, quick=8),
            "concurrency": ctx.kvm_xfs.config.limits.concurrency,
            "not_offered": {},
        }
        result = Result(self.name, self.title, settings, notes=[_JAILS])
        samples: dict[str, list[float]] = defaultdict(list)
        titles: list[Rival] = []
        self._measure_machines(ctx, ctx.kvm_xfs, _Rounds(ctx, result, samples, titles))
        self._measure_playbooks(ctx, result, samples, titles)
        _report(result, samples, titles)
        return result

    def _measure_machines(self, ctx: Context, host: KvmXfs, rounds: _Rounds) -> None:
        with ours(host, _SETTLE_SECONDS) as each:
            rounds.measure(each)
        template = host.live.engine.templates.get(TEMPLATE)
        place = Layout(host.config.host.state_root).snapshot(template)
        guest = Guest(place, host.host.platform, template.resources)
        kvm = host.host.platform.accelerator == "kvm"
        with Libvirt(host.mount_point / "libvirt", taps=MANY + 1, uid=_UID, kvm=kvm) as libvirt:
            for kind in KINDS:
                directory = host.mount_point / kind.key
                at_once = host.config.limits.concurrency
                with rival_machine(kind, libvirt, directory, guest, at_once=at_once, settle=_SETTLE_SECONDS) as rival:
                    rounds.measure(rival)

    def _measure_playbooks(
        self, ctx: Context, result: Result, samples: dict[str, list[float]], titles: list[Rival]
    ) -> None:
        scratch = session.run_dir() / "rivals"
        scratch.mkdir()
        count = ctx.rounds(full=5, quick=1)
        ctx.say("building the jail's template on a separate pool (zfs-fuse, FreeBSD's commands emulated)")
        with jail_playbooks(scratch, _SETTLE_SECONDS) as pair, ctx.steps("playbooks", count) as steps:
            titles += pair
            for number in range(count):
                samples["play_nothing"].append(_time(pair[0].nothing))
                for each in pair:
                    _run_round(each, samples)
                    if number < ctx.rounds(full=2, quick=1):
                        _run_many(each, samples)
                steps.done()


class _Rounds:
    """Measures one rival after the other, each for a limited time."""

    def __init__(self, ctx: Context, result: Result, samples: dict[str, list[float]], titles: list[Rival]) -> None:
        self._ctx = ctx
        self._settings = result.settings
        self._samples = samples
        self._titles = titles

    def measure(self, rival: Rival) -> None:
        self._titles.append(rival)
        rounds = self._settings["rounds"]
        self._repeat(f"{rival.title}: rounds", rounds, self._settings["seconds"], lambda: self._round(rival))
        if f"fork_{MANY}" not in rival.not_offered:
            repeated = max(1, rounds // 5)
            self._repeat(
                f"{rival.title}: fork x {MANY}",
                repeated,
                self._settings["seconds"] / 2,
                lambda: _run_many(rival, self._samples),
                least=1,
            )
        self._watch(rival, max(2, rounds // 3))

    def _round(self, rival: Rival) -> None:
        _run_round(rival, self._samples)

    def _repeat(
        self, title: str, rounds: int, seconds: float, work: Callable[[], None], *, least: int = _MIN_ROUNDS
    ) -> None:
        started = time.monotonic()
        with self._ctx.steps(title, rounds) as steps:
            for number in range(rounds):
                work()
                steps.done()
                if number + 1 >= least and time.monotonic() - started > seconds:
                    return

    def _watch(self, rival: Rival, rounds: int) -> None:
        """Take snapshots while the source is pinged, which costs an emulated guest a good part of its time."""
        windows: list[tuple[float, float]] = []

        def watch() -> None:
            time.sleep(_BETWEEN_SECONDS)
            start = time.monotonic()
            rival.snapshot()
            windows.append((start, time.monotonic()))
            time.sleep(_BETWEEN_SECONDS)
            rival.rollback()
            ping.switch_to(rival.address)
            rival.remove_snapshot()

        with Ping(rival.address, prefix=rival.prefix) as ping:
            self._repeat(f"{rival.title}: pauses", rounds, self._settings["seconds"] / 4, watch, least=2)
        waits = [ping.longest_wait(start, end + _BETWEEN_SECONDS / 2) for start, end in windows]
        self._samples[f"{rival.key}_pause"] += waits


def _time(work: Callable[[], None]) -> float:
    _, taken = milliseconds(work)
    time.sleep(_BETWEEN_SECONDS)
    return taken


def _run_round(rival: Rival, samples: dict[str, list[float]]) -> None:
    """Take a snapshot, fork it once, roll back to it, and remove everything again."""
    samples[f"{rival.key}_snapshot"].append(_time(rival.snapshot))
    if not isinstance(rival, OurPlaybook | HandWrittenPlaybook):
        samples[f"{rival.key}_written"].append(rival.written())
    if "fork_1" not in rival.not_offered:
        samples[f"{rival.key}_fork_1"].append(_time(lambda: rival.fork(1)))
        rival.remove_forks()
    samples[f"{rival.key}_rollback"].append(_time(rival.rollback))
    rival.remove_snapshot()


def _run_many(rival: Rival, samples: dict[str, list[float]]) -> None:
    rival.snapshot()
    time.sleep(_BETWEEN_SECONDS)
    samples[f"{rival.key}_fork_{MANY}"].append(_time(lambda: rival.fork(MANY)))
    rival.remove_forks()
    rival.rollback()
    rival.remove_snapshot()


def _report(result: Result, samples: dict[str, list[float]], rivals: list[Rival]) -> None:
    """Add the measures, by operation. Those of rivals are compared with ours."""
    for operation, title in _TITLES.items():
        for rival in rivals:
            plays = isinstance(rival, OurPlaybook | HandWrittenPlaybook)
            if plays and operation not in OPERATIONS:
                continue
            own = isinstance(rival, Ours | OurPlaybook)
            floor = "" if own else f"{OurPlaybook.key if plays else Ours.key}_{operation}"
            key = f"{rival.key}_{operation}"
            unit = "bytes" if operation == "written" else "ms"
            result.measure(key, f"{title}: {rival.title}", unit, samples=samples[key], floor=floor)
            if operation in rival.not_offered:
                result.settings["not_offered"][key] = rival.not_offered[operation]
    result.measure("play_nothing", "a playbook that does nothing", samples=samples["play_nothing"])
    reasons: dict[str, list[str]] = defaultdict(list)
    for key, reason in result.settings["not_offered"].items():
        reasons[reason].append(key)
    result.notes += [f"not offered ({', '.join(keys)}): {reason}" for reason, keys in reasons.items()]
