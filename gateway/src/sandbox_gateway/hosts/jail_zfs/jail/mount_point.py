"""Prepare the mount point of a volume in a jail. Root in the jail may tamper with the path at any time.

`mount` resolves its target on the host, so a symbolic link in a jail could redirect a mount to any path on the host.
Therefore this module opens the path component by component, and `JailMounts` checks the result in the mount table.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Invalid

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_MAX_BYTES = 1023
"""Maximum length of a mount point's path: MNAMELEN of FreeBSD 12 and later, without the final NUL."""

_REMEDY = "choose a different path"


def prepare(root: Path, path: str) -> None:
    """Create the missing directories of ``path`` under ``root``, without following symbolic links.

    Raises Invalid, and removes the directories that it created, if ``path`` cannot be a mount point.
    """
    if not path.startswith("/") or any(name in ("", ".", "..") for name in path[1:].split("/")):
        raise Invalid(f"a volume cannot be mounted on {path[:80]!r}: use an absolute path without '..' or '//'")
    if len(os.fsencode(f"{root}{path}")) > _PATH_MAX_BYTES:
        raise Invalid(f"the path {path[:80]}… is too long for a mount point: choose a shorter path")
    components: list[tuple[int, str, bool]] = []
    try:
        directory_fd = os.open(root, _OPEN_FLAGS)
    except OSError as error:
        raise BackendFailed(f"the sandbox's file system is not mounted at {root}: {error.strerror}") from None
    try:
        for name in path[1:].split("/"):
            is_new = _make_directory(directory_fd, name)
            components.append((directory_fd, name, is_new))
            directory_fd = os.open(name, _OPEN_FLAGS, dir_fd=directory_fd)
            if is_new:
                os.fchmod(directory_fd, 0o755)  # independent of the umask
    except OSError as error:
        _remove_new_directories(components)
        raise Invalid(_explain(path, components, error)) from None
    finally:
        for fd in {directory_fd, *(parent for parent, _, _ in components)}:
            os.close(fd)


def _make_directory(parent: int, name: str) -> bool:
    """Create a directory. Returns False if the name already exists."""
    try:
        os.lstat(name, dir_fd=parent)
        return False
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=parent)
        return True


def _remove_new_directories(components: list[tuple[int, str, bool]]) -> None:
    with suppress(OSError):
        for parent, name, is_new in reversed(components):
            if is_new:
                os.rmdir(name, dir_fd=parent)


def _explain(path: str, components: list[tuple[int, str, bool]], error: OSError) -> str:
    shown_path = path if len(path) <= 120 else path[:119] + "…"
    failure = f"a volume cannot be mounted on {shown_path}"
    if components and not components[-1][2]:
        parent, name, _ = components[-1]
        component_path = "/" + "/".join(step for _, step, _ in components)
        with suppress(OSError):
            mode = os.lstat(name, dir_fd=parent).st_mode
            if stat.S_ISLNK(mode):
                return f"{failure}, because {component_path} is a symbolic link: {_REMEDY}"
            if not stat.S_ISDIR(mode):
                return f"{failure}, because {component_path} is not a directory: {_REMEDY}"
    return f"{failure} ({error.strerror}): {_REMEDY}"
