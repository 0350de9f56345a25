"""The manifest of a snapshot file: what the file says about the snapshot of a sandbox or volume in it.

A file can come from anywhere. Each field is therefore limited to the values that a gateway writes, and none becomes a
path or an argument: a host uses its own file names, and compares the platform with its own instead of using it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.base import MACHINE_PARTS, MEMORY_PARTS, SnapshotPart, StreamEncoding
from sandbox_gateway.records import Id, Name
from sandbox_gateway.validation import ForeignObject, explain

MAX_MANIFEST_BYTES = 64 << 10
MAX_ANCESTORS = 16
_MAX_IMAGE_BYTES = 1 << 46
_MAX_DEVICE_STATE_BYTES = 64 << 20
_MAX_BOOT_FILE_BYTES = 1 << 30


_MAX_BYTES = {
    SnapshotPart.KERNEL: _MAX_BOOT_FILE_BYTES,
    SnapshotPart.INITRD: _MAX_BOOT_FILE_BYTES,
    SnapshotPart.DISK: _MAX_IMAGE_BYTES,
    SnapshotPart.MEMORY: _MAX_IMAGE_BYTES,
    SnapshotPart.DEVICE_STATE: _MAX_DEVICE_STATE_BYTES,
    SnapshotPart.STREAM: _MAX_IMAGE_BYTES,
    SnapshotPart.VOLUME: _MAX_IMAGE_BYTES,
}


class Part(ForeignObject):
    """A part of the snapshot. The bytes that no chunk contains are zero, or as in the base: see ``Base.parts``."""

    name: SnapshotPart
    size: int = Field(ge=1, le=_MAX_IMAGE_BYTES, strict=True)
    data_bytes: int = Field(ge=0, strict=True)
    """The maximum total length of the part's chunks, from which the importing host estimates the space it needs."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Part:
        if self.size > _MAX_BYTES[self.name]:
            raise ValueError(f"{self.name} may be at most {_MAX_BYTES[self.name] >> 20} MiB")
        if self.data_bytes > self.size:
            raise ValueError(f"{self.name} has more data than its size allows")
        return self


class Sizes(ForeignObject):
    """The resources of a sandbox: see ``records.Resources``."""

    cpus: int = Field(ge=1, le=256, strict=True)
    memory_mb: int = Field(ge=64, le=1 << 20, strict=True)
    disk_mb: int = Field(ge=64, le=1 << 26, strict=True)


_Word = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,_+:()/=~-]*$")]


class MachinePlatform(ForeignObject):
    """The platform on which the memory was captured. Memory can be restored only on an identical platform."""

    accelerator: _Word
    cpu_model: _Word
    machine: _Word
    qemu_version: _Word


def _check_text(text: str) -> str:
    if remove_control_characters(text) != text:
        raise ValueError("must not contain control characters")
    return text


class _AnyManifest(ForeignObject):
    snapshot_id: Id
    """The id of the snapshot in the gateway that exported it. The importing gateway assigns a new id."""
    release: _Word
    """The release of the gateway that exported it."""
    host_kind: Literal["kvm_xfs", "jail_zfs"]
    encoding: StreamEncoding = StreamEncoding.PLAIN
    """How the blocks in the stream of a jail host are stored."""

    @model_validator(mode="after")
    def _check_encoding(self) -> Self:
        if self.encoding is not StreamEncoding.PLAIN and self.host_kind != "jail_zfs":
            raise ValueError("only the stream of a jail host can be compressed or raw")
        return self


class VolumeManifest(_AnyManifest):
    """The manifest of a snapshot of a volume."""

    kind: Literal["volume"]
    name: Name
    """The name of the volume."""
    snapshot_name: Name
    size_mb: int = Field(ge=64, le=1 << 26, strict=True)
    parts: list[Part] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _check_part(self) -> VolumeManifest:
        (part,) = self.parts
        expected_name = SnapshotPart.STREAM if self.host_kind == "jail_zfs" else SnapshotPart.VOLUME
        if part.name is not expected_name:
            raise ValueError(f"the part is {part.name}, not {expected_name}")
        if part.name is SnapshotPart.VOLUME and part.size != self.size_mb << 20:
            raise ValueError("the size of the image does not match size_mb")
        return self


