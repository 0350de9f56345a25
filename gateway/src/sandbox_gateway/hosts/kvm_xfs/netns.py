"""Network slots: a pool of network namespaces, each with the tap of one sandbox and the rules around it.

    guest ── tap0 ─[ namespace <prefix>-n ]─ <prefix>-nv ══ <prefix>-nh ─[ host ]─ elsewhere
       169.254.0.21  169.254.0.22        one /30 of `network.subnet`

Inside, every slot is the same to the last MAC address, because a guest's ARP cache and connections are part of its
memory and go with it from slot to slot. Outside, each has an address of its own, which forwards every port to the
guest. The guest's range is link-local, the one kind of address that nothing beyond the next hop can have: it
hides no destination that a sandbox could want to reach (10/8, 172.16/12, 192.168/16 and 100.64/10 are all in use
somewhere), and a /30 of it leaves 169.254.169.254 to the rules.

The rules stand in two places, both out of the guest's reach: in the slot (address of the guest, its policy) and on
the host (nothing from a slot to the host, or to another slot). A slot is committed by its last step, setting the
host's end of the veth up; whatever is not up at start-up was never finished.

Servers of volumes have a namespace of their own, with one veth to the host and one address, the last of
`network.subnet`. A guest knows them as ports of its gateway, so that what it has mounted is the same from slot to slot;
the host lets a slot through to a port if the pair is in a set of its table, asked for each packet, and nobody else but
the gateway to that namespace at all. Out of it go answers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from sandbox_gateway.command import arun
from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Busy
from sandbox_gateway.hosts.addresses import AGENT_PORT, CODE_PORT, egress_rules, name_servers
from sandbox_gateway.hosts.connect import MARK
from sandbox_gateway.hosts.kvm_xfs.conntrack import forget_connections
from sandbox_gateway.log import Logger
from sandbox_gateway.records import NetworkPolicy

GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX = 30
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_MAC = "02:5b:78:00:00:01"
TAP_MAC = "02:5b:78:00:00:02"
TAP = "tap0"
VOLUME_PORTS = range(22000, 32000, 2)
"""Of the gateway's address, as guests see it: a volume has one and the next; nothing a host offers by default."""

VOLUME_ACCESS = "volume_access"
"""Name of the set of (slot's `host_address` . port) that may talk to servers of volumes."""

MOST_CONNECTIONS = 4096
"""Of one sandbox at a time, to the outside: the kernel has one limit for all, `nf_conntrack_max`, and no guest may
use it up. Those that were refused, half-open or closed count until the kernel forgets them."""

VOLUME_ALIASES = "volume_aliases"
"""Name of the map from such a pair to the address that the server knows the sandbox by, one of ``ALIASES``."""

ALIASES = ipaddress.IPv4Network("248.0.0.0/6")
"""Reserved for ever, and seen in the servers' namespace alone."""

_RUN_NETNS = Path("/run/netns")
_TABLE = "sandbox"
_NFT_SECONDS = 20.0
_REFILL_RETRY_SECONDS = 5.0

log = Logger("netns")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Slot:
    """One place for one sandbox in the network."""

    number: int
    name: str
    """Of the network namespace."""
    path: Path
    """Of the namespace's file; enter it with setns(2)."""
    host_address: str
    """Reaches the guest's ports from the host."""
    veth_address: str
    """The host's own address on the slot's veth."""
    veth: str
    """Name of the host's end."""
    uid: int
    """Who may open the tap besides root; 0: nobody."""
    tap: str = TAP


