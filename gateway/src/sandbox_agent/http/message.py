"""Read values from JSON messages. Each ``get_…`` function raises Failure ``invalid_argument`` for an invalid value."""

from __future__ import annotations

import binascii
import os

from sandbox_agent.failure import invalid_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def get_object(message: dict[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key)
    if not isinstance(value, dict):
        raise invalid_argument(f"the field '{key}' must be a JSON object")
    return value


def get_text(message: dict[str, Any], key: str) -> str:
    """Return the string in the field ``key``, which must not contain NUL characters; "" if it is absent."""
    value = message.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise invalid_argument(f"the field '{key}' must be a string without NUL characters")
    return value


def get_number(message: dict[str, Any], key: str, *, default: float, maximum: float) -> float:
    """Return the number in the field ``key``; ``default`` if it is absent.

    The number must be greater than 0 and at most ``maximum``.
    """
    value = message.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= maximum:
        raise invalid_argument(f"the field '{key}' must be a number greater than 0 and at most {maximum:.0f}")
    return float(value)


def get_bytes(message: dict[str, Any], key: str) -> bytes:
    """Return the bytes that the field ``key`` encodes in base64; b"" if it is absent."""
    try:
        return binascii.a2b_base64(message.get(key) or "")
    except (ValueError, TypeError):
        raise invalid_argument(f"the field '{key}' must be a base64 string") from None


def get_strings(message: dict[str, Any], key: str) -> list[str]:
    value = message.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise invalid_argument(f"the field '{key}' must be a list of strings without NUL characters")
    return value


def get_variables(message: dict[str, Any], key: str) -> dict[str, str]:
    """Return the environment variables in the field ``key``; an empty dict if it is absent."""
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(item, str) and name and "=" not in name and "\0" not in name + item for name, item in value.items()
    ):
        raise invalid_argument(f"the field '{key}' must be an object that maps variable names to strings")
    return value


def make_displayable(text: str) -> str:
    """Replace bytes that are not UTF-8 with U+FFFD, because one such byte would make the whole response invalid."""
    return os.fsencode(text).decode("utf-8", "replace")
