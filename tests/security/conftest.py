"""The gateway over a host in memory, as in the tests of the API, and as a target of attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.memory_gateway import MemoryGateway
from tests.security.routes import Target, attack_target


@pytest.fixture(scope="module")
def attacked(_served: MemoryGateway) -> Iterator[Target]:
    with attack_target(_served) as made:
        yield made


@pytest.fixture
def target(attacked: Target) -> Iterator[Target]:
    """A gateway with one object of each kind. Attacks must not change anything on it, so all of them share it."""
    before = attacked.state()
    yield attacked
    assert attacked.state() == before and attacked.events == []
