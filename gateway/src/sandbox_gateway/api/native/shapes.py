"""Models of response bodies, and functions that create them from the engine's records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox_gateway.api.native.naming import to_json_name
from sandbox_gateway.engine.build_context_patterns import translate_source
from sandbox_gateway.engine.names import create_build_id, split_tag
from sandbox_gateway.engine.own_changes import count_own_changes, get_generation_without_own_changes
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import (
    ImportOrigin,
    NetworkPolicy,
    Retention,
    Sandbox,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeSnapshot,
)

if TYPE_CHECKING:
    from sandbox_gateway.engine.agent_client import ExecResult
    from sandbox_gateway.engine.build_context_patterns import IgnorePattern
    from sandbox_gateway.engine.builds import Build, LogLine
    from sandbox_gateway.engine.dockerfiles import Dockerfile
    from sandbox_gateway.engine.loads import Sample
    from sandbox_gateway.engine.prewarm import Level
    from sandbox_gateway.engine.room import RoomReport
    from sandbox_gateway.engine.transfer.artifacts import Artifact, ArtifactTransfer
    from sandbox_gateway.engine.transfer.interrupted import InterruptedImport
from sandbox_gateway.hosts.base import MemoryDisk, SlowCommand, Usage, VolumeState

ENVD_VERSION = "0.6.4"
"""The envd version that the data plane implements. Clients use it to choose their calls."""
CLIENT_ID = "local"
FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC)
"""`endAt` of a sandbox that never ends. Well before the last date, so clients can convert it to their time zone."""
_MIB = 1 << 20
_GENERATION = "Number of changes since creation. In a plan session or an applied run, without the run's own changes."


class Shape(BaseModel):
    """A response body whose fields are in camelCase in JSON."""

    model_config = ConfigDict(alias_generator=to_json_name, populate_by_name=True, serialize_by_alias=True)


class NetworkShape(Shape):
    allow_internet_access: bool
    allow_out: list[str]
    deny_out: list[str]
    allow_public_traffic: bool
    mask_request_host: str | None = Field(
        None, description="The Host header that services receive; absent if the client's is kept."
    )


class VolumeMountShape(Shape):
    name: str = Field(description="Name of the volume; its id if the volume was removed.")
    path: str
    read_only: bool


class LifecycleShape(Shape):
    on_timeout: str
    auto_resume: bool


class SandboxShape(Shape):
    sandbox_id: str
    name: str
    template_id: str
    alias: str | None = Field(None, description="Name of the sandbox's template.")
    client_id: str
    envd_version: str
    envd_access_token: str | None = Field(
        None, description="Value of the data plane's header `X-Access-Token`. Absent for read keys."
    )
    traffic_access_token: str | None = Field(
        None,
        description="Value of the header `E2B-Traffic-Access-Token`, for every port but the agent's 49983. Absent for "
        "read keys.",
    )
    domain: str
    state: Literal["running", "paused"]
    state_reason: str
    created_at: datetime
    started_at: datetime
    end_at: datetime = Field(description="A date in the year 9999 means never.")
    on_timeout: str
    lifecycle: LifecycleShape
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    metadata: dict[str, str]
    snapshot_id: str = Field(description="The sandbox's head: the snapshot that it currently descends from.")
    forked_from: str = Field(description="The snapshot or template that the sandbox was made from; never changes.")
    parent_sandbox_id: str
    diverged: bool | None = Field(None, description="Whether the file system has changed since the head.")
    network: NetworkShape
    allow_internet_access: bool
    volume_mounts: list[VolumeMountShape]
    address: str | None = Field(None, description="Address of the sandbox's ports on the gateway's host.")
    backend: str
    generation: int = Field(description=_GENERATION)
    sandbox_host: str | None = Field(None, description="Its host, in a fleet.")


class VolumeCaptureShape(Shape):
    """A volume that a snapshot includes."""

    name: str = Field(description="The volume.")
    snapshot_id: str = Field(description="The volume's snapshot, taken in the same pause.")


class RetentionShape(Shape):
    keep_last: int | None
    keep_daily: int | None
    max_age: float | None = Field(description="In seconds.")


class SnapshotUserShape(Shape):
    """A sandbox or volume that prevents the deletion of a snapshot."""

    kind: Literal["sandbox", "volume"]
    id: str
    name: str


class PrewarmShape(Shape):
    """The number of forks of a snapshot to keep ready, and the number that are ready."""

    target: int
    ready: int


class ImportedShape(Shape):
    snapshot_id: str = Field(description="The snapshot's id in the gateway that exported it.")
    signer: str = Field(description="The fingerprint of the key that signed the file.")
    omitted_memory: str = Field(description="Why the memory in the file was not imported; empty if nothing is missing.")


class InterruptedImportShape(Shape):
    id: str = Field(description="The id that the snapshot will have.")
    snapshot_id: str = Field(description="The snapshot's id in the gateway that exported it.")
    signer: str = Field(description="The fingerprint of the key that signed the file.")
    resume_token: str = Field(
        description="The `resumeToken` with which that gateway exports the rest. Empty: send the rest of the file."
    )
    received_bytes: int = Field(description="The number of bytes of the file that were used; 0 with a `resumeToken`.")
    received_digest: str = Field(description="The SHA-256 of these bytes.")
    expires_at: datetime = Field(description="When the gateway removes what it has received.")


class ArtifactShape(Shape):
    """A snapshot in an OCI registry, as its signed config describes it."""

    reference: str
    digest: str = Field(description="The digest of its OCI manifest.")
    snapshot_id: str = Field(description="The snapshot's id in the gateway that pushed it.")
    kind: Literal["snapshot", "template"]
    names: list[str]
    description: str
    memory: bool = Field(description="Whether it contains memory.")
    signer: str = Field(description="The fingerprint of the key that signed it.")
    trusted: bool = Field(description="Whether this gateway has signed it.")
    release: str = Field(description="The release of the gateway that pushed it.")
    backend: str = Field(description="The kind of host that it is for.")
    size_bytes: int = Field(description="The compressed size of all its blobs.")
    data_bytes: int = Field(description="The space that the snapshot needs on the disk.")
    chunks: int
    cpu_count: int
    memory_mb: int
    disk_size_mb: int


class TransferErrorShape(Shape):
    kind: str
    status: int = Field(description="The HTTP status of a response with this error.")
    message: str
    blockers: list[str]


class TransferShape(Shape):
    """A push or a pull."""

    transfer_id: str
    action: Literal["push", "pull"]
    reference: str
    status: Literal["running", "ready", "error"]
    snapshot_id: str = Field(description="The snapshot that is pushed, or that a finished pull has created.")
    digest: str = Field(description="The digest of the artifact's manifest; empty until it is known.")
    chunks: int = Field(description="Number of chunks to process; 0 until it is known.")
    chunks_done: int
    chunks_reused: int = Field(description="Chunks that were not transferred, because the other side has them.")
    transferred_bytes: int = Field(description="Compressed bytes that were sent or received.")
    started_at: datetime
    error: TransferErrorShape | None = Field(description="Why it failed; null if there is no error.")


class SignerShape(Shape):
    fingerprint: str = Field(description="The SHA-256 of the public key, which importers compare.")


class SnapshotShape(Shape):
    snapshot_id: str
    kind: Literal["snapshot", "template"]
    names: list[str]
    description: str
    status: str
    source_sandbox_id: str
    origin_sandbox_id: str
    template_id: str
    parent_snapshot_id: str
    origin_id: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    retention: RetentionShape | None = Field(description="The retention rule of the snapshot.")
    memory: str
    memory_problem: str = Field(
        description="Why its memory cannot be restored now; empty if it can, or if there is none."
    )
    cold_startable: bool
    memory_bytes_written: int
    disk_bytes_unique: int
    pause_ms: float
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    forks: int
    prewarm: PrewarmShape = Field(description="Forks to keep ready, and forks that are ready now.")
    volume_mounts: list[VolumeMountShape] = Field(description="The mounts of its source; forks get the same.")
    volumes: list[VolumeCaptureShape] = Field(description="Volumes that were captured in the same pause.")
    backend: str
    generation: int = Field(description=_GENERATION)
    users: list[SnapshotUserShape] | None = Field(
        None, description="Sandboxes and volumes that prevent its deletion; only in the response for a single snapshot."
    )
    imported: ImportedShape | None = Field(
        None, description="Only for a snapshot that was imported from a file, or pulled."
    )
    zfs_snapshot: str | None = Field(None, description="The snapshot's name in ZFS, on hosts with ZFS.")
    sandbox_host: str | None = Field(None, description="Its host, in a fleet.")


class TemplateShape(Shape):
    template_id: str
    names: list[str]
    aliases: list[str]
    build_id: str
    build_status: Literal["building", "ready", "error"]
    status: Literal["BUILDING", "READY", "FAILED"] = Field(description="The build status, with CubeSandbox's names.")
    reason: str | None = Field(None, description="Why the build failed.")
    last_error: str | None = Field(None, description="The same as reason; CubeSandbox's name for it.")
    digest: str
    outdated: bool | None = Field(
        description="Whether the gateway's guest files differ from those that the template was built with. If they do, "
        "building its recipe again creates a new template. Null: unknown."
    )
    created_at: datetime
    updated_at: datetime
    generation: int = Field(description=_GENERATION)
    forks: int
    recipe: dict[str, Any] = Field(
        {}, description="The recipe in canonical form, valid as a request; only when the template is ready."
    )
    description: str = ""
    cpu_count: int | None = Field(None, description="Null: the build waits for its steps.")
    memory_mb: int | None = None
    disk_size_mb: int | None = None
    memory: str | None = Field(None, description="This field and the following: only when the template is ready.")
    memory_problem: str | None = Field(None, description="Why its memory cannot be restored now; empty if it can.")
    prewarm: PrewarmShape | None = None
    sandbox_host: str | None = Field(None, description="Its host, in a fleet.")
    public: bool = Field(description="False. E2B's client requires this field and the following.")
    created_by: None = Field(description="Null: not recorded.")
    last_spawned_at: None = Field(description="Null: not recorded.")
    spawn_count: None = Field(description="Null: not recorded.")
    build_count: int = Field(description="1: each build is a template of its own.")
    envd_version: str
    builds: list[TemplateBuildShape] | None = Field(None, description="The build; only when one template is shown.")


class TemplateBuildShape(Shape):
    build_id: str
    status: Literal["waiting", "building", "ready", "error"]
    created_at: datetime
    updated_at: datetime
    cpu_count: int | None
    memory_mb: int | None
    disk_size_mb: int | None
    envd_version: str


class AliasShape(Shape):
    template_id: str
    public: bool


class LogEntryShape(Shape):
    timestamp: datetime
    message: str
    level: Literal["info"] = Field(description="The lines of a build do not have different levels.")


class BuildReasonShape(Shape):
    message: str


class BuildShape(Shape):
    build_id: str
    template_id: str
    status: Literal["waiting", "building", "ready", "error"]
    logs: list[str]
    log_entries: list[LogEntryShape] = Field(description="The same lines with their times, as E2B's clients read them.")
    reason: BuildReasonShape | None = Field(None, description="Why the build failed; absent if there is no error.")
    error_message: str = Field(description="The message of reason; CubeSandbox's name for it. Empty if there is none.")


class LogShape(Shape):
    logs: list[LogEntryShape]


class BuildStarted(Shape):
    template_id: str
    build_id: str
    names: list[str]
    aliases: list[str]
    build_status: Literal["waiting", "building", "ready", "error"]
    status: Literal["waiting", "building", "ready", "error"] = Field(
        description="The build status, with CubeSandbox's name."
    )
    digest: str


class BuildAnnounced(Shape):
    """A build that waits for its steps."""

    template_id: str
    build_id: str
    names: list[str]
    aliases: list[str]
    tags: list[str]
    public: bool = False


class TagShape(Shape):
    """A tag of a template's name, and the build to which NAME:TAG refers."""

    tag: str
    build_id: str
    template_id: str
    created_at: datetime = Field(description="When the build got the tag.")


