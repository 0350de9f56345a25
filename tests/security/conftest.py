"""Fixtures for attacks on a gateway with an in-memory host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.api.memory_gateway import MemoryGateway
from tests.security.routes import Target, create_target


@pytest.fixture(scope="module")
def shared_target(_gateway_by_folder: Callable[[str], MemoryGateway]) -> Iterator[Target]:
    """A target with its own gateway, because the fixture ``memory_gateway`` removes all objects after each test."""
    with create_target(_gateway_by_folder("targets")) as target:
        yield target


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The target that all tests share. Checks that the test has not changed it."""
    state_before = shared_target.state()
    yield shared_target
    assert shared_target.state() == state_before and shared_target.events == []
