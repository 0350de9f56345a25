"""ifconfig(8) for epair(4), bridge(4), lo(4) and existing interfaces. Messages: sbin/ifconfig/*.c of FreeBSD 14."""

from __future__ import annotations

import _socket
import errno
import os

from shim import base, net, prison

USAGE = """\
usage: ifconfig [-j jail] [-DkLmn] [-f type:format] interface [address_family]
           [address [dest_address]] [parameters]
       ifconfig [-j jail] interface create
       ifconfig [-j jail] -a [-dDkLmuv] [-f type:format] [-G groupname]
           [-g groupname] [address_family]
       ifconfig -C
       ifconfig [-j jail] -g groupname
       ifconfig [-j jail] -l [-du] [-g groupname] [address_family]
       ifconfig [-j jail] [-dDkLmuv] [-f type:format]"""
NAME_SIZE = 16  # IFNAMSIZ, with the final NUL
FAMILIES = {"ether", "link", "lladdr", "inet", "inet6"}
CLONERS = ("bridge", "epair")

# Parameters of basic_cmds[], ifbridge.c and ifgroup.c that the shim has, with and without an argument.
TAKES_ONE = {
    "addm",
    "deletem",
    "private",
    "-private",
    "description",
    "descr",
    "group",
    "-group",
    "mtu",
    "name",
    "netmask",
    "broadcast",
    "vnet",
    "-vnet",
    "prefixlen",
}
# FreeBSD has these; without this list they would be taken for addresses.
KNOWN = (
    "arp -arp debug -debug promisc -promisc monitor -monitor staticarp -staticarp rxcsum -rxcsum txcsum -txcsum tso "
    "-tso lro -lro metric pcp -pcp tunnel deletetunnel fib stp -stp edge -edge autoedge -autoedge ptp -ptp learn "
    "-learn discover -discover sticky -sticky span -span flush flushall maxage maxaddr priority proto timeout "
    "hellotime fwddelay static deladdr addr ifpriority ifpathcost ifmaxaddr holdcnt media mediaopt vlan vlandev "
    "vlanfilter untagged tagged linkstate no_radr accept_rtadv -accept_rtadv auto_linklocal -auto_linklocal ifdisabled "
    "-ifdisabled eui64 anycast tentative pltime vltime link0 link1 link2 -link0 -link1 -link2 wol nomap txtls"
).split()


class Change:
    """One run over the parameters of an interface (ifconfig() in ifconfig.c)."""

    def __init__(self, conversation: net.Net, name: str, family: str) -> None:
        self.net, self.name = conversation, name
        self.family = family or "inet"
        self.print_name = ""
        self.address = self.netmask = self.broadcast = ""
        self.alias = 0  # doalias: 1 alias, -1 -alias
        self.prefix: int | None = None

    def link(self) -> net.Link:
        link = self.net.link(self.name)
        if link is None:
            raise base.errx(1, f"interface {self.name} does not exist")
        return link


def main(argv: list[str]) -> int:
    try:
        options, rest = base.getopt(argv, "aCdDf:G:g:j:klLmnuv")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in sorted(option_letters - set("aCdgjlu")):
        raise base.unsupported(f"-{letter}")
    if ("l" in option_letters and "a" in option_letters) or {"u", "d"} <= option_letters:
        raise base.usage(USAGE)
    values = dict(options)
    conversation = inside(values["j"]) if "j" in option_letters else net.Net()
    if "C" in option_letters:
        base.say(" ".join(("lo", *CLONERS)))
        return 0
    if "g" in option_letters and not option_letters & {"a", "l"}:
        return list_group(conversation, values["g"])
    if option_letters & {"a", "l"} or not rest:
        if len(rest) > 1:
            raise base.usage(USAGE)
        if rest and rest[0] not in FAMILIES:
            base.warnx(f"Address family '{rest[0]}' unknown.")
            raise base.usage(USAGE)
        return list_interfaces(conversation, option_letters, values.get("g", ""), rest[0] if rest else "")
    return interface(conversation, rest[0], rest[1:])


def inside(key: str) -> net.Net:
    """-j: the vnet of the jail. The messages are Perror()'s, with the errno that jail_getid() leaves."""
    try:
        return net.net_of(prison.find(key)["holder"])
    except prison.JailError:
        raise base.err(1, "jail not found", errno.ENOENT) from None


