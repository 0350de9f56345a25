"""The volumes of a jail host: datasets of their own, mounted in jails with nullfs.

``Sandbox.mounts`` says what is wanted, the kernel's mount table what is: nothing else remembers who mounts what.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from sandbox_gateway.errors import Busy, Conflict, GatewayError, NotFound
from sandbox_gateway.hosts.base import GuestMount, VolumeState
from sandbox_gateway.hosts.jail_zfs import zfs
from sandbox_gateway.hosts.jail_zfs.commands import together
from sandbox_gateway.hosts.jail_zfs.jail import Mounted
from sandbox_gateway.hosts.jail_zfs.jail_mounts import JailMounts
from sandbox_gateway.hosts.jail_zfs.machine import Machine
from sandbox_gateway.hosts.jail_zfs.storage import ZfsStorage
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, Snapshot, Volume, VolumeSnapshot

_RETRIES = 20
_RETRY_SECONDS = 3.0

log = Logger("volumes")


class VolumesOfJails:
    """The part of ``JailZfsHost`` that is about volumes."""

    _storage: ZfsStorage
    _mounts: JailMounts
    _machines: dict[str, Machine]
    _background: set[asyncio.Task[None]]

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _running(self, sandbox: Sandbox) -> Machine:
        machine = self._machines.get(sandbox.instance)
        if machine is None or machine.ended:
            raise Conflict(f"sandbox {sandbox.id} has no running jail: resume it first")
        return machine

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        await together(asyncio.to_thread(self._storage.create_volume, volume, source.id if source else None))

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        await together(asyncio.to_thread(self._storage.grow_volume, volume, size_mb))
        volume.size_mb = size_mb

    async def remove_volume(self, volume: Volume) -> None:
        await together(asyncio.to_thread(self._storage.doom_volume, volume.id))
        try:
            if self._mounts.stuck(lambda mount: self._shows(mount, volume.id)):
                raise Busy("a mount of it is stuck")
            await together(asyncio.to_thread(self._storage.finish_removal, volume.id))
        except Busy as error:
            log.warning("volume still in use, removed later", volume=volume.id, reason=error.message)
            self._later(self._finish_later(volume.id, "removed", self._storage.finish_removal))

    async def volume_state(self, volume: Volume) -> VolumeState:
        used = await asyncio.to_thread(self._storage.volume_used, volume.id)
        return VolumeState(used, self._mounts.stuck(lambda mount: self._shows(mount, volume.id)))

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        await together(asyncio.to_thread(self._storage.snapshot_volume, snapshot))

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        with contextlib.suppress(NotFound):  # somebody was faster, with `zfs destroy`
            await together(asyncio.to_thread(self._storage.destroy_volume_snapshot, snapshot.id))

    async def _finish_later(self, volume_id: str, what: str, change: Any) -> None:
        await self._mounts.freed(lambda mount: self._shows(mount, volume_id))
        for _ in range(_RETRIES):
            try:
                await together(asyncio.to_thread(change, volume_id))
                return
            except GatewayError:
                await asyncio.sleep(_RETRY_SECONDS)
        log.error(f"could not be {what}; the next start of the gateway tries again", volume=volume_id)

    def _shows(self, mount: Mounted, volume_id: str) -> bool:
        return self._storage.volume_id(mount.special) == volume_id

    # -- capture and rollback ---------------------------------------------------------------------------------------

    async def _record(self, sandbox: Sandbox, snapshot: Snapshot, volumes: Sequence[VolumeSnapshot]) -> None:
        """Snapshot the sandbox's files and volumes at one instant.

        ZFS does that for several datasets at once, zfs-fuse only one after the other: there, jails that write into
        them stand still meanwhile.
        """
        in_turn = bool(volumes) and not await asyncio.to_thread(zfs.snapshots_at_once)
        jails = await self._writers(sandbox, {each.volume for each in volumes}) if in_turn else []
        async with self._mounts.still(jails):
            await together(asyncio.to_thread(self._storage.snapshot, sandbox.instance, snapshot, volumes))

    async def _writers(self, sandbox: Sandbox, volume_ids: set[str]) -> list[str]:
        writers = [
            machine.jail
            for machine, mount in await self._mounted()
            if not mount.read_only and self._storage.volume_id(mount.special) in volume_ids
        ]
        return [self._running(sandbox).jail, *writers]

    async def _mounted(self) -> list[tuple[Machine, Mounted]]:
        """The volumes in all jails of ours, the deepest and newest first."""
        found = await self._mounts.below(self._storage.volumes_path.parent, self._storage.volumes_path)
        return [
            (machine, mount)
            for mount in found
            for machine in self._machines.values()
            if mount.node.startswith(f"{machine.root}/")
        ]

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        await together(self._roll_back(volume, snapshot))

    async def _roll_back(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        old = await asyncio.to_thread(self._storage.volume_root, volume.id)
        dataset = await asyncio.to_thread(self._storage.begin_rollback, volume, snapshot.id)
        try:
            mounts = [(machine, mount) for machine, mount in await self._mounted() if mount.special == str(old)]
            async with self._mounts.still(machine.jail for machine, _ in mounts):
                await self._exchange(volume.id, mounts, self._storage.volume_path(dataset), old)
                try:
                    await asyncio.to_thread(self._storage.commit_rollback, volume, dataset)
                except BaseException:
                    await self._mount_instead(volume.id, mounts, old)
                    raise
        finally:
            await self._settle(volume.id)

    async def _exchange(self, volume_id: str, mounts: list[tuple[Machine, Mounted]], new: Path, old: Path) -> None:
        """Mount ``new`` wherever ``old`` is; on failure it is ``old`` again."""
        try:
            for _, mount in mounts:
                await self._mounts.unmount(mount)
            for machine, mount in mounts:
                await self._mounts.mount(machine.root, new, _wanted(volume_id, machine, mount))
        except BaseException:
            await self._mount_instead(volume_id, mounts, old)
            raise

    async def _mount_instead(self, volume_id: str, mounts: list[tuple[Machine, Mounted]], source: Path) -> None:
        for machine, mount in mounts:
            try:
                there = await self._mounts.below(machine.root, source.parent)
                if any((each.node, each.special) == (mount.node, str(source)) for each in there):
                    continue
                for each in there:
                    if each.node == mount.node:
                        await self._mounts.unmount(each)
                await self._mounts.mount(machine.root, source, _wanted(volume_id, machine, mount))
            except GatewayError as error:
                log.error("not mounted again after a failed rollback", node=mount.node, reason=error.message)

    async def _settle(self, volume_id: str) -> None:
        """What the volume was before, or would have become, goes or is retired: now or, if it is in use, later."""
        try:
            await asyncio.to_thread(self._storage.settle_volume, volume_id)
        except GatewayError as error:
            log.warning("still in use, retired later", volume=volume_id, reason=error.message)
            self._later(self._finish_later(volume_id, "retired", self._storage.settle_volume))

    # -- in jails ---------------------------------------------------------------------------------------------------

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        machine = self._running(sandbox)
        source = await asyncio.to_thread(self._storage.volume_root, mount.volume)
        async with self._mounts.still([machine.jail]):
            await self._mounts.mount(machine.root, source, mount)

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        machine = self._running(sandbox)
        for each in await self._mounts.below(machine.root, self._storage.volumes_path):
            if each.node == f"{machine.root}{mount.path}":
                await self._mounts.unmount(each)

    def guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        """None: the host mounts in a jail."""
        return []

    async def _mount_volumes(self, machine: Machine, sandbox: Sandbox) -> None:
        """Before anything runs in the jail, and in the order that is wanted."""
        for mount in sandbox.mounts:
            if not self._storage.knows_volume(mount.volume):
                log.warning("not mounted: the volume is missing", sandbox=sandbox.id, volume=mount.volume)
                continue
            source = await asyncio.to_thread(self._storage.volume_root, mount.volume)
            await self._mounts.mount(machine.root, source, mount)

    # -- finding again ----------------------------------------------------------------------------------------------

    async def _find_volumes(self, sandboxes: Iterable[Sandbox]) -> list[str]:
        """Have what is mounted be what is wanted, and sweep what is left; a sentence for each thing that was not."""
        notes = await self._mounts.wake()
        mounted = await self._mounted()
        for sandbox in sandboxes:
            if machine := self._machines.get(sandbox.instance):
                there = [mount for inside, mount in mounted if inside is machine]
                notes += await self._reconcile(sandbox, machine, there)
        return notes + await asyncio.to_thread(self._storage.sweep_volumes)

    async def _reconcile(self, sandbox: Sandbox, machine: Machine, mounted: list[Mounted]) -> list[str]:
        """Volumes whose records cannot be read stay as they are."""
        notes: list[str] = []
        wanted = {f"{machine.root}{mount.path}": mount for mount in sandbox.mounts}
        there: set[str] = set()
        for mount in mounted:
            if self._is_right(mount, wanted.get(mount.node)):
                self._mounts.know(mount)
                there.add(mount.node)
            elif await self._mounts.let_go(mount):
                notes.append(f"unmounted {mount.node}: sandbox {sandbox.id} is not to have that there")
            else:
                notes.append(f"{mount.node} is stuck: sandbox {sandbox.id} is not to have that there")
        missing = [mount for node, mount in wanted.items() if node not in there]
        missing = [mount for mount in missing if self._storage.knows_volume(mount.volume)]
        async with self._mounts.still([machine.jail] if missing else []):
            for each in missing:
                try:
                    source = await asyncio.to_thread(self._storage.volume_root, each.volume)
                    await self._mounts.mount(machine.root, source, each)
                    notes.append(f"mounted {each.path} in sandbox {sandbox.id} again: it was missing")
                except GatewayError as error:
                    notes.append(f"sandbox {sandbox.id} has no {each.path}: {error.message}")
        return notes

    def _is_right(self, there: Mounted, wanted: Mount | None) -> bool:
        volume_id = self._storage.volume_id(there.special)
        known = self._storage.knows_volume(volume_id)
        if known is None:
            return True
        if wanted is None or not known or (wanted.volume, wanted.read_only) != (volume_id, there.read_only):
            return False
        return there.special == str(self._storage.volume_path(self._storage.volume_dataset(volume_id)))


def _wanted(volume_id: str, machine: Machine, mount: Mounted) -> Mount:
    return Mount(volume=volume_id, path=mount.node.removeprefix(str(machine.root)), read_only=mount.read_only)
