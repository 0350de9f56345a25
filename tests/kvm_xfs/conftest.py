"""Fixtures for the tests of the KVM/XFS host: a Debian root file system, built once per run, and XFS file systems."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template.build import build_rootfs
from sandbox_gateway.recipes import Recipe
from tests.support import session
from tests.support.xfs import LoopXfs


@dataclass
class BuiltRootfs:
    """The files of a built template, and the lines of the build log."""

    image: Path
    kernel: Path
    initrd: Path
    log_lines: list[str] = field(default_factory=list)


def build(recipe: Recipe, directory: Path, cache: Path | None = None) -> BuiltRootfs:
    """Build the root file system of ``recipe`` in ``directory``."""
    rootfs = BuiltRootfs(directory / "rootfs.img", directory / "kernel", directory / "initrd")
    work_directory = directory / "work"
    asyncio.run(
        build_rootfs(
            recipe,
            rootfs.image,
            rootfs.kernel,
            rootfs.initrd,
            cache_root=cache or directory / "cache",
            log=rootfs.log_lines.append,
            work_directory=work_directory,
        )
    )
    shutil.rmtree(work_directory)
    return rootfs


@pytest.fixture(scope="session")
def debian_rootfs(requires_root: None) -> BuiltRootfs:
    """The root file system of the default recipe. Later runs reuse the downloaded packages."""
    directory = session.get_run_dir() / "debian"
    directory.mkdir()
    return build(Recipe(), directory, session.get_cache_dir())


@pytest.fixture(scope="session")
def template_kernel(debian_rootfs: BuiltRootfs) -> Path:
    return debian_rootfs.kernel


@pytest.fixture(scope="module")
def state_xfs(requires_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopXfs]:
    """The file system of the state root."""
    directory = tmp_path_factory.mktemp("state")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512) as xfs:
        yield xfs


@pytest.fixture(scope="module", params=[True, False], ids=["reflink", "no-reflink"])
def root_xfs(
    request: pytest.FixtureRequest, requires_root: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoopXfs]:
    """The file system of the memory root."""
    directory = tmp_path_factory.mktemp("root")
    with LoopXfs(directory / "image", directory / "mount", size_mb=512, reflink=request.param) as xfs:
        yield xfs
