"""Records: the metadata of objects, stored with the objects.

A record contains all metadata of an object: a host stores it with the object (a manifest beside the images, user
properties on a dataset) and returns it from a scan. There is no other database.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME = re.compile(NAME_PATTERN)


def new_id() -> str:
    """Create a random id of 12 hexadecimal digits (48 bits)."""
    return secrets.token_hex(6)


def now() -> datetime:
    return datetime.now(UTC)


def check_name(name: str) -> str:
    """Return ``name``. Raises ValueError with the rule if it is not allowed."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise ValueError(
            f"the name {shown!r} is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
            "starting with a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Resources(_Record):
    """The resources of a sandbox. Units: whole virtual CPUs, MiB of memory, MiB of disk."""

    cpus: int = Field(default=1, ge=1, le=256)
    memory_mb: int = Field(default=256, ge=64, le=1 << 20)
    disk_mb: int = Field(default=2048, ge=64, le=1 << 26)


class NetworkPolicy(_Record):
    """Network access of a sandbox. A sandbox can never reach the host's own services or other sandboxes."""

    allow_internet: bool = True
    allow_out: list[str] = Field(default_factory=list)
    """CIDRs or addresses that are reachable even if ``allow_internet`` or ``deny_out`` would block them."""
    deny_out: list[str] = Field(default_factory=list)
    allow_public_traffic: bool = False
    """Inbound: whether every client of the gateway can reach the sandbox's ports, except the agent's."""


class Mount(_Record):
    """The mount of a volume in one sandbox."""

    volume: Id
    path: str
    """The mount point in the sandbox: absolute and normalised."""
    read_only: bool = False


class VolumeCapture(_Record):
    """The snapshot of a volume that is part of a sandbox's snapshot, taken in the same pause."""

    volume: Id
    snapshot: Id
    """Id of the VolumeSnapshot."""


class Volume(_Record):
    """Storage that outlives sandboxes. Any number of sandboxes can mount it at once."""

    id: Id = Field(default_factory=new_id)
    name: Name
    size_mb: int = Field(default=1024, ge=64, le=1 << 26)
    """Capacity in MiB."""
    from_snapshot: str = ""
    """Id of the volume snapshot it was made from."""
    owner: str = ""
    """The sandbox that this clone was made for.

    The clone is removed with the last sandbox that mounts it. Empty: it is kept.
    """
    created_at: datetime = Field(default_factory=now)
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to serve the volume again (a port, …)."""


class VolumeSnapshot(_Record):
    """The state of a volume at one instant."""

    id: Id = Field(default_factory=new_id)
    name: Name
    """Unique among the snapshots of its volume."""
    volume: Id
    size_mb: int
    sandbox_snapshot: str = ""
    """The sandbox snapshot that includes this snapshot; both are removed together. Empty: independent."""
    created_at: datetime = Field(default_factory=now)


class SandboxState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"


class OnTimeout(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


class Sandbox(_Record):
    """A sandbox: an identity (id, name, metadata) and the machine that currently runs it (``instance``).

    A rollback changes ``instance`` and nothing else of the identity.
    """

    id: Id = Field(default_factory=new_id)
    name: Name
    instance: Id = Field(default_factory=new_id)
    """The current machine: the host names its directory, process and network after it."""
    state: SandboxState = SandboxState.RUNNING
    state_reason: str = ""
    """Why the sandbox was paused without a request (the machine ended, the host rebooted)."""
    template_id: str = ""
    forked_from: str = ""
    """The snapshot or template that the sandbox was made from; never changes."""
    head: str = ""
    """The snapshot that the sandbox now descends from; changes with each capture and rollback."""
    base: str = ""
    """The snapshot that the current machine was started from."""
    parent_sandbox: str = ""
    pause_snapshot: str = ""
    """While paused: the snapshot to resume from. Empty: resume from the sandbox's own disk."""
    cold_start: bool = False
    """While paused: whether to boot from that snapshot's disk, even if the snapshot includes memory."""
    resources: Resources = Field(default_factory=Resources)
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    metadata: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    created_at: datetime = Field(default_factory=now)
    started_at: datetime = Field(default_factory=now)
    end_at: datetime | None = None
    """When the timeout ends; None: never."""
    timeout: float | None = None
    """The last requested timeout in seconds; None: the host's default.

    The timeout starts again if the sandbox is resumed after ``end_at``.
    """
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    idempotency_key: str = ""
    branches: int = Field(default=0, ge=0)
    """The last number used in the name of a branch. Numbers are not reused."""
    mounts: list[Mount] = Field(default_factory=list)
    """The mounts of volumes, in the order of mounting."""
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to find the machine again (network slot, pid and its start time, …)."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, record: Any) -> Any:
        """Rename the field ``life``, which is the timeout in records of older releases."""
        if isinstance(record, dict) and "life" in record:
            record = {"timeout": record["life"], **record}
        return record

    @property
    def hostname(self) -> str:
        """Return a host name of at most 63 letters, digits and hyphens, derived from the name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name).strip("-").lower()[:63] or "sandbox"


class SnapshotKind(StrEnum):
    BASE = "base"
    """A newly built file system that was never booted; hidden."""
    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    """The snapshot from which a paused sandbox resumes; hidden, owned by that sandbox."""
    TRANSIENT = "transient"
    """The source of clones; hidden, removed with its last fork."""


class Memory(StrEnum):
    """How a snapshot's memory was captured: which pages were copied to a clone of which image. Images are complete.

    Only pages that differ from that image are written.
    """

    NONE = "none"
    FULL = "full"
    """All pages."""
    INCREMENTAL = "incremental"
    """Pages written since the machine's start, over the image that it was started from."""
    COMPARE = "compare"
    """The same pages, over the image of the machine's latest capture."""
    SOFT_DIRTY = "soft_dirty"
    """Pages written since that capture, which the kernel marked as soft-dirty."""
    WRITTEN = "written"
    """Pages written since that capture, which asynchronous write protection found."""
    LIVE = "live"
    """As one of the last two, mostly copied while the machine ran."""

    @classmethod
    def _missing_(cls, value: object) -> Memory:
        """Read a mode of a newer release: its image is complete, too."""
        return cls.FULL


