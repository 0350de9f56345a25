"""Replace the machine of a sandbox. The old machine runs until the new one responds and takes over."""

from __future__ import annotations

from typing import Any

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.record_changes import save_sandbox
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Sandbox, SandboxState, Snapshot, SnapshotKind, new_id, now
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("engine")


class Replacement:
    def __init__(
        self, context: Context, locking: Locking, collector: Collector, removal: Removal, machines: MachineLifecycle
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._collector = collector
        self._removal = removal
        self._machines = machines

    async def replace(self, old_sandbox: Sandbox, snapshot: Snapshot, *, from_disk: bool, **changes: Any) -> Sandbox:
        """Start a machine from ``snapshot`` that takes over the identity of ``old_sandbox``.

        The caller must lock ``old_sandbox``. ``from_disk``: boot from the disk, even if the snapshot includes memory.
        ``changes``: fields of the new record.
        """
        new_sandbox = old_sandbox.model_copy(update=changes)
        new_sandbox.instance, new_sandbox.host, new_sandbox.started_at = new_id(), {}, now()
        new_sandbox.state, new_sandbox.state_reason, new_sandbox.pause_snapshot = SandboxState.RUNNING, "", ""
        async with self._collector.pinned_then_collected(snapshot), self._locking.mounts_shared(new_sandbox):
            with_memory = not from_disk and snapshot.memory is not MemoryMode.NONE
            await self._machines.fork(snapshot, new_sandbox, with_memory=with_memory)
            return await finish_despite_cancellation(self._take_over(old_sandbox, new_sandbox))

    async def _take_over(self, old_sandbox: Sandbox, new_sandbox: Sandbox) -> Sandbox:
        try:
            new_sandbox = await save_sandbox(
                self._context, old_sandbox.id, **_find_changed_fields(old_sandbox, new_sandbox)
            )
        except BaseException:
            await clean_up(log, self._host.discard(new_sandbox))
            raise
        self._context.events.publish("sandbox.replaced", sandboxID=new_sandbox.id, head=new_sandbox.head)
        self._machines.mark_if_stopped(new_sandbox)
        # The replacement is committed, so a failed clean-up must not make the request fail.
        await clean_up(log, self._host.discard(old_sandbox), self.remove_pause_snapshot(old_sandbox))
        await self._collector.collect()
        return new_sandbox

    async def remove_pause_snapshot(self, sandbox: Sandbox) -> None:
        """Remove the snapshot that was taken when ``sandbox`` was paused, if any."""
        snapshot = self._index.snapshots.get(sandbox.pause_snapshot)
        if snapshot is not None and snapshot.kind is SnapshotKind.PAUSE:
            await self._removal.remove_snapshot(snapshot)


def _find_changed_fields(old_sandbox: Sandbox, new_sandbox: Sandbox) -> dict[str, Any]:
    """Return the fields of ``new_sandbox`` that differ from ``old_sandbox``."""
    return {name: value for name, value in new_sandbox if value != getattr(old_sandbox, name)}
