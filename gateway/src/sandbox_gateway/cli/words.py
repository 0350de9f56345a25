"""Sizes and times, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sandbox_gateway.cli.failure import Exit, Failure

_MIB = {"": 1, "m": 1, "g": 1024, "t": 1024 * 1024}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_NEVER_YEAR = 9999


def mebibytes(text: str) -> int:
    """ "512M", "4G", or a plain number of MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise Failure(f"{text!r} is not a size", Exit.USAGE, "write 512M, 4G, or a number of MiB")
    return round(float(match[1]) * _MIB[match[2]])


def seconds(text: str) -> float:
    """ "90", "10m", "2h", "1d"; "never" is -1."""
    if text.strip().lower() in ("never", "-1"):
        return -1
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if not match:
        raise Failure(f"{text!r} is not a time", Exit.USAGE, "write 90s, 10m, 2h, 1d, or never")
    return float(match[1]) * _SECONDS[match[2]]


def pairs(words: list[str], what: str) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise Failure(f"{word!r} is not {what}", Exit.USAGE, f"write {what} as KEY=VALUE")
        found[key] = value
    return found


def mount(text: str) -> dict[str, Any]:
    """`NAME:PATH`, with `:ro` and `:clone` behind it in any order, as a gateway is sent it."""
    name, _, rest = text.partition(":")
    path, flags = rest, set()
    while (cut := path.rpartition(":"))[2] in ("ro", "clone"):
        path = cut[0]
        flags.add(cut[2])
    if not name or not path.startswith("/"):
        raise Failure(
            f"{text!r} is not a volume and a path", Exit.USAGE, "write NAME:/PATH, with :ro or :clone behind it"
        )
    return {"name": name, "path": path, "readOnly": "ro" in flags, "clone": "clone" in flags}


def mounted(mount: Mapping[str, Any]) -> str:
    """What a gateway answers of a mount, as it was asked for: "data:/srv/data:ro"."""
    return f"{mount['name']}:{mount['path']}{':ro' if mount['readOnly'] else ''}"


def split(words: list[str]) -> list[str]:
    """Words given one at a time, or several with commas between."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def size(count: float) -> str:
    """Bytes for a reader: "0 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def mib(count: int) -> str:
    return size(count * 1024 * 1024).replace(".0 ", " ")


def span(length: float) -> str:
    """Seconds for a reader: "42 s", "3 m", "5 h", "12 d"."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if length < limit:
            return f"{int(length / unit)} {name}"
    return f"{int(length / 86400)} d"


def moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str, now: datetime | None = None) -> str:
    return span(max(0.0, ((now or datetime.now(UTC)) - moment(text)).total_seconds()))


def left(text: str, now: datetime | None = None) -> str:
    end = moment(text)
    if end.year >= _NEVER_YEAR:
        return "never ends"
    remaining = (end - (now or datetime.now(UTC))).total_seconds()
    return f"ends in {span(remaining)}" if remaining > 0 else "ending"
