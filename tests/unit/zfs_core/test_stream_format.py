"""Test what zfs_core reads from streams and writes into them."""

from __future__ import annotations

import os
import struct
import tempfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zfs_core import nvlist, stream_format

_value_strategy = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda children: st.dictionaries(st.from_regex(r"[a-z:]{1,12}", fullmatch=True), children, max_size=4),
    max_leaves=12,
)


def _make_begin_record(flags: int = 0, version_info: int = 0x11, from_guid: int = 0) -> bytes:
    name = b"tank/a@b".ljust(256, b"\0")
    return struct.pack("<IIQQQIIQQ256s", 0, 0, 0x2F5BACBAC, version_info, 7, 2, flags, 99, from_guid, name)


@settings(max_examples=20)
@given(st.dictionaries(st.from_regex(r"[a-z:]{1,12}", fullmatch=True), _value_strategy, max_size=5))
def test_a_packed_nvlist_can_be_unpacked(values: dict[str, object]) -> None:
    assert nvlist.unpack(nvlist.pack(values)) == values


def test_nvlists_of_the_kernel_can_be_unpacked() -> None:
    """The kernel packs the values of a resume token as it stores them in memory."""

    def make_pair(name: bytes, kind: int, value: bytes) -> bytes:
        start = struct.pack("<hhii", len(name) + 1, 0, 1, kind) + name + b"\0"
        start += bytes(-(4 + len(start)) % 8)
        return struct.pack("<i", 4 + len(start) + len(value)) + start + value

    data = bytes([0, 1, 0, 0]) + struct.pack("<II", 0, 1) + make_pair(b"object", 8, struct.pack("<Q", 5))
    data += make_pair(b"toname", 9, b"tank/a@b".ljust(16, b"\0")) + make_pair(b"rawok", 1, b"") + bytes(4)
    assert nvlist.unpack(data) == {"object": 5, "toname": "tank/a@b", "rawok": None}
    for damaged_data in (b"", b"\7", data[:30], bytes([1, 1, 0, 0, 9])):
        with pytest.raises(ValueError, match="nvlist"):
            nvlist.unpack(damaged_data)


def test_a_resume_token_contains_where_to_resume() -> None:
    values = {"object": 3, "offset": 1 << 40, "toname": "tank/a@b", "compressok": None}
    token = stream_format.make_resume_token(values)
    assert stream_format.parse_resume_token(token) == values
    version, checksum, size, payload = token.split("-")
    data = bytes.fromhex(payload)
    words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
    assert (version, int(checksum, 16), int(size, 16)) == ("1", sum(words), len(zlib.decompress(data)))
    for damaged_token in (f"2-{token[2:]}", token[:-4], f"1-0-7-{payload}", "1-2"):
        with pytest.raises(ValueError, match=r"token|unpack"):
            stream_format.parse_resume_token(damaged_token)


def test_the_begin_record_of_a_file_is_read_without_moving_its_position() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"before" + _make_begin_record(flags=1, version_info=1 | (1 << 20) << 2, from_guid=98) + b"rest")
        file.seek(6)
        record = stream_format.peek_begin_record(file.fileno())
        assert record is not None and file.tell() == 6
        assert (record.to_name, record.to_guid, record.from_guid) == (b"tank/a@b", 99, 98)
        assert record.is_clone and record.is_resuming and not record.is_package
        file.seek(7)
        assert stream_format.peek_begin_record(file.fileno()) is None
    read_fd, write_fd = os.pipe()
    assert stream_format.peek_begin_record(read_fd) is None
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_package_contains_the_properties_to_receive() -> None:
    record = stream_format.parse_begin_record(_make_begin_record())
    assert record is not None
    package_begin, package_end = stream_format.make_package(record, {"atime": 0, "a:b": "c"})
    package = stream_format.parse_begin_record(package_begin)
    assert package is not None and package.is_package and package.to_name == b"tank/a@b"
    header = nvlist.unpack(package_begin[312 : 312 + package.payload_bytes])
    assert header["fss"]["0x63"]["props"] == {"atime": 0, "a:b": "c"}
    assert header["fss"]["0x63"]["snaps"] == {"b": 99} and "not_recursive" in header
    end = package_begin[312 + package.payload_bytes :]
    assert (len(end), end[:8], package_end[:8]) == (312, struct.pack("<II", 5, 0), struct.pack("<II", 5, 0))
    assert struct.unpack_from("<4Q", end, 8) == stream_format._fletcher4(package_begin[: 312 + package.payload_bytes])


def _compute_checksum(byte_order: str, data: bytes) -> tuple[int, ...]:
    sums = [0] * 4
    for (word,) in struct.iter_unpack(f"{byte_order}I", data):
        for index, value in enumerate((word, *sums[:3])):
            sums[index] += value if index == 0 else sums[index - 1]
    return tuple(value % 2**64 for value in sums)


def _make_stream(byte_order: str, contents: bytes, flags: int = 0, from_guid: int = 5) -> bytes:
    name = b"tank/a@b".ljust(256, b"\0")
    fields = (0, 0, 0x2F5BACBAC, 0x11, 7, 2, flags, 99, from_guid, name)
    data = struct.pack(f"{byte_order}IIQQQIIQQ256s", *fields) + contents
    end = struct.pack(f"{byte_order}II4Q", 5, 0, *_compute_checksum(byte_order, data))
    return data + end.ljust(312, b"\0")


@settings(max_examples=20)
@given(st.sampled_from("<>"), st.binary(max_size=400).map(lambda data: data[: len(data) // 4 * 4]), st.booleans())
def test_an_incremental_stream_is_marked_as_that_of_a_clone(byte_order: str, contents: bytes, is_clone: bool) -> None:
    """The result is what zfs-fuse would have sent for a clone, and its checksum is right."""
    with tempfile.TemporaryFile() as file:
        file.write(b"before" + _make_stream(byte_order, contents, flags=is_clone))
        file.seek(6)
        stream_format.mark_as_clone(file.fileno())
        assert file.tell() == 6
        assert file.read() == _make_stream(byte_order, contents, flags=1)


@pytest.mark.parametrize(
    "stream",
    [
        b"x" * 5000,
        _make_stream("<", b"", from_guid=0),
        _make_stream("<", b"")[:312],
        _make_stream("<", b"word" * 200)[:-400],
        _make_stream("<", b"word" * 200) + b"x",
    ],
    ids=["something else", "a whole stream", "only the beginning", "cut off", "with more data"],
)
def test_any_other_stream_is_not_marked(stream: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(stream)
        file.seek(0)
        with pytest.raises(ValueError, match="the stream is"):
            stream_format.mark_as_clone(file.fileno())
        assert file.read() == stream
