"""Measure cold forks, from the request to the first answer. No machine is started in advance."""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.answers import Answers, watching
from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import Span, Stop, Timers, shares
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.image import instances
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox, Snapshot

_BETWEEN_SECONDS = 0.3
_WATCHED: dict[str, Stop] = {
    "files": (instances, "create_files"),
    "slot": (SlotPool, "take"),
    "spawn": (Machine, "spawn"),
    "limits": (Cgroups, "place"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PARTS = {
    "files": "lay out files",
    "slot": "take a network slot",
    "spawn": "start the QEMU process",
    "identify": "start QEMU and load the state, until the agent has answered",
    "save": "write the record to the disk",
    "rest": "everything else",
}


class Fork:
    name = "fork"
    title = "cold fork of a snapshot with memory"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=50, quick=5)
        result = Result(self.name, self.title, {"rounds": rounds})
        found: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        host = ctx.kvm_xfs
        watched, bar = timers.watching(_WATCHED), ctx.steps("forks", rounds)
        with host.source() as snapshot, host.raw(snapshot) as raw, watched, watching() as answers, bar as steps:
            for _ in range(rounds):
                _floor(raw, found)
                time.sleep(_BETWEEN_SECONDS)
                _fork(host, snapshot, timers, answers, found)
                time.sleep(_BETWEEN_SECONDS)
                steps.done()
        _report(result, found)
        if timers.missing:
            result.notes.append(f"not found, and so not measured separately: {', '.join(timers.missing)}")
        return result


def _floor(raw: RawQemu, found: dict[str, list[float]]) -> None:
    (machine,) = raw.machines(1)
    found["floor"].append(machine.start().running)
    time.sleep(_BETWEEN_SECONDS)
    (machine,) = raw.machines(1)
    found["floor_agent"].append(machine.start_and_ping())
    time.sleep(_BETWEEN_SECONDS)
    (machine,) = raw.machines(1)
    times = machine.start(stepwise=True)
    found["floor.answer"].append(times.answered)
    found["floor.state"].append(times.running - times.answered)
    machine.end()


def _fork(host: KvmXfs, snapshot: Snapshot, timers: Timers, answers: Answers, found: dict[str, list[float]]) -> None:
    timers.take()
    answers.forget()
    start = time.perf_counter()
    (sandbox,) = host.live.do(host.live.engine.forks.fork(snapshot.id, ForkSpec()))
    returned = time.perf_counter()
    assert isinstance(sandbox, Sandbox)
    if not (answered := answers.wait(1)):
        raise RuntimeError("the engine returned a fork whose agent did not answer")
    answer = answered[0]
    done = host.live.do(host.live.engine.commands.exec(sandbox.id, ["true"]))
    executed = time.perf_counter()
    if done.exit_code != 0:
        raise RuntimeError(f"the fork answered, but could not run a command: {done}")
    # Wait for both: the caller can use the sandbox only after the fork has returned.
    whole = Span(start, max(returned, answer.end))
    found["returned"].append((returned - start) * 1000)
    found["answered"].append(whole.ms)
    found["exec"].append((executed - start) * 1000)
    spans = timers.take()
    found["limits"] += [span.ms for span in spans.pop("limits", [])]
    for key, value in shares(whole, {key: spans[key] for key in _PARTS if key in spans}).items():
        found[f"answered.{key}"].append(value)
    host.kill(sandbox)


def _report(result: Result, found: dict[str, list[float]]) -> None:
    def parts(of: str, titles: dict[str, str]) -> None:
        result.parts(of, titles, {key: found[f"{of}.{key}"] for key in titles})

    result.measure("floor", "floor: QEMU exec, QMP answer, state; no gateway", samples=found["floor"])
    parts("floor", {"answer": "QEMU exec to QMP answer", "state": "device state load"})
    result.measure("floor_agent", "the same until the guest's agent has answered", samples=found["floor_agent"])
    result.measure("returned", "fork, until the engine returned", samples=found["returned"], floor="floor")
    result.measure(
        "answered", "fork, until the agent answered", samples=found["answered"], floor="floor",
        target=Target("ratio", 1.6),
    )  # fmt: skip
    parts("answered", _PARTS)
    result.measure("limits", "setting its limits", samples=found["limits"])
    result.measure("exec", "fork, until a first command has run in it", samples=found["exec"], floor="floor")
