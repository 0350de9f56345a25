"""Convert the engine's records to JSON objects, with fields that depend on the host and on the caller."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request

from sandbox_gateway.api.access.auth import Permission, get_caller
from sandbox_gateway.api.access.ports import derive_traffic_token
from sandbox_gateway.api.dependencies import EngineDep
from sandbox_gateway.api.native import shapes
from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.hosts.base import VolumeState
from sandbox_gateway.records import Mount, Sandbox, Snapshot, Volume, VolumeSnapshot


class View:
    def __init__(self, engine: Engine, config: Config, permission: Permission) -> None:
        self.engine = engine
        self.config = config
        self.permission = permission

    @property
    def backend(self) -> str:
        return self.engine.host.kind

    def describe_sandbox(self, sandbox: Sandbox, *, with_secrets: bool = True, **extra: Any) -> shapes.SandboxShape:
        """Describe a sandbox. Includes its access tokens if ``with_secrets``, unless the caller is read-only."""
        extra |= describe_host(self.config) | self._build_connection_fields(
            sandbox, with_secrets and self.permission >= Permission.EXEC
        )
        if alias := self._find_alias(sandbox.template_id):
            extra["alias"] = alias
        return shapes.describe_sandbox(
            sandbox,
            state_reason=sandbox.state_reason or self.engine.room.get_stall_reason(sandbox),
            backend=self.backend,
            domain=self.config.server.domain,
            mounts=self._describe_mounts(sandbox.mounts),
            **extra,
        )

    def describe_snapshot(self, snapshot: Snapshot, *, with_users: bool = False) -> shapes.SnapshotShape:
        users = self.engine.references.find_users(snapshot)
        extra: dict[str, Any] = describe_host(self.config)
        if name := snapshot.host.get("zfsSnapshot"):
            extra["zfs_snapshot"] = name
        if snapshot.imported is not None:
            extra["imported"] = shapes.describe_import(snapshot.imported)
        if with_users:
            extra["users"] = [
                shapes.SnapshotUserShape(
                    kind="sandbox" if isinstance(user, Sandbox) else "volume", id=user.id, name=user.name
                )
                for user in users.blockers
            ]
        return shapes.describe_snapshot(
            snapshot,
            backend=self.backend,
            forks=len(users.blocking_sandboxes),
            prewarm=self.engine.prewarm.get_level(snapshot),
            memory_problem=self.engine.host.find_memory_problem(snapshot),
            mounts=self._describe_mounts(snapshot.mounts),
            volumes=[
                shapes.VolumeCaptureShape(name=self._find_volume_name(capture.volume), snapshot_id=capture.snapshot)
                for capture in snapshot.volumes
            ],
            **extra,
        )

    async def describe_volume(self, volume: Volume, *, with_secrets: bool = False) -> shapes.VolumeShape:
        """Describe a volume. Includes its token if ``with_secrets``; for a read-only caller, the token is empty."""
        extra: dict[str, Any] = describe_host(self.config)
        if name := volume.host.get("dataset"):
            extra["dataset"] = name
        if volume.imported is not None:
            extra["imported"] = shapes.describe_import(volume.imported)
        if with_secrets:
            extra["token"] = self._derive_volume_token(volume) if self.permission >= Permission.EXEC else ""
        return shapes.describe_volume(
            volume, await self._read_volume_state(volume), self._describe_users(volume), **extra
        )

    def describe_volume_snapshots(self, snapshots: Sequence[VolumeSnapshot]) -> list[shapes.VolumeSnapshotShape]:
        clone_names: defaultdict[str, list[str]] = defaultdict(list)
        for clone in self.engine.references.list_clones(snapshots):
            clone_names[clone.from_snapshot].append(clone.name)
        return [
            shapes.describe_volume_snapshot(snapshot, self._find_volume_name(snapshot.volume), clone_names[snapshot.id])
            for snapshot in snapshots
        ]

    def describe_mount(self, mount: Mount) -> shapes.VolumeMountShape:
        return shapes.VolumeMountShape(
            name=self._find_volume_name(mount.volume), path=mount.path, read_only=mount.read_only
        )

    async def describe_sandbox_and_divergence(self, sandbox: Sandbox) -> shapes.SandboxShape:
        return self.describe_sandbox(sandbox, diverged=await self._has_diverged(sandbox))

    async def describe_sandboxes_and_divergence(self, sandboxes: Sequence[Sandbox]) -> list[shapes.SandboxShape]:
        """Describe sandboxes, and whether they have diverged, but omit their access tokens.

        Queries all agents at the same time, because some may not respond.
        """
        divergences = await asyncio.gather(*map(self._has_diverged, sandboxes))
        pairs = zip(sandboxes, divergences, strict=True)
        return [self.describe_sandbox(sandbox, with_secrets=False, diverged=diverged) for sandbox, diverged in pairs]

    async def _has_diverged(self, sandbox: Sandbox) -> bool | None:
        """Return whether a sandbox has diverged; None if it was removed or the time was not sufficient."""
        try:
            return await self.engine.sandboxes.has_diverged(sandbox.id)
        except GatewayError:
            return None

    def _build_connection_fields(self, sandbox: Sandbox, with_secrets: bool) -> dict[str, Any]:
        extra = {}
        if with_secrets:
            extra["envd_access_token"] = self.engine.agents.derive_access_token(sandbox)
            extra["traffic_access_token"] = derive_traffic_token(self.engine, sandbox.id)
        try:
            address, _ = self.engine.agents.get_endpoint(sandbox.id)
        except GatewayError:
            return extra
        return {**extra, "address": address}

    def _describe_mounts(self, mounts: Iterable[Mount]) -> list[shapes.VolumeMountShape]:
        return [self.describe_mount(mount) for mount in mounts]

    def _find_volume_name(self, id: str) -> str:
        try:
            return self.engine.volumes.get(id).name
        except NotFound:
            return id

    def _derive_volume_token(self, volume: Volume) -> str:
        return self.engine.secret.derive(f"volume {volume.id}")

    async def _read_volume_state(self, volume: Volume) -> VolumeState | None:
        try:
            return await self.engine.volumes.get_state(volume.id)
        except GatewayError:
            return None

    def _describe_users(self, volume: Volume) -> list[shapes.VolumeUserShape]:
        return [
            shapes.VolumeUserShape(
                sandbox_id=sandbox.id,
                sandbox_name=sandbox.name,
                path=mount.path,
                readonly=mount.read_only,
                state=sandbox.state.value,
            )
            for sandbox, mount in self.engine.volumes.list_mounts(volume)
        ]

    def _find_alias(self, template_id: str) -> str | None:
        try:
            names = self.engine.templates.get(template_id).all_names if template_id else []
        except NotFound:
            return None
        return names[0] if names else None


def describe_host(config: Config) -> dict[str, Any]:
    """Return the field with the name of this host in its fleet, or nothing without `[fleet]`."""
    return {"sandbox_host": config.fleet.name} if config.fleet else {}


def get_template_or_snapshot(engine: Engine, ref: str) -> Snapshot:
    """Return the template or snapshot to make a sandbox from. Raises NotFound with the wording that clients expect."""
    try:
        return engine.snapshots.get(ref)
    except NotFound:
        raise NotFound("template or snapshot", ref[:80], resource="template") from None


def find_ids(ref: str, engine: Engine) -> set[str]:
    """Return ``ref``, and the id of the template or snapshot with that name, if any. Used for filters."""
    try:
        return {ref, engine.snapshots.get(ref).id}
    except NotFound:
        return {ref}


async def _get_view(request: Request, engine: EngineDep) -> View:
    return View(engine, request.app.state.config, get_caller(request.scope).permission)


ViewDep = Annotated[View, Depends(_get_view)]