class AssignedTagsShape(Shape):
    tags: list[str]
    build_id: str


class FileUpload(Shape):
    """Where to upload the files of a build step."""

    present: bool = Field(description="Whether the files are stored already.")
    url: str


class SourceShape(Shape):
    """A source of `COPY` instructions."""

    source: str
    line: int
    components: list[str] = Field(
        description="A regular expression for each component of the paths that match; none for the whole context."
    )


class IgnorePatternShape(Shape):
    """A line of `.dockerignore`."""

    regex: str = Field(description="Matches a path. If it is a directory, the line applies to everything in it.")
    is_exception: bool = Field(description="Whether the line makes an exception from the lines before it.")


class DockerfileShape(Shape):
    """A Dockerfile as fields of a recipe, and the files that its build needs."""

    image: str
    sources: list[SourceShape]
    ignore_patterns: list[IgnorePatternShape]
    max_archive_bytes: int
    missing_digests: list[str] = Field(description="The digests in the request whose archives are not stored.")
    setup: list[str] | None = Field(None, description="Null while the digests of sources are missing.")
    start_command: str | None = Field(None, description="Empty: the image's entry point. Null like `setup`.")


class CaptureCostsShape(Shape):
    """Medians of the costs of recent captures."""

    pause_ms: float
    memory_bytes_written: int
    disk_bytes_unique: int


