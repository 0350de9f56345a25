"""Clone, mount and capture the file systems of sandboxes, and remove them when they are no longer in use."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sandbox_gateway.errors import Busy, GatewayError, NotFound
from sandbox_gateway.hosts.jail_zfs.command_runner import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.holders import describe_holders
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import Mounted, MountTable
from sandbox_gateway.hosts.jail_zfs.jail.volume_mounts import VolumeMounts
from sandbox_gateway.hosts.jail_zfs.storage.root import SANDBOXES
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot, VolumeSnapshot
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

_RETRIES = 20
_RETRY_SECONDS = 3.0

log = Logger("jail_zfs")


class Disks:
    def __init__(
        self,
        storage: ZfsStorage,
        run: CommandRunner,
        jails: Jails,
        table: MountTable,
        mounts: VolumeMounts,
        background: BackgroundTasks,
    ) -> None:
        self._storage = storage
        self._run = run
        self._jails = jails
        self._table = table
        self._mounts = mounts
        self._background = background
        self._instances: set[str] = set()
        """The instances that have a dataset."""
        self._snapshots: dict[str, Snapshot] = {}

    @property
    def directory(self) -> Path:
        """Return the directory in which instances are mounted, without symbolic links, as `jls` reports it."""
        return Path(os.path.realpath(self._storage.root.mountpoint)) / SANDBOXES

    def path(self, instance: str) -> Path:
        return self.directory / instance

    def load(self, sandboxes: Iterable[Sandbox], snapshots: Iterable[Snapshot]) -> None:
        """Load the result of a scan."""
        self._snapshots = {snapshot.id: snapshot for snapshot in snapshots}
        self._update_snapshot_names()
        self._instances.update(sandbox.instance for sandbox in sandboxes)

    # -- file systems -----------------------------------------------------------------------------------------------

    async def clone(self, snapshot_id: str, sandbox: Sandbox) -> None:
        disk = sandbox.resources.disk_mb
        clone = self._storage.instances.clone
        await finish_despite_cancellation(asyncio.to_thread(clone, snapshot_id, sandbox.instance, disk_mb=disk))
        self._instances.add(sandbox.instance)

    async def mount(self, instance: str) -> None:
        """Mount an instance's file system. Raises Busy, which lists the holders, if that fails."""
        try:
            await asyncio.to_thread(self._storage.instances.mount, instance)
        except Busy:
            raise Busy(
                f"the file system of the sandbox ({self._storage.instances.dataset(instance)}) cannot be mounted: "
                f"{await self._describe_holders(instance)}. End these users, then try again"
            ) from None

    async def _describe_holders(self, instance: str) -> str:
        dataset = self._storage.instances.dataset(instance)
        return await describe_holders(self._run, self._jails, self._table, dataset, self.path(instance))

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.instance not in self._instances and sandbox.pause_snapshot:
            # The sandbox will start later: a clone protects the snapshot that it starts from, and carries the record.
            await self.clone(sandbox.pause_snapshot, sandbox)
        await finish_despite_cancellation(asyncio.to_thread(self._storage.instances.save, sandbox))

    async def forget(self, sandbox: Sandbox) -> None:
        """Drop the sandbox's record."""
        await finish_despite_cancellation(asyncio.to_thread(self._storage.instances.forget, sandbox.instance))

    async def discard(self, instance: str) -> None:
        """Remove or retire the dataset.

        Continues in the background if it is still in use, for example by a dying jail.
        """
        try:
            if self._mounts.stuck(self._is_in(instance)):
                raise Busy("a mount in the sandbox's file system is stuck")
            await finish_despite_cancellation(asyncio.to_thread(self._storage.instances.discard, instance))
        except Busy as error:
            holders = await self._describe_holders(instance)
            log.warning(
                "a sandbox's file system is still in use and will be removed later",
                instance=instance,
                reason=error.message,
                holders=holders,
            )
            self._background.start(self._discard_later(instance))
            return
        self._note_discarded(instance)

    def _is_in(self, instance: str) -> Callable[[Mounted], bool]:
        return lambda mount: mount.node.startswith(f"{self.path(instance)}/")

    async def _discard_later(self, instance: str) -> None:
        await self._mounts.wait_until_unmounted(self._is_in(instance))
        for _ in range(_RETRIES):
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                await finish_despite_cancellation(asyncio.to_thread(self._storage.instances.discard, instance))
            except GatewayError:
                continue
            self._note_discarded(instance)
            return
        holders = await self._describe_holders(instance)
        log.error(
            "a sandbox's file system could not be removed, the next start of the gateway tries again",
            instance=instance,
            holders=holders,
        )

    def _note_discarded(self, instance: str) -> None:
        self._instances.discard(instance)
        self._update_snapshot_names()

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def capture(self, sandbox: Sandbox, snapshot: Snapshot, volumes: Sequence[VolumeSnapshot]) -> None:
        capture = self._storage.snapshots.capture
        await finish_despite_cancellation(asyncio.to_thread(capture, sandbox.instance, snapshot, volumes))

    def expected_name(self, sandbox: Sandbox, snapshot: Snapshot) -> str:
        """Return the ZFS name of a snapshot that is about to be taken."""
        return f"{self._storage.instances.dataset(sandbox.instance)}@{snapshot.id}"

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await finish_despite_cancellation(asyncio.to_thread(self._storage.snapshots.save, snapshot))
        self.add_snapshot(snapshot)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(NotFound):  # an administrator may have used `zfs destroy`
            await finish_despite_cancellation(asyncio.to_thread(self._storage.snapshots.destroy, snapshot.id))
        self._snapshots.pop(snapshot.id, None)

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.id] = snapshot
        self._update_snapshot_names()

    def _update_snapshot_names(self) -> None:
        """Update ZFS names of snapshots, which change when their sandbox is removed."""
        for snapshot in self._snapshots.values():
            with contextlib.suppress(NotFound):
                snapshot.host["zfsSnapshot"] = self._storage.snapshots.full_name(snapshot.id)

    # -- queries ----------------------------------------------------------------------------------------------------

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return await asyncio.to_thread(self._storage.instances.has_diverged, sandbox.instance, head.id)

    async def unique_bytes(self, sandbox: Sandbox) -> int:
        """Return the number of bytes that only this sandbox uses."""
        return (await asyncio.to_thread(self._storage.instances.usage, sandbox.instance)).unique
