"""Compute a digest of everything that determines the file system of a template, except its recipe.

It does not cover the steps that `engine/template_builder` runs in the booted machine. They are those of the recipe,
except that the agent starts its code interpreter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

import sandbox_agent
from sandbox_gateway.hosts import rootfs_common

_IGNORED_NAMES = ("__pycache__", "README.md", "ruff.toml")
"""Names of files and directories that do not affect templates. Some installations lack them."""


def digest_guest(builder: Traversable, *texts: str) -> str:
    """Return a digest of the agent, the shared builder, the host's ``builder`` (a file or directory) and ``texts``.

    The digest depends only on names and contents, so it is the same on every machine and Python version.
    """
    digest = hashlib.sha256()
    common_builder = resources.files(rootfs_common.__package__) / "rootfs_common.py"
    for root in (resources.files(sandbox_agent), common_builder, builder):
        for name, content in _read_files(root):
            digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    for text in texts:
        digest.update(f"{hashlib.sha256(text.encode()).hexdigest()}\0".encode())
    return digest.hexdigest()


def _read_files(root: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the relative path and the contents of each file in ``root``, in a fixed order."""
    if root.is_file():
        yield path or root.name, root.read_bytes()
        return
    for entry in sorted(root.iterdir(), key=lambda each: each.name):
        if entry.name not in _IGNORED_NAMES:
            yield from _read_files(entry, f"{path}/{entry.name}")