class PlanShape(Shape):
    """A plan session."""

    plan_id: str = Field(description="Requests under `/plans/{planID}` are carried out in the session.")
    opened_at: datetime
    objects: int = Field(description="Number of ids that the session has created.")
    gateway_id: str = Field(description="Identifies the gateway. It never changes.")
    may_change: bool = Field(description="Whether the key would also be allowed to change the host.")
    typical: CaptureCostsShape | None = Field(description="Costs of recent captures; null: there are none.")


class AppliedRunShape(Shape):
    """A run that applies a plan."""

    run_id: str = Field(
        description="In responses to requests under `/applied-runs/{runID}`, `generation` excludes the run's changes."
    )
    opened_at: datetime
    objects: int = Field(description="Number of objects that the run has changed.")
    gateway_id: str = Field(description="Identifies the gateway. It never changes.")


class VolumeUserShape(Shape):
    """A sandbox that mounts a volume."""

    sandbox_id: str
    sandbox_name: str
    path: str
    readonly: bool
    state: Literal["running", "paused"]


class VolumeShape(Shape):
    volume_id: str = Field(description="Its name.")
    name: str
    token: str | None = Field(None, description="The volume's secret; only in responses about a single volume.")
    size_mb: int
    used_mb: int | None = Field(description="Used space, rounded up; null if the host cannot determine it.")
    dataset: str | None = Field(None, description="The volume's name in ZFS, on hosts with ZFS.")
    created_at: datetime
    mounts: list[VolumeUserShape]
    from_snapshot: str = Field(description="The volume snapshot that this volume was made from.")
    imported: ImportedShape | None = Field(None, description="Only for a volume that was imported from a file.")
    owner_sandbox_id: str = Field(
        description="The sandbox that this clone was created for. The clone is removed when no sandbox mounts it any "
        "longer. Empty: the volume is kept until it is deleted."
    )
    generation: int = Field(description=_GENERATION)
    own_changes: int = Field(
        description="Number of changes (growth, rollback) by the plan session or the applied run itself; otherwise 0."
    )
    stuck: list[str] = Field(
        description="A sentence for each unmount that fails; the gateway retries it in the background."
    )
    sandbox_host: str | None = Field(None, description="Its host, in a fleet.")


