"""Test, on an in-memory host, that the index changes only after a commit and that lineage survives deletions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed, InUse
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import NetworkPolicy, Sandbox, SandboxState, Snapshot
from tests.support.live import EngineRunner
from tests.support.memory_engine import Gate, wait_until
from tests.support.memory_host import MemoryHost


class FaultyHost(MemoryHost):
    """A host that fails to save records while ``is_broken`` is true, and to remove snapshots in ``unremovable_ids``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = self.rejects_snapshots = False
        self.unremovable_ids: set[str] = set()
        self.log: list[tuple[str, str]] = []
        """The saves and removals, as ``(method, id)``."""

    async def save(self, sandbox: Sandbox) -> None:
        self._require_working()
        self.log.append(("save", sandbox.id))
        await super().save(sandbox)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self._require_working(self.rejects_snapshots)
        self.log.append(("save_snapshot", snapshot.id))
        await super().save_snapshot(snapshot)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.id in self.unremovable_ids:
            raise BackendFailed("forced")
        self.log.append(("remove_snapshot", snapshot.id))
        await super().remove_snapshot(snapshot)

    def _require_working(self, should_fail: bool = False) -> None:
        if self.is_broken or should_fail:
            raise BackendFailed("forced")


@pytest.fixture
def host() -> FaultyHost:
    return FaultyHost()


@pytest.fixture
def runner(host: FaultyHost, tmp_path: Path) -> Iterator[EngineRunner]:
    runner = EngineRunner(host, Config.model_validate({"host": {"state_root": str(tmp_path)}}))
    try:
        build = runner.do(runner.engine.templates.build("base", Recipe()))
        _wait_until(lambda: build.status == "ready")
        runner.do(runner.engine.forks.create("base", ForkSpec(names=["box"])))
        yield runner
    finally:
        host.is_broken = False
        runner.close()


def _wait_until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _read_records(engine: Engine) -> dict[str, dict[str, Any]]:
    return {id: each.model_dump() for id, each in (engine.index.sandboxes | engine.index.snapshots).items()}


async def _do_nothing(engine: Engine) -> None:
    pass


async def _pause_without_memory(engine: Engine) -> None:
    await engine.sandboxes.pause("box", memory=False)


async def _create_snapshot_in_use(engine: Engine) -> None:
    await engine.snapshots.create("box", name="mark")
    await engine.forks.create("mark", ForkSpec(names=["user"]))


async def _name_snapshot_twice(engine: Engine) -> None:
    await engine.snapshots.create("box", name="mark")
    await engine.snapshots.add_name("mark", "flat")


async def _mount_volume(engine: Engine) -> None:
    await engine.volumes.create("data", 64)
    await engine.volumes.create("more", 64)
    await engine.attachments.attach("box", MountSpec("data", "/data"))


