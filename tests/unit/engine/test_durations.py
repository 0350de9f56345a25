"""A histogram records each operation of the engine, labelled with its memory mode and outcome."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from sandbox_gateway.api.access.auth import Keys
from sandbox_gateway.api.app import create_app
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import GatewayError, NoSpace, NotFound
from sandbox_gateway.hosts.base import Room
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Arrival, NetworkPolicy, Resources, Snapshot
from tests.support.memory_engine import build, create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost

pytestmark = pytest.mark.anyio

_PAGE_PATH = Path(__file__).parents[3] / "docs" / "operations.md"

_NON_OPERATIONS = {
    # Queries.
    "Artifacts.inspect",
    "Sandboxes.has_diverged",
    "Sandboxes.get_usage",
    "Templates.compute_guest_digest",
    "Transfers.check_export",
    "Volumes.get_state",
    "RoomMonitor.report",
    # Their duration depends on the client.
    "BuildFiles.store",
    "Transfers.export",
    "Transfers.export_hidden",
    "Transfers.export_volume",
    "Moves.export",
    # Calls a measured operation.
    "Templates.rebuild",
    # Start a measured operation, or cancel it: see tests/api/test_artifacts.py.
    "Artifacts.cancel",
    "Artifacts.pull",
    "Artifacts.push",
    # Steps of operations.
    "Agents.identify",
    "Agents.mount_volumes",
    "Attachments.complete_mounts",
    "MachineLifecycle.boot",
    "MachineLifecycle.fork",
    "MachineLifecycle.mark_stopped",
    "MachineLifecycle.stop_paused_machine",
    "RoomMonitor.require_room_for_capture",
    "RoomMonitor.require_room_for_machines",
    "Templates.remove",
    "Transfers.commit_import",
    "Sandboxes.pause_locked",
    "Sandboxes.resume_locked",
    "Sandboxes.remove_locked",
    "Moves.check_arrival",
    "Moves.receive",
    "Moves.take_back",
    "Moves.complete_departure",
    "Moves.discard_arrival",
    # Background work.
    "Artifacts.watch",
    "BuildFiles.watch",
    "Loads.get_history",
    "Loads.watch",
    "PrewarmPool.discard_all",
    "PrewarmPool.keep_forks_ready",
    "RoomMonitor.watch",
    # Parts of requests, such as a template build with prewarm.
    "PrewarmPool.require_room",
    "PrewarmPool.save_target",
}

_REGISTRY_OPERATIONS = {"snapshot.push", "snapshot.pull"}
"""Operations that need a registry: tests/api/test_artifacts.py checks that they are counted."""

_Call = Callable[[Engine], Awaitable[Any]]


async def import_copy(engine: Engine) -> None:
    export = await engine.transfers.export("s")
    try:
        await engine.transfers.import_(export.read_pieces(), name="imported")
    finally:
        await export.close()


async def import_volume_copy(engine: Engine) -> None:
    export = await engine.transfers.export_volume("v", "vs")
    try:
        await engine.transfers.import_volume(export.read_pieces(), name="imported-volume")
    finally:
        await export.close()


async def leave_and_arrive(engine: Engine) -> None:
    """Move a sandbox away, and then to this host again."""
    sandbox = await engine.moves.depart("a", "move", "h2")
    export = await engine.moves.export(sandbox.id, "move", memory=True, after_first_pass=False)
    pieces = [piece async for piece in export.read_pieces()]
    await export.close()
    data = engine.moves.describe_for_target(sandbox)
    await engine.moves.complete_departure(sandbox.id, "move")

    async def read_pieces() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    arrival = Arrival(move="move", source="h2", resumes=True)
    await engine.moves.receive(await engine.moves.check_arrival(data, resumes=True), arrival, read_pieces())
    await engine.moves.adopt(sandbox.id, "move", must_start=True)


# In the order of execution. Each entry names the method, and the operation and memory mode under which it is counted.
_CALLS: list[tuple[str, str, str, _Call]] = [
    ("Forks.create", "sandbox.create", "incremental", lambda e: create(e, "a")),
    ("Sandboxes.update", "sandbox.update", "", lambda e: e.sandboxes.update("a", metadata={"k": "v"})),
    ("Sandboxes.set_timeout", "sandbox.set_timeout", "", lambda e: e.sandboxes.set_timeout("a", 600)),
    ("Sandboxes.set_network", "sandbox.set_network", "", lambda e: e.sandboxes.set_network("a", NetworkPolicy())),
    ("Commands.exec", "sandbox.exec", "", lambda e: e.commands.exec("a", ["env"])),
    ("Commands.eval", "sandbox.eval", "", lambda e: e.commands.eval("a", "1")),
    ("Commands.ping", "sandbox.ping", "", lambda e: e.commands.ping("a")),
    ("Snapshots.create", "snapshot.create", "incremental", lambda e: e.snapshots.create("a", name="s")),
    ("Snapshots.create", "snapshot.create", "none", lambda e: e.snapshots.create("a", name="d", memory="none")),
    ("Transfers.import_", "snapshot.import", "full", import_copy),
    ("Snapshots.branch", "snapshot.branch", "incremental", lambda e: e.snapshots.branch("a")),
    ("Forks.fork", "sandbox.fork", "incremental", lambda e: e.forks.fork("s", ForkSpec(names=["b", "c"]))),
    ("Forks.fork", "sandbox.fork", "none", lambda e: e.forks.fork("d", ForkSpec(names=["cold"]))),
    ("Forks.clone", "sandbox.clone", "incremental", lambda e: e.forks.clone("a", ForkSpec(names=["e"]))),
    ("Sandboxes.rollback", "sandbox.rollback", "incremental", lambda e: e.sandboxes.rollback("a", "s")),
    ("Sandboxes.rollback", "sandbox.rollback", "none", lambda e: e.sandboxes.rollback("a", "s", cold_start=True)),
    ("Sandboxes.promote", "sandbox.promote", "incremental", lambda e: e.sandboxes.promote("b", "a")),
    ("Sandboxes.pause", "sandbox.pause", "incremental", lambda e: e.sandboxes.pause("a")),
    ("Sandboxes.resume", "sandbox.resume", "incremental", lambda e: e.sandboxes.resume("a")),
    ("Sandboxes.pause", "sandbox.pause", "none", lambda e: e.sandboxes.pause("c", memory=False)),
    ("Sandboxes.resume", "sandbox.resume", "none", lambda e: e.sandboxes.resume("c")),
    ("Sandboxes.expire", "sandbox.expire", "", lambda e: e.sandboxes.expire("c")),
    ("Sandboxes.delete", "sandbox.delete", "", lambda e: e.sandboxes.delete("c")),
    ("Snapshots.add_name", "snapshot.name", "", lambda e: e.snapshots.add_name("d", "d2")),
    ("Snapshots.remove_name", "snapshot.name", "", lambda e: e.snapshots.remove_name("d2")),
    ("Snapshots.delete", "snapshot.delete", "", lambda e: e.snapshots.delete("d", when_unused=True)),
    ("Volumes.create", "volume.create", "", lambda e: e.volumes.create("v")),
    ("Volumes.grow", "volume.grow", "", lambda e: e.volumes.grow("v", 2048)),
    ("Volumes.create_snapshot", "volume.snapshot", "", lambda e: e.volumes.create_snapshot("v", "vs")),
    ("Transfers.import_volume", "volume.import", "", import_volume_copy),
    ("Volumes.rollback", "volume.rollback", "", lambda e: e.volumes.rollback("v", "vs")),
    ("Volumes.delete_snapshot", "volume.delete_snapshot", "", lambda e: e.volumes.delete_snapshot("v", "vs")),
    ("Attachments.attach", "volume.attach", "", lambda e: e.attachments.attach("a", MountSpec("v", "/v"))),
    ("Attachments.detach", "volume.detach", "", lambda e: e.attachments.detach("a", "v")),
    ("Volumes.delete", "volume.delete", "", lambda e: e.volumes.delete("v")),
    ("Moves.depart", "sandbox.depart", "incremental", leave_and_arrive),
    ("Moves.adopt", "sandbox.arrive", "full", leave_and_arrive),
    ("Templates.build", "template.request", "", lambda e: e.templates.build("t", Recipe())),
    ("", "template.build", "incremental", lambda e: build(e, "w", "jq")),
    ("Templates.add_names", "template.alias", "", lambda e: e.templates.add_names("t", ["alias"])),
    ("Templates.assign_tags", "template.alias", "", lambda e: e.templates.assign_tags("t", ["v1"])),
    ("Templates.remove_tags", "template.alias", "", lambda e: e.templates.remove_tags("t", ["v1"])),
    ("PrewarmPool.set_target", "prewarm.set", "", lambda e: e.prewarm.set_target("s", 1)),
    ("", "prewarm.start", "incremental", lambda e: wait_until(lambda: e.prewarm.get_level(e.snapshots.get("s")).ready)),
    ("", "prewarm.claim", "incremental", lambda e: create(e, "f", "s")),
    ("Templates.start", "template.request", "", lambda e: start_announced_build(e, "u")),
]


def list_methods(engine: Engine) -> set[str]:
    """Return the coroutine methods of the engine's groups, as ``Group.method``."""
    groups = [each for name, each in vars(engine).items() if not name.startswith("_")]
    return {
        f"{type(group).__name__}.{name}"
        for group in groups
        if type(group).__module__.startswith("sandbox_gateway.engine.")
        for name, method in inspect.getmembers(type(group), inspect.iscoroutinefunction)
        if not name.startswith("_")
    }


