"""Marks which methods of a client a test covers; the tables of docs/ are generated from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Test = TypeVar("_Test", bound=Callable[..., Any])


def covers(*methods: str, note: str = "") -> Callable[[_Test], _Test]:
    """The test calls ``methods`` (``Class.method``) as their documentation says; ``note`` names differences."""

    def mark(test: _Test) -> _Test:
        test.covers = getattr(test, "covers", {}) | dict.fromkeys(methods, note)  # type: ignore[attr-defined]
        return test

    return mark
