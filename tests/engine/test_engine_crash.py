"""Test that each object is either complete or absent after the gateway is killed during an operation.

By default, each operation is killed at a few of its steps. With GROVE_CRASH_POINTS=all, it is killed at every step.
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
from tests.support.crash import KILLED_EXIT_CODE, OPERATIONS, VOLUME_OPERATIONS, OperationRunner
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World

CRASH_POINTS = os.environ.get("GROVE_CRASH_POINTS", "2")
QMP_OPERATIONS = {"capture", "claim", "clone", "capture-with-volumes", "pause"}
"""The operations that send commands to QEMU."""
MEMORY_OPERATIONS = {"capture", "clone", "pause"}
"""The operations that take the marks of written pages, which the next capture needs."""


class Scenario:
    """The state that all operations start from. A gateway runs only inside ``opened``."""

    def __init__(self, world: World, prepare: Callable[[EngineRunner], None]) -> None:
        self.world = world
        self._prepare = prepare
        self._runner = OperationRunner(world.host_class)
        self._config: Config | None = None

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Create the state unless it exists. After a failure inside the context, the next call creates it again."""
        try:
            if self._config is None:
                self._config = self.world.make_config()
                with self.opened() as runner:
                    self._prepare(runner)
            yield
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[EngineRunner]:
        assert self._config is not None
        runner = EngineRunner(self.world.make_host(self._config), self._config)
        try:
            yield runner
        finally:
            runner.close()

    def close(self) -> None:
        self._runner.end()
        if self._config is not None:
            with self.opened() as runner:
                runner.remove_all()
            self.world.clean_up(self._config)
            self._config = None

    def run(self, operation: str, kill_step: int, path: Path) -> tuple[int, str]:
        """Run an operation, and kill it at step ``kill_step`` (0 means never). Return its exit code and its output."""
        assert self._config is not None
        return self._runner.run(self._config, operation, kill_step, path), path.read_text()


def _create_scenario(world: World, prepare: Callable[[EngineRunner], None]) -> Iterator[Scenario]:
    scenario = Scenario(world, prepare)
    yield scenario
    scenario.close()


@pytest.fixture(scope="module")
def sandbox_scenario(world: World) -> Iterator[Scenario]:
    """A scenario with a running source, its snapshot, a chain of snapshots, a paused sandbox, and spare objects."""
    yield from _create_scenario(world, prepare_sandboxes)


def prepare_sandboxes(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "echo kept >/root/kept")
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.do(runner.engine.snapshots.create("source", name="spare-mark"))
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["spare", "sleeper"])))
    runner.do(runner.engine.sandboxes.pause("sleeper"))
    create_chain(runner)


def create_chain(runner: EngineRunner) -> None:
    """Create the snapshot "middle", whose parent is "mark", and its child "child"."""
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["chain"])))
    for name in ("middle", "child"):
        runner.do(runner.engine.snapshots.create("chain", name=name))
    runner.do(runner.engine.sandboxes.delete("chain"))


def get_parent_of_child(runner: EngineRunner) -> str:
    """Return the name of the parent of "child"."""
    (name,) = runner.engine.index.snapshots[runner.engine.snapshots.get("child").parent].names
    return name


def check_lineage(runner: EngineRunner, moment: str) -> None:
    """Check that every parent of a snapshot or sandbox exists, and that "child" has its parent or its grandparent."""
    snapshots, sandboxes = runner.engine.index.snapshots, runner.engine.index.sandboxes
    parent_ids = {each.parent for each in snapshots.values() if each.parent}
    assert parent_ids | {each.head for each in sandboxes.values()} <= snapshots.keys(), moment
    assert get_parent_of_child(runner) in ("middle", "mark"), moment


def choose_steps(step_count: int, qmp_steps: list[int]) -> list[int]:
    """Return CRASH_POINTS evenly spaced steps. At least one of them is a QMP command if the operation has any."""
    count = int(CRASH_POINTS)
    chosen_steps = {1 + int((point + 0.5) / count * step_count) for point in range(count)}
    if qmp_steps and not chosen_steps & {*qmp_steps}:
        command, nearest = min(
            ((each, step) for each in qmp_steps for step in chosen_steps), key=lambda pair: abs(pair[0] - pair[1])
        )
        chosen_steps = chosen_steps - {nearest} | {command}
    return sorted(chosen_steps)


