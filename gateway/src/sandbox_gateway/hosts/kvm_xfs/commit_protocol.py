"""Create and remove the directory of an object atomically.

An object is created in `.partial-<name>`. Renaming that directory into place commits the object. After a crash, the
object is either complete, or still has its partial name, and the next ``sweep`` removes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sandbox_gateway.hosts.tree_removal import remove_tree

PARTIAL_PREFIX = ".partial-"


def get_partial_directory(final_directory: Path) -> Path:
    """Return the directory in which ``final_directory`` is created."""
    return final_directory.with_name(PARTIAL_PREFIX + final_directory.name)


def commit(final_directory: Path, *, durable: bool = True) -> None:
    """Rename the partial directory of ``final_directory`` into place.

    ``durable``: see ``record_files.write_record``.
    """
    partial_directory = get_partial_directory(final_directory)
    if durable:
        sync_directory(partial_directory)
    partial_directory.rename(final_directory)
    if durable:
        sync_directory(final_directory.parent)


def undo(final_directory: Path) -> None:
    """Remove ``final_directory``, whether it is committed or not."""
    partial_directory = get_partial_directory(final_directory)
    if partial_directory.exists():
        remove_tree(partial_directory, ignore_errors=True)
    else:  # The rename succeeded, but a later step failed.
        remove_durably(final_directory)


def remove(directory: Path) -> None:
    """Remove a directory if it exists. If the process crashes before the end, the next sweep removes the rest."""
    if not directory.exists():
        return
    partial_directory = get_partial_directory(directory) if not directory.name.startswith(PARTIAL_PREFIX) else directory
    if partial_directory != directory:
        directory.rename(partial_directory)
    remove_tree(partial_directory)


def remove_durably(directory: Path) -> None:
    """Durably remove a directory, if it exists, with one rename. Its files may remain until the next sweep."""
    partial_directory = get_partial_directory(directory)
    try:
        directory.rename(partial_directory)
    except FileNotFoundError:
        return
    sync_directory(directory.parent)
    remove_tree(partial_directory, ignore_errors=True)


def sweep(parent: Path) -> list[str]:
    """Remove uncommitted entries in ``parent`` and its subdirectories, and return their names."""
    names = []
    for entry in _find_partial_entries(parent):
        if entry.is_dir():
            remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
        names.append(entry.name)
    return names


def _find_partial_entries(parent: Path) -> list[Path]:
    """Return the uncommitted entries in ``parent`` and its subdirectories."""
    partial_entries, subdirectories = [], []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PARTIAL_PREFIX):
                partial_entries.append(parent / entry.name)
            elif entry.is_dir(follow_symlinks=False):
                subdirectories.append(entry.path)
    for directory in subdirectories:
        partial_entries += [Path(directory, name) for name in os.listdir(directory) if name.startswith(PARTIAL_PREFIX)]  # noqa: PTH208 - faster
    return partial_entries


def list_directories(parent: Path) -> list[Path]:
    """Return the directories in ``parent`` that are not hidden, sorted by name."""
    with os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return [parent / name for name in names]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Sequence[Path]) -> None:
    """Sync files concurrently, so that the file system can write its log once for several files."""
    with ThreadPoolExecutor(max_workers=max(1, len(paths))) as pool:
        list(pool.map(sync_file, paths))


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
