"""Reading and writing the texts of the ``zfs`` command: one way for zfs-fuse 0.7 and OpenZFS 2.2 to 2.4.

Only forms that all of them have are read: ``zfs list -H -o …`` (columns separated by a tab) and
``zfs get -Hp -o name,property,value,source`` (a user property's value may hold tabs and line ends of its own).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sandbox_gateway.hosts.jail_zfs.zfs_errors import (
    FilesystemNameInvalid,
    NameInvalid,
    NameTooLong,
    PropertyInvalid,
    SnapshotNameInvalid,
    ZFSOutputError,
)

NAME_MAX = 255
"""Bytes of a dataset's or snapshot's full name, and of a user property's name."""
VALUE_MAX = 8191
"""Bytes of a user property's value."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_USER_PROPERTY = re.compile(r"[a-z0-9_.+-]*:[a-z0-9_.:+-]*")
_NATIVE_PROPERTY = re.compile(r"[a-z][a-z0-9_]*(@\S+)?")
_SOURCE = re.compile(r"local|default|received|temporary|none|-|inherited from .+", re.DOTALL)


class Property(NamedTuple):
    """One line of ``zfs get``. ``value`` is ``-`` where there is none."""

    name: str
    prop: str
    value: str
    source: str

    @property
    def local(self) -> bool:
        """Set on this very dataset or snapshot (here, or by the stream it came in); not inherited."""
        return self.source in ("local", "received")

    @property
    def number(self) -> int:
        """The value as an integer; ``-`` and ``none`` are 0. Raises ZFSOutputError if it is not one."""
        if self.value in ("-", "none"):
            return 0
        try:
            return int(self.value)
        except ValueError:
            raise ZFSOutputError(self.name).because(f"{self.prop} is {self.value!r}, not a number") from None

    @property
    def yes(self) -> bool:
        return self.value in ("yes", "on")


def parse_table(text: str, columns: int) -> list[tuple[str, ...]]:
    """The rows of ``zfs list -H`` with as many columns. Raises ZFSOutputError for anything else, or half a line."""
    rows = []
    for line in _lines(text):
        row = tuple(line.split("\t"))
        if len(row) != columns or not row[0]:
            raise ZFSOutputError(None).because(f"{columns} columns were expected in {line[:200]!r}")
        rows.append(row)
    return rows


def parse_get(text: str) -> list[Property]:
    """The lines of ``zfs get -Hp -o name,property,value,source``. Raises ZFSOutputError for half a line."""
    found: list[Property] = []
    pending: str | None = None
    for line in _lines(text):
        pending = line if pending is None else f"{pending}\n{line}"
        fields = pending.split("\t")
        if len(fields) >= 3 and not _begins_a_line(fields[0], fields[1]):
            break
        if len(fields) >= 4 and _SOURCE.fullmatch(fields[-1]):
            found.append(Property(fields[0], fields[1], "\t".join(fields[2:-1]), fields[-1]))
            pending = None
    if pending is not None:
        raise ZFSOutputError(None).because(f"name, property, value and source were expected in {pending[:200]!r}")
    return found


def _begins_a_line(name: str, prop: str) -> bool:
    """False where a value that held the end of a line was taken for one: what follows would be misread."""
    return bool(name and "\n" not in name and (_USER_PROPERTY.fullmatch(prop) or _NATIVE_PROPERTY.fullmatch(prop)))


def _lines(text: str) -> list[str]:
    if not text:
        return []
    if not text.endswith("\n"):
        raise ZFSOutputError(None).because(f"it ends in the middle of a line: {text[-80:]!r}")
    return text[:-1].split("\n")


def text_of(name: str | bytes) -> str:
    """libzfs_core has names as bytes; both are taken."""
    if isinstance(name, str):
        return name
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise NameInvalid(repr(name)) from None


def pool_of(name: str) -> str:
    return re.split(r"[/@#]", name, maxsplit=1)[0]


def filesystem_of(name: str) -> str:
    """``pool/a`` of ``pool/a@b``."""
    return name.partition("@")[0]


def existing_name(name: str | bytes) -> str:
    """A name that may be given to the command: whatever ZFS itself may have accepted, but nothing it would misread.

    Raises NameInvalid, NameTooLong.
    """
    text = text_of(name)
    if not text or text.startswith(("-", "/")) or text.endswith("/") or _CONTROL.search(text):
        raise NameInvalid(text)
    if len(text.encode(errors="replace")) > NAME_MAX:
        raise NameTooLong(text)
    return text


def new_filesystem_name(name: str | bytes) -> str:
    """A name for a filesystem to be made: letters, digits, ``_.:-``, no component beginning with ``.:-``."""
    text = existing_name(name)
    if not all(_COMPONENT.fullmatch(part) for part in text.split("/")) or not text[0].isalpha():
        raise FilesystemNameInvalid(text)
    return text


def snapshot_name(name: str | bytes) -> str:
    """``filesystem@snapshot``, for a snapshot that exists."""
    text = existing_name(name)
    filesystem, _, short = text.partition("@")
    if not filesystem or not short or "@" in short or "/" in short:
        raise SnapshotNameInvalid(text)
    return text


def new_snapshot_name(name: str | bytes) -> str:
    text = snapshot_name(name)
    if not _COMPONENT.fullmatch(text.partition("@")[2]):
        raise SnapshotNameInvalid(text)
    return text


def filesystem_name(name: str | bytes) -> str:
    """For a filesystem that exists; refuses a snapshot's name."""
    text = existing_name(name)
    if "@" in text or "#" in text:
        raise FilesystemNameInvalid(text)
    return text


Value = str | bytes | int | bool
Name = str | bytes
Props = Mapping[str, Value] | Mapping[bytes, Value] | None


def property_value(name: str | bytes, value: Value) -> str:
    """``name=value`` for ``-o`` and ``set``; a bool is ``on`` or ``off``. Raises PropertyInvalid."""
    key = property_name(name)
    if isinstance(value, bool):
        text = "on" if value else "off"
    else:
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise PropertyInvalid(key).because("its value is not UTF-8") from None
    size = len(text.encode(errors="surrogatepass"))
    if not text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise PropertyInvalid(key).because("its value is empty or holds what text cannot")
    if size > VALUE_MAX:
        raise PropertyInvalid(key).because(f"its value has {size} bytes, {VALUE_MAX} is the most")
    return f"{key}={text}"


def property_name(name: str | bytes) -> str:
    key = text_of(name)
    if not (_USER_PROPERTY if ":" in key.partition("@")[0] else _NATIVE_PROPERTY).fullmatch(key) or key[0] == "-":
        raise PropertyInvalid(key)
    if len(key) > NAME_MAX:
        raise PropertyInvalid(key).because(f"a property's name has at most {NAME_MAX} bytes")
    return key


def property_options(props: Props) -> list[str]:
    """``["-o", "a=b", …]``."""
    return [word for key, value in (props or {}).items() for word in ("-o", property_value(key, value))]


def check_complete(found: Iterable[Property], names: Iterable[str], props: Iterable[str]) -> None:
    """Raises ZFSOutputError unless every dataset has every property: output that ended at a line's end is not whole."""
    seen = {(item.name, item.prop) for item in found}
    wanted = list(props)
    for name in names:
        for prop in wanted:
            if (name, prop) not in seen:
                raise ZFSOutputError(name).because(f"{prop} was asked for and is not there")