StateChecker = Callable[[EngineRunner, World, str], None]
StateRestorer = Callable[[EngineRunner], None]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_operation_leaves_no_partial_object(
    operation: str, sandbox_scenario: Scenario, tmp_path: Path
) -> None:
    if operation == "claim" and not sandbox_scenario.world.abilities.prewarm:
        pytest.skip(f"{sandbox_scenario.world.kind} declares that it cannot hold machines")
    if operation == "import-since" and not sandbox_scenario.world.abilities.incremental_transfer:
        pytest.skip(f"{sandbox_scenario.world.kind} declares that its files are always whole")
    checks_memory = operation in MEMORY_OPERATIONS and sandbox_scenario.world.abilities.memory
    check = check_sandboxes_and_memory if checks_memory else check_sandboxes
    kill_at_each_step(operation, sandbox_scenario, tmp_path / "output", check, restore_sandboxes)


def kill_at_each_step(
    operation: str, scenario: Scenario, path: Path, check: StateChecker, restore: StateRestorer
) -> None:
    with scenario.prepared():
        step_count, qmp_steps = run_uninterrupted(operation, scenario, path, check, restore)
        assert step_count > 0, "no steps were counted, so the operation would never be killed"
        assert bool(qmp_steps) == (scenario.world.abilities.memory and operation in QMP_OPERATIONS), (
            f"{operation}: {qmp_steps} of {step_count} steps are QMP commands"
        )
        kill_steps = range(1, step_count + 1) if CRASH_POINTS == "all" else choose_steps(step_count, qmp_steps)
        kill_count = 0
        for step in kill_steps:
            code, output = scenario.run(operation, step, path)
            assert code in (0, KILLED_EXIT_CODE), output[-3000:]
            kill_count += code == KILLED_EXIT_CODE
            with scenario.opened() as runner:
                check(runner, scenario.world, f"{operation} killed at step {step} of {step_count}")
                restore(runner)
        assert kill_count > 0, f"{operation} was never killed: it ended before each of the steps {list(kill_steps)}"


def run_uninterrupted(
    operation: str, scenario: Scenario, path: Path, check: StateChecker, restore: StateRestorer
) -> tuple[int, list[int]]:
    """Run the operation without killing it, check the result like that of a killed one, and restore the state.

    Return the number of steps, and the numbers of the steps that are QMP commands.
    """
    code, output = scenario.run(operation, 0, path)
    assert code == 0, output[-3000:]
    with scenario.opened() as runner:
        check(runner, scenario.world, f"{operation} not killed")
        restore(runner)
    result = json.loads(output.splitlines()[-1])
    return result["steps"], result["qmp"]


def check_sandboxes(runner: EngineRunner, world: World, moment: str) -> None:
    """Check that everything that must remain exists, that new objects are complete, and that nothing else exists."""
    runner.stop_prewarming()
    sandboxes = {sandbox.name: sandbox for sandbox in runner.engine.sandboxes.list()}
    assert {"source", "sleeper"} <= sandboxes.keys(), moment
    snapshot_names = {name for snapshot in runner.engine.snapshots.list() for name in snapshot.names}
    assert {"mark", "child"} <= snapshot_names, moment
    for sandbox in sandboxes.values():
        if sandbox.state is SandboxState.RUNNING:
            assert runner.shell(sandbox.id, "hostname").strip() == sandbox.name, moment
    if sandboxes["source"].state is SandboxState.PAUSED:
        runner.do(runner.engine.sandboxes.resume("source"))
    assert runner.shell("source", "cat /root/kept").strip() == "kept", moment
    forked_names = {"new"} & snapshot_names
    if "middle" not in snapshot_names:
        forked_names.add("child")  # The removal of its parent must not have damaged it.
    for name in forked_names:
        fork = runner.do(runner.engine.forks.create(name, ForkSpec()))
        assert runner.shell(fork.id, "cat /root/kept").strip() == "kept", moment
        runner.do(runner.engine.sandboxes.delete(fork.id))
    check_lineage(runner, moment)
    runner.wait_for(world.check_no_strays, runner.engine, runner.config, moment)


