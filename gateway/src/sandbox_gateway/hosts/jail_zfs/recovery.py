"""Adopt running jails and remove orphaned resources at start-up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jail, Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountTable
from sandbox_gateway.hosts.jail_zfs.jail.volume_mounts import VolumeMounts
from sandbox_gateway.hosts.jail_zfs.runner import JailRunner
from sandbox_gateway.hosts.jail_zfs.running_machines import RunningMachines
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.records import Sandbox
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

_TEARDOWN_SECONDS = 300.0


class JailRecovery:
    def __init__(
        self,
        storage: ZfsStorage,
        machines: RunningMachines,
        disks: Disks,
        jails: Jails,
        table: MountTable,
        mounts: VolumeMounts,
        runner: JailRunner,
        volumes: JailVolumes,
    ) -> None:
        self._storage = storage
        self._machines = machines
        self._disks = disks
        self._jails = jails
        self._table = table
        self._mounts = mounts
        self._runner = runner
        self._volumes = volumes

    async def scan(self, dns: Sequence[str]) -> Scan:
        loop = asyncio.get_running_loop()
        jails = await self._jails.list_below(self._disks.directory)

        def teardown(instance: str) -> None:
            work = self._clear(instance, jails.pop(instance, []))
            asyncio.run_coroutine_threadsafe(work, loop).result(_TEARDOWN_SECONDS)

        found = await finish_despite_cancellation(asyncio.to_thread(self._storage.scan, teardown))
        scan = Scan(found.snapshots, found.sandboxes, found.volumes, found.volume_snapshots)
        scan.repaired += found.repaired
        scan.unreadable_sandboxes = found.unreadable_sandboxes
        self._disks.load(found.sandboxes, found.snapshots)
        for sandbox in found.sandboxes:
            if self._adopt(sandbox, jails.get(sandbox.instance, [])):
                del jails[sandbox.instance]
                scan.alive.add(sandbox.instance)
        for instance, strays in jails.items():
            await self._clear(instance, strays)
            if any(not jail.dying for jail in strays):
                scan.repaired.append(f"removed the jail {strays[0].name}, which belonged to no sandbox")
        scan.repaired += await self._sweep()
        scan.repaired += await self._volumes.recover(found.sandboxes)
        adopted = (sandbox for sandbox in found.sandboxes if sandbox.instance in scan.alive)
        await finish_despite_cancellation(
            wait_for_all(*(self._runner.enforce_policy(sandbox, dns) for sandbox in adopted))
        )
        return scan

    def _adopt(self, sandbox: Sandbox, jails: Sequence[Jail]) -> bool:
        name, number = sandbox.host.get("jail"), sandbox.host.get("number")
        if [jail.name for jail in jails if not jail.dying] != [name]:
            return False
        return self._machines.adopt(sandbox.instance, str(name), number, self._disks.path(sandbox.instance))

    async def _clear(self, instance: str, jails: Sequence[Jail]) -> None:
        """Remove the jails of an instance that was not adopted, and unmount everything in it."""
        for jail in jails:
            await self._jails.remove(jail.name)
        for mount in await self._table.list_below(self._disks.path(instance)):
            await self._table.unmount(mount)

    async def _sweep(self) -> list[str]:
        """Remove epairs, limits, rules, mounts and identities that belong to no machine."""
        swept = await self._runner.sweep()
        mounts: list[str] = []
        stuck: list[str] = []
        for mount in await self._table.list_below(self._disks.directory):
            if mount.kind in ("nullfs", "devfs") and not self._is_of_machine(mount.node):
                (mounts if await self._mounts.unmount_or_retry(mount) else stuck).append(mount.node)
        self._runner.sweep_identities()  # last, because they are the source of some of these mounts
        swept += [f"the mount {name}" for name in mounts]
        notes = [f"removed {name}, which belonged to no running sandbox" for name in swept]
        return notes + [
            f"the mount {name}, which belongs to no running sandbox, cannot be unmounted; the gateway retries"
            for name in stuck
        ]

    def _is_of_machine(self, node: str) -> bool:
        return Path(node).relative_to(self._disks.directory).parts[0] in self._machines