class Base(ForeignObject):
    """The snapshot since which another one was exported."""

    guid: int | None = Field(None, ge=1, lt=1 << 64, strict=True)
    """The number by which ZFS recognizes the snapshot in every pool that has received it. None: there is no stream."""
    snapshot_id: Id
    """Its id in the gateway that exported the file. Without a guid, the importing host finds its copy by this id."""
    parts: list[SnapshotPart] = Field(default_factory=list, max_length=len(SnapshotPart))
    """The parts of which the file contains only what differs, if there is no stream."""
    names: list[Name] = Field(default_factory=list, max_length=16)
    """Its names there, for messages."""


class Manifest(_AnyManifest):
    """The manifest of a sandbox's snapshot, or of a template."""

    kind: Literal["snapshot", "template"]
    names: list[Name] = Field(max_length=16)
    description: Annotated[str, Field(max_length=4096), AfterValidator(_check_text)]
    architecture: _Word
    sizes: Sizes
    platform: MachinePlatform | None
    """None: the snapshot has no memory."""
    line: bool = Field(strict=True)
    """Whether the agent in the captured memory listens on its serial line."""
    continues: bool = Field(False, strict=True)
    """Whether the stream begins where an interrupted import of the same snapshot ended."""
    base: Base | None = None
    """The snapshot that the importing host needs, because the stream contains only what differs from it."""
    ancestors: list[Id] = Field(default_factory=list, max_length=MAX_ANCESTORS)
    """Ids, in the gateway that exported it, of snapshots that probably share data with it. The nearest is first."""
    parts: list[Part] = Field(max_length=len(SnapshotPart))

    @model_validator(mode="after")
    def _check_parts(self) -> Manifest:
        names = [part.name for part in self.parts]
        if names != [name for name in SnapshotPart if name in names]:
            raise ValueError("the parts are not in the required order, or one occurs twice")
        if self.continues and self.encoding is StreamEncoding.PLAIN:
            raise ValueError("only a compressed or raw stream can continue an import")
        if self.base is not None and (self.base.guid is not None) != (self.host_kind == "jail_zfs"):
            raise ValueError("a base has a guid if, and only if, it is a snapshot of a jail host")
        if self.base is not None and not set(self.base.parts) <= set(names) - {
            SnapshotPart.DEVICE_STATE,
            SnapshotPart.STREAM,
        }:
            raise ValueError("the base has parts that the file lacks, or that cannot be relative")
        if self.base is not None and self.continues:
            raise ValueError("a stream that needs another snapshot cannot continue an import")
        if self.host_kind == "jail_zfs":
            if self.platform or self.line:
                raise ValueError("a snapshot of a jail cannot contain memory")
            expected_names = frozenset({SnapshotPart.STREAM})
        else:
            expected_names = MACHINE_PARTS | MEMORY_PARTS if self.platform else MACHINE_PARTS
        if set(names) != expected_names:
            raise ValueError(f"the parts are {', '.join(names) or 'missing'}, not {', '.join(sorted(expected_names))}")
        sizes = {part.name: part.size for part in self.parts}
        if sizes.get(SnapshotPart.DISK, 0) > self.sizes.disk_mb << 20:
            raise ValueError("the disk is larger than disk_mb")
        if self.platform and sizes[SnapshotPart.MEMORY] != self.sizes.memory_mb << 20:
            raise ValueError("the size of the memory image does not match memory_mb")
        return self

    @property
    def has_memory(self) -> bool:
        return self.platform is not None

    def sum_data_bytes(self, *, memory: bool) -> int:
        return sum(part.data_bytes for part in self.parts if memory or part.name not in MEMORY_PARTS)

    def get_part_sizes(self, *, memory: bool) -> dict[SnapshotPart, int]:
        """Return the size of each part. ``memory``: include the parts of the memory."""
        return {part.name: part.size for part in self.parts if memory or part.name not in MEMORY_PARTS}


_PARSER: TypeAdapter[Manifest | VolumeManifest] = TypeAdapter(
    Annotated[Manifest | VolumeManifest, Field(discriminator="kind")]
)


def parse_manifest(text: bytes) -> Manifest | VolumeManifest:
    """Return the manifest in ``text``. Raises Invalid."""
    try:
        return _PARSER.validate_json(text)
    except ValidationError as error:
        raise Invalid(
            f"the manifest of the snapshot file is invalid: {explain(error)[:500]}. Export the snapshot again"
        ) from None