class SlotPool:
    """All the slots of one gateway. ``uid_base`` + n owns the tap of slot n (0: root alone).

    Every method that waits may raise BackendFailed when the kernel or nft refuses.
    """

    def __init__(self, network: Network, *, uid_base: int = 0) -> None:
        self._network = network
        self._subnet = ipaddress.IPv4Network(network.subnet)
        self._capacity = self._subnet.num_addresses // 4 - 1  # The last four are for the servers of volumes.
        self._uid_base = uid_base
        self._dns = name_servers(network)
        self._ready: deque[Slot] = deque()
        self._all: dict[int, Slot] = {}
        self._busy: set[int] = set()
        self._next = 0
        self._refill_wanted = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = True

    # -- life -----------------------------------------------------------------------------------------------------

    async def open(self, in_use: set[int]) -> None:
        """Take over the whole slots numbered ``in_use``, remove all others, set up the host, start refilling.

        A slot that nobody uses is removed though it be whole: whether it was ever used is not known.
        """
        self._closed = False
        await _threaded(self._prepare_host)
        await self._nft_host(self._host_rules())
        await _threaded(_make_volume_space, self._network)
        found, whole = await _threaded(self._look)
        for number in sorted(found):
            slot = self._slot(number)
            if number in in_use and number in whole:
                self._all[number] = slot
            else:
                await _threaded(_unmake, slot)
        self._next = max(in_use, default=-1) + 1
        self._refiller = asyncio.create_task(self._refill(), name="network-slots")
        self._refill_wanted.set()

    async def close(self) -> None:
        """Stop making slots and remove those that nobody took; slots in use, and the rules they need, stay."""
        if self._closed:
            return  # Never opened: what there is belongs to another.
        self._closed = True
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.wait([self._refiller])
            self._refiller = None
        while self._background:
            await asyncio.wait(self._background)
        while self._ready:
            await self._remove(self._ready.pop())
        if not self._all:
            await self._leave_host()

    async def destroy(self) -> None:
        """Remove everything this prefix has on the host: slots (also those in use) and rules."""
        await self.close()
        found, _ = await _threaded(self._look)
        for number in found:
            await _threaded(_unmake, self._slot(number))
        self._all.clear()
        await self._leave_host()

    # -- slots ----------------------------------------------------------------------------------------------------

    async def take(self, policy: NetworkPolicy) -> Slot:
        """A slot nobody else has, with ``policy`` in force; from the ready ones if there is one.

        Raises Busy when all addresses are taken, Invalid for a policy that is none.
        """
        rules = policy_rules(policy, self._dns, self._subnet)
        slot = self._ready.popleft() if self._ready else await self._make()
        self._refill_wanted.set()
        try:
            if policy != NetworkPolicy():
                await self._nft(slot, rules)
        except BaseException:
            self._retire(slot)
            raise
        return slot

    async def release(self, slot: Slot) -> None:
        """Give a slot back. It is removed, not used again: no connection, rule or packet outlives its sandbox.

        The machine must have ended. Returns at once; the removal goes on in the background, `close` waits for it.
        """
        if self._all.get(slot.number) == slot:
            self._retire(slot)

    def adopt(self, number: int) -> Slot:
        """The slot that a sandbox of an earlier gateway has. Raises BackendFailed if it did not survive."""
        slot = self._all.get(number)
        if slot is None:
            raise BackendFailed(
                f"the network slot {self._network.prefix}-{number} of a running sandbox is gone: pause and resume it"
            )
        return slot

    async def apply(self, slot: Slot, policy: NetworkPolicy) -> None:
        """Make ``policy`` hold from the next packet on, also for connections that are open."""
        await self._nft(slot, policy_rules(policy, self._dns, self._subnet))

    # -- making and removing ----------------------------------------------------------------------------------------

    async def _make(self) -> Slot:
        """Make a slot whole or not at all; a cancelled caller leaves a ready slot."""
        slot = self._slot(self._free_number())
        self._busy.add(slot.number)
        task = asyncio.ensure_future(self._make_whole(slot))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._later(self._keep(task))
            raise

    async def _keep(self, task: asyncio.Future[Slot]) -> None:
        with contextlib.suppress(Exception):
            slot = await task
            if self._closed:
                await self._remove(slot)
            else:
                self._ready.append(slot)

    async def _make_whole(self, slot: Slot) -> Slot:
        try:
            await _threaded(_make_namespace, slot)
            await self._nft(slot, self._slot_rules(slot))
            await _threaded(_set_up, slot)
            self._all[slot.number] = slot
        except BaseException:
            await _threaded(_unmake, slot)
            raise
        finally:
            self._busy.discard(slot.number)
        return slot

    def _retire(self, slot: Slot) -> None:
        self._busy.add(slot.number)
        del self._all[slot.number]
        self._later(self._remove(slot))

    async def _remove(self, slot: Slot) -> None:
        """Its number is free again when it is gone; one that cannot be removed keeps it."""
        self._busy.add(slot.number)
        self._all.pop(slot.number, None)
        await _threaded(_unmake, slot)
        self._busy.discard(slot.number)
        self._refill_wanted.set()

    async def _refill(self) -> None:
        """Keep ``network.pool`` slots ready. One at a time: it must not slow what people wait for."""
        while True:
            await self._refill_wanted.wait()
            self._refill_wanted.clear()
            try:
                while len(self._ready) < self._network.pool:
                    self._ready.append(await self._make())
            except Busy:
                pass  # None left; the next one given back wakes us.
            except Exception as error:
                log.warning("a network slot could not be made", reason=str(error))
                await asyncio.sleep(_REFILL_RETRY_SECONDS)
                self._refill_wanted.set()

    def _free_number(self) -> int:
        """The next number never used or longest unused: what the host remembers of connections has run out then."""
        for step in range(self._capacity):
            number = (self._next + step) % self._capacity
            if number not in self._all and number not in self._busy:
                self._next = number + 1
                return number
        raise Busy(
            f"all {self._capacity} network slots of {self._network.subnet} are taken: "
            "remove sandboxes, or give the gateway a wider [network] subnet"
        )

    def _slot(self, number: int) -> Slot:
        name = f"{self._network.prefix}-{number}"
        first = self._subnet.network_address + 4 * number
        return Slot(
            number=number,
            name=name,
            path=_RUN_NETNS / name,
            host_address=str(first + 2),
            veth_address=str(first + 1),
            veth=f"{name}h",
            uid=self._uid_base + number if self._uid_base else 0,
        )

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a network slot could not be removed", reason=str(error))

    async def _nft_host(self, rules: str) -> None:
        await arun(["nft", "-f", "-"], timeout=_NFT_SECONDS, input=rules)

    async def _nft(self, slot: Slot, rules: str) -> None:
        await arun(["nsenter", f"--net={slot.path}", "nft", "-f", "-"], timeout=_NFT_SECONDS, input=rules)

    # -- what is on the host ----------------------------------------------------------------------------------------

    def _look(self) -> tuple[set[int], set[int]]:
        """Numbers of which there is anything, and those that are whole."""
        pattern = re.compile(rf"{self._network.prefix}-(\d+)")
        spaces = {int(match[1]) for name in _names(_RUN_NETNS) if (match := pattern.fullmatch(name))}
        mounted = {int(match[1]) for name in _mounted_namespaces() if (match := pattern.fullmatch(name))}
        ends: dict[int, bool] = {}
        pattern = re.compile(rf"{self._network.prefix}-(\d+)[hv]")
        with IPRoute() as route:
            for link in route.get_links():
                if match := pattern.fullmatch(link.get_attr("IFLA_IFNAME") or ""):
                    ends[int(match[1])] = bool(link["flags"] & _IFF_UP)
        whole = {number for number, up in ends.items() if up and number in mounted}
        return spaces | set(ends), {number for number in whole if number < self._capacity}

    def _prepare_host(self) -> None:
        _share_run_netns()
        _sysctl("net/ipv4/ip_forward", "1")
        # Of a gateway whose servers of volumes had no namespace of their own.
        _remove_address(volume_address(self._network))

    async def _leave_host(self) -> None:
        await _threaded(_remove_volume_space, self._network)
        await self._nft_host(_emptied(self._host_table))

    @property
    def _host_table(self) -> str:
        return host_table(self._network)

    def _host_rules(self) -> str:
        slots, servers = f'"{self._network.prefix}-*"', f'"{volume_link(self._network)}"'
        volumes = volume_address(self._network)
        unmarked = f"tcp flags & (syn | ack) == syn meta mark != {MARK:#x}"
        return f"""{_emptied(self._host_table)}
table inet {self._host_table} {{
    set {VOLUME_ACCESS} {{
        type ipv4_addr . inet_service
    }}
    map {VOLUME_ALIASES} {{
        type ipv4_addr . inet_service : ipv4_addr
    }}
    set connections {{
        type ipv4_addr
        flags dynamic
        size {self._capacity}
    }}
    chain volumes {{
        # Each packet, not each connection: who is taken out of the set is cut off at once.
        ip daddr {volumes} ip saddr . tcp dport @{VOLUME_ACCESS} accept
        drop
    }}
    chain input {{
        type filter hook input priority filter - 5; policy accept;
        iifname {{ {slots}, {servers} }} meta nfproto ipv4 ct state established,related accept
        iifname {{ {slots}, {servers} }} drop
    }}
    chain output {{
        type filter hook output priority filter - 5; policy accept;
        # To a sandbox's agent the host is its gateway, whom it obeys without a token: nobody else may speak for it,
        # root's other services included. Where a connection cannot begin there are no later packets of one.
        oifname {slots} tcp dport {{ {AGENT_PORT}, {CODE_PORT} }} {unmarked} reject with tcp reset
        oifname {servers} {unmarked} reject with tcp reset
    }}
    chain forward {{
        type filter hook forward priority filter - 5; policy accept;
        iifname {slots} oifname {slots} drop
        iifname {slots} meta nfproto != ipv4 drop
        iifname {slots} ip saddr != {self._subnet} drop
        # The slot counts them as well, but a guest can have it forget what the host still tracks: by packets that
        # the slot takes for the end of a connection and that do not live to reach the host.
        iifname {slots} ct state new add @connections {{ ip saddr ct count over {MOST_CONNECTIONS} }} \
            jump refuse
        iifname {slots} oifname {servers} jump volumes
        # Ports that the host publishes of its containers are services of the host.
        iifname {slots} ct status dnat drop
        iifname {slots} tcp flags syn / syn,rst tcp option maxseg size set rt mtu
        oifname {slots} ct state established,related accept
        oifname {slots} drop
        iifname {servers} drop
        oifname {servers} drop
    }}
    chain refuse {{
        # A host limits its ICMP errors, not its resets: who is told nothing waits.
        meta l4proto tcp reject with tcp reset
        reject with icmp admin-prohibited
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname {servers} snat ip to ip saddr . tcp dport map @{VOLUME_ALIASES}
        ip saddr {self._subnet} oifname != {{ {slots}, {servers} }} masquerade
    }}
}}
"""

    def _slot_rules(self, slot: Slot) -> str:
        veth = f'"{slot.name}v"'
        tap = f'"{TAP}"'
        volumes = volume_address(self._network)
        ports = f"{VOLUME_PORTS.start}-{VOLUME_PORTS.stop - 1}"
        return f"""{_emptied(_TABLE)}
table inet {_TABLE} {{
    chain guard {{
        type filter hook prerouting priority raw; policy accept;
        meta nfproto ipv6 drop
        iifname {tap} ip saddr != {GUEST_ADDRESS} drop
    }}
    chain inwards {{
        type nat hook prerouting priority dstnat; policy accept;
        # From the host alone: late packets of an earlier sandbox's connections come from elsewhere.
        iifname {veth} ip saddr {slot.veth_address} ip daddr {slot.host_address} dnat ip to {GUEST_ADDRESS}
        iifname {tap} ip daddr {GATEWAY_ADDRESS} tcp dport {ports} dnat ip to {volumes}
    }}
    chain outwards {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname {tap} snat ip to {GATEWAY_ADDRESS}
        oifname {veth} snat ip to {slot.host_address}
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname {tap} ct state new jump connections
        iifname {tap} icmp type echo-request accept
        ct state invalid meta l4proto tcp reject with tcp reset
        iifname {tap} reject with icmp admin-prohibited
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        # Connections that only the memory of the sandbox knows end at once instead of hanging.
        ct state invalid meta l4proto tcp reject with tcp reset
        ct state invalid drop
        iifname {tap} ct state new jump connections
        # Volumes are not a matter of policies; which of them, the host decides.
        iifname {tap} oifname {veth} ip daddr {volumes} tcp dport {ports} ct status dnat accept
        # Each packet, not each connection: a new policy holds for what is open too.
        iifname {tap} oifname {veth} ct direction original jump outside
        ct state established,related accept
        iifname {veth} oifname {tap} ct status dnat accept
    }}
    chain connections {{
        # Before the kernel keeps an entry. What is open goes on.
        ct count over {MOST_CONNECTIONS} reject with icmp admin-prohibited
    }}
    chain outside {{
    }}
}}
{policy_rules(NetworkPolicy(), self._dns, self._subnet)}"""


