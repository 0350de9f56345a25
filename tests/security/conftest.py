"""Fixtures for attacks on a gateway that is backed by an in-memory host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.api.memory_gateway import MemoryGateway
from tests.security.routes import Target, create_target


@pytest.fixture(scope="module")
def shared_target(_gateway_by_folder: Callable[[str], MemoryGateway]) -> Iterator[Target]:
    """A target on its own gateway, because ``memory_gateway`` removes all objects from its gateway after each test."""
    with create_target(_gateway_by_folder("targets")) as target:
        yield target


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """A gateway with an object of each kind. All tests share it, because attacks must not change it."""
    state_before = shared_target.state()
    yield shared_target
    assert shared_target.state() == state_before and shared_target.events == []
