"""Check and split names of datasets and snapshots."""

from __future__ import annotations

import re

from sandbox_gateway.zfs.exceptions import FilesystemNameInvalid, NameInvalid, NameTooLong, SnapshotNameInvalid

NAME_MAX = 255
"""Maximum length, in bytes, of the full name of a dataset or snapshot, and of the name of a user property."""

Name = str | bytes

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def decode_name(name: Name) -> str:
    """Return a name as str. libzfs_core accepts only bytes; this package also accepts str. Raises NameInvalid."""
    if isinstance(name, str):
        return name
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise NameInvalid(repr(name)) from None


def pool_of(name: str) -> str:
    return re.split(r"[/@#]", name, maxsplit=1)[0]


def filesystem_of(name: str) -> str:
    """Return the filesystem of a snapshot: ``pool/a`` for ``pool/a@b``."""
    return name.partition("@")[0]


def existing_name(name: Name) -> str:
    """Return the name of an existing object as str. Raises NameInvalid, NameTooLong.

    Allows any name that ZFS might accept, except for names that the command would misinterpret, such as options.
    """
    text = decode_name(name)
    if not text or text.startswith(("-", "/")) or text.endswith("/") or _CONTROL.search(text):
        raise NameInvalid(text)
    if len(text.encode(errors="replace")) > NAME_MAX:
        raise NameTooLong(text)
    return text


def new_filesystem_name(name: Name) -> str:
    """Return the name of a new filesystem as str.

    Allows letters, digits and ``_.:-``. No component may begin with one of ``.:-``.
    """
    text = existing_name(name)
    if not all(_COMPONENT.fullmatch(part) for part in text.split("/")) or not text[0].isalpha():
        raise FilesystemNameInvalid(text)
    return text


def snapshot_name(name: Name) -> str:
    """Return the name of an existing snapshot as str. It must have the form ``filesystem@snapshot``."""
    text = existing_name(name)
    filesystem, _, short = text.partition("@")
    if not filesystem or not short or "@" in short or "/" in short:
        raise SnapshotNameInvalid(text)
    return text


def new_snapshot_name(name: Name) -> str:
    text = snapshot_name(name)
    if not _COMPONENT.fullmatch(text.partition("@")[2]):
        raise SnapshotNameInvalid(text)
    return text


def filesystem_name(name: Name) -> str:
    """Return the name of an existing filesystem as str. Refuses names of snapshots and bookmarks."""
    text = existing_name(name)
    if "@" in text or "#" in text:
        raise FilesystemNameInvalid(text)
    return text