def host_table(network: Network) -> str:
    """Name of the host's nftables table, of family inet."""
    return f"{network.prefix}_sandbox"


def volume_address(network: Network) -> str:
    """Where the servers of volumes listen, in their namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 1)


def volume_gateway(network: Network) -> str:
    """The host's address on the link to that namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 2)


def volume_link(network: Network) -> str:
    """Name of the host's end of that link."""
    return f"{network.prefix}_vol"


def volume_space(network: Network) -> Path:
    """Of that namespace; enter it with setns(2)."""
    return _RUN_NETNS / f"{network.prefix}-volumes"


def policy_rules(policy: NetworkPolicy, dns: Sequence[str], subnet: ipaddress.IPv4Network) -> str:
    """nft commands that put ``policy`` in force in a slot, in one transaction. Raises Invalid for a bad address."""
    refuse = "reject with icmp admin-prohibited"
    rules = [f"ip daddr {subnet} {refuse}"]
    for rule in egress_rules(policy, dns):
        match = f"ip daddr {{ {', '.join(map(str, rule.networks))} }}"
        if rule.dns_only:
            match += " meta l4proto { tcp, udp } th dport 53"
        rules.append(f"{match} {'accept' if rule.allow else refuse}")
    return f"flush chain inet {_TABLE} outside\n" + "".join(
        f"add rule inet {_TABLE} outside {rule}\n" for rule in rules
    )