def interface(conversation: net.Net, name: str, words: list[str]) -> int:
    """main() of ifconfig.c for one interface."""
    first = words[0] if words else ""
    if conversation.link(name) is None:
        if first in ("create", "plumb"):
            if len(name) >= NAME_SIZE:
                raise base.errx(1, f"{name}: cloning name too long")
            return apply(conversation, name, words[1:], "", create=True)
        if first == "-vnet":
            if len(name) >= NAME_SIZE:
                raise base.errx(1, f"{name}: interface name too long")
            return apply(conversation, name, words, "")
        raise base.errx(1, f"interface {name} does not exist")
    if first in ("create", "plumb"):
        if len(words) == 1:
            raise base.errx(1, f"interface {name} already exists")
        words = words[1:]
    family = ""
    if words and words[0] in FAMILIES:
        family, words = words[0], words[1:]
    if not words:
        return show(conversation, conversation.links(), [name], family)
    return apply(conversation, name, words, family)


def apply(conversation: net.Net, name: str, words: list[str], family: str, *, create: bool = False) -> int:
    """The parameters in order; addresses last. Prints the name at the end if it has changed."""
    change = Change(conversation, name, family)
    try:
        with base.locked():
            if create:
                clone(change)
                if words and words[0] in FAMILIES:
                    change.family, words = words[0], words[1:]
            at = 0
            while at < len(words):
                at += parameter(change, words, at)
            addresses(change)
    finally:
        if change.print_name:
            base.say(change.print_name)
    return 0


def parameter(change: Change, words: list[str], at: int) -> int:
    """Apply the parameter at ``words[at]``; returns the number of words that it took."""
    word = words[at]
    if word in TAKES_ONE:
        if at + 1 >= len(words):
            raise base.errx(1, f"'{word}' requires argument")
        one_argument(change, word, words[at + 1])
        return 2
    if word in ("up", "down"):
        set_up(change, word == "up")
    elif word in ("destroy", "unplumb"):
        destroy(change)
    elif word in ("alias", "add"):
        change.alias = 1
    elif word in ("-alias", "delete", "remove"):
        change.alias = -1
    elif word in ("-description", "-descr"):
        set_alias_data(change, description="")
    elif word in KNOWN:
        raise base.unsupported(word)
    elif change.address:
        raise base.unsupported("a destination address")
    else:
        change.address = word
    return 1


def one_argument(change: Change, word: str, value: str) -> None:
    if word in ("description", "descr"):
        set_alias_data(change, description=value)
    elif word == "group":
        group(change, value)
    elif word == "-group":
        ungroup(change, value)
    elif word == "name":
        rename(change, value)
    elif word == "netmask":
        change.netmask = value
    elif word == "broadcast":
        change.broadcast = value
    elif word == "prefixlen":
        change.prefix = int(value) if value.isdigit() else -1
    elif word == "mtu":
        link = change.link()
        attempt("ioctl SIOCSIFMTU (set mtu)", lambda: set_mtu(change, link.index, value))
    elif word == "vnet":
        move_to_jail(change, value)
    elif word == "-vnet":
        take_from_jail(change, value)
    else:
        bridge(change, word, value)


def attempt(what: str, do: object) -> None:
    """err(1, what) for errors of the kernel."""
    try:
        do()  # type: ignore[operator]
    except OSError as error:
        raise base.err(1, what, error.errno or 0) from None


def set_mtu(change: Change, index: int, value: str) -> None:
    if not value.isdigit():
        raise OSError(errno.EINVAL, "")
    change.net.change(index, net.number(net.LINK_MTU, int(value)))


# ---- cloning: ifclone.c, sys/net/if_clone.c, sys/net/if_epair.c, sys/net/if_bridge.c ------------------------------


