"""Attach volumes to existing sandboxes, and detach them."""

from __future__ import annotations

from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.engine.record_changes import save_sandbox
from sandbox_gateway.engine.spec import MountSpec
from sandbox_gateway.errors import Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, SandboxState
from sandbox_gateway.tasks import finish_despite_cancellation

_UNMOUNT_TIMEOUT_SECONDS = 10.0

log = Logger("engine")


class Attachments:
    def __init__(self, context: Context, locking: Locking, agents: Agents, collector: Collector) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._events = context.events
        self._locking = locking
        self._agents = agents
        self._collector = collector

    @measured("volume.attach")
    async def attach(self, sandbox_ref: str, spec: MountSpec) -> Mount:
        """Mount a volume in a running sandbox.

        The record is saved first, so that the mount can be completed after a crash.
        """
        if spec.clone:
            raise Invalid(
                "a clone of a volume cannot be attached to a running sandbox: create a volume from a "
                "snapshot first, and attach that volume"
            )
        async with self._locking.running_sandbox_locked(sandbox_ref) as sandbox:
            volume = self._index.get_volume(spec.volume)
            mount = Mount(volume=volume.id, path=spec.path, read_only=spec.read_only)
            if any(each.volume == volume.id for each in sandbox.mounts):
                raise Conflict(f"sandbox {sandbox.name} already mounts volume {volume.name}: detach it first")
            check_mount_paths([*(each.path for each in sandbox.mounts), mount.path])
            async with self._locking.volumes_shared([volume.id]):
                await finish_despite_cancellation(self._attach(sandbox, mount))
            self._events.publish("volume.attached", volumeID=volume.name, sandboxID=sandbox.id, path=mount.path)
            return mount

    async def _attach(self, sandbox: Sandbox, mount: Mount) -> None:
        updated_sandbox = await save_sandbox(self._context, sandbox.id, mounts=[*sandbox.mounts, mount])
        try:
            await self._host.attach(updated_sandbox, mount)
            try:
                await self._agents.mount_volumes(updated_sandbox)
            except BaseException:
                await self._unmount(updated_sandbox, mount)
                raise
        except BaseException:
            await save_sandbox(self._context, sandbox.id, mounts=sandbox.mounts)
            raise

    @measured("volume.detach")
    async def detach(self, sandbox_ref: str, volume_ref: str) -> None:
        """Detach a volume from a sandbox, even while programs use it. A paused sandbox resumes without the volume."""
        async with self._locking.sandbox_locked(sandbox_ref) as sandbox:
            # A volume whose record is missing can be specified by its id.
            mount = next((each for each in sandbox.mounts if each.volume == volume_ref), None)
            name = volume_ref
            if mount is None or mount.volume in self._index.volumes:
                volume = self._index.get_volume(volume_ref)
                name = volume.name
                mount = next((each for each in sandbox.mounts if each.volume == volume.id), None)
            if mount is None:
                raise NotFound(
                    "mount",
                    name,
                    message=f"volume {name!r} is not attached to sandbox {sandbox.name!r}: check both names",
                    parent=sandbox.name,
                )
            await finish_despite_cancellation(self._detach(sandbox, mount))
            self._events.publish("volume.detached", volumeID=name, sandboxID=sandbox.id)
            await self._collector.collect()

    async def _detach(self, sandbox: Sandbox, mount: Mount) -> None:
        if sandbox.state is SandboxState.RUNNING and not self._host.find_end_reason(sandbox):
            await self._unmount(sandbox, mount)
        await save_sandbox(self._context, sandbox.id, mounts=_copy_without_mount(sandbox, mount).mounts)

    async def _unmount(self, sandbox: Sandbox, mount: Mount) -> None:
        """Unmount a volume in the sandbox, and then on the host, even if the agent fails.

        This order prevents programs in the sandbox from seeing a dead mount.
        """
        updated_sandbox = _copy_without_mount(sandbox, mount)
        if self._host.list_guest_mounts(sandbox):
            try:
                await self._agents.mount_volumes(
                    updated_sandbox, has_stale_mounts=True, seconds=_UNMOUNT_TIMEOUT_SECONDS
                )
            except GatewayError as error:
                log.warning(
                    "the agent could not unmount a volume", sandbox=sandbox.id, path=mount.path, reason=error.message
                )
        await self._host.detach(updated_sandbox, mount)

    async def complete_mounts(self, sandbox_id: str) -> None:
        """Complete an attachment or detachment that a restart interrupted."""
        async with self._locking.sandbox_locked(sandbox_id) as sandbox:
            if sandbox.state is SandboxState.RUNNING:
                await self._agents.mount_volumes(sandbox)


def _copy_without_mount(sandbox: Sandbox, mount: Mount) -> Sandbox:
    return sandbox.model_copy(update={"mounts": [each for each in sandbox.mounts if each.volume != mount.volume]})
