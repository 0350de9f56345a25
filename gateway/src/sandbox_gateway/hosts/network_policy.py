"""Translate network policies into rules, and find name servers, for all kinds of host."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.config import Network
from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import NetworkPolicy

METADATA_NETWORKS = (
    "169.254.0.0/16",  # Link-local: most clouds, and AWS's container credentials.
    "100.100.100.200/32",  # Alibaba Cloud.
    "168.63.129.16/32",  # Azure: WireServer.
    "192.0.0.192/32",  # Oracle Cloud.
)
"""Networks that contain the addresses at which clouds serve a machine's credentials.

These addresses are blocked, unless an `allow_out` entry within one of the networks allows them.
"""


_DOMAIN_NAME = re.compile(
    r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?\.?", re.ASCII | re.IGNORECASE
)
"""At least two labels. The last one begins with a letter, so that no spelling of an IPv4 address is a name."""
_MAX_NAME_LENGTH = 253
_NAME_HINTS = {
    "allowOut": ", or a domain name such as 'api.example.com' or '*.example.com' (international names in Punycode)",
    "denyOut": ". Domain names can only be allowed",
}


@dataclass(frozen=True)
class EgressRule:
    """A rule that allows or denies packets from a sandbox to ``networks``. The first matching rule decides."""

    allow: bool
    networks: tuple[ipaddress.IPv4Network, ...]
    dns_only: bool = False
    """The rule matches only port 53, over TCP and UDP."""
    matches_allowed_names: bool = False
    """The rule matches the current addresses of the allowed names instead of ``networks``, which is empty."""


def build_egress_rules(policy: NetworkPolicy, dns: Sequence[str]) -> list[EgressRule]:
    """Translate ``policy`` into rules for addresses outside the host. Raises Invalid for an invalid address.

    ``dns``: addresses of the name servers. Port 53 of an allowed name server is open even at a metadata address.
    """
    metadata_networks = [ipaddress.IPv4Network(text) for text in METADATA_NETWORKS]
    names = list_allowed_names(policy)
    allowed_networks = _parse_networks("allowOut", (text for text in policy.allow_out if not _is_name(text)))
    denied_networks = list_denied_networks(policy)
    allowed_metadata_networks = [network for network in allowed_networks if _is_within(network, metadata_networks)]
    other_allowed_networks = [network for network in allowed_networks if not _is_within(network, metadata_networks)]
    metadata_name_servers = [
        server
        for server in map(ipaddress.IPv4Network, dns)
        if _is_within(server, metadata_networks)
        and (
            _is_within(server, other_allowed_networks)
            or (policy.allow_internet and not _is_within(server, denied_networks))
        )
    ]
    all_addresses = [ipaddress.IPv4Network("0.0.0.0/0")]
    rules = [
        _create_rule(True, allowed_metadata_networks),
        _create_rule(True, metadata_name_servers, dns_only=True),
        _create_rule(False, metadata_networks),
        _create_rule(True, other_allowed_networks),
        EgressRule(True, (), matches_allowed_names=bool(names)),
        _create_rule(False, denied_networks),
        _create_rule(policy.allow_internet, all_addresses),
    ]
    return [rule for rule in rules if rule.networks or rule.matches_allowed_names]


def list_allowed_names(policy: NetworkPolicy) -> list[str]:
    """Return the domain names in ``allow_out``, in lower case and without a final dot.

    ``*.example.com`` stands for all subdomains of example.com, but not for example.com itself. Raises Invalid if the
    policy allows all other addresses, because then names would have no effect.
    """
    names = [text.strip().rstrip(".").lower() for text in policy.allow_out if _is_name(text)]
    if names and policy.allow_internet and not any(network.prefixlen == 0 for network in list_denied_networks(policy)):
        raise Invalid(
            f"allowOut: the domain name {names[0]!r} has an effect only if all other addresses are denied: add "
            "'0.0.0.0/0' to 'denyOut', or block them with 'allowInternetAccess: false'"
        )
    return names


def list_denied_networks(policy: NetworkPolicy) -> list[ipaddress.IPv4Network]:
    """Return the networks in ``deny_out``. Raises Invalid for an invalid entry."""
    return _parse_networks("denyOut", policy.deny_out)


def _is_name(text: str) -> bool:
    text = text.strip()
    return len(text.rstrip(".")) <= _MAX_NAME_LENGTH and _DOMAIN_NAME.fullmatch(text) is not None


def _create_rule(allow: bool, networks: Iterable[ipaddress.IPv4Network], *, dns_only: bool = False) -> EgressRule:
    return EgressRule(allow, tuple(ipaddress.collapse_addresses(networks)), dns_only)


def _is_within(network: ipaddress.IPv4Network, ranges: Iterable[ipaddress.IPv4Network]) -> bool:
    return any(network.subnet_of(each) for each in ranges)


def _parse_networks(field: str, texts: Iterable[str]) -> list[ipaddress.IPv4Network]:
    networks = []
    for text in texts:
        try:
            networks.append(ipaddress.IPv4Network(text.strip(), strict=False))
        except ValueError:
            raise Invalid(
                f"{field}: {text!r} is not an IPv4 address or CIDR block. Use one of these (sandboxes have no "
                f"IPv6){_NAME_HINTS[field]}"
            ) from None
    return networks


def find_name_servers(network: Network) -> list[str]:
    """Return the IPv4 name servers for sandboxes: the configured ones, or else those of the host.

    Loopback addresses are omitted.
    """
    if network.dns:
        return _parse_name_servers(network.dns)
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        with contextlib.suppress(OSError):
            if servers := _parse_name_servers(re.findall(r"^\s*nameserver\s+(\S+)", file.read_text(), re.MULTILINE)):
                return servers
    return []


def _parse_name_servers(texts: Sequence[str]) -> list[str]:
    servers = []
    for text in texts:
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv4Address(text)
            if not address.is_loopback:
                servers.append(str(address))
    return list(dict.fromkeys(servers))
