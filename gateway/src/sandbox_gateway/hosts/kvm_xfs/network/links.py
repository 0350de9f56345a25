"""Create and remove the interfaces of slots and of the volume servers' namespace: taps, veths, addresses and routes.

Call all functions in a new thread (`namespaces.run_in_thread`), because they change the thread's network namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct

from pyroute2 import IPRoute

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    ALIAS_NETWORK,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX_LENGTH,
    RUN_NETNS,
    TAP_MAC,
    TAP_NAME,
    Slot,
    get_volume_address,
    get_volume_gateway,
    get_volume_link,
    get_volume_namespace,
)
from sandbox_gateway.hosts.kvm_xfs.network.conntrack import delete_connections
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import (
    HOST_NAMESPACE,
    enter_new_namespace,
    in_namespace,
    list_mounted_namespaces,
    remove_namespace,
    set_sysctl,
)

_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR, _IFF_UP = 0x0002, 0x1000, 0x4000, 0x1
_NUD_PERMANENT = 0x80


def find_slots(prefix: str) -> tuple[set[int], set[int]]:
    """Return the numbers of all existing slots, including incomplete ones, and the numbers of the complete slots."""
    pattern = re.compile(rf"{prefix}-(\d+)")
    names = [entry.name for entry in RUN_NETNS.iterdir()] if RUN_NETNS.is_dir() else []
    namespace_numbers = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
    mounted_numbers = {int(match[1]) for name in list_mounted_namespaces() if (match := pattern.fullmatch(name))}
    host_ends: dict[int, bool] = {}
    pattern = re.compile(rf"{prefix}-(\d+)[hv]")
    with IPRoute() as route:
        for link in route.get_links():
            if match := pattern.fullmatch(link.get_attr("IFLA_IFNAME") or ""):
                host_ends[int(match[1])] = bool(link["flags"] & _IFF_UP)
    return namespace_numbers | set(host_ends), {
        number for number, up in host_ends.items() if up and number in mounted_numbers
    }


def create_slot(slot: Slot) -> None:
    """Create a slot's namespace, veth and tap. The caller then creates its rules and calls ``commit_slot``."""
    enter_new_namespace(slot.path)
    set_sysctl("net/ipv4/ip_forward", "1")
    for interface in ("all", "default"):
        set_sysctl(f"net/ipv4/conf/{interface}/send_redirects", "0")
        set_sysctl(f"net/ipv4/conf/{interface}/accept_redirects", "0")
    set_sysctl("net/netfilter/nf_conntrack_tcp_loose", "0", required=False)
    # Answer ARP requests only from the guest's range: each sender uses an entry in a table that all namespaces share.
    set_sysctl("net/ipv4/conf/all/arp_ignore", "2")
    # Otherwise the kernel would send one ICMP error per second, and a guest might wait minutes for the next one.
    set_sysctl("net/ipv4/icmp_ratelimit", "0")
    _create_tap(slot)
    inner_name = f"{slot.name}v"
    _link_to_host(slot.veth, slot.veth_address, inner_name, slot.name)
    with IPRoute() as route:
        route.link("set", index=_find_interface_index(route, "lo"), state="up")
        tap_index = _find_interface_index(route, TAP_NAME)
        route.link("set", index=tap_index, address=TAP_MAC, state="up")
        route.addr("add", index=tap_index, address=GATEWAY_ADDRESS, prefixlen=GUEST_PREFIX_LENGTH)
        route.neigh("replace", dst=GUEST_ADDRESS, lladdr=GUEST_MAC, ifindex=tap_index, state=_NUD_PERMANENT)
        veth_index = _find_interface_index(route, inner_name)
        route.link("set", index=veth_index, state="up")
        route.addr("add", index=veth_index, address=slot.host_address, prefixlen=30)
        route.route("add", dst="default", gateway=slot.veth_address, oif=veth_index)


