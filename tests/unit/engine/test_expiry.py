"""Other objects still expire if one object is busy or a check fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.records import Retention, now
from tests.support.memory_engine import create, open_engine, wait_until

pytestmark = pytest.mark.anyio


def list_sandbox_names(engine: Engine) -> list[str]:
    return [each.name for each in engine.sandboxes.list()]


async def test_a_busy_sandbox_does_not_delay_the_expiry_of_others(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        for name in ("busy", "idle"):
            await create(engine, name)
        async with engine._expiry._sandboxes._locking.sandbox("busy"):
            for name in ("busy", "idle"):
                expire_timeout(engine, name)
            await wait_until(lambda: list_sandbox_names(engine) == ["busy"])
        await wait_until(lambda: list_sandbox_names(engine) == [])


def expire_timeout(engine: Engine, name: str) -> None:
    """Let a sandbox's timeout expire now. ``set_timeout`` cannot do this while the sandbox is busy."""
    sandbox = engine.sandboxes.get(name)
    engine.index.put(sandbox.model_copy(update={"end_at": now()}))


async def test_checks_continue_after_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(tmp_path) as engine:
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
    async with open_engine(tmp_path) as engine:
        await create(engine, "one")
        rule = Retention(max_age=0.8)
        older_snapshot = await engine.snapshots.create("one", retention=rule)
        newest_snapshot = await engine.snapshots.create("one", retention=rule)
        await asyncio.sleep(0.3)
        assert [each.id for each in engine.snapshots.list()] == [older_snapshot.id, newest_snapshot.id]
        await wait_until(lambda: [each.id for each in engine.snapshots.list()] == [newest_snapshot.id])


async def test_a_snapshot_that_was_in_use_is_removed_after_its_last_user(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await create(engine, "one")
        rule = Retention(keep_last=1)
        older_snapshot = await engine.snapshots.create("one", retention=rule)
        await create(engine, "user", older_snapshot.id)
        newest_snapshot = await engine.snapshots.create("one", retention=rule)
        await asyncio.sleep(0.6)
        assert [each.id for each in engine.snapshots.list()] == [older_snapshot.id, newest_snapshot.id]
        await engine.sandboxes.delete("user")
        await wait_until(lambda: [each.id for each in engine.snapshots.list()] == [newest_snapshot.id])
