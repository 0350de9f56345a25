"""Define records, which contain the metadata of objects and are stored with the objects.

A record contains all metadata of an object. A host stores it with the object, in a manifest beside the images or in
user properties of a dataset, and reads it back in a scan. There is no other database.

A record contains its ``format``. Every release reads the records of the previous release, and writes them in its own
format. A release that only adds fields or values does not change the format: when an older release saves a record, it
keeps fields that it does not know, and it does not start if it finds a value that it does not know.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from sandbox_gateway.errors import BackendFailed

FORMAT = 1
"""The format of the records that this release writes. Increase it if an older release would misread a record.

Records without a format have format 1.
"""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME_REGEX = re.compile(NAME_PATTERN)
_TAG_REGEX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
TAG_SEPARATOR = ":"
DEFAULT_TAG = "default"
"""The tag that a name without a tag stands for."""


PLANNED_PREFIX = "5e5510ff"
"""The beginning of the ids of objects that exist only in a plan session. No other id begins like this."""


def create_random_id() -> str:
    """Create a random id of 12 hexadecimal digits (48 bits)."""
    while (id := secrets.token_hex(6)).startswith(PLANNED_PREFIX):
        pass
    return id


id_source: ContextVar[Callable[[], str]] = ContextVar("id_source", default=create_random_id)
"""The function that creates ids in the current context. In a plan session, ids are numbered instead of random."""


def new_id() -> str:
    """Create the id of a new object: 12 hexadecimal digits."""
    return id_source.get()()


def now() -> datetime:
    return datetime.now(UTC)


def check_name(name: str) -> str:
    """Return ``name`` if it is allowed. Otherwise, raise a ValueError that states the naming rule."""
    if not _NAME_REGEX.fullmatch(name):
        short_name = name if len(name) <= 80 else name[:77] + "..."
        raise ValueError(
            f"the name {short_name!r} is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
            "starting with a letter or digit"
        )
    return name


def check_template_name(name: str) -> str:
    """Return ``name``, which is NAME or NAME:TAG, if it is allowed. Otherwise, raise a ValueError with the rule."""
    base_name, separator, tag = name.partition(TAG_SEPARATOR)
    check_name(base_name)
    if separator:
        check_tag(tag)
    return name


def check_tag(tag: str) -> str:
    """Return ``tag`` if it is allowed. Otherwise, raise a ValueError that states the rule for tags."""
    short_tag = tag if len(tag) <= 80 else tag[:77] + "..."
    if not _TAG_REGEX.fullmatch(tag):
        raise ValueError(
            f"the tag {short_tag!r} is not allowed: use 1 to 63 letters, digits, '_', '.' or '-', starting with a "
            "letter or digit"
        )
    if _is_uuid(tag):
        raise ValueError(
            f"the tag {short_tag!r} is not allowed, because build ids look like this: choose a different tag"
        )
    return tag


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


Name = Annotated[str, AfterValidator(check_name)]
Tag = Annotated[str, AfterValidator(check_tag)]
TemplateName = Annotated[str, AfterValidator(check_template_name)]
"""NAME or NAME:TAG."""
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class _Part(BaseModel):
    """A record or a part of one. Keeps fields from newer releases, so that saving a record does not lose them."""

    model_config = ConfigDict(extra="allow")


class _Record(_Part):
    format: int = FORMAT
    generation: int = Field(default=0, ge=0)
    """The number of changes since the object was created. A saved plan uses it to detect changes by other clients."""

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, record: Any) -> Any:
        """Convert a record in an older format to the current format."""
        if isinstance(record, dict) and isinstance(record.get("format", 1), int):
            record = {**record, "format": FORMAT}
        return record


class Resources(_Part):
    """The resources of a sandbox. Units: whole virtual CPUs, MiB of memory, MiB of disk.

    Instances are immutable, because records with equal resources share one instance.
    """

    model_config = ConfigDict(frozen=True)

    cpus: int = Field(default=1, ge=1, le=256)
    memory_mb: int = Field(default=256, ge=64, le=1 << 20)
    disk_mb: int = Field(default=2048, ge=64, le=1 << 26)


class NetworkPolicy(_Part):
    """The network access of a sandbox. A sandbox can never reach the host's own services or other sandboxes."""

    allow_internet: bool = True
    allow_out: list[str] = Field(default_factory=list)
    """Addresses, CIDRs or domain names that are reachable even if ``allow_internet`` or ``deny_out`` would block them.

    Domain names may begin with ``*.``, and are allowed only on some kinds of host.
    """
    deny_out: list[str] = Field(default_factory=list)
    allow_public_traffic: bool = False
    """Whether every client of the gateway can connect to the sandbox's ports, except the agent's."""
    mask_request_host: str = ""
    """The Host header of requests to the sandbox's ports, except the agent's. Empty: as the client sent it.

    ``${PORT}`` stands for the port.
    """

    @property
    def egress(self) -> tuple[bool, list[str], list[str]]:
        """The part of the policy that hosts enforce."""
        return self.allow_internet, self.allow_out, self.deny_out

    @property
    def allows_egress(self) -> bool:
        """Return whether the sandbox can reach any address. If not, it gets no name servers."""
        return self.allow_internet or bool(self.allow_out)


