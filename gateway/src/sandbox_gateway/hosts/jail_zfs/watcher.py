"""Detect jails that end by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.addresses import AGENT_PORT
from sandbox_gateway.hosts.connect import open_connection
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.running_machines import Machine, RunningMachines
from sandbox_gateway.log import Logger

_INTERVAL_SECONDS = 1.0
_CHECKS_PER_PROBE = 5
"""Agents are probed only at every fifth check."""
_CONCURRENT_PROBES = 32
_PROBE_SECONDS = 2.0

log = Logger("jail_zfs")


class JailWatcher:
    """Polls the list of jails, because FreeBSD does not report that a jail has ended."""

    def __init__(self, machines: RunningMachines, jails: Jails) -> None:
        self._machines = machines
        self._jails = jails
        self.on_exit: Callable[[str], None] = lambda instance: None
        """A function that is called with the instance whose jail ended."""

    async def run(self) -> None:
        checks = 0
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            running = [(name, each) for name, each in self._machines.items() if each.is_running and not each.has_ended]
            checks += 1
            if not running:
                continue
            try:
                alive = await self._jails.list_alive()
                should_probe = checks % _CHECKS_PER_PROBE == 0
                mute = await self._find_unresponsive([each for _, each in running]) if should_probe else set()
            except GatewayError as error:
                log.warning("the list of jails cannot be read", reason=error.message)
                continue
            for instance, machine in running:
                is_gone = machine.jail not in alive or machine.jail in mute
                if is_gone and self._machines.get(instance) is machine:
                    machine.has_ended = True
                    self.on_exit(instance)

    async def _find_unresponsive(self, machines: Sequence[Machine]) -> set[str]:
        """Return jails in which processes run but the agent does not, which root in a sandbox can cause."""
        slots = asyncio.Semaphore(_CONCURRENT_PROBES)

        async def refuses(machine: Machine) -> bool:
            async with slots:
                try:
                    async with asyncio.timeout(_PROBE_SECONDS):
                        _, writer = await open_connection(machine.epair.address, AGENT_PORT)
                    writer.close()
                    machine.has_answered = True
                except ConnectionRefusedError:
                    return machine.has_answered
                except OSError:
                    return False
                return False

        refused = await asyncio.gather(*(refuses(machine) for machine in machines))
        return {machine.jail for machine, mute in zip(machines, refused, strict=True) if mute}
