"""Select a sample of a test's parameters for complete runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow_except(sampled: Iterable[Any], parameters: Iterable[Any]) -> list[Any]:
    """Return ``parameters`` with the marker ``slow``, except for those in ``sampled``."""
    sampled, parameters = list(sampled), list(parameters)
    unknown = [parameter for parameter in sampled if parameter not in parameters]
    assert not unknown, f"unknown parameters: {unknown}"
    return [each if each in sampled else pytest.param(each, marks=pytest.mark.slow) for each in parameters]
