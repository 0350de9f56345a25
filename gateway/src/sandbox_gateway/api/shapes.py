"""What callers get: one model and one function for each JSON shape."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import NetworkPolicy, Retention, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot

if TYPE_CHECKING:
    from sandbox_gateway.engine.builds import Build
    from sandbox_gateway.engine.spec import ExecResult
    from sandbox_gateway.hosts.base import Usage, VolumeState

ENVD_VERSION = "0.6.4"
"""The data plane's level: clients choose calls by it."""
CLIENT_ID = "local"
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
"""`endAt` of what has no end; some months short of the last moment, for clients that convert to their own zone."""
_MIB = 1 << 20


class NetworkShape(BaseModel):
    allowInternetAccess: bool
    allowOut: list[str]
    denyOut: list[str]
    allowPublicTraffic: bool


class VolumeMountShape(BaseModel):
    name: str = Field(description="The volume; its id where it is there no more.")
    path: str
    readOnly: bool


class LifecycleShape(BaseModel):
    onTimeout: str
    autoResume: bool


class SandboxShape(BaseModel):
    sandboxID: str
    name: str
    templateID: str
    alias: str | None = Field(None, description="The name of its template.")
    clientID: str
    envdVersion: str
    envdAccessToken: str | None = Field(None, description="For `X-Access-Token` of the data plane; not for read keys.")
    trafficAccessToken: str | None = Field(
        None, description="For `E2B-Traffic-Access-Token`: every port but the agent's 49983; not for read keys."
    )
    domain: str
    state: Literal["running", "paused"]
    stateReason: str
    createdAt: datetime
    startedAt: datetime
    endAt: datetime = Field(description="Year 9999: never.")
    onTimeout: str
    lifecycle: LifecycleShape
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    metadata: dict[str, str]
    snapshotID: str = Field(description="Its head: the snapshot it descends from now.")
    forkedFrom: str = Field(description="What it was made from; never changes.")
    parentSandboxID: str
    diverged: bool | None = Field(None, description="Has the file system changed since the head?")
    network: NetworkShape
    allowInternetAccess: bool
    volumeMounts: list[VolumeMountShape]
    address: str | None = Field(None, description="Where its ports are reached, on the gateway's host.")
    backend: str


class VolumeCaptureShape(BaseModel):
    """What a snapshot holds of a volume."""

    name: str = Field(description="The volume.")
    snapshotID: str = Field(description="The volume's snapshot, taken in the same pause.")


class RetentionShape(BaseModel):
    keepLast: int | None
    keepDaily: int | None
    maxAge: float | None = Field(description="In seconds.")


class SnapshotShape(BaseModel):
    snapshotID: str
    kind: Literal["snapshot", "template"]
    names: list[str]
    description: str
    status: str
    sourceSandboxID: str
    originSandboxID: str
    templateID: str
    parentSnapshotID: str
    originID: str
    createdAt: datetime
    updatedAt: datetime
    expiresAt: datetime | None
    retention: RetentionShape | None = Field(description="The rule it was taken under.")
    memory: str
    coldStartable: bool
    memoryBytesWritten: int
    diskBytesUnique: int
    pauseMs: float
    cpuCount: int
    memoryMB: int
    diskSizeMB: int
    forks: int
    volumeMounts: list[VolumeMountShape] = Field(description="What its source had; a fork has the same.")
    volumes: list[VolumeCaptureShape] = Field(description="What was captured of volumes along with it.")
    backend: str
    zfsSnapshot: str | None = Field(None, description="Its name in ZFS, on hosts that have one.")


class TemplateShape(BaseModel):
    templateID: str
    names: list[str]
    aliases: list[str]
    buildID: str
    buildStatus: Literal["building", "ready", "error"]
    reason: str | None = Field(None, description="Why the build failed.")
    digest: str
    createdAt: datetime
    updatedAt: datetime
    forks: int
    recipe: dict[str, Any] = Field({}, description="The recipe in canonical form, as it may be posted; once ready.")
    description: str = ""
    cpuCount: int | None = Field(None, description="This and what follows: once it is ready.")
    memoryMB: int | None = None
    diskSizeMB: int | None = None
    memory: str | None = None


class AliasShape(BaseModel):
    templateID: str
    public: bool


class BuildShape(BaseModel):
    buildID: str
    templateID: str
    status: Literal["building", "ready", "error"]
    logs: list[str]
    reason: str | None


class LogShape(BaseModel):
    logs: list[str]


class BuildStarted(BaseModel):
    templateID: str
    buildID: str
    names: list[str]
    aliases: list[str]
    buildStatus: Literal["building", "ready", "error"]
    digest: str


class VolumeUserShape(BaseModel):
    """A sandbox that mounts a volume."""

    sandboxID: str
    sandboxName: str
    path: str
    readonly: bool
    state: Literal["running", "paused"]


