"""Explain why data does not match its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

MAX_MEMBERS = 100
"""Maximum number of members of an object in a document that another gateway or a registry has sent."""


def has_more_values(data: Any, limit: int) -> bool:
    """Return whether ``data``, which was JSON, contains more than ``limit`` values in lists and objects.

    Check this before validating data of a client. Pydantic finds every invalid value before it reports any, spends
    about a kilobyte and several microseconds on each, and does not let other threads run meanwhile.
    """
    pending = [data]
    count = 0
    while pending:
        value = pending.pop()
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(children)
        if count > limit:
            return True
        pending.extend(child for child in children if isinstance(child, dict | list))
    return False


class ForeignObject(BaseModel):
    """An object in a document from another gateway or a registry, with only known members.

    A subclass uses ``fail_fast`` for long lists, because all errors of a document are collected: see
    ``has_more_values``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_member_count(cls, value: Any) -> Any:
        return check_member_count(value)


def check_member_count(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it is an object with more than MAX_MEMBERS members."""
    if isinstance(value, dict) and len(value) > MAX_MEMBERS:
        raise ValueError(f"the object has {len(value)} members, more than {MAX_MEMBERS}")
    return value


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
