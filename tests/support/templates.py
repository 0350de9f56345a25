"""A cache of the template that most tests use, so that other lanes and later runs need not build it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from sandbox_gateway.hosts.kvm_xfs.template.guest_files import compute_guest_digest
from sandbox_gateway.recipes import Recipe, compute_source_digest
from sandbox_gateway.records import Resources
from tests.support import session

RECIPE = Recipe(resources=Resources(memory_mb=256, disk_mb=2048))


def copy_cached_template(root: Path, name: str) -> None:
    """If the template is cached, copy it to a state root under the name ``name``, so that it need not be built."""
    cached_path = _get_cache_path()
    if cached_path.exists():
        manifest = _read_manifest(cached_path)
        directory = root / "templates" / manifest["id"]
        directory.parent.mkdir(exist_ok=True)
        _copy_directory(cached_path, directory)
        (directory / "manifest.json").write_text(json.dumps(manifest | {"names": [name]}))


def add_to_cache(root: Path) -> None:
    """Copy the template of RECIPE from a state root to the cache, and remove all other templates from the cache."""
    cached_path = _get_cache_path()
    for directory in (root / "templates").iterdir():
        if not cached_path.exists() and _read_manifest(directory)["recipe_digest"] == _compute_digest():
            temporary_path = cached_path.with_name(f".{cached_path.name}-{os.getpid()}")
            _copy_directory(directory, temporary_path)
            try:
                temporary_path.rename(cached_path)
            except OSError:  # Another lane has cached it first.
                shutil.rmtree(temporary_path)
    for other_path in session.get_cache_dir().glob("template-*"):
        if other_path != cached_path:
            shutil.rmtree(other_path, ignore_errors=True)


@cache
def _get_cache_path() -> Path:
    """Return the template's path in the cache.

    The path depends on the recipe, the guest files, the gateway's code, and the kernel, which affects the accelerator.
    """
    hasher = hashlib.sha256(f"{_compute_digest()} {os.uname().release}".encode())
    for path in sorted((session.REPOSITORY / "gateway" / "src").rglob("*.py")):
        hasher.update(path.read_bytes())
    return session.get_cache_dir() / f"template-{hasher.hexdigest()[:32]}"


def _compute_digest() -> str:
    return RECIPE.compute_digest(compute_guest_digest(), compute_source_digest(RECIPE))


def _read_manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest


def _copy_directory(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True, timeout=120)
