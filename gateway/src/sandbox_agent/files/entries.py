"""Describe directory entries and file metadata in the format of envd."""

from __future__ import annotations

import errno
import os
import stat
import time

from sandbox_agent.failure import Failure, from_os_error, invalid_argument
from sandbox_agent.http.message import make_displayable
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ATTRIBUTE_PREFIX = "user.e2b."
"""Prefix of the extended attributes that store metadata. It counts towards the kernel's limit for names."""
_MAX_ATTRIBUTE_NAME_LENGTH = 255
_MAX_METADATA_BYTES = 4096
"""Maximum total size of names and values. Larger metadata does not fit into an ext4 block."""
_NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG)
_FILE_TYPES = {stat.S_IFREG: "FILE_TYPE_FILE", stat.S_IFDIR: "FILE_TYPE_DIRECTORY", stat.S_IFLNK: "FILE_TYPE_SYMLINK"}


class OwnerNameCache:
    """A cache of user and group names."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}

    def find_user_name(self, uid: int) -> str:
        if uid not in self._users:
            self._users[uid] = users.find_user_name(uid)
        return self._users[uid]

    def find_group_name(self, gid: int) -> str:
        if gid not in self._groups:
            self._groups[gid] = users.find_group_name(gid)
        return self._groups[gid]


def describe_entry(path: str, owner_names: OwnerNameCache | None = None) -> dict[str, Any]:
    """Return a directory entry in the format of envd. A symlink has the ``type`` and ``mode`` of its target.

    The type is unspecified if the entry is not a file, a directory or a symlink.
    """
    owner_names = owner_names or OwnerNameCache()
    file_stat = os.lstat(path)
    mode = file_stat.st_mode
    entry: dict[str, Any] = {
        "name": make_displayable(os.path.basename(path)) or "/",
        "path": make_displayable(path),
        "size": str(file_stat.st_size),
        "permissions": stat.filemode(mode),
        "owner": owner_names.find_user_name(file_stat.st_uid),
        "group": owner_names.find_group_name(file_stat.st_gid),
        "modifiedTime": _format_time(file_stat.st_mtime_ns),
    }
    if stat.S_ISLNK(mode):
        entry["symlinkTarget"] = make_displayable(os.path.realpath(path))
        entry["isSymlink"] = True
        try:
            mode = os.stat(path).st_mode
        except OSError:
            pass
    entry["type"] = _FILE_TYPES.get(stat.S_IFMT(mode), "FILE_TYPE_UNSPECIFIED")
    entry["mode"] = stat.S_IMODE(mode)
    metadata = read_metadata(path)
    if metadata:
        entry["metadata"] = metadata
    return entry


def _format_time(nanoseconds: int) -> str:
    seconds, remainder = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{remainder:09d}Z"


# -- metadata, in extended attributes, which Python supports only on Linux -------------------------------------------


def normalize_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Return ``metadata`` with its keys in lower case. Raises Failure if the metadata cannot be stored."""
    size = 0
    for key, value in metadata.items():
        if not key or not all(" " <= letter <= "~" for letter in key + value):
            raise invalid_argument(
                f"the metadata entry {key!r} is not valid: "
                "use a non-empty key, and only printable ASCII characters in the key and the value"
            )
        if len(_ATTRIBUTE_PREFIX + key) > _MAX_ATTRIBUTE_NAME_LENGTH:
            raise invalid_argument(
                f"the metadata key {key!r} is too long: "
                f"use at most {_MAX_ATTRIBUTE_NAME_LENGTH - len(_ATTRIBUTE_PREFIX)} characters"
            )
        size += len(_ATTRIBUTE_PREFIX + key + value)
    if size > _MAX_METADATA_BYTES:
        raise invalid_argument(
            f"the metadata is {size} bytes long: use at most {_MAX_METADATA_BYTES} bytes for each file"
        )
    return {key.lower(): value for key, value in metadata.items()}


def read_metadata(target: str | int) -> dict[str, str]:
    """Return the metadata of a file; an empty dict if its file system does not support extended attributes.

    ``target``: the path of the file or a descriptor for it.
    """
    metadata = {}
    try:
        for name in os.listxattr(target):
            if name.startswith(_ATTRIBUTE_PREFIX):
                # Programs in the sandbox can store arbitrary bytes.
                metadata[make_displayable(name[len(_ATTRIBUTE_PREFIX) :])] = os.getxattr(target, name).decode(
                    "utf-8", "replace"
                )
    except (OSError, AttributeError):
        pass
    return metadata


def write_metadata(fd: int, path: str, metadata: dict[str, str]) -> None:
    """Replace the metadata of a file. Raises Failure if its file system cannot store it."""
    try:
        for name in os.listxattr(fd):
            if name.startswith(_ATTRIBUTE_PREFIX) and name[len(_ATTRIBUTE_PREFIX) :] not in metadata:
                os.removexattr(fd, name)
        for key, value in metadata.items():
            os.setxattr(fd, _ATTRIBUTE_PREFIX + key, value.encode())
    except (OSError, AttributeError) as error:
        error_number = getattr(error, "errno", errno.ENOTSUP)
        if error_number in _NO_SPACE_ERRORS:
            raise Failure(
                "resource_exhausted",
                f"there is no space left for the metadata of {make_displayable(path)}: use fewer or shorter entries",
                507,
            ) from None
        if isinstance(error, OSError) and error_number not in (errno.ENOTSUP, errno.ENOSYS):
            raise from_os_error(error, make_displayable(path)) from None
        if metadata:
            raise Failure(
                "unimplemented",
                f"the file system of {make_displayable(path)} cannot store metadata: send the file without metadata",
            ) from None