Operation = Callable[[Engine], Awaitable[Any]]
OPERATIONS: dict[str, tuple[Operation, Operation]] = {
    "set_timeout": (_do_nothing, lambda engine: engine.sandboxes.set_timeout("box", 60)),
    "set_network": (
        _do_nothing,
        lambda engine: engine.sandboxes.set_network("box", NetworkPolicy(allow_internet=False)),
    ),
    "update": (_do_nothing, lambda engine: engine.sandboxes.update("box", metadata={"a": "b"}, name="other")),
    "branch": (_do_nothing, lambda engine: engine.snapshots.branch("box")),
    "capture": (_do_nothing, lambda engine: engine.snapshots.create("box", name="mark")),
    "clone": (_do_nothing, lambda engine: engine.forks.clone("box", ForkSpec())),
    "pause": (_do_nothing, lambda engine: engine.sandboxes.pause("box")),
    "pause_without_memory": (_do_nothing, lambda engine: engine.sandboxes.pause("box", memory=False)),
    "resume_from_disk": (_pause_without_memory, lambda engine: engine.sandboxes.resume("box", timeout=60)),
    "resume": (lambda engine: engine.sandboxes.pause("box"), lambda engine: engine.sandboxes.resume("box")),
    "rollback": (_create_snapshot_in_use, lambda engine: engine.sandboxes.rollback("box", "mark")),
    "hide_snapshot": (_create_snapshot_in_use, lambda engine: engine.snapshots.delete("mark", when_unused=True)),
    "add_name": (_create_snapshot_in_use, lambda engine: engine.snapshots.add_name("mark", "flat")),
    "remove_name": (_name_snapshot_twice, lambda engine: engine.snapshots.remove_name("flat")),
    "add_names": (_do_nothing, lambda engine: engine.templates.add_names("base", ["alias"])),
    "attach": (_mount_volume, lambda engine: engine.attachments.attach("box", MountSpec("more", "/more"))),
    "detach": (_mount_volume, lambda engine: engine.attachments.detach("box", "data")),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failed_save_leaves_the_record_unchanged(runner: EngineRunner, host: FaultyHost, operation: str) -> None:
    prepare, act = OPERATIONS[operation]
    runner.do(_run_operation(prepare, runner.engine))
    records_before = _read_records(runner.engine)
    host.is_broken = True
    with pytest.raises(BackendFailed, match="forced"):
        runner.do(_run_operation(act, runner.engine))
    records_after = _read_records(runner.engine)
    assert {id: records_after.get(id) for id in records_before} == records_before
    host.is_broken = False
    if not operation.startswith("resume") and operation != "pause":
        assert runner.engine.sandboxes.get("box").name == "box"


def test_a_stopped_machine_is_recorded_even_if_the_save_fails(runner: EngineRunner, host: FaultyHost) -> None:
    host.is_broken = True
    runner.call(host._exit, runner.get_sandbox("box").instance)
    _wait_until(lambda: runner.get_sandbox("box").state is SandboxState.PAUSED)
    host.is_broken = False
    runner.do(runner.engine.sandboxes.update("box", metadata={"a": "b"}))
    record = host.saved_sandboxes[runner.get_sandbox("box").id]
    assert record.state is SandboxState.PAUSED and record.state_reason, "the next save does not include the stop"


def test_a_failed_save_of_a_clones_snapshot_keeps_its_volumes(runner: EngineRunner, host: FaultyHost) -> None:
    """The record lists the volumes until the collector has removed their snapshots and can save the new record."""
    runner.do(_mount_volume(runner.engine))
    spec = ForkSpec(names=["fork"], mounts=[MountSpec("data", "/data", clone=True)])
    host.rejects_snapshots = True
    runner.do(runner.engine.forks.clone("box", spec))
    (snapshot,) = (each for each in runner.engine.index.snapshots.values() if each.kind == "transient")
    assert [each.volume for each in snapshot.volumes] == [runner.engine.volumes.get("data").id]


async def _run_operation(operation: Operation, engine: Engine) -> None:
    await operation(engine)


# -- lineage -----------------------------------------------------------------------------------------------------------


def _create_chain(runner: EngineRunner, *names: str) -> None:
    for name in names:
        runner.do(runner.engine.snapshots.create("box", name=name))


def _simplify_tree(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return {node["names"][0]: _simplify_tree(node["children"]) for node in nodes}


def test_children_of_a_deleted_snapshot_move_to_its_parent(runner: EngineRunner) -> None:
    _create_chain(runner, "one", "two", "three")
    runner.do(runner.engine.sandboxes.delete("box"))
    assert _simplify_tree(runner.engine.snapshots.build_lineage()) == {"base": {"one": {"two": {"three": {}}}}}
    runner.do(runner.engine.snapshots.delete("two"))
    assert _simplify_tree(runner.engine.snapshots.build_lineage()) == {"base": {"one": {"three": {}}}}
    runner.do(runner.engine.snapshots.delete("one"))
    assert _simplify_tree(runner.engine.snapshots.build_lineage()) == {"base": {"three": {}}}


def test_a_capture_after_the_heads_deletion_belongs_to_the_heads_parent(runner: EngineRunner) -> None:
    _create_chain(runner, "one", "two")
    runner.do(runner.engine.snapshots.delete("two"))
    assert runner.engine.sandboxes.get("box").head == runner.engine.snapshots.get("one").id
    _create_chain(runner, "three")
    runner.do(runner.engine.sandboxes.delete("box"))
    assert _simplify_tree(runner.engine.snapshots.build_lineage()) == {"base": {"one": {"three": {}}}}


def test_children_of_a_hidden_snapshot_are_listed_in_its_place(runner: EngineRunner) -> None:
    _create_chain(runner, "one", "two")
    runner.do(runner.engine.forks.create("two", ForkSpec(names=["fork"])))
    runner.do(runner.engine.sandboxes.rollback("box", "one"))
    runner.do(runner.engine.snapshots.create("fork", name="three"))
    assert not runner.do(runner.engine.snapshots.delete("two", when_unused=True))
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.do(runner.engine.sandboxes.delete("box"))
    assert _simplify_tree(runner.engine.snapshots.build_lineage()) == {"base": {"one": {"three": {}}}}


def test_descendants_are_saved_before_the_snapshot_is_removed(runner: EngineRunner, host: FaultyHost) -> None:
    """Because of this order, a crash between the two steps leaves a complete tree."""
    _create_chain(runner, "one", "two", "three")
    removed_id, child_id = runner.engine.snapshots.get("two").id, runner.engine.snapshots.get("three").id
    host.log.clear()
    runner.do(runner.engine.snapshots.delete("two"))
    assert host.log == [("save_snapshot", child_id), ("remove_snapshot", removed_id)]


def test_a_failed_deletion_leaves_the_tree_unchanged(runner: EngineRunner, host: FaultyHost) -> None:
    _create_chain(runner, "one", "two", "three")
    runner.do(runner.engine.forks.create("two", ForkSpec(names=["fork"])))
    records_before = _read_records(runner.engine)
    with pytest.raises(InUse, match=r"^snapshot 'two' is in use by 1 sandbox \(fork\)\. Delete them first, or pass "):
        runner.do(runner.engine.snapshots.delete("two"))
    assert _read_records(runner.engine) == records_before
    runner.do(runner.engine.sandboxes.delete("fork"))
    records_before = _read_records(runner.engine)
    host.unremovable_ids = {runner.engine.snapshots.get(name).id for name in ("two", "three")}
    for name in ("two", "three"):
        with pytest.raises(BackendFailed):
            runner.do(runner.engine.snapshots.delete(name))
        assert _read_records(runner.engine) == records_before


def test_a_full_disk_does_not_prevent_a_deletion(runner: EngineRunner, host: FaultyHost) -> None:
    """A full disk prevents writing records, but a deletion frees space."""
    _create_chain(runner, "one", "two", "three")
    one_id, two_id = (runner.engine.snapshots.get(name).id for name in ("one", "two"))
    host.is_broken = True
    assert runner.do(runner.engine.snapshots.delete("one"))
    assert one_id not in runner.engine.index.snapshots
    assert runner.engine.snapshots.get("two").parent == one_id
    (root,) = runner.engine.snapshots.build_lineage()
    assert two_id in str(root), "it is not shown below the template"


def test_adjacent_snapshots_removed_together_leave_no_dangling_parent(runner: EngineRunner) -> None:
    _create_chain(runner, "one", "two", "three", "four")
    snapshot_ids = {name: runner.engine.snapshots.get(name).id for name in ("one", "four")}

    async def delete_both() -> None:
        await asyncio.gather(*(runner.engine.snapshots.delete(name) for name in ("two", "three")))

    runner.do(delete_both())
    assert runner.engine.snapshots.get("four").parent == snapshot_ids["one"]


def test_adjacent_snapshots_collected_together_leave_no_dangling_parent(runner: EngineRunner) -> None:
    _create_chain(runner, "one", "two", "three", "four")
    one_id = runner.engine.snapshots.get("one").id
    for name in ("two", "three"):
        snapshot = runner.engine.snapshots.get(name)
        runner.engine.index.put(snapshot.model_copy(update={"doomed": True}))
    runner.collect()
    assert runner.engine.snapshots.get("four").parent == one_id


def test_an_extension_in_progress_prevents_an_expiry(runner: EngineRunner, host: FaultyHost) -> None:
    """The expiry waits for the sandbox's lock, and then reads the new timeout. Other sandboxes still expire."""
    runner.do(runner.engine.forks.create("base", ForkSpec(names=["other"])))
    sandboxes = runner.engine.sandboxes
    other_id = sandboxes.get("other").id
    gate = Gate()
    original_save = host.save

    async def save_slowly(sandbox: Sandbox) -> None:
        if sandbox.id == other_id:
            await gate()
        await original_save(sandbox)

    async def extend_during_expiry() -> None:
        await sandboxes.set_timeout("other", 0)
        host.save = save_slowly  # type: ignore[method-assign]
        extension_task = asyncio.create_task(sandboxes.set_timeout("other", 600))
        await gate.reached.wait()
        await sandboxes.set_timeout("box", 0)
        await wait_until(lambda: not any(each.name == "box" for each in sandboxes.list()))
        await wait_until(lambda: other_id in runner.engine._expiry._expiring_ids)
        gate.opened.set()
        await extension_task
        await wait_until(lambda: other_id not in runner.engine._expiry._expiring_ids)

    runner.do(extend_during_expiry())
    assert [each.name for each in sandboxes.list()] == ["other"]
