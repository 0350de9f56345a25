"""Define the names and addresses of guests, of slots on the host, and of volume servers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.config import Network

GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX_LENGTH = 30
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_MAC = "02:5b:78:00:00:01"
TAP_MAC = "02:5b:78:00:00:02"
TAP_NAME = "tap0"
VOLUME_PORTS = range(22000, 32000, 2)
"""First ports of volumes, at the address of the gateway as guests see it.

A volume uses two consecutive ports. No well-known service uses these ports by default.
"""

ALIAS_NETWORK = ipaddress.IPv4Network("248.0.0.0/6")
"""A permanently reserved range of addresses. They are used only in the namespace of the volume servers."""

RUN_NETNS = Path("/run/netns")


@dataclass(frozen=True)
class Slot:
    """The network environment of one sandbox."""

    number: int
    name: str
    """Name of the network namespace."""
    path: Path
    """Path of the namespace's file, for setns(2)."""
    host_address: str
    """The address at which the host reaches the guest. All of its ports are forwarded to the guest."""
    veth_address: str
    """The host's own address on the slot's veth."""
    veth: str
    """Name of the host's end of the veth."""
    uid: int
    """The id of the user who may open the tap in addition to root; 0 means only root."""
    tap: str = TAP_NAME


def count_slots(network: Network) -> int:
    """Return the number of slots for which the subnet has addresses. Volume servers use its last four addresses."""
    return ipaddress.IPv4Network(network.subnet).num_addresses // 4 - 1


def get_host_table(network: Network) -> str:
    """Return the name of the host's nftables table (family inet)."""
    return f"{network.prefix}_sandbox"


def get_volume_address(network: Network) -> str:
    """Return the address at which volume servers listen in their namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 1)


def get_volume_gateway(network: Network) -> str:
    """Return the host's address on the link to the volume servers' namespace."""
    return str(ipaddress.IPv4Network(network.subnet).broadcast_address - 2)


def get_volume_link(network: Network) -> str:
    """Return the name of the host's end of the link to the volume servers' namespace."""
    return f"{network.prefix}_vol"


def get_volume_namespace(network: Network) -> Path:
    """Return the path of the volume servers' namespace file, for setns(2)."""
    return RUN_NETNS / f"{network.prefix}-volumes"
