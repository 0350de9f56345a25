"""Explain why data does not match its model."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError


def explain(error: ValidationError, spell: Callable[[str], str] = str) -> str:
    """Return a message that names each invalid key and says what is wrong with it.

    ``spell`` converts the name of a model's field to the name that the caller knows.
    """
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        location = ".".join(spell(step) if isinstance(step, str) else str(step) for step in item["loc"])
        reason = "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        # An error that concerns several keys has no location.
        parts.append(f"{location}: {reason}" if location else reason)
    return "; ".join(parts)
