"""Fixtures for attacks on a gateway with an in-memory host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.security.routes import Target, created_target
from tests.support.memory_gateway import MemoryGateway


@pytest.fixture(scope="module")
def shared_target(_get_gateway_of_folder: Callable[[str], MemoryGateway]) -> Iterator[Target]:
    """A target with its own gateway, because the ``memory_gateway`` fixture removes all objects after each test."""
    with created_target(_get_gateway_of_folder("targets")) as target:
        yield target


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The target that the tests of a module share. Checks after each test that it has not changed."""
    state_before = shared_target.read_state()
    yield shared_target
    assert shared_target.read_state() == state_before and shared_target.events == []