class VolumeSnapshotShape(Shape):
    snapshot_id: str
    name: str
    volume_id: str
    size_mb: int
    sandbox_snapshot_id: str = Field(
        description="The sandbox snapshot that this snapshot is part of; both are removed together."
    )
    clones: list[str] = Field(description="Names of the volumes that were created from this snapshot.")
    created_at: datetime


class ExecShape(Shape):
    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool


class UsageShape(Shape):
    disk_bytes: int = Field(description="Bytes on the disk that are not shared with anything else.")
    memory_bytes: int = Field(description="Bytes in memory; shared memory counts proportionally.")


class MetricShape(Shape):
    """A sample of the resources that a sandbox uses. A value is null if the host cannot measure it."""

    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float | None = Field(description="As a percentage of all CPUs, averaged since the previous sample.")
    mem_used: int | None = Field(description="Bytes in memory, including shared ones.")
    mem_total: int
    mem_cache: None = Field(None, description="Always null: the host cannot measure the page cache of a guest.")
    disk_used: int | None = Field(description="Bytes on the disk, including shared ones.")
    disk_total: int
    received_bytes_per_second: float | None = Field(
        description="Over the network, averaged since the previous sample; null in the first one of a machine."
    )
    sent_bytes_per_second: float | None


class ForkErrorShape(Shape):
    name: str
    code: int
    kind: str
    message: str


class ForksShape(Shape):
    sandboxes: list[SandboxShape]
    errors: list[ForkErrorShape]


class ForkResultShape(Shape):
    sandbox: SandboxShape | None = None
    error: ForkErrorShape | None = None


class RollbackShape(Shape):
    sandbox_id: str
    snapshot_id: str
    operation_id: str
    status: Literal["READY"]


class MemoryRootShape(Shape):
    """The file system that stores the memory of new snapshots."""

    path: str
    free_bytes: int
    total_bytes: int
    problem: str
    """Why the file system is not available; empty if it is available."""


class RoomShape(Shape):
    """The disk space and memory of the host, and how much of them sandboxes and volumes may use, in bytes."""

    disk_free_bytes: int
    disk_total_bytes: int
    disk_promised_bytes: int
    memory_free_bytes: int
    memory_total_bytes: int
    memory_promised_bytes: int
    stalled: list[str]
    """Ids of the sandboxes that are stopped because the disk has no space left."""
    memory_root: MemoryRootShape | None = None
    """Only if memory images are stored on a different file system."""


