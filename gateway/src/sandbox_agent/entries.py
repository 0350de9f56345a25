"""Entries of directories, and what users keep with a file, as envd describes them."""

from __future__ import annotations

import errno
import os
import stat
import time

from sandbox_agent import users
from sandbox_agent.failure import Failure, invalid, of_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PREFIX = "user.e2b."
"""Of the extended attributes that are metadata. The kernel's limit of a name includes it."""
_LONGEST_NAME = 255
_LARGEST = 4096
"""Bytes of names and values together: more does not fit into one block of ext4."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG)
_TYPES = {stat.S_IFREG: "FILE_TYPE_FILE", stat.S_IFDIR: "FILE_TYPE_DIRECTORY", stat.S_IFLNK: "FILE_TYPE_SYMLINK"}


class Owners:
    """Names of users and groups, each looked up once."""

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


def entry(path: str, owners: Owners | None = None) -> dict[str, Any]:
    """An entry as envd describes it: of a symlink, ``type`` and ``mode`` are its target's.

    What is no file, directory or symlink has no type.
    """
    owners = owners or Owners()
    found = os.lstat(path)
    mode = found.st_mode
    about: dict[str, Any] = {
        "name": shown(os.path.basename(path)) or "/",
        "path": shown(path),
        "size": str(found.st_size),
        "permissions": stat.filemode(mode),
        "owner": owners.user(found.st_uid),
        "group": owners.group(found.st_gid),
        "modifiedTime": _timestamp(found.st_mtime_ns),
    }
    if stat.S_ISLNK(mode):
        about["symlinkTarget"] = shown(os.path.realpath(path))
        about["isSymlink"] = True
        try:
            mode = os.stat(path).st_mode
        except OSError:
            pass
    about["type"] = _TYPES.get(stat.S_IFMT(mode), "FILE_TYPE_UNSPECIFIED")
    about["mode"] = stat.S_IMODE(mode)
    kept = metadata(path)
    if kept:
        about["metadata"] = kept
    return about


def shown(text: str) -> str:
    """``text`` for an answer: what is not UTF-8 becomes U+FFFD, as one such name would spoil the whole answer."""
    return os.fsencode(text).decode("utf-8", "replace")


def _timestamp(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


# -- metadata: extended attributes, which Python has on Linux only ---------------------------------------------------


def checked_metadata(given: dict[str, str]) -> dict[str, str]:
    """``given`` by keys in lower case; raises Failure where it cannot be kept."""
    size = 0
    for key, value in given.items():
        if not key or not all(" " <= letter <= "~" for letter in key + value):
            raise invalid(f"metadata {key!r}: keys and values are printable ASCII, and keys are not empty")
        if len(_PREFIX + key) > _LONGEST_NAME:
            raise invalid(f"metadata {key!r}: a key has at most {_LONGEST_NAME - len(_PREFIX)} characters")
        size += len(_PREFIX + key + value)
    if size > _LARGEST:
        raise invalid(f"the metadata of a file is more than {_LARGEST} bytes")
    return {key.lower(): value for key, value in given.items()}


def metadata(target: str | int) -> dict[str, str]:
    """What is kept with the file (path or descriptor); nothing where its file system keeps nothing."""
    found = {}
    try:
        for name in os.listxattr(target):
            if name.startswith(_PREFIX):
                # Whoever is in the sandbox may have written anything.
                found[shown(name[len(_PREFIX) :])] = os.getxattr(target, name).decode("utf-8", "replace")
    except (OSError, AttributeError):
        pass
    return found


def keep_metadata(fd: int, path: str, wanted: dict[str, str]) -> None:
    """Have the file keep ``wanted`` and nothing else; raises Failure where its file system cannot."""
    try:
        for name in os.listxattr(fd):
            if name.startswith(_PREFIX) and name[len(_PREFIX) :] not in wanted:
                os.removexattr(fd, name)
        for key, value in wanted.items():
            os.setxattr(fd, _PREFIX + key, value.encode())
    except (OSError, AttributeError) as error:
        number = getattr(error, "errno", errno.ENOTSUP)
        if number in _FULL:
            raise Failure("resource_exhausted", f"{shown(path)}: no space left for metadata", 507) from None
        if isinstance(error, OSError) and number not in (errno.ENOTSUP, errno.ENOSYS):
            raise of_os_error(error, shown(path)) from None
        if wanted:
            raise Failure(
                "unimplemented", f"the file system of {shown(path)} keeps no metadata: leave it out"
            ) from None
