"""Names and addresses in the network: inside guests, of slots on the host, and of volume servers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.config import Network

GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX = 30
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_MAC = "02:5b:78:00:00:01"
TAP_MAC = "02:5b:78:00:00:02"
TAP = "tap0"
VOLUME_PORTS = range(22000, 32000, 2)
"""Ports of volumes on the gateway's address as guests see it.

A volume has two consecutive ports. No service uses these ports by default.
"""

ALIASES = ipaddress.IPv4Network("248.0.0.0/6")
"""Addresses that are permanently reserved, and used only in the servers' namespace."""

RUN_NETNS = Path("/run/netns")


@dataclass(frozen=True)
class Slot:
    """The network environment of one sandbox."""

    number: int
    name: str
    """Name of the network namespace."""
    path: Path
    """Path of the namespace's file; enter it with setns(2)."""
    host_address: str
    """The address that forwards every port to the guest, from the host."""
    veth_address: str
    """The host's own address on the slot's veth."""
    veth: str
    """Name of the veth's end on the host."""
    uid: int
    """The user besides root who may open the tap; 0: no one."""
    tap: str = TAP


def slot_capacity(network: Network) -> int:
    """Return how many slots the subnet has addresses for. Its last four are for volume servers."""
    return ipaddress.IPv4Network(network.subnet).num_addresses // 4 - 1


def host_table(network: Network) -> str:
    """Return the name of the host's nftables table, of family inet."""
    return f"{network.prefix}_sandbox"


def volume_address(network: Network) -> str:
    """Return the address at which volume servers listen, in their namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 1)


def volume_gateway(network: Network) -> str:
    """Return the host's address on the link to the volume servers' namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 2)


def volume_link(network: Network) -> str:
    """Return the name of the host's end of the link to the volume servers' namespace."""
    return f"{network.prefix}_vol"


def volume_space(network: Network) -> Path:
    """Return the file of the volume servers' namespace; enter it with setns(2)."""
    return RUN_NETNS / f"{network.prefix}-volumes"