def check_sandboxes_and_memory(runner: EngineRunner, world: World, moment: str) -> None:
    """Also check that a fork of a new capture has the memory of the source. Then change the memory."""
    check_sandboxes(runner, world, moment)
    runner.shell("source", "test -e /root/digest || head -c 2M /dev/urandom >/dev/shm/blob")
    digest = runner.shell("source", "sha256sum /dev/shm/blob")
    assert digest == runner.shell("source", "cat /root/digest 2>/dev/null || sha256sum /dev/shm/blob"), moment
    probe = runner.do(runner.engine.snapshots.create("source"))
    fork = runner.do(runner.engine.forks.create(probe.id, ForkSpec()))
    assert runner.shell(fork.id, "sha256sum /dev/shm/blob") == digest, moment
    runner.do(runner.engine.sandboxes.delete(fork.id))
    runner.do(runner.engine.snapshots.delete(probe.id))
    runner.shell("source", "head -c 2M /dev/urandom >/dev/shm/blob && sha256sum /dev/shm/blob >/root/digest && sync")


def restore_sandboxes(runner: EngineRunner) -> None:
    """Restore the state that existed before the operation."""
    engine = runner.engine
    existing_names = {sandbox.name for sandbox in engine.sandboxes.list()}
    for name in {"new", "new2"} & existing_names:
        runner.do(engine.sandboxes.delete(name))
    for snapshot in engine.snapshots.list():
        if "new" in snapshot.names:
            runner.do(engine.snapshots.delete(snapshot.id))
    if runner.get_sandbox("source").state is SandboxState.PAUSED:
        runner.do(engine.sandboxes.resume("source"))
    if "spare" not in existing_names:
        runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["spare"])))
    if runner.get_sandbox("sleeper").state is SandboxState.RUNNING:
        runner.do(engine.sandboxes.pause("sleeper"))
    if not any("spare-mark" in snapshot.names for snapshot in engine.snapshots.list()):
        runner.do(engine.snapshots.create("source", name="spare-mark"))
    if get_parent_of_child(runner) != "middle":
        for snapshot in engine.snapshots.list():
            if snapshot.names in (["middle"], ["child"]):
                runner.do(engine.snapshots.delete(snapshot.id))
        create_chain(runner)


# -- volumes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def volume_scenario(world: World) -> Iterator[Scenario]:
    """A scenario with a running source that has two volumes, its snapshot with one volume, and two unused volumes."""
    yield from _create_scenario(world, prepare_volumes)


def prepare_volumes(runner: EngineRunner) -> None:
    for name in ("one", "two", "idle", "spare"):
        runner.do(runner.engine.volumes.create(name, 64))
    runner.do(
        runner.engine.forks.create(
            TEMPLATE, ForkSpec(names=["source"], mounts=[MountSpec(n, f"/{n}") for n in MOUNTED_VOLUME_NAMES])
        )
    )
    for name in MOUNTED_VOLUME_NAMES:
        runner.shell("source", f"echo {name} >/{name}/kept && sync")
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["one"]))
    prepare_unused_volume(runner)
    runner.do(runner.engine.volumes.create_snapshot("spare", "before"))


MOUNTED_VOLUME_NAMES = ("one", "two")


def prepare_unused_volume(runner: EngineRunner) -> None:
    """Ensure that the unused volume contains "after" and has a snapshot that contains "before"."""
    runner.do(runner.engine.attachments.attach("source", MountSpec("idle", "/idle")))
    if not runner.engine.volumes.list_snapshots("idle"):
        runner.shell("source", "echo before >/idle/kept && sync")
        runner.do(runner.engine.volumes.create_snapshot("idle", "before"))
    runner.shell("source", "echo after >/idle/kept && sync")
    runner.do(runner.engine.attachments.detach("source", "idle"))


@pytest.mark.parametrize("operation", VOLUME_OPERATIONS)
def test_a_killed_volume_operation_leaves_no_partial_object(
    operation: str, volume_scenario: Scenario, tmp_path: Path
) -> None:
    kill_at_each_step(operation, volume_scenario, tmp_path / "output", check_volumes, restore_volumes)


