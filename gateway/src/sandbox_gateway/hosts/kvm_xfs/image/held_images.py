"""Keep memory images alive for machines: with hard links, which outlive the snapshot that the image belongs to.

``link`` is a path in the directory of a machine. For an image in a memory root, the hard link is in that root, and
``link`` is a symbolic link to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.image.layout import MemoryDirectory

_FRESH_SUFFIX = ".fresh"


def hold(image: Path, link: Path, memory_directory: MemoryDirectory | None) -> None:
    """Make ``link`` refer to ``image``, which is in ``memory_directory`` (None: on the file system of ``link``)."""
    replace(prepare(image, link, memory_directory), link)


def prepare(image: Path, link: Path, memory_directory: MemoryDirectory | None) -> Path:
    """Create a hard link to ``image``, for ``replace``. Return its path."""
    held = link if memory_directory is None else memory_directory.machine_file(link)
    held.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = held.with_name(held.name + _FRESH_SUFFIX)
    fresh.unlink(missing_ok=True)
    fresh.hardlink_to(image)
    return fresh


def replace(fresh: Path, link: Path) -> None:
    """Make ``link`` refer to the image of ``fresh``, which ``prepare`` returned, and release its former image."""
    former = targets([link])
    held = fresh.with_name(link.name)
    fresh.rename(held)
    if held != link:
        new_link = link.with_name(link.name + _FRESH_SUFFIX)
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(held)
        new_link.rename(link)
    remove_targets([target for target in former if target != held])


def release(link: Path) -> None:
    """Remove ``link`` if it exists, and the hard link that it refers to."""
    former = targets([link])
    link.unlink(missing_ok=True)
    remove_targets(former)


def targets_below(directory: Path) -> list[Path]:
    """Return the hard links in memory roots that the machine with this directory holds."""
    return targets(directory.glob("memory.*"))


def targets(links: Iterable[Path]) -> list[Path]:
    """Return what those of ``links`` refer to that are symbolic links."""
    return [link.readlink() for link in links if link.is_symlink()]


def remove_targets(held: Iterable[Path]) -> None:
    """Remove hard links in memory roots. Those that cannot be removed remain until a scan finds their root mounted."""
    for path in held:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
