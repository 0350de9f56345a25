"""The gateway is killed in the middle of each verb: afterwards each object is complete or does not exist.

By default it is killed at a few steps, spread over each verb; GROVE_CRASH_POINTS=all tries every step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.records import SandboxState
from tests.support.crash import KILLED, VERBS, VOLUME_VERBS, Runner
from tests.support.live import Live
from tests.support.waiting import eventually
from tests.support.worlds import TEMPLATE, World

POINTS = os.environ.get("GROVE_CRASH_POINTS", "3")
QMP_VERBS = {"capture", "claim", "clone", "capture-with-volumes", "pause"}
"""They stop a machine whose memory a snapshot holds."""


class Scene:
    """A settled state that all verbs start from; no gateway runs except those that are opened explicitly."""

    def __init__(self, world: World, settle: Callable[[Live], None]) -> None:
        self.world = world
        self._settle = settle
        self._runner = Runner(world.factory)
        self._config: Config | None = None

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Provides the state to a verb, which must restore it; after a failure, the state is created again."""
        try:
            if self._config is None:
                self._config = self.world.config()
                with self.opened() as live:
                    self._settle(live)
            yield
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[Live]:
        assert self._config is not None
        live = Live(self.world.host(self._config), self._config)
        try:
            yield live
        finally:
            live.close()

    def close(self) -> None:
        self._runner.end()
        if self._config is not None:
            with self.opened() as live:
                live.remove_all()
            self.world.forget(self._config)
            self._config = None

    def run(self, verb: str, fatal: int, path: Path) -> tuple[int, str]:
        """The result of a verb that is killed at a step (0: not killed), and its output."""
        assert self._config is not None
        return self._runner.run(self._config, verb, fatal, path), path.read_text()


def _create_scene(world: World, settle: Callable[[Live], None]) -> Iterator[Scene]:
    scene = Scene(world, settle)
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def settled(world: World) -> Iterator[Scene]:
    """A running source and its snapshot, a paused sandbox, and spare objects."""
    yield from _create_scene(world, settle)


def settle(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "echo kept >/root/kept")
    live.do(live.engine.snapshots.create("source", name="mark"))
    live.do(live.engine.snapshots.create("source", name="spare-mark"))
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["spare", "sleeper"])))
    live.do(live.engine.sandboxes.pause("sleeper"))


def check_lineage(live: Live, when: str) -> None:
    """Every parent of a snapshot or sandbox exists."""
    snapshots, sandboxes = live.engine.index.snapshots, live.engine.index.sandboxes
    parents = {each.parent for each in snapshots.values() if each.parent}
    assert parents | {each.head for each in sandboxes.values()} <= snapshots.keys(), when


def chosen(steps: int, qmp: list[int]) -> list[int]:
    """POINTS steps spread over a verb; a command to QEMU, if there is one, replaces the nearest of these steps."""
    count = int(POINTS)
    spread = {1 + int((point + 0.5) / count * steps) for point in range(count)}
    if qmp and not spread & {*qmp}:
        command, near = min(((each, step) for each in qmp for step in spread), key=lambda pair: abs(pair[0] - pair[1]))
        spread = spread - {near} | {command}
    return sorted(spread)


Check = Callable[[Live, World, str], None]
Restore = Callable[[Live], None]


@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_verb_leaves_no_partial_object(verb: str, settled: Scene, tmp_path: Path) -> None:
    if verb == "claim" and not settled.world.abilities.prewarm:
        pytest.skip(f"{settled.world.kind} declares that it cannot hold machines")
    kill_everywhere(verb, settled, tmp_path / "said", check, restore)


def kill_everywhere(verb: str, scene: Scene, path: Path, check: Check, restore: Restore) -> None:
    with scene.settled():
        steps, qmp = rehearse(verb, scene, path, restore)
        assert steps > 0, "nothing was counted, so nothing would be killed"
        assert bool(qmp) == (scene.world.abilities.memory and verb in QMP_VERBS), f"{verb}: {qmp} of {steps} are QMP's"
        wanted = range(1, steps + 1) if POINTS == "all" else chosen(steps, qmp)
        killed = 0
        for fatal in wanted:
            code, said = scene.run(verb, fatal, path)
            assert code in (0, KILLED), said[-3000:]
            killed += code == KILLED
            with scene.opened() as live:
                check(live, scene.world, f"{verb} killed at step {fatal} of {steps}")
                restore(live)
        assert killed > 0, f"{verb} was never killed: it ended before each of the steps {list(wanted)}"


