"""Failing expiry leaves nothing behind, and is retried later and later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.errors import InUse, NoSpace
from sandbox_gateway.records import OnTimeout, Sandbox, SandboxState, Snapshot
from tests.api.memory_host import MemoryHost
from tests.support.memory_engine import create, open_engine, until


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a slow machine from reaching the second attempt too early."""
    monkeypatch.setattr("sandbox_gateway.engine.backoff._FIRST_SECONDS", 2.0)


class _Host(MemoryHost):
    full = False
    held = False
    attempts = 0
    written = 0

    async def save(self, sandbox: Sandbox) -> None:
        self.written += 1
        if self.full:
            self.attempts += 1
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self.written += 1

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if self.held and "held" in snapshot.names:
            self.attempts += 1
            raise InUse("it is held")
        await super().remove_snapshot(snapshot)


def test_a_pause_that_fails_leaves_no_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a")
            before = set(engine.index.snapshots)
            host.full = True
            with pytest.raises(NoSpace):
                await engine.sandboxes.pause("a")
            assert set(engine.index.snapshots) == before and len(host.disks) == 2  # the template's, the sandbox's
            host.full = False
            await engine.sandboxes.pause("a")
            await engine.sandboxes.resume("a")

    asyncio.run(story())


def test_a_pause_whose_machine_died_leaves_no_snapshot(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            sandbox = await create(engine, "a")
            before = set(engine.index.snapshots)
            capture = host.capture

            async def die(*args: object, **options: object) -> Snapshot:
                taken = await capture(*args, **options)  # type: ignore[arg-type]
                await host.stop(sandbox)
                return taken

            host.capture = die  # type: ignore[method-assign]
            with pytest.raises(Exception, match="source sandbox stopped"):
                await engine.sandboxes.pause("a")
            assert set(engine.index.snapshots) == before

    asyncio.run(story())


def test_an_expiry_that_fails_is_repeated_after_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a", timeout=0, on_timeout=OnTimeout.PAUSE)
            before = set(engine.index.snapshots)
            host.full = True
            await until(lambda: host.attempts)
            await asyncio.sleep(0.7)
            assert host.attempts == 1 and set(engine.index.snapshots) == before
            host.full = False
            await until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)

    asyncio.run(story())


def test_a_snapshot_whose_expiry_fails_is_tried_again_after_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a")
            host.held = True
            await engine.snapshots.create("a", name="held", expires_in=0)
            await until(lambda: host.attempts)
            await asyncio.sleep(0.7)
            assert host.attempts == 1
            host.held = False
            await until(lambda: not engine.snapshots.list())

    asyncio.run(story())


def test_a_hidden_snapshot_that_cannot_be_removed_is_tried_again_after_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a")
            await engine.snapshots.create("a", name="held")
            await engine.snapshots.create("a", name="child")
            await create(engine, "b", "held")
            await engine.snapshots.delete("held", when_unused=True)
            host.held = True
            await engine.sandboxes.delete("b")
            await until(lambda: host.attempts)
            written = host.written
            for _ in range(2):  # each deletion collects
                await create(engine, "c")
                written += 1
                await engine.sandboxes.delete("c")
            assert host.attempts == 1 and host.written == written, "the lineage is not written again"
            host.held = False
            await until(lambda: len(engine.index.snapshots) == 2)
            await until(lambda: engine.collector._backoff.due() == [])

    asyncio.run(story())


def test_each_failure_doubles_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 0.0
    monkeypatch.setattr("sandbox_gateway.engine.backoff._FIRST_SECONDS", 1.0)
    monkeypatch.setattr("time.monotonic", lambda: at)
    backoff = Backoff()
    waits = []
    for _ in range(9):
        backoff.delay("a")
        start = at
        while not backoff.is_due("a"):
            at += 0.5
        waits.append(at - start)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.delay("a")
    assert backoff.is_due("b") and not backoff.is_due("a")
    backoff.keep({"a"})
    assert not backoff.is_due("a")
    backoff.keep({"b"})
    assert backoff.is_due("a")
