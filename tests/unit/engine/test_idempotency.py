"""Requests that are repeated with the same idempotency key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import Sandbox
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import MemoryHost


async def _run_operation(engine: Engine, verb: str) -> list[Sandbox | GatewayError]:
    if verb == "create":
        return [await engine.forks.create("t", ForkSpec(idempotency_key="k"))]
    if verb == "fork":
        return await engine.forks.fork("t", ForkSpec(names=["b", "c"], idempotency_key="k"))
    return await engine.forks.clone("a", ForkSpec(names=["b", "c"], idempotency_key="k"))


@pytest.mark.parametrize("verb", ["create", "fork", "clone"])
async def test_the_same_key_returns_the_same_sandboxes(tmp_path: Path, verb: str) -> None:
    host = MemoryHost()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        host.fork_seconds = 0.05
        results = await asyncio.gather(*(_run_operation(engine, verb) for _ in range(3)))
        results.append(await _run_operation(engine, verb))
        names = [[each.name for each in result if isinstance(each, Sandbox)] for result in results]
        assert names == [names[0]] * 4 and len(engine.sandboxes.list()) == 1 + len(names[0])
        if verb != "create":
            assert names[0] == ["b", "c"]
            await engine.sandboxes.delete("c")
            assert await _run_operation(engine, verb) == [engine.sandboxes.get("b")]
