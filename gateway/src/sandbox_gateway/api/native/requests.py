"""Models of request bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from sandbox_gateway.api.body import MAX_FORKS, TIMEOUT_FIELD, AnyRef, Body, Refusal, Seconds, Timeout
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.api.native.naming import to_json_name
from sandbox_gateway.config import Config
from sandbox_gateway.engine.dockerfiles import MAX_LENGTH as MAX_DOCKERFILE_LENGTH
from sandbox_gateway.engine.image_steps import compile_steps, name_unchecked_archive
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.image_references import MAX_LENGTH as MAX_IMAGE_LENGTH
from sandbox_gateway.image_references import RegistryLogin, Transport, parse_image_reference
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import (
    TAG_SEPARATOR,
    Name,
    NetworkPolicy,
    OnTimeout,
    Resources,
    Tag,
    TemplateName,
)
from sandbox_gateway.validation import explain

MAX_MOUNTS = 64
MAX_PAIRS = 1000
MAX_STORED_BYTES = 64 << 10
"""Maximum size of all metadata, or of all environment variables, of a sandbox."""
MAX_COMMAND_LENGTH = 64 << 10
IMAGE_BUILD_DISK_MB = 4096
_IMAGE_READY_SECONDS = 300
MAX_SETUP_BYTES = 256 << 10
"""Maximum size of all set-up commands of a template."""


def _check_pair_count(value: object) -> object:
    """Reject an object with too many members before they are validated.

    Each invalid member would add a kilobyte to the error.
    """
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise ValueError(f"the object has {len(value)} members: send at most {MAX_PAIRS}")
    return value


def _check_pair_size(value: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(text.encode()) for key, text in value.items())
    if size > MAX_STORED_BYTES:
        raise ValueError(
            f"the keys and values are {size} bytes long in total: send at most {MAX_STORED_BYTES >> 10} KiB, and put "
            "more data into a file in the sandbox"
        )
    return value


def _check_setup_size(value: list[str]) -> list[str]:
    size = sum(len(command.encode()) for command in value)
    if size > MAX_SETUP_BYTES:
        raise ValueError(
            f"the commands are {size} bytes long in total: send at most {MAX_SETUP_BYTES >> 10} KiB, and let a command "
            "download larger files, or build the template from a directory"
        )
    return value


# Check the length first: outside this type, it would be checked only after every command had been validated.
Setup = Annotated[list[str], Field(max_length=1000), AfterValidator(_check_setup_size)]


Pairs = Annotated[dict[str, str], BeforeValidator(_check_pair_count)]
StoredPairs = Annotated[Pairs, AfterValidator(_check_pair_size)]
"""Pairs that become part of a record, and therefore stay in memory."""


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    """Reject keys that configure a sandbox in CubeSandbox: a caller that sets one expects it to take effect."""
    for key, remedy in _REFUSED_METADATA.items():
        if key in value:
            raise ValueError(
                f"the key {key!r} is not supported, because metadata does not configure sandboxes: {remedy}"
            )
    return value


_REFUSED_METADATA = {
    "host-mount": "use 'volumeMounts', with a volume, to share files; directories of the host cannot be mounted",
    "network-policy": "use the field 'network'",
}
Metadata = Annotated[StoredPairs, AfterValidator(_check_metadata)]
_DEFAULT_POLICY = NetworkPolicy()
_MAX_HOST_LENGTH = 255
Address = Annotated[str, Field(max_length=_MAX_HOST_LENGTH)]
_HOST_MASK_PATTERN = re.compile(r"(?:[A-Za-z0-9._-]|\$\{PORT\})+(?::(?:[0-9]{1,5}|\$\{PORT\}))?")
VolumeSize = Annotated[int, Field(strict=True, ge=64, le=1 << 26)]
"""In MiB."""
PrewarmCount = Annotated[int, Field(strict=True, ge=0, le=1000)]


class NativeBody(Body):
    """A body whose fields are in camelCase in JSON, except those with an explicit alias."""

    model_config = ConfigDict(alias_generator=to_json_name)


class Network(NativeBody):
    """The network policy of a sandbox."""

    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        **dict.fromkeys(
            ("rules", "egressProxy", "httpsPorts"),
            Refusal("because the gateway does not change or redirect requests: omit this field"),
        ),
        "dnsServers": Refusal("because the gateway looks up the domain names of a policy itself: omit this field"),
    }

    allow_internet: bool | None = Field(
        None,
        alias="allowInternetAccess",
        validation_alias=AliasChoices("allowInternetAccess", "allow_internet_access"),
    )
    allow_out: list[Address] | None = Field(None, max_length=1000)
    deny_out: list[Address] | None = Field(None, max_length=1000)
    allow_public_traffic: bool | None = Field(
        None,
        strict=True,
        description="True: anyone who can reach the gateway can reach the sandbox's ports, except those of the agent. "
        "Absent: `network.public_ports` of the configuration, or no change.",
    )

    mask_request_host: str | None = Field(
        None,
        max_length=_MAX_HOST_LENGTH,
        description="The Host header that services in the sandbox receive; `${PORT}` stands for the port. Absent: as "
        "the client sent it, or no change. An empty string: as the client sent it.",
    )

    @field_validator("mask_request_host")
    @classmethod
    def _check_host(cls, value: str | None) -> str | None:
        if value and not _HOST_MASK_PATTERN.fullmatch(value):
            raise ValueError(f"{value!r} is not a host name: use letters, digits, '-', '.' and ${{PORT}}")
        return value

    def build_policy(
        self, allow_internet: bool | None = None, *, current_policy: NetworkPolicy = _DEFAULT_POLICY
    ) -> NetworkPolicy:
        """Return the network policy that this object describes.

        If ``allowInternetAccess`` is absent here, ``allow_internet`` (a field of the request itself) applies instead.
        Absent fields that do not concern outgoing traffic are taken from ``current_policy``.
        """
        allow_public_traffic, host_mask = self.allow_public_traffic, self.mask_request_host
        internet_setting = self.allow_internet if self.allow_internet is not None else allow_internet
        return NetworkPolicy(
            allow_internet=internet_setting is not False,
            allow_out=self.allow_out or [],
            deny_out=self.deny_out or [],
            allow_public_traffic=(
                current_policy.allow_public_traffic if allow_public_traffic is None else allow_public_traffic
            ),
            mask_request_host=current_policy.mask_request_host if host_mask is None else host_mask,
        )


class Lifecycle(NativeBody):
    on_timeout: OnTimeout | None = None
    auto_resume: bool = False


class AutoResume(NativeBody):
    enabled: bool = False


class Sizes(NativeBody):
    """The CPUs, memory and disk of a sandbox or template. A sandbox takes missing values from its snapshot."""

    cpus: int | None = Field(None, alias="cpuCount", strict=True, ge=1, le=256)
    memory_mb: int | None = Field(None, strict=True, ge=64, le=1 << 20)
    disk_mb: int | None = Field(None, alias="diskSizeMB", strict=True, ge=64, le=1 << 26)


class VolumeMount(NativeBody):
    """A volume, and its mount point in a sandbox."""

    name: AnyRef = Field(description="The volume, by name or id.")
    path: str = Field(min_length=1, max_length=4096, description="The mount point in the sandbox: absolute.")
    read_only: bool = False
    clone: bool = Field(False, description="Mount a clone of the captured volume, not the volume itself.")

    def build_spec(self) -> MountSpec:
        return MountSpec(self.name, self.path, read_only=self.read_only, clone=self.clone)


class Placement(NativeBody):
    """The hosts of a fleet that may get the new sandboxes."""

    host: Name | None = Field(None, description="Only this host.")
    labels: Pairs = Field(default_factory=dict, max_length=64, description="Only hosts that have all these labels.")
    strategy: Literal["local", "spread", "pack"] | None = Field(
        None,
        description="local: the gateway's own host, if it can. spread: evenly. pack: as few hosts as possible. Absent: "
        "local for one sandbox, spread for several.",
    )
    anti_affinity: bool = Field(False, description="Each sandbox of the request on a host of its own.")
    hosts: list[Name] | None = Field(
        None,
        min_length=1,
        max_length=MAX_FORKS,
        description="The host of each sandbox, in the order of `names`, instead of hosts that `strategy` chooses. The "
        "other fields apply as well.",
    )


class ForkBody(Sizes):
    """The fields of every request that creates sandboxes."""

    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "autoPauseMemory": Refusal(
            "because a timeout always pauses a sandbox with its memory, if the host captures memory: omit this field",
            accepted_values=(True,),
        ),
        "iam": Refusal("because sandboxes have no workload identities: omit this field"),
    }

    metadata: Metadata = Field(default_factory=dict)
    env: StoredPairs = Field(default_factory=dict, alias="envVars")
    timeout: Timeout = TIMEOUT_FIELD
    network: Network | None = None
    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")
    lifecycle: Lifecycle | None = None
    auto_pause: bool = False
    auto_resume: AutoResume | None = None
    placement: Placement | None = Field(None, description="Only in a fleet: which hosts get the sandboxes.")
    paused: bool = Field(False, description="Create it paused.")
    cold_start: bool = Field(False, description="Boot from the snapshot's disk, without its memory.")
    volume_mounts: list[VolumeMount] | None = Field(
        None,
        max_length=MAX_MOUNTS,
        description="Absent or null: the mounts of the snapshot's source. An empty list: none.",
    )

    def check_placement(self, config: Config, *, is_clone: bool = False) -> None:
        """Raise Unsupported if the request has a placement that does not apply."""
        if self.placement is None:
            return
        if config.fleet is None:
            raise Unsupported(
                "placement: not supported, because this gateway has only its own host ([fleet] in its configuration): "
                "omit this field"
            )
        if is_clone:
            raise Unsupported(
                "placement: not supported, because the clones of a running sandbox stay on its host: omit this field, "
                "or create a snapshot and fork that"
            )

    def build_spec(self, **kwargs: Any) -> ForkSpec:
        network = self.network or Network()
        return ForkSpec(
            cpus=self.cpus,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            cold_start=self.cold_start,
            paused=self.paused,
            metadata=self.metadata,
            env=self.env,
            network=network.build_policy(self.allow_internet_access),
            public_ports=network.allow_public_traffic,
            mounts=None if self.volume_mounts is None else [mount.build_spec() for mount in self.volume_mounts],
            timeout=self.get_value_or_unset("timeout"),
            on_timeout=self._choose_on_timeout(),
            auto_resume=self._should_auto_resume(),
            **kwargs,
        )

    def _choose_on_timeout(self) -> OnTimeout:
        if self.lifecycle and self.lifecycle.on_timeout:
            return self.lifecycle.on_timeout
        return OnTimeout.PAUSE if self.auto_pause else OnTimeout.KILL

    def _should_auto_resume(self) -> bool:
        return bool((self.lifecycle and self.lifecycle.auto_resume) or (self.auto_resume and self.auto_resume.enabled))


class CreateSandbox(ForkBody):
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "mcp": "the clients themselves start the MCP gateway, which the template must contain",
        "secure": "access to a sandbox is always secured",
    }
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        **ForkBody.refused_fields,
        "distributionScope": Refusal("because a gateway manages a single host: omit this field"),
    }

    template: AnyRef = Field(alias="templateID", description="A template or a snapshot, by id or name.")
    name: Name | None = None

    def build_create_spec(self, idempotency_key: str, operation: str) -> ForkSpec:
        names = [self.name] if self.name else None
        return self.build_spec(names=names, idempotency_key=idempotency_key, operation=operation)


class Fork(ForkBody):
    """A request for one sandbox, `count` siblings, or one sandbox per name in `names`."""

    name: Name | None = Field(None, description="Name of a single sandbox; for several, use `names`.")
    count: int | None = Field(None, strict=True, ge=1, le=MAX_FORKS)
    names: list[Name] | None = Field(None, min_length=1, max_length=MAX_FORKS)
    concurrency: int | None = Field(None, strict=True, ge=1, le=256)
    atomic: bool = Field(
        True, description="All or nothing. False: as many as possible, with an error for each fork that fails."
    )

    @property
    def has_count_or_names(self) -> bool:
        return self.count is not None or self.names is not None

    def build_fork_spec(self, idempotency_key: str, operation: str) -> ForkSpec:
        """Return the request as a ``ForkSpec``. Raises Invalid if `name`, `names` and `count` contradict each other."""
        names = self._resolve_names()
        return self.build_spec(
            count=self.count or len(names or ()) or 1,
            names=names,
            concurrency=self.concurrency,
            atomic=self.atomic,
            idempotency_key=idempotency_key,
            operation=operation,
        )

    def _resolve_names(self) -> list[str] | None:
        if self.name and self.names:
            raise Invalid("'name' and 'names' are mutually exclusive: omit 'name'")
        if self.name and self.count not in (None, 1):
            raise Invalid(
                f"'name' is for a single sandbox, but 'count' is {self.count}: use 'names', with one name for each "
                "sandbox"
            )
        names = [self.name] if self.name else self.names
        if names and self.count not in (None, len(names)):
            raise Invalid(f"'count' is {self.count}, but there are {len(names)} names: omit one of the two fields")
        if names and len(set(names)) != len(names):
            raise Invalid("the field 'names' contains a duplicate: use each name only once")
        return names


class SetTimeout(NativeBody):
    timeout: Timeout = Field(description="Seconds from now; -1 or null: never; 0: now.")


class Refresh(NativeBody):
    duration: float = Field(15, ge=0, le=3600, allow_inf_nan=False, description="Seconds from now.")


class Resume(NativeBody):
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "autoPause": Refusal(
            "because a sandbox keeps the lifecycle that it was created with: omit this field", accepted_values=()
        ),
    }

    timeout: Timeout = TIMEOUT_FIELD
    memory: bool | None = Field(None, description="False: boot from the disk, without the captured memory.")


class Pause(NativeBody):
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "requireHealthyGuest": Refusal(
            "because pausing does not query the agent: run a command in the sandbox first, and omit this field"
        ),
    }

    memory: bool = True


class Patch(NativeBody):
    metadata: Metadata | None = Field(None, description="Replaces all metadata.")
    timeout: Timeout = TIMEOUT_FIELD
    name: Name | None = None


class Exec(NativeBody):
    args: list[str] = Field(min_length=1, max_length=10_000, description="The program and its arguments; no shell.")
    env: Pairs = Field(default_factory=dict)
    cwd: str = Field("", max_length=4096)
    user: str = Field("", max_length=256)
    timeout: float = Field(60, gt=0, le=604_800, allow_inf_nan=False, description="Timeout in seconds.")
    stdin: str = Field("", description="The program's standard input, in base64.")


class KeepRule(NativeBody):
    keep_last: int | None = Field(None, ge=1, le=100_000, description="Number of newest snapshots to keep.")
    keep_daily: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of days (UTC, only days with snapshots) for which to keep the newest snapshot.",
    )
    max_age: float | None = Field(
        None,
        gt=0,
        le=100 * 366 * 86400,
        allow_inf_nan=False,
        description="Age in seconds beyond which snapshots are deleted.",
    )

    @model_validator(mode="after")
    def _require_rule(self) -> KeepRule:
        if self.keep_last is None and self.keep_daily is None and self.max_age is None:
            raise ValueError("the retention rule is empty: set 'keepLast', 'keepDaily' or 'maxAge'")
        return self


class CreateSnapshot(NativeBody):
    name: Name | None = None
    description: str = Field("", max_length=4096)
    memory: Literal["auto", "none"] | bool = Field("auto", description="None (or false): capture the disk only.")
    expires_in: Seconds | None = Field(None, description="Seconds after which the snapshot may be removed.")
    volumes: list[AnyRef] = Field(
        default_factory=list, max_length=MAX_MOUNTS, description="Volumes to capture in the same pause."
    )
    retention: KeepRule | None = Field(
        None,
        description="Which of the sandbox's snapshots with a rule are kept. Snapshots in use are always kept.",
    )
    prewarm: PrewarmCount = Field(0, description="Number of forks to keep ready (`kvm_xfs`, with memory).")

    @property
    def memory_mode(self) -> Literal["auto", "none"]:
        return "none" if self.memory in (False, "none") else "auto"


class Prewarm(NativeBody):
    count: PrewarmCount = Field(description="Number of forks to keep ready; 0: none.")


class Rollback(NativeBody):
    snapshot: AnyRef = Field(alias="snapshotID")
    cold_start: bool = Field(False, description="Boot from the snapshot's disk, without its memory.")


class Promote(NativeBody):
    source: AnyRef | None = Field(
        None, description="The sandbox to replace; default: the sandbox that this one was forked from."
    )


def _convert_empty_to_none(value: object) -> object:
    """Return None for an empty string, which CubeSandbox's client sends to get a generated name."""
    return None if value == "" else value


