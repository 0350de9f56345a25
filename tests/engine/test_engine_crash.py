"""The gateway killed in the middle of each verb: afterwards each thing is whole or was never there.

By default a handful of moments, spread over each verb; GROVE_CRASH_POINTS=all tries every one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import SandboxState
from tests.support import session
from tests.support.crash import KILLED, VERBS
from tests.support.live import Live
from tests.support.worlds import TEMPLATE, World

POINTS = os.environ.get("GROVE_CRASH_POINTS", "6")


@pytest.fixture
def settled(fresh: Any) -> Config:
    """A state with a running source and its snapshot, a sleeping sandbox, and things to spare; no gateway runs."""
    live: Live = fresh()
    live.do(live.engine.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "echo kept >/root/kept")
    live.do(live.engine.capture("source", name="mark"))
    live.do(live.engine.capture("source", name="spare-mark"))
    live.do(live.engine.fork(TEMPLATE, ForkSpec(names=["spare", "sleeper"])))
    live.do(live.engine.pause("sleeper"))
    live.close()
    return live.config


def run_until(config: Config, world: World, verb: str, fatal: int, path: Path) -> subprocess.CompletedProcess[str]:
    path.write_text(config.model_dump_json())
    argv = [sys.executable, "-m", "tests.support.crash", str(path), world.factory, verb, str(fatal)]
    return subprocess.run(argv, cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300)


def moments() -> Iterator[float]:
    """Shares of the way through a verb."""
    count = int(POINTS)
    for point in range(count):
        yield (point + 0.5) / count


@pytest.mark.parametrize("verb", VERBS)
def test_killed_in_the_middle(verb: str, settled: Config, world: World, fresh: Any, tmp_path: Path) -> None:
    steps = rehearsed(verb, settled, world, fresh, tmp_path / "config.json")
    wanted = range(1, steps + 1) if POINTS == "all" else sorted({1 + int(share * steps) for share in moments()})
    for fatal in wanted:
        done = run_until(settled, world, verb, fatal, tmp_path / "config.json")
        assert done.returncode in (0, KILLED), done.stderr[-3000:]
        live = fresh(config=settled)
        check(live, world, f"{verb} killed at step {fatal} of {steps}")
        restore(live)
        live.close()


def rehearsed(verb: str, settled: Config, world: World, fresh: Any, path: Path) -> int:
    """How many steps the verb takes when nobody kills it; the state is brought back afterwards."""
    done = run_until(settled, world, verb, 0, path)
    assert done.returncode == 0, done.stderr[-3000:]
    live = fresh(config=settled)
    restore(live)
    live.close()
    return int(done.stdout)


def check(live: Live, world: World, when: str) -> None:
    """Everything that was promised to stay is there; what is new is whole; nothing is there that nobody knows."""
    sandboxes = {sandbox.name: sandbox for sandbox in live.engine.sandboxes()}
    assert {"source", "sleeper"} <= sandboxes.keys(), when
    snapshots = {name for snapshot in live.engine.snapshots() for name in snapshot.names}
    assert "mark" in snapshots, when
    for sandbox in sandboxes.values():
        if sandbox.state is SandboxState.RUNNING:
            assert live.shell(sandbox.id, "hostname").strip() == sandbox.name, when
    if sandboxes["source"].state is SandboxState.PAUSED:
        live.do(live.engine.resume("source"))
    assert live.shell("source", "cat /root/kept").strip() == "kept", when
    if "new" in snapshots:
        fork = live.do(live.engine.create("new", ForkSpec()))
        assert live.shell(fork.id, "cat /root/kept").strip() == "kept", when
        live.do(live.engine.kill(fork.id))
    world.check_no_strays(live.engine, live.config, when)


def restore(live: Live) -> None:
    """Make the state what it was before the verb."""
    engine = live.engine
    present = {sandbox.name for sandbox in engine.sandboxes()}
    for name in {"new", "new2"} & present:
        live.do(engine.kill(name))
    for snapshot in engine.snapshots():
        if "new" in snapshot.names:
            live.do(engine.delete_snapshot(snapshot.id))
    if live.sandbox("source").state is SandboxState.PAUSED:
        live.do(engine.resume("source"))
    if "spare" not in present:
        live.do(engine.create(TEMPLATE, ForkSpec(names=["spare"])))
    if live.sandbox("sleeper").state is SandboxState.RUNNING:
        live.do(engine.pause("sleeper"))
    if not any("spare-mark" in snapshot.names for snapshot in engine.snapshots()):
        live.do(engine.capture("source", name="spare-mark"))
