"""The commands add, delete and get of route(8).

The messages and exit status are copied from sbin/route/{route,route_netlink}.c in FreeBSD 14.
"""

from __future__ import annotations

import _socket
import errno

from shim import base, net, prison

EX_USAGE, EX_DATAERR, EX_NOHOST = 64, 65, 68
# Texts that newroute() uses instead of strerror(3) for some errno values.
ERROR_TEXTS = {
    errno.ESRCH: "not in table",
    errno.EBUSY: "entry in use",
    errno.ENOBUFS: "not enough memory",
    errno.EADDRINUSE: "gateway uses the same route",
    errno.EEXIST: "route already in table",
}


def usage(keyword: str | None) -> SystemExit:
    if keyword is not None:
        base.warnx(f"bad keyword: {keyword}")
    return base.errx(EX_USAGE, "usage: route [-j jail] [-46dnqtv] command [[modifiers] args]")


def main(argv: list[str]) -> int:
    if not argv:
        raise usage(None)
    try:
        options, words = base.getopt(argv, "46nqdtvj:")
    except base.BadOption:
        raise usage(None) from None
    values = dict(options)
    for letter in values:
        if letter not in "4nqj":
            raise base.unsupported(f"-{letter}")
    if "j" in values:
        try:
            netlink = net.open_netlink(prison.find_jail(values["j"])["holder"])
        except prison.JailError:
            raise base.errx(1, "Jail not found") from None
    else:
        netlink = net.NetlinkSocket()
    if not words:
        raise usage(None)
    if words[0] in ("add", "delete", "del"):
        return change_route(netlink, words[0], words[1:], "q" in values)
    if words[0] in ("get", "show"):
        return print_route(netlink, words[1:])
    if words[0] in ("change", "monitor", "flush"):
        raise base.unsupported(words[0])
    raise usage(words[0])


class Request:
    def __init__(self) -> None:
        self.target = self.gateway = self.mask = ""
        self.net = self.host = self.interface = False


def parse_request(words: list[str]) -> Request:
    request, index = Request(), 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-"):
            if not request.target:
                request.target = word
            elif not request.gateway:
                request.gateway = word
            else:
                request.mask, request.net = word, True
        elif word in ("-4", "-inet", "-static"):
            continue
        elif word == "-net":
            request.net = True
        elif word == "-host":
            request.host = True
        elif word in ("-interface", "-iface"):
            request.interface = True
        elif word in ("-netmask", "-gateway", "-dst"):
            if index >= len(words):
                raise usage(None)
            setattr(request, {"-netmask": "mask", "-gateway": "gateway", "-dst": "target"}[word], words[index])
            request.net |= word == "-netmask"
            index += 1
        elif (
            word[1:]
            in (
                "6 inet6 fib ifp ifa reject blackhole mtu weight expire prefixlen lock lockrest genmask nostatic "
                "proto1 proto2 proxy xresolve sticky nostick hopcount recvpipe sendpipe ssthresh rtt rttvar link sa"
            ).split()
        ):
            raise base.unsupported(word)
        else:
            raise usage(word[1:])
    if not request.target:
        base.warnx("destination parameter required")
        raise usage(None)
    return request


def parse_address(text: str) -> bytes:
    """Parse an IPv4 address in any form that inet_aton(3) accepts. FreeBSD also looks up host names. See getaddr()."""
    try:
        return bytes(_socket.inet_aton(text))
    except OSError:
        raise base.errx(EX_NOHOST, f"bad address: {text}") from None


def parse_destination(request: Request) -> tuple[bytes, int, bool]:
    """Return the address, the prefix length, and whether the destination is a host."""
    if request.target == "default":
        return b"\0\0\0\0", 0, False
    text, slash, length = request.target.partition("/")
    target = parse_address(text)
    if slash:
        if not length.isdigit() or int(length) > 32:
            raise base.errx(EX_NOHOST, f"bad mask length: {length}")
        return target, int(length), False
    if request.mask:
        return target, bin(int.from_bytes(parse_address(request.mask), "big")).count("1"), False
    if request.net and not request.host:
        raise base.unsupported("-net without a mask")
    return target, 32, True


def change_route(netlink: net.NetlinkSocket, command: str, words: list[str], quiet: bool) -> int:
    request = parse_request(words)
    target, prefix, is_host = parse_destination(request)
    gateway, index = b"", 0
    if request.gateway and request.interface:
        link = netlink.find_link(request.gateway)
        if link is None:
            raise base.errx(EX_DATAERR, f"interface '{request.gateway}' does not exist")
        index = link.index
    elif request.gateway:
        gateway = parse_address(request.gateway)
    line = f"{command} {'host' if is_host else 'net'} {request.target}"
    line += f": gateway {request.gateway}" if request.gateway else ""
    try:
        if command == "add" and not gateway and not index:
            raise OSError(errno.EINVAL, "")
        kind = net.NEWROUTE if command == "add" else net.DELROUTE
        netlink.change_route(kind, _socket.AF_INET, target, prefix, gateway, index)
    except OSError as error:
        if not quiet:
            number = error.errno or 0
            base.print_line(f"{line} fib 0: {ERROR_TEXTS.get(number) or base.strerror(number)}")
        return 1
    if not quiet:
        base.print_line(line)
    return 0


def print_route(netlink: net.NetlinkSocket, words: list[str]) -> int:
    """Print the route to a destination. See print_getmsg()."""
    request = parse_request(words)
    target, _, is_host = parse_destination(request)
    if request.target == "default":
        route, length = netlink.find_default_route(_socket.AF_INET), 0
    else:
        match = netlink.look_up_route(_socket.AF_INET, target)
        route, length = match if match else (None, 0)
    if route is None:
        raise base.errx(1, "route has not been found")
    links = {link.index: link for link in netlink.list_links()}
    link = links[int.from_bytes(route.get(4, b"\0\0\0\0"), "little")]
    base.print_line(f"   route to: {request.target}")
    base.print_line(
        f"destination: {'default' if length == 0 else _socket.inet_ntop(_socket.AF_INET, route.get(1, target))}"
    )
    if length < 32:
        mask = ((0xFFFFFFFF << (32 - length)) & 0xFFFFFFFF).to_bytes(4, "big")
        base.print_line(f"       mask: {'default' if length == 0 else _socket.inet_ntop(_socket.AF_INET, mask)}")
    gateway = route.get(5)
    if gateway:
        base.print_line(f"    gateway: {_socket.inet_ntop(_socket.AF_INET, gateway)}")
    base.print_line("        fib: 0")
    base.print_line(f"  interface: {link.name}")
    flags = "UP," + ("GATEWAY," if gateway else "") + ("HOST," if is_host and length == 32 else "") + "DONE"
    base.print_line(f"      flags: <{flags}{',STATIC' if gateway else ',PINNED'}>")
    base.print_line(" recvpipe  sendpipe  ssthresh  rtt,msec    mtu        weight    expire")
    base.print_line(f"       0         0         0         0{link.mtu:>10}         1         0 ")
    return 0
