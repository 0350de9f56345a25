"""Fixtures that run the engine tests on every kind of host. Each kind declares its features in ``abilities``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.live import Live, engines
from tests.support.worlds import World, wait_for_traces

HOST_KINDS = ("kvm_xfs", "jail_zfs")


@pytest.fixture(scope="session", params=HOST_KINDS)
def world(request: pytest.FixtureRequest) -> World:
    world: World = request.getfixturevalue(f"{request.param}_world")
    return world


@pytest.fixture(scope="session")
def _shared_live(world: World) -> Iterator[Live]:
    live = Live(world.make_host(config := world.make_config()), config)
    yield live
    live.remove_all()
    live.close()
    world.clean_up(config)


@pytest.fixture
def live(_shared_live: Live, world: World) -> Iterator[Live]:
    """An engine that all tests share. It is emptied after each test, and the test fails if anything remains."""
    traces_before = world.read_traces(_shared_live.config)
    yield _shared_live
    _shared_live.remove_all()
    assert (
        wait_for_traces(lambda: world.read_traces(_shared_live.config), lambda found: found == traces_before)
        == traces_before
    )


@pytest.fixture
def make_live(world: World) -> Iterator[Callable[..., Live]]:
    """A function that opens engines, each with its own state (see ``engines``)."""
    with engines(world) as make_live:
        yield make_live


@pytest.fixture
def requires_memory_capture(world: World) -> None:
    """Skip tests of captured memory on hosts that do not support it."""
    if not world.abilities.memory:
        pytest.skip(f"{world.kind} declares that it does not capture memory")
