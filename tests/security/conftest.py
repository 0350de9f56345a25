"""The gateway over a host in memory, as the tests of the API have it, and as a target of attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.conftest import _served, anyone, api, one, served
from tests.api.served import Served
from tests.security.routes import Target, target

__all__ = ["_served", "anyone", "api", "one", "served"]


@pytest.fixture(scope="module")
def attacked(_served: Served) -> Iterator[Target]:
    with target(_served) as made:
        yield made


@pytest.fixture
def there(attacked: Target) -> Iterator[Target]:
    """A gateway with one of everything. Nothing of it may change, so all attacks have the same one."""
    before = attacked.state()
    yield attacked
    assert attacked.state() == before and attacked.events == []
