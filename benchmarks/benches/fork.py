"""Measure cold forks, from the request to the first answer. No machine is started in advance."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from benchmarks.answers import Answers, recording_answers
from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import FunctionRef, Span, Timers, split_time
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.files import instances
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox, Snapshot

_COOLDOWN_SECONDS = 0.3
_RESAMPLES = 10_000
_TIMED_FUNCTIONS: dict[str, FunctionRef] = {
    "files": (instances, "create_files"),
    "slot": (SlotPool, "take"),
    "spawn": (Machine, "spawn"),
    "limits": (Cgroups, "limit"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PART_TITLES = {
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
        rounds = ctx.choose(full=200, quick=5)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        host = ctx.kvm_xfs
        recording, progress = timers.recording(_TIMED_FUNCTIONS), ctx.showing_progress("forks", rounds)
        with (
            host.temporary_snapshot() as snapshot,
            host.raw_qemu(snapshot) as raw,
            recording,
            recording_answers() as answers,
            progress as steps,
        ):
            for _ in range(rounds):
                _measure_floor(raw, samples)
                time.sleep(_COOLDOWN_SECONDS)
                _measure_fork(host, snapshot, timers, answers, samples)
                time.sleep(_COOLDOWN_SECONDS)
                steps.advance()
        _report(result, samples)
        result.notes.append(_describe_own_part(samples))
        result.notes += timers.describe_missing_functions()
        return result


def _measure_floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.prepare_machines(1)
    samples["floor"].append(machine.start().running_ms)
    time.sleep(_COOLDOWN_SECONDS)
    (machine,) = raw.prepare_machines(1)
    samples["floor_agent"].append(machine.start_and_ping())
    time.sleep(_COOLDOWN_SECONDS)
    (machine,) = raw.prepare_machines(1)
    times = machine.start(stepwise=True)
    samples["floor.answer"].append(times.answer_ms)
    samples["floor.state"].append(times.running_ms - times.answer_ms)
    machine.stop()


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
    for key, value in split_time(total_span, {key: spans[key] for key in _PART_TITLES if key in spans}).items():
        samples[f"answered.{key}"].append(value)
    host.delete_sandboxes(sandbox)


def _describe_own_part(samples: dict[str, list[float]]) -> str:
    """Return a sentence with the median of the gateway's own part of a fork, and its confidence interval."""
    own_parts = np.array(samples["answered"]) - np.array(samples["floor_agent"])
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(own_parts, (_RESAMPLES, len(own_parts))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return (
        f"the gateway's own part of a fork, paired in each of {len(own_parts)} rounds: median "
        f"{np.median(own_parts):.1f} ms, 95 % confidence interval {low:.1f} to {high:.1f} ms (target: 3 ms)"
    )


def _report(result: Result, samples: dict[str, list[float]]) -> None:
    def add_parts(measure_key: str, titles: dict[str, str]) -> None:
        result.add_parts(measure_key, titles, {key: samples[f"{measure_key}.{key}"] for key in titles})

    result.add_measure("floor", "floor: QEMU exec, QMP answer, state; no gateway", samples=samples["floor"])
    add_parts("floor", {"answer": "QEMU exec to QMP answer", "state": "device state load"})
    result.add_measure("floor_agent", "floor, until the guest's agent has answered", samples=samples["floor_agent"])
    result.add_measure("returned", "fork, until the engine returned", samples=samples["returned"], floor="floor")
    result.add_measure(
        "answered", "fork, until the agent answered", samples=samples["answered"], floor="floor",
        target=Target("ratio", 1.5),
    )  # fmt: skip
    add_parts("answered", _PART_TITLES)
    own_parts = [fork - floor for fork, floor in zip(samples["answered"], samples["floor_agent"], strict=True)]
    result.add_measure("own", "the gateway's own part, in each round", samples=own_parts, target=Target("p50", 3))
    result.add_measure("limits", "apply the limits of the machine", samples=samples["limits"])
    result.add_measure(
        "exec", "fork, until a first command has run in it", samples=samples["exec"], floor="floor",
        target=Target("ratio", 3),
    )  # fmt: skip
