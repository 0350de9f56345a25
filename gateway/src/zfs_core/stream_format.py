"""Read and write the parts of a stream that the commands do not handle: its first record, resume tokens and packages.

Each record is 312 bytes long. The first one, the begin record, names the snapshot. A package is a stream with a second
begin record before it, which contains the properties to receive.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zfs_core import nvlist

RECORD_BYTES: Final = 312
_MAGIC: Final = 0x2F5BACBAC
_BEGIN_FORMAT: Final = "IIQQQIIQQ256s"
_BEGIN, _END = 0, 5
_COMPOUND_STREAM: Final = 2
_FILESYSTEM_OBJECTS: Final = 2
_CLONE_FLAG: Final = 1
_RESUMING_FEATURE: Final = 1 << 20
_COMPRESSED_FEATURE: Final = 1 << 22
_RAW_FEATURE: Final = 1 << 24
_CHECKSUM_BYTES: Final = 32
_MAGIC_OFFSET: Final = 8
_FLAGS_OFFSET: Final = 36
_END_CHECKSUM_OFFSET: Final = 8
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True)
class BeginRecord:
    """The first record of a stream."""

    payload_bytes: int
    magic: int
    version_info: int
    creation_time: int
    type: int
    flags: int
    to_guid: int
    from_guid: int
    to_name: bytes

    @property
    def is_clone(self) -> bool:
        """Return whether the stream creates a clone of an existing snapshot."""
        return bool(self.flags & _CLONE_FLAG)

    @property
    def is_resuming(self) -> bool:
        return bool(self.version_info >> 2 & _RESUMING_FEATURE)

    @property
    def is_raw(self) -> bool:
        """Return whether the data are encrypted, as in the sender's pool."""
        return bool(self.version_info >> 2 & _RAW_FEATURE)

    @property
    def is_compressed(self) -> bool:
        """Return whether blocks are compressed, as in the sender's pool. A raw stream says so, too."""
        return bool(self.version_info >> 2 & _COMPRESSED_FEATURE)

    @property
    def is_incremental(self) -> bool:
        return self.from_guid != 0

    @property
    def is_filesystem(self) -> bool:
        return self.type == _FILESYSTEM_OBJECTS

    @property
    def is_package(self) -> bool:
        return self.version_info & 3 == _COMPOUND_STREAM


def parse_begin_record(data: bytes) -> BeginRecord | None:
    """Return the record, or None if the data are not the beginning of a stream."""
    if len(data) < RECORD_BYTES:
        return None
    for byte_order in "<>":
        kind, *fields, name = struct.unpack(byte_order + _BEGIN_FORMAT, data[:RECORD_BYTES])
        if kind == _BEGIN and fields[1] == _MAGIC:
            return BeginRecord(*[*fields, name.partition(b"\0")[0]])
    return None


def peek_begin_record(fd: int) -> BeginRecord | None:
    """Return the begin record at the current position of a file without reading it. Returns None for a pipe."""
    try:
        return parse_begin_record(os.pread(fd, RECORD_BYTES, os.lseek(fd, 0, os.SEEK_CUR)))
    except OSError:
        return None


