"""What callers send: one model for each body. Unknown fields are ignored, as the dialects' clients expect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from sandbox_gateway.config import explain
from sandbox_gateway.engine.spec import UNSET, ForkSpec, MountSpec
from sandbox_gateway.errors import Invalid
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Name, NetworkPolicy, OnTimeout, Resources

LONGEST_REF = 128
MOST_FORKS = 1000
MOST_MOUNTS = 64
MOST_PAIRS = 10_000
_CENTURY = 3_153_600_000

Ref = Annotated[str, Path(max_length=LONGEST_REF, description="An id or a name.")]
AnyRef = Annotated[str, Field(min_length=1, max_length=LONGEST_REF)]


def _never(value: object) -> object:
    """-1, the dialects' word for never, is None here."""
    if isinstance(value, bool):
        raise ValueError("a number of seconds is needed, or -1 for never")
    return None if value == -1 else value


def _check_count(value: object) -> object:
    """Refuse a large object before its members are checked: each wrong one would cost an error of a kilobyte."""
    if isinstance(value, dict) and len(value) > MOST_PAIRS:
        raise ValueError(f"an object has at most {MOST_PAIRS} members here, not {len(value)}")
    return value


Pairs = Annotated[dict[str, str], BeforeValidator(_check_count)]
VolumeSize = Annotated[int, Field(strict=True, ge=64, le=1 << 26)]
"""MiB."""
Seconds = Annotated[float, Field(ge=0, le=_CENTURY, allow_inf_nan=False)]
Life = Annotated[Seconds | None, BeforeValidator(_never)]
"""Seconds to live; null or -1: for ever."""
LIFE = Field(None, description="Seconds from now; -1 or null: never. Absent: the host's default, or as it was.")


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    def given(self, field: str) -> Any:
        """The value of ``field``, or UNSET where the caller did not send it."""
        return getattr(self, field) if field in self.model_fields_set else UNSET


class Network(Body):
    """What a sandbox may reach outside itself."""

    allow_internet: bool | None = Field(
        None,
        alias="allowInternetAccess",
        validation_alias=AliasChoices("allowInternetAccess", "allow_internet_access"),
    )
    allow_out: list[str] | None = Field(None, alias="allowOut", max_length=1000)
    deny_out: list[str] | None = Field(None, alias="denyOut", max_length=1000)
    allow_public_traffic: bool | None = Field(
        None,
        alias="allowPublicTraffic",
        strict=True,
        description="True: its ports, but for the agent's, are open to whoever reaches the gateway.",
    )
    rules: Any = None
    egress_proxy: Any = Field(None, alias="egressProxy")
    mask_request_host: Any = Field(None, alias="maskRequestHost")
    https_ports: Any = Field(None, alias="httpsPorts")

    @field_validator("rules", "egress_proxy", "mask_request_host", "https_ports")
    @classmethod
    def _not_here(cls, value: object) -> None:
        """Who asks for one of these counts on it: to ignore it would be worse than to refuse."""
        if value:
            raise ValueError("not supported here: requests pass unchanged, to where they are sent; leave it out")

    def policy(self, allow_internet: bool | None = None, *, public: bool = False) -> NetworkPolicy:
        """``allow_internet`` is what the request says outside this object, ``public`` how it was; this object's own
        word goes first."""
        word = self.allow_internet if self.allow_internet is not None else allow_internet
        return NetworkPolicy(
            allow_internet=word is not False,
            allow_out=self.allow_out or [],
            deny_out=self.deny_out or [],
            allow_public_traffic=public if self.allow_public_traffic is None else self.allow_public_traffic,
        )


class Lifecycle(Body):
    on_timeout: OnTimeout | None = Field(None, alias="onTimeout")
    auto_resume: bool = Field(False, alias="autoResume")


class AutoResume(Body):
    enabled: bool = False


class Sizes(Body):
    """Absent: as the snapshot has it."""

    cpus: int | None = Field(None, alias="cpuCount", strict=True, ge=1, le=256)
    memory_mb: int | None = Field(None, alias="memoryMB", strict=True, ge=64, le=1 << 20)
    disk_mb: int | None = Field(None, alias="diskSizeMB", strict=True, ge=64, le=1 << 26)


class VolumeMount(Body):
    """A volume, and where a sandbox sees it."""

    name: AnyRef = Field(description="The volume, by name or id.")
    path: str = Field(min_length=1, max_length=4096, description="Where, inside: absolute.")
    read_only: bool = Field(False, alias="readOnly")
    clone: bool = Field(False, description="Its own clone of what the snapshot holds of the volume.")

    def spec(self) -> MountSpec:
        return MountSpec(self.name, self.path, read_only=self.read_only, clone=self.clone)