def _link_to_host(outer_name: str, address: str, inner_name: str, namespace: str) -> None:
    """Create a veth: the end ``outer_name`` on the host (``address``/30, down), ``inner_name`` in ``namespace``."""
    with in_namespace(HOST_NAMESPACE), IPRoute() as host:
        host.link("add", ifname=outer_name, kind="veth", peer={"ifname": inner_name, "net_ns_fd": namespace})
        host.addr("add", index=_find_interface_index(host, outer_name), address=address, prefixlen=30)
        set_sysctl(f"net/ipv6/conf/{outer_name}/disable_ipv6", "1", required=False)
        set_sysctl(f"net/ipv4/conf/{outer_name}/rp_filter", "1")


def create_volume_namespace(network: Network) -> None:
    """Create the volume servers' namespace if it is missing. Bringing up the host's end of the link commits it."""
    path, outer_name, inner_name = get_volume_namespace(network), get_volume_link(network), "eth0"
    with IPRoute() as route:
        is_committed = any(
            link["flags"] & _IFF_UP and route.get_addr(index=index, address=get_volume_gateway(network))
            for index in route.link_lookup(ifname=outer_name)
            for link in route.get_links(index)
        )
    if is_committed and path.name in list_mounted_namespaces():
        with in_namespace(path), IPRoute() as route:  # It may be from an earlier release, in which `lo` was up.
            route.link("set", index=_find_interface_index(route, "lo"), state="down")
        return
    remove_volume_namespace(network)
    enter_new_namespace(path)
    _link_to_host(outer_name, get_volume_gateway(network), inner_name, path.name)
    with IPRoute() as route:
        # `lo` stays down: the servers' packets to each other would pass through it.
        inner_index = _find_interface_index(route, inner_name)
        route.link("set", index=inner_index, state="up")
        route.addr("add", index=inner_index, address=get_volume_address(network), prefixlen=30)
        # The servers have routes only to slots.
        for destination in (network.subnet, str(ALIAS_NETWORK)):
            route.route("add", dst=destination, gateway=get_volume_gateway(network), oif=inner_index)
    with in_namespace(HOST_NAMESPACE), IPRoute() as host:
        host.link("set", index=_find_interface_index(host, outer_name), state="up")


def remove_volume_namespace(network: Network) -> None:
    """Remove the volume servers' namespace. Servers that still run in it lose their connections."""
    _remove_links(get_volume_link(network))
    remove_namespace(get_volume_namespace(network))


def _create_tap(slot: Slot) -> None:
    """Create a persistent tap, which QEMU opens as the slot's user."""
    tun_fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun_fd, _TUNSETIFF, struct.pack("16sH22x", TAP_NAME.encode(), flags))
        fcntl.ioctl(tun_fd, _TUNSETOWNER, slot.uid)
        fcntl.ioctl(tun_fd, _TUNSETPERSIST, 1)
    finally:
        os.close(tun_fd)


def commit_slot(slot: Slot) -> None:
    """Bring up the host's end of the veth. This last step marks the slot as complete."""
    with IPRoute() as route:
        route.link("set", index=_find_interface_index(route, slot.veth), state="up")


def remove_slot(slot: Slot) -> None:
    """Remove all parts of a slot. Starts with the veth, so that the slot is no longer committed."""
    _remove_links(slot.veth, f"{slot.name}v")
    remove_namespace(slot.path)
    # Delete its connections, which would count towards the limit of the next slot with this number. Fails without
    # conntrack.
    with contextlib.suppress(OSError):
        delete_connections(slot.host_address)


def _remove_links(*names: str) -> None:
    with IPRoute() as route:
        for name in names:
            for index in route.link_lookup(ifname=name):
                route.link("del", index=index)


def remove_loopback_address(address: str) -> None:
    """Remove an address from the loopback interface, if the interface has it."""
    with IPRoute() as route:
        loopback_index = _find_interface_index(route, "lo")
        for _ in route.get_addr(family=socket.AF_INET, index=loopback_index, address=address):
            route.addr("del", index=loopback_index, address=address, prefixlen=32)


def _find_interface_index(route: IPRoute, name: str) -> int:
    indexes = route.link_lookup(ifname=name)
    if not indexes:
        raise BackendFailed(f"the interface {name} disappeared while its network slot was being created: try again")
    return int(indexes[0])
