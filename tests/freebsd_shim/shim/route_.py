"""route(8): add, delete, get. Messages and exit status: sbin/route/{route,route_netlink}.c of FreeBSD 14."""

from __future__ import annotations

import _socket
import errno

from shim import base, net, prison

EX_USAGE, EX_DATAERR, EX_NOHOST = 64, 65, 68
# newroute(): its own messages for some errno values
WORDS = {
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
            conversation = net.net_of(prison.find(values["j"])["holder"])
        except prison.JailError:
            raise base.errx(1, "Jail not found") from None
    else:
        conversation = net.Net()
    if not words:
        raise usage(None)
    if words[0] in ("add", "delete", "del"):
        return change(conversation, words[0], words[1:], "q" in values)
    if words[0] in ("get", "show"):
        return get(conversation, words[1:])
    if words[0] in ("change", "monitor", "flush"):
        raise base.unsupported(words[0])
    raise usage(words[0])


class Request:
    def __init__(self) -> None:
        self.to = self.gateway = self.mask = ""
        self.net = self.host = self.interface = False


def parse(words: list[str]) -> Request:
    request, at = Request(), 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            if not request.to:
                request.to = word
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
            if at >= len(words):
                raise usage(None)
            setattr(request, {"-netmask": "mask", "-gateway": "gateway", "-dst": "to"}[word], words[at])
            request.net |= word == "-netmask"
            at += 1
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
    if not request.to:
        base.warnx("destination parameter required")
        raise usage(None)
    return request


def address(text: str) -> bytes:
    """getaddr(): inet_aton(3)'s forms; FreeBSD would look up a name."""
    try:
        return bytes(_socket.inet_aton(text))
    except OSError:
        raise base.errx(EX_NOHOST, f"bad address: {text}") from None


def destination(request: Request) -> tuple[bytes, int, bool]:
    """(address, prefix, whether it is a host)."""
    if request.to == "default":
        return b"\0\0\0\0", 0, False
    text, slash, length = request.to.partition("/")
    to = address(text)
    if slash:
        if not length.isdigit() or int(length) > 32:
            raise base.errx(EX_NOHOST, f"bad mask length: {length}")
        return to, int(length), False
    if request.mask:
        return to, bin(int.from_bytes(address(request.mask), "big")).count("1"), False
    if request.net and not request.host:
        raise base.unsupported("-net without a mask")
    return to, 32, True


def change(conversation: net.Net, command: str, words: list[str], quiet: bool) -> int:
    request = parse(words)
    to, prefix, host = destination(request)
    gateway, index = b"", 0
    if request.gateway and request.interface:
        link = conversation.link(request.gateway)
        if link is None:
            raise base.errx(EX_DATAERR, f"interface '{request.gateway}' does not exist")
        index = link.index
    elif request.gateway:
        gateway = address(request.gateway)
    line = f"{command} {'host' if host else 'net'} {request.to}"
    line += f": gateway {request.gateway}" if request.gateway else ""
    try:
        if command == "add" and not gateway and not index:
            raise OSError(errno.EINVAL, "")
        kind = net.NEWROUTE if command == "add" else net.DELROUTE
        conversation.route(kind, _socket.AF_INET, to, prefix, gateway, index)
    except OSError as error:
        if not quiet:
            number = error.errno or 0
            base.say(f"{line} fib 0: {WORDS.get(number) or base.strerror(number)}")
        return 1
    if not quiet:
        base.say(line)
    return 0


def get(conversation: net.Net, words: list[str]) -> int:
    """print_getmsg()."""
    request = parse(words)
    to, _, host = destination(request)
    if request.to == "default":
        found, length = conversation.default_route(_socket.AF_INET), 0
    else:
        answer = conversation.route_for(_socket.AF_INET, to)
        found, length = answer if answer else (None, 0)
    if found is None:
        raise base.errx(1, "route has not been found")
    links = {link.index: link for link in conversation.links()}
    link = links[int.from_bytes(found.get(4, b"\0\0\0\0"), "little")]
    base.say(f"   route to: {request.to}")
    base.say(f"destination: {'default' if length == 0 else _socket.inet_ntop(_socket.AF_INET, found.get(1, to))}")
    if length < 32:
        mask = ((0xFFFFFFFF << (32 - length)) & 0xFFFFFFFF).to_bytes(4, "big")
        base.say(f"       mask: {'default' if length == 0 else _socket.inet_ntop(_socket.AF_INET, mask)}")
    gateway = found.get(5)
    if gateway:
        base.say(f"    gateway: {_socket.inet_ntop(_socket.AF_INET, gateway)}")
    base.say("        fib: 0")
    base.say(f"  interface: {link.name}")
    flags = "UP," + ("GATEWAY," if gateway else "") + ("HOST," if host and length == 32 else "") + "DONE"
    base.say(f"      flags: <{flags}{',STATIC' if gateway else ',PINNED'}>")
    base.say(" recvpipe  sendpipe  ssthresh  rtt,msec    mtu        weight    expire")
    base.say(f"       0         0         0         0{link.mtu:>10}         1         0 ")
    return 0