def clone(change: Change) -> None:
    driver = change.name.rstrip("0123456789")
    digits = change.name[len(driver) :]
    if driver not in CLONERS:
        raise base.err(1, f"SIOCIFCREATE2 ({change.name})", errno.EINVAL)
    links = change.net.links()
    taken = {link.unit for link in links if link.driver == driver}
    names = {link.name for link in links}
    if digits:
        unit = int(digits)
        if unit in taken or names & set(interface_names(driver, unit)):
            raise base.errx(1, f"interface {change.name} already exists")
    else:
        unit = next(n for n in range(1 << 15) if n not in taken and not names & set(interface_names(driver, n)))
    made = interface_names(driver, unit)
    if driver == "epair":
        change.net.create_veth(*made)
    else:
        change.net.create(made[0], "bridge")
    for name, end in zip(made, "ab", strict=False):
        link = change.net.link(name)
        assert link is not None
        link.driver, link.unit, link.end, link.groups = driver, unit, end, [driver]
        change.net.change(link.index, net.string(net.LINK_ALIAS, link.alias()))
    remember(f"{driver}{unit}", True)
    if change.name != made[0]:  # "If we get a different name back than we put in, … print it later"
        change.name = change.print_name = made[0]


def interface_names(driver: str, unit: int) -> list[str]:
    return [f"epair{unit}a", f"epair{unit}b"] if driver == "epair" else [f"{driver}{unit}"]


def remember(unit: str, made: bool) -> None:
    """For ``freebsd-shim purge``: interfaces created by commands with this state directory."""
    state = base.load("interfaces", {"names": []})
    state["names"] = [name for name in state["names"] if name != unit] + ([unit] if made else [])
    base.save("interfaces", state)


def destroy(change: Change) -> None:
    """if_clone_destroy(): EINVAL for interfaces that were not cloned. Either end of an epair also removes the other."""
    link = change.link()
    if not link.driver:
        raise base.err(1, "SIOCIFDESTROY", errno.EINVAL)
    attempt("SIOCIFDESTROY", lambda: change.net.delete(link.index))
    remember(f"{link.driver}{link.unit}", False)


# ---- names, groups, flags ----------------------------------------------------------------------------------------


def rename(change: Change, name: str) -> None:
    """SIOCSIFNAME, sys/net/if.c ifhwioctl(): at most 15 characters, unique, not empty."""
    what = "ioctl SIOCSIFNAME (set name)"
    link = change.link()
    if len(name.encode()) >= NAME_SIZE:
        raise base.err(1, what, errno.ENAMETOOLONG)
    if not name or name == "lo0" or link.linux_name == "lo":
        raise base.err(1, what, errno.EINVAL)
    if name != link.name:
        if change.net.link(name) is not None:
            raise base.err(1, what, errno.EEXIST)
        attempt(what, lambda: set_name(change, link, name))
    change.name = change.print_name = name


def set_name(change: Change, link: net.Link, name: str) -> None:
    try:
        change.net.change(link.index, net.string(net.LINK_NAME, name))
    except OSError as error:
        if error.errno != errno.EBUSY or not link.flags & net.IFF_UP:
            raise
        change.net.change(link.index, up=False)  # older kernels: an interface that is up keeps its name
        change.net.change(link.index, net.string(net.LINK_NAME, name), up=True)


def set_alias_data(change: Change, *, description: str | None = None, groups: list[str] | None = None) -> None:
    link = change.link()
    if description is not None:
        link.description = description
    if groups is not None:
        link.groups = groups
    attempt("ioctl SIOCSIFDESCR (set descr)", lambda: write_alias(change, link))


def write_alias(change: Change, link: net.Link) -> None:
    if not link.driver:
        raise base.unsupported("a description or group of an interface that is Linux's own")
    change.net.change(link.index, net.string(net.LINK_ALIAS, link.alias()))


def group(change: Change, name: str) -> None:
    """ifgroup.c setifgroup()."""
    if name and name[-1].isdigit():
        raise base.errx(1, "setifgroup: group names may not end in a digit")
    if len(name) >= NAME_SIZE:
        raise base.errx(1, "setifgroup: group name too long")
    groups = change.link().groups
    if name not in groups:  # "if (… && errno != EEXIST) err"
        set_alias_data(change, groups=[*groups, name])


def ungroup(change: Change, name: str) -> None:
    groups = change.link().groups
    if name not in groups:
        raise base.err(1, " SIOCDIFGROUP", errno.ENOENT)
    set_alias_data(change, groups=[each for each in groups if each != name])