def count_observations(app: FastAPI, operation: str, memory: str, outcome: str) -> float:
    """Return the number of observations in the histogram of an operation."""
    labels = f'host="memory",memory="{memory}",operation="{operation}",outcome="{outcome}"'
    text = app.state.metrics.render().decode()
    sample = re.search(rf"^sandbox_gateway_operation_seconds_count{{{re.escape(labels)}}} (\S+)$", text, re.MULTILINE)
    return float(sample[1]) if sample else 0.0


async def start_announced_build(engine: Engine, name: str) -> None:
    announced_build = engine.templates.announce([name], {})
    build = await engine.templates.start(
        name, announced_build.build_id, lambda sizes: Recipe(resources=Resources(**sizes))
    )
    assert build is announced_build
    with pytest.raises(NotFound):
        await engine.templates.start(name, announced_build.build_id, lambda sizes: Recipe())
    assert engine.templates.get_build(announced_build.template_id, announced_build.build_id) is announced_build


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with opened_engine(tmp_path, MemoryHost()) as engine:
        yield engine


@pytest.fixture
def app(engine: Engine) -> FastAPI:
    return create_app(engine, engine.config, Keys())


async def test_every_operation_has_a_histogram(engine: Engine, app: FastAPI) -> None:
    assert {method for method, *_ in _CALLS if method} == list_methods(engine) - _NON_OPERATIONS
    assert list_methods(engine) >= _NON_OPERATIONS
    for _, operation, memory, call in _CALLS:
        before = count_observations(app, operation, memory, "ok")
        await call(engine)
        assert count_observations(app, operation, memory, "ok") == before + 1, (operation, memory)


