"""Complete or undo, at start-up, operations that a crash or a reboot of the host interrupted."""

from __future__ import annotations

from sandbox_gateway.engine.attachments import Attachments
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
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
        attachments: Attachments,
        machines: MachineLifecycle,
        sandboxes: Sandboxes,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._collector = collector
        self._attachments = attachments
        self._machines = machines
        self._sandboxes = sandboxes

    def load(self, scan: Scan) -> None:
        """Fill the index with the results of the host's scan."""
        self._context.unreadable_sandboxes = scan.unreadable_sandboxes
        clashes = self._index.load(scan.sandboxes, scan.snapshots, scan.volumes, scan.volume_snapshots)
        for sentence in [*scan.repaired, *clashes]:
            log.warning("repaired", what=sentence)

    async def settle(self, alive: set[str]) -> None:
        """Update the states of sandboxes to the running machines, ``alive``, and remove unused objects."""
        for sandbox in self._sandboxes.list():
            try:
                await self._settle_sandbox(sandbox, running=sandbox.instance in alive)
            except GatewayError as error:
                log.error("sandbox not settled", sandbox=sandbox.id, reason=error.message)
        await self._remove_orphans()
        await self._collector.collect()

    async def _settle_sandbox(self, sandbox: Sandbox, *, running: bool) -> None:
        if sandbox.state is SandboxState.PAUSED:
            if running:
                await self._machines.stop_paused(sandbox)
        elif not running:
            await self._machines.mark_stopped(sandbox, "its host went down while it ran")
            if self._context.config.restart == "start":
                self._context.background.start(self._restart(sandbox.id))
        else:
            self._machines.notice_end(sandbox)
            if self._host.guest_mounts(sandbox):
                self._context.background.start(self._attachments.complete_mounts(sandbox.id))

    async def _restart(self, id: str) -> None:
        try:
            await self._sandboxes.resume(id)
        except GatewayError as error:
            log.error("restart failed", sandbox=id, reason=error.message)

    async def _remove_orphans(self) -> None:
        """Remove bases of interrupted builds, and pause snapshots of removed sandboxes."""
        owned = {sandbox.pause_snapshot for sandbox in self._index.sandboxes.values()}
        for snapshot in list(self._index.snapshots.values()):
            unowned = snapshot.kind is SnapshotKind.PAUSE and snapshot.id not in owned
            if snapshot.kind is SnapshotKind.BASE or (unowned and not self._context.unreadable_sandboxes):
                try:
                    await self._collector.remove_snapshot(snapshot)
                except GatewayError as error:
                    log.error("snapshot not removed", snapshot=snapshot.id, reason=error.message)
