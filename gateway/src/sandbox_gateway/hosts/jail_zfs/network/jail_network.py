"""Connect jails to the network, and enforce their network policies."""

from __future__ import annotations

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge, Epair
from sandbox_gateway.hosts.jail_zfs.network.pf import Pf
from sandbox_gateway.hosts.network_policy import find_name_servers
from sandbox_gateway.log import Logger
from sandbox_gateway.records import NetworkPolicy
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

log = Logger("jail_zfs")


class JailNetwork:
    """Manages the bridge, and each jail's epair and packet filter rules."""

    def __init__(self, run: CommandRunner, config: Config) -> None:
        self._run = run
        prefix = config.network.prefix
        bridge_name = config.jail_zfs.bridge or f"{prefix}br"
        self.bridge = Bridge(run, name=bridge_name, prefix=prefix, subnet=config.network.subnet)
        self._pf = Pf(run, self.bridge, prefix)
        self._config = config

    async def open(self) -> None:
        await self.bridge.open()
        # By default, pf does not see packets for the host on the bridge member, where their source is checked.
        await self._run("sysctl", *(f"net.link.bridge.{name}=1" for name in ("pfil_member", "pfil_local_phys")))
        await self._pf.open(self._config.jail_zfs.egress)

    async def close(self) -> None:
        """Remove the bridge and its rules. Call this when no jail is connected."""
        await self._pf.close()
        await self.bridge.close()

    def list_name_servers(self) -> list[str]:
        return find_name_servers(self._config.network)

    def list_visible_name_servers(self, policy: NetworkPolicy) -> list[str]:
        """Return the name servers for the resolv.conf of a jail with this policy."""
        return self.list_name_servers() if policy.allows_egress else []

    async def connect(self, jail: str, epair: Epair, policy: NetworkPolicy) -> None:
        """Create an epair and load the rules of its jail. Call this before the jail is created."""
        await finish_despite_cancellation(
            wait_for_all(self.bridge.create(epair), self._load_rules(jail, epair, policy))
        )

    async def restore(self, jail: str, epair: Epair, policy: NetworkPolicy) -> None:
        """Connect a jail that an earlier gateway process started, and load its rules."""
        if not await self.bridge.restore(epair):
            # Root in a jail may destroy its interface. This must not keep the gateway from starting.
            log.warning("the network interface of a jail no longer exists", jail=jail, interface=epair.outer_end)
        await self._load_rules(jail, epair, policy)

    async def _load_rules(self, jail: str, epair: Epair, policy: NetworkPolicy) -> None:
        """Replace the rules of a jail atomically. They only apply to new connections."""
        await self._pf.apply(jail, epair, policy, self.list_name_servers())

    async def change_policy(self, jail: str, epair: Epair, policy: NetworkPolicy) -> None:
        """Replace the rules of a jail, and apply them to open connections as well as new ones."""
        await self._load_rules(jail, epair, policy)
        await self._pf.kill_states(epair)

    async def destroy_epair(self, epair: Epair) -> None:
        await self.bridge.destroy(epair)

    async def remove_rules(self, jail: str) -> None:
        await self._pf.flush(jail)

    async def sweep(self, numbers: set[int], jails: set[str]) -> list[str]:
        """Remove the epairs and ARP entries whose numbers are not in ``numbers``, and the rules of other jails.

        Returns a description of each.
        """
        descriptions = await self.bridge.sweep(numbers)
        jail_names = await self._pf.sweep(jails)
        return descriptions + [f"the rules of the jail {name}" for name in jail_names]
