"""Start and stop the jail of a sandbox, with its network, limits and rules, and change its network policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.jail_zfs.jail.identity import (
    Identities,
    can_mount_identity,
    write_gateway_key,
    write_identity,
)
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.machine_register import Machine, MachineRegister
from sandbox_gateway.hosts.jail_zfs.network.jail_network import JailNetwork
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.log import Logger
from sandbox_gateway.records import NetworkPolicy, Sandbox
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

END_REASON = "its jail stopped together with the agent"

log = Logger("jail_zfs")


class JailRunner:
    """Starts and stops jails."""

    def __init__(
        self,
        register: MachineRegister,
        jails: Jails,
        identities: Identities,
        limits: Limits,
        network: JailNetwork,
        mounts: JailMounts,
        volumes: JailVolumes,
    ) -> None:
        self._register = register
        self._jails = jails
        self._identities = identities
        self._limits = limits
        self._network = network
        self._mounts = mounts
        self._volumes = volumes

    # -- start ------------------------------------------------------------------------------------------------------

    async def start(self, machine: Machine, sandbox: Sandbox, disk_mounting: Awaitable[None]) -> None:
        """Start a jail. If this fails, the caller must stop the sandbox.

        ``disk_mounting``: an awaitable that completes when the jail's file system is mounted.
        """
        await finish_despite_cancellation(wait_for_all(disk_mounting, self._prepare(machine, sandbox)))
        await self._launch(machine, sandbox)

    async def _prepare(self, machine: Machine, sandbox: Sandbox) -> None:
        """Write the identity and set up the network and the limits: the steps that do not need the file system."""
        directory = self._identities.path(sandbox.instance)
        write_identity(directory, sandbox, self._network.list_visible_name_servers(sandbox.network))
        write_gateway_key(directory)
        await finish_despite_cancellation(
            wait_for_all(
                self._network.connect(machine.jail, machine.epair, sandbox.network),
                self._limits.apply(machine.jail, sandbox.resources),
            )
        )

    async def _launch(self, machine: Machine, sandbox: Sandbox) -> None:
        epair, bridge = machine.epair, self._network.bridge
        await self._volumes.mount_all(machine, sandbox)
        await self._jails.create(
            machine.jail,
            machine.root,
            hostname=sandbox.hostname,
            identity=self._identities.path(sandbox.instance) if can_mount_identity(machine.root) else None,
            interface=epair.inner_end,
        )
        machine.is_running = True
        try:
            await finish_despite_cancellation(
                wait_for_all(
                    self._jails.configure_loopback(machine.jail),
                    self._jails.configure_interface(
                        machine.jail,
                        epair.inner_end,
                        address=epair.address,
                        prefix=bridge.subnet.prefixlen,
                        gateway=bridge.gateway,
                    ),
                )
            )
        except BackendFailed:
            if machine.jail not in await self._jails.list_alive_jails():
                raise BackendFailed(f"the sandbox did not start: {END_REASON}") from None
            raise
        sandbox.host = {"jail": machine.jail, "number": epair.number, "address": epair.address}

    # -- network policy ---------------------------------------------------------------------------------------------

    async def restore_network(self, sandbox: Sandbox) -> None:
        """Connect an adopted jail, and load its network rules."""
        machine = self._register.require_running(sandbox)
        await self._network.restore(machine.jail, machine.epair, sandbox.network)

    async def change_policy(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Load new rules, apply them to open connections as well, and update the jail's name servers."""
        machine = self._register.require_running(sandbox)
        await self._network.change_policy(machine.jail, machine.epair, policy)
        directory = self._identities.path(sandbox.instance)
        write_identity(directory, sandbox, self._network.list_visible_name_servers(policy))

    # -- stop -------------------------------------------------------------------------------------------------------

    async def stop(self, sandbox: Sandbox) -> None:
        """Remove the jail, then its network, mounts, limits and rules."""
        machine = self._register.pop(sandbox.instance)
        if machine is not None:
            await finish_despite_cancellation(self.clean_up(machine, sandbox.instance))

    async def clean_up(self, machine: Machine, instance: str) -> None:
        """Remove the jail first and then its other resources, so that no running process loses a resource."""
        if await self._attempt(machine, self._jails.remove(machine.jail, machine.epair.inner_end)):
            machine.is_running = False
        is_disconnected, *_ = await asyncio.gather(
            self._attempt(machine, self._network.destroy_epair(machine.epair)),
            self._attempt(machine, self._mounts.unmount_all(machine.root)),
            self._attempt(machine, self._limits.remove(machine.jail)),
            self._attempt(machine, self._network.remove_rules(machine.jail)),
        )
        self._identities.remove(instance)
        if is_disconnected:
            self._register.release_number(machine)

    async def sweep(self) -> list[str]:
        """Remove epairs, limits and rules that belong to no machine. Returns a description of each."""
        jails = {machine.jail for machine in self._register}
        numbers = {machine.epair.number for machine in self._register}
        descriptions = await self._network.sweep(numbers, jails)
        return descriptions + [f"the limits of the jail {name}" for name in await self._limits.sweep(jails)]

    def sweep_identities(self) -> None:
        self._identities.sweep(self._register)

    async def _attempt(self, machine: Machine, step: Awaitable[None]) -> bool:
        """Run one step and return whether it succeeded. A failure is logged, and the next scan removes the resource."""
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