class Forked(Sizes):
    """What every making of a sandbox may say."""

    metadata: Pairs = Field(default_factory=dict)
    env: Pairs = Field(default_factory=dict, alias="envVars")
    timeout: Life = LIFE
    network: Network | None = None
    allow_internet_access: bool | None = None
    lifecycle: Lifecycle | None = None
    auto_pause: bool = Field(False, alias="autoPause")
    auto_pause_memory: bool = Field(True, alias="autoPauseMemory", description="Only true is offered.")
    iam: Any = None
    auto_resume: AutoResume | None = Field(None, alias="autoResume")
    paused: bool = Field(False, description="Leave it paused.")
    cold_start: bool = Field(False, alias="coldStart", description="Boot from the snapshot's disk, without its memory.")
    volume_mounts: list[VolumeMount] | None = Field(
        None,
        alias="volumeMounts",
        max_length=MOST_MOUNTS,
        description="Absent or null: what the source of the snapshot had. An empty list: none.",
    )

    @field_validator("iam")
    @classmethod
    def _no_identities(cls, value: object) -> None:
        if value:
            raise ValueError("not supported here: there are no workload identities; leave it out")

    @field_validator("auto_pause_memory")
    @classmethod
    def _keeps_its_memory(cls, value: bool) -> bool:
        if not value:
            raise ValueError("not supported here: what is paused at the end of its time keeps its memory; leave it out")
        return value

    def spec(self, **more: Any) -> ForkSpec:
        network = self.network or Network()
        return ForkSpec(
            cpus=self.cpus,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            cold_start=self.cold_start,
            paused=self.paused,
            metadata=self.metadata,
            env=self.env,
            network=network.policy(self.allow_internet_access),
            mounts=None if self.volume_mounts is None else [mount.spec() for mount in self.volume_mounts],
            timeout=self.given("timeout"),
            on_timeout=self._on_timeout(),
            auto_resume=self._auto_resume(),
            **more,
        )

    def _on_timeout(self) -> OnTimeout:
        if self.lifecycle and self.lifecycle.on_timeout:
            return self.lifecycle.on_timeout
        return OnTimeout.PAUSE if self.auto_pause else OnTimeout.KILL

    def _auto_resume(self) -> bool:
        return bool((self.lifecycle and self.lifecycle.auto_resume) or (self.auto_resume and self.auto_resume.enabled))


class CreateSandbox(Forked):
    template: AnyRef = Field(alias="templateID", description="A template or a snapshot, by id or name.")
    name: Name | None = None

    def create_spec(self, idempotency_key: str, operation: str) -> ForkSpec:
        names = [self.name] if self.name else None
        return self.spec(names=names, idempotency_key=idempotency_key, operation=operation)


class Fork(Forked):
    """`count` siblings, or one for each of `names`."""

    count: int | None = Field(None, strict=True, ge=1, le=MOST_FORKS)
    names: list[Name] | None = Field(None, min_length=1, max_length=MOST_FORKS)
    concurrency: int | None = Field(None, strict=True, ge=1, le=256)
    atomic: bool = Field(True, description="All or none; false: as many as can be, with the errors of the others.")

    @property
    def many(self) -> bool:
        return self.count is not None or self.names is not None

    def fork_spec(self, idempotency_key: str, operation: str) -> ForkSpec:
        count = self.count or len(self.names or ()) or 1
        if self.names and len(self.names) != count:
            raise Invalid(f"count is {count} and there are {len(self.names)} names: leave one of them out")
        if self.names and len(set(self.names)) != count:
            raise Invalid("names: each can be given to one sandbox only")
        return self.spec(
            count=count,
            names=self.names,
            concurrency=self.concurrency,
            atomic=self.atomic,
            idempotency_key=idempotency_key,
            operation=operation,
        )


class Timeout(Body):
    timeout: Life = Field(description="Seconds from now; -1 or null: never; 0: now.")


class Resume(Body):
    timeout: Life = LIFE
    memory: bool | None = Field(None, description="false: boot from the disk, though its memory was captured.")


class Pause(Body):
    memory: bool = True


class Patch(Body):
    metadata: Pairs | None = Field(None, description="Replaces what there is.")
    timeout: Life = LIFE
    name: Name | None = None


