"""The build of a template, with a log that clients can follow."""

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
    """A build of a template. ``status`` is "building", "ready" or "error"; ``reason`` says why it failed."""

    template_id: str
    name: str
    digest: str
    source_digest: str = ""
    """The digest of the files at the recipe's path."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe in canonical form."""
    prewarm: int = 0
    """The number of forks to keep ready once the template is built."""
    build_id: str = field(default_factory=new_id)
    status: str = "building"
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    started_at: datetime = field(default_factory=now)
    _size: int = 0
    _omitted_count: int = 0
    _last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    _update: asyncio.Event = field(default_factory=asyncio.Event)

    def log(self, line: str) -> None:
        """Append a line. The log keeps the first ``_MAX_BYTES`` and the last ``_LAST_LINES`` lines."""
        line = remove_control_characters(line[:MAX_LINE_LENGTH]).rstrip()
        self._size += sys.getsizeof(line)
        if self._size <= _MAX_BYTES:
            self.lines.append(line)
            self._wake()
        else:
            self._omitted_count += 1
            self._last_lines.append(line)

    def end(self, status: str, reason: str = "") -> None:
        if self._omitted_count > len(self._last_lines):
            self.lines.append(f"({self._omitted_count - len(self._last_lines)} lines omitted)")
        self.lines += self._last_lines
        self._last_lines.clear()
        self.status, self.reason = status, reason
        self._wake()

    async def follow(self, start: int = 0) -> AsyncIterator[str]:
        """Yield the lines from number ``start`` on, until the build has ended."""
        position = start
        while True:
            update = self._update
            for line in self.lines[position:]:
                yield line
                position += 1
            if self.status != "building":
                return
            if position == len(self.lines):
                await update.wait()

    def _wake(self) -> None:
        update, self._update = self._update, asyncio.Event()
        update.set()


class LogLines:
    """Splits a command's output into lines for the log. Lines are cut at ``MAX_LINE_LENGTH`` characters."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._partial_line = ""

    def feed(self, data: bytes) -> None:
        *lines, partial_line = data.decode(errors="replace").split("\n")
        for line in lines:
            self._build.log(self._partial_line + line)
            self._partial_line = ""
        self._partial_line = (self._partial_line + partial_line)[:MAX_LINE_LENGTH]

    def flush(self) -> None:
        if self._partial_line:
            self._build.log(self._partial_line)
