"""Compute when sandboxes expire."""

from __future__ import annotations

from datetime import datetime, timedelta

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import Unset
from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import Sandbox, SandboxState, now

_MAX_SECONDS = 100 * 366 * 86400


def end_time(timeout: float | Unset | None, config: Config) -> datetime | None:
    """Return the time ``timeout`` seconds from now. UNSET: use the host's default. None: never. Raises Invalid."""
    if isinstance(timeout, Unset):
        timeout = config.limits.timeout_seconds or None
    if timeout is not None and not 0 <= timeout <= _MAX_SECONDS:
        raise Invalid(f"a timeout of {timeout:g} s is not possible: use a timeout from 0 to {_MAX_SECONDS} s")
    return None if timeout is None else now() + timedelta(seconds=timeout)


def has_expired(sandbox: Sandbox, at: datetime) -> bool:
    """Return whether a sandbox is still running after the end of its timeout."""
    return sandbox.state is SandboxState.RUNNING and sandbox.end_at is not None and sandbox.end_at <= at
