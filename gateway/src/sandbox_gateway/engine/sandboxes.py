"""Operations on existing sandboxes: find, change, roll back, promote, pause, resume, delete."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.creation_order import Key
from sandbox_gateway.engine.durations import measured, set_memory_mode
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.mount_plan import MountPlanner
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.record_changes import record_locked, save_sandbox
from sandbox_gateway.engine.replacement import Replacement
from sandbox_gateway.engine.spec import UNSET, Unset
from sandbox_gateway.engine.timeouts import compute_end_time, has_expired
from sandbox_gateway.errors import Conflict, Invalid, NotFound, Timeout
from sandbox_gateway.hosts.base import Usage
from sandbox_gateway.log import Logger
from sandbox_gateway.records import (
    MemoryMode,
    NetworkPolicy,
    OnTimeout,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    now,
)
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

_SYNC_SECONDS = 2
"""Maximum time for the agent to make the guest write its cached data to its disk."""
_DIVERGENCE_SECONDS = 4
"""Maximum time to determine whether a sandbox has diverged. Its guest cannot extend it."""
_USAGE_SECONDS = 10

log = Logger("engine")


class Sandboxes:
    def __init__(
        self,
        context: Context,
        locking: Locking,
        agents: Agents,
        collector: Collector,
        mount_planner: MountPlanner,
        machines: MachineLifecycle,
        captures: Captures,
        replacement: Replacement,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._events = context.events
        self._locking = locking
        self._agents = agents
        self._collector = collector
        self._mount_planner = mount_planner
        self._machines = machines
        self._captures = captures
        self._replacement = replacement

    def get(self, ref: str) -> Sandbox:
        return self._index.get_sandbox(ref)

    def list(self) -> Sequence[Sandbox]:
        return [*self._index.walk_sandboxes()]

    def walk(self, after: Key | None = None, *, backwards: bool = False) -> Iterator[Sandbox]:
        """Yield sandboxes from oldest to newest, or the reverse if ``backwards``, starting after the key ``after``."""
        return self._index.walk_sandboxes(after, backwards=backwards)

    def count(self) -> Counter[str]:
        """Return the number of sandboxes by state."""
        return Counter(each.state.value for each in self._index.sandboxes.values())

    async def has_diverged(self, ref: str) -> bool:
        """Return whether a sandbox's file system has changed since its head snapshot was taken.

        Changes that the guest has not yet written to its disk count too. Raises GatewayError if this cannot be
        determined, or Timeout if that takes longer than four seconds, two of which the agent may use.
        """
        sandbox = self.get(ref)
        head = self._index.snapshots.get(sandbox.head)
        if head is None:
            return True
        if sandbox.state is SandboxState.PAUSED:
            return not sandbox.pause_snapshot or sandbox.pause_snapshot != sandbox.head
        async with _limited(_DIVERGENCE_SECONDS, f"sandbox {sandbox.name} could not be compared with its head"):
            await self._agents.create_client(sandbox).sync(seconds=_SYNC_SECONDS)
            return await self._host.has_diverged(sandbox, head)

    async def get_usage(self, ref: str) -> Usage:
        sandbox = self.get(ref)
        if sandbox.state is SandboxState.PAUSED:
            return Usage(disk_bytes=0, memory_bytes=0)
        async with _limited(_USAGE_SECONDS, f"the usage of sandbox {sandbox.name} could not be measured"):
            return await self._host.measure_usage(sandbox)

    @measured("sandbox.update")
    async def update(self, ref: str, *, metadata: dict[str, str] | None = None, name: str | None = None) -> Sandbox:
        """Replace a sandbox's metadata, or change its name."""
        async with self._locking.sandbox_locked(ref) as sandbox:
            new_name = require_valid_name(name) if name is not None and name != sandbox.name else ""
            changes: dict[str, Any] = {} if metadata is None else {"metadata": metadata}
            if not new_name:
                return await save_sandbox(self._context, sandbox.id, **changes)
            with self._index.reserved([new_name]):
                async with self._context.name_claims.held([NameClaim(sandbox, [new_name])]):
                    return await save_sandbox(self._context, sandbox.id, name=new_name, **changes)

    @measured("sandbox.set_timeout")
    async def set_timeout(self, ref: str, seconds: float | None) -> None:
        """Make a sandbox expire ``seconds`` from now, or never if ``seconds`` is None."""
        async with self._locking.sandbox_locked(ref) as sandbox:
            end_at = compute_end_time(seconds, self._context.config)
            await save_sandbox(self._context, sandbox.id, end_at=end_at, timeout=seconds or sandbox.timeout)

    @measured("sandbox.set_network")
    async def set_network(self, ref: str, policy: NetworkPolicy) -> None:
        async with self._locking.sandbox_locked(ref) as sandbox:
            self._host.check_network(policy)
            if sandbox.state is SandboxState.RUNNING:
                await self._host.apply_network(sandbox, policy)
            await save_sandbox(self._context, sandbox.id, network=policy)

    @measured("sandbox.rollback")
    async def rollback(self, ref: str, snapshot_ref: str, *, cold_start: bool = False) -> Sandbox:
        """Roll a sandbox back to a snapshot. The old machine runs until the new one responds.

        The sandbox keeps its id and name. It mounts the volumes that the snapshot's source mounted, except deleted
        ones. The contents of the volumes do not change. ``cold_start``: boot from the snapshot's disk instead of
        resuming from its memory.
        """
        snapshot = self._index.get_snapshot(snapshot_ref)
        # Pin the snapshot first, because it could be removed during the wait for the lock.
        async with self._collector.pinned_then_collected(snapshot), self._locking.sandbox_locked(ref) as sandbox:
            return await self._rollback(sandbox, snapshot, cold_start=cold_start)

    @measured("sandbox.promote")
    async def promote(self, fork_ref: str, source_ref: str | None = None) -> Sandbox:
        """Capture a fork, and roll its source (by default, the sandbox that it was forked from) back to the capture."""
        fork = self._context.require_running(fork_ref)
        source = self.get(source_ref or fork.parent_sandbox or "")
        if source.id == fork.id:
            raise Invalid(
                f"sandbox {fork.name} cannot replace itself: as the source, specify the sandbox that it was forked from"
            )
        async with contextlib.AsyncExitStack() as stack:
            async with self._locking.running_sandbox_locked(fork.id) as sandbox:
                snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.TRANSIENT)
                await stack.enter_async_context(self._collector.pinned_then_collected(snapshot))
                snapshot = await finish_despite_cancellation(self._captures.capture(sandbox, snapshot, memory=True))
            try:
                async with self._locking.sandbox_locked(source.id) as sandbox:
                    return await self._rollback(sandbox, snapshot)
            except BaseException:
                # If the request was cancelled after the commit, both sandboxes have the capture as their head.
                result = self._index.sandboxes.get(source.id)
                if result is None or result.head != snapshot.id:
                    await self._captures.restore_head(fork, snapshot)
                raise

    async def _rollback(self, sandbox: Sandbox, snapshot: Snapshot, *, cold_start: bool = False) -> Sandbox:
        return await self._replacement.replace(
            sandbox,
            snapshot,
            from_disk=cold_start,
            head=snapshot.id,
            base=snapshot.id,
            resources=snapshot.resources,
            mounts=self._mount_planner.exclude_deleted_volumes(snapshot.mounts, sandbox),
        )

    @measured("sandbox.pause")
    async def pause(self, ref: str, *, memory: bool = True) -> None:
        """Capture a sandbox and stop its machine. Without ``memory``, capture nothing, but sync its disk."""
        async with self._locking.running_sandbox_locked(ref) as sandbox:
            await finish_despite_cancellation(self.pause_locked(sandbox, memory=memory))

    async def pause_locked(self, sandbox: Sandbox, *, memory: bool = True, **changes: Any) -> Sandbox:
        """Pause a running sandbox that the caller has locked. ``changes``: other fields of its new record."""
        if memory and self._host.abilities.memory:
            paused_sandbox = await self._capture_and_pause(sandbox, changes)
        else:
            set_memory_mode(MemoryMode.NONE)
            await self._agents.create_client(sandbox).sync()
            paused_sandbox = await self._save_as_paused(sandbox, **changes)
        await self._machines.stop_paused_machine(paused_sandbox)
        self._events.publish("sandbox.paused", sandboxID=sandbox.id)
        return paused_sandbox

    async def _capture_and_pause(self, sandbox: Sandbox, changes: dict[str, Any]) -> Sandbox:
        """Capture a sandbox, and save that it is paused. On failure, remove the snapshot."""
        snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.PAUSE)
        try:
            await self._captures.capture(sandbox, snapshot, memory=True)
            return await self._save_as_paused(sandbox, pause_snapshot=snapshot.id, **changes)
        except BaseException:
            await self._captures.undo(snapshot.id)
            raise

    async def _save_as_paused(self, sandbox: Sandbox, **changes: Any) -> Sandbox:
        changes = {"state": SandboxState.PAUSED, "state_reason": "", **changes}
        return await save_sandbox(self._context, sandbox.id, **changes)

    @measured("sandbox.resume")
    async def resume(self, ref: str, *, timeout: float | Unset | None = UNSET, cold_start: bool = False) -> Sandbox:
        """Resume a paused sandbox from its snapshot, or from its disk if it has none.

        ``timeout``: the new timeout in seconds. By default, the end time stays the same. If it has passed, the timeout
        that was set last, or else the host's default, starts again. ``cold_start``: boot from the disk instead of
        resuming from memory.
        """
        async with self._locking.sandbox_locked(ref) as sandbox:
            if sandbox.state is SandboxState.RUNNING:
                raise Conflict(f"sandbox {sandbox.id} is already running: only a paused sandbox can be resumed")
            return await self.resume_locked(sandbox, timeout=timeout, cold_start=cold_start)

    async def resume_locked(
        self, sandbox: Sandbox, *, timeout: float | Unset | None = UNSET, cold_start: bool = False, **changes: Any
    ) -> Sandbox:
        """Resume a paused sandbox that the caller has locked. ``changes``: other fields of its new record."""
        is_expired = sandbox.end_at is not None and sandbox.end_at <= now()
        if isinstance(timeout, Unset) and is_expired:
            timeout = sandbox.timeout or UNSET
        keeps_end_time = isinstance(timeout, Unset) and not is_expired
        changes["end_at"] = sandbox.end_at if keeps_end_time else compute_end_time(timeout, self._context.config)
        if sandbox.pause_snapshot:
            return await self._resume_from_snapshot(sandbox, cold_start or sandbox.cold_start, changes)
        async with self._locking.mounts_shared(sandbox):
            return await finish_despite_cancellation(self._resume_from_disk(sandbox, changes))

    async def _resume_from_snapshot(self, sandbox: Sandbox, cold_start: bool, changes: dict[str, Any]) -> Sandbox:
        snapshot = self._index.snapshots.get(sandbox.pause_snapshot)
        if snapshot is None:
            message = (
                f"sandbox {sandbox.id} cannot be resumed, because its capture {sandbox.pause_snapshot} is missing: "
                "restore the capture from a backup, or delete the sandbox"
            )
            raise NotFound("snapshot", sandbox.pause_snapshot, message=message, resource="sandbox")
        resumed_sandbox = await self._replacement.replace(
            sandbox, snapshot, from_disk=cold_start, cold_start=False, **changes
        )
        self._events.publish("sandbox.resumed", sandboxID=sandbox.id)
        return resumed_sandbox

    async def _resume_from_disk(self, sandbox: Sandbox, changes: dict[str, Any]) -> Sandbox:
        resumed_sandbox = sandbox.model_copy(deep=True)
        await self._machines.boot(resumed_sandbox)
        changes = {**changes, "state": SandboxState.RUNNING, "state_reason": "", "started_at": now()}
        try:
            resumed_sandbox = await save_sandbox(self._context, sandbox.id, host=resumed_sandbox.host, **changes)
        except BaseException:
            await clean_up(log, self._host.stop(resumed_sandbox))
            raise
        self._events.publish("sandbox.resumed", sandboxID=sandbox.id)
        self._machines.mark_if_stopped(resumed_sandbox)
        return resumed_sandbox

    @measured("sandbox.expire")
    async def expire(self, ref: str) -> None:
        """If a sandbox has expired, pause or delete it, depending on its ``on_timeout``."""
        async with self._locking.sandbox_locked(ref) as sandbox:
            if not has_expired(sandbox, now()):
                return  # the timeout was extended, or the sandbox was paused in the meantime
            if sandbox.on_timeout is OnTimeout.PAUSE:
                self._context.require_running(sandbox.id)
                await finish_despite_cancellation(self.pause_locked(sandbox))
            else:
                await finish_despite_cancellation(self.remove_locked(sandbox))

    @measured("sandbox.delete")
    async def delete(self, ref: str) -> None:
        """Stop and remove a sandbox. Its snapshots remain, except a pause snapshot."""
        async with self._locking.sandbox_locked(ref) as sandbox:
            await finish_despite_cancellation(self.remove_locked(sandbox))

    async def remove_locked(self, sandbox: Sandbox, *, has_moved: bool = False) -> None:
        """Remove a sandbox that the caller has locked, and what only it needs.

        ``has_moved``: it continues on another host.
        """
        # A save that waits for this lock must not restore the record.
        async with record_locked(self._context, sandbox):
            await self._host.remove(sandbox)
            self._index.remove(sandbox.id)
        if has_moved:
            self._events.publish("sandbox.departed", sandboxID=sandbox.id, name=sandbox.name)
        else:
            self._events.publish("sandbox.killed", sandboxID=sandbox.id, name=sandbox.name)
        await clean_up(log, self._replacement.remove_pause_snapshot(sandbox))
        await self._collector.collect()


@contextlib.asynccontextmanager
async def _limited(seconds: float, failure: str) -> AsyncIterator[None]:
    """Limit the time of a lookup. ``failure`` is the beginning of the error message. Raises Timeout."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Timeout(f"{failure} within {seconds:g} s: try again later") from None
