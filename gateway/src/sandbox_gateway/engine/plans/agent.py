"""The agent of a sandbox in a plan session. There is no machine, so it accepts every request and does nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from sandbox_gateway.engine.agent_client import AgentClient, ExecResult, Identity
from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.hosts.base import Endpoint
from sandbox_gateway.records import Sandbox


class PlannedAgent(AgentClient):
    async def identify(self, identity: Identity, *, seconds: float, find_end_reason: Callable[[], str]) -> None:
        pass

    async def call(self, path: str, body: dict[str, Any] | None, **limits: Any) -> dict[str, Any]:
        return {"frozen": True} if path == "/freeze" else {}

    async def exec(self, args: list[str], **options: Any) -> ExecResult:
        """Report success. Only template builds call this: a plan session refuses commands from clients."""
        return ExecResult(exit_code=0, stdout=b"", stderr=b"", timed_out=False)

    async def run_shell(self, command: str, output: Callable[[bytes], None], *, seconds: float) -> int:
        return 0

    async def upload(self, path: str, size: int, pieces: AsyncIterator[bytes], *, seconds: float) -> None:
        pass

    async def start_background_command(self, command: str) -> None:
        pass


class PlannedAgents(Agents):
    """The agents of all sandboxes, including those that really run. A plan session does not contact any of them."""

    def create_client(self, sandbox: Sandbox) -> AgentClient:
        return PlannedAgent(Endpoint(""), self.derive_access_token(sandbox))
