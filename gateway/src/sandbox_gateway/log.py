"""Write structured logs. `log.info("forked", sandbox=…, ms=…)` writes one JSON object or one line of text."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

_ROOT_LOGGER_NAME = "sandbox_gateway"
_MAX_FILE_BYTES = 16 << 20
_ROTATED_FILE_COUNT = 3


class Logger:
    """A named logger whose methods take an event and its fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT_LOGGER_NAME}.{name}")

    def debug(self, event: str, **fields: Any) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: Any) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: Any) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, *, exc_info: bool = False, **fields: Any) -> None:
        self._logger.error(event, extra={"fields": fields}, exc_info=exc_info)


def setup(level: str, style: str, file: Path | None = None) -> None:
    """Log events of at least ``level`` to ``file``, or to standard error if it is None.

    ``style``: "json" or "text". Raises OSError if the file cannot be opened.
    """
    handler = _LogFile(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root_logger = logging.getLogger()
    root_logger.handlers[:] = [handler]
    root_logger.setLevel(logging.WARNING)
    logging.getLogger(_ROOT_LOGGER_NAME).setLevel(level.upper())


class _LogFile(RotatingFileHandler):
    """A log file that is rotated, because anyone who sends requests can make it grow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_MAX_FILE_BYTES, backupCount=_ROTATED_FILE_COUNT, encoding="utf-8")

    def _open(self) -> io.TextIOWrapper:
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "from": record.name.removeprefix(f"{_ROOT_LOGGER_NAME}."),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        formatted_fields = " ".join(
            f"{key}={_format_value(value)}" for key, value in getattr(record, "fields", {}).items()
        )
        time_of_day = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{time_of_day} {record.levelname.lower():7} {record.getMessage()} {formatted_fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _format_value(value: object) -> str:
    """Format a value on one line. The value may come from an untrusted caller."""
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]
