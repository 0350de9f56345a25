"""Addresses in policies and of name servers: the same on every kind of host."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from sandbox_gateway.config import Network
from sandbox_gateway.errors import Invalid

METADATA = ("169.254.0.0/16", "100.100.100.200/32")
"""Where clouds tell a machine its credentials; reachable only where `allow_out` says so."""


AGENT_PORT, CODE_PORT = 49983, 49999
"""Where the agent listens in every sandbox, and where its code interpreter does."""


def networks(what: str, given: list[str]) -> list[ipaddress.IPv4Network]:
    """The networks that ``given`` names, those side by side joined. Raises Invalid for what is none."""
    found = []
    for text in given:
        try:
            found.append(ipaddress.IPv4Network(text.strip(), strict=False))
        except ValueError:
            raise Invalid(
                f"{what}: {text!r} is not an IPv4 address or CIDR (sandboxes have no IPv6; names are not resolved here)"
            ) from None
    return list(ipaddress.collapse_addresses(found))


def name_servers(network: Network) -> list[str]:
    """IPv4 name servers for sandboxes: the configured ones, else the host's that are not on its loopback."""
    if network.dns:
        return _ipv4(network.dns)
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        with contextlib.suppress(OSError):
            if servers := _ipv4(re.findall(r"^\s*nameserver\s+(\S+)", file.read_text(), re.MULTILINE)):
                return servers
    return []


def _ipv4(texts: Sequence[str]) -> list[str]:
    servers = []
    for text in texts:
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv4Address(text)
            if not address.is_loopback:
                servers.append(str(address))
    return list(dict.fromkeys(servers))
