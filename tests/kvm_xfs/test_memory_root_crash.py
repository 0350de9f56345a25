"""Test that killing the gateway during an operation with a memory root neither loses an image nor leaves a stray one.

`tests.engine.test_engine_crash` describes the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.hosts.base import Host
from tests.engine.test_engine_crash import (
    Scenario,
    check_sandboxes,
    kill_at_each_step,
    prepare_sandboxes,
    restore_sandboxes,
)
from tests.support.worlds import KvmXfsWorld
from tests.support.xfs import LoopXfs

OPERATIONS = ("fork", "claim", "capture", "clone", "rollback", "pause", "resume", "kill", "delete")


class MemoryRootWorld:
    """A KVM/XFS host whose gateways use a memory root."""

    def __init__(self, world: KvmXfsWorld, root: Path) -> None:
        self._world = world
        self._root = root
        self.kind, self.abilities = world.kind, world.abilities
        self.host_class, self.halt_command = world.host_class, world.halt_command

    def make_config(self, **sections: Any) -> Config:
        return self._world.make_config(kvm_xfs={"memory_root": self._root}, **sections)

    def make_host(self, config: Config) -> Host:
        return self._world.make_host(config)

    def clean_up(self, config: Config) -> None:
        self._world.clean_up(config)

    def check_no_strays(self, engine: Engine, config: Config, moment: str) -> None:
        """Check the host, and that the memory root has exactly the images that snapshots and machines refer to."""
        self._world.check_no_strays(engine, config, moment)
        images = {path for path in self._root.rglob("*") if path.is_file()}
        snapshot_images = {
            Path(engine.host.get_file_paths(each)["memory"])
            for each in engine.index.snapshots.values()
            if "memory" in each.host
        }
        links = [path for path in (config.host.state_root / "sandboxes").glob("*/*/memory.*") if path.is_symlink()]
        assert images == snapshot_images | {path.readlink() for path in links}, moment
        assert all(engine.host.find_memory_problem(each) == "" for each in engine.index.snapshots.values()), moment


@pytest.fixture(scope="module", params=[True, False], ids=["reflink", "no-reflink"])
def scenario(
    request: pytest.FixtureRequest,
    kvm_xfs_world: KvmXfsWorld,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scenario]:
    directory = tmp_path_factory.mktemp("memory-root")
    with LoopXfs(directory / "image", directory / "root", size_mb=3072, reflink=request.param) as xfs:
        scenario = Scenario(MemoryRootWorld(kvm_xfs_world, xfs.mount_point), prepare_sandboxes)  # type: ignore[arg-type]
        yield scenario
        scenario.close()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_operation_neither_loses_nor_leaks_an_image(
    operation: str, scenario: Scenario, tmp_path: Path
) -> None:
    kill_at_each_step(operation, scenario, tmp_path / "output", check_sandboxes, restore_sandboxes)
