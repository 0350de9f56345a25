"""Keep the memory images that machines use, even after the snapshots they belong to have been removed.

Hard links preserve the images. ``link`` is a path in the directory of a machine. For an image in a memory root, the
hard link is in that root, and ``link`` is a symbolic link to it. Otherwise, ``link`` is the hard link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.files.layout import MemoryDirectory

_FRESH_SUFFIX = ".fresh"


def hold(image: Path, link: Path, memory_directory: MemoryDirectory | None) -> None:
    """Make ``link`` refer to ``image``.

    ``memory_directory`` contains the image. If it is None, the image is on the same file system as ``link``.
    """
    replace(prepare(image, link, memory_directory), link)


def prepare(image: Path, link: Path, memory_directory: MemoryDirectory | None) -> Path:
    """Create a hard link to ``image`` for a later call to ``replace``, and return its path."""
    hard_link = link if memory_directory is None else memory_directory.find_machine_file(link)
    hard_link.parent.mkdir(mode=0o700, exist_ok=True)
    fresh_link = hard_link.with_name(hard_link.name + _FRESH_SUFFIX)
    fresh_link.unlink(missing_ok=True)
    fresh_link.hardlink_to(image)
    return fresh_link


def replace(fresh_link: Path, link: Path) -> None:
    """Make ``link`` refer to the image of ``fresh_link``, which ``prepare`` returned, and release its former image."""
    former_targets = list_targets([link])
    hard_link = fresh_link.with_name(link.name)
    fresh_link.rename(hard_link)
    if hard_link != link:
        symlink = link.with_name(link.name + _FRESH_SUFFIX)
        symlink.unlink(missing_ok=True)
        symlink.symlink_to(hard_link)
        symlink.rename(link)
    remove_targets([target for target in former_targets if target != hard_link])


def release(link: Path) -> None:
    """Remove ``link`` if it exists, and the hard link that it refers to."""
    former_targets = list_targets([link])
    link.unlink(missing_ok=True)
    remove_targets(former_targets)


def list_targets_in(directory: Path) -> list[Path]:
    """Return the hard links in memory roots that symbolic links in a machine's directory refer to."""
    return list_targets(directory.glob("memory.*"))


def list_targets(links: Iterable[Path]) -> list[Path]:
    """Return the targets of those ``links`` that are symbolic links."""
    return [link.readlink() for link in links if link.is_symlink()]


def remove_targets(hard_links: Iterable[Path]) -> None:
    """Remove hard links in memory roots.

    Links that cannot be removed remain until a scan finds their root mounted.
    """
    for path in hard_links:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