class Mount(_Part):
    """The mount of a volume in one sandbox."""

    volume: Id
    path: str
    """The mount point in the sandbox: absolute and normalised."""
    read_only: bool = False


class VolumeCapture(_Part):
    """The snapshot of a volume that is part of a sandbox's snapshot, taken in the same pause."""

    volume: Id
    snapshot: Id
    """Id of the VolumeSnapshot."""


class ImportOrigin(_Part):
    """Where an imported snapshot or volume came from."""

    snapshot: Id
    """The id, in the gateway that exported it, of the snapshot in the file. A copy of a copy in a fleet has that of the
    original.
    """
    signer: str
    """The fingerprint of the key that signed the file."""
    signed_id: str = ""
    """The id in the gateway of the signer, if ``snapshot`` is that of the original."""
    omitted_memory: str = ""
    """Why the memory in the file was not imported, as a clause; empty if it was, or if the file has none."""


class Volume(_Record):
    """Storage that outlives sandboxes. Any number of sandboxes can mount it at the same time."""

    id: Id = Field(default_factory=new_id)
    name: Name
    size_mb: int = Field(default=1024, ge=64, le=1 << 26)
    """Capacity in MiB."""
    from_snapshot: str = ""
    """Id of the volume snapshot that it was created from; empty if it was created empty."""
    owner: str = ""
    """The sandbox that this clone was created for. The clone is removed when no sandbox mounts it any longer.

    Empty: the volume is kept until it is deleted.
    """
    imported: ImportOrigin | None = None
    """Where it came from, if it was imported from a file."""
    created_at: datetime = Field(default_factory=now)
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to serve the volume after a restart, such as a port."""


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


_MOVING = "moving"
"""The state of a moving sandbox in its stored record. Releases that cannot move sandboxes refuse to start with it.

