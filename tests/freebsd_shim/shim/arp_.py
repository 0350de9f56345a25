"""arp(8), with the messages of usr.sbin/arp/arp.c and arp_netlink.c of FreeBSD 14."""

from __future__ import annotations

import _socket
import errno

from shim import base, net
from shim.ifconfig_ import parse_ether_address

USAGE = """\
usage: arp [-n] [-i interface] hostname
       arp [-n] [-i interface] -a
       arp -d hostname [pub]
       arp -d [-i interface] -a
       arp -s hostname ether_addr [temp] [reject | blackhole] [pub [only]]
       arp -S hostname ether_addr [temp] [reject | blackhole] [pub [only]]
       arp -f filename"""
MAX_AGE_SECONDS = 1200  # net.link.ether.inet.max_age


def main(argv: list[str]) -> int:
    try:
        options, arguments = base.getopt(argv, "andfsSi:")
    except base.BadOption:
        raise base.usage(USAGE) from None
    values = dict(options)
    functions = [letter for letter, _ in options if letter in "dfsS"]
    if len(functions) > 1:  # SETFUNC()
        raise base.usage(USAGE)
    function = functions[0] if functions else ""
    if function == "f" or (function == "d" and "a" in values):
        raise base.unsupported(f"-{function}" + (" -a" if function == "d" else ""))
    netlink = net.NetlinkSocket()
    interface = 0
    if "i" in values:
        if function:
            raise base.errx(1, "-i not applicable to this operation")
        link = netlink.find_link(values["i"])
        if link is None:
            raise base.errx(1, f"interface {values['i']} does not exist")
        interface = link.index
    if function in ("s", "S"):
        if not 2 <= len(arguments) <= 6:
            raise base.usage(USAGE)
        if function == "S":
            delete_entry(netlink, arguments[0])
        return set_entry(netlink, arguments)
    if len(arguments) != (0 if "a" in values else 1):
        raise base.usage(USAGE)
    if function == "d":
        return delete_entry(netlink, arguments[0])
    if "n" not in values:
        raise base.unsupported("host names: use -n")
    if "a" in values:
        print_entries(netlink, interface, b"")
        return 0
    count = print_entries(netlink, interface, parse_host(arguments[0]))
    if count == 0:
        place = f" on {values['i']}" if interface else ""
        base.print_line(f"{arguments[0]} ({arguments[0]}) -- no entry{place}")
    return 1 if count == 0 else 0


def parse_host(text: str) -> bytes:
    """Parse an IPv4 address. See getaddr()."""
    try:
        return bytes(_socket.inet_pton(_socket.AF_INET, text))
    except (OSError, ValueError):
        raise base.unsupported(f"the host {text} (no address)") from None


def find_interface(netlink: net.NetlinkSocket, address: bytes) -> int:
    """Return the index of the Ethernet interface whose network contains the address, or 0. See guess_ifindex()."""
    route = netlink.look_up_route(_socket.AF_INET, address)
    if route is None or 5 in route[0]:  # The address is not on a directly connected network.
        return 0
    index = int.from_bytes(route[0].get(4, b""), "little")
    link = next(link for link in netlink.list_links() if link.index == index)
    return 0 if link.flags & net.IFF_LOOPBACK else index


def set_entry(netlink: net.NetlinkSocket, arguments: list[str]) -> int:
    """Add or replace a permanent entry. See set() and set_nl()."""
    address = parse_host(arguments[0])
    for word in arguments[2:]:
        if word in ("temp", "pub", "only", "blackhole", "reject"):
            raise base.unsupported(word)
        base.warnx(f"Invalid parameter '{word}'")
        raise base.usage(USAGE)
    mac = parse_ether_address(arguments[1])
    if mac is None:
        base.warnx(f"invalid Ethernet address '{arguments[1]}'")
        return 1
    if any(each.address == address for each in netlink.list_addresses()):
        raise base.unsupported("an entry for an address of the host")
    index = find_interface(netlink, address)
    if index == 0:
        base.warnx(f"delete: cannot locate {arguments[0]}")  # set_nl() prints "delete", and succeeds.
        return 0
    try:
        netlink.change_neighbour(net.NEWNEIGH, index, address, mac)
    except OSError as error:
        base.warn(f"set {arguments[0]}", error.errno or 0)
        return 1
    return 0


def delete_entry(netlink: net.NetlinkSocket, host: str) -> int:
    """Delete an entry. See delete_nl() and rtnl_handle_delneigh()."""
    address = parse_host(host)
    if any(each.address == address for each in netlink.list_addresses()):
        base.warn(f"delete {host}", errno.EPERM)
        return 1
    index = find_interface(netlink, address)
    if index == 0:
        base.warnx(f"delete: cannot locate {host}")
        return 0
    if not any(each.index == index and each.address == address for each in netlink.list_neighbours()):
        base.warn(f"delete {host}", errno.ENOENT)
        return 1
    try:
        netlink.change_neighbour(net.DELNEIGH, index, address)
    except OSError as error:
        base.warn(f"delete {host}", error.errno or 0)
        return 1
    base.print_line(f"{host} ({_socket.inet_ntop(_socket.AF_INET, address)}) deleted")
    return 0


def print_entries(netlink: net.NetlinkSocket, interface: int, address: bytes) -> int:
    """Print the entries of an interface (0: all) and address (empty: all). Returns their number. See print_entry()."""
    neighbours, own_addresses = netlink.list_neighbours(), netlink.list_addresses()
    count = 0
    for link in netlink.list_links():
        if link.flags & net.IFF_LOOPBACK or (interface and link.index != interface):
            continue
        entries = [
            (each.address, link.mac, "permanent")
            for each in own_addresses
            if each.index == link.index and each.family == _socket.AF_INET
        ]
        entries += [
            (each.address, each.mac or "(incomplete)", format_expiry(each))
            for each in neighbours
            if each.index == link.index
        ]
        kind = "bridge" if link.driver == "bridge" else "ethernet"
        for entry_address, mac, expiry in entries:
            if not address or address == entry_address:
                text = _socket.inet_ntop(_socket.AF_INET, entry_address)
                base.print_line(f"? ({text}) at {mac} on {link.name} {expiry} [{kind}]")
                count += 1
    return count


def format_expiry(neighbour: net.Neighbour) -> str:
    if neighbour.state & net.NUD_PERMANENT:
        return "permanent"
    return f"expires in {MAX_AGE_SECONDS - neighbour.age} seconds"
