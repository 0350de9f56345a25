"""Hold back the commit of new sandboxes until somebody else has decided."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

commit_gate: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("commit_gate", default=None)
"""Awaited by the current request when its sandboxes run, before they are committed. An exception undoes them."""
