"""Parse the arguments of `lzc`. Each function raises ArgumentTypeError with a message that says what is valid."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from zfs_core.exceptions import NameInvalid, NameTooLong, PropertyInvalid
from zfs_core.names import (
    validate_bookmark_name,
    validate_existing_name,
    validate_filesystem_name,
    validate_new_filesystem_name,
    validate_new_snapshot_name,
    validate_snapshot_name,
)
from zfs_core.options import format_property_assignment, validate_property_name

_SNAPSHOT_FORM = "use FILESYSTEM@SNAPSHOT, such as tank/data@before"
_FILESYSTEM_FORM = "use POOL/NAME/…, such as tank/data"
_CHARACTERS = "with letters, digits, and _ . : -; each part starts with a letter, a digit or _"


def _make_name_parser(validate: Callable[[str], str], noun: str, form: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            return validate(text)
        except NameTooLong:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}… is too long: use at most 255 bytes") from None
        except NameInvalid:
            raise argparse.ArgumentTypeError(f"{text!r} is not a valid name for {noun}: {form}") from None

    return parse


parse_existing_name = _make_name_parser(
    validate_existing_name, "a dataset or snapshot", f"{_FILESYSTEM_FORM} or tank/data@before"
)
parse_filesystem = _make_name_parser(validate_filesystem_name, "a filesystem or volume", _FILESYSTEM_FORM)
parse_new_filesystem = _make_name_parser(
    validate_new_filesystem_name, "a filesystem or volume", f"{_FILESYSTEM_FORM}, {_CHARACTERS}"
)
parse_snapshot = _make_name_parser(validate_snapshot_name, "a snapshot", _SNAPSHOT_FORM)
parse_bookmark = _make_name_parser(
    validate_bookmark_name, "a bookmark", "use FILESYSTEM#BOOKMARK, such as tank/data#before"
)
parse_new_snapshot = _make_name_parser(validate_new_snapshot_name, "a snapshot", f"{_SNAPSHOT_FORM}, {_CHARACTERS}")


def parse_base(text: str) -> str:
    return parse_bookmark(text) if "#" in text else parse_snapshot(text)


def parse_receive_target(text: str) -> str:
    """Parse the name of a new snapshot, or of a filesystem that was received in part."""
    return parse_new_snapshot(text) if "@" in text else parse_filesystem(text)


def parse_tag(text: str) -> str:
    if not text or text.startswith("-") or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid tag: use printable characters, and do not begin with a hyphen"
        )
    if len(text.encode()) > 255:
        raise argparse.ArgumentTypeError(f"the tag {text[:40]!r}… is too long: use at most 255 bytes")
    return text


def parse_property_name(text: str) -> str:
    if text == "all":
        raise argparse.ArgumentTypeError("'all' is not supported: name the properties, separated by commas")
    try:
        return validate_property_name(text)
    except PropertyInvalid:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid property: use a native property, such as quota, or a user property with a "
            "colon, such as backup:keep"
        ) from None


def parse_property_names(text: str) -> list[str]:
    return [parse_property_name(part) for part in text.split(",")]


def parse_assignment(text: str) -> tuple[str, str]:
    """Parse ``PROPERTY=VALUE``."""
    name, separator, value = text.partition("=")
    if not separator or not value:
        raise argparse.ArgumentTypeError(f"{text!r} does not set a property: use PROPERTY=VALUE, such as quota=10G")
    parse_property_name(name)
    try:
        format_property_assignment(name, value)
    except PropertyInvalid as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a valid assignment: {error.details}") from None
    return name, value


def parse_assignment_or_name(text: str) -> tuple[str, str] | str:
    """Parse ``PROPERTY=VALUE``, or the name of a dataset or snapshot, which cannot contain an equals sign."""
    return parse_assignment(text) if "=" in text else parse_existing_name(text)


def parse_dataset_types(text: str) -> list[str]:
    known_types = ("filesystem", "volume", "snapshot", "bookmark")
    types = text.split(",")
    if unknown_types := [each for each in types if each not in known_types]:
        raise argparse.ArgumentTypeError(
            f"{unknown_types[0]!r} is not a type: use one or more of {', '.join(known_types)}, separated by commas"
        )
    return types


def parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: use 0 or a positive number")
    return int(text)


def parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: use a positive number of seconds")
    return value


def parse_volume_size(text: str) -> str:
    if parse_size(text) in (None, 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use a number with a unit, such as 512M or 10G")
    return text


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int | None:
    """Return a size such as ``10G`` in bytes, or None if ``text`` is not a size."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * 1024 ** " KMGTPE".index(match[2].upper() or " ")) if match else None
