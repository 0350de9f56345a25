"""Where a volume is mounted in a jail: a path that the jail's root may have prepared, or changes meanwhile.

`mount` resolves its target as the host sees it: a symbolic link that was planted in a jail would lead a mount of the
host's to anywhere. So the path is walked here, component by component, and what was mounted is looked at afterwards.
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
    """See to it that ``path``, as seen in ``root``, is a directory reached without links; what is missing is made.

    Raises Invalid, with nothing changed, where that is not possible.
    """
    if not path.startswith("/") or any(name in ("", ".", "..") for name in path[1:].split("/")):
        raise Invalid(f"a volume is mounted on an absolute path without '..' or '//', not on {path[:80]!r}")
    if len(os.fsencode(f"{root}{path}")) > _NODE_MAX:
        raise Invalid(f"the path {path[:80]}… is too long for a mount point: choose a shorter one")
    opened: list[tuple[int, str, bool]] = []
    try:
        at = os.open(root, _DIRECTORY)
    except OSError as error:
        raise BackendFailed(f"the files of the sandbox are not at {root}: {error.strerror}") from None
    try:
        for name in path[1:].split("/"):
            made = _make(at, name)
            opened.append((at, name, made))
            at = os.open(name, _DIRECTORY, dir_fd=at)
            if made:
                os.fchmod(at, 0o755)  # whatever our umask is
    except OSError as error:
        _unmake(opened)
        raise Invalid(_why(path, opened, error)) from None
    finally:
        for fd in {at, *(parent for parent, _, _ in opened)}:
            os.close(fd)


def _make(parent: int, name: str) -> bool:
    """True: it was not there."""
    try:
        os.lstat(name, dir_fd=parent)
        return False
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=parent)
        return True


def _unmake(opened: list[tuple[int, str, bool]]) -> None:
    with suppress(OSError):
        for parent, name, made in reversed(opened):
            if made:
                os.rmdir(name, dir_fd=parent)


def _why(path: str, opened: list[tuple[int, str, bool]], error: OSError) -> str:
    shown = path if len(path) <= 120 else path[:119] + "…"
    if opened and not opened[-1][2]:
        parent, name, _ = opened[-1]
        place = "/" + "/".join(step for _, step, _ in opened)
        with suppress(OSError):
            kind = os.lstat(name, dir_fd=parent).st_mode
            if stat.S_ISLNK(kind):
                return f"no volume can be mounted on {shown}: in the sandbox {place} is a symbolic link"
            if not stat.S_ISDIR(kind):
                return f"no volume can be mounted on {shown}: in the sandbox {place} is no directory"
    return f"no volume can be mounted on {shown}: {error.strerror}"
