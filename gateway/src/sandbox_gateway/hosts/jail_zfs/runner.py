"""Start and stop the jail of a sandbox, with its network, limits and rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.jail.identity import (
    Identities,
    can_mount_identity,
    write_gateway_key,
    write_identity,
)
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.jail.volume_mounts import VolumeMounts
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import Pf
from sandbox_gateway.hosts.jail_zfs.running_machines import Machine, RunningMachines
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.log import Logger
from sandbox_gateway.records import NetworkPolicy, Sandbox
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

ENDED = "its jail ended with the agent in it"

log = Logger("jail_zfs")


class JailRunner:
    """Runs jails. ``prefix``: prefix of their names.

    ``dying_seconds``: how long to wait for the name of a dying jail.
    """

    def __init__(
        self,
        machines: RunningMachines,
        disks: Disks,
        jails: Jails,
        identities: Identities,
        bridge: Bridge,
        pf: Pf,
        limits: Limits,
        mounts: VolumeMounts,
        volumes: JailVolumes,
        *,
        prefix: str,
        dying_seconds: float,
    ) -> None:
        self._machines = machines
        self._disks = disks
        self._jails = jails
        self._identities = identities
        self._bridge = bridge
        self._pf = pf
        self._limits = limits
        self._mounts = mounts
        self._volumes = volumes
        self._prefix = prefix
        self._dying_seconds = dying_seconds

    # -- start ------------------------------------------------------------------------------------------------------

    def reserve(self, sandbox: Sandbox, jail: str) -> Machine:
        """Reserve an address for a jail that is about to start. Raises Busy if all addresses are in use."""
        return self._machines.create(sandbox.instance, jail, self._disks.path(sandbox.instance))

    async def start(self, machine: Machine, sandbox: Sandbox, disk: Awaitable[None], dns: Sequence[str]) -> None:
        """Start a jail while ``disk`` mounts its file system. The caller stops the sandbox on failure."""
        await finish_despite_cancellation(wait_for_all(disk, self._prepare(machine, sandbox, dns)))
        await self._launch(machine, sandbox)

    def jail_name(self, sandbox: Sandbox) -> str:
        return f"{self._prefix}-{sandbox.instance}"

    async def free_jail_name(self, sandbox: Sandbox) -> str:
        """Return an unused jail name.

        It is an alternative name if a dying jail does not release the usual name in time.
        """
        name = self.jail_name(sandbox)
        deadline = asyncio.get_running_loop().time() + self._dying_seconds
        while True:
            jails = await self._jails.list_below(self._disks.directory)
            taken = {jail.name for jail in jails.get(sandbox.instance, [])}
            if name not in taken:
                return name
            if asyncio.get_running_loop().time() > deadline:
                return next(other for n in range(2, 1000) if (other := f"{name}-{n}") not in taken)
            await asyncio.sleep(0.05)

    async def _prepare(self, machine: Machine, sandbox: Sandbox, dns: Sequence[str]) -> None:
        """Set up everything that does not need the jail's file system."""
        directory = self._identities.path(sandbox.instance)
        write_identity(directory, sandbox, _visible_name_servers(dns, sandbox.network))
        write_gateway_key(directory)
        await finish_despite_cancellation(
            wait_for_all(
                self._bridge.create(machine.epair),
                self._limits.apply(machine.jail, sandbox.resources),
                self._pf.apply(machine.jail, machine.epair, sandbox.network, dns),
            )
        )

    async def _launch(self, machine: Machine, sandbox: Sandbox) -> None:
        epair = machine.epair
        await self._volumes.mount_all(machine, sandbox)
        await self._jails.create(
            machine.jail,
            machine.root,
            hostname=sandbox.hostname,
            identity=self._identities.path(sandbox.instance) if can_mount_identity(machine.root) else None,
            interface=epair.inner,
        )
        machine.is_running = True
        prefix, gateway = self._bridge.subnet.prefixlen, self._bridge.gateway
        try:
            await finish_despite_cancellation(
                wait_for_all(
                    self._jails.configure_loopback(machine.jail),
                    self._jails.configure_interface(
                        machine.jail, epair.inner, address=epair.address, prefix=prefix, gateway=gateway
                    ),
                )
            )
        except BackendFailed:
            if machine.jail not in await self._jails.list_alive():
                raise BackendFailed(f"the sandbox did not start: {ENDED}") from None
            raise
        sandbox.host = {"jail": machine.jail, "number": epair.number, "address": epair.address}

    # -- network policy ---------------------------------------------------------------------------------------------

    async def enforce_policy(self, sandbox: Sandbox, dns: Sequence[str]) -> None:
        """Load the rules of an adopted jail."""
        machine = self._machines.require_running(sandbox)
        await self._pf.apply(machine.jail, machine.epair, sandbox.network, dns)

    async def change_policy(self, sandbox: Sandbox, policy: NetworkPolicy, dns: Sequence[str]) -> None:
        """Load new rules, which also apply to open connections, and update the jail's name servers."""
        machine = self._machines.require_running(sandbox)
        await self._pf.apply(machine.jail, machine.epair, policy, dns)
        await self._pf.forget_connections(machine.epair)
        write_identity(self._identities.path(sandbox.instance), sandbox, _visible_name_servers(dns, policy))

    # -- stop -------------------------------------------------------------------------------------------------------

    async def stop(self, sandbox: Sandbox) -> None:
        """Remove the jail, then its network, mounts, limits and rules."""
        machine = self._machines.pop(sandbox.instance)
        if machine is not None:
            await finish_despite_cancellation(self.clean_up(machine, sandbox.instance))

    async def clean_up(self, machine: Machine, instance: str) -> None:
        """Remove all resources of a machine, in an order that removes no resource of a running process."""
        if await self._attempt(machine, self._jails.remove(machine.jail, machine.epair.inner)):
            machine.is_running = False
        is_disconnected, *_ = await asyncio.gather(
            self._attempt(machine, self._bridge.destroy(machine.epair)),
            self._attempt(machine, self._mounts.unmount_all(machine.root)),
            self._attempt(machine, self._limits.remove(machine.jail)),
            self._attempt(machine, self._pf.flush(machine.jail)),
        )
        self._identities.remove(instance)
        if is_disconnected:
            self._machines.free_number(machine)

    async def sweep(self) -> list[str]:
        """Remove epairs, limits and rules that belong to no machine. Returns a description of each."""
        jails = {machine.jail for machine in self._machines}
        epairs = await self._bridge.sweep({machine.epair.number for machine in self._machines})
        limits = await self._limits.sweep(f"{self._prefix}-", jails)
        anchors = await self._pf.sweep(jails)
        return [
            *(f"the epair {name}" for name in epairs),
            *(f"the limits of the jail {name}" for name in limits),
            *(f"the rules of the jail {name}" for name in anchors),
        ]

    def sweep_identities(self) -> None:
        self._identities.sweep(self._machines)

    async def _attempt(self, machine: Machine, step: Awaitable[None]) -> bool:
        """Run one step. A failure does not prevent the other steps, and the next scan repeats it."""
        try:
            await step
        except GatewayError as error:
            log.warning(
                "a resource of a jail could not be removed and remains until the next start of the gateway",
                jail=machine.jail,
                reason=error.message,
            )
            return False
        return True


def _visible_name_servers(dns: Sequence[str], policy: NetworkPolicy) -> list[str]:
    """Return the name servers in the resolv.conf of a sandbox with this policy."""
    return list(dns) if policy.allow_internet or policy.allow_out else []
