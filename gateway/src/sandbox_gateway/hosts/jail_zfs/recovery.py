"""Adopt running jails and remove orphaned resources at start-up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jail, Jails
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts
from sandbox_gateway.hosts.jail_zfs.machine_register import MachineRegister
from sandbox_gateway.hosts.jail_zfs.runner import JailRunner
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.records import Sandbox
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

_TEARDOWN_TIMEOUT_SECONDS = 300.0


class JailRecovery:
    def __init__(
        self,
        register: MachineRegister,
        disks: Disks,
        jails: Jails,
        mounts: JailMounts,
        runner: JailRunner,
        volumes: JailVolumes,
    ) -> None:
        self._register = register
        self._disks = disks
        self._jails = jails
        self._mounts = mounts
        self._runner = runner
        self._volumes = volumes

    async def scan(self) -> Scan:
        loop = asyncio.get_running_loop()
        jails = await self._jails.list_under(self._disks.directory)

        def tear_down(instance: str) -> None:
            coroutine = self._tear_down(instance, jails.pop(instance, []))
            asyncio.run_coroutine_threadsafe(coroutine, loop).result(_TEARDOWN_TIMEOUT_SECONDS)

        storage_scan = await self._disks.scan(tear_down)
        scan = Scan(storage_scan.snapshots, storage_scan.sandboxes, storage_scan.volumes, storage_scan.volume_snapshots)
        scan.repaired += storage_scan.repaired
        scan.unreadable_sandboxes = storage_scan.unreadable_sandboxes
        for sandbox in storage_scan.sandboxes:
            if self._adopt(sandbox, jails.get(sandbox.instance, [])):
                del jails[sandbox.instance]
                scan.running_instances.add(sandbox.instance)
        for instance, stray_jails in jails.items():
            await self._tear_down(instance, stray_jails)
            if any(not jail.is_dying for jail in stray_jails):
                scan.repaired.append(f"removed the jail {stray_jails[0].name}, which belonged to no sandbox")
        scan.repaired += await self._sweep()
        scan.repaired += await self._volumes.recover(storage_scan.sandboxes)
        adopted_sandboxes = (
            sandbox for sandbox in storage_scan.sandboxes if sandbox.instance in scan.running_instances
        )
        await finish_despite_cancellation(wait_for_all(*map(self._runner.restore_network, adopted_sandboxes)))
        return scan

    def _adopt(self, sandbox: Sandbox, jails: Sequence[Jail]) -> bool:
        name, number = sandbox.host.get("jail"), sandbox.host.get("number")
        if [jail.name for jail in jails if not jail.is_dying] != [name]:
            return False
        return self._register.adopt(sandbox.instance, str(name), number, self._disks.path(sandbox.instance))

    async def _tear_down(self, instance: str, jails: Sequence[Jail]) -> None:
        """Remove the jails of an instance that was not adopted, and unmount everything in it."""
        for jail in jails:
            await self._jails.remove(jail.name)
        await self._mounts.unmount_under(self._disks.path(instance))

    async def _sweep(self) -> list[str]:
        """Remove epairs, limits, rules, mounts and identities that belong to no machine. Returns notes for the log."""
        notes = [f"removed {name}, which belonged to no running sandbox" for name in await self._runner.sweep()]
        notes += await self._mounts.sweep(self._disks.directory, self._register)
        self._runner.sweep_identities()  # last, because they are the source of some of these mounts
        return notes
