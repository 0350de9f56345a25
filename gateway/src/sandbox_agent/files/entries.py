"""Directory entries and file metadata, in envd's format."""

from __future__ import annotations

import errno
import os
import stat
import time

from sandbox_agent.failure import Failure, from_os_error, invalid
from sandbox_agent.http.message import displayable
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PREFIX = "user.e2b."
"""Prefix of the extended attributes that hold metadata. It counts towards the kernel's limit for names."""
_MAX_NAME = 255
_MAX_BYTES = 4096
"""Total bytes of names and values: more does not fit into an ext4 block."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG)
_TYPES = {stat.S_IFREG: "FILE_TYPE_FILE", stat.S_IFDIR: "FILE_TYPE_DIRECTORY", stat.S_IFLNK: "FILE_TYPE_SYMLINK"}


class Owners:
    """A cache of the names of users and groups."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}

    def user(self, uid: int) -> str:
        if uid not in self._users:
            self._users[uid] = users.user_name(uid)
        return self._users[uid]

    def group(self, gid: int) -> str:
        if gid not in self._groups:
            self._groups[gid] = users.group_name(gid)
        return self._groups[gid]


def describe_entry(path: str, owners: Owners | None = None) -> dict[str, Any]:
    """Describe an entry in envd's format. ``type`` and ``mode`` of a symlink are those of its target.

    The type of anything other than a file, directory or symlink is unspecified.
    """
    owners = owners or Owners()
    found = os.lstat(path)
    mode = found.st_mode
    about: dict[str, Any] = {
        "name": displayable(os.path.basename(path)) or "/",
        "path": displayable(path),
        "size": str(found.st_size),
        "permissions": stat.filemode(mode),
        "owner": owners.user(found.st_uid),
        "group": owners.group(found.st_gid),
        "modifiedTime": _format_time(found.st_mtime_ns),
    }
    if stat.S_ISLNK(mode):
        about["symlinkTarget"] = displayable(os.path.realpath(path))
        about["isSymlink"] = True
        try:
            mode = os.stat(path).st_mode
        except OSError:
            pass
    about["type"] = _TYPES.get(stat.S_IFMT(mode), "FILE_TYPE_UNSPECIFIED")
    about["mode"] = stat.S_IMODE(mode)
    kept = read_metadata(path)
    if kept:
        about["metadata"] = kept
    return about


def _format_time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


# -- metadata: extended attributes, which Python has on Linux only ---------------------------------------------------


def check_metadata(given: dict[str, str]) -> dict[str, str]:
    """Return ``given`` with its keys in lower case. Raises Failure if a file cannot have such metadata."""
    size = 0
    for key, value in given.items():
        if not key or not all(" " <= letter <= "~" for letter in key + value):
            raise invalid(f"metadata {key!r}: keys and values must be printable ASCII, and a key must not be empty")
        if len(_PREFIX + key) > _MAX_NAME:
            raise invalid(f"metadata {key!r}: a key can have at most {_MAX_NAME - len(_PREFIX)} characters")
        size += len(_PREFIX + key + value)
    if size > _MAX_BYTES:
        raise invalid(f"the metadata has {size} bytes: a file can have at most {_MAX_BYTES}")
    return {key.lower(): value for key, value in given.items()}


def read_metadata(target: str | int) -> dict[str, str]:
    """Return the metadata of a file (path or descriptor); empty if its file system has no extended attributes."""
    found = {}
    try:
        for name in os.listxattr(target):
            if name.startswith(_PREFIX):
                # Programs in the sandbox can store arbitrary bytes.
                found[displayable(name[len(_PREFIX) :])] = os.getxattr(target, name).decode("utf-8", "replace")
    except (OSError, AttributeError):
        pass
    return found


def write_metadata(fd: int, path: str, wanted: dict[str, str]) -> None:
    """Replace the metadata of a file. Raises Failure if its file system cannot store it."""
    try:
        for name in os.listxattr(fd):
            if name.startswith(_PREFIX) and name[len(_PREFIX) :] not in wanted:
                os.removexattr(fd, name)
        for key, value in wanted.items():
            os.setxattr(fd, _PREFIX + key, value.encode())
    except (OSError, AttributeError) as error:
        number = getattr(error, "errno", errno.ENOTSUP)
        if number in _FULL:
            raise Failure(
                "resource_exhausted",
                f"{displayable(path)} has no space left for metadata: use fewer or shorter entries",
                507,
            ) from None
        if isinstance(error, OSError) and number not in (errno.ENOTSUP, errno.ENOSYS):
            raise from_os_error(error, displayable(path)) from None
        if wanted:
            raise Failure(
                "unimplemented",
                f"the file system of {displayable(path)} cannot store metadata: send the file without metadata",
            ) from None
