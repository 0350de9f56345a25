"""Fixtures that run the engine tests on every kind of host. Each kind declares its features in ``abilities``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.live import Live, engines
from tests.support.worlds import World, wait_for_traces

KINDS = ("kvm_xfs", "jail_zfs")


@pytest.fixture(scope="session", params=KINDS)
def world(request: pytest.FixtureRequest) -> World:
    world: World = request.getfixturevalue(f"{request.param}_world")
    return world


@pytest.fixture(scope="session")
def _shared(world: World) -> Iterator[Live]:
    live = Live(world.host(config := world.config()), config)
    yield live
    live.remove_all()
    live.close()
    world.forget(config)


@pytest.fixture
def live(_shared: Live, world: World) -> Iterator[Live]:
    """An engine that all tests share. It is emptied after each test, and the test fails if anything remains."""
    before = world.traces(_shared.config)
    yield _shared
    _shared.remove_all()
    assert wait_for_traces(lambda: world.traces(_shared.config), lambda found: found == before) == before


@pytest.fixture
def make_live(world: World) -> Iterator[Callable[..., Live]]:
    """Return a function that opens engines, each with its own state. See ``engines``."""
    with engines(world) as make_live:
        yield make_live


@pytest.fixture
def with_memory(world: World) -> None:
    """Skip tests of captured memory on hosts that do not support it."""
    if not world.abilities.memory:
        pytest.skip(f"{world.kind} declares that it captures no memory")
