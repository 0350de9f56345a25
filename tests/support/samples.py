"""Parameters of which complete runs test only a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow_except(sampled: Iterable[str], parameters: Iterable[str]) -> list[Any]:
    """Return ``parameters`` with the marker ``slow``, except for those in ``sampled``."""
    remaining = set(sampled)
    marked = []
    for parameter in parameters:
        marked.append(parameter if parameter in remaining else pytest.param(parameter, marks=pytest.mark.slow))
        remaining.discard(parameter)
    assert not remaining, f"unknown parameters: {remaining}"
    return marked
