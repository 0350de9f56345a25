"""Fixtures for the tests of the KVM/XFS host: a Debian root file system, which is built once per run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template.build import build_rootfs
from sandbox_gateway.recipes import Recipe
from tests.support import session


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
    asyncio.run(
        build_rootfs(
            recipe,
            rootfs.image,
            rootfs.kernel,
            rootfs.initrd,
            cache_root=cache or directory / "cache",
            log=rootfs.log_lines.append,
        )
    )
    return rootfs


@pytest.fixture(scope="session")
def debian_rootfs(need_root: None) -> BuiltRootfs:
    """The root file system of the default recipe. Later runs reuse the downloaded packages."""
    directory = session.run_dir() / "debian"
    directory.mkdir()
    return build(Recipe(), directory, session.cache_dir())


@pytest.fixture(scope="session")
def template_kernel(debian_rootfs: BuiltRootfs) -> Path:
    return debian_rootfs.kernel