class CreateVolume(NativeBody):
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "driver": Refusal("because a host has only one kind of volume: omit this field")
    }

    name: Annotated[Name | None, BeforeValidator(_convert_empty_to_none)] = Field(
        None, description="Absent: generated."
    )
    size_mb: VolumeSize | None = Field(None, description="Absent: 1024, or the snapshot's size.")
    from_snapshot: str | None = Field(
        None,
        min_length=1,
        max_length=2 * MAX_REF_LENGTH + 1,
        description="VOLUME@SNAPSHOT, or the id of a volume's snapshot.",
    )


class OpenPlan(NativeBody):
    run: Annotated[str, Field(min_length=16, max_length=128)]
    """A name that only this run uses. All its tasks use it to find the session."""


class OpenAppliedRun(NativeBody):
    run: Annotated[str, Field(min_length=16, max_length=128)]
    """A name that only this run uses. All its tasks use it to find the run."""


class GrowVolume(NativeBody):
    size_mb: VolumeSize = Field(alias="sizeMB")


class CreateVolumeSnapshot(NativeBody):
    name: Annotated[Name | None, BeforeValidator(_convert_empty_to_none)] = Field(
        None, description="Absent: the volume's id."
    )


class RollbackVolume(NativeBody):
    snapshot: AnyRef = Field(description="A snapshot of this volume, by name or id.")
    force: bool = Field(
        False, description="Roll back even while a sandbox can write to the volume. Later writes are lost."
    )