def _emptied(table: str) -> str:
    """nft commands that leave no table of that name, whether there is one or not."""
    return f"add table inet {table}\ndelete table inet {table}\n"


# --- kernel work: runs in a thread of its own, which may change its network namespace and then ends -----------------

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED, _MNT_DETACH = 0x1000, 0x4000, 0x100000, 2
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR, _IFF_UP = 0x0002, 0x1000, 0x4000, 0x1
_NUD_PERMANENT = 0x80

_libc = ctypes.CDLL(None, use_errno=True)


async def _threaded(work: Callable[..., _T], *arguments: Any) -> _T:
    """Run ``work`` in a fresh thread, so that none other ever sees its namespace. Runs to its end, come what may."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def body() -> None:
        result, error = None, None
        try:
            result = work(*arguments)
        except (OSError, NetlinkError) as raised:
            error = BackendFailed(f"network: {raised}; the gateway needs root and the kernel's veth, tun and nf_tables")
        except Exception as raised:
            error = raised  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # The loop is gone: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name="netns", daemon=True).start()
    return await asyncio.shield(done)


def _make_namespace(slot: Slot) -> None:
    """Namespace, veth and tap of a slot; all but its rules and its last step."""
    _enter_new_namespace(slot.path)
    _sysctl("net/ipv4/ip_forward", "1")
    for switch in ("all", "default"):
        _sysctl(f"net/ipv4/conf/{switch}/send_redirects", "0")
        _sysctl(f"net/ipv4/conf/{switch}/accept_redirects", "0")
    _sysctl("net/netfilter/nf_conntrack_tcp_loose", "0", required=False)
    # Only the guest's own range is answered: each sender would take an entry of a table that all namespaces share.
    _sysctl("net/ipv4/conf/all/arp_ignore", "2")
    # Else the second refusal within a second is not told to the guest, which would wait for minutes.
    _sysctl("net/ipv4/icmp_ratelimit", "0")
    _make_tap(slot)
    inner = f"{slot.name}v"
    _link_to_host(slot.veth, slot.veth_address, inner, slot.name)
    with IPRoute() as route:
        route.link("set", index=_index(route, "lo"), state="up")
        tap = _index(route, TAP)
        route.link("set", index=tap, address=TAP_MAC, state="up")
        route.addr("add", index=tap, address=GATEWAY_ADDRESS, prefixlen=GUEST_PREFIX)
        route.neigh("replace", dst=GUEST_ADDRESS, lladdr=GUEST_MAC, ifindex=tap, state=_NUD_PERMANENT)
        veth = _index(route, inner)
        route.link("set", index=veth, state="up")
        route.addr("add", index=veth, address=slot.host_address, prefixlen=30)
        route.route("add", dst="default", gateway=slot.veth_address, oif=veth)


def _enter_new_namespace(path: Path) -> None:
    """Move this thread to a new network namespace without IPv6, whose file is ``path``."""
    _call("unshare", _libc.unshare(_CLONE_NEWNET))
    path.touch(mode=0o444, exist_ok=False)
    _mount("/proc/thread-self/ns/net", path, _MS_BIND)
    for switch in ("all", "default"):
        _sysctl(f"net/ipv6/conf/{switch}/disable_ipv6", "1", required=False)


def _link_to_host(outer: str, address: str, inner: str, space: str) -> None:
    """A veth from the host, where its end ``outer`` has ``address``/30 and is down, to ``inner`` in ``space``."""
    with _host_namespace(), IPRoute() as host:
        host.link("add", ifname=outer, kind="veth", peer={"ifname": inner, "net_ns_fd": space})
        host.addr("add", index=_index(host, outer), address=address, prefixlen=30)
        _sysctl(f"net/ipv6/conf/{outer}/disable_ipv6", "1", required=False)
        _sysctl(f"net/ipv4/conf/{outer}/rp_filter", "1")


def _make_volume_space(network: Network) -> None:
    """The namespace of the servers of volumes, unless it is there; its last step is to set the host's end up."""
    path, outer, inner = volume_space(network), volume_link(network), "eth0"
    with IPRoute() as route:
        whole = any(
            link["flags"] & _IFF_UP and route.get_addr(index=index, address=volume_gateway(network))
            for index in route.link_lookup(ifname=outer)
            for link in route.get_links(index)
        )
    if whole and path.name in _mounted_namespaces():
        return
    _remove_volume_space(network)
    _enter_new_namespace(path)
    _link_to_host(outer, volume_gateway(network), inner, path.name)
    with IPRoute() as route:
        route.link("set", index=_index(route, "lo"), state="up")
        link = _index(route, inner)
        route.link("set", index=link, state="up")
        route.addr("add", index=link, address=volume_address(network), prefixlen=30)
        # To slots alone: the rest of the world has no route.
        for clients in (network.subnet, str(ALIASES)):
            route.route("add", dst=clients, gateway=volume_gateway(network), oif=link)
    with _host_namespace(), IPRoute() as host:
        host.link("set", index=_index(host, outer), state="up")


