"""ifconfig(8) for epair(4), bridge(4), lo(4) and existing interfaces.

The messages are copied from sbin/ifconfig/*.c in FreeBSD 14.
"""

from __future__ import annotations

import _socket
import errno
import os

from shim import base, net, pf_nft, prison, static_arp

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
ETHER_FAMILIES = ("ether", "link", "lladdr")
FAMILIES = {*ETHER_FAMILIES, "inet", "inet6"}
CLONERS = ("bridge", "epair")
CREATION_ATTEMPTS = 10

# Parameters of basic_cmds[], ifbridge.c and ifgroup.c that the shim supports and that have an argument.
PARAMETERS_WITH_ARGUMENT = {
    "addm",
    "deletem",
    "private",
    "-private",
    "learn",
    "-learn",
    "discover",
    "-discover",
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
# Other parameters of FreeBSD's ifconfig. Without this list, they would be mistaken for addresses.
UNSUPPORTED_PARAMETERS = (
    "arp -arp debug -debug promisc -promisc monitor -monitor rxcsum -rxcsum txcsum -txcsum tso "
    "-tso lro -lro metric pcp -pcp tunnel deletetunnel fib stp -stp edge -edge autoedge -autoedge ptp -ptp "
    "sticky -sticky span -span flush flushall maxage maxaddr priority proto timeout "
    "hellotime fwddelay deladdr addr ifpriority ifpathcost ifmaxaddr holdcnt media mediaopt vlan vlandev "
    "vlanfilter untagged tagged linkstate no_radr accept_rtadv -accept_rtadv auto_linklocal -auto_linklocal ifdisabled "
    "-ifdisabled eui64 anycast tentative pltime vltime link0 link1 link2 -link0 -link1 -link2 wol nomap txtls"
).split()


class InterfaceChange:
    """The state of one pass over the parameters of an interface (ifconfig() in ifconfig.c)."""

    def __init__(self, netlink: net.NetlinkSocket, name: str, family: str) -> None:
        self.net, self.name = netlink, name
        self.family = family or "inet"
        self.name_to_print = ""
        self.address = self.netmask = self.broadcast = ""
        self.alias = 0  # doalias: 1 alias, -1 -alias
        self.prefix: int | None = None

    def get_link(self) -> net.Link:
        link = self.net.find_link(self.name)
        if link is None:
            raise base.errx(1, f"interface {self.name} does not exist")
        return link


def main(argv: list[str]) -> int:
    try:
        options, arguments = base.getopt(argv, "aCdDf:G:g:j:klLmnuv")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in sorted(option_letters - set("aCdgjlu")):
        raise base.unsupported(f"-{letter}")
    if ("l" in option_letters and "a" in option_letters) or {"u", "d"} <= option_letters:
        raise base.usage(USAGE)
    values = dict(options)
    netlink = open_jail_netlink(values["j"]) if "j" in option_letters else net.NetlinkSocket()
    if "C" in option_letters:
        base.print_line(" ".join(("lo", *CLONERS)))
        return 0
    if "g" in option_letters and not option_letters & {"a", "l"}:
        return show_group_members(netlink, values["g"])
    if option_letters & {"a", "l"} or not arguments:
        if len(arguments) > 1:
            raise base.usage(USAGE)
        if arguments and arguments[0] not in FAMILIES:
            base.warnx(f"Address family '{arguments[0]}' unknown.")
            raise base.usage(USAGE)
        return show_matching_interfaces(netlink, option_letters, values.get("g", ""), arguments[0] if arguments else "")
    return handle_interface(netlink, arguments[0], arguments[1:])


def open_jail_netlink(key: str) -> net.NetlinkSocket:
    """Open a socket in the vnet of a jail (-j). On failure, exit with jail_getid()'s error, like Perror()."""
    try:
        return net.open_netlink(prison.find_jail(key)["holder"])
    except prison.JailError:
        raise base.err(1, "jail not found", errno.ENOENT) from None


def handle_interface(netlink: net.NetlinkSocket, name: str, words: list[str]) -> int:
    """Show or change one interface, like main() of ifconfig.c."""
    keyword = words[0] if words else ""
    if netlink.find_link(name) is None:
        if keyword in ("create", "plumb"):
            if len(name) >= NAME_SIZE:
                raise base.errx(1, f"{name}: cloning name too long")
            return apply_parameters(netlink, name, words[1:], "", should_create=True)
        if keyword == "-vnet":
            if len(name) >= NAME_SIZE:
                raise base.errx(1, f"{name}: interface name too long")
            return apply_parameters(netlink, name, words, "")
        raise base.errx(1, f"interface {name} does not exist")
    if keyword in ("create", "plumb"):
        if len(words) == 1:
            raise base.errx(1, f"interface {name} already exists")
        words = words[1:]
    family = ""
    if words and words[0] in FAMILIES:
        family, words = words[0], words[1:]
    if not words:
        return show_interfaces(netlink, netlink.list_links(), [name], family)
    return apply_parameters(netlink, name, words, family)


def apply_parameters(
    netlink: net.NetlinkSocket, name: str, words: list[str], family: str, *, should_create: bool = False
) -> int:
    """Apply the parameters in order, but addresses last. At the end, print the interface's name if it has changed."""
    change = InterfaceChange(netlink, name, family)
    try:
        with base.locked():
            if should_create:
                create_interface(change)
                if words and words[0] in FAMILIES:
                    change.family, words = words[0], words[1:]
            index = 0
            while index < len(words):
                index += apply_parameter(change, words, index)
            apply_addresses(change)
            if "destroy" not in words and (
                should_create or change.family in ETHER_FAMILIES or {"name", "addm"} & set(words)
            ):
                refresh_member_rules(change)
    finally:
        if change.name_to_print:
            base.print_line(change.name_to_print)
    return 0


def refresh_member_rules(change: InterfaceChange) -> None:
    """Load pf's rules again, because the rules on bridge members depend on the interfaces' names and MAC addresses."""
    link = change.get_link()
    if link.driver == "bridge" or link.master:
        pf_nft.apply_ruleset(pf_nft.load_state())


def apply_parameter(change: InterfaceChange, words: list[str], index: int) -> int:
    """Apply the parameter at ``words[index]``. Returns the number of words that it consumed."""
    word = words[index]
    if word in PARAMETERS_WITH_ARGUMENT:
        if index + 1 >= len(words):
            raise base.errx(1, f"'{word}' requires argument")
        apply_argument(change, word, words[index + 1])
        return 2
    if word == "static":
        if index + 2 >= len(words):
            raise base.errx(1, f"'{word}' requires 2 arguments")
        add_static_bridge_address(change, words[index + 1], words[index + 2])
        return 3
    if word in ("up", "down"):
        set_link_state(change, word == "up")
    elif word in ("staticarp", "-staticarp"):
        static_arp.set_enabled(change.get_link().name, word == "staticarp")
    elif word in ("destroy", "unplumb"):
        destroy_interface(change)
    elif word in ("alias", "add"):
        change.alias = 1
    elif word in ("-alias", "delete", "remove"):
        change.alias = -1
    elif word in ("-description", "-descr"):
        set_alias_data(change, description="")
    elif word in UNSUPPORTED_PARAMETERS:
        raise base.unsupported(word)
    elif change.address:
        raise base.unsupported("a destination address")
    else:
        change.address = word
    return 1


def apply_argument(change: InterfaceChange, word: str, value: str) -> None:
    if word in ("description", "descr"):
        set_alias_data(change, description=value)
    elif word == "group":
        add_group(change, value)
    elif word == "-group":
        remove_group(change, value)
    elif word == "name":
        rename_interface(change, value)
    elif word == "netmask":
        change.netmask = value
    elif word == "broadcast":
        change.broadcast = value
    elif word == "prefixlen":
        change.prefix = int(value) if value.isdigit() else -1
    elif word == "mtu":
        link = change.get_link()
        try_or_exit("ioctl SIOCSIFMTU (set mtu)", lambda: set_mtu(change, link.index, value))
    elif word == "vnet":
        move_to_jail(change, value)
    elif word == "-vnet":
        take_from_jail(change, value)
    else:
        change_bridge(change, word, value)


def try_or_exit(operation: str, action: object) -> None:
    """Call ``action``. If the kernel returns an error, exit with err(1, operation)."""
    try:
        action()  # type: ignore[operator]
    except OSError as error:
        raise base.err(1, operation, error.errno or 0) from None


def set_mtu(change: InterfaceChange, index: int, value: str) -> None:
    if not value.isdigit():
        raise OSError(errno.EINVAL, "")
    change.net.change_link(index, net.pack_number(net.LINK_MTU, int(value)))


# ---- cloning: ifclone.c, sys/net/if_clone.c, sys/net/if_epair.c, sys/net/if_bridge.c ------------------------------


def create_free_interface(change: InterfaceChange, driver: str, digits: str) -> tuple[list[str], int]:
    """Create an interface with the unit ``digits`` or, if it is empty, the first free one.

    Returns the names of its ends, and its unit.
    """
    links = change.net.list_links()
    used_units = {link.unit for link in links if link.driver == driver}
    existing_names = {link.name for link in links}
    if digits:
        unit = int(digits)
        if unit in used_units or existing_names & set(make_interface_names(driver, unit)):
            raise base.errx(1, f"interface {change.name} already exists")
    else:
        unit = next(
            n
            for n in range(1 << 15)
            if n not in used_units and not existing_names & set(make_interface_names(driver, n))
        )
    new_names = make_interface_names(driver, unit)
    if driver == "epair":
        change.net.create_veth(*new_names)
    else:
        change.net.create_link(new_names[0], "bridge")
    return new_names, unit


def create_interface(change: InterfaceChange) -> None:
    driver = change.name.rstrip("0123456789")
    digits = change.name[len(driver) :]
    if driver not in CLONERS:
        raise base.err(1, f"SIOCIFCREATE2 ({change.name})", errno.EINVAL)
    for attempt in range(CREATION_ATTEMPTS):
        try:
            new_names, unit = create_free_interface(change, driver, digits)
            break
        except FileExistsError:
            # All test runs share the machine's names, and another one may just have taken this one.
            if digits or attempt == CREATION_ATTEMPTS - 1:
                raise
    for name, end in zip(new_names, "ab", strict=False):
        link = change.net.find_link(name)
        assert link is not None
        link.driver, link.unit, link.end, link.groups = driver, unit, end, [driver]
        change.net.change_link(link.index, net.pack_string(net.LINK_ALIAS, link.format_alias()))
        if driver == "bridge":
            # Without an explicit address, a Linux bridge takes the address of a member.
            mac = net.pack_attribute(net.LINK_ADDRESS, bytes.fromhex(link.mac.replace(":", "")))
            change.net.change_link(link.index, mac)
    record_interface(f"{driver}{unit}", True)
    if change.name != new_names[0]:  # "If we get a different name back than we put in, … print it later"
        change.name = change.name_to_print = new_names[0]


def make_interface_names(driver: str, unit: int) -> list[str]:
    return [f"epair{unit}a", f"epair{unit}b"] if driver == "epair" else [f"{driver}{unit}"]


def record_interface(interface: str, exists: bool) -> None:
    """Record whether an interface exists, so that ``freebsd-shim purge`` can remove it."""
    state = base.load("interfaces", {"names": []})
    state["names"] = [name for name in state["names"] if name != interface] + ([interface] if exists else [])
    base.save("interfaces", state)


def destroy_interface(change: InterfaceChange) -> None:
    """Destroy a cloned interface. Destroying one end of an epair also destroys the other. See if_clone_destroy()."""
    link = change.get_link()
    if not link.driver:
        raise base.err(1, "SIOCIFDESTROY", errno.EINVAL)
    try_or_exit("SIOCIFDESTROY", lambda: change.net.delete_link(link.index))
    record_interface(f"{link.driver}{link.unit}", False)
    static_arp.set_enabled(link.name, False)


# ---- names, groups, flags ----------------------------------------------------------------------------------------


def rename_interface(change: InterfaceChange, name: str) -> None:
    """Rename an interface. The name must be unique and 1 to 15 characters long. See SIOCSIFNAME in sys/net/if.c."""
    operation = "ioctl SIOCSIFNAME (set name)"
    link = change.get_link()
    if len(name.encode()) >= NAME_SIZE:
        raise base.err(1, operation, errno.ENAMETOOLONG)
    if not name or name == "lo0" or link.linux_name == "lo":
        raise base.err(1, operation, errno.EINVAL)
    if link.name in static_arp.load_names():
        raise base.unsupported("a new name of an interface with staticarp")
    if name != link.name:
        if change.net.find_link(name) is not None:
            raise base.err(1, operation, errno.EEXIST)
        try_or_exit(operation, lambda: set_name(change, link, name))
    change.name = change.name_to_print = name


def set_name(change: InterfaceChange, link: net.Link, name: str) -> None:
    try:
        change.net.change_link(link.index, net.pack_string(net.LINK_NAME, name))
    except OSError as error:
        if error.errno != errno.EBUSY or not link.flags & net.IFF_UP:
            raise
        change.net.change_link(link.index, is_up=False)  # Older kernels cannot rename an interface that is up.
        change.net.change_link(link.index, net.pack_string(net.LINK_NAME, name), is_up=True)


def set_alias_data(change: InterfaceChange, *, description: str | None = None, groups: list[str] | None = None) -> None:
    link = change.get_link()
    if description is not None:
        link.description = description
    if groups is not None:
        link.groups = groups
    try_or_exit("ioctl SIOCSIFDESCR (set descr)", lambda: write_alias(change, link))


def write_alias(change: InterfaceChange, link: net.Link) -> None:
    if not link.driver:
        raise base.unsupported("a description or group of an interface that the shim did not create")
    change.net.change_link(link.index, net.pack_string(net.LINK_ALIAS, link.format_alias()))


def add_group(change: InterfaceChange, name: str) -> None:
    """Add an interface to a group. See setifgroup() in ifgroup.c."""
    if name and name[-1].isdigit():
        raise base.errx(1, "setifgroup: group names may not end in a digit")
    if len(name) >= NAME_SIZE:
        raise base.errx(1, "setifgroup: group name too long")
    groups = change.get_link().groups
    if name not in groups:  # "if (… && errno != EEXIST) err"
        set_alias_data(change, groups=[*groups, name])


def remove_group(change: InterfaceChange, name: str) -> None:
    groups = change.get_link().groups
    if name not in groups:
        raise base.err(1, " SIOCDIFGROUP", errno.ENOENT)
    set_alias_data(change, groups=[each for each in groups if each != name])


def set_link_state(change: InterfaceChange, is_up: bool) -> None:
    link = change.get_link()
    try_or_exit("up" if is_up else "down", lambda: change.net.change_link(link.index, is_up=is_up))
    if is_up and link.flags & net.IFF_LOOPBACK and not link.flags & net.IFF_UP and change.name == "lo0":
        # Linux adds 127.0.0.1 to a loopback interface that is set up; on FreeBSD it has only configured addresses.
        remove_loopback_address(change, link)


def remove_loopback_address(change: InterfaceChange, link: net.Link) -> None:
    for address in change.net.list_addresses():
        if address.index == link.index and address.family == _socket.AF_INET and address.text == "127.0.0.1":
            change.net.change_address(net.DELADDR, link.index, address.family, address.prefix, address.address)


# ---- vnet: sys/net/if.c if_vmove_loan(), if_vmove_reclaim() --------------------------------------------------------


def find_jail(key: str) -> prison.Jail:
    try:
        return prison.find_jail(key)
    except prison.JailError as error:
        raise base.errx(1, str(error)) from None


def move_to_jail(change: InterfaceChange, key: str) -> None:
    jail, link = find_jail(key), change.get_link()
    # "Do not try to move the iface from and to the same prison", nor to an existing name: EEXIST
    if not jail["vnet"] or net.open_netlink(jail["holder"]).find_link(link.name) is not None:
        raise base.err(1, "SIOCSIFVNET", errno.EEXIST)
    try_or_exit(
        "SIOCSIFVNET", lambda: change.net.change_link(link.index, net.pack_number(net.LINK_NS_PID, jail["holder"]))
    )


def take_from_jail(change: InterfaceChange, key: str) -> None:
    jail = find_jail(key)
    operation = f"SIOCSIFRVNET({jail['jid']}, {change.name})"
    if not jail["vnet"]:
        raise base.err(1, operation, errno.EEXIST)
    jail_socket = net.open_netlink(jail["holder"])
    link = jail_socket.find_link(change.name)
    if link is None:
        raise base.err(1, operation, errno.ENXIO)
    own_namespace_fd = net.open_own_namespace()
    namespace_attribute = net.pack_attribute(net.LINK_NS_FD, own_namespace_fd.to_bytes(4, "little"))
    try_or_exit(operation, lambda: jail_socket.change_link(link.index, namespace_attribute))
    os.close(own_namespace_fd)


# ---- bridge: ifbridge.c, sys/net/if_bridge.c ----------------------------------------------------------------------


MEMBER_FLAGS = {"private": net.BRPORT_ISOLATED, "learn": net.BRPORT_LEARNING, "discover": net.BRPORT_UNICAST_FLOOD}


def change_bridge(change: InterfaceChange, word: str, value: str) -> None:
    bridge, member = change.get_link(), change.net.find_link(value)
    ioctl_name = {"addm": "BRDGADD", "deletem": "BRDGDEL"}.get(word, "")
    operation = f"{ioctl_name} {value}" if ioctl_name else "unable to get bridge flags"
    if bridge.driver != "bridge":
        raise base.err(1, operation, errno.EINVAL)
    if member is None:
        raise base.err(1, operation, errno.ENOENT)
    if word == "addm":
        # bridge_ioctl_add(): EBUSY in another bridge, EEXIST in this one, EINVAL if it is not an Ethernet interface
        if member.master:
            raise base.err(1, operation, errno.EEXIST if member.master == bridge.index else errno.EBUSY)
        if member.index == bridge.index or member.driver == "bridge" or member.flags & net.IFF_LOOPBACK:
            raise base.err(1, operation, errno.EINVAL)
        try_or_exit(
            operation, lambda: change.net.change_link(member.index, net.pack_number(net.LINK_MASTER, bridge.index))
        )
        return
    if member.master != bridge.index:
        raise base.err(1, operation, errno.ENOENT)
    if word == "deletem":
        try_or_exit(operation, lambda: change.net.change_link(member.index, net.pack_number(net.LINK_MASTER, 0)))
    else:
        flag = MEMBER_FLAGS[word.removeprefix("-")]
        try_or_exit(
            "unable to set bridge flags", lambda: change.net.set_port_flag(member.index, flag, not word.startswith("-"))
        )


def add_static_bridge_address(change: InterfaceChange, member_name: str, mac_text: str) -> None:
    """Bind a MAC address to a member. See setbridge_static(), bridge_ioctl_saddr() and bridge_rtupdate()."""
    mac = parse_ether_address(mac_text)
    if mac is None:
        raise base.errx(1, f"{member_name}: invalid address: {mac_text}")
    operation = f"BRDGSADDR {member_name}"
    bridge, member = change.get_link(), change.net.find_link(member_name)
    if bridge.driver != "bridge":
        raise base.err(1, operation, errno.EINVAL)
    if member is None or member.master != bridge.index:
        raise base.err(1, operation, errno.ENOENT)
    if mac[0] & 1 or not any(mac):  # a multicast address, or none
        raise base.err(1, operation, errno.EINVAL)
    try_or_exit(operation, lambda: change.net.add_static_bridge_address(member.index, mac))


def parse_ether_address(text: str) -> bytes | None:
    """Parse six groups of one or two hexadecimal digits. Returns None for any other text. See ether_aton(3)."""
    parts = text.split(":")
    if len(parts) != 6 or not all(0 < len(part) < 3 and part.isalnum() and part.isascii() for part in parts):
        return None
    try:
        return bytes(int(part, 16) for part in parts)
    except ValueError:
        return None


# ---- addresses: af_inet.c, af_inet6.c, af_link.c --------------------------------------------------------------------


def apply_addresses(change: InterfaceChange) -> None:
    """Set or remove the addresses. ifconfig() does this after it has applied the other parameters."""
    if not change.address:
        if change.alias < 0 or change.netmask or change.prefix is not None:
            raise base.unsupported("a mask, or -alias, without an address")
        return
    link = change.get_link()
    if change.family in ETHER_FAMILIES:
        mac = parse_mac(change.address)
        try_or_exit(
            "ioctl (SIOCAIFADDR)", lambda: change.net.change_link(link.index, net.pack_attribute(net.LINK_ADDRESS, mac))
        )
        return
    family, size = (_socket.AF_INET, 32) if change.family == "inet" else (_socket.AF_INET6, 128)
    address, prefix = parse_address(change, family, size)
    existing_addresses = [
        each for each in change.net.list_addresses() if each.index == link.index and each.family == family
    ]
    if change.alias < 0:
        matching_addresses = [each for each in existing_addresses if each.address == address]
        if not matching_addresses:
            raise base.err(1, "ioctl (SIOCDIFADDR)", errno.EADDRNOTAVAIL)
        change.net.change_address(net.DELADDR, link.index, family, matching_addresses[0].prefix, address)
        return
    if change.alias == 0 and family == _socket.AF_INET and existing_addresses:
        # "clearaddr": without alias the first address is replaced
        change.net.change_address(
            net.DELADDR, link.index, family, existing_addresses[0].prefix, existing_addresses[0].address
        )
    broadcast = compute_broadcast(change, address, prefix) if family == _socket.AF_INET else b""
    is_loopback = bool(link.flags & net.IFF_LOOPBACK)
    try_or_exit(
        "ioctl (SIOCAIFADDR)",
        lambda: change.net.change_address(
            net.NEWADDR, link.index, family, prefix, address, b"" if is_loopback else broadcast
        ),
    )
    if not link.flags & net.IFF_UP:  # Setting an address sets the interface up: ether_ioctl(SIOCSIFADDR).
        change.net.change_link(link.index, is_up=True)
        if is_loopback and address != b"\x7f\0\0\1":
            remove_loopback_address(change, link)


def parse_mac(text: str) -> bytes:
    """Parse a MAC address of six groups of one or two hexadecimal digits. See af_link.c and link_addr(3)."""
    try:
        parts = text.replace("-", ":").split(":")
        if len(parts) == 6 and all(0 < len(part) < 3 for part in parts):
            return bytes(int(part, 16) for part in parts)
    except ValueError:
        pass
    raise base.errx(1, "malformed link-level address")


def parse_address(change: InterfaceChange, family: int, size: int) -> tuple[bytes, int]:
    """Return the address and the prefix length. See in_getaddr() and in6_getaddr()."""
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
            warning = "WARNING: setting interface address without mask is deprecated,\ndefault mask may not be correct."
            base.warnx(warning)
        prefix = 8 if address[0] < 128 else 16 if address[0] < 192 else 24
    if prefix is None:
        prefix = 64  # in6_getprefix() never called: the kernel's default for inet6
    return address, prefix


def parse_mask(text: str) -> int:
    try:
        mask = int(text, 16) if text.startswith("0x") else int.from_bytes(_socket.inet_aton(text), "big")
        prefix = bin(mask).count("1")
        if mask == (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF:
            return prefix
    except (OSError, ValueError):
        pass
    raise base.errx(1, f"{text}: bad value")


def compute_broadcast(change: InterfaceChange, address: bytes, prefix: int) -> bytes:
    if change.broadcast:
        try:
            return bytes(_socket.inet_aton(change.broadcast))
        except OSError:
            raise base.errx(1, f"{change.broadcast}: bad value") from None
    broadcast = int.from_bytes(address, "big") | (0xFFFFFFFF >> prefix)
    return broadcast.to_bytes(4, "big") if prefix < 31 else b""


# ---- listing --------------------------------------------------------------------------------------------------------


def show_group_members(netlink: net.NetlinkSocket, name: str) -> int:
    """Print the members of a group, one per line. See printgroup() in ifgroup.c."""
    members = [link.name for link in netlink.list_links() if name in ("all", *link.groups)]
    if not members:
        raise SystemExit(1)  # "if (errno == EINVAL || errno == ENOTTY || errno == ENOENT) exit(exit_code)"
    for member in members:
        base.print_line(member)
    return 0


def show_matching_interfaces(netlink: net.NetlinkSocket, option_letters: set[str], group: str, family: str) -> int:
    links = netlink.list_links()
    names = []
    for link in links:
        is_up = bool(link.flags & net.IFF_UP)
        if ("u" in option_letters and not is_up) or ("d" in option_letters and is_up):
            continue
        if group and group not in ("all", *link.groups):
            continue
        if family in ETHER_FAMILIES and link.flags & net.IFF_LOOPBACK and family == "ether":
            continue
        names.append(link.name)
    if family in ("inet", "inet6"):
        address_family = _socket.AF_INET if family == "inet" else _socket.AF_INET6
        indexes = {address.index for address in netlink.list_addresses() if address.family == address_family}
        names = [link.name for link in links if link.name in names and link.index in indexes]
    if "l" in option_letters:
        base.print_line(" ".join(names))
        return 0
    return show_interfaces(netlink, links, names, family)


# sys/net/if.h IFF_*, in the order of IFFBITS
FLAGS = [
    (0x1, "UP"),
    (0x2, "BROADCAST"),
    (0x8, "LOOPBACK"),
    (0x40, "RUNNING"),
    (0x100, "PROMISC"),
    (0x800, "SIMPLEX"),
    (0x8000, "MULTICAST"),
    (0x80000, "STATICARP"),
    (0x1000000, "LOWER_UP"),
]


def compute_flags(link: net.Link) -> int:
    is_up = bool(link.flags & net.IFF_UP)
    flags = (0x1 | 0x40 if is_up else 0) | 0x8000 | (0x8 if link.flags & net.IFF_LOOPBACK else 0x2 | 0x800)
    flags |= 0x100 if link.master else 0
    flags |= 0x80000 if link.name in static_arp.load_names() else 0
    return flags | (0x1000000 if link.flags & net.IFF_LOWER_UP else 0)


def show_interfaces(netlink: net.NetlinkSocket, links: list[net.Link], names: list[str], family: str) -> int:
    """Print the interfaces with these names. See status() in ifconfig.c."""
    addresses = netlink.list_addresses()
    port_flags = netlink.list_port_flags()
    for link in links:
        if link.name not in names:
            continue
        flags = compute_flags(link)
        flag_names = ",".join(flag_name for bit, flag_name in FLAGS if flags & bit)
        base.print_line(f"{link.name}: flags={flags:x}<{flag_names}> metric 0 mtu {link.mtu}")
        if link.description:
            base.print_line(f"\tdescription: {link.description}")
        if not link.flags & net.IFF_LOOPBACK and link.mac and family not in ("inet", "inet6"):
            base.print_line(f"\tether {link.mac}")
        for address in addresses:
            if address.index == link.index:
                show_address(address, link, family)
        if family:
            continue
        if link.driver == "bridge":
            show_bridge(link, links, port_flags)
        if link.groups:
            base.print_line("\tgroups: " + " ".join(link.groups))
        if link.driver == "epair":
            base.print_line("\tmedia: Ethernet 10Gbase-T (10Gbase-T <full-duplex>)")
            base.print_line(f"\tstatus: {'active' if link.flags & net.IFF_LOWER_UP else 'no carrier'}")
    return 0


def show_address(address: net.Address, link: net.Link, family: str) -> None:
    if address.family == _socket.AF_INET and family in ("", "inet"):
        mask = (0xFFFFFFFF << (32 - address.prefix)) & 0xFFFFFFFF
        line = f"\tinet {address.text} netmask 0x{mask:08x}"
        if address.broadcast and not link.flags & net.IFF_LOOPBACK:
            line += f" broadcast {_socket.inet_ntop(address.family, address.broadcast)}"
        base.print_line(line)
    elif address.family == _socket.AF_INET6 and family in ("", "inet6"):
        is_link_local = address.text.startswith("fe80:")
        scope = f"%{link.name}" if is_link_local else ""
        base.print_line(
            f"\tinet6 {address.text}{scope} prefixlen {address.prefix}"
            + (f" scopeid 0x{link.index:x}" if is_link_local else "")
        )


# sys/net/if_bridgevar.h IFBIF_*, in the order of IFBIFBITS
MEMBER_FLAG_BITS = [(0x1, net.BRPORT_LEARNING), (0x2, net.BRPORT_UNICAST_FLOOD), (0x800, net.BRPORT_ISOLATED)]
MEMBER_FLAG_NAMES = [(0x1, "LEARNING"), (0x2, "DISCOVER"), (0x40, "AUTOEDGE"), (0x100, "AUTOPTP"), (0x800, "PRIVATE")]


def show_bridge(link: net.Link, links: list[net.Link], port_flags: dict[int, set[int]]) -> None:
    """Print the status and the members of a bridge. See bridge_status() and bridge_interfaces()."""
    base.print_line("\tid 00:00:00:00:00:00 priority 32768 hellotime 2 fwddelay 15")
    base.print_line("\tmaxage 20 holdcnt 6 proto rstp maxaddr 2000 timeout 1200")
    base.print_line("\troot id 00:00:00:00:00:00 priority 32768 ifcost 0 port 0")
    for member in links:
        if member.master == link.index:
            flags = 0x140 | sum(bit for bit, flag in MEMBER_FLAG_BITS if flag in port_flags[member.index])
            names = [name for bit, name in MEMBER_FLAG_NAMES if flags & bit]
            base.print_line(f"\tmember: {member.name} flags={flags:x}<{','.join(names)}>")
            base.print_line(f"\t        ifmaxaddr 0 port {member.index} priority 128 path cost 2000")
