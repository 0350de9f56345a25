"""Measure a task that changes nothing on a hundred forks, with the action plugin and with the module."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.plays import Plays
from tests.support import session
from tests.support.memory_gateway import MemoryGateway

FORK_COUNT = 100
_ROUNDS = 5
"""How many times the tasks of a play are measured, after a first round in which Ansible loads its plugins."""
SIMULATION_NOTE = (
    "the gateway and its HTTP server are real. The forks are only simulated (tests/support/memory_host.py), because "
    "the measured requests do not need machines"
)
_FORK_OPTIONS: dict[str, Any] = {"snapshot": "golden", "count": FORK_COUNT, "name_prefix": "ci", "exact": True}


class Tasks:
    name = "tasks"
    title = "a task that changes nothing on a hundred forks"

    def run(self, ctx: Context) -> Result:
        plays = ctx.choose(full=6, quick=1)
        settings = {
            "forks": FORK_COUNT,
            "plays": plays,
            "rounds": plays * _ROUNDS,
            "machines": "tests/support/memory_host.py",
        }
        result = Result(self.name, self.title, settings, notes=[SIMULATION_NOTE])
        samples: dict[str, list[float]] = defaultdict(list)
        root = session.get_run_dir() / "tasks"
        root.mkdir()
        with open_gateway(root) as gateway, ctx.showing_progress("plays", plays) as steps:
            for _ in range(plays):
                for key, durations in _run_play(gateway).items():
                    samples[key] += durations
                steps.advance()
        samples["floor"] = [sum(pair) for pair in zip(samples["debug"], samples["call"], strict=True)]
        result.add_measure("floor", "floor: a debug task plus one HTTP call", samples=samples["floor"])
        result.add_measure("debug", "ansible.builtin.debug", samples=samples["debug"], part_of="floor")
        result.add_measure("call", "listing the forks without Ansible", samples=samples["call"],
                       part_of="floor")  # fmt: skip
        title = "sandbox_fork with the action plugin"
        result.add_measure("action", title, samples=samples["action"], floor="floor", target=Target("ratio", 1.3))
        title = "an action that returns the same result without a request"
        result.add_measure("same", title, samples=samples["same"], floor="debug")
        title = "sandbox_fork with the module"
        result.add_measure("module", title, samples=samples["module"], floor="floor")
        return result


@contextlib.contextmanager
def open_gateway(root: Path) -> Iterator[MemoryGateway]:
    """Run a gateway with a snapshot and a hundred forks of it, with its files in ``root``."""
    gateway, old_limits = MemoryGateway(root, log={"level": "warning"}), _raise_open_files_limit()
    try:
        gateway.build_template()
        with gateway.client() as client:
            for path, body in (
                ("/sandboxes", {"templateID": "base", "name": "source"}),
                ("/sandboxes/source/snapshots", {"name": "golden"}),
                ("/snapshots/golden/fork", {"names": [f"ci-{number}" for number in range(1, FORK_COUNT + 1)]}),
            ):
                client.post(path, json=body, timeout=120).raise_for_status()
        yield gateway
        gateway.clear()
    finally:
        gateway.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, old_limits)


def _raise_open_files_limit() -> tuple[int, int]:
    """Raise the limit on open files, because every simulated machine has sockets in this process.

    Returns the old limits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def _run_play(gateway: MemoryGateway) -> dict[str, list[float]]:
    """Run the play once. Returns the durations of each kind of task in milliseconds."""
    scratch = session.get_run_dir() / "tasks"
    same_file = scratch / "same.json"
    plays = Plays(scratch, {"ANSIBLE_TRANSPORT": "local", "SAME_FILE": str(same_file)})
    fork_task = {"grove.sandbox.sandbox_fork": {**_FORK_OPTIONS, "gateway_url": gateway.unix_url}}
    play_variables = {"ansible_python_interpreter": sys.executable}
    if not same_file.exists():
        same_file.write_text("{}")
        store_task = {"ansible.builtin.copy": {"content": "{{ result }}", "dest": str(same_file)}}
        plays.run(
            "here,",
            [{"name": "list", **fork_task, "register": "result"}, {"name": "store", **store_task}],
            vars=play_variables,
        )
    tasks = [
        {"name": "debug", "ansible.builtin.debug": {"msg": "nothing"}},
        {"name": "action", **fork_task},
        {"name": "same", "same": {}},
        {"name": "module", **fork_task, "environment": {"ANY": "thing"}},
    ] * (_ROUNDS + 1)
    timed_tasks = plays.run("here,", tasks, may_change=False, vars=play_variables)
    durations: dict[str, list[float]] = defaultdict(list)
    for task in timed_tasks[len(tasks) // (_ROUNDS + 1) :]:
        durations[task.name].append(task.ms)
    durations["call"] = _time_calls(gateway)
    return durations


def _time_calls(gateway: MemoryGateway) -> list[float]:
    """List the forks over HTTP without Ansible. Returns the duration of each request in milliseconds."""
    argv = [sys.executable, "-m", "benchmarks.call", str(gateway.socket), "/sandboxes?snapshotID=golden&limit=1000"]
    result = subprocess.run(
        [*argv, str(_ROUNDS)], cwd=session.REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    durations: list[float] = json.loads(result.stdout)
    return durations
