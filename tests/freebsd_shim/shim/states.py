"""pf's states in the kernel's connection tracking, by ctnetlink: finds them by their ends, and deletes them."""

from __future__ import annotations

import _socket
import struct

from shim import net

NETFILTER = 12
# linux/netfilter/nfnetlink_conntrack.h
GET, DELETE = 0x0101, 0x0102
TUPLE_ORIG, TUPLE_IP = 1, 1


def masked(address: bytes, prefix: int) -> int:
    size = len(address) * 8
    return int.from_bytes(address, "big") >> (size - prefix)


class Place:
    """An address or network from a command line."""

    def __init__(self, text: str) -> None:
        """Raises OSError for an invalid one."""
        plain, slash, length = text.partition("/")
        self.family = _socket.AF_INET6 if ":" in plain else _socket.AF_INET
        self.address = _socket.inet_pton(self.family, plain)
        self.prefix = int(length) if slash and length.isdigit() else len(self.address) * 8

    def holds(self, address: bytes) -> bool:
        same = len(address) == len(self.address)
        return same and masked(address, self.prefix) == masked(self.address, self.prefix)


def kill(source: Place, target: Place | None) -> int:
    """Delete the connections from ``source`` (and to ``target``); returns their number."""
    conversation = net.Net(NETFILTER)
    header = struct.pack("=BBH", source.family, 0, 0)
    keys = (1, 2) if source.family == _socket.AF_INET else (3, 4)
    killed = 0
    for _, body in conversation.ask(GET, net.DUMP, header):
        tuple_ = net.attributes(body[4:]).get(TUPLE_ORIG, b"")
        ends = net.attributes(net.attributes(tuple_).get(TUPLE_IP, b""))
        if not source.holds(ends.get(keys[0], b"")) or (target and not target.holds(ends.get(keys[1], b""))):
            continue
        try:
            conversation.ask(DELETE, net.ACK, header + net.attribute(TUPLE_ORIG | net.NESTED, tuple_))
        except FileNotFoundError:
            continue  # it has just ended
        killed += 1
    conversation.socket.close()
    return killed
