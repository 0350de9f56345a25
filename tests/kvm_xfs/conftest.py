"""Shared fixtures of the KVM/XFS host's tests: a Debian built as a template's file system, once for the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template.build import build_rootfs
from sandbox_gateway.recipes import Recipe
from tests.support import session


@dataclass
class Built:
    image: Path
    kernel: Path
    initrd: Path
    lines: list[str] = field(default_factory=list)


def build(recipe: Recipe, place: Path, cache: Path | None = None) -> Built:
    """Build ``recipe`` into the directory ``place``."""
    built = Built(place / "rootfs.img", place / "kernel", place / "initrd")
    asyncio.run(
        build_rootfs(
            recipe, built.image, built.kernel, built.initrd, cache_root=cache or place / "cache", log=built.lines.append
        )
    )
    return built


@pytest.fixture(scope="session")
def debian(need_root: None) -> Built:
    """The default recipe; the packages are fetched once and kept for later runs."""
    place = session.run_dir() / "debian"
    place.mkdir()
    return build(Recipe(), place, session.cache_dir())


@pytest.fixture(scope="session")
def template_kernel(debian: Built) -> Path:
    return debian.kernel
