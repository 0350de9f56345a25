"""Rules for the mount points of volumes in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sandbox_gateway.errors import Invalid

_MAX_PATH_LENGTH = 255
_PATH_PATTERN = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
_SYSTEM_DIRECTORIES = ("/proc", "/sys", "/dev", "/run")
"""Volumes cannot be mounted on or under these directories."""
_TOP_LEVEL_DIRECTORIES = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/boot", "/root", "/home", "/var", "/tmp")
"""Volumes cannot be mounted on these directories, but they can be mounted under them."""


def check_mount_paths(paths: Iterable[str]) -> None:
    """Raise Invalid if a path is not allowed, or if two of the paths overlap."""
    earlier_paths: list[str] = []
    for path in paths:
        _check_path(path)
        for other in earlier_paths:
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                raise Invalid(f"the mounts at {other} and {path} overlap: choose paths that do not contain each other")
        earlier_paths.append(path)


def _check_path(path: str) -> None:
    short_path = path if len(path) <= 80 else f"{path[:77]}..."
    parts = path.split("/")
    if not _PATH_PATTERN.fullmatch(path) or "." in parts or ".." in parts:
        raise Invalid(
            f"a volume cannot be mounted at {short_path!r}: use an absolute path of letters, digits and _.@+:=-, "
            "without '.', '..', '//' or a trailing '/'"
        )
    if len(path) > _MAX_PATH_LENGTH:
        raise Invalid(
            f"a volume cannot be mounted at {short_path!r}: use a path of at most {_MAX_PATH_LENGTH} characters"
        )
    if path in _TOP_LEVEL_DIRECTORIES or f"/{parts[1]}" in _SYSTEM_DIRECTORIES:
        raise Invalid(
            f"a volume cannot be mounted at {short_path!r}, which the system needs: choose a different directory"
        )
