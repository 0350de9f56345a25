"""Capture: a snapshot of what runs, and the end of snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta

from sandbox_gateway.engine.core import called, checked, log, to_the_end
from sandbox_gateway.engine.forking import Forking, wanted_names
from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, GatewayError, InUse, Invalid
from sandbox_gateway.records import Retention, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot, now

_FREEZE_SECONDS = 20
_SYNC_SECONDS = 10


class Capturing(Forking):
    """Verbs that make and remove snapshots."""

    async def capture(
        self,
        ref: str,
        *,
        name: str | None = None,
        description: str = "",
        memory: str = "auto",
        expires_in: float | None = None,
        volumes: Sequence[str] = (),
        retention: Retention | None = None,
    ) -> Snapshot:
        """Capture a running sandbox; it goes on. ``memory``: "auto" (where the host can) or "none".

        ``volumes``: names or ids of volumes it mounts, to be captured in the same pause: all of them, or nothing.
        ``retention``: it and its sandbox's earlier ones that were taken under a rule are kept by this one.
        """
        if memory not in ("auto", "none"):
            raise Invalid(f"memory is 'auto' or 'none', not {memory[:20]!r}")
        names = [checked(name)] if name else []
        with self.index.reserved(names):
            async with self.held(ref) as hold:
                sandbox = self.awake(hold)
                snapshot = descendant(sandbox, SnapshotKind.SNAPSHOT, self.index)
                snapshot.names, snapshot.description, snapshot.retention = names, description, retention
                snapshot.expires_at = None if expires_in is None else now() + timedelta(seconds=expires_in)
                return await to_the_end(self.record(sandbox, snapshot, memory=memory == "auto", volumes=volumes))

    async def branch(self, ref: str, name: str | None = None) -> Snapshot:
        """Capture under a name in every case: without one it is `branch-ID-N`, N one more than the last time."""
        return await self.capture(ref, name=name or await self._next_branch(ref))

    async def _next_branch(self, ref: str) -> str:
        """The number is written down before it is used, so that it never comes again: a deletion, or a restart in
        the middle, leaves a gap."""
        async with self.held(ref) as hold:
            sandbox = self.awake(hold)
            while True:
                sandbox.branches += 1
                name = f"branch-{sandbox.id}-{sandbox.branches}"
                if self.index.free(name):
                    break
            await self.host.save(sandbox)
            return name

    async def record(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Iterable[str] = ()
    ) -> Snapshot:
        """Capture and record; the sandbox's head becomes the snapshot."""
        async with self.changing_all(self._mounted(sandbox, volumes)) as found:
            captures = self.captures(snapshot, found)
            if memory and self.host.abilities.memory:
                await self._write_through(sandbox)
                captured = await self.host.capture(sandbox, snapshot, memory=True, volumes=captures)
            elif self.host.abilities.atomic_capture:
                await self._write_through(sandbox)
                captured = await self.host.capture(sandbox, snapshot, memory=False, volumes=captures)
            else:
                captured = await self._capture_frozen(sandbox, snapshot, captures)
            for volume, capture in zip(found, captures, strict=True):
                self.captured(volume, capture)
        self.index.put(captured)
        if captured.kind is not SnapshotKind.PAUSE:
            sandbox.head = captured.id
            await self.host.save(sandbox)
        self.events.publish("snapshot.created", snapshotID=captured.id, sandboxID=sandbox.id, pauseMs=captured.pause_ms)
        if reason := self.host.ended(sandbox):
            raise BackendFailed(f"snapshot {captured.id} was taken and is valid, but its source died: {reason}")
        return captured

    def _mounted(self, sandbox: Sandbox, refs: Iterable[str]) -> list[str]:
        """The ids of the volumes that ``refs`` name, which ``sandbox`` mounts."""
        volumes = [self.volume(ref) for ref in refs]
        for volume in volumes:
            if all(mount.volume != volume.id for mount in sandbox.mounts):
                raise Invalid(
                    f"volume {volume.name} is not mounted in sandbox {sandbox.name}: attach it first, "
                    "or take a snapshot of the volume alone"
                )
        return [volume.id for volume in volumes]

    async def _write_through(self, sandbox: Sandbox) -> None:
        """Have the guest write what it holds back, so that the disk alone is worth having and "diverged" starts at no.

        A guest too busy to do so is captured as it is: with its memory nothing is lost.
        """
        try:
            await self.agent(sandbox).call("/sync", {}, seconds=_SYNC_SECONDS)
        except GatewayError as error:
            log.debug("not synced before capture", sandbox=sandbox.id, reason=error.message)

    async def _capture_frozen(
        self, sandbox: Sandbox, snapshot: Snapshot, volumes: Sequence[VolumeSnapshot]
    ) -> Snapshot:
        agent = self.agent(sandbox)
        if not (await agent.call("/freeze", {"seconds": _FREEZE_SECONDS})).get("frozen"):
            raise BackendFailed("the sandbox's file system could not be frozen: capture it with its memory")
        try:
            return await self.host.capture(sandbox, snapshot, memory=False, volumes=volumes)
        finally:
            await agent.call("/thaw", {})

    async def clone(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        """Capture, ``count`` forks of it; the capture goes with its last user.

        It holds the volumes of which the forks shall have clones of their own.
        """
        self.named_mounts(spec.mounts or [])
        with self.index.reserved(name for name in wanted_names(spec) if name):
            pass  # a taken name is found before the source is paused
        async with self.held(ref) as hold:
            sandbox = self.awake(hold)
            snapshot = descendant(sandbox, SnapshotKind.TRANSIENT, self.index)
            try:
                return await self._clone(sandbox, snapshot, spec)
            finally:
                await asyncio.shield(self.collect())

    async def _clone(self, sandbox: Sandbox, snapshot: Snapshot, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        head = sandbox.head
        with self.index.using(snapshot):
            cloned = [each.volume for each in spec.mounts or [] if each.clone]
            captured = await to_the_end(self.record(sandbox, snapshot, memory=True, volumes=cloned))
            try:
                return await self.fork_snapshot(captured, spec)
            except BaseException:
                sandbox.head = head
                await asyncio.shield(self.host.save(sandbox))
                raise

    async def delete_snapshot(self, ref: str, *, when_unused: bool = False) -> bool:
        """Remove a snapshot or template; True if it is gone.

        ``when_unused``: hide it now, remove it with its last user. Raises InUse naming every user otherwise.
        """
        snapshot = self.snapshot(ref)
        users, clones = self.dependents(snapshot), self.made_from(self.captures_of(snapshot))
        if users or clones or self.busy(snapshot):
            if not when_unused:
                raise _in_use(snapshot, users, clones)
            snapshot.doomed = True
            await self.host.save_snapshot(snapshot)
            self.index.put(snapshot)
            self.events.publish("snapshot.hidden", snapshotID=snapshot.id)
            return False
        await self.remove_snapshot(snapshot)
        return True


def descendant(sandbox: Sandbox, kind: SnapshotKind, index: Index) -> Snapshot:
    """The record of a snapshot about to be taken of ``sandbox``."""
    parent = index.snapshots.get(sandbox.head)
    return Snapshot(
        kind=kind,
        source_sandbox=sandbox.id,
        origin_sandbox=(parent.origin_sandbox if parent else "") or sandbox.id,
        template_id=sandbox.template_id,
        parent=sandbox.head,
        origin=(parent.origin if parent else "") or sandbox.template_id or sandbox.head,
        mounts=list(sandbox.mounts),
    )


def _in_use(snapshot: Snapshot, users: list[Sandbox], clones: list[Volume]) -> InUse:
    what = f"{snapshot.kind.value} {snapshot.id} is in use"
    if not users and not clones:
        return InUse(f"{what}: a fork of it is under way; try again later")
    words = []
    if users:
        noun = "sandbox stands" if len(users) == 1 else "sandboxes stand"
        words.append(f"{len(users)} {noun} on it ({called(users)})")
    if clones:
        noun = "volume was made" if len(clones) == 1 else "volumes were made"
        words.append(f"{len(clones)} {noun} from what it holds ({called(clones)})")
    return InUse(
        f"{what}: {', '.join(words)}; remove them first, or delete it with when=unused",
        blockers=[*(each.id for each in users), *(each.id for each in clones)],
    )