def set_up(change: Change, up: bool) -> None:
    link = change.link()
    attempt("up" if up else "down", lambda: change.net.change(link.index, up=up))
    if up and link.flags & net.IFF_LOOPBACK and not link.flags & net.IFF_UP and change.name == "lo0":
        # Linux gives a loopback that comes up 127.0.0.1; FreeBSD's has only its configured addresses.
        drop_loopback(change, link)


def drop_loopback(change: Change, link: net.Link) -> None:
    for address in change.net.addresses():
        if address.index == link.index and address.family == _socket.AF_INET and address.text == "127.0.0.1":
            change.net.address(net.DELADDR, link.index, address.family, address.prefix, address.address)


# ---- vnet: sys/net/if.c if_vmove_loan(), if_vmove_reclaim() --------------------------------------------------------


def jail_of(key: str) -> prison.Jail:
    try:
        return prison.find(key)
    except prison.JailError as error:
        raise base.errx(1, str(error)) from None


def move_to_jail(change: Change, key: str) -> None:
    jail, link = jail_of(key), change.link()
    # "Do not try to move the iface from and to the same prison", nor to an existing name: EEXIST
    if not jail["vnet"] or net.net_of(jail["holder"]).link(link.name) is not None:
        raise base.err(1, "SIOCSIFVNET", errno.EEXIST)
    attempt("SIOCSIFVNET", lambda: change.net.change(link.index, net.number(net.LINK_NS_PID, jail["holder"])))


def take_from_jail(change: Change, key: str) -> None:
    jail = jail_of(key)
    what = f"SIOCSIFRVNET({jail['jid']}, {change.name})"
    if not jail["vnet"]:
        raise base.err(1, what, errno.EEXIST)
    inside_ = net.net_of(jail["holder"])
    link = inside_.link(change.name)
    if link is None:
        raise base.err(1, what, errno.ENXIO)
    home = net.own_namespace()
    move = net.attribute(net.LINK_NS_FD, home.to_bytes(4, "little"))
    attempt(what, lambda: inside_.change(link.index, move))
    os.close(home)


# ---- bridge: ifbridge.c, sys/net/if_bridge.c ----------------------------------------------------------------------


def bridge(change: Change, word: str, value: str) -> None:
    own, member = change.link(), change.net.link(value)
    code = {"addm": "BRDGADD", "deletem": "BRDGDEL"}.get(word, "")
    what = f"{code} {value}" if code else "unable to get bridge flags"
    if own.driver != "bridge":
        raise base.err(1, what, errno.EINVAL)
    if member is None:
        raise base.err(1, what, errno.ENOENT)
    if word == "addm":
        # bridge_ioctl_add(): EBUSY in another bridge, EEXIST in this one, EINVAL if it is not an Ethernet interface
        if member.master:
            raise base.err(1, what, errno.EEXIST if member.master == own.index else errno.EBUSY)
        if member.index == own.index or member.driver == "bridge" or member.flags & net.IFF_LOOPBACK:
            raise base.err(1, what, errno.EINVAL)
        attempt(what, lambda: change.net.change(member.index, net.number(net.LINK_MASTER, own.index)))
        return
    if member.master != own.index:
        raise base.err(1, what, errno.ENOENT)
    if word == "deletem":
        attempt(what, lambda: change.net.change(member.index, net.number(net.LINK_MASTER, 0)))
    else:
        attempt("unable to set bridge flags", lambda: change.net.isolate(member.index, word == "private"))


# ---- addresses: af_inet.c, af_inet6.c, af_link.c --------------------------------------------------------------------


