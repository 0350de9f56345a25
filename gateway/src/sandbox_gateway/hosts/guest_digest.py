"""Compute a digest of everything that determines a template, except its recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

import sandbox_agent
from sandbox_gateway.hosts import rootfs_common

_IGNORED = ("__pycache__", "README.md", "ruff.toml")
"""Files that do not affect templates, and that some installations lack."""


def digest_guest(builder: Traversable, *texts: str) -> str:
    """Digest the agent, the shared builder, the host's own ``builder`` (a file or a directory) and ``texts``.

    It depends only on names and contents, so it is the same on every machine and Python version.
    """
    digest = hashlib.sha256()
    shared = resources.files(rootfs_common.__package__) / "rootfs_common.py"
    for place in (resources.files(sandbox_agent), shared, builder):
        for name, content in _files(place):
            digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    for text in texts:
        digest.update(f"{hashlib.sha256(text.encode()).hexdigest()}\0".encode())
    return digest.hexdigest()


def _files(place: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield (path below ``place``, content) of each file, in a fixed order."""
    if place.is_file():
        yield path or place.name, place.read_bytes()
        return
    for entry in sorted(place.iterdir(), key=lambda each: each.name):
        if entry.name not in _IGNORED:
            yield from _files(entry, f"{path}/{entry.name}")