def _require_alias(value: object) -> object:
    if value in (None, ""):
        raise ValueError(
            "must not be empty, because names cannot be removed from a template: give the name to a different "
            "template, or delete the template"
        )
    return value


_AWS_REFUSAL = Refusal(
    "because the gateway cannot request passwords from AWS: use 'fromImage' with the user name AWS and the output of "
    "`aws ecr get-login-password` as the password"
)
_GOOGLE_USER = "_json_key"
"""The user name with which Google's registries expect the key of a service account as the password."""
_Username = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^:\x00-\x1f\x7f]+$")]
_Password = Annotated[SecretStr, Field(min_length=1, max_length=64 << 10)]


class ImageRegistry(NativeBody):
    """How to log in to an image's registry. Used for one build, and not stored."""

    refused_fields: ClassVar[Mapping[str, Refusal]] = dict.fromkeys(
        ("awsAccessKeyId", "awsSecretAccessKey", "awsRegion"), _AWS_REFUSAL
    )

    type: Literal["registry", "gcp"]
    username: _Username | None = None
    password: _Password | None = None
    service_account_json: _Password | None = None

    def build_login(self, image: str) -> RegistryLogin:
        """Return the login. Raises Invalid if it is incomplete or ambiguous, or if ``image`` is not in a registry."""
        has_password = self.username is not None or self.password is not None
        if self.type == "gcp" and has_password:
            raise Invalid(
                "a login with the type 'gcp' has no 'username' and 'password': remove them, or use 'registry'"
            )
        if self.type == "registry" and self.service_account_json is not None:
            raise Invalid("a login with the type 'registry' has no 'serviceAccountJson': remove it, or use 'gcp'")
        if self.type == "gcp" and self.service_account_json is None:
            raise Invalid("the login to the image's registry is incomplete: send 'serviceAccountJson'")
        if self.type == "gcp":
            return _build_login(image, _GOOGLE_USER, self.service_account_json)
        return _build_login(image, self.username, self.password)


