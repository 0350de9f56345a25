"""Check and split names of datasets, snapshots and bookmarks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from zfs_core.constants import MAXNAMELEN
from zfs_core.exceptions import (
    BookmarkNameInvalid,
    FilesystemNameInvalid,
    MultipleOperationsFailure,
    NameInvalid,
    NameTooLong,
    SnapshotNameInvalid,
    ZCPError,
    ZFSError,
)

NAME_MAX = MAXNAMELEN
"""Maximum length, in bytes, of the full name of a dataset or snapshot, and of the name of a user property."""

Name = str | bytes

P = ParamSpec("P")
R = TypeVar("R")

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_ANY_COMPONENT = re.compile(r"[A-Za-z0-9_.: -]+")
_IMPOSSIBLE_CHARACTER = re.compile(r"[\x00\ud800-\udfff]")
_IMPOSSIBLE_IN_NAME = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def accepts_bytes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of libzfs_core, where names are bytes, so that it also accepts names that are str.

    If the first argument is bytes, or contains bytes, the names in the result and in exceptions are bytes.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        first_argument = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first_argument, Collection) and not isinstance(first_argument, Name):
            first_argument = next(iter(first_argument), None)
        if not isinstance(first_argument, bytes):
            return function(*args, **kwargs)
        try:
            return cast(R, _encode(function(*args, **kwargs)))
        except ZFSError as error:
            _encode_error(error)
            raise

    return wrapper


def _encode(value: Any) -> Any:
    """Return the value with every str in it encoded as bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping):
        return _BytesDict({_encode(key): _encode(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_encode(item) for item in value)
    if isinstance(value, Iterator):
        return iter([_encode(item) for item in value])
    return value


class _BytesDict(dict[Any, Any]):
    """A dict whose keys are bytes. In libzfs_core, the keys of some results are str, so both work."""

    def __missing__(self, key: object) -> Any:
        if isinstance(key, str):
            return self[key.encode()]
        raise KeyError(key)


def _encode_error(error: ZFSError) -> None:
    error.name = _encode(error.name)
    if isinstance(error, ZCPError):
        error.details = _encode(error.details)
    if isinstance(error, MultipleOperationsFailure):
        for each in error.errors:
            _encode_error(each)


def decode_name(name: Name) -> str:
    """Return a name as str. Raises NameInvalid."""
    if isinstance(name, str):
        return name
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise NameInvalid(repr(name)) from None


def get_pool_name(name: str) -> str:
    return re.split(r"[/@#]", name, maxsplit=1)[0]


def get_filesystem_name(name: str) -> str:
    """Return the filesystem of a snapshot: ``pool/a`` for ``pool/a@b``."""
    return name.partition("@")[0]


def get_short_name(name: str) -> str:
    """Return the last part of the name of a snapshot or bookmark: ``b`` for ``pool/a@b``."""
    return re.split(r"[@#]", name, maxsplit=1)[-1]


def is_possible_argument(text: str) -> bool:
    """Return whether a text can be an argument of a command: it contains neither NUL nor a lone surrogate."""
    return not _IMPOSSIBLE_CHARACTER.search(text)


def is_too_long(text: str) -> bool:
    return len(text.encode(errors="replace")) > MAXNAMELEN


def is_filesystem_name(text: str) -> bool:
    """Return whether ZFS accepts the characters of the name of a filesystem or volume. Ignores its length."""
    return not text.startswith("-") and all(_ANY_COMPONENT.fullmatch(part) for part in text.split("/"))


def is_snapshot_name(text: str) -> bool:
    filesystem, separator, short_name = text.partition("@")
    return bool(separator and is_filesystem_name(filesystem) and _ANY_COMPONENT.fullmatch(short_name))


def is_bookmark_name(text: str) -> bool:
    filesystem, separator, short_name = text.partition("#")
    return bool(separator and is_filesystem_name(filesystem) and _ANY_COMPONENT.fullmatch(short_name))


def validate_existing_name(name: Name) -> str:
    """Check the name of an object that should exist, and return it as str. Raises NameInvalid, NameTooLong.

    Allows any name that ZFS might accept, except for names that the command would misinterpret, such as options and
    paths.
    """
    text = decode_name(name)
    if not text or text.startswith(("-", "/", "./")) or text.endswith("/") or _IMPOSSIBLE_IN_NAME.search(text):
        raise NameInvalid(text)
    if is_too_long(text):
        raise NameTooLong(text)
    return text


def validate_new_filesystem_name(name: Name) -> str:
    """Check the name of a new filesystem, and return it as str.

    Allows letters, digits and ``_.:-``. No component may begin with one of ``.:-``.
    """
    text = decode_name(name)
    if not all(_COMPONENT.fullmatch(part) for part in text.split("/")) or not text[0].isalpha():
        raise FilesystemNameInvalid(text)
    return validate_existing_name(text)


def validate_snapshot_name(name: Name) -> str:
    """Check that a name has the form ``filesystem@snapshot``, and return it as str."""
    text = decode_name(name)
    if not is_snapshot_name(text):
        raise SnapshotNameInvalid(text)
    return validate_existing_name(text)


def validate_new_snapshot_name(name: Name) -> str:
    text = validate_snapshot_name(name)
    if not _COMPONENT.fullmatch(get_short_name(text)):
        raise SnapshotNameInvalid(text)
    return text


def validate_filesystem_name(name: Name) -> str:
    """Check that a name does not belong to a snapshot or bookmark, and return it as str."""
    text = decode_name(name)
    if not is_filesystem_name(text):
        raise FilesystemNameInvalid(text)
    return validate_existing_name(text)


def validate_bookmark_name(name: Name) -> str:
    """Check that a name has the form ``filesystem#bookmark``, and return it as str."""
    text = decode_name(name)
    if not is_bookmark_name(text):
        raise BookmarkNameInvalid(text)
    return validate_existing_name(text)


def validate_pool_name(name: Name) -> str:
    """Check that a name belongs to a pool, and return it as str."""
    text = validate_filesystem_name(name)
    if "/" in text:
        raise NameInvalid(text)
    return text