def addresses(change: Change) -> None:
    """The deferred part of ifconfig(): sets or removes the addresses."""
    if not change.address:
        if change.alias < 0 or change.netmask or change.prefix is not None:
            raise base.unsupported("a mask, or -alias, without an address")
        return
    link = change.link()
    if change.family in ("ether", "link", "lladdr"):
        mac = parse_mac(change.address)
        attempt("ioctl (SIOCAIFADDR)", lambda: change.net.change(link.index, net.attribute(net.LINK_ADDRESS, mac)))
        return
    family, size = (_socket.AF_INET, 32) if change.family == "inet" else (_socket.AF_INET6, 128)
    address, prefix = parse_address(change, family, size)
    present = [each for each in change.net.addresses() if each.index == link.index and each.family == family]
    if change.alias < 0:
        found = [each for each in present if each.address == address]
        if not found:
            raise base.err(1, "ioctl (SIOCDIFADDR)", errno.EADDRNOTAVAIL)
        change.net.address(net.DELADDR, link.index, family, found[0].prefix, address)
        return
    if change.alias == 0 and family == _socket.AF_INET and present:
        # "clearaddr": without alias the first address is replaced
        change.net.address(net.DELADDR, link.index, family, present[0].prefix, present[0].address)
    broadcast = broadcast_of(change, address, prefix) if family == _socket.AF_INET else b""
    loopback = bool(link.flags & net.IFF_LOOPBACK)
    attempt(
        "ioctl (SIOCAIFADDR)",
        lambda: change.net.address(net.NEWADDR, link.index, family, prefix, address, b"" if loopback else broadcast),
    )
    if not link.flags & net.IFF_UP:  # in_aifaddr_ioctl() → ether_ioctl(SIOCSIFADDR): an address brings it up
        change.net.change(link.index, up=True)
        if loopback and address != b"\x7f\0\0\1":
            drop_loopback(change, link)


def parse_mac(text: str) -> bytes:
    """af_link.c, link_addr(3): six groups of one or two hexadecimal digits."""
    try:
        parts = text.replace("-", ":").split(":")
        if len(parts) == 6 and all(0 < len(part) < 3 for part in parts):
            return bytes(int(part, 16) for part in parts)
    except ValueError:
        pass
    raise base.errx(1, "malformed link-level address")


def parse_address(change: Change, family: int, size: int) -> tuple[bytes, int]:
    """in_getaddr(), in6_getaddr()."""
    text, slash, length = change.address.partition("/")
    prefix = change.prefix
    if slash:
        if not (length.isascii() and length.isdigit() and int(length) <= size):
            raise base.errx(1, f"{change.address}: bad value (width {'too large' if length.isdigit() else 'invalid'})")
        prefix = int(length)
    try:
        address = _socket.inet_pton(family, text)
    except OSError:
        raise base.errx(1, f"{change.address if slash else text}: bad value") from None
    if change.netmask:
        prefix = parse_mask(change.netmask)
    if prefix is None and family == _socket.AF_INET:
        if change.alias >= 0:  # in_postproc(): "newaddr"
            words = "WARNING: setting interface address without mask is deprecated,\ndefault mask may not be correct."
            base.warnx(words)
        prefix = 8 if address[0] < 128 else 16 if address[0] < 192 else 24
    if prefix is None:
        prefix = 64  # in6_getprefix() never called: the kernel's default for inet6
    return address, prefix


