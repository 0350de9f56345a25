"""Measure a check run that would create a hundred forks, and plan sessions over a large index."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from benchmarks.benches.tasks import FORK_COUNT, SIMULATION_NOTE, open_gateway
from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.plays import Plays
from tests.api.memory_gateway import MemoryGateway
from tests.support import session


class Plans:
    name = "plans"
    title = "a check run of a hundred forks"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=30, quick=2)
        settings = {"forks": FORK_COUNT, "rounds": rounds, "machines": "tests/api/memory_host.py"}
        result = Result(self.name, self.title, settings, notes=[SIMULATION_NOTE])
        unchanged, check, sessions = [], [], []
        scratch = session.run_dir() / "plans"
        scratch.mkdir()
        numbers = itertools.count()
        with open_gateway(scratch) as gateway, ctx.steps("plays", rounds) as steps:
            for _ in range(rounds):
                unchanged.append(_time_play(gateway, scratch, "ci"))
                check.append(_time_play(gateway, scratch, "new", "--check"))
                sessions.append(_time_session(gateway, next(numbers)))
                steps.advance()
        result.add_measure("unchanged", "floor: a run that changes nothing on 100 forks", samples=unchanged)
        result.add_measure(
            "check", "a check run that would fork 100", samples=check, floor="unchanged", target=Target("ratio", 1.2)
        )
        result.add_measure("session", "opening and ending a plan session over HTTP", samples=sessions)
        return result


def _time_play(gateway: MemoryGateway, scratch: Path, prefix: str, *options: str) -> float:
    """Return the duration of a whole run in milliseconds, from the start of ansible-playbook to its end."""
    plays = Plays(scratch, {"ANSIBLE_TRANSPORT": "local"})
    fork = {"snapshot": "golden", "count": FORK_COUNT, "name_prefix": prefix, "gateway_url": gateway.unix_url}
    tasks = [{"name": "fork", "grove.sandbox.sandbox_fork": fork}]
    start = time.perf_counter()
    plays.run("here,", tasks, options=options, vars={"ansible_python_interpreter": sys.executable})
    duration_ms = (time.perf_counter() - start) * 1000
    with gateway.client() as client:
        for plan in client.get("/plans").json():
            client.delete(f"/plans/{plan['planID']}").raise_for_status()
    return duration_ms


def _time_session(gateway: MemoryGateway, number: int) -> float:
    with gateway.client() as client:
        client.get("/health")
        start = time.perf_counter()
        plan = client.post("/plans", json={"run": f"a measured run {number:06}"}).json()
        client.delete(f"/plans/{plan['planID']}").raise_for_status()
        return (time.perf_counter() - start) * 1000