def rehearse(verb: str, scene: Scene, path: Path, restore: Restore) -> tuple[int, list[int]]:
    """Run the verb undisturbed. Returns the number of its steps, and which are QMP commands; the state is restored."""
    code, said = scene.run(verb, 0, path)
    assert code == 0, said[-3000:]
    with scene.opened() as live:
        restore(live)
    found = json.loads(said.splitlines()[-1])
    return found["steps"], found["qmp"]


def check(live: Live, world: World, when: str) -> None:
    """Everything that must remain is there; new objects are complete; there is nothing unknown."""
    stop_prewarming(live)
    sandboxes = {sandbox.name: sandbox for sandbox in live.engine.sandboxes.list()}
    assert {"source", "sleeper"} <= sandboxes.keys(), when
    snapshots = {name for snapshot in live.engine.snapshots.list() for name in snapshot.names}
    assert "mark" in snapshots, when
    for sandbox in sandboxes.values():
        if sandbox.state is SandboxState.RUNNING:
            assert live.shell(sandbox.id, "hostname").strip() == sandbox.name, when
    if sandboxes["source"].state is SandboxState.PAUSED:
        live.do(live.engine.sandboxes.resume("source"))
    assert live.shell("source", "cat /root/kept").strip() == "kept", when
    if "new" in snapshots:
        fork = live.do(live.engine.forks.create("new", ForkSpec()))
        assert live.shell(fork.id, "cat /root/kept").strip() == "kept", when
        live.do(live.engine.sandboxes.delete(fork.id))
    check_lineage(live, when)
    live.wait_for(world.check_no_strays, live.engine, live.config, when)


def stop_prewarming(live: Live) -> None:
    for snapshot in live.engine.snapshots.list():
        if snapshot.prewarm:
            live.do(live.engine.prewarm.set_target(snapshot.id, 0))
    eventually(lambda: live.engine.prewarm.total().ready == 0)


def restore(live: Live) -> None:
    """Restore the state from before the verb."""
    engine = live.engine
    present = {sandbox.name for sandbox in engine.sandboxes.list()}
    for name in {"new", "new2"} & present:
        live.do(engine.sandboxes.delete(name))
    for snapshot in engine.snapshots.list():
        if "new" in snapshot.names:
            live.do(engine.snapshots.delete(snapshot.id))
    if live.sandbox("source").state is SandboxState.PAUSED:
        live.do(engine.sandboxes.resume("source"))
    if "spare" not in present:
        live.do(engine.forks.create(TEMPLATE, ForkSpec(names=["spare"])))
    if live.sandbox("sleeper").state is SandboxState.RUNNING:
        live.do(engine.sandboxes.pause("sleeper"))
    if not any("spare-mark" in snapshot.names for snapshot in engine.snapshots.list()):
        live.do(engine.snapshots.create("source", name="spare-mark"))


# -- volumes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settled_volumes(world: World) -> Iterator[Scene]:
    """A running source with two volumes, a snapshot that holds one of them, and two unused volumes."""
    yield from _create_scene(world, settle_volumes)


def settle_volumes(live: Live) -> None:
    for name in ("one", "two", "idle", "spare"):
        live.do(live.engine.volumes.create(name, 64))
    live.do(
        live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], mounts=[MountSpec(n, f"/{n}") for n in MOUNTED]))
    )
    for name in MOUNTED:
        live.shell("source", f"echo {name} >/{name}/kept && sync")
    live.do(live.engine.snapshots.create("source", name="mark", volumes=["one"]))
    prepare_unused_volume(live)
    live.do(live.engine.volumes.create_snapshot("spare", "before"))


MOUNTED = ("one", "two")


def prepare_unused_volume(live: Live) -> None:
    """Create a volume that holds "after", and a snapshot of it that holds "before"."""
    live.do(live.engine.attachments.attach("source", MountSpec("idle", "/idle")))
    if not live.engine.volumes.list_snapshots("idle"):
        live.shell("source", "echo before >/idle/kept && sync")
        live.do(live.engine.volumes.create_snapshot("idle", "before"))
    live.shell("source", "echo after >/idle/kept && sync")
    live.do(live.engine.attachments.detach("source", "idle"))


@pytest.mark.parametrize("verb", VOLUME_VERBS)
def test_a_killed_volume_verb_leaves_no_partial_object(verb: str, settled_volumes: Scene, tmp_path: Path) -> None:
    kill_everywhere(verb, settled_volumes, tmp_path / "said", check_volumes, restore_volumes)


