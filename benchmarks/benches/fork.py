"""From asking for a fork to its first answer, cold: no machine was started ahead."""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import Span, Stop, Timers
from sandbox_gateway.engine.agent import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs import host as kvm_xfs_host
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.netns import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu import Machine
from sandbox_gateway.records import Sandbox, Snapshot

_BETWEEN_SECONDS = 0.3
_WATCHED: dict[str, Stop] = {
    "files": (kvm_xfs_host, "_lay_out"),
    "slot": (SlotPool, "take"),
    "spawn": (Machine, "spawn"),
    "limits": (Cgroups, "place"),
    "host": (KvmXfsHost, "fork"),
    "reach": (AgentClient, "_reach"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PARTS = {
    "files": "lay out files",
    "slot": "take a network slot",
    "spawn": "start the QEMU process",
    "limits": "put it under limits",
    "reach": "until the agent accepts: QEMU's start, state, guest's network",
    "identity": "the agent takes its identity and answers",
    "save": "write the record to the disk",
    "rest": "everything else",
}


class Fork:
    name = "fork"
    title = "cold fork of a snapshot with memory"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=50, quick=5)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        parts: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        host = ctx.kvm_xfs
        watched, steps = timers.watching(_WATCHED), ctx.steps("forks", rounds)
        with host.source() as snapshot, host.raw(snapshot) as raw, watched, steps as bar:
            for _ in range(rounds):
                _floor(raw, samples)
                time.sleep(_BETWEEN_SECONDS)
                _fork(host, snapshot, timers, samples, parts)
                time.sleep(_BETWEEN_SECONDS)
                bar.done()
        _report(result, samples, parts)
        if timers.missing:
            result.notes.append(f"not found, and so not told apart: {', '.join(timers.missing)}")
        return result


def _floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.machines(1)
    started = time.perf_counter()
    samples["floor"].append(machine.start().running)
    machine.connect()
    samples["floor_guest"].append((time.perf_counter() - started) * 1000)
    time.sleep(_BETWEEN_SECONDS)
    (machine,) = raw.machines(1)
    times = machine.start(stepwise=True)
    samples["floor.answer"].append(times.answered)
    samples["floor.state"].append(times.running - times.answered)
    machine.end()


def _fork(
    host: KvmXfs, snapshot: Snapshot, timers: Timers, samples: dict[str, list[float]], parts: dict[str, list[float]]
) -> None:
    timers.take()
    start = time.perf_counter()
    (sandbox,) = host.live.do(host.live.engine.fork(snapshot.id, ForkSpec()))
    answered = time.perf_counter()
    spans = {key: found[0] for key, found in timers.take().items()}
    assert isinstance(sandbox, Sandbox)
    done = host.live.do(host.live.engine.exec(sandbox.id, ["true"]))
    executed = time.perf_counter()
    if done.exit_code != 0:
        raise RuntimeError(f"the fork answered, but could not run a command: {done}")
    samples["answered"].append((answered - start) * 1000)
    samples["exec"].append((executed - start) * 1000)
    for key, value in _parts(Span(start, answered), spans).items():
        parts[key].append(value)
    host.kill(sandbox)


def _parts(whole: Span, spans: dict[str, Span]) -> dict[str, float]:
    """Milliseconds of each part; they add up to the whole."""
    found: dict[str, float] = {
        key: spans[key].ms for key in ("files", "slot", "spawn", "limits", "reach", "save") if key in spans
    }
    if "identify" in spans and "reach" in spans:
        found["identity"] = spans["identify"].ms - spans["reach"].ms
    found["rest"] = whole.ms - sum(found.values())
    return found


def _report(result: Result, samples: dict[str, list[float]], parts: dict[str, list[float]]) -> None:
    result.measure("floor", "floor: QEMU exec, QMP answer, device state; no gateway", samples=samples["floor"])
    titles = {"answer": "QEMU exec to QMP answer", "state": "device state load"}
    result.parts("floor", titles, {key: samples[f"floor.{key}"] for key in titles})
    result.measure(
        "floor_guest", "the same until the guest's kernel accepts a connection", samples=samples["floor_guest"]
    )
    result.measure(
        "answered", "fork, until the agent answered", samples=samples["answered"], floor="floor",
        target=Target("ratio", 1.6),
    )  # fmt: skip
    result.parts("answered", _PARTS, parts)
    result.measure("exec", "fork, until a first command has run in it", samples=samples["exec"], floor="floor")
