"""Compute when sandboxes expire."""

from __future__ import annotations

from datetime import datetime, timedelta

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import Unset
from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import Sandbox, SandboxState, now

_MAX_TIMEOUT_SECONDS = 100 * 366 * 86400


def compute_end_time(timeout: float | Unset | None, config: Config) -> datetime | None:
    """Return the time at which a timeout of ``timeout`` seconds ends, or None if it never ends.

    ``timeout``: UNSET means the host's default (in the configuration, 0 means no limit), None means no timeout, and 0
    means now. Raises Invalid if it is out of range.
    """
    if isinstance(timeout, Unset):
        timeout = config.limits.timeout_seconds or None
    if timeout is not None and not 0 <= timeout <= _MAX_TIMEOUT_SECONDS:
        raise Invalid(f"a timeout of {timeout:g} s is out of range: use a timeout from 0 to {_MAX_TIMEOUT_SECONDS} s")
    return None if timeout is None else now() + timedelta(seconds=timeout)


def has_expired(sandbox: Sandbox, current_time: datetime) -> bool:
    """Return whether a sandbox is still running after the end of its timeout."""
    return sandbox.state is SandboxState.RUNNING and sandbox.end_at is not None and sandbox.end_at <= current_time