def _build_login(image: str, username: str | None, password: SecretStr | None) -> RegistryLogin:
    if not username or password is None:
        raise Invalid("the login to the image's registry is incomplete: send both a user name and a password")
    try:
        is_remote = parse_image_reference(image).transport is Transport.REGISTRY
    except ValueError as error:
        raise Invalid(str(error)) from None
    if not is_remote:
        raise Invalid(f"the image {image!r} is not in a registry: send no user name and password")
    return RegistryLogin(username, password.get_secret_value())


_Reference = Annotated[
    str, Field(min_length=1, max_length=MAX_IMAGE_LENGTH, description="REGISTRY/REPOSITORY:TAG of an allowed registry.")
]


class _ArtifactBody(NativeBody):
    reference: _Reference
    registry_username: _Username | None = Field(
        None, description="For the registry. Not stored. Absent: the configured credentials."
    )
    registry_password: _Password | None = None

    def build_login(self) -> RegistryLogin | None:
        """Return the login to the registry, if the request contains one. Raises Invalid."""
        if self.registry_username is None and self.registry_password is None:
            return None
        return _build_login(self.reference, self.registry_username, self.registry_password)


class PushSnapshot(_ArtifactBody):
    memory: Literal["auto", "none"] = Field("auto", description="none: push only the disk.")


