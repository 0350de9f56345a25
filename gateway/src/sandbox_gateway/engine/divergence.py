"""Determine whether a sandbox's file system has changed since its head, in a time that its guest cannot extend."""

from __future__ import annotations

import asyncio

from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import Timeout
from sandbox_gateway.records import Sandbox, SandboxState

_SYNC_SECONDS = 2
"""Maximum time for the agent to make the guest write its cached data to its disk."""
_SECONDS = 4
"""Maximum time for the whole lookup."""


class Divergence:
    def __init__(self, context: Context, agents: Agents) -> None:
        self._host = context.host
        self._index = context.index
        self._agents = agents

    async def has_diverged(self, sandbox: Sandbox) -> bool:
        """Raises GatewayError if this cannot be determined, or Timeout if it takes longer than four seconds."""
        head = self._index.snapshots.get(sandbox.head)
        if head is None:
            return True
        if sandbox.state is SandboxState.PAUSED:
            return not sandbox.pause_snapshot or sandbox.pause_snapshot != sandbox.head
        try:
            async with asyncio.timeout(_SECONDS):
                await self._agents.create_client(sandbox).sync(seconds=_SYNC_SECONDS)
                return await self._host.has_diverged(sandbox, head)
        except TimeoutError:
            raise Timeout(
                f"sandbox {sandbox.name} could not be compared with its head within {_SECONDS} s: try again later"
            ) from None
