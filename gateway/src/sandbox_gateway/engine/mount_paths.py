"""Rules for mount points of volumes in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sandbox_gateway.errors import Invalid

_MAX_LENGTH = 255
_PARTS = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
_SYSTEM = ("/proc", "/sys", "/dev", "/run")
"""Directories at or below which no volume can be mounted."""
_TOP = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/boot", "/root", "/home", "/var", "/tmp")
"""Directories at which no volume can be mounted, but below them it can."""


def check_mount_paths(paths: Iterable[str]) -> None:
    """Raise Invalid if one sandbox cannot have mounts at all of ``paths``."""
    seen: list[str] = []
    for path in paths:
        _check(path)
        for other in seen:
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                raise Invalid(
                    f"the mounts at {other} and {path} overlap: choose paths of which neither contains the other"
                )
        seen.append(path)


def _check(path: str) -> None:
    shown = path if len(path) <= 80 else f"{path[:77]}..."
    parts = path.split("/")
    if not _PARTS.fullmatch(path) or "." in parts or ".." in parts:
        raise Invalid(
            f"a volume cannot be mounted at {shown!r}: use an absolute path of letters, digits and _.@+:=-, "
            "without '.', '..', '//' or a final '/'"
        )
    if len(path) > _MAX_LENGTH:
        raise Invalid(f"a volume cannot be mounted at {shown!r}: a path has at most {_MAX_LENGTH} characters")
    if path in _TOP or f"/{parts[1]}" in _SYSTEM:
        raise Invalid(f"a volume cannot be mounted at {shown!r}, which the system needs: choose another directory")
