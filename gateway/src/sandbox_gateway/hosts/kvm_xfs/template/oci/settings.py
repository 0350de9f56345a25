"""Read the settings of an image that become the start command of its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sandbox_gateway.errors import Invalid

_MAX_BYTES = 128 << 10
"""The maximum size of all settings: Linux limits a single argument or variable to this size."""


@dataclass(frozen=True)
class StartSettings:
    """How to start the program of an image. ``args`` is empty if the image does not specify one."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    """USER, UID, USER:GROUP or UID:GID; "" means root."""
    cwd: str = "/"
    entry_point: list[str] = field(default_factory=list)
    """The beginning of ``args`` that a different command of the image keeps."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_start_settings(config: Mapping[str, Any]) -> StartSettings:
    """Return the settings in an image's configuration. Raises Invalid if they have the wrong types."""
    settings = config.get("config") or {}
    try:
        entry_point = _require_texts(settings.get("Entrypoint"))
        args = [*entry_point, *_require_texts(settings.get("Cmd"))]
        pairs = [text.split("=", 1) for text in _require_texts(settings.get("Env"))]
        env = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[0]}
        user, cwd = (_require_text(settings.get(key) or "") for key in ("User", "WorkingDir"))
    except (TypeError, AttributeError):
        raise Invalid(
            "the image's configuration is not valid: its entry point, command and environment must be lists of strings"
        ) from None
    result = StartSettings(args, env, user, cwd if cwd.startswith("/") else f"/{cwd}", entry_point)
    text = result.to_json()
    if len(text) > _MAX_BYTES or "\\u0000" in text:
        raise Invalid(
            "the image's entry point and environment contain a NUL character or are larger than "
            f"{_MAX_BYTES >> 10} KiB: move them to a script in the image"
        )
    return result


def _require_texts(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError
    return [_require_text(item) for item in value]


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
