"""Delete connections that the kernel tracks in this thread's network namespace (linux/nfnetlink_conntrack.h).

pyroute2 is not used, because it decodes every field of every entry, which takes seconds if a guest created thousands.
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
_ATTRIBUTES = 20
"""The offset of attributes in a message: after the netlink and nfnetlink headers."""
_SOURCE = slice(12, 16)
"""The source address in a tuple attribute, after three attribute headers."""
_DELETED_AT_ONCE = 64
_SECONDS = 10.0


def forget_connections(source: str) -> int:
    """Delete all tracked connections that ``source`` opened, and return their number. Raises OSError."""
    address = socket.inet_aton(source)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(_SECONDS)
        netlink.bind((0, 0))
        wanted = _attribute(_TUPLE_ORIG | _NESTED, _attribute(_TUPLE_IP | _NESTED, _attribute(_IP_V4_SRC, address)))
        # Kernels before 5.8 ignore the filter and list everything.
        wanted += _attribute(_FILTER | _NESTED, _attribute(_FILTER_ORIG_FLAGS, struct.pack("=I", _BY_SOURCE)))
        netlink.send(_message(_GET, _REQUEST | _DUMP, wanted))
        found = [tuple_ for tuple_ in _list_entries(netlink) if tuple_[_SOURCE] == address]
        for first in range(0, len(found), _DELETED_AT_ONCE):
            batch = found[first : first + _DELETED_AT_ONCE]
            # The kernel deletes the entries before this call returns. It answers only for entries that have timed out.
            netlink.send(b"".join(_message(_DELETE, _REQUEST, tuple_) for tuple_ in batch))
    return len(found)


def _list_entries(netlink: socket.socket) -> Iterator[bytes]:
    """Yield the attribute with the original tuple of each entry of a dump."""
    while True:
        data = netlink.recv(1 << 18)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, 16)[0]
                raise OSError(number, "the kernel cannot list its tracked connections")
            size, attribute = struct.unpack_from("=HH", data, _ATTRIBUTES)
            if attribute == _TUPLE_ORIG | _NESTED:  # This attribute is always the first.
                yield data[_ATTRIBUTES : _ATTRIBUTES + size]
            data = data[(length + 3) & ~3 :]


def _message(kind: int, flags: int, attributes: bytes) -> bytes:
    return struct.pack("=IHHIIBBH", _ATTRIBUTES + len(attributes), kind, flags, 0, 0, socket.AF_INET, 0, 0) + attributes


def _attribute(kind: int, content: bytes) -> bytes:
    """Encode an attribute; the length of ``content`` is a multiple of four bytes."""
    return struct.pack("=HH", 4 + len(content), kind) + content
