"""Remove trees that a guest, an image or a foreign file system may have created."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(directory: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory, if it exists, with everything in it. Does not follow links or enter other file systems.

    If an entry cannot be removed, removes the rest, and then raises the first OSError unless ``ignore_errors``.

    ``shutil.rmtree`` fails on trees that are deeper than Python's recursion limit. This function moves each nested
    directory to the top before it empties the directory. Therefore the depth of a tree does not matter.
    """
    errors: list[OSError] = []
    with _errors_collected(errors):
        with _opened(str(directory)) as top:
            _empty_directory(top, errors)
        directory.rmdir()
    if errors and not ignore_errors:
        raise errors[0]


def _empty_directory(top: int, errors: list[OSError]) -> None:
    prefix = f".removed-{secrets.token_hex(8)}-"  # Nobody can predict these names, so they are not taken.
    moved_count = 0
    pending_names = _remove_files(top, errors)
    while pending_names:
        name = pending_names.pop()
        with _errors_collected(errors):
            with _opened(name, top) as directory:
                for child in _remove_files(directory, errors):
                    with _errors_collected(errors):
                        moved_count += 1
                        os.rename(child, f"{prefix}{moved_count}", src_dir_fd=directory, dst_dir_fd=top)
                        pending_names.append(f"{prefix}{moved_count}")
            os.rmdir(name, dir_fd=top)


def _remove_files(directory: int, errors: list[OSError]) -> list[str]:
    """Remove all entries of a directory except subdirectories. Returns the names of the subdirectories."""
    with os.scandir(directory) as iterator:
        entries = list(iterator)
    subdirectories = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            subdirectories.append(entry.name)
        else:
            with _errors_collected(errors):
                os.unlink(entry.name, dir_fd=directory)
    return subdirectories


@contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    """Open a directory, which must be on the same file system as ``parent``."""
    descriptor = os.open(name, _OPEN_FLAGS, dir_fd=parent)
    try:
        if parent is not None and os.fstat(descriptor).st_dev != os.fstat(parent).st_dev:
            raise OSError(errno.EBUSY, "another file system is mounted there", name)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _errors_collected(errors: list[OSError]) -> Iterator[None]:
    """Add the first error to ``errors``, unless the entry no longer exists."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if not errors:
            errors.append(error)
