"""Fixtures for tests with real ZFS: one pool for the run, and a root dataset for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from tests.support import pools, session
from tests.support.jail_world import JailZfsWorld
from tests.support.live import EngineRunner, engines

_dataset_numbers = itertools.count()


@pytest.fixture(scope="session")
def zpool(requires_root: None) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.get_run_id()}z", session.get_run_dir()) as pool:
        yield pool


@pytest.fixture
def root(zpool: pools.Pool) -> Iterator[str]:
    """Create a mounted dataset for the test, and destroy it afterwards together with everything below it."""
    name = f"{zpool.name}/r{next(_dataset_numbers)}"
    pools.run("zfs", "create", name)
    yield name
    pools.destroy_all(name)


@pytest.fixture
def root_path(zpool: pools.Pool, root: str) -> Path:
    return zpool.mount_point / root.partition("/")[2]


@pytest.fixture
def lock_directory(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def storage(root: str, lock_directory: Path) -> Iterator[ZfsStorage]:
    storage = ZfsStorage(root, state_root=lock_directory)
    storage.open()
    storage.scan()
    yield storage
    storage.close()


@pytest.fixture
def make_runner(jail_zfs_world: JailZfsWorld) -> Iterator[Callable[..., EngineRunner]]:
    """Return a function that starts engines with their own state. See ``engines``."""
    with engines(jail_zfs_world) as make_runner:
        yield make_runner


@pytest.fixture
def runner(make_runner: Callable[..., EngineRunner]) -> EngineRunner:
    return make_runner()