class SlowCommandShape(Shape):
    """A command of the host's storage that is hung, or has been running for an unusually long time."""

    command: str
    dataset: str
    since: datetime
    was_killed: bool
    """Whether the gateway has killed the command and given up on it, because it is stuck in the kernel."""


class HealthShape(Shape):
    status: Literal["ok", "degraded"]
    """`degraded`: a command of the host's storage is hung."""
    sandboxes: int
    version: str
    backend: str
    gateway_id: str | None = None
    """Identifies the gateway. It never changes. This field and the following: only for callers with a key."""
    room: RoomShape | None = None
    slow_commands: list[SlowCommandShape] | None = None


class HiddenShape(Shape):
    """A hidden snapshot. It is removed when its last user is removed."""

    snapshot_id: str
    status: Literal["hidden"]
    blockers: list[str]


def describe_slow_command(command: SlowCommand) -> SlowCommandShape:
    return SlowCommandShape(
        command=command.command,
        dataset=command.dataset,
        since=datetime.fromtimestamp(command.since, UTC),
        was_killed=command.was_killed,
    )


def describe_network(policy: NetworkPolicy) -> NetworkShape:
    mask_fields = {"mask_request_host": policy.mask_request_host} if policy.mask_request_host else {}
    return NetworkShape(
        allow_internet_access=policy.allow_internet,
        allow_out=policy.allow_out,
        deny_out=policy.deny_out,
        allow_public_traffic=policy.allow_public_traffic,
        **mask_fields,
    )


def describe_room(report: RoomReport) -> RoomShape:
    return RoomShape(
        disk_free_bytes=report.room.disk_free,
        disk_total_bytes=report.room.disk_total,
        disk_promised_bytes=report.disk_promised,
        memory_free_bytes=report.room.memory_free,
        memory_total_bytes=report.room.memory_total,
        memory_promised_bytes=report.memory_promised,
        stalled=report.stalled_ids,
        memory_root=_describe_memory_root(report.room.memory_disk),
    )


def _describe_memory_root(disk: MemoryDisk | None) -> MemoryRootShape | None:
    if disk is None:
        return None
    return MemoryRootShape(path=disk.path, free_bytes=disk.free, total_bytes=disk.total, problem=disk.problem)


def describe_sandbox(
    sandbox: Sandbox, *, state_reason: str, backend: str, domain: str, mounts: list[VolumeMountShape], **extra: Any
) -> SandboxShape:
    """Describe a sandbox.

    ``extra`` may contain alias, address, envd_access_token, traffic_access_token, diverged and sandbox_host.
    """
    sizes = sandbox.resources
    return SandboxShape(
        sandbox_id=sandbox.id,
        name=sandbox.name,
        template_id=sandbox.template_id,
        client_id=CLIENT_ID,
        envd_version=ENVD_VERSION,
        domain=domain,
        state=sandbox.state.value,
        state_reason=state_reason,
        created_at=sandbox.created_at,
        started_at=sandbox.started_at,
        end_at=sandbox.end_at or FAR_FUTURE,
        on_timeout=sandbox.on_timeout.value,
        lifecycle=LifecycleShape(on_timeout=sandbox.on_timeout.value, auto_resume=sandbox.auto_resume),
        cpu_count=sizes.cpus,
        memory_mb=sizes.memory_mb,
        disk_size_mb=sizes.disk_mb,
        metadata=sandbox.metadata,
        snapshot_id=sandbox.head,
        forked_from=sandbox.forked_from,
        parent_sandbox_id=sandbox.parent_sandbox,
        network=describe_network(sandbox.network),
        allow_internet_access=sandbox.network.allow_internet,
        volume_mounts=mounts,
        backend=backend,
        generation=get_generation_without_own_changes(sandbox),
        **extra,
    )


def describe_import(imported: ImportOrigin) -> ImportedShape:
    return ImportedShape(snapshot_id=imported.snapshot, signer=imported.signer, omitted_memory=imported.omitted_memory)


def describe_interrupted_import(interrupted_import: InterruptedImport) -> InterruptedImportShape:
    return InterruptedImportShape(
        id=interrupted_import.id,
        snapshot_id=interrupted_import.snapshot,
        signer=interrupted_import.signer,
        resume_token=interrupted_import.resume_token,
        received_bytes=interrupted_import.file.size if interrupted_import.file else 0,
        received_digest=interrupted_import.file.digest if interrupted_import.file else "",
        expires_at=interrupted_import.expires_at,
    )


