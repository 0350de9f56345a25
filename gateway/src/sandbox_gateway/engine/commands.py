"""Run commands and code in running sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sandbox_gateway.engine.agent_client import EvalResult, ExecResult
from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.errors import BackendFailed, Busy, Conflict, GatewayError, Gone, NotFound, Timeout
from sandbox_gateway.records import Sandbox, SandboxState

_CHECK_INTERVAL_SECONDS = 0.25
_PING_TIMEOUT_SECONDS = 10
_Result = TypeVar("_Result")


class Commands:
    def __init__(self, context: Context, locking: Locking, agents: Agents) -> None:
        self._context = context
        self._locking = locking
        self._agents = agents

    @measured("sandbox.exec")
    async def exec(
        self,
        ref: str,
        args: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float = 60,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run a program and wait until it exits, for at most ``timeout`` seconds."""
        sandbox = self._context.require_running(ref)
        execution = self._agents.create_client(sandbox).exec(
            args, env=env, cwd=cwd, user=user, timeout=timeout, stdin=stdin
        )
        return await self._run_in_sandbox(sandbox, execution)

    @measured("sandbox.eval")
    async def eval(self, ref: str, code: str, *, timeout: float = 60) -> EvalResult:
        """Evaluate Python code in the sandbox's interpreter, whose state is part of the sandbox's memory."""
        sandbox = self._context.require_running(ref)
        return await self._run_in_sandbox(sandbox, self._agents.create_client(sandbox).eval(code, timeout=timeout))

    @measured("sandbox.ping")
    async def ping(self, ref: str) -> None:
        """Check that the sandbox's agent responds. Raises BackendFailed or Timeout."""
        sandbox = self._context.require_running(ref)
        await self._run_in_sandbox(sandbox, self._agents.create_client(sandbox).ping(seconds=_PING_TIMEOUT_SECONDS))

    async def _run_in_sandbox(self, sandbox: Sandbox, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await ``work`` while the machine runs. Raises Conflict or Gone if another request stops the machine."""
        try:
            return await self._run_until_end(sandbox, work)
        except (BackendFailed, Timeout) as error:
            raise await self._explain_failure(sandbox, error) from None

    async def _run_until_end(self, sandbox: Sandbox, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await ``work``. Raises BackendFailed if the machine stops: a dead guest does not close its connections."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_CHECK_INTERVAL_SECONDS)
                if not task.done() and (reason := self._context.host.find_end_reason(sandbox)):
                    raise BackendFailed(
                        f"the sandbox stopped during the command: {reason}. Resume it, and run the command again"
                    )
            return task.result()
        finally:
            task.cancel()

    async def _explain_failure(self, original_sandbox: Sandbox, error: GatewayError) -> GatewayError:
        """Return the error to raise for a failed request.

        Returns Gone or Conflict if another request stopped or replaced the machine of ``original_sandbox``, or else
        ``error``.
        """
        current_sandbox = self._context.index.sandboxes.get(original_sandbox.id)
        is_unchanged = current_sandbox is not None and (current_sandbox.instance, current_sandbox.state) == (
            original_sandbox.instance,
            original_sandbox.state,
        )
        if is_unchanged and not self._context.host.find_end_reason(original_sandbox):
            return error
        try:
            # Wait for the lock. When it is released, the record shows what happened to the machine.
            async with self._locking.sandbox_locked(original_sandbox.id) as sandbox:
                pass
        except NotFound:
            return Gone(f"sandbox {original_sandbox.id} was deleted during the request")
        except Busy:
            return error
        if sandbox.instance != original_sandbox.instance:
            return Conflict(
                f"sandbox {original_sandbox.id} was rolled back, or paused and resumed, during the request: send the "
                "request again"
            )
        if sandbox.state is SandboxState.PAUSED and not sandbox.state_reason:
            return Conflict(
                f"sandbox {original_sandbox.id} was paused during the request: resume it, and send the request again"
            )
        return error
