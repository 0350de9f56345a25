"""Manage the volumes of a jail host, which are datasets mounted in jails with nullfs.

``Sandbox.mounts`` lists the intended mounts, and the kernel's mount table lists the existing ones. Mounts are not
recorded anywhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import Busy, GatewayError, NotFound, Timeout
from sandbox_gateway.hosts.base import VolumeState
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountEntry
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts, MountFilter
from sandbox_gateway.hosts.jail_zfs.jail.suspension import JailSuspension
from sandbox_gateway.hosts.jail_zfs.machine_register import Machine, MachineRegister
from sandbox_gateway.hosts.jail_zfs.retries import retry_later
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, Volume, VolumeSnapshot
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

log = Logger("volumes")


class JailVolumes:
    def __init__(
        self,
        storage: ZfsStorage,
        calls: StorageCalls,
        register: MachineRegister,
        mounts: JailMounts,
        suspension: JailSuspension,
        background: BackgroundTasks,
    ) -> None:
        self._volume_storage = storage.volumes
        self._snapshots = storage.volume_snapshots
        self._calls = calls
        self._register = register
        self._mounts = mounts
        self._suspension = suspension
        self._background = background

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        await finish_despite_cancellation(
            self._calls.run(self._volume_storage.create, volume, source.id if source else None)
        )

    async def grow(self, volume: Volume, size_mb: int) -> None:
        await finish_despite_cancellation(self._calls.run(self._volume_storage.grow, volume, size_mb))
        volume.size_mb = size_mb

    async def remove(self, volume: Volume) -> None:
        """Commit the removal, then destroy the datasets.

        Retries in the background while the datasets are in use, or if a command hangs.
        """
        await finish_despite_cancellation(self._calls.run(self._volume_storage.commit_removal, volume.id))
        try:
            if reasons := self._mounts.describe_stuck_mounts(self._create_mount_filter(volume.id)):
                raise Busy("; ".join(reasons))
            await finish_despite_cancellation(self._calls.run(self._volume_storage.finish_removal, volume.id))
        except (Busy, Timeout) as error:
            log.warning(
                "a volume cannot be removed yet and will be removed later", volume=volume.id, reason=error.message
            )
            self._background.start(self._retry(volume.id, "removed", self._volume_storage.finish_removal))

    async def state(self, volume: Volume) -> VolumeState:
        used_bytes = await self._calls.run(self._volume_storage.count_used_bytes, volume.id)
        return VolumeState(used_bytes, self._mounts.describe_stuck_mounts(self._create_mount_filter(volume.id)))

    async def capture(self, snapshot: VolumeSnapshot) -> None:
        await finish_despite_cancellation(self._calls.run(self._snapshots.capture, snapshot))

    async def remove_snapshot(self, snapshot: VolumeSnapshot) -> None:
        with contextlib.suppress(NotFound):  # an administrator may have used `zfs destroy`
            await finish_despite_cancellation(self._calls.run(self._snapshots.destroy, snapshot.id))

    async def _retry(self, volume_id: str, action: str, change: Callable[[str], object]) -> None:
        error = await retry_later(partial(change, volume_id), self._mounts, self._create_mount_filter(volume_id))
        if error is not None:
            log.error(
                f"a volume could not be {action}; the gateway will try again when it next starts",
                volume=volume_id,
                reason=(await self._calls.explain(error)).message,
            )

    def _create_mount_filter(self, volume_id: str) -> MountFilter:
        return lambda mount: self._volume_storage.find_id(mount.special) == volume_id

    # -- capture with a sandbox -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def writers_suspended(self, sandbox: Sandbox, volumes: Sequence[VolumeSnapshot]) -> AsyncIterator[None]:
        """Ensure that all snapshots taken inside this context represent the same instant.

        If ZFS cannot take several snapshots atomically on this host, suspends the jails that can write to the sandbox
        or the volumes.
        """
        is_atomic = not volumes or (await self._calls.run(zfs_core.detect_capabilities)).atomic_snapshots
        jails = [] if is_atomic else await self._find_writers(sandbox, {each.volume for each in volumes})
        async with self._suspension.suspended(jails):
            yield

    async def _find_writers(self, sandbox: Sandbox, volume_ids: set[str]) -> list[str]:
        writers = [
            machine.jail
            for machine, mount in await self._list_mounts()
            if not mount.read_only and self._volume_storage.find_id(mount.special) in volume_ids
        ]
        return [self._register.require_running(sandbox).jail, *writers]

    async def _list_mounts(self) -> list[tuple[Machine, MountEntry]]:
        """Return the volume mounts of all machines, deepest and newest first."""
        mounts = await self._mounts.list_under(self._volume_storage.directory.parent, self._volume_storage.directory)
        return [
            (machine, mount)
            for mount in mounts
            for machine in self._register
            if mount.node.startswith(f"{machine.root}/")
        ]

    # -- rollback ---------------------------------------------------------------------------------------------------

    async def rollback(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        await finish_despite_cancellation(self._rollback(volume, snapshot))

    async def _rollback(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        old_path = await self._calls.run(self._volume_storage.mount, volume.id)
        dataset = await self._calls.run(self._volume_storage.begin_rollback, volume, snapshot.id)
        try:
            mounts = [
                (machine, mount) for machine, mount in await self._list_mounts() if mount.special == str(old_path)
            ]
            async with self._suspension.suspended(machine.jail for machine, _ in mounts):
                await self._swap_mounts(volume.id, mounts, self._volume_storage.path(dataset), old_path)
                try:
                    await self._calls.run(self._volume_storage.commit_rollback, volume, dataset)
                except BaseException:
                    await self._restore_mounts(volume.id, mounts, old_path)
                    raise
        finally:
            await self._retire_former_datasets(volume.id)

    async def _swap_mounts(
        self, volume_id: str, mounts: list[tuple[Machine, MountEntry]], new_path: Path, old_path: Path
    ) -> None:
        """Replace ``mounts`` with mounts of ``new_path``. On failure, mount ``old_path`` again."""
        try:
            for _, mount in mounts:
                await self._mounts.unmount(mount)
            for machine, mount in mounts:
                await self._mounts.mount(machine.root, new_path, _to_sandbox_mount(volume_id, machine, mount))
        except BaseException:
            await self._restore_mounts(volume_id, mounts, old_path)
            raise

    async def _restore_mounts(self, volume_id: str, mounts: list[tuple[Machine, MountEntry]], source: Path) -> None:
        """Replace the current mounts with mounts of ``source``. Failures are only logged."""
        for machine, mount in mounts:
            try:
                existing_mounts = await self._mounts.list_under(machine.root, source.parent)
                if any((each.node, each.special) == (mount.node, str(source)) for each in existing_mounts):
                    continue
                for each in existing_mounts:
                    if each.node == mount.node:
                        await self._mounts.unmount(each)
                await self._mounts.mount(machine.root, source, _to_sandbox_mount(volume_id, machine, mount))
            except GatewayError as error:
                log.error(
                    "a volume could not be mounted again after a failed rollback", node=mount.node, reason=error.message
                )

    async def _retire_former_datasets(self, volume_id: str) -> None:
        """Retire former and abandoned datasets of the volume. Retries in the background while they are in use."""
        try:
            await self._calls.run(self._volume_storage.retire_former_datasets, volume_id)
        except GatewayError as error:
            log.warning(
                "a former dataset of a volume is still in use and will be retired later",
                volume=volume_id,
                reason=error.message,
            )
            self._background.start(self._retry(volume_id, "retired", self._volume_storage.retire_former_datasets))

    # -- in jails ---------------------------------------------------------------------------------------------------

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        machine = self._register.require_running(sandbox)
        source = await self._calls.run(self._volume_storage.mount, mount.volume)
        async with self._suspension.suspended([machine.jail]):
            await self._mounts.mount(machine.root, source, mount)

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        machine = self._register.require_running(sandbox)
        for each in await self._mounts.list_under(machine.root, self._volume_storage.directory):
            if each.node == f"{machine.root}{mount.path}":
                await self._mounts.unmount(each)

    async def mount_all(self, machine: Machine, sandbox: Sandbox) -> None:
        """Mount the volumes of a sandbox, in the order in which its record lists them.

        Must be called before any process runs in the jail.
        """
        for mount in sandbox.mounts:
            if not self._volume_storage.is_known(mount.volume):
                log.warning("a volume was not mounted because it is missing", sandbox=sandbox.id, volume=mount.volume)
                continue
            source = await self._calls.run(self._volume_storage.mount, mount.volume)
            await self._mounts.mount(machine.root, source, mount)

    # -- at start-up ------------------------------------------------------------------------------------------------

    async def recover(self, sandboxes: Iterable[Sandbox]) -> list[str]:
        """Make mounts match the sandboxes' records, and remove leftovers. Returns a sentence for each repair."""
        notes = await self._suspension.resume_all()
        all_mounts = await self._list_mounts()
        for sandbox in sandboxes:
            if machine := self._register.get(sandbox.instance):
                existing_mounts = [mount for owner, mount in all_mounts if owner is machine]
                notes += await self._reconcile(sandbox, machine, existing_mounts)
        return notes + await self._calls.run(self._volume_storage.sweep)

    async def _reconcile(self, sandbox: Sandbox, machine: Machine, existing_mounts: Sequence[MountEntry]) -> list[str]:
        """Make the mounts in a machine match its sandbox's record. Volumes with unreadable records stay mounted."""
        notes: list[str] = []
        expected_mounts = {f"{machine.root}{mount.path}": mount for mount in sandbox.mounts}
        correct_nodes: set[str] = set()
        for mount in existing_mounts:
            if self._is_correct(mount, expected_mounts.get(mount.node)):
                self._mounts.adopt(mount)
                correct_nodes.add(mount.node)
            elif await self._mounts.unmount_or_retry(mount):
                notes.append(f"unmounted {mount.node}: it is not a mount of sandbox {sandbox.id}")
            else:
                notes.append(
                    f"{mount.node} cannot be unmounted, although it is not a mount of sandbox {sandbox.id}; the "
                    "gateway retries"
                )
        missing_mounts = [mount for node, mount in expected_mounts.items() if node not in correct_nodes]
        missing_mounts = [mount for mount in missing_mounts if self._volume_storage.is_known(mount.volume)]
        async with self._suspension.suspended([machine.jail] if missing_mounts else []):
            for each in missing_mounts:
                try:
                    source = await self._calls.run(self._volume_storage.mount, each.volume)
                    await self._mounts.mount(machine.root, source, each)
                    notes.append(f"mounted {each.path} in sandbox {sandbox.id} again, because the mount was missing")
                except GatewayError as error:
                    notes.append(f"could not mount {each.path} in sandbox {sandbox.id}: {error.message}")
        return notes

    def _is_correct(self, existing_mount: MountEntry, expected_mount: Mount | None) -> bool:
        volume_id = self._volume_storage.find_id(existing_mount.special)
        is_known = self._volume_storage.is_known(volume_id)
        if is_known is None:
            return True
        if expected_mount is None or not is_known:
            return False
        if (expected_mount.volume, expected_mount.read_only) != (volume_id, existing_mount.read_only):
            return False
        return existing_mount.special == str(self._volume_storage.path(self._volume_storage.dataset(volume_id)))


def _to_sandbox_mount(volume_id: str, machine: Machine, mount: MountEntry) -> Mount:
    """Convert an entry of the mount table to a mount of a sandbox."""
    return Mount(volume=volume_id, path=mount.node.removeprefix(str(machine.root)), read_only=mount.read_only)