_Trust = Annotated[
    list[Annotated[str, Field(max_length=64)]],
    Field(max_length=16, description="Fingerprints of signers to accept in addition to this gateway's own."),
]


class PullSnapshot(_ArtifactBody):
    name: Name | None = Field(None, description="Replaces the names in the artifact.")
    trust: _Trust = Field(default_factory=list)


class PullTemplate(_ArtifactBody):
    name: TemplateName | None = Field(None, description="Replaces the names in the artifact.")
    trust: _Trust = Field(default_factory=list)


Tags = Annotated[list[Tag], Field(max_length=100)]


_ArchiveDigest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TranslateDockerfile(NativeBody):
    dockerfile: str = Field(max_length=MAX_DOCKERFILE_LENGTH)
    ignore_file: str = Field("", max_length=MAX_DOCKERFILE_LENGTH, description="The contents of `.dockerignore`.")
    digests: Annotated[dict[str, _ArchiveDigest], BeforeValidator(_check_pair_count)] | None = Field(
        None, description="For each source: the digest of the archive with its files."
    )


class SetAlias(NativeBody):
    alias: Annotated[TemplateName, BeforeValidator(_require_alias)]


class AssignTags(NativeBody):
    target: AnyRef = Field(description="NAME or NAME:TAG: the build that gets the tags.")
    tags: Tags = Field(min_length=1)