def describe_artifact(artifact: Artifact, *, trusted: bool) -> ArtifactShape:
    """Return the shape of an artifact. ``trusted``: whether this gateway can pull it without a fingerprint."""
    manifest = artifact.contents.manifest
    return ArtifactShape(
        reference=str(artifact.reference),
        digest=artifact.digest,
        snapshot_id=manifest.snapshot_id,
        kind=manifest.kind,
        names=manifest.names,
        description=manifest.description,
        memory=manifest.has_memory,
        signer=artifact.signer,
        trusted=trusted,
        release=manifest.release,
        backend=manifest.host_kind,
        size_bytes=artifact.size,
        data_bytes=manifest.sum_data_bytes(memory=True),
        chunks=sum(len(each.chunks) for each in artifact.contents.parts),
        cpu_count=manifest.sizes.cpus,
        memory_mb=manifest.sizes.memory_mb,
        disk_size_mb=manifest.sizes.disk_mb,
    )


def _describe_transfer_error(error: GatewayError) -> TransferErrorShape:
    return TransferErrorShape(kind=error.kind, status=error.status, message=error.message, blockers=error.blockers)


def describe_transfer(transfer: ArtifactTransfer) -> TransferShape:
    return TransferShape(
        transfer_id=transfer.id,
        action=transfer.action,
        reference=transfer.reference,
        status=transfer.status,
        snapshot_id=transfer.snapshot_id,
        digest=transfer.digest,
        chunks=transfer.chunks,
        chunks_done=transfer.chunks_done,
        chunks_reused=transfer.chunks_reused,
        transferred_bytes=transfer.transferred_bytes,
        started_at=transfer.started_at,
        error=_describe_transfer_error(transfer.error) if transfer.error else None,
    )


def describe_snapshot(
    snapshot: Snapshot,
    *,
    backend: str,
    forks: int,
    prewarm: Level,
    memory_problem: str,
    mounts: list[VolumeMountShape],
    volumes: list[VolumeCaptureShape],
    **extra: Any,
) -> SnapshotShape:
    """Describe a snapshot. ``extra``: users, imported, sandbox_host and, on hosts with ZFS, zfs_snapshot."""
    sizes = snapshot.resources
    return SnapshotShape(
        snapshot_id=snapshot.id,
        kind="template" if snapshot.kind is SnapshotKind.TEMPLATE else "snapshot",
        names=snapshot.all_names,
        description=snapshot.description,
        status=snapshot.status.value,
        source_sandbox_id=snapshot.source_sandbox,
        origin_sandbox_id=snapshot.origin_sandbox,
        template_id=snapshot.template_id,
        parent_snapshot_id=snapshot.parent,
        origin_id=snapshot.origin,
        created_at=snapshot.created_at,
        updated_at=snapshot.updated_at,
        expires_at=snapshot.expires_at,
        retention=_describe_retention(snapshot.retention),
        memory=snapshot.memory.value,
        memory_problem=memory_problem,
        cold_startable=True,
        memory_bytes_written=snapshot.memory_bytes_written,
        disk_bytes_unique=snapshot.disk_bytes_unique,
        pause_ms=round(snapshot.pause_ms, 3),
        cpu_count=sizes.cpus,
        memory_mb=sizes.memory_mb,
        disk_size_mb=sizes.disk_mb,
        forks=forks,
        prewarm=describe_prewarm(prewarm),
        volume_mounts=mounts,
        volumes=volumes,
        backend=backend,
        generation=get_generation_without_own_changes(snapshot),
        **extra,
    )


