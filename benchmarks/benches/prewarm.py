"""Measure claims of prewarmed forks, from the request to the first answer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.answers import Answers, recording_answers
from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.measure import Result, Target
from benchmarks.raw_qemu import RawQemu
from benchmarks.timers import FunctionRef, Span, Timers, split_time
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.files import instances
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.waiting import wait_until

_COOLDOWN_SECONDS = 0.5
_READY_TIMEOUT_SECONDS = 120
_TIMED_FUNCTIONS: dict[str, FunctionRef] = {
    "move": (instances, "move"),
    "cont": (Machine, "cont"),
    "identify": (AgentClient, "identify"),
    "save": (KvmXfsHost, "save"),
}
_PART_TITLES = {
    "move": "rename the machine's directory",
    "cont": "resume the machine",
    "identify": "until the agent has answered",
    "save": "write the record to the disk",
    "rest": "everything else",
}


class Prewarm:
    name = "prewarm"
    title = "claim of a prewarmed fork"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=40, quick=4)
        result = Result(self.name, self.title, {"rounds": rounds})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        timers = Timers()
        with (
            host.temporary_snapshot() as snapshot,
            host.raw_qemu(snapshot) as raw,
            timers.recording(_TIMED_FUNCTIONS),
            recording_answers() as answers,
            ctx.showing_progress("claims", 3 * rounds) as steps,
        ):
            timer = _ClaimTimer(host, timers, answers, samples)
            for _ in range(rounds):
                _measure_template_claim(timer)
                steps.advance()
            for _ in range(rounds):
                _measure_floor(raw, samples)
                _measure_snapshot_claim(timer, snapshot)
                steps.advance()
            sandbox = host.create_sandbox(TEMPLATE)
            for _ in range(rounds):
                _measure_rollback(timer, sandbox, snapshot)
                steps.advance()
        _report(result, samples)
        result.notes += timers.describe_missing_functions()
        return result


@dataclass
class _ClaimTimer:
    host: KvmXfs
    timers: Timers
    answers: Answers
    samples: dict[str, list[float]]

    def prewarm(self, ref: str, count: int) -> None:
        """Prewarm ``count`` forks, and wait until they are ready and the machine is idle again."""
        engine = self.host.live.engine
        self.host.live.do(engine.prewarm.set_target(ref, count))
        wait_until(lambda: engine.prewarm.get_level(engine.snapshots.get(ref)).ready == count, _READY_TIMEOUT_SECONDS)
        time.sleep(_COOLDOWN_SECONDS)

    def time_claim(self, key: str, request: Coroutine[Any, Any, Any]) -> Any:
        """Time one request that claims a fork, and return its result."""
        engine = self.host.live.engine
        claim_count_before = engine.machines.start_counts["prewarmed"]
        self.timers.take()
        self.answers.forget()
        start = time.perf_counter()
        result = self.host.live.do(request)
        end = time.perf_counter()
        if engine.machines.start_counts["prewarmed"] != claim_count_before + 1:
            raise RuntimeError(f"the request did not claim a prewarmed fork ({key})")
        answer = self.answers.wait(1)[0]
        spans = self.timers.take()
        self.samples[f"{key}.continued"] += [(span.end - start) * 1000 for span in spans.get("cont", [])]
        self.samples[f"{key}.identified"].append((answer.end - start) * 1000)
        whole_span = Span(start, max(end, answer.end))
        self.samples[key].append(whole_span.ms)
        for part, value in split_time(
            whole_span, {part: spans[part] for part in _PART_TITLES if part in spans}
        ).items():
            self.samples[f"{key}.{part}"].append(value)
        return result

    def time_command(self, key: str, sandbox: Sandbox) -> None:
        start = time.perf_counter()
        result = self.host.live.do(self.host.live.engine.commands.exec(sandbox.id, ["true"]))
        self.samples[key].append((time.perf_counter() - start) * 1000)
        if result.exit_code != 0:
            raise RuntimeError(f"the fork could not run a command: {result}")


def _measure_template_claim(timer: _ClaimTimer) -> None:
    timer.prewarm(TEMPLATE, 1)
    sandbox = timer.time_claim("template", timer.host.live.engine.forks.create(TEMPLATE, ForkSpec()))
    timer.time_command("first", sandbox)
    timer.prewarm(TEMPLATE, 0)
    timer.time_command("again", sandbox)
    timer.host.delete_sandboxes(sandbox)


def _measure_floor(raw: RawQemu, samples: dict[str, list[float]]) -> None:
    (machine,) = raw.prepare_machines(1)
    machine.start_paused()
    time.sleep(_COOLDOWN_SECONDS)
    resume_ms, answer_ms = machine.resume_and_ping()
    samples["floor_cont"].append(resume_ms)
    samples["floor"].append(answer_ms)
    machine.stop()


def _measure_snapshot_claim(timer: _ClaimTimer, snapshot: Snapshot) -> None:
    timer.prewarm(snapshot.id, 1)
    sandbox = timer.time_claim("snapshot", timer.host.live.engine.forks.create(snapshot.id, ForkSpec()))
    timer.time_command("snapshot.first", sandbox)
    timer.host.delete_sandboxes(sandbox)
    timer.prewarm(snapshot.id, 0)


def _measure_rollback(timer: _ClaimTimer, sandbox: Sandbox, snapshot: Snapshot) -> None:
    timer.prewarm(snapshot.id, 1)
    timer.time_claim("rollback", timer.host.live.engine.sandboxes.rollback(sandbox.id, snapshot.id))
    timer.prewarm(snapshot.id, 0)


def _report(result: Result, samples: dict[str, list[float]]) -> None:
    def add_parts(measure_key: str) -> None:
        result.add_parts(measure_key, _PART_TITLES, {key: samples[f"{measure_key}.{key}"] for key in _PART_TITLES})

    result.add_measure(
        "template", "claim of a template's fork, until the engine returned", samples=samples["template"],
        target=Target("p50", 5),
    )  # fmt: skip
    add_parts("template")
    result.add_measure("again", "a command in a sandbox that has run one before", samples=samples["again"])
    result.add_measure(
        "first",
        "the first command in a claimed fork of a template",
        samples=samples["first"],
        floor="again",
        target=Target("ratio", 1.3),
    )
    result.add_measure("floor_cont", "floor: QEMU's answer to cont; no gateway", samples=samples["floor_cont"])
    result.add_measure("floor", "floor: cont, until the guest's agent has answered", samples=samples["floor"])
    result.add_measure(
        "cont", "claim of a snapshot's fork, until it is resumed", samples=samples["snapshot.continued"],
        floor="floor_cont", target=Target("p50", 5),
    )  # fmt: skip
    result.add_measure(
        "identified", "claim of a snapshot's fork, until the agent answered", samples=samples["snapshot.identified"],
        floor="floor", target=Target("ratio", 1.15),
    )  # fmt: skip
    result.add_measure(
        "snapshot", "claim of a snapshot's fork, until the engine returned", samples=samples["snapshot"], floor="floor"
    )
    add_parts("snapshot")
    result.add_measure("snapshot_first", "its first command", samples=samples["snapshot.first"], floor="again")
    result.add_measure(
        "rollback_cont", "rollback to a prewarmed snapshot, until the fork is resumed",
        samples=samples["rollback.continued"], floor="floor_cont", target=Target("p50", 5),
    )  # fmt: skip
    result.add_measure(
        "rollback_identified", "rollback to a prewarmed snapshot, until the agent answered",
        samples=samples["rollback.identified"], floor="floor", target=Target("ratio", 1.15),
    )  # fmt: skip
    result.add_measure(
        "rollback", "rollback to a prewarmed snapshot, until the old machine is removed", samples=samples["rollback"],
        floor="floor",
    )  # fmt: skip