def parse_mask(text: str) -> int:
    try:
        number = int(text, 16) if text.startswith("0x") else int.from_bytes(_socket.inet_aton(text), "big")
        prefix = bin(number).count("1")
        if number == (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF:
            return prefix
    except (OSError, ValueError):
        pass
    raise base.errx(1, f"{text}: bad value")


def broadcast_of(change: Change, address: bytes, prefix: int) -> bytes:
    if change.broadcast:
        try:
            return bytes(_socket.inet_aton(change.broadcast))
        except OSError:
            raise base.errx(1, f"{change.broadcast}: bad value") from None
    number = int.from_bytes(address, "big") | (0xFFFFFFFF >> prefix)
    return number.to_bytes(4, "big") if prefix < 31 else b""


# ---- listing --------------------------------------------------------------------------------------------------------


def list_group(conversation: net.Net, name: str) -> int:
    """ifgroup.c printgroup(): one name a line."""
    members = [link.name for link in conversation.links() if name in ("all", *link.groups)]
    if not members:
        raise SystemExit(1)  # "if (errno == EINVAL || errno == ENOTTY || errno == ENOENT) exit(exit_code)"
    for member in members:
        base.say(member)
    return 0


def list_interfaces(conversation: net.Net, option_letters: set[str], group_: str, family: str) -> int:
    links = conversation.links()
    names = []
    for link in links:
        up = bool(link.flags & net.IFF_UP)
        if ("u" in option_letters and not up) or ("d" in option_letters and up):
            continue
        if group_ and group_ not in ("all", *link.groups):
            continue
        if family in ("ether", "link", "lladdr") and link.flags & net.IFF_LOOPBACK and family == "ether":
            continue
        names.append(link.name)
    if family in ("inet", "inet6"):
        wanted = _socket.AF_INET if family == "inet" else _socket.AF_INET6
        having = {address.index for address in conversation.addresses() if address.family == wanted}
        names = [link.name for link in links if link.name in names and link.index in having]
    if "l" in option_letters:
        base.say(" ".join(names))
        return 0
    return show(conversation, links, names, family)


# sys/net/if.h IFF_*, in the order of IFFBITS
FLAGS = [
    (0x1, "UP"),
    (0x2, "BROADCAST"),
    (0x8, "LOOPBACK"),
    (0x40, "RUNNING"),
    (0x100, "PROMISC"),
    (0x800, "SIMPLEX"),
    (0x8000, "MULTICAST"),
    (0x1000000, "LOWER_UP"),
]


def flags_of(link: net.Link) -> int:
    up = bool(link.flags & net.IFF_UP)
    value = (0x1 | 0x40 if up else 0) | 0x8000 | (0x8 if link.flags & net.IFF_LOOPBACK else 0x2 | 0x800)
    value |= 0x100 if link.master else 0
    return value | (0x1000000 if link.flags & net.IFF_LOWER_UP else 0)


def show(conversation: net.Net, links: list[net.Link], names: list[str], family: str) -> int:
    """status() of ifconfig.c, with what each address family and driver adds."""
    every = conversation.addresses()
    isolated = conversation.isolated()
    for link in links:
        if link.name not in names:
            continue
        flags = flags_of(link)
        words = ",".join(word for bit, word in FLAGS if flags & bit)
        base.say(f"{link.name}: flags={flags:x}<{words}> metric 0 mtu {link.mtu}")
        if link.description:
            base.say(f"\tdescription: {link.description}")
        if not link.flags & net.IFF_LOOPBACK and link.mac and family not in ("inet", "inet6"):
            base.say(f"\tether {link.mac}")
        for address in every:
            if address.index == link.index:
                show_address(address, link, family)
        if family:
            continue
        if link.driver == "bridge":
            show_bridge(link, links, isolated)
        if link.groups:
            base.say("\tgroups: " + " ".join(link.groups))
        if link.driver == "epair":
            base.say("\tmedia: Ethernet 10Gbase-T (10Gbase-T <full-duplex>)")
            base.say(f"\tstatus: {'active' if link.flags & net.IFF_LOWER_UP else 'no carrier'}")
    return 0


def show_address(address: net.Address, link: net.Link, family: str) -> None:
    if address.family == _socket.AF_INET and family in ("", "inet"):
        mask = (0xFFFFFFFF << (32 - address.prefix)) & 0xFFFFFFFF
        line = f"\tinet {address.text} netmask 0x{mask:08x}"
        if address.broadcast and not link.flags & net.IFF_LOOPBACK:
            line += f" broadcast {_socket.inet_ntop(address.family, address.broadcast)}"
        base.say(line)
    elif address.family == _socket.AF_INET6 and family in ("", "inet6"):
        local = address.text.startswith("fe80:")
        scope = f"%{link.name}" if local else ""
        base.say(
            f"\tinet6 {address.text}{scope} prefixlen {address.prefix}"
            + (f" scopeid 0x{link.index:x}" if local else "")
        )


def show_bridge(link: net.Link, links: list[net.Link], isolated: set[int]) -> None:
    """bridge_status() and bridge_interfaces()."""
    base.say("\tid 00:00:00:00:00:00 priority 32768 hellotime 2 fwddelay 15")
    base.say("\tmaxage 20 holdcnt 6 proto rstp maxaddr 2000 timeout 1200")
    base.say("\troot id 00:00:00:00:00:00 priority 32768 ifcost 0 port 0")
    for member in links:
        if member.master == link.index:
            private = member.index in isolated
            words = "LEARNING,DISCOVER,AUTOEDGE,AUTOPTP" + (",PRIVATE" if private else "")
            base.say(f"\tmember: {member.name} flags={0x143 | (0x800 if private else 0):x}<{words}>")
            base.say(f"\t        ifmaxaddr 0 port {member.index} priority 128 path cost 2000")
