"""The build of a template, with a log that clients can follow."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine.names import create_build_id
from sandbox_gateway.records import now

_MAX_BYTES = 1 << 20
_MAX_TAIL_LINES = 40
MAX_LINE_LENGTH = 2000


class LogLine(NamedTuple):
    """A line of a build's log."""

    text: str
    time: datetime

    @property
    def milliseconds(self) -> int:
        """The time since 1970 (UTC)."""
        return int(self.time.timestamp() * 1000)


@dataclass
class Build:
    """A build of a template. ``status`` is "waiting", "building", "ready" or "error".

    ``reason`` says why the build failed.
    """

    template_id: str
    names: list[str]
    """The names that the template gets, with or without a tag."""
    digest: str
    source_digest: str = ""
    """The digest of the recipe's directory, tarball or image."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe in canonical form."""
    description: str = ""
    prewarm: int = 0
    """The number of forks to keep ready once the template is built."""
    status: str = "building"
    reason: str = ""
    log_lines: list[LogLine] = field(default_factory=list)
    started_at: datetime = field(default_factory=now)
    _size: int = 0
    _omitted_count: int = 0
    _last_lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_MAX_TAIL_LINES))
    _update_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def build_id(self) -> str:
        return create_build_id(self.template_id)

    def copy_initial_state(self) -> Build:
        """Return a copy of the build as it was at its start, for another engine to carry out."""
        return Build(
            template_id=self.template_id,
            names=self.names,
            digest=self.digest,
            source_digest=self.source_digest,
            recipe=self.recipe,
            description=self.description,
            prewarm=self.prewarm,
            started_at=self.started_at,
        )

    def log(self, line: str) -> None:
        """Append a line. The log keeps its first ``_MAX_BYTES`` bytes and its last ``_MAX_TAIL_LINES`` lines."""
        log_line = LogLine(remove_control_characters(line[:MAX_LINE_LENGTH]).rstrip(), now())
        self._size += sum(map(sys.getsizeof, (log_line, *log_line)))
        if self._size <= _MAX_BYTES:
            self.log_lines.append(log_line)
            self._wake_followers()
        else:
            self._omitted_count += 1
            self._last_lines.append(log_line)

    def log_all(self, lines: Sequence[str]) -> None:
        """Append lines. Of the lines that the log omits, process only the last ones: a guest can send millions."""
        for number, line in enumerate(lines):
            if self._size > _MAX_BYTES:
                skipped_count = max(0, len(lines) - number - _MAX_TAIL_LINES)
                self._omitted_count += skipped_count
                for last_line in lines[number + skipped_count :]:
                    self.log(last_line)
                return
            self.log(line)

    def end(self, status: str, reason: str = "") -> None:
        if self._omitted_count > len(self._last_lines):
            text = f"({self._omitted_count - len(self._last_lines)} lines omitted)"
            self.log_lines.append(LogLine(text, self._last_lines[0].time))
        self.log_lines += self._last_lines
        self._last_lines.clear()
        self.status, self.reason = status, reason
        self._wake_followers()

    @property
    def lines(self) -> list[str]:
        """The text of each line of the log."""
        return [line.text for line in self.log_lines]

    async def follow(self, start: int = 0) -> AsyncIterator[str]:
        """Yield the lines of the log from index ``start`` on, until the build finishes."""
        position = start
        while True:
            update_event = self._update_event
            for line in self.log_lines[position:]:
                yield line.text
                position += 1
            if self.status != "building":
                return
            if position == len(self.log_lines):
                await update_event.wait()

    def _wake_followers(self) -> None:
        update_event, self._update_event = self._update_event, asyncio.Event()
        update_event.set()


class LogWriter:
    """A writer that splits a command's output into log lines, each truncated to ``MAX_LINE_LENGTH`` characters."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._partial_line = ""

    def feed(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data.decode(errors="replace")).split("\n")
        self._partial_line = self._partial_line[:MAX_LINE_LENGTH]
        self._build.log_all(lines)

    def flush(self) -> None:
        if self._partial_line:
            self._build.log(self._partial_line)
