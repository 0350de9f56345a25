"""Use ctnetlink to delete pf's states, which are entries in the kernel's connection tracking table."""

from __future__ import annotations

import _socket
import struct

from shim import net

NETFILTER = 12
# linux/netfilter/nfnetlink_conntrack.h
GET, DELETE = 0x0101, 0x0102
TUPLE_ORIG, TUPLE_IP = 1, 1


def get_network_bits(address: bytes, prefix: int) -> int:
    size = len(address) * 8
    return int.from_bytes(address, "big") >> (size - prefix)


class AddressRange:
    """An address or network, as given on a command line."""

    def __init__(self, text: str) -> None:
        """Parse an address or network. Raises OSError if it is invalid."""
        address_text, slash, length = text.partition("/")
        self.family = _socket.AF_INET6 if ":" in address_text else _socket.AF_INET
        self.address = _socket.inet_pton(self.family, address_text)
        self.prefix = int(length) if slash and length.isdigit() else len(self.address) * 8

    def contains(self, address: bytes) -> bool:
        is_same_family = len(address) == len(self.address)
        return is_same_family and get_network_bits(address, self.prefix) == get_network_bits(self.address, self.prefix)


def delete_states(source: AddressRange, target: AddressRange | None) -> int:
    """Delete the states of connections from ``source`` to ``target`` (None: to any address). Returns their number."""
    netlink = net.NetlinkSocket(NETFILTER)
    header = struct.pack("=BBH", source.family, 0, 0)
    keys = (1, 2) if source.family == _socket.AF_INET else (3, 4)
    count = 0
    for _, body in netlink.request(GET, net.DUMP, header):
        connection_tuple = net.parse_attributes(body[4:]).get(TUPLE_ORIG, b"")
        endpoints = net.parse_attributes(net.parse_attributes(connection_tuple).get(TUPLE_IP, b""))
        if not source.contains(endpoints.get(keys[0], b"")) or (
            target and not target.contains(endpoints.get(keys[1], b""))
        ):
            continue
        try:
            netlink.request(DELETE, net.ACK, header + net.pack_attribute(TUPLE_ORIG | net.NESTED, connection_tuple))
        except FileNotFoundError:
            continue  # The connection has just been closed.
        count += 1
    netlink.socket.close()
    return count
