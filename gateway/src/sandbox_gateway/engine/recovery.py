"""At start-up, complete or undo the operations that a crash or a reboot of the host interrupted."""

from __future__ import annotations

from sandbox_gateway.engine.attachments import Attachments
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.sandboxes import Sandboxes
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState, SnapshotKind

log = Logger("engine")


class Recovery:
    def __init__(
        self,
        context: Context,
        collector: Collector,
        removal: Removal,
        attachments: Attachments,
        machines: MachineLifecycle,
        sandboxes: Sandboxes,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._collector = collector
        self._removal = removal
        self._attachments = attachments
        self._machines = machines
        self._sandboxes = sandboxes

    def load(self, scan: Scan) -> None:
        """Load the results of the host's scan into the index, and log what the scan repaired."""
        self._context.unreadable_sandboxes = scan.unreadable_sandboxes
        problems = self._index.load(scan.sandboxes, scan.snapshots, scan.volumes, scan.volume_snapshots)
        for sentence in [*scan.repaired, *problems]:
            log.warning("repaired", what=sentence)

    async def reconcile(self, running_instances: set[str]) -> None:
        """Update the states of sandboxes to match the running machines, and remove unused objects.

        ``running_instances``: the instances whose machines are running.
        """
        for sandbox in self._sandboxes.list():
            try:
                await self._reconcile_sandbox(sandbox, is_running=sandbox.instance in running_instances)
            except GatewayError as error:
                log.error("a sandbox could not be reconciled", sandbox=sandbox.id, reason=error.message)
        await self._remove_orphans()
        await self._collector.collect()

    async def _reconcile_sandbox(self, sandbox: Sandbox, *, is_running: bool) -> None:
        if sandbox.state is SandboxState.PAUSED:
            if is_running:
                await self._machines.stop_paused_machine(sandbox)
        elif not is_running:
            await self._machines.mark_stopped(sandbox, "its host went down while it ran")
            if self._context.config.restart == "start":
                self._context.background.start(self._restart(sandbox.id))
        else:
            self._machines.mark_if_stopped(sandbox)
            if self._host.list_guest_mounts(sandbox):
                self._context.background.start(self._attachments.complete_mounts(sandbox.id))

    async def _restart(self, id: str) -> None:
        try:
            await self._sandboxes.resume(id)
        except GatewayError as error:
            log.error("restart failed", sandbox=id, reason=error.message)

    async def _remove_orphans(self) -> None:
        """Remove the bases of interrupted builds, and the pause snapshots of deleted sandboxes."""
        sandboxes = [*self._index.sandboxes.values(), *self._index.arrivals.values()]
        owned_ids = {sandbox.pause_snapshot for sandbox in sandboxes}
        for snapshot in list(self._index.snapshots.values()):
            is_unowned = snapshot.kind is SnapshotKind.PAUSE and snapshot.id not in owned_ids
            if snapshot.kind is SnapshotKind.BASE or (is_unowned and not self._context.unreadable_sandboxes):
                try:
                    await self._removal.remove_snapshot(snapshot)
                except GatewayError as error:
                    log.error("an orphaned snapshot could not be removed", snapshot=snapshot.id, reason=error.message)