class SnapshotStatus(StrEnum):
    READY = "ready"


class Retention(_Record):
    """The rule for which snapshots of a sandbox are kept.

    A snapshot is kept if one of the first two fields keeps it and it is not too old. Without these fields, only the age
    counts. The newest snapshot is always kept.
    """

    keep_last: int | None = Field(default=None, ge=1, le=100_000)
    keep_daily: int | None = Field(default=None, ge=1, le=100_000)
    """Number of days (UTC, only days with snapshots) of which the newest snapshot is kept."""
    max_age: float | None = Field(default=None, gt=0, le=100 * 366 * 86400)
    """In seconds."""


class Snapshot(_Record):
    """A snapshot or template, from which sandboxes can be forked."""

    id: Id = Field(default_factory=new_id)
    kind: SnapshotKind = SnapshotKind.SNAPSHOT
    names: list[Name] = Field(default_factory=list)
    description: str = ""
    source_sandbox: str = ""
    origin_sandbox: str = ""
    """The first sandbox in the chain of sources."""
    template_id: str = ""
    parent: str = ""
    """The source's head at the time of the capture."""
    origin: str = ""
    """The first ancestor (a template's id)."""
    status: SnapshotStatus = SnapshotStatus.READY
    created_at: datetime = Field(default_factory=now)
    updated_at: datetime = Field(default_factory=now)
    expires_at: datetime | None = None
    retention: Retention | None = None
    """The rule under which the snapshot was taken. None: it is kept until it is deleted."""
    prewarm: int = Field(default=0, ge=0)
    """The number of forks to keep started in advance."""
    doomed: bool = False
    """Whether it was deleted with ``when=unused``: it is hidden, and removed with its last user."""
    memory: Memory = Memory.NONE
    memory_bytes_written: int = 0
    disk_bytes_unique: int = 0
    pause_ms: float = 0.0
    resources: Resources = Field(default_factory=Resources)
    mounts: list[Mount] = Field(default_factory=list)
    """The mounts of its source. Forks get the same mounts unless others are requested."""
    volumes: list[VolumeCapture] = Field(default_factory=list)
    """The volumes that were captured in the same pause."""
    recipe_digest: str = ""
    """The digest of `recipe`, of the guest it was built with, and of `source_digest`."""
    source_digest: str = ""
    """The digest of the files at the recipe's path; empty if it has no path, or if an older gateway built the
    template.
    """
    recipe: dict[str, Any] = Field(default_factory=dict)
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to start a machine from the snapshot (accelerator, CPU model, machine type, versions).
    """

    @property
    def is_hidden(self) -> bool:
        return self.doomed or self.kind not in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE)


Record = Sandbox | Snapshot | Volume | VolumeSnapshot
