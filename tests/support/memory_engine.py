"""An engine with an in-memory host, for tests of operations that overlap, fail or are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Sandbox
from tests.support.memory_host import MemoryHost

_TIMEOUT_SECONDS = 10


@contextlib.asynccontextmanager
async def opened_engine(
    root: Path, host: MemoryHost | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Engine]:
    """Open an engine that has the template ``t``."""
    engine = Engine(host or MemoryHost(), Config.model_validate({"host": {"state_root": str(root)}, **sections}))
    await engine.open()
    try:
        await build(engine, "t")
        yield engine
    finally:
        await engine.close()


async def build(engine: Engine, name: str, *packages: str) -> None:
    template_build = await engine.templates.build(name, Recipe(packages=list(packages)))
    await wait_until(lambda: template_build.status != "building")
    assert template_build.status == "ready", template_build.reason


async def create(engine: Engine, name: str, ref: str = "t", **spec: Any) -> Sandbox:
    return await engine.forks.create(ref, ForkSpec(names=[name], **spec))


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true. Raises TimeoutError after ten seconds."""
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Gate:
    """A gate that blocks its callers until ``opened`` is set. ``reached`` is set when the first call arrives."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()
