"""A template being built: its log as it grows, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sandbox_gateway.records import new_id, now

_MOST_LINES = 20_000
_LONGEST_LINE = 2000


@dataclass
class Build:
    """``status`` is "building", "ready" or "error"; ``reason`` says why it failed."""

    template_id: str
    name: str
    digest: str
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe in canonical form."""
    build_id: str = field(default_factory=new_id)
    status: str = "building"
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    started_at: datetime = field(default_factory=now)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def log(self, line: str) -> None:
        if len(self.lines) < _MOST_LINES:
            self.lines.append(line.rstrip()[:_LONGEST_LINE])
            self._wake()

    def end(self, status: str, reason: str = "") -> None:
        self.status, self.reason = status, reason
        self._wake()

    async def follow(self, start: int = 0) -> AsyncIterator[str]:
        """Lines from ``start`` on, until the build has ended."""
        position = start
        while True:
            changed = self._changed
            for line in self.lines[position:]:
                yield line
                position += 1
            if self.status != "building":
                return
            if position == len(self.lines):
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
