"""A plan session sends nothing to the agents of running sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.plans.sessions import PlanSessions
from tests.support.memory_engine import create, opened_engine

pytestmark = pytest.mark.anyio


async def test_divergence_is_measured_without_the_agent_of_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_engine(tmp_path) as engine:
        for name in ("clean", "changed"):
            await create(engine, name)
            await engine.snapshots.create(name)
        await engine.commands.exec("changed", ["write", "key", "value"])
        paths: list[str] = []
        original_call = AgentClient.call

        async def call(self: AgentClient, path: str, *args: Any, **options: Any) -> dict[str, Any]:
            paths.append(path)
            return await original_call(self, path, *args, **options)

        monkeypatch.setattr(AgentClient, "call", call)
        session = PlanSessions(engine).open("key", "a check-mode run of a test").engine
        assert not await session.sandboxes.has_diverged("clean")
        assert await session.sandboxes.has_diverged("changed")
        assert paths == []
        assert await engine.sandboxes.has_diverged("changed") and paths == ["/sync"]