class RemoveTags(NativeBody):
    name: AnyRef = Field(description="A template's name, without a tag.")
    tags: Tags = Field(min_length=1)


def _refuse_misplaced(request: str, remedies: Mapping[str, str]) -> dict[str, Refusal]:
    """Return a refusal for each field in ``remedies``, which ``request`` has, but not the request that refuses it."""
    return {name: Refusal(f"because only {request} has this field: {remedy}") for name, remedy in remedies.items()}


_COMMAND_REFUSAL = Refusal(
    "because a template's command is a shell command: set 'startCommand', which replaces the image's entry point"
)
_TEMPLATE_NETWORK_REFUSAL = Refusal(
    "because templates have no network policy: omit this field, and set 'network' when you create a sandbox"
)


_NON_RECIPE_FIELDS = ("name", "description", "prewarm", "registry_username", "registry_password")


class CreateTemplate(Sizes):
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        **dict.fromkeys(("args", "command"), _COMMAND_REFUSAL),
        **dict.fromkeys(("allowOut", "denyOut", "dns", "networkType"), _TEMPLATE_NETWORK_REFUSAL),
        "allowInternetAccess": Refusal(_TEMPLATE_NETWORK_REFUSAL.reason, accepted_values=(True,)),
        "exposedPorts": Refusal("because every port of a sandbox is reachable through the gateway: omit this field"),
        "env": Refusal("because templates have no environment variables: set 'envVars' when you create a sandbox"),
        "writableLayerSize": Refusal("because a sandbox has a single disk: set 'diskSizeMB'"),
        **dict.fromkeys(
            ("probePath", "probePort"),
            Refusal("because the gateway does not probe ports: set 'readyProbe' to a command"),
        ),
        "instanceType": Refusal("because a host has only one kind of machine: omit this field"),
        "nodes": Refusal("because a gateway manages a single host: omit this field"),
        "enableIvshmem": Refusal("because sandboxes do not share memory with the host: omit this field"),
    }
    ignored_fields: ClassVar[Mapping[str, str]] = {"teamID": "there are no teams"}
    misplaced_fields: ClassVar[Mapping[str, Refusal]] = _refuse_misplaced(
        "another request of E2B's client",
        {
            "fromImage": "use 'image'",
            "fromTemplate": "use 'template'",
            "fromImageRegistry": "use 'registryUsername' and 'registryPassword'",
            "steps": "use 'setup', a list of shell commands",
            "startCmd": "use 'startCommand'",
            "readyCmd": "use 'readyProbe'",
            "alias": "use 'name'",
            "tags": "use 'name', as NAME:TAG",
            "minFreeDiskMb": "use 'diskSizeMB'",
            "force": "omit it, or build the template again with `POST /templates/{}`",
            "public": "omit it, because every key can use every template",
        },
    ) | {
        "dockerfile": Refusal(
            "because this request takes a recipe: translate the Dockerfile with `POST /dockerfiles`, and send the "
            "result"
        ),
        "envVars": Refusal("because templates have no environment variables: set it when you create a sandbox"),
    }

    name: TemplateName
    memory_mb: int | None = Field(None, alias="memoryMB", strict=True, ge=64, le=1 << 20)
    memory: int | None = Field(None, strict=True, ge=64, le=1 << 20, description="The same as `memoryMB`.")
    cpu: int | None = Field(
        None, strict=True, ge=1000, le=256_000, description="The same as `cpuCount`, in millicores."
    )
    source: Source | None = Field(
        None, alias="from", description="Absent: `image` with an image, `template` with a template, else `debootstrap`."
    )
    suite: str | None = Field(None, max_length=64)
    mirror: str | None = Field(None, max_length=4096)
    packages: list[str] | None = Field(None, max_length=2000)
    path: str | None = Field(None, max_length=4096)
    image: str | None = Field(None, max_length=MAX_IMAGE_LENGTH)
    registry_username: _Username | None = Field(None, description="For the image's registry. Not stored.")
    registry_password: _Password | None = None
    template: str | None = Field(None, max_length=MAX_REF_LENGTH)
    setup: Setup | None = None
    start_command: str | None = Field(None, max_length=MAX_COMMAND_LENGTH)
    ready_probe: str | None = Field(None, max_length=MAX_COMMAND_LENGTH)
    ready_timeout: float | None = None
    setup_timeout: float | None = None
    setup_network: bool | None = Field(
        None, strict=True, description="Whether the machine has access to the network during the build. Default: true."
    )
    description: str = Field("", max_length=4096)
    prewarm: PrewarmCount | None = Field(
        None,
        description="Number of forks to keep ready, even if the template already exists. Absent: unchanged, or 0 for "
        "a new template.",
    )

    def _convert_to_whole_cpus(self, millicores: int) -> int:
        cpus, rest = divmod(millicores, 1000)
        if rest:
            raise Invalid(f"'cpu' is {millicores} millicores, but must be a multiple of 1000: use whole CPUs")
        if self.cpus not in (None, cpus):
            raise Invalid(
                f"'cpu' is {millicores} millicores, but 'cpuCount' is {self.cpus}: specify only one of these fields"
            )
        return cpus

    def build_sizes(self) -> dict[str, int]:
        """Return the sizes in the request, as fields of ``Resources``. Raises Invalid."""
        sizes: dict[str, int] = self.model_dump(include={"cpus", "memory_mb", "disk_mb"}, exclude_none=True)
        if self.cpu is not None:
            sizes["cpus"] = self._convert_to_whole_cpus(self.cpu)
        if self.memory is not None:
            if self.memory_mb not in (None, self.memory):
                raise Invalid(
                    f"'memory' is {self.memory} MiB, but 'memoryMB' is {self.memory_mb}: specify only one of these "
                    "fields"
                )
            sizes["memory_mb"] = self.memory
        return sizes

    def build_login(self) -> RegistryLogin | None:
        """Return the login to the image's registry, if the request contains one. Raises Invalid."""
        if self.registry_username is None and self.registry_password is None:
            return None
        return _build_login(self.image or "", self.registry_username, self.registry_password)

    def build_recipe(self) -> Recipe:
        """Return the recipe, with defaults for missing fields. Raises Invalid."""
        sizes = self.build_sizes()
        recipe_fields = self.model_dump(
            exclude={*_NON_RECIPE_FIELDS, "cpus", "cpu", "memory_mb", "memory", "disk_mb"}, exclude_none=True
        )
        if self.source is None and self.image:
            recipe_fields["source"] = Source.IMAGE
        elif self.source is None and self.template:
            recipe_fields["source"] = Source.TEMPLATE
        try:
            recipe = Recipe(**recipe_fields, resources=Resources(**sizes))
        except ValidationError as error:
            raise Invalid(explain(error, to_json_name)) from None
        _check_debian_fields(recipe)
        return recipe


