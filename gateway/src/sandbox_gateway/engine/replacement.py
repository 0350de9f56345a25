"""Replace the machine of a sandbox. The old machine runs until the new one responds and takes over."""

from __future__ import annotations

from typing import Any

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.record_changes import save_sandbox
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Memory, Sandbox, SandboxState, Snapshot, SnapshotKind, new_id, now
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("engine")


class Replacement:
    def __init__(self, context: Context, locking: Locking, collector: Collector, machines: MachineLifecycle) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._collector = collector
        self._machines = machines

    async def replace(self, old: Sandbox, snapshot: Snapshot, *, from_disk: bool, **changes: Any) -> Sandbox:
        """Start a machine from ``snapshot`` that takes over the identity of ``old``. The caller must hold its lock.

        ``from_disk``: boot from the disk, even if the snapshot includes memory. ``changes``: fields of the new record.
        """
        new = old.model_copy(update=changes)
        new.instance, new.host, new.started_at = new_id(), {}, now()
        new.state, new.state_reason, new.pause_snapshot = SandboxState.RUNNING, "", ""
        async with self._collector.pinned(snapshot), self._locking.shared_mounts(new):
            with_memory = not from_disk and snapshot.memory is not Memory.NONE
            await self._machines.fork(snapshot, new, with_memory=with_memory)
            return await finish_despite_cancellation(self._take_over(old, new))

    async def _take_over(self, old: Sandbox, new: Sandbox) -> Sandbox:
        try:
            new = await save_sandbox(self._context, old.id, **_changed_fields(old, new))
        except BaseException:
            await clean_up(log, self._host.discard(new))
            raise
        self._context.events.publish("sandbox.replaced", sandboxID=new.id, head=new.head)
        self._machines.mark_if_stopped(new)
        # The replacement is committed, so a failed clean-up must not make the request fail.
        await clean_up(log, self._host.discard(old), self.remove_pause_snapshot(old))
        await self._collector.collect()
        return new

    async def remove_pause_snapshot(self, sandbox: Sandbox) -> None:
        """Remove the snapshot that was taken when ``sandbox`` was paused, if any."""
        snapshot = self._index.snapshots.get(sandbox.pause_snapshot)
        if snapshot is not None and snapshot.kind is SnapshotKind.PAUSE:
            await self._collector.remove_snapshot(snapshot)


def _changed_fields(old: Sandbox, new: Sandbox) -> dict[str, Any]:
    """Return the fields of ``new`` that differ from ``old``."""
    return {name: value for name, value in new if value != getattr(old, name)}
