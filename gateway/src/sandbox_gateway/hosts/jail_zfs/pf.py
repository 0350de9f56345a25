"""What sandboxes may reach: an anchor of pf's for each, and one for the bridge.

The main rules call them (``nat-anchor "sbx/*"``, ``anchor "sbx/*"``). The bridge's anchor ``sbx/<prefix>`` blocks all
that nobody allows, and has those who may go out do so under the host's address. A jail's anchor ``sbx/<jail>`` decides
for the jail's address, each rule ``quick``. Its root may give its interface any address: the rules on its cable stop
what does not come from its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.addresses import egress_rules
from sandbox_gateway.hosts.jail_zfs.commands import Commands
from sandbox_gateway.hosts.jail_zfs.epair import Bridge, Cable
from sandbox_gateway.records import NetworkPolicy

_ROOT = "sbx"
_HELP = (
    f'put `nat-anchor "{_ROOT}/*"` among the translation rules and `anchor "{_ROOT}/*"` among the filter rules of '
    "/etc/pf.conf, then `service pf start` and `pfctl -f /etc/pf.conf`; or run the role jail_zfs_host"
)
_LIMITED = ("224.0.0.0/4", "255.255.255.255")
"""To whoever listens: the host as well."""


def bridge_rules(bridge: Bridge, egress: str) -> str:
    """``egress``: the interface to the internet; empty: there is none."""
    nat = f"nat on {egress} inet from {bridge.subnet} to any -> ({egress})\n" if egress else ""
    return f"{nat}block drop on {bridge.name} all\n"


def jail_rules(bridge: Bridge, cable: Cable, policy: NetworkPolicy, dns: Sequence[str]) -> str:
    """The rules of one jail. Raises Invalid for an address that is none."""
    here = f"quick on {bridge.name} inet"
    by = f"from {cable.address}"
    lines = [
        f"block drop in quick on {cable.outer} inet from ! {cable.address} to any",
        f"block drop in quick on {cable.outer} inet6 all",
        f"pass out {here} from {bridge.gateway} to {cable.address}",
    ]
    lines += [f"block return in {here} {by} to {place}" for place in ("(self)", str(bridge.subnet), *_LIMITED)]
    for rule in egress_rules(policy, dns):
        for network in rule.networks:
            place = "any" if network.prefixlen == 0 else str(network)
            if rule.dns_only:
                lines += [f"pass in {here} proto {kind} {by} to {place} port 53" for kind in ("tcp", "udp")]
            else:
                lines.append(f"{'pass' if rule.allow else 'block return'} in {here} {by} to {place}")
    return "".join(f"{line}\n" for line in lines)


class Pf:
    """``prefix``: of the names of this gateway's jails."""

    def __init__(self, run: Commands, bridge: Bridge, prefix: str) -> None:
        self._run = run
        self._bridge = bridge
        self._prefix = prefix

    async def open(self, egress: str) -> None:
        """Check the main rules and load the bridge's. ``egress``: empty for that of the default route."""
        try:
            info = await self._run("pfctl", "-s", "info")
            filters = await self._run("pfctl", "-s", "rules")
            translations = await self._run("pfctl", "-s", "nat")
        except BackendFailed as error:
            raise BackendFailed(f"pf does not answer ({error.message}): {_HELP}") from None
        if "Status: Enabled" not in info:
            raise BackendFailed(f"pf is not enabled, so nothing would hold sandboxes back: {_HELP}")
        for kind, text in (("anchor", filters), ("nat-anchor", translations)):
            if not any(line.startswith(f'{kind} "{_ROOT}/*"') for line in text.splitlines()):
                raise BackendFailed(f'pf\'s main rules have no `{kind} "{_ROOT}/*"`: {_HELP}')
        await self._load(self._prefix, bridge_rules(self._bridge, egress or await self._default_egress()))

    async def close(self) -> None:
        await self.flush(self._prefix)

    async def _default_egress(self) -> str:
        try:
            answer = await self._run("route", "-n", "get", "default")
        except BackendFailed as error:
            if "not been found" in error.message or "not in table" in error.message:
                return ""
            raise
        fields = (line.partition(":") for line in answer.splitlines())
        return next((value.strip() for key, _, value in fields if key.strip() == "interface"), "")

    async def apply(self, jail: str, cable: Cable, policy: NetworkPolicy, dns: Sequence[str]) -> None:
        """Put a jail's rules in force, at one blow; connections that are open go on."""
        await self._load(jail, jail_rules(self._bridge, cable, policy, dns))

    async def cut(self, cable: Cable) -> None:
        """Forget the connections of an address: the next packet of each is judged anew."""
        await self._run("pfctl", "-q", "-k", cable.address)
        await self._run("pfctl", "-q", "-k", "0.0.0.0/0", "-k", cable.address)

    async def _load(self, name: str, rules: str) -> None:
        await self._run("pfctl", "-q", "-a", f"{_ROOT}/{name}", "-f", "-", input=rules)

    async def flush(self, name: str) -> None:
        await self._run("pfctl", "-q", "-a", f"{_ROOT}/{name}", "-F", "all")

    async def sweep(self, kept: set[str]) -> list[str]:
        """Remove the rules of our jails that are not in ``kept``; returns their names."""
        listed = (await self._run("pfctl", "-a", _ROOT, "-s", "Anchors")).split()
        names = (name.removeprefix(f"{_ROOT}/") for name in listed)
        strays = sorted(name for name in names if name.startswith(f"{self._prefix}-") and name not in kept)
        for name in strays:
            await self.flush(name)
        return strays
