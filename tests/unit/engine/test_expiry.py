"""Snapshots and sandboxes expire in the background. Retention rules are applied before a request ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.records import Retention, Snapshot, now
from tests.support.memory_engine import create, opened_engine, wait_until

pytestmark = pytest.mark.anyio


def list_sandbox_names(engine: Engine) -> list[str]:
    return [each.name for each in engine.sandboxes.list()]


async def test_a_busy_sandbox_does_not_delay_the_expiry_of_other_sandboxes(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        for name in ("busy", "idle"):
            await create(engine, name)
        async with engine._expiry._sandboxes._locking.sandbox_locked("busy"):
            for name in ("busy", "idle"):
                expire_timeout(engine, name)
            await wait_until(lambda: list_sandbox_names(engine) == ["busy"])
        await wait_until(lambda: list_sandbox_names(engine) == [])


def expire_timeout(engine: Engine, name: str) -> None:
    """Make a sandbox's timeout expire now. ``set_timeout`` cannot do this while the sandbox is busy."""
    sandbox = engine.sandboxes.get(name)
    engine.index.put(sandbox.model_copy(update={"end_at": now()}))


async def test_checks_continue_after_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "expiring")

        original_retry = engine.sandboxes._collector.retry
        failure_event = asyncio.Event()

        async def fail_once() -> None:
            monkeypatch.setattr(engine.sandboxes._collector, "retry", original_retry)
            failure_event.set()
            raise RuntimeError("unexpected")

        monkeypatch.setattr(engine.sandboxes._collector, "retry", fail_once)
        await asyncio.wait_for(failure_event.wait(), 10)
        await engine.sandboxes.set_timeout("expiring", 0.01)
        await wait_until(lambda: list_sandbox_names(engine) == [])


async def test_a_snapshot_is_removed_when_it_reaches_its_maximum_age(tmp_path: Path) -> None:
    """Nothing else changes at that time, so the passage of time alone must cause the rules to be applied again."""
    async with opened_engine(tmp_path) as engine:
        await create(engine, "one")
        rule = Retention(max_age=0.8)
        older_snapshot = await engine.snapshots.create("one", retention=rule)
        newest_snapshot = await engine.snapshots.create("one", retention=rule)
        await asyncio.sleep(0.3)
        assert [each.id for each in engine.snapshots.list()] == [older_snapshot.id, newest_snapshot.id]
        await wait_until(lambda: [each.id for each in engine.snapshots.list()] == [newest_snapshot.id])


async def test_a_snapshot_that_was_in_use_is_removed_after_its_last_user(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "one")
        rule = Retention(keep_last=1)
        older_snapshot = await engine.snapshots.create("one", retention=rule)
        await create(engine, "user", older_snapshot.id)
        newest_snapshot = await engine.snapshots.create("one", retention=rule)
        assert [each.id for each in engine.snapshots.list()] == [older_snapshot.id, newest_snapshot.id]
        await engine.sandboxes.delete("user")
        assert [each.id for each in engine.snapshots.list()] == [newest_snapshot.id]


async def test_a_rule_is_applied_before_its_snapshot_is_reported(tmp_path: Path) -> None:
    """Otherwise, the next request would depend on when the background task runs."""
    async with opened_engine(tmp_path) as engine:
        await create(engine, "one")
        types: list[str] = []
        publish = engine.events.publish
        engine.events.publish = lambda type, **data: (types.append(type), publish(type, **data))  # type: ignore
        for name in ("first", "second", "third"):
            await engine.snapshots.create("one", name=name, retention=Retention(keep_last=2))
        assert [each.names for each in engine.snapshots.list()] == [["second"], ["third"]]
        assert types[-3:] == ["snapshot.created", "snapshot.deleted", "snapshot.pruned"]


async def test_the_rule_of_the_newest_snapshot_ends_with_it(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "one")
        for name, count in (("first", 1), ("second", 1), ("third", 2)):
            await engine.snapshots.create("one", name=name, retention=Retention(keep_last=count))
            if name == "first":
                await create(engine, "user", name)
        assert [each.names for each in engine.snapshots.list()] == [["first"], ["second"], ["third"]]
        await engine.snapshots.delete("third")
        await engine.sandboxes.delete("user")
        assert [each.names for each in engine.snapshots.list()] == [["second"]]


async def test_a_snapshot_that_cannot_be_pruned_does_not_fail_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_engine(tmp_path) as engine:
        await create(engine, "one")
        await engine.snapshots.create("one", name="first", retention=Retention(keep_last=1))

        async def fail(snapshot: Snapshot) -> None:
            raise BackendFailed("the host is busy")

        monkeypatch.setattr(engine.host, "remove_snapshot", fail)
        await engine.snapshots.create("one", name="second", retention=Retention(keep_last=1))
        assert [each.names for each in engine.snapshots.list()] == [["first"], ["second"]]
        monkeypatch.undo()
        await wait_until(lambda: [each.names for each in engine.snapshots.list()] == [["second"]])