def _check_debian_fields(recipe: Recipe) -> None:
    """Raise Invalid if ``recipe`` has fields that its source ignores. Stored recipes of older gateways may have them.

    The default of `suite` is accepted, because responses and modules contain it for every source.
    """
    if recipe.source is Source.DEBOOTSTRAP:
        return
    for name in ("suite", "mirror"):
        if getattr(recipe, name) != Recipe.model_fields[name].default:
            raise Invalid(f"'{name}' is valid only with 'from: debootstrap': remove it, or set 'from: debootstrap'")


_TEMPLATE_FIELDS = frozenset(
    [*(field.alias or name for name, field in CreateTemplate.model_fields.items()), *CreateTemplate.refused_fields]
)


class AnnounceTemplate(NativeBody):
    """The first request of a build by E2B's client. `BuildFromImage` is the second one."""

    ignored_fields: ClassVar[Mapping[str, str]] = {"alias": "an older name for `name`", "teamID": "there are no teams"}
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "minFreeDiskMb": Refusal(
            "because a template's disk has 4096 MiB, or the size of the disk in 'fromTemplate': omit this field"
        ),
    }
    misplaced_fields: ClassVar[Mapping[str, Refusal]] = {
        **_refuse_misplaced(
            "`POST /templates`",
            dict.fromkeys(_TEMPLATE_FIELDS - {"name", "cpuCount", "memoryMB"}, "send the whole request there"),
        ),
        **_refuse_misplaced(
            "the second request of a build",
            dict.fromkeys(
                ("fromImage", "fromTemplate", "fromImageRegistry", "steps", "startCmd", "readyCmd", "force"),
                "send it to `POST /v2/templates/{}/builds/{}`",
            ),
        ),
    }

    name: TemplateName
    tags: Tags = Field(default_factory=list)
    cpus: int | None = Field(None, alias="cpuCount", strict=True, ge=1, le=256)
    memory_mb: int | None = Field(None, strict=True, ge=64, le=1 << 20)

    def build_names(self) -> list[str]:
        """Return NAME:TAG for each tag in `name` and `tags`, or NAME if there is none."""
        base_name, _, tag = self.name.partition(TAG_SEPARATOR)
        tags = [*([tag] if tag else []), *self.tags]
        return [f"{base_name}{TAG_SEPARATOR}{each}" for each in tags] or [base_name]

    def build_sizes(self) -> dict[str, int]:
        """Return the sizes in the request, as fields of ``Resources``."""
        return self.model_dump(include={"cpus", "memory_mb"}, exclude_none=True)


