"""Test that a plan session changes nothing on a real host."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.events import Events
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import id_source
from tests.support.live import Live
from tests.support.worlds import TEMPLATE, World


def read_files(directory: Path) -> dict[str, tuple[str, int]]:
    """Return the digest and the time of the last change of each file below a directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def read_mounts(config: Config) -> list[str]:
    """Return the mounts of a gateway, without those of other tests."""
    roots = (str(config.host.state_root), config.jail_zfs.dataset)
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(line for line in lines if any(root in line for root in roots))


async def change_everything(sessions: PlanSessions) -> Engine:
    """Carry out every kind of change in a new plan session, and return the engine of the session."""
    session = sessions.open("key", "a run that changes everything")
    id_source.set(session.new_id)
    engine = session.engine
    await engine.volumes.create("new", 64, from_snapshot="data@monday")
    await engine.volumes.create_snapshot("data", "tuesday")
    await engine.volumes.grow("data", 128)
    await engine.volumes.rollback("data", "monday", force=True)
    await engine.sandboxes.resume("box")
    await engine.sandboxes.update("box", name="renamed", metadata={"a": "b"})
    await engine.sandboxes.set_timeout("renamed", 3600)
    await engine.snapshots.create("renamed", name="mark-2")
    await engine.forks.fork("mark-2", ForkSpec(names=["fork-1", "fork-2"]))
    await engine.forks.clone("renamed", ForkSpec(names=["clone"]))
    await engine.sandboxes.rollback("renamed", "mark")
    await engine.sandboxes.pause("fork-1")
    for name in ("fork-1", "fork-2", "clone", "renamed", "other"):
        await engine.sandboxes.delete(name)
    await engine.snapshots.delete("mark-2")
    await engine.snapshots.delete("mark")
    return engine


def test_a_session_changes_nothing_on_the_host(make_live: Any, world: World) -> None:
    live: Live = make_live()
    engine = live.engine
    live.do(engine.volumes.create("data", 64))
    live.do(engine.volumes.create_snapshot("data", "monday"))
    live.do(engine.forks.create(TEMPLATE, ForkSpec(names=["box", "other"])))
    live.do(engine.snapshots.create("box", name="mark"))
    for name in ("box", "other"):  # A running guest writes to its files.
        live.do(engine.sandboxes.pause(name))
    live.collect()

    def read_host() -> list[Any]:
        return [read_files(live.config.host.state_root), world.traces(live.config), read_mounts(live.config)]

    published: list[str] = []
    original_publish = Events.publish

    def publish(events: Events, type: str, **data: Any) -> None:
        if events is engine.events:
            published.append(type)
        original_publish(events, type, **data)

    before, records_before = read_host(), engine.index.copy()
    Events.publish = publish  # type: ignore[method-assign]
    try:
        planned = live.do(change_everything(live.call(PlanSessions, engine)))
    finally:
        Events.publish = original_publish  # type: ignore[method-assign]
    assert [volume.size_mb for volume in planned.volumes.list()] == [128, 64]
    assert not planned.sandboxes.list() and not planned.snapshots.list()
    assert read_host() == before
    assert published == []
    for kind in ("sandboxes", "snapshots", "volumes", "volume_snapshots"):
        assert getattr(engine.index, kind) == getattr(records_before, kind)
