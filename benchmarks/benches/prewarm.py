"""Measure claims of prewarmed forks, from the request to the first answer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.answers import Answers, watching
from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import FunctionRef, Span, Timers, split_time
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.image import instances
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.waiting import eventually

_BETWEEN_SECONDS = 0.5
_READY_SECONDS = 120
_WATCHED: dict[str, FunctionRef] = {
    "move": (instances, "move"),
    "cont": (Machine, "cont"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PARTS = {
    "move": "rename the machine's directory",
    "cont": "let the machine continue",
    "identify": "until the agent has answered",
    "save": "write the record to the disk",
    "rest": "everything else",
}


class Prewarm:
    name = "prewarm"
    title = "claim of a prewarmed fork"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=40, quick=4)
        result = Result(self.name, self.title, {"rounds": rounds})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        with (
            host.source() as snapshot,
            host.raw_qemu(snapshot) as raw,
            timers.watching(_WATCHED),
            watching() as answers,
            ctx.steps("claims", 3 * rounds) as steps,
        ):
            clock = _Clock(host, timers, answers, samples)
            for _ in range(rounds):
                _measure_template(clock)
                steps.advance()
            for _ in range(rounds):
                _measure_floor(raw, samples)
                _measure_snapshot(clock, snapshot)
                steps.advance()
            sandbox = host.create_sandbox(TEMPLATE)
            for _ in range(rounds):
                _measure_rollback(clock, sandbox, snapshot)
                steps.advance()
        _report(result, samples)
        if timers.missing:
            result.notes.append(f"functions that no longer exist and were not measured: {', '.join(timers.missing)}")
        return result


@dataclass
class _Clock:
    host: KvmXfs
    timers: Timers
    answers: Answers
    samples: dict[str, list[float]]

    def keep_ready(self, ref: str, count: int) -> None:
        """Set the number of forks to prewarm, then wait until they are ready and the machine is idle again."""
        engine = self.host.live.engine
        self.host.live.do(engine.prewarm.set_target(ref, count))
        eventually(lambda: engine.prewarm.level(engine.snapshots.get(ref)).ready == count, _READY_SECONDS)
        time.sleep(_BETWEEN_SECONDS)

    def claim(self, key: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Measure one request that claims a fork, and return its result."""
        engine = self.host.live.engine
        claim_count = engine.machines.starts["prewarmed"]
        self.timers.take()
        self.answers.forget()
        start = time.perf_counter()
        result = self.host.live.do(work)
        end = time.perf_counter()
        if engine.machines.starts["prewarmed"] != claim_count + 1:
            raise RuntimeError(f"the request did not claim a prewarmed fork ({key})")
        answer = self.answers.wait(1)[0]
        spans = self.timers.take()
        self.samples[f"{key}.continued"] += [(span.end - start) * 1000 for span in spans.get("cont", [])]
        self.samples[f"{key}.identified"].append((answer.end - start) * 1000)
        whole = Span(start, max(end, answer.end))
        self.samples[key].append(whole.ms)
        for part, value in split_time(whole, {part: spans[part] for part in _PARTS if part in spans}).items():
            self.samples[f"{key}.{part}"].append(value)
        return result

    def run_command(self, key: str, sandbox: Sandbox) -> None:
        start = time.perf_counter()
        result = self.host.live.do(self.host.live.engine.commands.exec(sandbox.id, ["true"]))
        self.samples[key].append((time.perf_counter() - start) * 1000)
        if result.exit_code != 0:
            raise RuntimeError(f"the fork could not run a command: {result}")


def _measure_template(clock: _Clock) -> None:
    clock.keep_ready(TEMPLATE, 1)
    sandbox = clock.claim("template", clock.host.live.engine.forks.create(TEMPLATE, ForkSpec()))
    clock.run_command("first", sandbox)
    clock.keep_ready(TEMPLATE, 0)
    clock.run_command("again", sandbox)
    clock.host.delete_sandboxes(sandbox)


def _measure_floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.machines(1)
    machine.start_paused()
    time.sleep(_BETWEEN_SECONDS)
    resume_ms, answer_ms = machine.resume_and_ping()
    samples["floor_cont"].append(resume_ms)
    samples["floor"].append(answer_ms)
    machine.end()


def _measure_snapshot(clock: _Clock, snapshot: Snapshot) -> None:
    clock.keep_ready(snapshot.id, 1)
    sandbox = clock.claim("snapshot", clock.host.live.engine.forks.create(snapshot.id, ForkSpec()))
    clock.run_command("snapshot.first", sandbox)
    clock.host.delete_sandboxes(sandbox)
    clock.keep_ready(snapshot.id, 0)


def _measure_rollback(clock: _Clock, sandbox: Sandbox, snapshot: Snapshot) -> None:
    clock.keep_ready(snapshot.id, 1)
    clock.claim("rollback", clock.host.live.engine.sandboxes.rollback(sandbox.id, snapshot.id))
    clock.keep_ready(snapshot.id, 0)


def _report(result: Result, samples: dict[str, list[float]]) -> None:
    def parts(of: str) -> None:
        result.add_parts(of, _PARTS, {key: samples[f"{of}.{key}"] for key in _PARTS})

    result.measure(
        "template", "claim of a template's fork, until the engine returned", samples=samples["template"],
        target=Target("p50", 5),
    )  # fmt: skip
    parts("template")
    result.measure("again", "a command in a sandbox that has run one before", samples=samples["again"])
    result.measure(
        "first", "the first command in a claimed fork of a template", samples=samples["first"], floor="again"
    )
    result.measure("floor_cont", "floor: QEMU's answer to cont; no gateway", samples=samples["floor_cont"])
    result.measure("floor", "floor: cont, until the guest's agent has answered", samples=samples["floor"])
    result.measure(
        "cont", "claim of a snapshot's fork, until it continues", samples=samples["snapshot.continued"],
        floor="floor_cont", target=Target("p50", 5),
    )  # fmt: skip
    result.measure(
        "identified", "claim of a snapshot's fork, until the agent answered", samples=samples["snapshot.identified"],
        floor="floor",
    )  # fmt: skip
    result.measure(
        "snapshot", "claim of a snapshot's fork, until the engine returned", samples=samples["snapshot"], floor="floor"
    )
    parts("snapshot")
    result.measure("snapshot_first", "its first command", samples=samples["snapshot.first"], floor="again")
    result.measure(
        "rollback_cont", "rollback to a prewarmed snapshot, until the fork continues",
        samples=samples["rollback.continued"], floor="floor_cont",
    )  # fmt: skip
    result.measure(
        "rollback", "rollback to a prewarmed snapshot, until the old machine is removed", samples=samples["rollback"],
        floor="floor",
    )  # fmt: skip