class ImageStep(NativeBody):
    ignored_fields: ClassVar[Mapping[str, str]] = {"force": "no step is cached"}

    type: str = Field(max_length=64)
    files_hash: str = Field("", max_length=64, description="The digest of the files of a `COPY` step.")
    args: list[Annotated[str, Field(max_length=MAX_COMMAND_LENGTH)]] = Field(default_factory=list, max_length=2000)


class BuildFromImage(NativeBody):
    ignored_fields: ClassVar[Mapping[str, str]] = {"force": "no step is cached"}
    misplaced_fields: ClassVar[Mapping[str, Refusal]] = {
        **_refuse_misplaced(
            "`POST /templates`",
            {
                **dict.fromkeys(_TEMPLATE_FIELDS, "send the whole request there"),
                "image": "use 'fromImage'",
                "template": "use 'fromTemplate'",
                "setup": "use 'steps'",
                "startCommand": "use 'startCmd'",
                "readyProbe": "use 'readyCmd'",
            },
        ),
        **_refuse_misplaced(
            "the first request of a build",
            dict.fromkeys(
                ("name", "tags", "alias", "teamID", "cpuCount", "memoryMB", "minFreeDiskMb"),
                "send it to `POST /v3/templates`",
            ),
        ),
    }

    from_image: str = Field("", max_length=MAX_IMAGE_LENGTH)
    from_template: str = Field("", max_length=MAX_REF_LENGTH)
    from_image_registry: ImageRegistry | None = None
    steps: list[ImageStep] = Field(default_factory=list, max_length=1000)
    start_cmd: str = Field("", max_length=MAX_COMMAND_LENGTH)
    ready_cmd: str = Field("", max_length=MAX_COMMAND_LENGTH)

    def build_login(self) -> RegistryLogin | None:
        """Return the login to the image's registry, if the request contains one. Raises Invalid."""
        return self.from_image_registry.build_login(self.from_image) if self.from_image_registry else None

    @model_validator(mode="after")
    def _check_source(self) -> BuildFromImage:
        if bool(self.from_image) == bool(self.from_template):
            raise ValueError("a build starts from an image or a template: send either 'fromImage' or 'fromTemplate'")
        if self.from_image_registry and not self.from_image:
            raise ValueError("'fromImageRegistry' is for an image: remove it, or send 'fromImage'")
        return self

    def build_recipe(self, sizes: Mapping[str, int]) -> Recipe:
        """Return the recipe. Raises Invalid, Unsupported.

        As in E2B, the image's own entry point is not started, but the start command of a template is.
        """
        steps = compile_steps(
            ((step.type, step.args, name_unchecked_archive(step.files_hash)) for step in self.steps), MAX_SETUP_BYTES
        )
        try:
            return Recipe(
                source=Source.IMAGE if self.from_image else Source.TEMPLATE,
                image=self.from_image,
                template=self.from_template,
                setup=steps.commands,
                start_command=steps.build_command(self.start_cmd)
                if self.start_cmd
                else "true"
                if self.from_image
                else "",
                ready_probe=steps.build_command(self.ready_cmd) if self.ready_cmd else "",
                ready_timeout=_IMAGE_READY_SECONDS,
                resources=Resources(**{"disk_mb": IMAGE_BUILD_DISK_MB, **sizes}),
            )
        except ValidationError as error:
            raise Invalid(explain(error, to_json_name)) from None
        except ValueError as error:
            raise Invalid(str(error)) from None


class RebuildTemplate(NativeBody):
    """A request to build a template again with the same recipe."""

    misplaced_fields: ClassVar[Mapping[str, Refusal]] = dict.fromkeys(
        sorted(_TEMPLATE_FIELDS | CreateTemplate.misplaced_fields.keys()),
        Refusal(
            "because a template is built again with its own recipe: send a changed recipe, with the template's name, "
            "to `POST /templates`"
        ),
    )