Such a release could otherwise resume a sandbox that has moved to another host.
"""


class OnTimeout(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


class Departure(_Part):
    """A move of a sandbox to another host of the fleet that is not complete yet. The sandbox stays paused."""

    move: str
    """The id of the move."""
    target: str
    """The name of the host that gets the sandbox."""
    snapshot: str = ""
    """The snapshot from which the sandbox continues there."""
    resumes: bool = False
    """Whether the sandbox ran before the move, and has to be resumed after it."""


class Arrival(_Part):
    """A move of a sandbox from another host of the fleet that is not complete yet. Until then, it is hidden."""

    move: str
    """The id of the move."""
    source: str
    """The name of the host that has the sandbox."""
    resumes: bool = False
    """Whether the sandbox ran before the move, and has to be resumed after it."""


class Sandbox(_Record):
    """A sandbox: an identity (id, name, metadata) and the machine that currently runs it (``instance``).

    A rollback replaces the machine and keeps the identity.
    """

    id: Id = Field(default_factory=new_id)
    name: Name
    instance: Id = Field(default_factory=new_id)
    """The current machine: the host names its directory, process and network after it."""
    state: SandboxState = SandboxState.RUNNING
    state_reason: str = ""
    """Why the sandbox is paused if no request paused it: for example, its machine stopped, or the host rebooted."""
    template_id: str = ""
    forked_from: str = ""
    """The snapshot or template that the sandbox was created from. It never changes."""
    head: str = ""
    """The snapshot that the sandbox currently descends from.

    A capture (except for a pause), a rollback, and the removal of the head change it.
    """
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
    """When the sandbox expires. None: never."""
    timeout: float | None = None
    """The last requested timeout in seconds. None: the host's default.

    If the sandbox is resumed after ``end_at``, the timeout starts again.
    """
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    idempotency_key: str = ""
    branches: int = Field(default=0, ge=0)
    """The last number used in the name of a branch. Numbers are not reused."""
    mounts: list[Mount] = Field(default_factory=list)
    """The mounted volumes, in mount order."""
    departure: Departure | None = None
    arrival: Arrival | None = None
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to find the machine after a restart, such as its network slot, pid and start time."""

    @model_validator(mode="before")
    @classmethod
    def _rename_old_fields(cls, record: Any) -> Any:
        """Rename the field ``life`` of records from older releases to ``timeout``."""
        if isinstance(record, dict) and "life" in record:
            record = {"timeout": record["life"], **record}
            del record["life"]
        return record

    @field_validator("state", mode="before")
    @classmethod
    def _read_state(cls, state: Any) -> Any:
        return SandboxState.PAUSED if state == _MOVING else state

    @field_serializer("state", when_used="json")
    def _write_state(self, state: SandboxState) -> str:
        return _MOVING if self.departure or self.arrival else state

    @property
    def hostname(self) -> str:
        """Return a host name of at most 63 letters, digits and hyphens, derived from the sandbox's name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name).strip("-").lower()[:63] or "sandbox"


class SnapshotKind(StrEnum):
    BASE = "base"
    """A newly built file system that has never been booted; hidden."""
    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    """The snapshot from which a paused sandbox resumes; hidden, and owned by that sandbox."""
    TRANSIENT = "transient"
    """The capture from which clones are forked, or the source of a promotion; hidden.

    Removed when its last fork is removed and it is no longer the head of a sandbox.
    """


class MemoryMode(StrEnum):
    """How a snapshot's memory was captured.

    Every method except NONE and FULL compares pages with an earlier image. The new image starts as a clone of the
    earlier one, and only pages that differ are written to it. Every image is therefore complete.
    """

    NONE = "none"
    FULL = "full"
    """All pages."""
    INCREMENTAL = "incremental"
    """Pages written since the machine's start, compared with the image that it was started from."""
    COMPARE = "compare"
    """Pages written since the machine's start, compared with the image of its latest capture."""
    SOFT_DIRTY = "soft_dirty"
    """Pages written since the machine's latest capture, which the kernel marked as soft-dirty."""
    WRITTEN = "written"
    """Pages written since the machine's latest capture, detected by asynchronous write protection."""
    LIVE = "live"
    """Like SOFT_DIRTY or WRITTEN, but most pages were copied while the machine ran."""


class SnapshotStatus(StrEnum):
    READY = "ready"


class Retention(_Part):
    """A rule that determines which snapshots of a sandbox to keep.

    A snapshot is kept if ``keep_last`` or ``keep_daily`` selects it and it is not older than ``max_age``. If neither
    ``keep_last`` nor ``keep_daily`` is set, only the age counts. The newest snapshot is always kept.
    """

    keep_last: int | None = Field(default=None, ge=1, le=100_000)
    keep_daily: int | None = Field(default=None, ge=1, le=100_000)
    """For how many days the newest snapshot of the day is kept. Days are in UTC; only days with snapshots count."""
    max_age: float | None = Field(default=None, gt=0, le=100 * 366 * 86400)
    """Maximum age in seconds."""


class StartCommand(_Part):
    """The command that a build starts in a template before the capture, and the probe that it then waits for."""

    command: str = ""
    """The command of the recipe, of its image, or of the template that it starts from. Empty: none."""
    ready_probe: str = ""
    ready_timeout: float = 60
    """In seconds."""


class Snapshot(_Record):
    """A snapshot or template, from which sandboxes can be forked."""

    id: Id = Field(default_factory=new_id)
    kind: SnapshotKind = SnapshotKind.SNAPSHOT
    names: list[Name] = Field(default_factory=list)
    tagged_names: list[TemplateName] = Field(default_factory=list)
    """A template's names with tags, such as ``web:v1``. An older release keeps them, but does not know them."""
    named_at: dict[str, datetime] = Field(default_factory=dict)
    """When a template got each of its names, with or without a tag. Empty if an older release named it."""
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
    """The retention rule that the snapshot was taken with. None: it is kept until it is deleted."""
    prewarm: int = Field(default=0, ge=0)
    """The number of forks to keep ready."""
    doomed: bool = False
    """Whether it was deleted with ``when=unused``. It is then hidden until its last user is removed."""
    memory: MemoryMode = MemoryMode.NONE
    memory_bytes_written: int = 0
    disk_bytes_unique: int = 0
    pause_ms: float = 0.0
    resources: Resources = Field(default_factory=Resources)
    mounts: list[Mount] = Field(default_factory=list)
    """The mounts of its source. Forks get the same mounts unless the request specifies different ones."""
    volumes: list[VolumeCapture] = Field(default_factory=list)
    """The volumes that were captured in the same pause."""
    recipe_digest: str = ""
    """The digest of ``recipe``, the guest files that the template was built with, and ``source_digest``."""
    source_digest: str = ""
    """The digest of the files at the recipe's path, the digest of its image, or the id of its template.

    Empty if the recipe has none of them, or if an older gateway built the template.
    """
    recipe: dict[str, Any] = Field(default_factory=dict)
    start: StartCommand | None = None
    """The start command of a template's build. None if an older release built the template: see ``recipe``."""
    imported: ImportOrigin | None = None
    """Where it came from, if it was imported from a file."""
    host: dict[str, Any] = Field(default_factory=dict)
    """Data that the host needs to start a machine from the snapshot, such as the accelerator and the CPU model."""

    @property
    def all_names(self) -> list[str]:
        """Its names without and with tags."""
        return [*self.names, *self.tagged_names]

    @property
    def is_hidden(self) -> bool:
        return self.doomed or self.kind not in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE)


