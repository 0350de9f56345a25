"""Check and split names of datasets and snapshots."""

from __future__ import annotations

import re

from zfs_core.exceptions import FilesystemNameInvalid, NameInvalid, NameTooLong, SnapshotNameInvalid

NAME_MAX = 255
"""Maximum length, in bytes, of the full name of a dataset or snapshot, and of the name of a user property."""

Name = str | bytes

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


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


def validate_existing_name(name: Name) -> str:
    """Check the name of an object that should exist, and return it as str. Raises NameInvalid, NameTooLong.

    Allows any name that ZFS might accept, except for names that the command would misinterpret, such as options.
    """
    text = decode_name(name)
    if not text or text.startswith(("-", "/")) or text.endswith("/") or _CONTROL_CHARACTER.search(text):
        raise NameInvalid(text)
    if len(text.encode(errors="replace")) > NAME_MAX:
        raise NameTooLong(text)
    return text


def validate_new_filesystem_name(name: Name) -> str:
    """Check the name of a filesystem that is to be created, and return it as str.

    Allows letters, digits and ``_.:-``. No component may begin with one of ``.:-``.
    """
    text = validate_existing_name(name)
    if not all(_COMPONENT.fullmatch(part) for part in text.split("/")) or not text[0].isalpha():
        raise FilesystemNameInvalid(text)
    return text


def validate_snapshot_name(name: Name) -> str:
    """Check that a name has the form ``filesystem@snapshot``, and return it as str."""
    text = validate_existing_name(name)
    filesystem, _, short = text.partition("@")
    if not filesystem or not short or "@" in short or "/" in short:
        raise SnapshotNameInvalid(text)
    return text


def validate_new_snapshot_name(name: Name) -> str:
    text = validate_snapshot_name(name)
    if not _COMPONENT.fullmatch(text.partition("@")[2]):
        raise SnapshotNameInvalid(text)
    return text


def validate_filesystem_name(name: Name) -> str:
    """Check that a name is not that of a snapshot or bookmark, and return it as str."""
    text = validate_existing_name(name)
    if "@" in text or "#" in text:
        raise FilesystemNameInvalid(text)
    return text