async def test_captures_that_do_not_use_the_best_memory_mode_are_counted(engine: Engine, app: FastAPI) -> None:
    host = engine.host
    assert isinstance(host, MemoryHost)
    original_capture = host.capture

    async def capture_degraded(*args: Any, **options: Any) -> Snapshot:
        snapshot = await original_capture(*args, **options)
        return snapshot.model_copy(update={"host": {**snapshot.host, "degraded": "no tracker"}})

    def count() -> float:
        sample = re.search(
            r'^sandbox_gateway_captures_degraded_total{memory="incremental"} (\S+)$',
            app.state.metrics.render().decode(),
            re.MULTILINE,
        )
        return float(sample[1]) if sample else 0.0

    await create(engine, "a")
    count_before = count()
    await engine.snapshots.create("a")
    assert count() == count_before
    host.capture = capture_degraded  # type: ignore[method-assign]
    await engine.snapshots.create("a")
    assert count() == count_before + 1


def test_the_documentation_lists_every_operation() -> None:
    section = _PAGE_PATH.read_text().partition("sandbox_gateway_operation_seconds")[2].partition("\n## ")[0]
    documented_operations = set(re.findall(r"`((?:sandbox|snapshot|template|volume|prewarm)\.[a-z_]+)`", section))
    assert documented_operations == {operation for _, operation, *_ in _CALLS} | _REGISTRY_OPERATIONS


async def test_the_outcome_label_shows_how_an_operation_ended(engine: Engine, app: FastAPI) -> None:
    host = engine.host
    assert isinstance(host, MemoryHost)
    with pytest.raises(GatewayError):
        await engine.sandboxes.rollback("nobody", "t")
    assert count_observations(app, "sandbox.rollback", "", "refused") == 1

    host.failing_names = {"x"}
    with pytest.raises(GatewayError):
        await create(engine, "x")
    assert count_observations(app, "sandbox.create", "incremental", "failed") == 1
    await engine.forks.fork("t", ForkSpec(names=["x", "y"], atomic=False))
    assert count_observations(app, "sandbox.fork", "incremental", "failed") == 1

    host.fork_seconds = 60
    task = asyncio.create_task(create(engine, "z"))
    await wait_until(lambda: host.fork_count == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert count_observations(app, "sandbox.create", "incremental", "cancelled") == 1

    host.available_room = Room(disk_free=0, disk_total=1, memory_free=1 << 40, memory_total=1 << 40)
    with pytest.raises(NoSpace):
        await create(engine, "full")
    assert count_observations(app, "sandbox.create", "", "refused") == 1


async def test_a_plan_is_not_counted(engine: Engine, app: FastAPI) -> None:
    session = PlanSessions(engine).open("key", "run")
    await create(session.engine, "planned")
    assert 'operation="sandbox.create"' not in app.state.metrics.render().decode()