Record = Sandbox | Snapshot | Volume | VolumeSnapshot


class NewerFormat(Exception):
    """A record comes from a newer release, and this release cannot read it.

    The message is a clause that states the reason.
    """


AnyRecord = TypeVar("AnyRecord", bound=_Record)


def parse_record(kind: type[AnyRecord], data: Any) -> AnyRecord:
    """Return the record in ``data``, which was parsed from JSON.

    Raises NewerFormat if only a newer release can read the record, and ValidationError if it is damaged.
    """
    record_format = data.get("format") if isinstance(data, dict) else None
    if isinstance(record_format, int) and record_format > FORMAT:
        raise NewerFormat(f"its format is {record_format}, and this release reads formats up to {FORMAT}")
    try:
        return compact(kind.model_validate(data))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        if all(problem["type"] == "enum" and isinstance(problem["input"], str) for problem in problems):
            field = ".".join(str(step) for step in problems[0]["loc"])
            raise NewerFormat(
                f"its {field} is {problems[0]['input'][:40]!r}, which this release does not know"
            ) from None
        raise


def compact(record: AnyRecord) -> AnyRecord:
    """Cut a record's memory use by more than half, and return the record. Its values stay the same.

    The gateway keeps the records of all objects in memory. Without this function, each record would have its own set of
    field names, which takes more memory than the rest of the record, and its own copy of equal resources.
    """
    if record.__pydantic_fields_set__ is _get_field_names(type(record)):
        return record  # It is compact already.
    _intern_field_names(record)
    for value in vars(record).values():
        if isinstance(value, list):
            for item in value:
                if isinstance(item, _Part):
                    _intern_field_names(item)
        elif isinstance(value, _Part):
            _intern_field_names(value)
    if isinstance(record, Sandbox | Snapshot) and not record.resources.model_extra:
        resources = record.resources
        record.__dict__["resources"] = _get_shared_resources(resources.cpus, resources.memory_mb, resources.disk_mb)
    _share_keys(record)
    return record


def _share_keys(record: _Part) -> None:
    """Make a record share its attribute keys with all other records of its class.

    Python does this for attributes that are set one by one (PEP 412), but pydantic gives each instance its own
    dictionary. The order of the fields stays the same.
    """
    values = record.__dict__
    del record.__dict__
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _intern_field_names(part: _Part) -> None:
    """Make a record share its set of field names with the other records of its class, as if all fields were set."""
    if not part.model_extra:
        object.__setattr__(part, "__pydantic_fields_set__", _get_field_names(type(part)))


@functools.cache
def _get_field_names(kind: type[_Part]) -> set[str]:
    return set(kind.model_fields)


@functools.lru_cache(maxsize=1024)
def _get_shared_resources(cpus: int, memory_mb: int, disk_mb: int) -> Resources:
    return Resources(cpus=cpus, memory_mb=memory_mb, disk_mb=disk_mb)


def refuse_newer_records(newer_records: Mapping[str, str]) -> None:
    """Raise BackendFailed if a newer release has written records that this release cannot read.

    ``newer_records`` maps the location of each such record to the reason why it cannot be read.
    """
    if not newer_records:
        return
    location, reason = next(iter(newer_records.items()))
    others_clause = {1: "", 2: ", as was 1 other record"}.get(
        len(newer_records), f", as were {len(newer_records) - 1} other records"
    )
    raise BackendFailed(
        f"{location} was written by a newer release of the gateway ({reason}){others_clause}. Nothing was changed. "
        "Install the newer release again; to use this release, first delete these objects with the newer one"
    )
