"""Checks that a sandbox is running."""

from __future__ import annotations

from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import Conflict
from sandbox_gateway.records import Sandbox, SandboxState


def require_running(context: Context, ref: str) -> Sandbox:
    """Return the sandbox. Raises Conflict if it is paused or its machine has ended."""
    sandbox = context.index.sandbox(ref)
    if sandbox.state is SandboxState.PAUSED:
        raise Conflict(f"sandbox {sandbox.id} is paused: resume it first")
    if reason := context.host.ended(sandbox):
        raise Conflict(f"sandbox {sandbox.id} does not run ({reason}): resume it, or roll it back")
    return sandbox