class VolumeShape(BaseModel):
    volumeID: str = Field(description="Its name.")
    name: str
    token: str | None = Field(None, description="The volume's own secret; only when it is made or shown alone.")
    sizeMB: int
    usedMB: int | None = Field(description="What is in it, rounded up; null where the host cannot tell.")
    dataset: str | None = Field(None, description="Its name in ZFS, on hosts that have one.")
    createdAt: datetime
    mounts: list[VolumeUserShape]
    fromSnapshot: str = Field(description="The volume's snapshot it was made from.")
    ownerSandboxID: str = Field(description="The sandbox whose own clone it is. Empty: it stays until it is deleted.")
    stuck: list[str] = Field(description="What does not let go of it, in words; tried again in the background.")


class VolumeSnapshotShape(BaseModel):
    snapshotID: str
    name: str
    volumeID: str
    sizeMB: int
    sandboxSnapshotID: str = Field(description="The snapshot of a sandbox it is part of, and goes with.")
    createdAt: datetime


class ExecShape(BaseModel):
    exitCode: int
    stdout: str
    stderr: str
    timedOut: bool


class UsageShape(BaseModel):
    diskBytes: int = Field(description="On the disk, and shared with nothing else.")
    memoryBytes: int = Field(description="In memory; what is shared counts in proportion.")


class ForkErrorShape(BaseModel):
    name: str
    code: int
    kind: str
    message: str


class ForksShape(BaseModel):
    sandboxes: list[SandboxShape]
    errors: list[ForkErrorShape]


class ForkResultShape(BaseModel):
    sandbox: SandboxShape | None = None
    error: ForkErrorShape | None = None


class RollbackShape(BaseModel):
    sandboxID: str
    snapshotID: str
    operationID: str
    status: Literal["READY"]


class HealthShape(BaseModel):
    status: Literal["ok"]
    sandboxes: int
    version: str
    backend: str


class Hidden(BaseModel):
    """A snapshot that goes with its last user."""

    snapshotID: str
    status: Literal["hidden"]
    blockers: list[str]


def network_shape(policy: NetworkPolicy) -> NetworkShape:
    return NetworkShape(
        allowInternetAccess=policy.allow_internet,
        allowOut=policy.allow_out,
        denyOut=policy.deny_out,
        allowPublicTraffic=policy.allow_public_traffic,
    )


def sandbox_shape(
    sandbox: Sandbox, *, backend: str, domain: str, mounts: list[VolumeMountShape], **known: Any
) -> SandboxShape:
    """``known``: alias, address, envdAccessToken, trafficAccessToken, diverged, as far as they are known."""
    sizes = sandbox.resources
    return SandboxShape(
        sandboxID=sandbox.id,
        name=sandbox.name,
        templateID=sandbox.template_id,
        clientID=CLIENT_ID,
        envdVersion=ENVD_VERSION,
        domain=domain,
        state=sandbox.state.value,
        stateReason=sandbox.state_reason,
        createdAt=sandbox.created_at,
        startedAt=sandbox.started_at,
        endAt=sandbox.end_at or NEVER,
        onTimeout=sandbox.on_timeout.value,
        lifecycle=LifecycleShape(onTimeout=sandbox.on_timeout.value, autoResume=sandbox.auto_resume),
        cpuCount=sizes.cpus,
        memoryMB=sizes.memory_mb,
        diskSizeMB=sizes.disk_mb,
        metadata=sandbox.metadata,
        snapshotID=sandbox.head,
        forkedFrom=sandbox.forked_from,
        parentSandboxID=sandbox.parent_sandbox,
        network=network_shape(sandbox.network),
        allowInternetAccess=sandbox.network.allow_internet,
        volumeMounts=mounts,
        backend=backend,
        **known,
    )


def snapshot_shape(
    snapshot: Snapshot,
    *,
    backend: str,
    forks: int,
    mounts: list[VolumeMountShape],
    volumes: list[VolumeCaptureShape],
    **known: Any,
) -> SnapshotShape:
    """``known``: zfsSnapshot, where the host has one."""
    sizes = snapshot.resources
    return SnapshotShape(
        snapshotID=snapshot.id,
        kind="template" if snapshot.kind is SnapshotKind.TEMPLATE else "snapshot",
        names=snapshot.names,
        description=snapshot.description,
        status=snapshot.status.value,
        sourceSandboxID=snapshot.source_sandbox,
        originSandboxID=snapshot.origin_sandbox,
        templateID=snapshot.template_id,
        parentSnapshotID=snapshot.parent,
        originID=snapshot.origin,
        createdAt=snapshot.created_at,
        updatedAt=snapshot.updated_at,
        expiresAt=snapshot.expires_at,
        retention=_retention(snapshot.retention),
        memory=snapshot.memory.value,
        coldStartable=True,
        memoryBytesWritten=snapshot.memory_bytes_written,
        diskBytesUnique=snapshot.disk_bytes_unique,
        pauseMs=round(snapshot.pause_ms, 3),
        cpuCount=sizes.cpus,
        memoryMB=sizes.memory_mb,
        diskSizeMB=sizes.disk_mb,
        forks=forks,
        volumeMounts=mounts,
        volumes=volumes,
        backend=backend,
        **known,
    )


