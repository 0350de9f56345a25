"""The build of a template: its log, which clients can follow, and its outcome."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.records import new_id, now

_MAX_BYTES = 1 << 20
_LAST_LINES = 40
MAX_LINE_LENGTH = 2000


@dataclass
class Build:
    """A build. ``status`` is "building", "ready" or "error"; ``reason`` says why it failed."""

    template_id: str
    name: str
    digest: str
    source_digest: str = ""
    """The digest of the files at the recipe's path."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe in canonical form."""
    build_id: str = field(default_factory=new_id)
    status: str = "building"
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    started_at: datetime = field(default_factory=now)
    _bytes: int = 0
    _left_out: int = 0
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def log(self, line: str) -> None:
        """Append a line. The log keeps the first ``_MAX_BYTES`` and the last lines."""
        line = remove_control_characters(line[:MAX_LINE_LENGTH]).rstrip()
        self._bytes += sys.getsizeof(line)
        if self._bytes <= _MAX_BYTES:
            self.lines.append(line)
            self._wake()
        else:
            self._left_out += 1
            self._last.append(line)

    def end(self, status: str, reason: str = "") -> None:
        if self._left_out > len(self._last):
            self.lines.append(f"({self._left_out - len(self._last)} lines are left out here)")
        self.lines += self._last
        self._last.clear()
        self.status, self.reason = status, reason
        self._wake()

    async def follow(self, start: int = 0) -> AsyncIterator[str]:
        """Yield the lines from ``start``, until the build has ended."""
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


class LogLines:
    """Splits a command's output into lines for the log; keeps only the first bytes of an endless line."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._rest = ""

    def take(self, data: bytes) -> None:
        *lines, rest = data.decode(errors="replace").split("\n")
        for line in lines:
            self._build.log(self._rest + line)
            self._rest = ""
        self._rest = (self._rest + rest)[:MAX_LINE_LENGTH]

    def flush(self) -> None:
        if self._rest:
            self._build.log(self._rest)
