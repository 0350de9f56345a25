"""Delete connections that the kernel tracks in this thread's network namespace (linux/nfnetlink_conntrack.h).

This module does not use pyroute2, which decodes every field of every entry. That takes seconds if a guest has opened
thousands of connections.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_NETLINK_NETFILTER = 12
_CTNETLINK = 1 << 8
_GET, _DELETE = _CTNETLINK | 1, _CTNETLINK | 2
_REQUEST, _DUMP = 1, 0x300
_ERROR, _DONE = 2, 3
_NESTED = 0x8000
_TUPLE_ORIG, _FILTER = 1, 25
_TUPLE_IP, _IP_V4_SRC, _FILTER_ORIG_FLAGS, _BY_SOURCE = 1, 1, 1, 1
_ATTRIBUTES_OFFSET = 20
"""Offset of the attributes in a message, after the netlink and nfnetlink headers."""
_SOURCE_SLICE = slice(12, 16)
"""Position of the source address in a tuple attribute, after three attribute headers."""
_DELETE_BATCH_SIZE = 64
_REPLY_TIMEOUT_SECONDS = 10.0


def delete_connections(source: str) -> int:
    """Delete all tracked connections opened from the address ``source``. Returns their number. Raises OSError."""
    address = socket.inet_aton(source)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(_REPLY_TIMEOUT_SECONDS)
        netlink.bind((0, 0))
        attributes = _encode_attribute(
            _TUPLE_ORIG | _NESTED, _encode_attribute(_TUPLE_IP | _NESTED, _encode_attribute(_IP_V4_SRC, address))
        )
        # Kernels before 5.8 ignore the filter and list everything.
        attributes += _encode_attribute(
            _FILTER | _NESTED, _encode_attribute(_FILTER_ORIG_FLAGS, struct.pack("=I", _BY_SOURCE))
        )
        netlink.send(_encode_message(_GET, _REQUEST | _DUMP, attributes))
        entries = [entry for entry in _list_entries(netlink) if entry[_SOURCE_SLICE] == address]
        for first in range(0, len(entries), _DELETE_BATCH_SIZE):
            batch = entries[first : first + _DELETE_BATCH_SIZE]
            # The kernel deletes the entries before this call returns. It replies only for entries that have timed out.
            netlink.send(b"".join(_encode_message(_DELETE, _REQUEST, entry) for entry in batch))
    return len(entries)


def _list_entries(netlink: socket.socket) -> Iterator[bytes]:
    """Receive a dump and yield the original-tuple attribute of each entry."""
    while True:
        data = netlink.recv(1 << 18)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                error_number = -struct.unpack_from("=i", data, 16)[0]
                raise OSError(error_number, "the kernel cannot list its tracked connections")
            size, attribute = struct.unpack_from("=HH", data, _ATTRIBUTES_OFFSET)
            if attribute == _TUPLE_ORIG | _NESTED:  # This attribute always comes first.
                yield data[_ATTRIBUTES_OFFSET : _ATTRIBUTES_OFFSET + size]
            data = data[(length + 3) & ~3 :]


def _encode_message(kind: int, flags: int, attributes: bytes) -> bytes:
    return (
        struct.pack("=IHHIIBBH", _ATTRIBUTES_OFFSET + len(attributes), kind, flags, 0, 0, socket.AF_INET, 0, 0)
        + attributes
    )


def _encode_attribute(kind: int, payload: bytes) -> bytes:
    """Encode an attribute. The length of ``payload`` must be a multiple of four bytes."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload
