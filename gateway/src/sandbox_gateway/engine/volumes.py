"""Volumes: storage that outlives sandboxes, the snapshots of it, and who mounts it.

A volume is held for a change of itself; a sandbox comes before a volume where both are held, and volumes are held in
the order of their ids. What only mounts a volume shares it: it waits for the change that is under way, no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from sandbox_gateway.engine.core import Core, called, checked, log, to_the_end
from sandbox_gateway.engine.index import Thing
from sandbox_gateway.engine.paths import check_mounts
from sandbox_gateway.engine.spec import MountSpec
from sandbox_gateway.errors import Conflict, GatewayError, InUse, Invalid, NameTaken, NotFound
from sandbox_gateway.hosts.base import VolumeState
from sandbox_gateway.records import (
    Mount,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeCapture,
    VolumeSnapshot,
    new_id,
)

_DEFAULT_MB = 1024
_SMALLEST_MB = 64
_LARGEST_MB = 1 << 26
_LONGEST_NAME = 64
_MOUNT_SECONDS = 30.0
_UNMOUNT_SECONDS = 10.0


@dataclass(frozen=True)
class Wanted:
    """A mount that new sandboxes shall have."""

    volume: Volume
    path: str
    read_only: bool
    source: VolumeSnapshot | None = None
    """What each sandbox's own clone is made from; None: all mount the volume itself."""


