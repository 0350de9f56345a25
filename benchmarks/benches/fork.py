"""Measure cold forks, from the request to the first answer. Machines are not started in advance."""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.answers import Answers, watching
from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import FunctionRef, Span, Timers, split_time
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.image import instances
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox, Snapshot

_BETWEEN_SECONDS = 0.3
_WATCHED: dict[str, FunctionRef] = {
    "files": (instances, "create_files"),
    "slot": (SlotPool, "take"),
    "spawn": (Machine, "spawn"),
    "limits": (Cgroups, "limit"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PARTS = {
    "files": "create files",
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
        samples: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        host = ctx.kvm_xfs
        watched, progress = timers.watching(_WATCHED), ctx.steps("forks", rounds)
        with (
            host.source() as snapshot,
            host.raw_qemu(snapshot) as raw,
            watched,
            watching() as answers,
            progress as steps,
        ):
            for _ in range(rounds):
                _measure_floor(raw, samples)
                time.sleep(_BETWEEN_SECONDS)
                _measure_fork(host, snapshot, timers, answers, samples)
                time.sleep(_BETWEEN_SECONDS)
                steps.advance()
        _report(result, samples)
        if timers.missing:
            result.notes.append(f"functions that no longer exist and were not measured: {', '.join(timers.missing)}")
        return result


def _measure_floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.machines(1)
    samples["floor"].append(machine.start().running)
    time.sleep(_BETWEEN_SECONDS)
    (machine,) = raw.machines(1)
    samples["floor_agent"].append(machine.start_and_ping())
    time.sleep(_BETWEEN_SECONDS)
    (machine,) = raw.machines(1)
    times = machine.start(stepwise=True)
    samples["floor.answer"].append(times.answered)
    samples["floor.state"].append(times.running - times.answered)
    machine.end()


def _measure_fork(
    host: KvmXfs, snapshot: Snapshot, timers: Timers, answers: Answers, samples: dict[str, list[float]]
) -> None:
    timers.take()
    answers.forget()
    start = time.perf_counter()
    (sandbox,) = host.live.do(host.live.engine.forks.fork(snapshot.id, ForkSpec()))
    return_time = time.perf_counter()
    assert isinstance(sandbox, Sandbox)
    if not (exchanges := answers.wait(1)):
        raise RuntimeError("the engine returned a fork whose agent did not answer")
    answer = exchanges[0]
    command = host.live.do(host.live.engine.commands.exec(sandbox.id, ["true"]))
    command_end = time.perf_counter()
    if command.exit_code != 0:
        raise RuntimeError(f"the fork answered, but could not run a command: {command}")
    # Wait for both: the caller can use the sandbox only after the fork has returned.
    total_span = Span(start, max(return_time, answer.end))
    samples["returned"].append((return_time - start) * 1000)
    samples["answered"].append(total_span.ms)
    samples["exec"].append((command_end - start) * 1000)
    spans = timers.take()
    samples["limits"] += [span.ms for span in spans.pop("limits", [])]
    for key, value in split_time(total_span, {key: spans[key] for key in _PARTS if key in spans}).items():
        samples[f"answered.{key}"].append(value)
    host.delete_sandboxes(sandbox)


def _report(result: Result, samples: dict[str, list[float]]) -> None:
    def parts(of: str, titles: dict[str, str]) -> None:
        result.add_parts(of, titles, {key: samples[f"{of}.{key}"] for key in titles})

    result.measure("floor", "floor: QEMU exec, QMP answer, state; no gateway", samples=samples["floor"])
    parts("floor", {"answer": "QEMU exec to QMP answer", "state": "device state load"})
    result.measure("floor_agent", "floor, until the guest's agent has answered", samples=samples["floor_agent"])
    result.measure("returned", "fork, until the engine returned", samples=samples["returned"], floor="floor")
    result.measure(
        "answered", "fork, until the agent answered", samples=samples["answered"], floor="floor",
        target=Target("ratio", 1.6),
    )  # fmt: skip
    parts("answered", _PARTS)
    result.measure("limits", "applying its limits", samples=samples["limits"])
    result.measure("exec", "fork, until a first command has run in it", samples=samples["exec"], floor="floor")
