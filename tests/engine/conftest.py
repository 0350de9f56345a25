"""Fixtures that run the engine tests on every kind of host. Each kind declares its features in ``abilities``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.live import EngineRunner, engines
from tests.support.worlds import World, wait_for_traces

HOST_KINDS = ("kvm_xfs", "jail_zfs")


@pytest.fixture(scope="session", params=HOST_KINDS)
def world(request: pytest.FixtureRequest) -> World:
    world: World = request.getfixturevalue(f"{request.param}_world")
    return world


@pytest.fixture(scope="session")
def _shared_runner(world: World) -> Iterator[EngineRunner]:
    runner = EngineRunner(world.make_host(config := world.make_config()), config)
    yield runner
    runner.remove_all()
    runner.close()
    world.clean_up(config)


@pytest.fixture
def runner(_shared_runner: EngineRunner, world: World) -> Iterator[EngineRunner]:
    """An engine that all tests share. It is emptied after each test, and the test fails if anything remains."""
    traces_before = world.read_traces(_shared_runner.config)
    yield _shared_runner
    _shared_runner.remove_all()
    assert (
        wait_for_traces(lambda: world.read_traces(_shared_runner.config), lambda found: found == traces_before)
        == traces_before
    )


@pytest.fixture
def make_runner(world: World) -> Iterator[Callable[..., EngineRunner]]:
    """A function that opens engines, each with its own state (see ``engines``)."""
    with engines(world) as make_runner:
        yield make_runner


@pytest.fixture
def requires_memory_capture(world: World) -> None:
    """Skip tests of captured memory on hosts that do not support it."""
    if not world.abilities.memory:
        pytest.skip(f"{world.kind} declares that it does not capture memory")
