"""Locks by name: exclusive, with timeouts, without leftovers."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_gateway.engine.keyed_locks import KeyedLocks
from sandbox_gateway.errors import Busy


def test_a_lock_is_exclusive_and_other_names_are_independent() -> None:
    async def scene() -> list[str]:
        locks, told = KeyedLocks(5), []

        async def work(key: str, name: str) -> None:
            async with locks.hold(key, key):
                told.append(f"{name} in")
                await asyncio.sleep(0.01)
                told.append(f"{name} out")

        await asyncio.gather(work("a", "1"), work("a", "2"), work("b", "3"))
        assert not locks._locks
        return told

    told = asyncio.run(scene())
    assert told.index("1 out") < told.index("2 in")
    assert told.index("3 in") < told.index("1 out")


async def test_a_wait_times_out_with_a_message() -> None:
    locks = KeyedLocks(0.02)
    async with locks.hold("a", "sandbox a"):
        with pytest.raises(Busy, match="sandbox a is busy"):
            async with locks.hold("a", "sandbox a"):
                pass
    async with locks.hold("a", "sandbox a"):
        pass
    assert not locks._locks


async def test_a_cancelled_waiter_leaves_nothing() -> None:
    locks = KeyedLocks(5)
    async with locks.hold("a", "a"):
        waiter = asyncio.create_task(locks.hold("a", "a").__aenter__())
        await asyncio.sleep(0.01)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    assert not locks._locks