def check_volumes(live: Live, world: World, when: str) -> None:
    """Check that the mounts match the records exactly, and that each volume and snapshot is complete or does not
    exist."""
    engine = live.engine
    volumes = {each.name: each for each in engine.volumes.list()}
    by_id = {each.id: each for each in volumes.values()}
    assert {*MOUNTED, "idle"} <= volumes.keys(), when
    assert live.sandbox("source").state is SandboxState.RUNNING, when
    mounted = {by_id[mount.volume].name: mount.path for mount in live.sandbox("source").mounts}
    assert mounted.get("one") == "/one" and mounted.keys() <= {"one", "two", "idle"}, when
    wanted = {name: {"idle": ("before", "after")}.get(name, (name,)) for name in mounted}
    names = ("one", "two", "idle")
    look = f"for name in {' '.join(names)}; do echo $name:$(cat /$name/kept 2>/dev/null); done"

    def all_present() -> bool:
        found = dict(line.split(":") for line in live.shell("source", look).split())
        return all(found[name] in wanted.get(name, ("",)) for name in names)

    eventually(all_present)
    write = " && ".join(f"echo here >/{name}/written" for name in mounted)
    room = int(live.shell("source", f"{write} && sync && df --output=size -BM /one | tail -n 1 | tr -d M"))
    assert 0.75 < room / volumes["one"].size_mb <= 1, (when, room)
    if "new" in volumes and volumes["new"].from_snapshot:
        assert content(live, "new") == "before", when
    assert content(live, "idle") in ("before", "after"), when
    assert [each.name for each in engine.volumes.list_snapshots("idle")] == ["before"], when
    if "spare" in volumes:
        assert [each.name for each in engine.volumes.list_snapshots("spare")] == ["before"], when
    for each in engine.volumes.list_snapshots("one"):
        if each.name == "new":
            engine_made = live.do(engine.volumes.create("probe", from_snapshot=each.id))
            assert content(live, engine_made.name) == "one", when
            live.do(engine.volumes.delete("probe"))
    snapshots = {each.id: each for each in engine.snapshots.list()}
    captures = {each.id for name in MOUNTED for each in engine.volumes.list_snapshots(name) if each.sandbox_snapshot}
    assert captures == {capture.snapshot for each in snapshots.values() for capture in each.volumes}, when
    assert all(len(each.volumes) == (1 if each.names == ["mark"] else 2) for each in snapshots.values()), when
    owners = {each.owner for each in volumes.values() if each.owner}
    forks = {each.id: each for each in engine.sandboxes.list() if each.name.startswith("fork")}
    assert owners == forks.keys(), when
    for fork in forks.values():
        assert write_and_check(live, fork.id, "/one") == "one", when
    live.wait_for(world.check_no_strays, engine, live.config, when)


def write_and_check(live: Live, ref: str, place: str) -> str:
    return live.shell(ref, f"cat {place}/kept 2>/dev/null || true").strip()


def content(live: Live, name: str) -> str:
    """The content of a volume, read from a sandbox that has it mounted, or from a temporary mount."""
    volume = live.engine.volumes.get(name)
    for sandbox, mount in live.engine.volumes.mounts_of(volume):
        return write_and_check(live, sandbox.id, mount.path)
    live.do(live.engine.attachments.attach("source", MountSpec(name, "/probe", read_only=True)))
    found = write_and_check(live, "source", "/probe")
    live.do(live.engine.attachments.detach("source", name))
    return found


def restore_volumes(live: Live) -> None:
    """Restore the state from before the verb."""
    engine = live.engine
    for sandbox in engine.sandboxes.list():
        if sandbox.name.startswith("fork"):
            live.do(engine.sandboxes.delete(sandbox.id))
    for snapshot in engine.snapshots.list():
        if "new-mark" in snapshot.names:
            live.do(engine.snapshots.delete(snapshot.id))
    for each in engine.volumes.list_snapshots("one"):
        if each.name == "new":
            live.do(engine.volumes.delete_snapshot("one", each.id))
    present = {each.name for each in engine.volumes.list()}
    if "new" in present:
        live.do(engine.volumes.delete("new"))
    if "spare" not in present:
        live.do(engine.volumes.create("spare", 64))
        live.do(engine.volumes.create_snapshot("spare", "before"))
    mounted = {engine.volumes.get(mount.volume).name for mount in live.sandbox("source").mounts}
    if "idle" in mounted:
        live.do(engine.attachments.detach("source", "idle"))
    if "two" not in mounted:
        live.do(engine.attachments.attach("source", MountSpec("two", "/two")))
    prepare_unused_volume(live)
