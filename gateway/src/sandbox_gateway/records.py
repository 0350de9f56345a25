"""What the gateway knows of a thing, as it is written beside that thing.

A record is the whole of a thing's metadata: a host stores it with what it describes (a manifest beside the
images, user properties on a dataset) and hands it back from a scan. Nothing else remembers anything.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME = re.compile(NAME_PATTERN)


def new_id() -> str:
    """A fresh 12-digit hexadecimal id; unique for all practical purposes (48 random bits)."""
    return secrets.token_hex(6)


def now() -> datetime:
    return datetime.now(UTC)


def check_name(name: str) -> str:
    """Return ``name`` if it may be one; raises ValueError with the rule otherwise."""
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
    """What a sandbox may use. Units: whole virtual CPUs, MiB of memory, MiB of disk."""

    cpus: int = Field(default=1, ge=1, le=256)
    memory_mb: int = Field(default=256, ge=64, le=1 << 20)
    disk_mb: int = Field(default=2048, ge=64, le=1 << 26)


class NetworkPolicy(_Record):
    """What a sandbox may reach outside itself. The host's own services and other sandboxes: never."""

    allow_internet: bool = True
    allow_out: list[str] = Field(default_factory=list)
    """CIDRs or addresses reachable even where ``allow_internet`` or ``deny_out`` would forbid it."""
    deny_out: list[str] = Field(default_factory=list)
    allow_public_traffic: bool = False
    """The other way: may whoever reaches the gateway reach its ports, but for the agent's?"""


class Mount(_Record):
    """A volume as one sandbox sees it."""

    volume: Id
    path: str
    """Where, inside: absolute and normal."""
    read_only: bool = False


class VolumeCapture(_Record):
    """What a snapshot of a sandbox holds of a volume, taken in the same pause."""

    volume: Id
    snapshot: Id
    """Of the volume: a VolumeSnapshot."""


class Volume(_Record):
    """Storage that outlives sandboxes; any number of them mount it at once."""

    id: Id = Field(default_factory=new_id)
    name: Name
    size_mb: int = Field(default=1024, ge=64, le=1 << 26)
    """What fits in, in MiB."""
    from_snapshot: str = ""
    """Id of the volume snapshot it was made from."""
    owner: str = ""
    """The sandbox whose own clone it is: it goes with the last sandbox that mounts it. Empty: it stays."""
    created_at: datetime = Field(default_factory=now)
    host: dict[str, Any] = Field(default_factory=dict)
    """What the host needs to serve it again (a port, …)."""


class VolumeSnapshot(_Record):
    """A volume as it was at one instant."""

    id: Id = Field(default_factory=new_id)
    name: Name
    """Unique among the snapshots of its volume."""
    volume: Id
    size_mb: int
    sandbox_snapshot: str = ""
    """The sandbox's snapshot that it is part of, and goes with. Empty: it stands alone."""
    created_at: datetime = Field(default_factory=now)


class SandboxState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"


