"""Parse the output of the ``zfs`` command, in formats that zfs-fuse 0.7 and OpenZFS 2.2 to 2.4 share.

These are ``zfs list -H -o …`` (columns separated by tabs) and ``zfs get -Hp -o name,property,value,source`` (a user
property's value may contain tabs and line breaks).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from zfs_core.exceptions import ZFSOutputError
from zfs_core.options import NATIVE_PROPERTY_NAME, USER_PROPERTY_NAME

_SOURCE = re.compile(r"local|default|received|temporary|none|-|inherited from .+", re.DOTALL)


class Property(NamedTuple):
    """One line of ``zfs get``. ``value`` is ``-`` if the property has no value."""

    name: str
    prop: str
    value: str
    source: str

    @property
    def is_local(self) -> bool:
        """Return whether the property was set on this dataset or snapshot itself, by a command or a received stream."""
        return self.source in ("local", "received")

    @property
    def number(self) -> int:
        """Return the value as an integer; ``-`` and ``none`` count as 0. Raises ZFSOutputError for other text."""
        if self.value in ("-", "none"):
            return 0
        try:
            return int(self.value)
        except ValueError:
            raise ZFSOutputError(self.name).with_details(f"{self.prop} is {self.value!r}, not a number") from None

    @property
    def is_on(self) -> bool:
        return self.value in ("yes", "on")


def parse_table(text: str, column_count: int) -> list[tuple[str, ...]]:
    """Parse the output of ``zfs list -H``. Raises ZFSOutputError for an incomplete line or a wrong column count."""
    rows = []
    for line in _split_lines(text):
        row = tuple(line.split("\t"))
        if len(row) != column_count or not row[0]:
            raise ZFSOutputError(None).with_details(f"expected {column_count} columns in {line[:200]!r}")
        rows.append(row)
    return rows


def parse_get(text: str) -> list[Property]:
    """Parse ``zfs get -Hp -o name,property,value,source`` output. Raises ZFSOutputError if a line is incomplete."""
    properties: list[Property] = []
    pending_text: str | None = None
    for line in _split_lines(text):
        pending_text = line if pending_text is None else f"{pending_text}\n{line}"
        fields = pending_text.split("\t")
        if len(fields) >= 3 and not _is_start_of_line(fields[0], fields[1]):
            break
        if len(fields) >= 4 and _SOURCE.fullmatch(fields[-1]):
            properties.append(Property(fields[0], fields[1], "\t".join(fields[2:-1]), fields[-1]))
            pending_text = None
    if pending_text is not None:
        raise ZFSOutputError(None).with_details(f"expected name, property, value and source in {pending_text[:200]!r}")
    return properties


def _is_start_of_line(name: str, prop: str) -> bool:
    """Return whether the fields start a line of output, and do not continue a value that contains line breaks."""
    return bool(
        name and "\n" not in name and (USER_PROPERTY_NAME.fullmatch(prop) or NATIVE_PROPERTY_NAME.fullmatch(prop))
    )


def _split_lines(text: str) -> list[str]:
    if not text:
        return []
    if not text.endswith("\n"):
        raise ZFSOutputError(None).with_details(f"the output ends in the middle of a line: {text[-80:]!r}")
    return text[:-1].split("\n")


def check_complete(properties: Iterable[Property], names: Iterable[str], props: Iterable[str]) -> None:
    """Raise ZFSOutputError unless every dataset has every property.

    This detects output that was truncated between two lines.
    """
    present_pairs = {(item.name, item.prop) for item in properties}
    required_props = list(props)
    for name in names:
        for prop in required_props:
            if (name, prop) not in present_pairs:
                raise ZFSOutputError(name).with_details(f"the output lacks the {prop} property")
