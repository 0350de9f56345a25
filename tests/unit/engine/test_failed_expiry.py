"""A failed expiry leaves nothing behind, and is retried with increasing delays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.errors import InUse, NoSpace
from sandbox_gateway.records import OnTimeout, Sandbox, SandboxState, Snapshot
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


@pytest.fixture(autouse=True)
def long_first_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the second attempt, so that on a slow machine it does not start before the test expects it."""
    monkeypatch.setattr("sandbox_gateway.engine.backoff._FIRST_DELAY_SECONDS", 2.0)


class _Host(MemoryHost):
    is_full = False
    refuses_removal = False
    removal_error: Exception = InUse("it is locked")
    attempt_count = 0
    save_count = 0

    async def save(self, sandbox: Sandbox) -> None:
        self.save_count += 1
        if self.is_full:
            self.attempt_count += 1
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self.save_count += 1

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if self.refuses_removal and "locked" in snapshot.names:
            self.attempt_count += 1
            raise self.removal_error
        await super().remove_snapshot(snapshot)


async def test_a_failed_pause_leaves_no_snapshot(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        ids_before = set(engine.index.snapshots)
        host.is_full = True
        with pytest.raises(NoSpace):
            await engine.sandboxes.pause("a")
        # The disks belong to the template and the sandbox.
        assert set(engine.index.snapshots) == ids_before and len(host.disks) == 2
        host.is_full = False
        await engine.sandboxes.pause("a")
        await engine.sandboxes.resume("a")


async def test_a_pause_leaves_no_snapshot_if_the_machine_stops(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "a")
        ids_before = set(engine.index.snapshots)
        original_capture = host.capture

        async def capture_and_stop(*args: object, **options: object) -> Snapshot:
            snapshot = await original_capture(*args, **options)  # type: ignore[arg-type]
            await host.stop(sandbox)
            return snapshot

        host.capture = capture_and_stop  # type: ignore[method-assign]
        with pytest.raises(Exception, match="source sandbox stopped"):
            await engine.sandboxes.pause("a")
        assert set(engine.index.snapshots) == ids_before


async def test_a_failed_sandbox_expiry_is_retried_after_a_delay(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a", timeout=0, on_timeout=OnTimeout.PAUSE)
        ids_before = set(engine.index.snapshots)
        host.is_full = True
        await wait_until(lambda: host.attempt_count)
        await asyncio.sleep(0.7)
        assert host.attempt_count == 1 and set(engine.index.snapshots) == ids_before
        host.is_full = False
        await wait_until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)


@pytest.mark.parametrize("error", [InUse("it is locked"), RuntimeError("a bug")])
async def test_a_failed_snapshot_expiry_is_retried_after_a_delay(tmp_path: Path, error: Exception) -> None:
    host = _Host()
    host.removal_error = error
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        host.refuses_removal = True
        await engine.snapshots.create("a", name="locked", expires_in=0)
        await wait_until(lambda: host.attempt_count)
        await create(engine, "b")
        await engine.sandboxes.delete("b")  # This also runs the collector.
        await asyncio.sleep(0.7)
        assert host.attempt_count == 1
        host.refuses_removal = False
        await wait_until(lambda: not engine.snapshots.list())


async def test_a_failed_removal_of_a_hidden_snapshot_is_retried_after_a_delay(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="locked")
        await engine.snapshots.create("a", name="child")
        await create(engine, "b", "locked")
        await engine.snapshots.delete("locked", when_unused=True)
        host.refuses_removal = True
        await engine.sandboxes.delete("b")
        await wait_until(lambda: host.attempt_count)
        expected_save_count = host.save_count
        for _ in range(2):  # Each deletion runs the collector.
            await create(engine, "c")
            expected_save_count += 1
            await engine.sandboxes.delete("c")
        assert host.attempt_count == 1 and host.save_count == expected_save_count, "the lineage was written again"
        host.refuses_removal = False
        await wait_until(lambda: len(engine.index.snapshots) == 2)
        await wait_until(lambda: engine.sandboxes._collector._backoff.list_due_ids() == [])


def test_each_failure_doubles_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    current_time = 0.0
    monkeypatch.setattr("sandbox_gateway.engine.backoff._FIRST_DELAY_SECONDS", 1.0)
    monkeypatch.setattr("time.monotonic", lambda: current_time)
    backoff = Backoff()
    delays = []
    for _ in range(9):
        backoff.delay("a")
        start_time = current_time
        while not backoff.is_due("a"):
            current_time += 0.5
        delays.append(current_time - start_time)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.delay("a")
    assert backoff.is_due("b") and not backoff.is_due("a")
    backoff.retain_only({"a"})
    assert not backoff.is_due("a")
    backoff.retain_only({"b"})
    assert backoff.is_due("a")
