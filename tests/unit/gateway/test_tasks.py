"""Tests for background tasks, and for work that cancellation must not interrupt."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation, wait_for_all


async def test_the_first_error_is_raised_after_all_tasks_have_finished() -> None:
    finished_names: list[str] = []

    async def work(name: str, seconds: float, error: Exception | None = None) -> str:
        await asyncio.sleep(seconds)
        finished_names.append(name)
        if error:
            raise error
        return name

    assert await finish_despite_cancellation(wait_for_all(work("a", 0.02), work("b", 0.01))) == ["a", "b"]
    with pytest.raises(BackendFailed, match="one"):
        await finish_despite_cancellation(wait_for_all(work("c", 0.01, BackendFailed("one")), work("d", 0.05)))
    assert finished_names[-2:] == ["c", "d"]
    task = asyncio.create_task(finish_despite_cancellation(wait_for_all(work("e", 0.05))))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished_names[-1] == "e"


async def test_background_tasks_are_awaited_cancelled_and_their_failures_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    finished_names: list[str] = []

    async def work(name: str, seconds: float) -> str:
        await asyncio.sleep(seconds)
        finished_names.append(name)
        return name

    async def fail() -> None:
        raise BackendFailed("one")

    with caplog.at_level(logging.ERROR, "sandbox_gateway"):
        tasks = BackgroundTasks(Logger("test"), failure_event="it failed")
        tasks.start(fail())
        assert await tasks.start(work("a", 0.01)) == "a"
        tasks.start(work("b", 0.01))
        tasks.start(work("c", 60))
        await tasks.wait(0.05)
        await tasks.cancel()
        await tasks.wait()
        assert finished_names == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == ["it failed"]


async def test_work_finishes_even_if_its_caller_is_cancelled_repeatedly() -> None:
    finished_names: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        finished_names.append("work")

    task = asyncio.create_task(finish_despite_cancellation(work()))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished_names == ["work"]
