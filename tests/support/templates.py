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

from sandbox_gateway.hosts.kvm_xfs.template.guest_files import guest_digest
from sandbox_gateway.recipes import Recipe, source_digest
from sandbox_gateway.records import Resources
from tests.support import session

RECIPE = Recipe(resources=Resources(memory_mb=256, disk_mb=2048))


def copy_cached(root: Path, name: str) -> None:
    """If the template is cached, copy it to a state root under the name ``name``, so that it need not be built."""
    cached = _cache_path()
    if cached.exists():
        manifest = _manifest(cached)
        directory = root / "templates" / manifest["id"]
        directory.parent.mkdir(exist_ok=True)
        _copy(cached, directory)
        (directory / "manifest.json").write_text(json.dumps(manifest | {"names": [name]}))


def add_to_cache(root: Path) -> None:
    """Copy the template of RECIPE from a state root to the cache, and remove all other templates from the cache."""
    cached = _cache_path()
    for directory in (root / "templates").iterdir():
        if not cached.exists() and _manifest(directory)["recipe_digest"] == _digest():
            temporary = cached.with_name(f".{cached.name}-{os.getpid()}")
            _copy(directory, temporary)
            try:
                temporary.rename(cached)
            except OSError:  # Another lane has cached it first.
                shutil.rmtree(temporary)
    for other in session.cache_dir().glob("template-*"):
        if other != cached:
            shutil.rmtree(other, ignore_errors=True)


@cache
def _cache_path() -> Path:
    """Return the template's path in the cache.

    The path depends on the recipe, the guest files, the gateway's code, and the kernel, which affects the accelerator.
    """
    digest = hashlib.sha256(f"{_digest()} {os.uname().release}".encode())
    for path in sorted((session.REPOSITORY / "gateway" / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return session.cache_dir() / f"template-{digest.hexdigest()[:32]}"


def _digest() -> str:
    return RECIPE.digest(guest_digest(), source_digest(RECIPE))


def _manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True, timeout=120)
