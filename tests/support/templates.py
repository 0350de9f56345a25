"""The template that most tests use, cached by its inputs: other lanes and later runs need not build it."""

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
    """Copy the template below a state root under that name, if it is cached. The next build then finds it."""
    kept = _cache_path()
    if kept.exists():
        manifest = _manifest(kept)
        place = root / "templates" / manifest["id"]
        place.parent.mkdir(exist_ok=True)
        _copy(kept, place)
        (place / "manifest.json").write_text(json.dumps(manifest | {"names": [name]}))


def add_to_cache(root: Path) -> None:
    """Cache the template of RECIPE that is below a state root, and no other."""
    kept = _cache_path()
    for place in (root / "templates").iterdir():
        if not kept.exists() and _manifest(place)["recipe_digest"] == _digest():
            fresh = kept.with_name(f".{kept.name}-{os.getpid()}")
            _copy(place, fresh)
            try:
                fresh.rename(kept)
            except OSError:  # The other lane was first.
                shutil.rmtree(fresh)
    for other in session.cache_dir().glob("template-*"):
        if other != kept:
            shutil.rmtree(other, ignore_errors=True)


@cache
def _cache_path() -> Path:
    """The key consists of the recipe, the guest, the gateway's code, and the kernel, which decides the accelerator."""
    made_of = hashlib.sha256(f"{_digest()} {os.uname().release}".encode())
    for path in sorted((session.REPOSITORY / "gateway" / "src").rglob("*.py")):
        made_of.update(path.read_bytes())
    return session.cache_dir() / f"template-{made_of.hexdigest()[:32]}"


def _digest() -> str:
    return RECIPE.digest(guest_digest(), source_digest(RECIPE))


def _manifest(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "manifest.json").read_text())
    return found


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True, timeout=120)