def _remove_volume_space(network: Network) -> None:
    """What still runs in it has no link any more."""
    _remove_links(volume_link(network))
    _remove_namespace(volume_space(network))


def _make_tap(slot: Slot) -> None:
    """A tap that stays without its maker and that QEMU opens as the slot's user."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), flags))
        fcntl.ioctl(tun, _TUNSETOWNER, slot.uid)
        fcntl.ioctl(tun, _TUNSETPERSIST, 1)
    finally:
        os.close(tun)


def _set_up(slot: Slot) -> None:
    """The last step: it commits the slot."""
    with IPRoute() as route:
        route.link("set", index=_index(route, slot.veth), state="up")


def _unmake(slot: Slot) -> None:
    """Remove what there is of a slot, however little; the veth first, so that it is no longer committed."""
    _remove_links(slot.veth, f"{slot.name}v")
    _remove_namespace(slot.path)
    # The number's next user must not have them counted. Without conntrack in the kernel there are none.
    with contextlib.suppress(OSError):
        forget_connections(slot.host_address)


def _remove_links(*names: str) -> None:
    with IPRoute() as route:
        for name in names:
            for index in route.link_lookup(ifname=name):
                route.link("del", index=index)


def _remove_namespace(path: Path) -> None:
    # Once for each time it was mounted over; EINVAL: it is none.
    while _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
        pass
    path.unlink(missing_ok=True)


def _remove_address(address: str) -> None:
    """Take an address away from the loopback interface if it is there."""
    with IPRoute() as route:
        lo = _index(route, "lo")
        for _ in route.get_addr(family=socket.AF_INET, index=lo, address=address):
            route.addr("del", index=lo, address=address, prefixlen=32)


@contextlib.contextmanager
def _host_namespace() -> Iterator[None]:
    """Within: this thread in the process's own network namespace; then back in the one it was in."""
    with Path("/proc/thread-self/ns/net").open("rb") as here, Path("/proc/self/ns/net").open("rb") as host:
        _call("setns", _libc.setns(host.fileno(), _CLONE_NEWNET))
        try:
            yield
        finally:
            _call("setns", _libc.setns(here.fileno(), _CLONE_NEWNET))


