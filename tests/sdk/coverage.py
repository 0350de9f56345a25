"""Mark which methods of a client a test covers. The tables in docs/ are generated from these marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Test = TypeVar("_Test", bound=Callable[..., Any])


def covers(*methods: str, note: str = "") -> Callable[[_Test], _Test]:
    """Mark a test that calls ``methods`` (``Class.method``) the way the client documents them.

    ``note`` says how the gateway's behaviour differs, or gives details for the table.
    """

    def mark(test: _Test) -> _Test:
        test.covers = getattr(test, "covers", {}) | dict.fromkeys(methods, note)  # type: ignore[attr-defined]
        return test

    return mark
