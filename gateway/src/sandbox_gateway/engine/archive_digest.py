"""Compute the digest of an uploaded archive, as the client has computed it from the files.

The digest is the SHA-256 of, for each entry: its mode with its type in octal digits, its size, the lengths of its path
and of its link's target, each followed by a space; then the path, the target and the contents. Times and owners have no
influence on it.

Only the kinds of entries that the client writes are accepted, so no entry can have two meanings.
"""

from __future__ import annotations

import hashlib
import re
import stat
from tarfile import BLOCKSIZE

from sandbox_gateway.errors import Invalid

_MAX_EXTENDED_HEADER_BYTES = 64 << 10
_MAX_MODE = 0o7777
_MODE, _SIZE, _CHECKSUM = slice(100, 108), slice(124, 136), slice(148, 156)
_NAME, _KIND, _TARGET, _PREFIX = slice(0, 100), slice(156, 157), slice(157, 257), slice(345, 500)
_OCTAL_PATTERN = re.compile(rb"([0-7]+)[ \0]*")
_DECIMAL_PATTERN = re.compile(rb"([0-9]{1,18})")
_RECORD_PATTERN = re.compile(rb"([1-9][0-9]{0,5}) ([a-z]+)=")
_EXTENDED_KIND, _FILE_KIND, _LINK_KIND, _DIRECTORY_KIND = b"x", b"0", b"2", b"5"
_TYPES = {_FILE_KIND: stat.S_IFREG, _LINK_KIND: stat.S_IFLNK, _DIRECTORY_KIND: stat.S_IFDIR}
_KEYWORDS = frozenset({b"path", b"linkpath", b"size", b"mtime", b"hdrcharset"})
_ZEROS = bytes(BLOCKSIZE)


class ArchiveHasher:
    """Computes the digest of a tar archive that arrives in pieces. Keeps only headers in memory."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._buffer = bytearray()
        self._remaining = 0
        """The bytes of the current entry's contents that have not arrived yet."""
        self._padding = 0
        """The bytes between these contents and the next header."""
        self._extended_header: dict[bytes, bytes] = {}
        self._zero_blocks = 0

    def feed(self, data: bytes) -> None:
        """Add a piece. Raises Invalid if the archive is damaged, or contains an entry that no client writes."""
        view = memoryview(data)
        while view:
            if self._remaining:
                piece = view[: self._remaining]
                self._hasher.update(piece)
                self._remaining -= len(piece)
            elif self._padding:
                piece = view[: self._padding]
                self._padding -= len(piece)
            else:
                piece = view[: self._get_header_size() - len(self._buffer)]
                self._buffer += piece
                if len(self._buffer) == self._get_header_size():
                    self._read_header()
            view = view[len(piece) :]

    def compute(self) -> str:
        """Return the digest. Raises Invalid if the archive has not arrived completely."""
        if self._zero_blocks < 2 or self._buffer:
            raise _create_damage_error("it is not complete")
        return self._hasher.hexdigest()

    def _get_header_size(self) -> int:
        """Return the size of the header that begins in the buffer, with its extended header."""
        if len(self._buffer) < BLOCKSIZE or self._buffer[_KIND] != _EXTENDED_KIND:
            return BLOCKSIZE
        size = _read_number(self._buffer[_SIZE])
        if size > _MAX_EXTENDED_HEADER_BYTES:
            raise _create_damage_error(f"it contains an extended header of {size} bytes")
        return BLOCKSIZE + size + -size % BLOCKSIZE

    def _read_header(self) -> None:
        header, contents = bytes(self._buffer[:BLOCKSIZE]), bytes(self._buffer[BLOCKSIZE:])
        self._buffer.clear()
        if header == _ZEROS:
            self._zero_blocks += 1
            if self._extended_header:
                raise _create_damage_error("an extended header belongs to no entry")
            return
        if self._zero_blocks:
            raise _create_damage_error("it contains data after its end")
        if sum(header) - sum(header[_CHECKSUM]) + 8 * ord(" ") != _read_number(header[_CHECKSUM]):
            raise _create_damage_error("the checksum of a header does not match")
        kind = header[_KIND]
        if kind == _EXTENDED_KIND:
            if self._extended_header:
                raise _create_damage_error("an entry has two extended headers")
            self._extended_header = _parse_extended_header(contents[: _read_number(header[_SIZE])])
        elif kind in _TYPES:
            self._begin_entry(header, kind)
        else:
            raise _create_damage_error(f"it contains an entry of the type {kind.decode('latin-1')!r}")

    def _begin_entry(self, header: bytes, kind: bytes) -> None:
        if any(header[_PREFIX]):
            raise _create_damage_error("a path is divided into two fields")
        name = self._extended_header.get(b"path", header[_NAME].rstrip(b"\0"))
        target = self._extended_header.get(b"linkpath", header[_TARGET].rstrip(b"\0"))
        mode, size = _read_number(header[_MODE]), _read_number(header[_SIZE])
        if decimal_size := self._extended_header.get(b"size"):
            size = _read_number(decimal_size, _DECIMAL_PATTERN, 10)
        self._extended_header = {}
        if kind == _DIRECTORY_KIND:
            name = name.removesuffix(b"/")
        is_consistent = (kind == _FILE_KIND or not size) and (kind == _LINK_KIND) == bool(target)
        if not name or b"\0" in name + target or mode > _MAX_MODE or not is_consistent:
            raise _create_damage_error("the fields of a header contradict each other")
        self._hasher.update(f"{_TYPES[kind] | mode:o} {size} {len(name)} {len(target)} ".encode() + name + target)
        self._remaining, self._padding = size, -size % BLOCKSIZE


def _parse_extended_header(data: bytes) -> dict[bytes, bytes]:
    """Return the records of an extended header, by keyword. Raises Invalid."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        match = _RECORD_PATTERN.match(data, position)
        end = position + int(match[1]) if match else 0
        if not match or match[2] not in _KEYWORDS or match[2] in records or not match.end() < end <= len(data):
            raise _create_damage_error("an extended header is not valid")
        value, newline = data[match.end() : end - 1], data[end - 1 : end]
        if newline != b"\n":
            raise _create_damage_error("an extended header is not valid")
        records[match[2]] = value
        position = end
    return records


def _read_number(field: bytes | bytearray, pattern: re.Pattern[bytes] = _OCTAL_PATTERN, base: int = 8) -> int:
    match = pattern.fullmatch(field)
    if not match:
        raise _create_damage_error("a header contains a number that is not valid")
    return int(match[1], base)


def _create_damage_error(reason: str) -> Invalid:
    return Invalid(
        f"the archive is damaged, or was not written by sandboxctl or a module: {reason}. Upload the files again"
    )