class Volumes(Core):
    """Verbs of volumes, and what other verbs need of them."""

    def volume(self, ref: str) -> Volume:
        return self.index.volume(ref)

    def volumes(self) -> list[Volume]:
        return sorted(self.index.volumes.values(), key=lambda each: (each.created_at, each.id))

    def mounts_of(self, volume: Volume) -> list[tuple[Sandbox, Mount]]:
        """Who mounts it, running or paused."""
        return self.index.mounts_of(volume)

    async def volume_state(self, ref: str) -> VolumeState:
        return await self.host.volume_state(self.volume(ref))

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, name: str, size_mb: int | None = None, from_snapshot: str | None = None) -> Volume:
        """Make a volume, empty or from a snapshot of one ("VOLUME@SNAPSHOT", or the snapshot's id).

        Without a size it has the snapshot's, or else 1024 MiB.
        """
        source = self._source(from_snapshot) if from_snapshot else None
        if size_mb is None:
            size_mb = source.size_mb if source else _DEFAULT_MB
        _check_size(size_mb)
        if source and size_mb < source.size_mb:
            raise Invalid(f"{size_mb} MiB is less than the {source.size_mb} MiB of the snapshot {source.id}")
        volume = Volume(name=checked(name), size_mb=size_mb, from_snapshot=source.id if source else "")
        with self.index.reserved([name]), self.index.using(*([source] if source else [])):
            return await to_the_end(self._create(volume, source))

    async def _create(self, volume: Volume, source: VolumeSnapshot | None) -> Volume:
        await self.host.create_volume(volume, source)
        self.index.put(volume)
        self.events.publish("volume.created", volumeID=volume.name, sizeMB=volume.size_mb)
        return volume

    async def grow_volume(self, ref: str, size_mb: int) -> Volume:
        """Let a volume hold more; who mounts it sees that at once. A volume never shrinks."""
        async with self.changing(ref) as volume:
            _check_size(size_mb)
            if size_mb < volume.size_mb:
                raise Invalid(f"volume {volume.name} has {volume.size_mb} MiB and cannot shrink to {size_mb} MiB")
            if size_mb > volume.size_mb:
                await to_the_end(self.host.grow_volume(volume, size_mb))
                self.events.publish("volume.grown", volumeID=volume.name, sizeMB=volume.size_mb)
            return volume

    async def delete_volume(self, ref: str, with_snapshots: bool = False) -> None:
        """Remove a volume that nobody mounts, and with ``with_snapshots`` those of it. InUse names every blocker."""
        async with self.changing(ref) as volume:
            if blocked := self._blocked(volume, with_snapshots=with_snapshots):
                raise blocked
            await to_the_end(self._remove_volume(volume))

    def _blocked(self, volume: Volume, *, with_snapshots: bool) -> InUse | None:
        """Why a volume cannot be removed, with every blocker."""
        snapshots = self.index.snapshots_of(volume)
        holders = self._holders(snapshots)
        held = {capture.snapshot for holder in holders for capture in holder.volumes}
        own = [] if with_snapshots else [each for each in snapshots if each.id not in held]
        return _in_use(
            f"volume {volume.name}",
            {
                "mount": [sandbox for sandbox, _ in self.mounts_of(volume)],
                "sandbox snapshot": holders,
                "snapshot": own,
                "clone": self.made_from(snapshots),
            },
            busy=self.index.in_use(volume) or any(map(self.index.in_use, snapshots)),
        )

    async def _remove_volume(self, volume: Volume) -> None:
        things: list[Thing] = [volume, *self.index.snapshots_of(volume)]
        for thing in things:
            self.index.drop(thing.id)
        try:
            await self.host.remove_volume(volume)
        except BaseException:
            for thing in things:
                self.index.put(thing)
            raise
        self.events.publish("volume.deleted", volumeID=volume.name)

    # -- snapshots of volumes ---------------------------------------------------------------------------------------

    def volume_snapshots(self, ref: str) -> list[VolumeSnapshot]:
        return self.index.snapshots_of(self.volume(ref))

    async def snapshot_volume(self, ref: str, name: str = "") -> VolumeSnapshot:
        """Record a volume as it is at one instant; who mounts it goes on. Without a name it goes by its id."""
        async with self.changing(ref) as volume:
            id = new_id()
            snapshot = VolumeSnapshot(
                id=id, name=checked(name) if name else id, volume=volume.id, size_mb=volume.size_mb
            )
            taken = [each for each in self.index.snapshots_of(volume) if snapshot.name in (each.name, each.id)]
            if taken:
                raise NameTaken(
                    f"volume {volume.name} has a snapshot {name!r} already: choose another name, or delete it",
                    blockers=[taken[0].id],
                )
            return await to_the_end(self._capture_volume(volume, snapshot))

    async def _capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> VolumeSnapshot:
        await self.host.capture_volume(volume, snapshot)
        self.captured(volume, snapshot)
        return snapshot

    def captured(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """The host has committed a snapshot of a volume."""
        self.index.put(snapshot)
        self.events.publish("volume.captured", volumeID=volume.name, snapshotID=snapshot.id, name=snapshot.name)

    async def delete_volume_snapshot(self, ref: str, snapshot_ref: str) -> None:
        """Remove a snapshot of a volume. One that is part of a sandbox's snapshot goes with that only."""
        async with self.changing(ref) as volume:
            snapshot = self.index.volume_snapshot(snapshot_ref, volume)
            blocked = _in_use(
                f"snapshot {snapshot.name} of volume {volume.name}",
                {"sandbox snapshot": self._holders([snapshot]), "clone": self.made_from([snapshot])},
                busy=self.index.in_use(snapshot),
            )
            if blocked:
                raise blocked
            await to_the_end(self.remove_volume_snapshot(snapshot))

    async def rollback_volume(self, ref: str, snapshot_ref: str, force: bool = False) -> Volume:
        """Let a volume be what a snapshot of it holds; it stays as large as it has become since.

        Refused while a sandbox, running or paused, has it read-write, unless ``force``: that sandbox finds other
        files than it left, and what it had not written yet is lost or comes on top.
        """
        async with self.changing(ref) as volume:
            snapshot = self.index.volume_snapshot(snapshot_ref, volume)
            writers = [sandbox for sandbox, mount in self.mounts_of(volume) if not mount.read_only]
            if writers and not force:
                raise InUse(
                    f"volume {volume.name} is mounted read-write by {called(writers)}: detach it there, or force it",
                    blockers=[each.id for each in writers],
                )
            if self.index.in_use(volume):
                raise InUse(f"volume {volume.name} is being mounted just now: try again later")
            await to_the_end(self.host.rollback_volume(volume, snapshot))
            self.events.publish("volume.rolled-back", volumeID=volume.name, snapshotID=snapshot.id)
            return volume

    def _source(self, ref: str) -> VolumeSnapshot:
        volume, at, name = ref.rpartition("@")
        return self.index.volume_snapshot(name, self.volume(volume) if at else None)

    def _holders(self, snapshots: Iterable[VolumeSnapshot]) -> list[Snapshot]:
        """The snapshots of sandboxes that hold one of ``snapshots``, and are not going by themselves."""
        ids = {each.id for each in snapshots}
        return [
            holder
            for holder in self.index.snapshots.values()
            if holder.kind is not SnapshotKind.TRANSIENT and any(capture.snapshot in ids for capture in holder.volumes)
        ]

    # -- attach and detach ------------------------------------------------------------------------------------------

    async def attach(self, sandbox_ref: str, spec: MountSpec) -> Mount:
        """Mount a volume in a running sandbox. The record comes first: what it says is made so after a crash."""
        if spec.clone:
            raise Invalid(
                "a running sandbox is given a volume as it is: make one from a snapshot of it first, and attach that"
            )
        async with self.held(sandbox_ref) as hold:
            sandbox, volume = self.awake(hold), self.volume(spec.volume)
            mount = Mount(volume=volume.id, path=spec.path, read_only=spec.read_only)
            if any(each.volume == volume.id for each in sandbox.mounts):
                raise Conflict(f"sandbox {sandbox.name} has volume {volume.name} already: detach it first")
            check_mounts([*(each.path for each in sandbox.mounts), mount.path])
            async with self.sharing([volume.id]):
                await to_the_end(self._attach(sandbox, mount))
            self.events.publish("volume.attached", volumeID=volume.name, sandboxID=sandbox.id, path=mount.path)
            return mount

    async def _attach(self, sandbox: Sandbox, mount: Mount) -> None:
        changed = sandbox.model_copy(update={"mounts": [*sandbox.mounts, mount]})
        await self._save(changed)
        try:
            await self.host.attach(changed, mount)
            try:
                await self.mount_inside(changed)
            except BaseException:
                await self._take_away(changed, mount)
                raise
        except BaseException:
            await self._save(sandbox)
            raise

    async def detach(self, sandbox_ref: str, volume_ref: str) -> None:
        """Take a volume from a sandbox, whatever it does with it; from a paused one, before it goes on."""
        async with self.held(sandbox_ref) as hold:
            sandbox = self.sandbox(hold)
            # By its id also one whose record is missing.
            mount = next((each for each in sandbox.mounts if each.volume == volume_ref), None)
            name = volume_ref
            if mount is None or mount.volume in self.index.volumes:
                volume = self.volume(volume_ref)
                name = volume.name
                mount = next((each for each in sandbox.mounts if each.volume == volume.id), None)
            if mount is None:
                raise NotFound(f"in sandbox {sandbox.name}, volume", name)
            await to_the_end(self._detach(sandbox, mount))
            self.events.publish("volume.detached", volumeID=name, sandboxID=sandbox.id)
            await self.collect()

    async def _detach(self, sandbox: Sandbox, mount: Mount) -> None:
        if sandbox.state is SandboxState.RUNNING and not self.host.ended(sandbox):
            await self._take_away(sandbox, mount)
        await self._save(_without(sandbox, mount))

    async def _take_away(self, sandbox: Sandbox, mount: Mount) -> None:
        """Inside first, that no program finds a dead mount; a sandbox that does not answer keeps nothing by that."""
        left = _without(sandbox, mount)
        if self.host.guest_mounts(sandbox):
            try:
                await self.agent(sandbox).mounts(self.host.guest_mounts(left), seconds=_UNMOUNT_SECONDS)
            except GatewayError as error:
                log.warning("not unmounted inside", sandbox=sandbox.id, path=mount.path, reason=error.message)
        await self.host.detach(left, mount)

    async def _save(self, sandbox: Sandbox) -> None:
        await self.host.save(sandbox)
        self.index.put(sandbox)

    async def mount_inside(self, sandbox: Sandbox, *, stale: bool = False, seconds: float = _MOUNT_SECONDS) -> None:
        """Have the agent mount what the host cannot mount from outside; ``stale``: it may have other mounts now."""
        wanted = self.host.guest_mounts(sandbox)
        if wanted or stale:
            await self.agent(sandbox).mounts(wanted, seconds=seconds)

    async def mount_again(self, sandbox_id: str) -> None:
        """After a restart: what was cut off while it was attached or detached is brought to an end."""
        async with self.held(sandbox_id) as hold:
            sandbox = self.sandbox(hold)
            if sandbox.state is SandboxState.RUNNING:
                await self.mount_inside(sandbox)

    # -- for the other verbs ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def changing(self, *refs: str) -> AsyncIterator[Volume]:
        """Hold a volume for one change of it."""
        async with self.changing_all(refs) as (volume,):
            yield volume
        if volume.owner:
            await self.collect()

    @contextlib.asynccontextmanager
    async def changing_all(self, refs: Iterable[str]) -> AsyncIterator[list[Volume]]:
        """Hold volumes for one change of them all; yields each once."""
        found = {volume.id: volume for volume in map(self.volume, refs)}
        async with contextlib.AsyncExitStack() as stack:
            for id in sorted(found):
                await stack.enter_async_context(self.locks.hold(id, f"volume {found[id].name}"))
            yield [self.volume(id) for id in found]

    @contextlib.asynccontextmanager
    async def sharing(self, volumes: Iterable[str]) -> AsyncIterator[None]:
        """Keep volumes as they are while they are being mounted; waits for changes of them that are under way."""
        with contextlib.ExitStack() as stack:
            for id in volumes:
                async with self.changing_all([id]) as (volume,):
                    stack.enter_context(self.index.using(volume))
            yield

    def present(self, mounts: Iterable[Mount]) -> list[str]:
        """The volumes of ``mounts``, without those that are missing."""
        return [mount.volume for mount in mounts if mount.volume in self.index.volumes]

    def wanted_mounts(self, snapshot: Snapshot, specs: Sequence[MountSpec] | None) -> list[Wanted]:
        """What forks of ``snapshot`` shall mount; without ``specs`` what its source did."""
        if specs is None:
            return [self._inherited(snapshot, mount) for mount in snapshot.mounts]
        wanted = self.named_mounts(specs)
        return [
            Wanted(volume, spec.path, spec.read_only, self._capture_in(snapshot, volume) if spec.clone else None)
            for spec, volume in zip(specs, wanted, strict=True)
        ]

    def named_mounts(self, specs: Sequence[MountSpec]) -> list[Volume]:
        """The volumes that ``specs`` name; raises where they or the paths cannot be."""
        volumes = [self.volume(spec.volume) for spec in specs]
        for volume in volumes:
            if volumes.count(volume) > 1:
                raise Invalid(f"volume {volume.name} is named more than once: a sandbox mounts it at one path")
        check_mounts(spec.path for spec in specs)
        return volumes

    def _inherited(self, snapshot: Snapshot, mount: Mount) -> Wanted:
        if mount.volume not in self.index.volumes:
            raise Conflict(
                f"the source of snapshot {snapshot.id} had a volume at {mount.path} that is gone: "
                "say with volumeMounts what to mount instead (an empty list: nothing)"
            )
        return Wanted(self.index.volumes[mount.volume], mount.path, mount.read_only)

    def _capture_in(self, snapshot: Snapshot, volume: Volume) -> VolumeSnapshot:
        for capture in snapshot.volumes:
            if capture.volume == volume.id and capture.snapshot in self.index.volume_snapshots:
                return self.index.volume_snapshots[capture.snapshot]
        raise Invalid(
            f"snapshot {snapshot.id} holds no capture of volume {volume.name} to clone: take one that names it in "
            "its volumes, or mount the volume itself"
        )

    def surviving(self, mounts: Iterable[Mount], sandbox: Sandbox) -> list[Mount]:
        """Those whose volumes were not deleted. A volume that ``sandbox`` mounts cannot have been: it is missing."""
        known = {*self.index.volumes, *(mount.volume for mount in sandbox.mounts)}
        kept = [mount for mount in mounts if mount.volume in known]
        for mount in mounts:
            if mount not in kept:
                log.warning("not mounted: the volume is gone", sandbox=sandbox.id, path=mount.path)
        return kept

    @contextlib.asynccontextmanager
    async def mounting(
        self, wanted: Sequence[Wanted], sandboxes: Sequence[Sandbox]
    ) -> AsyncIterator[dict[str, list[Volume]]]:
        """Give new sandboxes their mounts; yields the own clones still to be made, by sandbox.

        Clones that no sandbox mounts in the end are removed.
        """
        shared = [each.volume.id for each in wanted if each.source is None]
        sources = [each.source for each in wanted if each.source is not None]
        try:
            async with self.sharing(shared):
                clones: dict[str, list[Volume]] = {}
                names: set[str] = set()
                for sandbox in sandboxes:
                    clones[sandbox.id] = []
                    for each in wanted:
                        volume = each.volume
                        if each.source is not None:
                            volume = self._own_clone(sandbox, volume, each.source, names)
                            clones[sandbox.id].append(volume)
                            names.add(volume.name)
                        sandbox.mounts.append(Mount(volume=volume.id, path=each.path, read_only=each.read_only))
                made = [clone for own in clones.values() for clone in own]
                with self.index.reserved(names), self.index.using(*sources, *made):
                    yield clones
        finally:
            if any(each.source or each.volume.owner for each in wanted):
                await asyncio.shield(self.collect())

    async def make_clones(self, clones: Iterable[Volume]) -> None:
        for clone in clones:
            await to_the_end(self._create(clone, self.index.volume_snapshots[clone.from_snapshot]))

    def _own_clone(self, sandbox: Sandbox, volume: Volume, source: VolumeSnapshot, taken: set[str]) -> Volume:
        id, name = new_id(), f"{sandbox.name}-{volume.name}"
        if len(name) > _LONGEST_NAME or name in taken or not self.index.free(name):
            name = f"{name[: _LONGEST_NAME - len(id) - 1]}-{id}"
        return Volume(id=id, name=name, size_mb=source.size_mb, from_snapshot=source.id, owner=sandbox.id)

    def captures(self, snapshot: Snapshot, volumes: Iterable[Volume]) -> list[VolumeSnapshot]:
        """The records of what is about to be captured of ``volumes`` with ``snapshot``, which names them."""
        found = [
            VolumeSnapshot(name=snapshot.id, volume=each.id, size_mb=each.size_mb, sandbox_snapshot=snapshot.id)
            for each in volumes
        ]
        snapshot.volumes = [VolumeCapture(volume=each.volume, snapshot=each.id) for each in found]
        return found

    async def collect(self) -> None:
        """Remove what nobody needs any more: hidden snapshots, and clones whose last sandbox is gone."""
        await self._collect_clones()
        await self._collect_captures()
        await super().collect()
        await self._collect_clones()

    async def _collect_captures(self) -> None:
        """What a clone was made of may stay for long, as its source's head; what it holds of volumes need not."""
        for snapshot in list(self.index.snapshots.values()):
            captures = self.captures_of(snapshot) if snapshot.kind is SnapshotKind.TRANSIENT else []
            if not captures or self.busy(snapshot) or self.made_from(captures):
                continue
            try:
                for capture in captures:
                    await asyncio.shield(self.remove_volume_snapshot(capture))
                snapshot.volumes = []
                await self.host.save_snapshot(snapshot)
            except GatewayError as error:
                log.warning("not collected", snapshot=snapshot.id, reason=error.message)

    async def _collect_clones(self) -> None:
        if self.unreadable_sandboxes:
            return
        for volume in list(self.index.volumes.values()):
            if not volume.owner or self.locks.held(volume.id) or self._blocked(volume, with_snapshots=False):
                continue
            try:
                await asyncio.shield(self._remove_volume(volume))
            except GatewayError as error:
                log.warning("not collected", volume=volume.id, reason=error.message)


def _without(sandbox: Sandbox, mount: Mount) -> Sandbox:
    return sandbox.model_copy(update={"mounts": [each for each in sandbox.mounts if each.volume != mount.volume]})


def _check_size(size_mb: int) -> None:
    if not _SMALLEST_MB <= size_mb <= _LARGEST_MB:
        raise Invalid(f"a volume of {size_mb} MiB is not possible: ask for {_SMALLEST_MB} to {_LARGEST_MB} MiB")


def _in_use(what: str, blockers: dict[str, Sequence[Thing]], *, busy: bool) -> InUse | None:
    """An error that counts and names all of ``blockers``, whose keys say what they are; None if there are none."""
    words = [
        f"{len(things)} {noun if len(things) == 1 else f'{noun}s'} ({called(things)})"
        for noun, things in blockers.items()
        if things
    ]
    if words:
        ids = [each.id for things in blockers.values() for each in things]
        return InUse(f"{what} is in use: {', '.join(words)}; remove what holds it first", blockers=ids)
    if busy:
        return InUse(f"{what} is in use: something is being made with it just now; try again later")
    return None
