"""Encode and decode packed nvlists: the name-value lists in resume tokens and in the headers of streams.

Encodes to XDR. Decodes XDR and the native format of little-endian machines, which the kernel uses. Supports the types
that these two uses need.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

_NATIVE: Final = 0
_XDR: Final = 1
_LITTLE_ENDIAN: Final = 1
_UNIQUE_NAMES: Final = 1
_BOOLEAN, _UINT64, _STRING, _NVLIST = 1, 8, 9, 19
_PAIR_HEADER_BYTES: Final = 16
_NVLIST_BYTES: Final = 24


def pack(values: Mapping[str, Any]) -> bytes:
    """Encode a mapping. Its values may be int, str, mappings, and None for a name without a value."""
    return bytes([_XDR, _LITTLE_ENDIAN, 0, 0]) + _pack_pairs(values)


def _pack_pairs(values: Mapping[str, Any]) -> bytes:
    pairs = b"".join(_pack_pair(name, value) for name, value in values.items())
    return struct.pack(">II", 0, _UNIQUE_NAMES) + pairs + bytes(8)


def _pack_pair(name: str, value: Any) -> bytes:
    match value:
        case None:
            kind, count, data, memory_bytes = _BOOLEAN, 0, b"", 0
        case int():
            kind, count, data, memory_bytes = _UINT64, 1, struct.pack(">Q", value), 8
        case str():
            kind, count, data, memory_bytes = _STRING, 1, _pack_text(value), _align(len(value.encode()) + 1, 8)
        case _:
            kind, count, data, memory_bytes = _NVLIST, 1, _pack_pairs(value), _NVLIST_BYTES
    body = _pack_text(name) + struct.pack(">II", kind, count) + data
    memory_bytes += _align(_PAIR_HEADER_BYTES + len(name.encode()) + 1, 8)
    return struct.pack(">II", 8 + len(body), memory_bytes) + body


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data.ljust(_align(len(data), 4), b"\0")


def _align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def unpack(data: bytes) -> dict[str, Any]:
    """Decode a packed nvlist. Raises ValueError."""
    try:
        if data[0] == _XDR:
            return _unpack_xdr(memoryview(data)[4:])[0]
        if data[0] == _NATIVE and data[1] == _LITTLE_ENDIAN:
            return _unpack_native(data)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"the nvlist is damaged: {error}") from None
    raise ValueError(f"unknown nvlist encoding {data[:2]!r}")


def _unpack_xdr(data: memoryview) -> tuple[dict[str, Any], int]:
    """Return the values, and how many bytes they occupy."""
    values: dict[str, Any] = {}
    position = 8
    while size := struct.unpack_from(">I", data, position)[0]:
        name, offset = _unpack_text(data, position + 8)
        (kind,) = struct.unpack_from(">I", data, offset)
        values[name] = _unpack_value(data[offset + 8 :], kind)
        position += size
    return values, position + 8


def _unpack_value(data: memoryview, kind: int) -> Any:
    if kind == _BOOLEAN:
        return None
    if kind == _UINT64:
        return struct.unpack_from(">Q", data)[0]
    if kind == _STRING:
        return _unpack_text(data, 0)[0]
    if kind == _NVLIST:
        return _unpack_xdr(data)[0]
    raise ValueError(f"unsupported nvlist value type {kind}")


def _unpack_text(data: memoryview, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from(">I", data, position)
    start = position + 4
    return bytes(data[start : start + length]).decode(), start + _align(length, 4)


def _unpack_native(data: bytes) -> dict[str, Any]:
    values: dict[str, Any] = {}
    position = 12
    while size := struct.unpack_from("<i", data, position)[0]:
        _, name_size, _, _, kind = struct.unpack_from("<ihhii", data, position)
        name_start = position + _PAIR_HEADER_BYTES
        name = data[name_start : name_start + name_size - 1].decode()
        value = data[position + _align(_PAIR_HEADER_BYTES + name_size, 8) : position + size]
        if kind == _BOOLEAN:
            values[name] = None
        elif kind == _UINT64:
            values[name] = struct.unpack_from("<Q", value)[0]
        elif kind == _STRING:
            values[name] = value.partition(b"\0")[0].decode()
        else:
            raise ValueError(f"unsupported nvlist value type {kind}")
        position += size
    return values
