"""Decide which domain names a sandbox can look up, and which of their addresses it can reach."""

from __future__ import annotations

import ipaddress

import dns.name

from sandbox_gateway.hosts.network_policy import (
    METADATA_NETWORKS,
    build_egress_rules,
    list_allowed_names,
    list_denied_networks,
)
from sandbox_gateway.records import NetworkPolicy


class NamePolicy:
    """The domain names in the ``allow_out`` of a policy. Raises Invalid for an invalid policy."""

    def __init__(self, policy: NetworkPolicy, subnet: ipaddress.IPv4Network) -> None:
        """``subnet``: the addresses of sandboxes."""
        names = list_allowed_names(policy)
        self._names = {dns.name.from_text(name) for name in names if not name.startswith("*.")}
        self._parents = {dns.name.from_text(name[2:]) for name in names if name.startswith("*.")}
        self._rules = [rule for rule in build_egress_rules(policy, []) if not rule.matches_allowed_names]
        metadata_networks = [ipaddress.IPv4Network(text) for text in METADATA_NETWORKS]
        specific_networks = [network for network in list_denied_networks(policy) if network.prefixlen > 0]
        self._closed_networks = [subnet, *metadata_networks, *specific_networks]
        self._subnet = subnet

    def __bool__(self) -> bool:
        """Return whether the policy contains names."""
        return bool(self._names or self._parents)

    def allows_name(self, name: dns.name.Name) -> bool:
        """Return whether the policy contains ``name``, or a wildcard that matches it. Ignores case."""
        if name in self._names:
            return True
        while name != dns.name.root:
            name = name.parent()
            if name in self._parents:
                return True
        return False

    def is_open(self, address: ipaddress.IPv4Address) -> bool:
        """Return whether the sandbox can reach ``address`` even if no allowed name resolves to it."""
        if address in self._subnet:
            return False
        return next(rule.allow for rule in self._rules if any(address in network for network in rule.networks))

    def may_open(self, address: ipaddress.IPv4Address) -> bool:
        """Return whether ``address`` becomes reachable if an allowed name resolves to it.

        The owner of a name can point it to any address. Therefore, names open only addresses of the public internet
        that ``deny_out`` does not contain. ``0.0.0.0/0`` in ``deny_out`` covers only addresses that no allowed name
        resolves to.
        """
        is_public = address.is_global and not address.is_multicast
        return is_public and not any(address in network for network in self._closed_networks)