def describe_volume(
    volume: Volume, state: VolumeState | None, mounts: list[VolumeUserShape], **extra: Any
) -> VolumeShape:
    """Describe a volume. ``state`` is None if the host cannot determine it. ``extra``: token, dataset, imported,
    sandbox_host.
    """
    return VolumeShape(
        volume_id=volume.name,
        name=volume.name,
        size_mb=volume.size_mb,
        used_mb=-(-state.used_bytes // _MIB) if state else None,
        created_at=volume.created_at,
        mounts=mounts,
        from_snapshot=volume.from_snapshot,
        owner_sandbox_id=volume.owner,
        generation=get_generation_without_own_changes(volume),
        own_changes=count_own_changes(volume),
        stuck=state.stuck if state else [],
        **extra,
    )


def describe_volume_snapshot(snapshot: VolumeSnapshot, volume: str, clones: list[str]) -> VolumeSnapshotShape:
    """Describe a snapshot of a volume. ``volume`` is the volume's name; ``clones`` are the names of its clones."""
    return VolumeSnapshotShape(
        snapshot_id=snapshot.id,
        name=snapshot.name,
        volume_id=volume,
        size_mb=snapshot.size_mb,
        sandbox_snapshot_id=snapshot.sandbox_snapshot,
        clones=clones,
        created_at=snapshot.created_at,
    )


def describe_prewarm(level: Level) -> PrewarmShape:
    return PrewarmShape(target=level.target, ready=level.ready)


_E2B_FIELDS: dict[str, Any] = {
    "public": False,
    "created_by": None,
    "last_spawned_at": None,
    "spawn_count": None,
    "build_count": 1,
    "envd_version": ENVD_VERSION,
}
"""Fields of every template, without which E2B's generated client fails."""


def add_build(template: TemplateShape) -> TemplateShape:
    """Return ``template`` with a description of its build."""
    build = TemplateBuildShape(
        build_id=template.build_id,
        status=template.build_status,
        created_at=template.created_at,
        updated_at=template.updated_at,
        cpu_count=template.cpu_count,
        memory_mb=template.memory_mb,
        disk_size_mb=template.disk_size_mb,
        envd_version=ENVD_VERSION,
    )
    return template.model_copy(update={"builds": [build]})


def describe_template(
    template: Snapshot,
    *,
    build_id: str,
    is_outdated: bool | None,
    forks: int,
    prewarm: Level,
    memory_problem: str,
    **extra: Any,
) -> TemplateShape:
    """Describe a template that is ready. ``extra`` may contain sandbox_host."""
    sizes = template.resources
    return TemplateShape(
        template_id=template.id,
        names=template.all_names,
        aliases=template.all_names,
        build_id=build_id,
        build_status="ready",
        status="READY",
        digest=template.recipe_digest,
        outdated=is_outdated,
        recipe=build_recipe_fields(template.recipe),
        description=template.description,
        created_at=template.created_at,
        updated_at=template.updated_at,
        generation=get_generation_without_own_changes(template),
        cpu_count=sizes.cpus,
        memory_mb=sizes.memory_mb,
        disk_size_mb=sizes.disk_mb,
        memory=template.memory.value,
        memory_problem=memory_problem,
        forks=forks,
        prewarm=describe_prewarm(prewarm),
        **_E2B_FIELDS,
        **extra,
    )


def describe_unready_template(build: Build) -> TemplateShape:
    """Describe a template that is being built or whose build has failed."""
    sizes = Recipe.model_validate(build.recipe).resources if build.recipe else None
    shape = TemplateShape(
        template_id=build.template_id,
        names=build.names,
        aliases=build.names,
        build_id=build.build_id,
        build_status=build.status,
        status="FAILED" if build.status == "error" else "BUILDING",
        digest=build.digest,
        outdated=False,
        recipe=build_recipe_fields(build.recipe),
        created_at=build.started_at,
        updated_at=build.started_at,
        generation=0,
        forks=0,
        cpu_count=sizes and sizes.cpus,
        memory_mb=sizes and sizes.memory_mb,
        disk_size_mb=sizes and sizes.disk_mb,
        **_E2B_FIELDS,
    )
    return shape.model_copy(update={"reason": build.reason, "last_error": build.reason}) if build.reason else shape


def build_recipe_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with the field names of requests, and with sorted and unique ``packages``."""
    if not recipe:
        return {}
    parsed_recipe = Recipe.model_validate(recipe)
    sizes = parsed_recipe.resources
    return {
        "from": parsed_recipe.source.value,
        "suite": parsed_recipe.suite,
        "mirror": parsed_recipe.mirror,
        "packages": sorted(set(parsed_recipe.packages)),
        "path": parsed_recipe.path,
        "image": parsed_recipe.image,
        **({"template": parsed_recipe.template} if parsed_recipe.template else {}),
        "setup": parsed_recipe.setup,
        "startCommand": parsed_recipe.start_command,
        "readyProbe": parsed_recipe.ready_probe,
        "readyTimeout": parsed_recipe.ready_timeout,
        "setupTimeout": parsed_recipe.setup_timeout,
        "setupNetwork": parsed_recipe.setup_network,
        "cpuCount": sizes.cpus,
        "memoryMB": sizes.memory_mb,
        "diskSizeMB": sizes.disk_mb,
    }


def describe_dockerfile(
    dockerfile: Dockerfile,
    ignore_patterns: Iterable[IgnorePattern],
    commands: tuple[list[str], str] | None,
    missing_digests: list[str],
    max_archive_bytes: int,
) -> DockerfileShape:
    setup, start_command = commands or (None, None)
    return DockerfileShape(
        image=dockerfile.image,
        sources=[
            SourceShape(source=source, line=line, components=translate_source(source))
            for source, line in dockerfile.sources.items()
        ],
        ignore_patterns=[
            IgnorePatternShape(regex=pattern.regex, is_exception=pattern.is_exception) for pattern in ignore_patterns
        ],
        max_archive_bytes=max_archive_bytes,
        missing_digests=missing_digests,
        setup=setup,
        start_command=start_command,
    )


def describe_build(build: Build, level: str = "debug", offset: int = 0, limit: int | None = None) -> BuildShape:
    lines = _select_lines(build, level)[offset : None if limit is None else offset + limit]
    shape = BuildShape(
        build_id=build.build_id,
        template_id=build.template_id,
        status=build.status,
        logs=[line.text for line in lines],
        log_entries=[_describe_line(line) for line in lines],
        error_message=build.reason,
    )
    # E2B's client fails if the reason is null.
    return shape.model_copy(update={"reason": BuildReasonShape(message=build.reason)}) if build.reason else shape


def describe_log(build: Build, level: str, cursor: int | None, limit: int | None, *, is_backward: bool) -> LogShape:
    """Describe the lines from the time ``cursor`` on, or, if ``is_backward``, up to it with the newest line first.

    ``cursor`` is in milliseconds since 1970 (UTC).
    """
    lines = _select_lines(build, level)
    if cursor is not None:
        lines = [
            line for line in lines if (line.milliseconds <= cursor if is_backward else line.milliseconds >= cursor)
        ]
    if is_backward:
        lines.reverse()
    return LogShape(logs=[_describe_line(line) for line in lines[:limit]])


def _select_lines(build: Build, level: str) -> list[LogLine]:
    """Return the lines with at least this level. All lines have the level info."""
    return list(build.log_lines) if level in ("debug", "info") else []


def _describe_line(line: LogLine) -> LogEntryShape:
    return LogEntryShape(timestamp=line.time, message=line.text, level="info")


def describe_tag(name: str, template: Snapshot) -> TagShape:
    """Describe the tag in ``name``, which is NAME or NAME:TAG."""
    return TagShape(
        tag=split_tag(name)[1],
        build_id=create_build_id(template.id),
        template_id=template.id,
        created_at=template.named_at.get(name, template.created_at),
    )


def describe_announced_build(build: Build) -> BuildAnnounced:
    return BuildAnnounced(
        template_id=build.template_id,
        build_id=build.build_id,
        names=build.names,
        aliases=build.names,
        tags=[split_tag(name)[1] for name in build.names],
    )


def describe_started_build(build: Build) -> BuildStarted:
    return BuildStarted(
        template_id=build.template_id,
        build_id=build.build_id,
        names=build.names,
        aliases=build.names,
        build_status=build.status,
        status=build.status,
        digest=build.digest,
    )


def build_exec_fields(result: ExecResult) -> dict[str, bytes | int]:
    """Return the fields of ``ExecShape`` for a result."""
    return {
        "exitCode": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timedOut": result.timed_out,
    }


def describe_usage(usage: Usage) -> UsageShape:
    return UsageShape(disk_bytes=usage.disk_bytes, memory_bytes=usage.memory_bytes)


def describe_sample(sandbox: Sandbox, sample: Sample) -> MetricShape:
    sizes = sandbox.resources
    return MetricShape(
        timestamp=datetime.fromtimestamp(sample.time, UTC),
        timestamp_unix=int(sample.time),
        cpu_count=sizes.cpus,
        cpu_used_pct=None if sample.cpu_percent is None else round(sample.cpu_percent, 2),
        mem_used=sample.memory_bytes,
        mem_total=sizes.memory_mb * _MIB,
        disk_used=sample.disk_bytes,
        disk_total=sizes.disk_mb * _MIB,
        received_bytes_per_second=None if sample.received_rate is None else round(sample.received_rate, 1),
        sent_bytes_per_second=None if sample.sent_rate is None else round(sample.sent_rate, 1),
    )


def describe_fork_error(error: GatewayError, name: str) -> ForkErrorShape:
    return ForkErrorShape(name=name, code=error.status, kind=error.kind, message=error.message)


def assign_names(results: Sequence[object], names: Sequence[str] | None) -> list[str]:
    """Return the requested name of each result, or "" for all if the names cannot be assigned to the results.

    A repeated request may have fewer results than names, because only sandboxes that still exist are returned.
    """
    return list(names) if names and len(names) == len(results) else [""] * len(results)


def _describe_retention(rule: Retention | None) -> RetentionShape | None:
    if rule is None:
        return None
    return RetentionShape(keep_last=rule.keep_last, keep_daily=rule.keep_daily, max_age=rule.max_age)
