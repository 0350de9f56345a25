"""Another machine for the same sandbox: rollback, promote, pause and resume; and its end."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sandbox_gateway.engine.capturing import Capturing, descendant
from sandbox_gateway.engine.core import to_the_end
from sandbox_gateway.engine.spec import UNSET, Unset
from sandbox_gateway.errors import Conflict, Invalid, NotFound
from sandbox_gateway.records import Memory, Sandbox, SandboxState, Snapshot, SnapshotKind, new_id, now


class Replacing(Capturing):
    """Verbs that change what embodies a sandbox."""

    async def rollback(self, ref: str, snapshot_ref: str, *, cold_start: bool = False) -> Sandbox:
        """Bring a sandbox back to a snapshot, under its id and name. Until the new machine answers, the old goes on.

        It mounts what the snapshot's source did, of what is still there; what is in volumes stays as it is.
        ``cold_start``: boot from the snapshot's disk rather than go on from its memory.
        """
        snapshot = self.snapshot(snapshot_ref)
        async with self.held(ref) as hold:
            return await self._replace(self.sandbox(hold), snapshot, cold_start=cold_start)

    async def promote(self, fork_ref: str, source_ref: str | None = None) -> Sandbox:
        """Make the source what its fork has become: a rollback of the source to a capture of the fork."""
        fork = self.awake(fork_ref)
        source = self.sandbox(source_ref or fork.parent_sandbox or "")
        if source.id == fork.id:
            raise Invalid("a sandbox cannot be promoted over itself: name the source it was forked from")
        async with self.held(fork.id) as hold:
            snapshot = descendant(self.awake(hold), SnapshotKind.TRANSIENT, self.index)
            snapshot = await to_the_end(self.record(self.awake(hold), snapshot, memory=True))
        async with self.held(source.id) as hold:
            return await self._replace(self.sandbox(hold), snapshot)

    async def _replace(self, old: Sandbox, snapshot: Snapshot, *, cold_start: bool = False) -> Sandbox:
        """Fork ``snapshot`` beside ``old``, and let it take over the identity once it answers."""
        with self.index.using(snapshot):
            new = _successor(old, head=snapshot.id, base=snapshot.id, resources=snapshot.resources, pause_snapshot="")
            new.mounts = self.surviving(snapshot.mounts, old)
            async with self.sharing(self.present(new.mounts)):
                await self.embody(snapshot, new, with_memory=not cold_start and snapshot.memory is not Memory.NONE)
                return await to_the_end(self._take_over(old, new))

    async def _take_over(self, old: Sandbox, new: Sandbox) -> Sandbox:
        try:
            await self.host.save(new)
        except BaseException:
            await self.host.discard(new)
            raise
        self.index.put(new)
        self.events.publish("sandbox.replaced", sandboxID=new.id, head=new.head)
        await self.host.discard(old)
        await self._drop_pause(old.pause_snapshot)
        await self.collect()
        return new

    async def pause(self, ref: str, *, memory: bool = True) -> None:
        """Record the sandbox and stop its machine. Without memory it is as if its power was cut after a sync."""
        async with self.held(ref) as hold:
            await to_the_end(self._pause(self.awake(hold), memory and self.host.abilities.memory))

    async def _pause(self, sandbox: Sandbox, memory: bool) -> None:
        if memory:
            captured = await self.record(sandbox, descendant(sandbox, SnapshotKind.PAUSE, self.index), memory=True)
            sandbox.pause_snapshot = captured.id
        else:
            await self.agent(sandbox).call("/sync", {})
        sandbox.state, sandbox.state_reason = SandboxState.PAUSED, ""
        await self.host.save(sandbox)
        await self.retire_paused(sandbox)
        self.events.publish("sandbox.paused", sandboxID=sandbox.id)

    async def retire_paused(self, sandbox: Sandbox) -> None:
        if sandbox.pause_snapshot:
            await self.host.discard(sandbox)
        else:
            await self.host.stop(sandbox)

    async def resume(self, ref: str, *, timeout: float | Unset | None = UNSET, cold_start: bool = False) -> Sandbox:
        """Let a paused sandbox go on, from its capture or else from its disk; with ``cold_start`` never from memory.

        Its time goes on too; where that is up already, it has as much again as it was given last, or else the host's
        default, from now.
        """
        async with self.held(ref) as hold:
            sandbox = self.sandbox(hold)
            if sandbox.state is SandboxState.RUNNING:
                raise Conflict(f"sandbox {sandbox.id} is running already")
            up = sandbox.end_at is not None and sandbox.end_at <= now()
            if isinstance(timeout, Unset) and up:
                timeout = sandbox.life or UNSET
            end_at = sandbox.end_at if isinstance(timeout, Unset) and not up else self.end_at(timeout)
            if sandbox.pause_snapshot:
                return await self._resume_captured(sandbox, end_at, cold_start or sandbox.cold_start)
            async with self.sharing(self.present(sandbox.mounts)):
                return await to_the_end(self._resume_disk(sandbox, end_at))

    async def _resume_captured(self, old: Sandbox, end_at: datetime | None, cold_start: bool) -> Sandbox:
        snapshot = self.index.snapshots.get(old.pause_snapshot)
        if snapshot is None:
            raise NotFound("the capture of this paused sandbox, snapshot", old.pause_snapshot)
        with self.index.using(snapshot):
            new = _successor(old, end_at=end_at, pause_snapshot="", cold_start=False)
            async with self.sharing(self.present(new.mounts)):
                await self.embody(snapshot, new, with_memory=not cold_start and snapshot.memory is not Memory.NONE)
                resumed = await to_the_end(self._take_over(old, new))
        self.events.publish("sandbox.resumed", sandboxID=old.id)
        return resumed

    async def _resume_disk(self, sandbox: Sandbox, end_at: datetime | None) -> Sandbox:
        await self.host.start(sandbox)
        try:
            await self.identify(sandbox, booted=True)
            if sandbox.mounts:
                await self.mount_inside(sandbox, seconds=self.host.boot_seconds)
            sandbox.state, sandbox.state_reason, sandbox.end_at = SandboxState.RUNNING, "", end_at
            sandbox.started_at = now()
            await self.host.save(sandbox)
        except BaseException:
            sandbox.state = SandboxState.PAUSED
            await self.host.stop(sandbox)
            raise
        self.events.publish("sandbox.resumed", sandboxID=sandbox.id)
        return sandbox

    async def kill(self, ref: str) -> None:
        """End a sandbox and remove it; its snapshots stay."""
        async with self.held(ref) as hold:
            await to_the_end(self._kill(self.sandbox(hold)))

    async def _kill(self, sandbox: Sandbox) -> None:
        await self.host.remove(sandbox)
        self.index.drop(sandbox.id)
        self.events.publish("sandbox.killed", sandboxID=sandbox.id, name=sandbox.name)
        await self._drop_pause(sandbox.pause_snapshot)
        await self.collect()

    async def _drop_pause(self, snapshot_id: str) -> None:
        snapshot = self.index.snapshots.get(snapshot_id)
        if snapshot is not None and snapshot.kind is SnapshotKind.PAUSE:
            await self.remove_snapshot(snapshot)


def _successor(old: Sandbox, **changes: Any) -> Sandbox:
    """The same sandbox with another machine."""
    fresh = {"instance": new_id(), "state": SandboxState.RUNNING, "state_reason": "", "host": {}, "started_at": now()}
    return old.model_copy(update=fresh | changes)
