"""Check the layers of an image before they are unpacked, without writing anything.

This program runs in its own namespaces with the host's Python and imports only the standard library. Its arguments are
the maximum number of bytes, the maximum number of entries, and the layers, from the lowest to the highest, each as
`gzip:PATH` or `tar:PATH`. It prints a JSON object: `problem` is a sentence about the first layer that cannot be
unpacked safely, or "".

umoci reads layers with Go's archive/tar. Python's tarfile interprets some archives differently, so an entry could hide
from the check. Therefore this program parses headers itself, and refuses every header that is ambiguous.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WHITEOUT_PREFIX = ".wh."
_OVERHEAD_PER_ENTRY = 2048
"""Bytes of headers and padding that an entry may have in an archive, in addition to its contents."""
_MAX_NAME_LENGTH = 4096
_BLOCK = 512
_MAX_EXTENDED_HEADER_BYTES = 1 << 20
"""The maximum size of a long name or an extended header, as in Go."""
_OLD_TYPE, _SPARSE_TYPE, _LONG_NAME_TYPE, _LONG_LINK_TYPE, _PAX_TYPE = b"\0", b"S", b"L", b"K", b"x"
_NUMBERS = {
    "mode": 100,
    "uid": 108,
    "gid": 116,
    "size": 124,
    "mtime": 136,
    "chksum": 148,
    "devmajor": 329,
    "devminor": 337,
}
"""The offsets of the numbers in a header."""
_NUMBER_PATTERN = re.compile(rb" *([0-7]*)[ \0]*")
_PAX_PATTERN = re.compile(rb"([1-9][0-9]{0,6}) ([^=\0]+)=")


class LayerProblem(Exception):
    """A layer cannot be unpacked safely. The message is a predicate, such as "contains the device '/dev/sda'"."""


class TooLarge(LayerProblem):
    """The image does not fit on the template's disk. The message is a complete sentence."""


def check_layers(paths: Sequence[str], max_bytes: int, max_entries: int) -> str:
    """Return what is wrong with the layers, as a sentence, or ""."""
    budget = Budget(max_bytes, max_entries)
    for number, path in enumerate(paths, 1):
        try:
            kind, _, name = path.partition(":")
            with Path(name).open("rb") as file:
                _check_layer(file, kind == "gzip", budget)
        except TooLarge as error:
            return str(error)
        except LayerProblem as error:
            return f"layer {number} of {len(paths)} {error}"
        except MemoryError:
            return f"layer {number} of {len(paths)} has headers that are too large: build the image again"
        except (EOFError, OSError, zlib.error, ValueError, OverflowError) as error:
            return f"layer {number} of {len(paths)} is damaged ({error}): build or fetch the image again"
    return ""


