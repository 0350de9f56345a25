"""Restrict network access with pf, using an anchor for each jail and one for the bridge.

The main ruleset evaluates the anchors (``nat-anchor "sbx/*"``, ``anchor "sbx/*"``). The bridge's anchor
``sbx/<prefix>`` blocks traffic that no rule allows, and translates outgoing connections to the host's address. A jail's
anchor ``sbx/<jail>`` has ``quick`` rules for the jail's address. Root in a jail may give its interface any address, so
the rules on its epair drop packets from other addresses.

pf evaluates the packets of a jail on its epair, which is a member of the bridge, and then on the bridge. If a frame is
a broadcast, or is sent to the MAC address of the epair's outer end, the host receives it from the epair, and not
from the bridge. Therefore, the rules of a jail apply on the epair. On the bridge, only packets that match a state pass;
by default, pf's states are not bound to an interface.
"""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_gateway.errors import BackendFailed, Unsupported
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge, Epair
from sandbox_gateway.hosts.network_policy import build_egress_rules, list_allowed_names
from sandbox_gateway.records import NetworkPolicy

_ANCHOR_ROOT = "sbx"
MAX_CONNECTIONS = 4096
"""The maximum number of connections that a sandbox can have open, in pf's state table."""
_REMEDY = (
    f'add `nat-anchor "{_ANCHOR_ROOT}/*"` to the translation rules and `anchor "{_ANCHOR_ROOT}/*"` to the filter rules '
    "of /etc/pf.conf, then run `service pf start` and `pfctl -f /etc/pf.conf`; or run the jail_zfs_host role"
)
_MULTICAST_NETWORKS = ("224.0.0.0/4", "255.255.255.255")
"""Multicast and broadcast addresses: packets to them also reach the host."""


def build_bridge_rules(bridge: Bridge, egress: str) -> str:
    """Return the rules of the bridge. ``egress``: the interface to the internet, or "" to omit address translation."""
    nat_rule = f"nat on {egress} inet from {bridge.subnet} to any -> ({egress})\n" if egress else ""
    return f"{nat_rule}block drop on {bridge.name} all\n"


def require_enforceable_policy(policy: NetworkPolicy) -> None:
    """Raise Invalid if the policy contains a malformed address, and Unsupported if it contains a domain name."""
    build_egress_rules(policy, [])
    if names := list_allowed_names(policy):
        raise Unsupported(
            f"allowOut: {names[0]!r} is a domain name, but hosts of kind jail_zfs allow only addresses: list IPv4 "
            "addresses or CIDR blocks"
        )


def build_jail_rules(bridge: Bridge, epair: Epair, policy: NetworkPolicy, dns: Sequence[str]) -> str:
    """Return the rules of one jail. Raises the same errors as ``require_enforceable_policy``."""
    require_enforceable_policy(policy)
    scope = f"quick on {epair.outer_end} inet"
    # "global" counts the states of all rules together. The count is by address, so reloading does not reset it.
    state = f"keep state (source-track global, max-src-states {MAX_CONNECTIONS})"
    from_clause = f"from {epair.address}"
    lines = [
        f"block drop in quick on {epair.outer_end} inet from ! {epair.address} to any",
        f"block drop in quick on {epair.outer_end} inet6 all",
        f"pass out quick on {bridge.name} inet from {bridge.gateway} to {epair.address}",
    ]
    lines += [
        f"block return in {scope} {from_clause} to {target}"
        for target in ("(self)", str(bridge.subnet), *_MULTICAST_NETWORKS)
    ]
    for rule in build_egress_rules(policy, dns):
        for network in rule.networks:
            target = "any" if network.prefixlen == 0 else str(network)
            if rule.dns_only:
                lines += [
                    f"pass in {scope} proto {protocol} {from_clause} to {target} port 53 {state}"
                    for protocol in ("tcp", "udp")
                ]
            elif rule.allow:
                lines.append(f"pass in {scope} {from_clause} to {target} {state}")
            else:
                lines.append(f"block return in {scope} {from_clause} to {target}")
    return "".join(f"{line}\n" for line in lines)


class Pf:
    """Manages the packet filter's rules. ``prefix``: the prefix of the names of this gateway's jails."""

    def __init__(self, run: CommandRunner, bridge: Bridge, prefix: str) -> None:
        self._run = run
        self._bridge = bridge
        self._prefix = prefix

    async def open(self, egress: str) -> None:
        """Check the main ruleset, and load the bridge's rules.

        ``egress``: "" means the interface of the default route.
        """
        try:
            status = await self._run("pfctl", "-s", "info")
            filter_rules = await self._run("pfctl", "-s", "rules")
            translation_rules = await self._run("pfctl", "-s", "nat")
        except BackendFailed as error:
            raise BackendFailed(f"pf cannot be queried ({error.message}): {_REMEDY}") from None
        if "Status: Enabled" not in status:
            raise BackendFailed(f"pf is not enabled, so sandboxes could reach everything: {_REMEDY}")
        for kind, text in (("anchor", filter_rules), ("nat-anchor", translation_rules)):
            if not any(line.startswith(f'{kind} "{_ANCHOR_ROOT}/*"') for line in text.splitlines()):
                raise BackendFailed(f'pf\'s main ruleset has no `{kind} "{_ANCHOR_ROOT}/*"`: {_REMEDY}')
        await self._load(self._prefix, build_bridge_rules(self._bridge, egress or await self._find_default_egress()))

    async def close(self) -> None:
        await self.flush(self._prefix)

    async def _find_default_egress(self) -> str:
        try:
            output = await self._run("route", "-n", "get", "default")
        except BackendFailed as error:
            if "not been found" in error.message or "not in table" in error.message:
                return ""
            raise
        fields = (line.partition(":") for line in output.splitlines())
        return next((value.strip() for key, _, value in fields if key.strip() == "interface"), "")

    async def apply(self, jail: str, epair: Epair, policy: NetworkPolicy, dns: Sequence[str]) -> None:
        """Replace a jail's rules atomically. Open connections stay open."""
        await self._load(jail, build_jail_rules(self._bridge, epair, policy, dns))

    async def kill_states(self, epair: Epair) -> None:
        """Remove pf's states for a jail's address, so that the rules also apply to open connections."""
        await self._run("pfctl", "-q", "-k", epair.address)
        await self._run("pfctl", "-q", "-k", "0.0.0.0/0", "-k", epair.address)

    async def _load(self, name: str, rules: str) -> None:
        await self._run("pfctl", "-q", "-a", f"{_ANCHOR_ROOT}/{name}", "-f", "-", input=rules)

    async def flush(self, name: str) -> None:
        await self._run("pfctl", "-q", "-a", f"{_ANCHOR_ROOT}/{name}", "-F", "all")

    async def sweep(self, in_use: set[str]) -> list[str]:
        """Remove the rules of this gateway's jails that are not in ``in_use``. Returns the names of these jails."""
        anchors = (await self._run("pfctl", "-a", _ANCHOR_ROOT, "-s", "Anchors")).split()
        names = (name.removeprefix(f"{_ANCHOR_ROOT}/") for name in anchors)
        stray_jails = sorted(name for name in names if name.startswith(f"{self._prefix}-") and name not in in_use)
        for name in stray_jails:
            await self.flush(name)
        return stray_jails
