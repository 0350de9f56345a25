"""Manage interfaces, addresses and routes with rtnetlink, which is faster than starting ``ip``.

The interface's alias stores the data that only FreeBSD has (driver, unit, groups, description), because an alias
survives renames and moves between network namespaces.
"""

from __future__ import annotations

import _socket
import os
import struct

from shim import base

NEWLINK, DELLINK, GETLINK, SETLINK = 16, 17, 18, 19
NEWADDR, DELADDR, GETADDR = 20, 21, 22
NEWROUTE, DELROUTE, GETROUTE = 24, 25, 26
NEWNEIGH, DELNEIGH, GETNEIGH = 28, 29, 30
REQUEST, ACK, DUMP, CREATE, EXCL, REPLACE = 1, 4, 0x300, 0x400, 0x200, 0x100
NESTED = 0x8000

LINK_ADDRESS, LINK_NAME, LINK_MTU, LINK_MASTER, LINK_PROTINFO, LINK_INFO = 1, 3, 4, 10, 12, 18
LINK_NS_PID, LINK_ALIAS, LINK_NS_FD = 19, 20, 28
BRPORT_LEARNING, BRPORT_UNICAST_FLOOD, BRPORT_ISOLATED = 8, 9, 33
AF_BRIDGE = 7
NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP, NUD_PERMANENT = 0x01, 0x20, 0x40, 0x80
NTF_MASTER, NTF_STICKY = 0x04, 0x20

IFF_UP, IFF_LOOPBACK, IFF_RUNNING, IFF_LOWER_UP = 0x1, 0x8, 0x40, 0x10000


def pack_attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + b"\0" * (-len(value) % 4)


def pack_string(kind: int, value: str) -> bytes:
    return pack_attribute(kind, value.encode() + b"\0")


def pack_number(kind: int, value: int) -> bytes:
    return pack_attribute(kind, struct.pack("=I", value))