def mark_as_clone(fd: int) -> None:
    """Change the incremental stream in a file so that ``zfs receive`` of zfs-fuse creates a clone of its base.

    Other versions of ZFS can do so with ``-o origin=``. The file must contain nothing else, and be open for reading and
    writing. Its position stays the same. Does nothing if the stream says so already. Raises ValueError.
    """
    start, size = os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd).st_size
    begin = os.pread(fd, RECORD_BYTES, start)
    record = parse_begin_record(begin)
    end_offset = size - RECORD_BYTES
    end = os.pread(fd, RECORD_BYTES, end_offset)
    if record is None or not record.is_incremental or end_offset < start + RECORD_BYTES:
        raise ValueError("the stream is not incremental")
    if record.is_clone:
        return
    byte_order = "<" if begin[_MAGIC_OFFSET : _MAGIC_OFFSET + 8] == struct.pack("<Q", _MAGIC) else ">"
    if struct.unpack_from(f"{byte_order}I", end)[0] != _END or (end_offset - start) % 4:
        raise ValueError("the stream is incomplete")
    flags = struct.pack(f"{byte_order}I", record.flags | _CLONE_FLAG)
    checksum_format = f"{byte_order}4Q"
    checksum = struct.unpack_from(checksum_format, end, _END_CHECKSUM_OFFSET)
    # The checksum is linear in each word: increasing one word by 1 adds the same values to every stream of this length.
    count = (end_offset - start - _FLAGS_OFFSET) // 4
    differences = 1, count, count * (count + 1) // 2, count * (count + 1) * (count + 2) // 6
    new_checksum = [(a + b) & _MASK for a, b in zip(checksum, differences, strict=True)]
    os.pwrite(fd, flags, start + _FLAGS_OFFSET)
    os.pwrite(fd, struct.pack(checksum_format, *new_checksum), end_offset + _END_CHECKSUM_OFFSET)


def parse_resume_token(token: str) -> dict[str, Any]:
    """Return the content of a dataset's ``receive_resume_token``, such as ``object`` and ``offset``.

    These are arguments of ``lzc_send_resume``. Raises ValueError.
    """
    version, _, size, payload = token.split("-")
    if version != "1":
        raise ValueError(f"the resume token has an unknown version ({version})")
    try:
        packed_nvlist = zlib.decompress(bytes.fromhex(payload))
    except zlib.error as error:
        raise ValueError(f"the resume token is damaged: {error}") from None
    if len(packed_nvlist) != int(size, 16):
        raise ValueError("the resume token is damaged: its size is wrong")
    return nvlist.unpack(packed_nvlist)


def make_resume_token(values: Mapping[str, Any]) -> str:
    """Return a token for ``zfs send -t``."""
    packed_nvlist = nvlist.pack(values)
    payload = zlib.compress(packed_nvlist, 6)
    return f"1-{_fletcher4(payload)[0]:x}-{len(packed_nvlist):x}-{payload.hex()}"


def make_package(begin_record: BeginRecord, props: Mapping[str, int | str]) -> tuple[bytes, bytes]:
    """Return what must be written before and after a stream, so that ``props`` are received with it."""
    name = begin_record.to_name.decode()
    filesystem, _, snapshot = name.partition("@")
    filesystem_values = {
        "name": filesystem,
        "parentfromsnap": 0,
        "props": dict(props),
        "snaps": {snapshot: begin_record.to_guid},
    }
    header = nvlist.pack(
        {
            "tosnap": snapshot,
            "not_recursive": None,
            "fss": {f"0x{begin_record.to_guid:x}": filesystem_values},
        }
    )
    version_info = begin_record.version_info & ~3 | _COMPOUND_STREAM
    begin = struct.pack(
        f"<{_BEGIN_FORMAT}", _BEGIN, len(header), _MAGIC, version_info, 0, 0, 0, 0, 0, begin_record.to_name
    )
    checksum = struct.pack("<4Q", *_fletcher4(begin + header))
    end = struct.pack("<II", _END, 0) + checksum + bytes(RECORD_BYTES - 8 - _CHECKSUM_BYTES)
    last_end = struct.pack("<II", _END, 0) + bytes(RECORD_BYTES - 8)
    return begin + header + end, last_end


def _fletcher4(data: bytes) -> tuple[int, int, int, int]:
    """Return the Fletcher-4 checksum of all complete 32-bit words."""
    a = b = c = d = 0
    for (word,) in struct.iter_unpack("<I", data[: len(data) // 4 * 4]):
        a += word
        b += a
        c += b
        d += c
    return a & _MASK, b & _MASK, c & _MASK, d & _MASK
