"""Measure a check-mode run that would create a hundred forks, and plan sessions over a large index."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.benches.tasks import FORK_COUNT, SIMULATION_NOTE, open_gateway
from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.plays import Plays
from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot, new_id
from tests.support import session
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemoryHost

_SNAPSHOT_COUNT, _SANDBOX_COUNT = 10_000, 2_000
_OPEN_LIMIT_MS, _MEMORY_LIMIT_BYTES = 5, 5_000_000


class Plans:
    name = "plans"
    title = "a check-mode run of a hundred forks"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=30, quick=2)
        settings = {
            "forks": FORK_COUNT,
            "rounds": rounds,
            "snapshots": _SNAPSHOT_COUNT,
            "sandboxes": _SANDBOX_COUNT,
            "machines": "tests/support/memory_host.py",
        }
        result = Result(self.name, self.title, settings, notes=[SIMULATION_NOTE])
        unchanged, check, sessions = [], [], []
        scratch = session.get_run_dir() / "plans"
        scratch.mkdir()
        numbers = itertools.count()
        with open_gateway(scratch) as gateway, ctx.showing_progress("plays", rounds) as steps:
            for _ in range(rounds):
                unchanged.append(_time_play(gateway, scratch, "ci"))
                check.append(_time_play(gateway, scratch, "new", is_check=True))
                sessions.append(_time_session(gateway, next(numbers)))
                steps.advance()
        result.add_measure("unchanged", "floor: a run that changes nothing on 100 forks", samples=unchanged)
        result.add_measure(
            "check",
            "a check-mode run that saves the plan of 100 forks",
            samples=check,
            floor="unchanged",
            target=Target("ratio", 1.2),
        )
        result.add_measure("session", "opening and ending a plan session over HTTP", samples=sessions)
        open_times, sizes = asyncio.run(_measure_large_sessions(scratch, rounds))
        title = f"opening a session over {_SNAPSHOT_COUNT:,} snapshots and {_SANDBOX_COUNT:,} sandboxes"
        result.add_measure("large", title, samples=open_times, target=Target("p50", _OPEN_LIMIT_MS))
        title = "memory that this session holds"
        result.add_measure("memory", title, "bytes", samples=sizes, target=Target("p50", _MEMORY_LIMIT_BYTES))
        return result


def _time_play(gateway: MemoryGateway, scratch: Path, prefix: str, *, is_check: bool = False) -> float:
    """Return the duration of a whole run in milliseconds, from the start of ansible-playbook to its end.

    A check-mode run prints its plan and saves it.
    """
    plan_file = scratch / "plan.json"
    environment = {"ANSIBLE_TRANSPORT": "local"}
    if is_check:
        environment |= {
            "ANSIBLE_CALLBACKS_ENABLED": "clock,grove.sandbox.plan",
            "GROVE_SANDBOX_PLAN_FILE": str(plan_file),
        }
    plays = Plays(scratch, environment)
    fork = {"snapshot": "golden", "count": FORK_COUNT, "name_prefix": prefix, "gateway_url": gateway.unix_url}
    tasks = [{"name": "fork", "grove.sandbox.sandbox_fork": fork}]
    start = time.perf_counter()
    options = ("--check",) if is_check else ()
    plays.run("here,", tasks, options=options, vars={"ansible_python_interpreter": sys.executable})
    duration_ms = (time.perf_counter() - start) * 1000
    if is_check:
        _check_plan(json.loads(plan_file.read_text()), gateway)
        plan_file.unlink()
    return duration_ms


def _check_plan(plan: dict[str, Any], gateway: MemoryGateway) -> None:
    """Raise RuntimeError unless the run saved the plan of all forks and ended its session."""
    changes = [change for entry in plan["entries"] for action in entry["actions"] for change in action["changes"]]
    with gateway.client() as client:
        sessions = client.get("/plans").json()
    if plan["problems"] or len(changes) != FORK_COUNT or sessions:
        raise RuntimeError(
            f"the check-mode run planned {len(changes)} changes ({plan['problems']}), and left {sessions}"
        )


def _time_session(gateway: MemoryGateway, number: int) -> float:
    with gateway.client() as client:
        client.get("/health")
        start = time.perf_counter()
        plan = client.post("/plans", json={"run": f"a measured run {number:06}"}).json()
        client.delete(f"/plans/{plan['planID']}").raise_for_status()
        return (time.perf_counter() - start) * 1000


async def _measure_large_sessions(state_root: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Return the opening times (in ms) and the sizes (in bytes) of plan sessions over a large index."""
    engine = Engine(MemoryHost(), Config.model_validate({"host": {"state_root": str(state_root)}}))
    snapshots = [Snapshot(names=[f"snapshot-{number}"]) for number in range(_SNAPSHOT_COUNT)]
    for child, parent in itertools.pairwise(reversed(snapshots)):
        child.parent = parent.id
    sandboxes = [
        Sandbox(name=f"sandbox-{number}", state=SandboxState.PAUSED, forked_from=snapshots[number].id)
        for number in range(_SANDBOX_COUNT)
    ]
    assert not engine.index.load(sandboxes, snapshots)
    sessions = PlanSessions(engine)
    open_times, sizes = [], []
    for is_traced in (False, True):  # tracing makes each allocation slower
        for _ in range(rounds):
            gc.collect()
            if is_traced:
                tracemalloc.start()
            start = time.perf_counter()
            plan = sessions.open("bench", new_id())
            duration_ms = (time.perf_counter() - start) * 1000
            if is_traced:
                sizes.append(float(tracemalloc.get_traced_memory()[0]))
                tracemalloc.stop()
            else:
                open_times.append(duration_ms)
            await sessions.close("bench", plan.id)
            del plan
    await engine.background.cancel()
    return open_times, sizes