class Budget:
    """The bytes and entries that the layers of an image may still contain."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = self._bytes = max_bytes
        self._max_entries = self._entries = max_entries
        self._stream_bytes = max_bytes + max_entries * _OVERHEAD_PER_ENTRY

    def take_entry(self, size: int, inode_count: int = 1) -> None:
        self._entries -= inode_count
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge(
                f"the image unpacks to more than {self._max_bytes >> 20} MiB, the size of the template's disk: set "
                "'diskSizeMB' to a larger number"
            )
        if self._entries < 0:
            raise TooLarge(
                f"the image contains more than {self._max_entries} files and directories, the most that the template's "
                "disk can hold: set 'diskSizeMB' to a larger number"
            )

    def take_stream(self, size: int) -> None:
        self._stream_bytes -= size
        if self._stream_bytes < 0:
            self.take_entry(self._max_bytes + 1)


class _CountingReader:
    """A stream that takes every byte it reads from the budget."""

    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._budget.take_stream(len(data))
        return data


def _check_layer(file: IO[bytes], is_gzip: bool, budget: Budget) -> None:
    magic = file.read(4)
    file.seek(0)
    if magic == _ZSTD_MAGIC:
        raise LayerProblem("is compressed with zstd, which is not supported: build the image with gzip compression")
    if magic.startswith(_GZIP_MAGIC) != is_gzip:
        raise LayerProblem("is not compressed as its media type says: build the image again")
    stream: IO[bytes] = gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[assignment]
    previous_parts: list[str] = []
    for member in read_members(_CountingReader(stream, budget)):
        parts = check_member(member)
        # umoci creates missing parents. Those of the previous entry exist.
        pairs = zip(parts, previous_parts, strict=False)
        shared_count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        budget.take_entry(member.size if member.isreg() else 0, max(1, len(parts) - shared_count))
        previous_parts = parts


# --- the format ----------------------------------------------------------------------------------------------------


def read_members(reader: _CountingReader) -> Iterator[tarfile.TarInfo]:
    """Yield the entries of an archive, with their names, types, targets and sizes. Raises ValueError if it is damaged.

    The type of a sparse file is `S`.
    """
    extended: dict[bytes, bytes] = {}
    """The contents of the headers before an entry that describe it, keyed by their type."""
    while (block := _read_block(reader)) is not None:
        if not any(block):
            break
        member = _parse_header(block)
        if member.type in (_LONG_NAME_TYPE, _LONG_LINK_TYPE, _PAX_TYPE):
            if member.type in extended:
                raise ValueError("several extended headers of the same type")
            extended[member.type] = _read_extended_header(reader, member.size)
            continue
        _apply_extended_headers(extended, member)
        extended = {}
        yield member
        if member.isreg():
            _skip(reader, -(-member.size // _BLOCK) * _BLOCK)
    if extended:
        raise ValueError("an extended header without an entry")
    while data := reader.read(1 << 20):
        if data.count(0) != len(data):
            raise ValueError("data after the end of the archive")


def _read_block(reader: _CountingReader) -> bytes | None:
    block = _read_exactly(reader, _BLOCK)
    if block and len(block) != _BLOCK:
        raise ValueError("truncated header")
    return block or None


def _read_exactly(reader: _CountingReader, size: int) -> bytes:
    """Return ``size`` bytes, or fewer at the end of the stream."""
    data = b""
    while len(data) < size and (chunk := reader.read(size - len(data))):
        data += chunk
    return data


def _skip(reader: _CountingReader, size: int) -> None:
    while size > 0:
        data = reader.read(min(size, 1 << 20))
        if not data:
            raise ValueError("truncated contents")
        size -= len(data)


def _parse_header(block: bytes) -> tarfile.TarInfo:
    numbers = {
        name: _parse_number(block[offset : offset + (12 if name in ("size", "mtime") else 8)])
        for name, offset in _NUMBERS.items()
    }
    checked_block = block[:148] + b" " * 8 + block[156:]
    unsigned_sum = sum(checked_block)
    # Some old programs add signed bytes, which is checked last because it is slow.
    if numbers["chksum"] != unsigned_sum and numbers["chksum"] != unsigned_sum - 256 * sum(
        byte > 127 for byte in checked_block
    ):
        raise ValueError("bad checksum")
    if numbers["size"] < 0:
        raise ValueError("negative size")
    kind = block[156:157]
    prefix = b""
    if block[257:263] == b"ustar\0" and block[508:] != b"tar\0":
        prefix = _cut(block[345:500])
    elif block[257:265] == b"ustar  \0":
        if any(block[345:500]) and kind != _SPARSE_TYPE:
            raise ValueError("a header of GNU tar with a prefix")
    elif any(block[257:329]) or any(block[345:]):
        raise ValueError("unknown header format")
    member = tarfile.TarInfo()
    member.name = _decode((prefix + b"/" if prefix else b"") + _cut(block[:100]))
    member.linkname = _decode(_cut(block[157:257]))
    member.type, member.size = kind, numbers["size"]
    return member


def _parse_number(field: bytes) -> int:
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big", signed=field[0] == 0xFF)
    if not (match := _NUMBER_PATTERN.fullmatch(field)):
        raise ValueError("bad number")
    return int(match[1] or b"0", 8)


def _read_extended_header(reader: _CountingReader, size: int) -> bytes:
    if size > _MAX_EXTENDED_HEADER_BYTES:
        raise LayerProblem("has headers that are too large: build the image again")
    data = _read_exactly(reader, -(-size // _BLOCK) * _BLOCK)
    if len(data) < size:
        raise ValueError("truncated header")
    return data[:size]


def _apply_extended_headers(extended: dict[bytes, bytes], member: tarfile.TarInfo) -> None:
    records = _parse_pax(extended.get(_PAX_TYPE, b""))
    for key, value in records.items():
        if key in ("path", "linkpath", "uname", "gname") and b"\0" in value:
            raise ValueError(f"NUL in {key}")
    if path := records.get("path"):
        member.name = _decode(path)
    if target := records.get("linkpath"):
        member.linkname = _decode(target)
    if size := records.get("size"):
        if not re.fullmatch(rb"[0-9]{1,18}", size):
            raise ValueError("bad size")
        member.size = int(size)
    if name := _cut(extended.get(_LONG_NAME_TYPE, b"")):
        member.name = _decode(name)
    if target := _cut(extended.get(_LONG_LINK_TYPE, b"")):
        member.linkname = _decode(target)
    if member.isreg() and member.name.endswith("/"):
        if member.type != _OLD_TYPE or member.size:
            raise ValueError("a file with the name of a directory")
        member.type = tarfile.DIRTYPE
    if member.type == _SPARSE_TYPE or any(key.startswith("GNU.sparse.") for key in records):
        member.type = tarfile.GNUTYPE_SPARSE
        member.name = _decode(records.get("GNU.sparse.name", b"")) or member.name


def _parse_pax(data: bytes) -> dict[str, bytes]:
    """Return the records of an extended header."""
    records = {}
    start = 0
    while start < len(data):
        match = _PAX_PATTERN.match(data, start)
        end = start + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ValueError("bad record in an extended header")
        records[_decode(match[2])] = data[match.end() : end - 1]
        start = end
    return records


def _cut(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _decode(text: bytes) -> str:
    return text.decode(errors="surrogateescape")


# --- entries -------------------------------------------------------------------------------------------------------


def check_member(member: tarfile.TarInfo) -> list[str]:
    """Return the components of the name. Raises LayerProblem if an entry of a layer cannot be unpacked safely."""
    name = _quote(member.name)
    parts = _split(member.name, f"contains {name}")
    if member.ischr() or member.isblk():
        raise LayerProblem(
            f"contains the device {name}: remove it from the image, because the sandbox's kernel creates its devices"
        )
    if member.type == _SPARSE_TYPE:
        raise LayerProblem(
            f"contains the sparse file {name}: build the image with a tool that does not store sparse files"
        )
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk() or member.isfifo()):
        raise LayerProblem(f"contains {name}, an entry of an unknown type ({member.type!r}): build the image again")
    if not parts and not member.isdir():
        raise LayerProblem("contains a root that is not a directory: build the image again")
    if member.islnk():
        _split(member.linkname, f"contains the hard link {name} to {_quote(member.linkname)}")
    if len(member.name) > _MAX_NAME_LENGTH or len(member.linkname) > _MAX_NAME_LENGTH:
        raise LayerProblem(f"contains {name}, whose name or target is too long: shorten it")
    _check_whiteout(parts, name)
    return parts


def _split(path: str, subject: str) -> list[str]:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise LayerProblem(f"{subject}, which leads outside the image: build the image again without it")
    return [part for part in path.split("/") if part not in ("", ".")]


def _check_whiteout(parts: Sequence[str], name: str) -> None:
    """Raise LayerProblem for an invalid whiteout. A valid one is the last component and names an entry to remove."""
    for index, part in enumerate(parts):
        if part.startswith(_WHITEOUT_PREFIX):
            target = part.removeprefix(_WHITEOUT_PREFIX)
            is_opaque = part == ".wh..wh..opq"
            if index != len(parts) - 1 or (not is_opaque and (target in ("", ".", "..") or target.startswith(".wh."))):
                raise LayerProblem(f"contains the invalid whiteout {name}: build the image again without it")


def _quote(text: str) -> str:
    return ascii(text[:100])


if __name__ == "__main__":
    max_bytes, max_entries, *paths = sys.argv[1:]
    print(json.dumps({"problem": check_layers(paths, int(max_bytes), int(max_entries))}))
