"""Prepare the mount point of a volume in a jail, whose root user may tamper with the path at any time.

`mount` resolves its target on the host, so a symbolic link in a jail could redirect a mount to any path on the host.
Therefore the path is opened component by component, and `VolumeMounts` checks the result in the mount table.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Invalid

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NODE_MAX = 1023
"""Bytes of a mount point's path: MNAMELEN of FreeBSD 12 and later, without the final NUL."""


def prepare(root: Path, path: str) -> None:
    """Ensure that ``path`` in ``root`` is a directory, reached without symbolic links. Creates missing components.

    Raises Invalid, with nothing changed, if that is not possible.
    """
    if not path.startswith("/") or any(name in ("", ".", "..") for name in path[1:].split("/")):
        raise Invalid(f"a volume cannot be mounted on {path[:80]!r}: use an absolute path without '..' or '//'")
    if len(os.fsencode(f"{root}{path}")) > _NODE_MAX:
        raise Invalid(f"the path {path[:80]}… is too long for a mount point: choose a shorter path")
    opened: list[tuple[int, str, bool]] = []
    try:
        at = os.open(root, _DIRECTORY)
    except OSError as error:
        raise BackendFailed(f"the sandbox's file system is not mounted at {root}: {error.strerror}") from None
    try:
        for name in path[1:].split("/"):
            made = _make_directory(at, name)
            opened.append((at, name, made))
            at = os.open(name, _DIRECTORY, dir_fd=at)
            if made:
                os.fchmod(at, 0o755)  # independent of the umask
    except OSError as error:
        _remove_created(opened)
        raise Invalid(_explain(path, opened, error)) from None
    finally:
        for fd in {at, *(parent for parent, _, _ in opened)}:
            os.close(fd)


def _make_directory(parent: int, name: str) -> bool:
    """Create a directory. Returns False if the name exists."""
    try:
        os.lstat(name, dir_fd=parent)
        return False
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=parent)
        return True


def _remove_created(opened: list[tuple[int, str, bool]]) -> None:
    with suppress(OSError):
        for parent, name, made in reversed(opened):
            if made:
                os.rmdir(name, dir_fd=parent)


def _explain(path: str, opened: list[tuple[int, str, bool]], error: OSError) -> str:
    shown = path if len(path) <= 120 else path[:119] + "…"
    if opened and not opened[-1][2]:
        parent, name, _ = opened[-1]
        place = "/" + "/".join(step for _, step, _ in opened)
        with suppress(OSError):
            kind = os.lstat(name, dir_fd=parent).st_mode
            if stat.S_ISLNK(kind):
                return f"no volume can be mounted on {shown}: in the sandbox {place} is a symbolic link"
            if not stat.S_ISDIR(kind):
                return f"no volume can be mounted on {shown}: in the sandbox {place} is not a directory"
    return f"no volume can be mounted on {shown}: {error.strerror}"