class Exec(Body):
    args: list[str] = Field(min_length=1, max_length=10_000, description="The program and its arguments; no shell.")
    env: Pairs = Field(default_factory=dict)
    cwd: str = Field("", max_length=4096)
    user: str = Field("", max_length=256)
    timeout: float = Field(60, gt=0, le=604_800, allow_inf_nan=False, description="Seconds it may take.")
    stdin: str = Field("", description="Base64 of what it reads from standard input.")


class KeepRule(Body):
    keep_last: int | None = Field(None, alias="keepLast", ge=1, le=100_000, description="The newest so many.")
    keep_daily: int | None = Field(
        None, alias="keepDaily", ge=1, le=100_000, description="The newest of each of so many days (UTC) that have one."
    )
    max_age: float | None = Field(
        None,
        alias="maxAge",
        gt=0,
        le=100 * 366 * 86400,
        allow_inf_nan=False,
        description="None that is older, in seconds.",
    )

    @model_validator(mode="after")
    def _says_something(self) -> KeepRule:
        if self.keep_last is None and self.keep_daily is None and self.max_age is None:
            raise ValueError("retention needs keepLast, keepDaily or maxAge")
        return self


class CreateSnapshot(Body):
    name: Name | None = None
    description: str = Field("", max_length=4096)
    memory: Literal["auto", "none"] | bool = Field("auto", description="none (or false): the disk only.")
    expires_in: Seconds | None = Field(None, alias="expiresIn", description="Seconds after which it may be removed.")
    volumes: list[AnyRef] = Field(
        default_factory=list, max_length=MOST_MOUNTS, description="Volumes to capture in the same pause."
    )
    retention: KeepRule | None = Field(
        None,
        description="Which of the sandbox's snapshots that were taken under a rule are kept; those in use always are.",
    )

    @property
    def with_memory(self) -> Literal["auto", "none"]:
        return "none" if self.memory in (False, "none") else "auto"


class Rollback(Body):
    snapshot: AnyRef = Field(alias="snapshotID")
    cold_start: bool = Field(False, alias="coldStart", description="Boot from its disk, though it holds memory.")


class Promote(Body):
    source: AnyRef | None = Field(None, description="The sandbox that takes over; default: the one it was forked from.")


def _unnamed(value: object) -> object:
    """One client says "" where it leaves the name to us."""
    return None if value == "" else value


class CreateVolume(Body):
    name: Annotated[Name | None, BeforeValidator(_unnamed)] = Field(None, description="Absent: one is made up.")
    size_mb: VolumeSize | None = Field(None, alias="sizeMB", description="Absent: 1024, or as the snapshot.")
    from_snapshot: str | None = Field(
        None,
        alias="fromSnapshot",
        min_length=1,
        max_length=2 * LONGEST_REF + 1,
        description="VOLUME@SNAPSHOT, or the id of a volume's snapshot.",
    )


class GrowVolume(Body):
    size_mb: VolumeSize = Field(alias="sizeMB")


class CreateVolumeSnapshot(Body):
    name: Annotated[Name | None, BeforeValidator(_unnamed)] = Field(None, description="Absent: its id.")


class RollbackVolume(Body):
    snapshot: AnyRef = Field(description="A snapshot of this volume, by name or id.")
    force: bool = Field(False, description="Also while a sandbox may write to it: what it wrote since is lost.")


class SetAlias(Body):
    alias: Name


class CreateTemplate(Sizes):
    name: Name
    source: Source = Field(Source.DEBOOTSTRAP, alias="from")
    suite: str | None = None
    mirror: str | None = None
    packages: list[str] | None = Field(None, max_length=2000)
    path: str | None = None
    setup: list[str] | None = Field(None, max_length=1000)
    start_command: str | None = Field(None, alias="startCommand")
    ready_probe: str | None = Field(None, alias="readyProbe")
    ready_timeout: float | None = Field(None, alias="readyTimeout")
    setup_timeout: float | None = Field(None, alias="setupTimeout")
    description: str = Field("", max_length=4096)

    def recipe(self) -> Recipe:
        """The recipe, with its own defaults for what was left out. Raises Invalid."""
        sizes = self.model_dump(include={"cpus", "memory_mb", "disk_mb"}, exclude_none=True)
        rest = self.model_dump(exclude={"name", "description", "cpus", "memory_mb", "disk_mb"}, exclude_none=True)
        try:
            return Recipe(**rest, resources=Resources(**sizes))
        except ValidationError as error:
            raise Invalid(explain(error)) from None