def parse_attributes(data: bytes) -> dict[int, bytes]:
    values, offset = {}, 0
    while offset + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, offset)
        if size < 4:
            break
        values[kind & 0x3FFF] = data[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    return values


class Link:
    """A Linux interface, with FreeBSD's data from its alias."""

    def __init__(self, index: int, type_: int, flags: int, values: dict[int, bytes]) -> None:
        self.index, self.type, self.flags = index, type_, flags
        self.linux_name = values[LINK_NAME].rstrip(b"\0").decode()
        self.name = "lo0" if self.linux_name == "lo" else self.linux_name
        self.mtu = struct.unpack("=I", values.get(LINK_MTU, b"\0\0\0\0"))[0]
        self.mac = ":".join(f"{byte:02x}" for byte in values.get(LINK_ADDRESS, b""))
        self.master = struct.unpack("=I", values.get(LINK_MASTER, b"\0\0\0\0"))[0]
        self.kind = parse_attributes(values.get(LINK_INFO, b"")).get(1, b"").rstrip(b"\0").decode()
        alias_fields = values.get(LINK_ALIAS, b"").rstrip(b"\0").decode("utf-8", "replace").split("|", 5)
        is_own = len(alias_fields) == 6 and alias_fields[0] == "freebsd_shim"
        self.driver, self.unit, self.end = (
            (alias_fields[1], int(alias_fields[2]), alias_fields[3]) if is_own else ("", -1, "")
        )
        self.groups = [group for group in alias_fields[4].split(",") if group] if is_own else []
        self.description = alias_fields[5] if is_own else ""
        if self.linux_name == "lo":
            self.groups = ["lo"]

    def format_alias(self) -> str:
        return f"freebsd_shim|{self.driver}|{self.unit}|{self.end}|{','.join(self.groups)}|{self.description}"


class Address:
    def __init__(self, index: int, family: int, prefix: int, address: bytes, broadcast: bytes) -> None:
        self.index, self.family, self.prefix, self.address, self.broadcast = index, family, prefix, address, broadcast

    @property
    def text(self) -> str:
        return str(_socket.inet_ntop(self.family, self.address))


class Neighbour:
    """An entry of the ARP table. ``mac`` is empty if it is not known. ``age`` is in seconds."""

    def __init__(self, index: int, state: int, address: bytes, mac: bytes, age: int) -> None:
        self.index, self.state, self.address, self.age = index, state, address, age
        self.mac = ":".join(f"{byte:02x}" for byte in mac)


class NetlinkSocket:
    """A netlink socket for the network namespace in which it was opened."""

    def __init__(self, protocol: int = 0) -> None:
        self.socket = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, protocol)
        self.socket.bind((0, 0))
        self.serial = 0

    def request(self, kind: int, flags: int, payload: bytes) -> list[tuple[int, bytes]]:
        """Send a request and return the messages of the response. Raises OSError with the kernel's errno."""
        self.serial += 1
        header = struct.pack("=IHHII", 16 + len(payload), kind, REQUEST | flags, self.serial, 0)
        self.socket.send(header + payload)
        messages: list[tuple[int, bytes]] = []
        while True:
            data = self.socket.recv(1 << 18)
            offset = 0
            while offset + 16 <= len(data):
                size, type_, _, serial, _ = struct.unpack_from("=IHHII", data, offset)
                body = data[offset + 16 : offset + size]
                offset += (size + 3) & ~3
                if serial != self.serial:
                    continue
                if type_ == 3:  # NLMSG_DONE
                    return messages
                if type_ == 2:  # NLMSG_ERROR
                    code = -struct.unpack_from("=i", body)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    return messages
                messages.append((type_, body))
                if not flags & (DUMP | ACK):
                    return messages

    # links

    def list_links(self) -> list[Link]:
        links = []
        for _, body in self.request(GETLINK, DUMP, struct.pack("=BxHiII", 0, 0, 0, 0, 0)):
            _, type_, index, flags, _ = struct.unpack_from("=BxHiII", body)
            links.append(Link(index, type_, flags, parse_attributes(body[16:])))
        return links

    def find_link(self, name: str) -> Link | None:
        """Return the interface with this FreeBSD name, or None if it does not exist."""
        try:
            messages = self.request(
                GETLINK,
                ACK,
                struct.pack("=BxHiII", 0, 0, 0, 0, 0) + pack_string(LINK_NAME, "lo" if name == "lo0" else name),
            )
        except OSError:
            return None
        _, type_, index, flags, _ = struct.unpack_from("=BxHiII", messages[0][1])
        return Link(index, type_, flags, parse_attributes(messages[0][1][16:]))

    def create_link(self, name: str, kind: str, data: bytes = b"") -> None:
        info = pack_string(1, kind) + (pack_attribute(2 | NESTED, data) if data else b"")
        payload = (
            struct.pack("=BxHiII", 0, 0, 0, 0, 0)
            + pack_string(LINK_NAME, name)
            + pack_attribute(LINK_INFO | NESTED, info)
        )
        self.request(NEWLINK, ACK | CREATE | EXCL, payload)

    def create_veth(self, name: str, peer_name: str) -> None:
        self.create_link(
            name, "veth", pack_attribute(1, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + pack_string(LINK_NAME, peer_name))
        )

    def change_link(self, index: int, *attrs: bytes, is_up: bool | None = None) -> None:
        flags, mask = (0, 0) if is_up is None else (IFF_UP if is_up else 0, IFF_UP)
        self.request(SETLINK, ACK, struct.pack("=BxHiII", 0, 0, index, flags, mask) + b"".join(attrs))

    def set_port_flag(self, index: int, flag: int, value: bool) -> None:
        """Set a BRPORT_… flag of a bridge member."""
        port_attribute = pack_attribute(LINK_PROTINFO | NESTED, pack_attribute(flag, bytes([value])))
        self.request(SETLINK, ACK, struct.pack("=BxHiII", AF_BRIDGE, 0, index, 0, 0) + port_attribute)

    def delete_link(self, index: int) -> None:
        self.request(DELLINK, ACK, struct.pack("=BxHiII", 0, 0, index, 0, 0))

    def list_port_flags(self) -> dict[int, set[int]]:
        """Return the BRPORT_… flags that are set, for the index of each bridge member."""
        flags = {}
        for _, body in self.request(GETLINK, DUMP, struct.pack("=BxHiII", AF_BRIDGE, 0, 0, 0, 0)):
            attributes = parse_attributes(parse_attributes(body[16:]).get(LINK_PROTINFO, b""))
            flags[struct.unpack_from("=BxHi", body)[2]] = {flag for flag, value in attributes.items() if value == b"\1"}
        return flags

    def add_static_bridge_address(self, index: int, mac: bytes) -> None:
        """Bind a MAC address to a bridge member. Without NTF_STICKY, Linux would move it when it learns."""
        header = struct.pack("=BxxxiHBB", AF_BRIDGE, index, NUD_NOARP, NTF_MASTER | NTF_STICKY, 0)
        self.request(NEWNEIGH, ACK | CREATE | REPLACE, header + pack_attribute(2, mac))

    # ARP

    def list_neighbours(self) -> list[Neighbour]:
        neighbours = []
        for _, body in self.request(GETNEIGH, DUMP, struct.pack("=BxxxiHBB", _socket.AF_INET, 0, 0, 0, 0)):
            family, index, state, _, _ = struct.unpack_from("=BxxxiHBB", body)
            attributes = parse_attributes(body[12:])
            confirmed = struct.unpack_from("=I", attributes.get(3, bytes(4)))[0]  # in 1/100 s
            if family == _socket.AF_INET and not state & (NUD_FAILED | NUD_NOARP):
                neighbours.append(
                    Neighbour(index, state, attributes[1], attributes.get(2, b""), min(confirmed // 100, 1199))
                )
        return neighbours

    def change_neighbour(self, kind: int, index: int, address: bytes, mac: bytes = b"") -> None:
        """Add or replace a permanent ARP entry (NEWNEIGH), or delete an entry (DELNEIGH)."""
        flags = ACK | (CREATE | REPLACE if kind == NEWNEIGH else 0)
        header = struct.pack("=BxxxiHBB", _socket.AF_INET, index, NUD_PERMANENT, 0, 0)
        self.request(kind, flags, header + pack_attribute(1, address) + (pack_attribute(2, mac) if mac else b""))

    # addresses

    def list_addresses(self) -> list[Address]:
        addresses = []
        for _, body in self.request(GETADDR, DUMP, struct.pack("=BBBBi", 0, 0, 0, 0, 0)):
            family, prefix, _, _, index = struct.unpack_from("=BBBBi", body)
            attrs = parse_attributes(body[8:])
            addresses.append(Address(index, family, prefix, attrs.get(2) or attrs.get(1, b""), attrs.get(4, b"")))
        return addresses

    def change_address(
        self, kind: int, index: int, family: int, prefix: int, address: bytes, broadcast: bytes = b""
    ) -> None:
        flags = ACK | (CREATE | REPLACE if kind == NEWADDR else 0)
        payload = (
            struct.pack("=BBBBi", family, prefix, 0, 0, index) + pack_attribute(2, address) + pack_attribute(1, address)
        )
        self.request(kind, flags, payload + (pack_attribute(4, broadcast) if broadcast else b""))

    # routes

    def change_route(
        self, kind: int, family: int, destination: bytes, prefix: int, gateway: bytes = b"", index: int = 0
    ) -> list[tuple[int, bytes]]:
        flags = ACK | (CREATE | EXCL if kind == NEWROUTE else 0)
        scope = 253 if index and not gateway else 0
        if kind == DELROUTE:
            scope = 255
        header = struct.pack("=BBBBBBBBI", family, prefix, 0, 0, 254, 4 if kind != DELROUTE else 0, scope, 1, 0)
        payload = header + (pack_attribute(1, destination) if prefix else b"")
        payload += (pack_attribute(5, gateway) if gateway else b"") + (pack_number(4, index) if index else b"")
        return self.request(kind, flags, payload)

    def look_up_route(self, family: int, destination: bytes) -> tuple[dict[int, bytes], int] | None:
        """Return the attributes and prefix of the route that the kernel chooses, or None if no route matches."""
        prefix = len(destination) * 8
        try:
            header = struct.pack("=BBBBBBBBI", family, prefix, 0, 0, 0, 0, 0, 0, 0x2000)  # RTM_F_FIB_MATCH
            messages = self.request(GETROUTE, ACK, header + pack_attribute(1, destination))
        except OSError:
            return None
        return parse_attributes(messages[0][1][12:]), messages[0][1][1]

    def find_default_route(self, family: int) -> dict[int, bytes] | None:
        for _, body in self.request(GETROUTE, DUMP, struct.pack("=BBBBBBBBI", family, 0, 0, 0, 0, 0, 0, 0, 0)):
            if body[0] == family and body[1] == 0 and body[4] in (0, 254) and body[7] == 1:
                return parse_attributes(body[12:])
        return None


def open_own_namespace() -> int:
    """Return a descriptor of this process's network namespace."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def open_netlink(holder: int) -> NetlinkSocket:
    """Open a netlink socket in the network namespace of the process ``holder``, without moving this process there."""
    own_namespace_fd = open_own_namespace()
    target_namespace_fd = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        base.setns(target_namespace_fd, base.CLONE_NEWNET)
        try:
            return NetlinkSocket()
        finally:
            base.setns(own_namespace_fd, base.CLONE_NEWNET)
    finally:
        os.close(target_namespace_fd)
        os.close(own_namespace_fd)