def check_volumes(runner: EngineRunner, world: World, moment: str) -> None:
    """Check that the mounts match the records, and that each volume and snapshot is complete or does not exist."""
    engine = runner.engine
    volumes = {each.name: each for each in engine.volumes.list()}
    volumes_by_id = {each.id: each for each in volumes.values()}
    assert {*MOUNTED_VOLUME_NAMES, "idle"} <= volumes.keys(), moment
    assert runner.get_sandbox("source").state is SandboxState.RUNNING, moment
    mount_paths = {volumes_by_id[mount.volume].name: mount.path for mount in runner.get_sandbox("source").mounts}
    assert mount_paths.get("one") == "/one" and mount_paths.keys() <= {"one", "two", "idle"}, moment
    expected_contents = {name: {"idle": ("before", "after")}.get(name, (name,)) for name in mount_paths}
    names = ("one", "two", "idle")
    command = f"for name in {' '.join(names)}; do echo $name:$(cat /$name/kept 2>/dev/null); done"

    def has_expected_contents() -> bool:
        contents = dict(line.split(":") for line in runner.shell("source", command).split())
        return all(contents[name] in expected_contents.get(name, ("",)) for name in names)

    wait_until(has_expected_contents)
    write_command = " && ".join(f"echo here >/{name}/written" for name in mount_paths)
    capacity_mb = int(
        runner.shell("source", f"{write_command} && sync && df --output=size -BM /one | tail -n 1 | tr -d M")
    )
    assert 0.75 < capacity_mb / volumes["one"].size_mb <= 1, (moment, capacity_mb)
    if "new" in volumes and volumes["new"].from_snapshot:
        assert read_contents(runner, "new") == "before", moment
    assert read_contents(runner, "idle") in ("before", "after"), moment
    assert [each.name for each in engine.volumes.list_snapshots("idle")] == ["before"], moment
    if "spare" in volumes:
        assert [each.name for each in engine.volumes.list_snapshots("spare")] == ["before"], moment
    for each in engine.volumes.list_snapshots("one"):
        if each.name == "new":
            probe_volume = runner.do(engine.volumes.create("probe", from_snapshot=each.id))
            assert read_contents(runner, probe_volume.name) == "one", moment
            runner.do(engine.volumes.delete("probe"))
    snapshots = {each.id: each for each in engine.snapshots.list()}
    captured_ids = {
        each.id
        for name in MOUNTED_VOLUME_NAMES
        for each in engine.volumes.list_snapshots(name)
        if each.sandbox_snapshot
    }
    assert captured_ids == {capture.snapshot for each in snapshots.values() for capture in each.volumes}, moment
    assert all(len(each.volumes) == (1 if each.names == ["mark"] else 2) for each in snapshots.values()), moment
    owner_ids = {each.owner for each in volumes.values() if each.owner}
    forks = {each.id: each for each in engine.sandboxes.list() if each.name.startswith("fork")}
    assert owner_ids == forks.keys(), moment
    for fork in forks.values():
        assert read_kept_file(runner, fork.id, "/one") == "one", moment
    runner.wait_for(world.check_no_strays, engine, runner.config, moment)


def read_kept_file(runner: EngineRunner, ref: str, path: str) -> str:
    return runner.shell(ref, f"cat {path}/kept 2>/dev/null || true").strip()


def read_contents(runner: EngineRunner, name: str) -> str:
    """Return the contents of a volume, read in a sandbox that mounts it or from a temporary mount."""
    volume = runner.engine.volumes.get(name)
    for sandbox, mount in runner.engine.volumes.list_mounts(volume):
        return read_kept_file(runner, sandbox.id, mount.path)
    runner.do(runner.engine.attachments.attach("source", MountSpec(name, "/probe", read_only=True)))
    contents = read_kept_file(runner, "source", "/probe")
    runner.do(runner.engine.attachments.detach("source", name))
    return contents


def restore_volumes(runner: EngineRunner) -> None:
    """Restore the state that existed before the operation."""
    engine = runner.engine
    for sandbox in engine.sandboxes.list():
        if sandbox.name.startswith("fork"):
            runner.do(engine.sandboxes.delete(sandbox.id))
    for snapshot in engine.snapshots.list():
        if "new-mark" in snapshot.names:
            runner.do(engine.snapshots.delete(snapshot.id))
    for each in engine.volumes.list_snapshots("one"):
        if each.name == "new":
            runner.do(engine.volumes.delete_snapshot("one", each.id))
    existing_names = {each.name for each in engine.volumes.list()}
    if "new" in existing_names:
        runner.do(engine.volumes.delete("new"))
    if "spare" not in existing_names:
        runner.do(engine.volumes.create("spare", 64))
        runner.do(engine.volumes.create_snapshot("spare", "before"))
    mounted_names = {engine.volumes.get(mount.volume).name for mount in runner.get_sandbox("source").mounts}
    if "idle" in mounted_names:
        runner.do(engine.attachments.detach("source", "idle"))
    if "two" not in mounted_names:
        runner.do(engine.attachments.attach("source", MountSpec("two", "/two")))
    prepare_unused_volume(runner)