class OnTimeout(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


class Sandbox(_Record):
    """A sandbox: an identity (id, name, metadata) over the machine that embodies it just now (``instance``).

    A rollback changes ``instance`` and nothing else of the identity.
    """

    id: Id = Field(default_factory=new_id)
    name: Name
    instance: Id = Field(default_factory=new_id)
    """The machine below: the host names its directory, process and network by it."""
    state: SandboxState = SandboxState.RUNNING
    state_reason: str = ""
    """Why it is paused, where nobody asked for it (the machine ended, the host rebooted)."""
    template_id: str = ""
    forked_from: str = ""
    """The snapshot or template it was made from; it never changes."""
    head: str = ""
    """The snapshot it descends from now: moves with every capture of it and rollback of it."""
    base: str = ""
    """The snapshot its present machine was made from."""
    parent_sandbox: str = ""
    pause_snapshot: str = ""
    """While paused: the snapshot it resumes from. Empty: it is resumed from its own disk."""
    cold_start: bool = False
    """While paused: it shall boot from that snapshot's disk, though the snapshot holds memory."""
    resources: Resources = Field(default_factory=Resources)
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    metadata: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    created_at: datetime = Field(default_factory=now)
    started_at: datetime = Field(default_factory=now)
    end_at: datetime | None = None
    """When its time is up; None: never."""
    life: float | None = None
    """Seconds it was given last; when its time is up and it is resumed, it has them again. None: the host's default."""
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    idempotency_key: str = ""
    branches: int = Field(default=0, ge=0)
    """The last number that a branch of it was called by; none is given twice."""
    mounts: list[Mount] = Field(default_factory=list)
    """Its volumes, in the order in which they are mounted."""
    host: dict[str, Any] = Field(default_factory=dict)
    """What the host needs to find the machine again (network slot, pid and its start time, …)."""

    @property
    def hostname(self) -> str:
        """A host name made of the name: letters, digits and hyphens, at most 63."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name).strip("-").lower()[:63] or "sandbox"


class SnapshotKind(StrEnum):
    BASE = "base"
    """A file system as it was built, never booted; hidden."""
    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    """What a paused sandbox resumes from; hidden, owned by that sandbox."""
    TRANSIENT = "transient"
    """What a clone was made of; hidden, removed with its last fork."""


class Memory(StrEnum):
    """How a snapshot's memory was captured."""

    NONE = "none"
    FULL = "full"
    INCREMENTAL = "incremental"


class SnapshotStatus(StrEnum):
    READY = "ready"
    WRITING = "writing"
    FAILED = "failed"


class Retention(_Record):
    """Which of a sandbox's snapshots are kept. A snapshot stays if one of the first two rules wants it and it is not
    too old; without either of them, if it is not too old. The newest stays in every case."""

    keep_last: int | None = Field(default=None, ge=1, le=100_000)
    keep_daily: int | None = Field(default=None, ge=1, le=100_000)
    """The newest of each of so many days (UTC) that have one."""
    max_age: float | None = Field(default=None, gt=0, le=100 * 366 * 86400)
    """In seconds."""


class Snapshot(_Record):
    """A fork point."""

    id: Id = Field(default_factory=new_id)
    kind: SnapshotKind = SnapshotKind.SNAPSHOT
    names: list[Name] = Field(default_factory=list)
    description: str = ""
    source_sandbox: str = ""
    origin_sandbox: str = ""
    """The sandbox at the far end of the chain of sources."""
    template_id: str = ""
    parent: str = ""
    """The source's head when this was captured."""
    origin: str = ""
    """The ultimate ancestor (a template's id)."""
    status: SnapshotStatus = SnapshotStatus.READY
    created_at: datetime = Field(default_factory=now)
    updated_at: datetime = Field(default_factory=now)
    expires_at: datetime | None = None
    retention: Retention | None = None
    """It was taken under this rule, and may be removed by a newer one's. None: it stays until it is removed."""
    doomed: bool = False
    """Deleted with ``when=unused``: hidden, removed with its last user."""
    memory: Memory = Memory.NONE
    memory_bytes_written: int = 0
    disk_bytes_unique: int = 0
    pause_ms: float = 0.0
    resources: Resources = Field(default_factory=Resources)
    mounts: list[Mount] = Field(default_factory=list)
    """What its source had mounted; a fork has the same unless it is told otherwise."""
    volumes: list[VolumeCapture] = Field(default_factory=list)
    """What was captured of volumes in the same pause: all that were asked for."""
    recipe_digest: str = ""
    recipe: dict[str, Any] = Field(default_factory=dict)
    host: dict[str, Any] = Field(default_factory=dict)
    """What the host needs to make a machine of it again (accelerator, CPU model, machine type, versions)."""

    @property
    def hidden(self) -> bool:
        return self.doomed or self.kind not in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE)