def _index(route: IPRoute, name: str) -> int:
    found = route.link_lookup(ifname=name)
    if not found:
        raise BackendFailed(f"the interface {name} went away while its network was made")
    return int(found[0])


def _share_run_netns() -> None:
    """Make /run/netns what iproute2 makes it: namespaces mounted there appear in every mount namespace."""
    _RUN_NETNS.mkdir(mode=0o755, parents=True, exist_ok=True)
    if _libc.mount(b"none", os.fsencode(_RUN_NETNS), b"none", _MS_SHARED | _MS_REC, None) != 0:
        _mount(_RUN_NETNS, _RUN_NETNS, _MS_BIND | _MS_REC)
        _mount("none", _RUN_NETNS, _MS_SHARED | _MS_REC)


def _mount(source: str | Path, target: Path, flags: int) -> None:
    _call(f"mount {target}", _libc.mount(os.fsencode(source), os.fsencode(target), b"none", flags, None))


def _mounted_namespaces() -> list[str]:
    """Names in /run/netns that are namespaces, not files that a crash left."""
    names = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "nsfs" and Path(fields[4]).parent == _RUN_NETNS:
            names.append(Path(fields[4]).name)
    return names


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []


def _sysctl(name: str, value: str, *, required: bool = True) -> None:
    """Set a sysctl of this thread's network namespace; ``required=False``: kernels may lack it."""
    try:
        Path("/proc/sys", name).write_text(value)
    except FileNotFoundError:
        if required:
            raise


def _call(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
