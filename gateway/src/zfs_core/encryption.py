"""Load, unload and change encryption keys.

libzfs_core takes a key of 32 bytes. The command reads it from standard input, in the format that the dataset's
``keyformat`` demands. If that is ``passphrase``, no input of the command results in a given key, so functions that
need a key raise NotImplementedError.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetNotFound,
    EncryptionKeyAlreadyLoaded,
    EncryptionKeyInvalid,
    EncryptionKeyNotLoaded,
    FilesystemNotFound,
    UnknownCryptCommand,
)
from zfs_core.names import Name, accepts_bytes, validate_filesystem_name
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, check
from zfs_core.properties import get_props, lzc_set_prop
from zfs_core.run import run

_ERRORS: dict[Cause, ErrorFactory] = {
    Cause.MISSING: FilesystemNotFound,
    Cause.NO_POOL: FilesystemNotFound,
    Cause.KEY_LOADED: lambda _: EncryptionKeyAlreadyLoaded(),
    Cause.KEY_INVALID: lambda _: EncryptionKeyInvalid(),
    Cause.KEY_NOT_LOADED: lambda _: EncryptionKeyNotLoaded(),
}


def require_encryption(function_name: str) -> None:
    """Raise NotImplementedError if the installed ZFS does not support encryption."""
    if not detect_capabilities().encryption:
        raise NotImplementedError(f"{function_name}: this version of ZFS does not support encryption")


@accepts_bytes
def lzc_load_key(fsname: Name, noop: bool, key: bytes) -> None:
    """Load the key of an encryption root. With ``noop``, only verify the key.

    Raises FilesystemNotFound, EncryptionKeyAlreadyLoaded, EncryptionKeyInvalid. Command:
    ``zfs load-key [-n] -L prompt FSNAME``.
    """
    require_encryption("lzc_load_key")
    target = validate_filesystem_name(fsname)
    key_format = _get_key_properties(target)["keyformat"]
    with open_key(key, ["-o", f"keyformat={key_format}"]) as stdin:
        outcome = run("load-key", *(["-n"] if noop else []), "-L", "prompt", target, name=target, stdin=stdin)
    check(outcome, target, "verify encryption key" if noop else "load encryption key", _ERRORS)


@accepts_bytes
def lzc_unload_key(fsname: Name) -> None:
    """Unload the key of an encryption root.

    Raises FilesystemNotFound, EncryptionKeyNotLoaded, and DatasetBusy if the filesystem is mounted. Command:
    ``zfs unload-key FSNAME``.
    """
    require_encryption("lzc_unload_key")
    target = validate_filesystem_name(fsname)
    check(run("unload-key", target, name=target), target, "unload encryption key", _ERRORS)


@accepts_bytes
def lzc_change_key(fsname: Name, crypt_cmd: str, props: Props = None, key: bytes | None = None) -> None:
    """Change the key of an encryption root.

    ``crypt_cmd``: ``new_key``, or ``inherit`` to use the key of the parent. The commands ``force_new_key`` and
    ``force_inherit``, which have no equivalent in ``zfs change-key``, raise NotImplementedError.

    Raises FilesystemNotFound, PropertyInvalid, UnknownCryptCommand, EncryptionKeyNotLoaded. Command:
    ``zfs change-key -o keylocation=prompt FSNAME``, or ``zfs change-key -i FSNAME``.
    """
    require_encryption("lzc_change_key")
    target = validate_filesystem_name(fsname)
    if crypt_cmd in ("force_new_key", "force_inherit"):
        raise NotImplementedError(f"`zfs change-key` does not support {crypt_cmd}, which only `zfs receive` uses")
    if crypt_cmd not in ("new_key", "inherit"):
        raise UnknownCryptCommand(crypt_cmd)
    key_properties = _get_key_properties(target)
    if crypt_cmd == "inherit":
        check(run("change-key", "-i", target, name=target), target, "change encryption key", _ERRORS)
        return
    options, key_location = split_key_location(format_property_options(props))
    if not any(word.startswith("keyformat=") for word in options):
        options += ["-o", f"keyformat={key_properties['keyformat']}"]
    with open_key(key or b"", options) as stdin:
        outcome = run("change-key", *options, target, name=target, stdin=stdin)
    check(outcome, target, "change encryption key", _ERRORS)
    lzc_set_prop(target, "keylocation", key_location or key_properties["keylocation"])


def _get_key_properties(target: str) -> dict[str, str]:
    try:
        props = get_props([target], ["keyformat", "keylocation"])[target]
    except DatasetNotFound:
        raise FilesystemNotFound(target) from None
    return {name: prop.value for name, prop in props.items()}


def split_key_location(options: Sequence[str]) -> tuple[list[str], str | None]:
    """Replace the key location in ``-o`` options with ``prompt``, so that the command reads the key from its input.

    Returns the options and the key location, which must be set later, or None if the options contain none.
    """
    locations = [word.partition("=")[2] for word in options if word.startswith("keylocation=")]
    pairs = zip(options[::2], options[1::2], strict=True)
    other_words = [word for pair in pairs if not pair[1].startswith("keylocation=") for word in pair]
    return [*other_words, "-o", "keylocation=prompt"], locations[-1] if locations else None


@contextlib.contextmanager
def open_key(key: bytes | None, options: Sequence[str]) -> Iterator[int | None]:
    """Yield a file descriptor from which the command can read the key, or None if there is no key.

    The key has the format of the last ``keyformat`` in the options.
    """
    if key is None:
        yield None
        return
    formats = [word.partition("=")[2] for word in options if word.startswith("keyformat=")]
    if formats[-1:] == ["passphrase"]:
        raise NotImplementedError("the command cannot take a key that was derived from a passphrase")
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, key.hex().encode() + b"\n" if formats[-1:] == ["hex"] else key)
        os.close(write_fd)
        yield read_fd
    finally:
        os.close(read_fd)
