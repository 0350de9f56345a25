"""Fixtures for tests of `lzc` with real ZFS: the executable file, and a dataset for each test."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zfs_core.cli.build import build

from tests.support import pools, session

_dataset_numbers = itertools.count()


@pytest.fixture(scope="session")
def zpool(requires_root: None) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.get_run_id()}l", session.get_run_dir()) as pool:
        yield pool


@pytest.fixture
def root(zpool: pools.Pool) -> Iterator[str]:
    """Create a mounted dataset for the test, and destroy it afterwards together with everything below it."""
    name = f"{zpool.name}/r{next(_dataset_numbers)}"
    pools.run("zfs", "create", name)
    yield name
    for line in pools.run("zfs", "list", "-H", "-r", "-t", "snapshot", "-o", "name,userrefs", name).stdout.splitlines():
        snapshot, references = line.split("\t")
        if references not in ("-", "0"):
            for tag in ("keep", "14.2"):
                pools.run("zfs", "release", tag, snapshot, check=False)
    pools.destroy_all(name)


@pytest.fixture
def root_path(zpool: pools.Pool, root: str) -> Path:
    return zpool.mount_point / root.partition("/")[2]


@pytest.fixture(scope="session")
def lzc_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executable file, run by the system's Python without packages."""
    path = tmp_path_factory.mktemp("lzc") / "lzc"
    path.write_bytes(build("/usr/bin/python3 -IS"))
    path.chmod(0o755)
    return path


@pytest.fixture
def lzc(lzc_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs `lzc` and returns its exit code and result."""

    def run(*argv: str) -> tuple[int, dict[str, Any]]:
        environment = {"PATH": f"{lzc_path.parent}:{os.environ['PATH']}"}
        result = subprocess.run(
            [str(lzc_path), *argv], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        return result.returncode, json.loads(result.stdout)

    return run
