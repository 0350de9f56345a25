"""Only a limited number of machines start at the same time, and clients and their requests take turns."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.start_slots import Requester, StartSlots, requester

pytestmark = pytest.mark.anyio


async def get_start_order(*requests: tuple[str, str]) -> list[str]:
    """Return the order in which machines start if all were requested while the only slot was taken."""
    slots, started_machines = StartSlots(1, 60), list[str]()

    async def start(client: str, request: str) -> None:
        requester.set(Requester(client, request))
        async with slots.held():
            started_machines.append(client + request)

    async with slots.held():
        tasks = [asyncio.create_task(start(client, request)) for client, request in requests]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return started_machines


async def test_one_machine_does_not_wait_for_all_machines_of_another_client() -> None:
    assert await get_start_order(*[("many", "")] * 100, ("one", "")) == ["many", "one", *["many"] * 99]


async def test_requests_of_one_client_take_turns() -> None:
    assert await get_start_order(*[("", "a")] * 4, *[("", "b")] * 2) == list("ababaa")


async def test_a_client_with_many_requests_does_not_get_more_turns() -> None:
    start_order = await get_start_order(*(("many", str(number)) for number in range(50)), ("one", ""))
    assert start_order[:3] == ["many0", "one", "many1"]


async def test_a_hung_start_loses_its_slot() -> None:
    slots = StartSlots(1, 0.01)
    async with slots.held():
        async with asyncio.timeout(5), slots.held():
            assert slots._free_count == 0
        assert slots._free_count == 1
    assert slots._free_count == 1


async def test_a_slot_granted_to_a_cancelled_task_is_passed_on() -> None:
    slots = StartSlots(1, 60)
    async with slots.held():
        waiting_task = asyncio.create_task(slots.held().__aenter__())
        await asyncio.sleep(0)
    waiting_task.cancel()
    await asyncio.gather(waiting_task, return_exceptions=True)
    assert waiting_task.cancelled()
    async with asyncio.timeout(5), slots.held():
        pass
    assert slots._free_count == 1


@given(
    count=st.integers(1, 3),
    starts=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.booleans()), max_size=30),
)
async def test_no_slot_is_lost_or_granted_twice(count: int, starts: list[tuple[str, str, bool]]) -> None:
    slots, running_count, peak_count = StartSlots(count, 60), 0, 0

    async def hold_slot(client: str, request: str) -> None:
        nonlocal running_count, peak_count
        requester.set(Requester(client, request))
        async with slots.held():
            running_count += 1
            peak_count = max(peak_count, running_count)
            try:
                await asyncio.sleep(0)
            finally:
                running_count -= 1

    tasks = [asyncio.create_task(hold_slot(client, request)) for client, request, _ in starts]
    await asyncio.sleep(0)
    for task, (_, _, is_cancelled) in zip(tasks, starts, strict=True):
        if is_cancelled:
            task.cancel()
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert peak_count <= count
    assert (slots._free_count, slots._waiting_tasks) == (count, {})
