"""Forks on several hosts: a gateway asks the others whether their shares run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from sandbox_gateway.errors import NotFound
from sandbox_gateway.fleet import holds as holds_module
from sandbox_gateway.fleet.holds import Holds
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.store import Store


@pytest.fixture
def holds() -> Holds:
    return Holds(cast(Store, None), Keys("/fleet/"))


async def _wait_for_gate(gate: Callable[[], Awaitable[None]]) -> None:
    await gate()


async def _fail(gate: Callable[[], Awaitable[None]]) -> None:
    raise RuntimeError("no machine")


async def test_a_question_that_arrives_before_its_share_waits_for_it(holds: Holds) -> None:
    question = asyncio.create_task(holds.wait_until_ready("1"))
    await asyncio.sleep(0.05)
    assert not question.done()
    share = asyncio.create_task(holds.run("1", _wait_for_gate))
    await asyncio.wait_for(question, 20)
    assert not share.done()
    holds.release("1")
    await asyncio.wait_for(share, 20)


async def test_a_question_about_a_share_that_fails_is_answered(holds: Holds) -> None:
    question = asyncio.create_task(holds.wait_until_ready("1"))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="no machine"):
        await holds.run("1", _fail)
    with pytest.raises(NotFound):
        await asyncio.wait_for(question, 20)


async def test_nothing_is_left_of_a_question_about_a_share_that_never_arrives(
    holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = asyncio.create_task(holds.wait_until_ready("1"))
    await asyncio.sleep(0)
    with pytest.raises(NotFound):
        holds.release("1")
    cancelled.cancel()
    await asyncio.wait({cancelled})
    monkeypatch.setattr(holds_module, "_ARRIVAL_SECONDS", 0.01)
    with pytest.raises(NotFound):
        await holds.wait_until_ready("2")
    assert not holds._holds