def volume_shape(volume: Volume, state: VolumeState | None, mounts: list[VolumeUserShape], **known: Any) -> VolumeShape:
    """``state`` is None where the host cannot tell. ``known``: token, dataset, as far as they are known."""
    return VolumeShape(
        volumeID=volume.name,
        name=volume.name,
        sizeMB=volume.size_mb,
        usedMB=-(-state.used_bytes // _MIB) if state else None,
        createdAt=volume.created_at,
        mounts=mounts,
        fromSnapshot=volume.from_snapshot,
        ownerSandboxID=volume.owner,
        stuck=state.stuck if state else [],
        **known,
    )


def volume_snapshot_shape(snapshot: VolumeSnapshot, volume: str) -> VolumeSnapshotShape:
    """``volume`` is the volume's name."""
    return VolumeSnapshotShape(
        snapshotID=snapshot.id,
        name=snapshot.name,
        volumeID=volume,
        sizeMB=snapshot.size_mb,
        sandboxSnapshotID=snapshot.sandbox_snapshot,
        createdAt=snapshot.created_at,
    )


def template_shape(template: Snapshot, *, build_id: str, forks: int) -> TemplateShape:
    """A template that is ready."""
    sizes = template.resources
    return TemplateShape(
        templateID=template.id,
        names=template.names,
        aliases=template.names,
        buildID=build_id,
        buildStatus="ready",
        digest=template.recipe_digest,
        recipe=posted(template.recipe),
        description=template.description,
        createdAt=template.created_at,
        updatedAt=template.updated_at,
        cpuCount=sizes.cpus,
        memoryMB=sizes.memory_mb,
        diskSizeMB=sizes.disk_mb,
        memory=template.memory.value,
        forks=forks,
    )


def building_shape(build: Build) -> TemplateShape:
    """A template that is not there yet, or whose build failed."""
    shape = TemplateShape(
        templateID=build.template_id,
        names=[build.name],
        aliases=[build.name],
        buildID=build.build_id,
        buildStatus=build.status,
        digest=build.digest,
        recipe=posted(build.recipe),
        createdAt=build.started_at,
        updatedAt=build.started_at,
        forks=0,
    )
    return shape.model_copy(update={"reason": build.reason}) if build.reason else shape


def posted(recipe: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe in the words in which it is posted; ``packages`` sorted, each once."""
    if not recipe:
        return {}
    known = Recipe.model_validate(recipe)
    sizes = known.resources
    return {
        "from": known.source.value,
        "suite": known.suite,
        "mirror": known.mirror,
        "packages": sorted(set(known.packages)),
        "path": known.path,
        "setup": known.setup,
        "startCommand": known.start_command,
        "readyProbe": known.ready_probe,
        "readyTimeout": known.ready_timeout,
        "setupTimeout": known.setup_timeout,
        "cpuCount": sizes.cpus,
        "memoryMB": sizes.memory_mb,
        "diskSizeMB": sizes.disk_mb,
    }


def build_shape(build: Build, offset: int = 0, limit: int | None = None) -> BuildShape:
    end = None if limit is None else offset + limit
    return BuildShape(
        buildID=build.build_id,
        templateID=build.template_id,
        status=build.status,
        logs=build.lines[offset:end],
        reason=build.reason or None,
    )


def started_shape(build: Build) -> BuildStarted:
    return BuildStarted(
        templateID=build.template_id,
        buildID=build.build_id,
        names=[build.name],
        aliases=[build.name],
        buildStatus=build.status,
        digest=build.digest,
    )


def exec_fields(result: ExecResult) -> dict[str, bytes | int]:
    """Those of ``ExecShape``."""
    return {
        "exitCode": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timedOut": result.timed_out,
    }


def usage_shape(usage: Usage) -> UsageShape:
    return UsageShape(diskBytes=usage.disk_bytes, memoryBytes=usage.memory_bytes)


def fork_error_shape(error: GatewayError, name: str) -> ForkErrorShape:
    return ForkErrorShape(name=name, code=error.status, kind=error.kind, message=error.message)


def names_for(results: Sequence[object], names: Sequence[str] | None) -> list[str]:
    """The name that was asked for each result; "" where none was."""
    return list(names) if names else [""] * len(results)


def _retention(rule: Retention | None) -> RetentionShape | None:
    if rule is None:
        return None
    return RetentionShape(keepLast=rule.keep_last, keepDaily=rule.keep_daily, maxAge=rule.max_age)
