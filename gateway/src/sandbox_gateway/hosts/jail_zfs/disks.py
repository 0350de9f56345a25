"""Clone, mount and capture the file systems of sandboxes, and remove them when they are no longer in use.

Also save, name and remove the snapshots of these file systems.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sandbox_gateway.errors import Busy, NotFound, Timeout
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts, MountFilter
from sandbox_gateway.hosts.jail_zfs.retries import retry_later
from sandbox_gateway.hosts.jail_zfs.storage.storage import StorageScan, ZfsStorage
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot, VolumeSnapshot
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

log = Logger("jail_zfs")


class Disks:
    def __init__(
        self, storage: ZfsStorage, calls: StorageCalls, mounts: JailMounts, background: BackgroundTasks
    ) -> None:
        self._storage = storage
        self._calls = calls
        self._mounts = mounts
        self._background = background
        self._instances: set[str] = set()
        """Instances that have a dataset."""
        self._snapshots: dict[str, Snapshot] = {}

    @property
    def directory(self) -> Path:
        """Return the directory on the host in which instances are mounted."""
        return self._storage.instances.directory

    def path(self, instance: str) -> Path:
        return self._storage.instances.path(instance)

    async def scan(self, teardown: Callable[[str], None]) -> StorageScan:
        """Scan the storage. ``teardown``: see ``ZfsStorage.scan``."""
        scan = await finish_despite_cancellation(self._calls.run(self._storage.scan, teardown))
        self._snapshots = {snapshot.id: snapshot for snapshot in scan.snapshots}
        self._update_snapshot_names()
        self._instances.update(sandbox.instance for sandbox in scan.sandboxes)
        return scan

    # -- file systems -----------------------------------------------------------------------------------------------

    async def clone(self, snapshot_id: str, sandbox: Sandbox) -> None:
        disk_mb = sandbox.resources.disk_mb
        clone = self._storage.instances.clone
        await finish_despite_cancellation(self._calls.run(clone, snapshot_id, sandbox.instance, disk_mb=disk_mb))
        self._instances.add(sandbox.instance)

    async def mount(self, instance: str) -> None:
        """Mount an instance's file system. Raises Busy, with a list of the holders, if it is still in use."""
        await self._calls.run(self._storage.instances.mount, instance)

    async def save(self, sandbox: Sandbox) -> None:
        """Commit the sandbox's record. Clones the pause snapshot first if the instance has no file system yet."""
        if sandbox.instance not in self._instances and sandbox.pause_snapshot:
            # The sandbox will start later. Until then, the clone stores the record and protects the snapshot.
            await self.clone(sandbox.pause_snapshot, sandbox)
        await finish_despite_cancellation(self._calls.run(self._storage.instances.save, sandbox))

    async def remove_record(self, sandbox: Sandbox) -> None:
        """Remove the sandbox's record."""
        await finish_despite_cancellation(self._calls.run(self._storage.remove_record, sandbox))

    async def discard(self, instance: str) -> None:
        """Remove or retire an instance's dataset.

        Retries in the background while the dataset is in use, for example by a dying jail, or if the command hangs.
        """
        try:
            if reasons := self._mounts.describe_stuck_mounts(self._create_mount_filter(instance)):
                raise Busy("; ".join(reasons))
            await finish_despite_cancellation(self._calls.run(self._storage.instances.discard, instance))
        except (Busy, Timeout) as error:
            log.warning(
                "a sandbox's file system cannot be removed yet and will be removed later",
                instance=instance,
                reason=error.message,
            )
            self._background.start(self._discard_later(instance))
            return
        self._finish_discard(instance)

    def _create_mount_filter(self, instance: str) -> MountFilter:
        return lambda mount: mount.node.startswith(f"{self.path(instance)}/")

    async def _discard_later(self, instance: str) -> None:
        discard = partial(self._storage.instances.discard, instance)
        error = await retry_later(discard, self._mounts, self._create_mount_filter(instance))
        if error is None:
            self._finish_discard(instance)
            return
        log.error(
            "a sandbox's file system could not be removed; the gateway will try again when it next starts",
            instance=instance,
            reason=(await self._calls.explain(error)).message,
        )

    def _finish_discard(self, instance: str) -> None:
        self._instances.discard(instance)
        self._update_snapshot_names()

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def capture(self, sandbox: Sandbox, snapshot: Snapshot, volumes: Sequence[VolumeSnapshot]) -> None:
        capture = self._storage.snapshots.capture
        await finish_despite_cancellation(self._calls.run(capture, sandbox.instance, snapshot, volumes))

    def predict_name(self, sandbox: Sandbox, snapshot: Snapshot) -> str:
        """Return the full ZFS name that a new snapshot of the sandbox will have."""
        return f"{self._storage.instances.dataset(sandbox.instance)}@{snapshot.id}"

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await finish_despite_cancellation(self._calls.run(self._storage.snapshots.save, snapshot))
        self.add_snapshot(snapshot)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(NotFound):  # an administrator may have used `zfs destroy`
            await finish_despite_cancellation(self._calls.run(self._storage.snapshots.destroy, snapshot.id))
        self._snapshots.pop(snapshot.id, None)

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.id] = snapshot
        self._update_snapshot_names()

    def _update_snapshot_names(self) -> None:
        """Update the ZFS names in the records of snapshots. A name changes when the snapshot's sandbox is removed."""
        for snapshot in self._snapshots.values():
            with contextlib.suppress(NotFound):
                snapshot.host["zfsSnapshot"] = self._storage.snapshots.get_full_name(snapshot.id)

    # -- queries ----------------------------------------------------------------------------------------------------

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return await self._calls.run(self._storage.instances.has_diverged, sandbox.instance, head.id)

    async def count_unique_bytes(self, sandbox: Sandbox) -> int:
        """Return the number of bytes that only this sandbox uses."""
        return await self._calls.run(self._storage.instances.count_unique_bytes, sandbox.instance)
