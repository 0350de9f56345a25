"""Keyed locks are exclusive, time out, and are deleted when they are unused."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_gateway.engine.keyed_locks import KeyedLocks
from sandbox_gateway.errors import Busy


async def test_a_lock_is_exclusive_and_other_keys_are_independent() -> None:
    locks, events = KeyedLocks(5), []

    async def work(key: str, name: str) -> None:
        async with locks.held(key, key):
            events.append(f"{name} in")
            await asyncio.sleep(0.01)
            events.append(f"{name} out")

    await asyncio.gather(work("a", "1"), work("a", "2"), work("b", "3"))
    assert not locks._locks
    assert events.index("1 out") < events.index("2 in")
    assert events.index("3 in") < events.index("1 out")


async def test_waiting_for_a_held_lock_times_out() -> None:
    locks = KeyedLocks(0.02)
    async with locks.held("a", "sandbox a"):
        with pytest.raises(Busy, match="another request keeps sandbox a locked"):
            async with locks.held("a", "sandbox a"):
                pass
    async with locks.held("a", "sandbox a"):
        pass
    assert not locks._locks


async def test_a_cancelled_waiter_leaves_nothing() -> None:
    locks = KeyedLocks(5)
    async with locks.held("a", "a"):
        waiting_task = asyncio.create_task(locks.held("a", "a").__aenter__())
        await asyncio.sleep(0.01)
        waiting_task.cancel()
        await asyncio.gather(waiting_task, return_exceptions=True)
    assert not locks._locks


@pytest.mark.parametrize("turn_count", range(5))
async def test_a_cancellation_that_arrives_with_the_lock_takes_effect(turn_count: int) -> None:
    locks = KeyedLocks(5)

    async def wait_and_hold() -> None:
        async with locks.held("a", "sandbox a"):
            await asyncio.Event().wait()

    async with locks.held("a", "sandbox a"):
        task = asyncio.create_task(wait_and_hold())
        await asyncio.sleep(0.01)
    for _ in range(turn_count):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled() and not locks._locks
