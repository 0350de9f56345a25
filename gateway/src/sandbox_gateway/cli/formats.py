"""Parse and format sizes, durations and pairs in human-readable notation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sandbox_gateway.cli.failure import ExitCode, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB_BY_UNIT = {"": 1, "m": 1, "g": 1024, "t": 1024 * 1024}
_SECONDS_BY_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_NEVER_YEAR = 9999


def parse_size(text: str) -> int:
    """Parse a size: "512M", "4G", or a plain number of MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise Failure(f"{text!r} is not a size", ExitCode.USAGE, "write 512M, 4G, or a number of MiB")
    return round(float(match[1]) * _MIB_BY_UNIT[match[2]])


def parse_duration(text: str) -> float:
    """Parse a duration: "90", "10m", "2h", "1d"; "never" is -1."""
    if text.strip().lower() in ("never", "-1"):
        return -1
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if not match:
        raise Failure(f"{text!r} is not a duration", ExitCode.USAGE, "write 90s, 10m, 2h, 1d, or never")
    return float(match[1]) * _SECONDS_BY_UNIT[match[2]]


def parse_pairs(texts: Sequence[str], noun: str) -> dict[str, str]:
    """Parse `KEY=VALUE` strings into a mapping. ``noun`` describes one pair in error messages. Raises Failure."""
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise Failure(f"{text!r} is not {noun}", ExitCode.USAGE, f"write {noun} as KEY=VALUE")
        pairs[key] = value
    return pairs


def parse_mount(text: str) -> dict[str, Any]:
    """Parse `NAME:PATH`, optionally followed by `:ro` and `:clone` in any order, into the fields of a request."""
    name, _, rest = text.partition(":")
    path, flags = rest, set()
    while (parts := path.rpartition(":"))[2] in ("ro", "clone"):
        path = parts[0]
        flags.add(parts[2])
    if not name or not path.startswith("/"):
        raise Failure(
            f"{text!r} is not a volume mount", ExitCode.USAGE, "write NAME:/PATH, optionally followed by :ro or :clone"
        )
    return {"name": name, "path": path, "readOnly": "ro" in flags, "clone": "clone" in flags}


def format_mount(mount: Mapping[str, Any]) -> str:
    """Format a mount from the gateway's response like a value of --volume: "data:/srv/data:ro"."""
    return f"{mount['name']}:{mount['path']}{':ro' if mount['readOnly'] else ''}"


def format_prewarm(level: Mapping[str, Any]) -> str:
    """Format the prewarmed forks of a snapshot: "1 of 2 ready"."""
    return f"{level['ready']} of {level['target']} ready"


def split_list(texts: list[str]) -> list[str]:
    """Split each text at commas, and return the parts that are not empty."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def format_size(count: float) -> str:
    """Format a number of bytes: "0 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_mib(count: int) -> str:
    return format_size(count * 1024 * 1024).replace(".0 ", " ")


def format_duration(seconds: float) -> str:
    """Format a number of seconds: "42 s", "3 m", "5 h", "12 d"."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / unit)} {name}"
    return f"{int(seconds / 86400)} d"


def parse_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def format_age(text: str, now: datetime | None = None) -> str:
    return format_duration(max(0.0, ((now or datetime.now(UTC)) - parse_time(text)).total_seconds()))


def format_time_left(text: str, now: datetime | None = None) -> str:
    end = parse_time(text)
    if end.year >= _NEVER_YEAR:
        return "never ends"
    remaining_seconds = (end - (now or datetime.now(UTC))).total_seconds()
    return f"ends in {format_duration(remaining_seconds)}" if remaining_seconds > 0 else "ending"
