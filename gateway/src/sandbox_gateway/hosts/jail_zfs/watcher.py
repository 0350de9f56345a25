"""Detect jails that stop on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.connect import AGENT_PORT, open_connection
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.machine_register import Machine, MachineRegister
from sandbox_gateway.log import Logger

_INTERVAL_SECONDS = 1.0
_CHECKS_PER_PROBE = 5
"""Agents are probed on every fifth check."""
_MAX_CONCURRENT_PROBES = 32
_PROBE_TIMEOUT_SECONDS = 2.0

log = Logger("jail_zfs")


class JailWatcher:
    """Polls the list of jails, because FreeBSD does not report when a jail stops."""

    def __init__(self, register: MachineRegister, jails: Jails) -> None:
        self._register = register
        self._jails = jails
        self.on_exit: Callable[[str], None] = lambda instance: None
        """Called with the instance of a jail that has stopped."""

    async def run(self) -> None:
        check_count = 0
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            running_machines = [
                (name, each) for name, each in self._register.items() if each.is_running and not each.has_ended
            ]
            check_count += 1
            if not running_machines:
                continue
            try:
                running_jails = await self._jails.list_alive_jails()
                should_probe = check_count % _CHECKS_PER_PROBE == 0
                unresponsive_jails = (
                    await self._find_unresponsive([each for _, each in running_machines]) if should_probe else set()
                )
            except GatewayError as error:
                log.warning("the list of jails cannot be read", reason=error.message)
                continue
            for instance, machine in running_machines:
                has_stopped = machine.jail not in running_jails or machine.jail in unresponsive_jails
                if has_stopped and self._register.get(instance) is machine:
                    machine.has_ended = True
                    self.on_exit(instance)

    async def _find_unresponsive(self, machines: Sequence[Machine]) -> set[str]:
        """Return the jails that still exist although their agents have stopped. Root in a sandbox can cause this."""
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_PROBES)

        async def refuses_connection(machine: Machine) -> bool:
            async with semaphore:
                try:
                    async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):
                        _, writer = await open_connection(machine.epair.address, AGENT_PORT)
                    writer.close()
                    machine.has_answered = True
                except ConnectionRefusedError:
                    return machine.has_answered
                except OSError:
                    return False
                return False

        refusals = await asyncio.gather(*(refuses_connection(machine) for machine in machines))
        return {machine.jail for machine, has_refused in zip(machines, refusals, strict=True) if has_refused}
