"""The format of a snapshot in an OCI registry.

An artifact is an OCI image manifest. Its config is a JSON document with the manifest of a snapshot file, a table of
chunks, and a signature of both. Its layers are the chunks, one zstd frame each, in the order in which the table first
names their digests.

Every part of a snapshot is divided into chunks at multiples of the chunk size, which depends only on the size of the
part. A chunk contains its whole range of the part, so its bytes depend only on the contents of the part, and equal
chunks of different snapshots are the same blob. Chunks of zeros are left out.

The table names the SHA-256 of the uncompressed data of each chunk, so the signature covers every byte of a snapshot.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import zstandard
from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from sandbox_gateway.engine.transfer.container import BLOCK_BYTES
from sandbox_gateway.engine.transfer.manifest import MAX_ANCESTORS, Manifest
from sandbox_gateway.engine.transfer.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Signer, has_valid_signature
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.records import Id
from sandbox_gateway.validation import ForeignObject, check_member_count, explain

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.grove.sandbox.snapshot.v1"
CONFIG_TYPE = "application/vnd.grove.sandbox.snapshot.config.v1+json"
CHUNK_TYPE = "application/vnd.grove.sandbox.snapshot.chunk.v1+zstd"

VERSION = 1
MAX_DOCUMENT_BYTES = 4 << 20
"""The maximum size of the manifest and of the config. Registries accept manifests of at least this size."""
MAX_CHUNKS = 20_000
"""The maximum number of chunks, whose descriptors fit into a manifest of MAX_DOCUMENT_BYTES."""
_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 16 << 20
_CHUNKS_PER_PART = 4096
"""A part with more chunks than this has larger ones."""
_MAX_ANNOTATION_BYTES = 4096
_PURPOSE = b"snapshot artifact"
_DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
_ZEROS = bytes(BLOCK_BYTES)


_HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PartChunks(ForeignObject):
    """The chunks of a part: the number of each, which is its offset in chunks, and the SHA-256 of its data."""

    part: SnapshotPart
    chunk_bytes: int = Field(ge=_MIN_CHUNK_BYTES, le=_MAX_CHUNK_BYTES, strict=True)
    chunks: list[tuple[Annotated[int, Field(ge=0, strict=True)], _HexDigest]] = Field(
        max_length=MAX_CHUNKS, fail_fast=True
    )


@dataclass(frozen=True)
class Place:
    """The range of a part that a chunk contains. ``index``: the index of the part in the manifest."""

    part: SnapshotPart
    index: int
    offset: int
    length: int


class Contents(ForeignObject):
    """The signed part of an artifact's config."""

    manifest: Manifest
    ancestors: list[Id] = Field(max_length=MAX_ANCESTORS, fail_fast=True)
    """Ids, in the gateway that pushed it, of snapshots that probably share chunks with it. The nearest is first."""
    parts: list[PartChunks] = Field(max_length=len(SnapshotPart), fail_fast=True)

    @model_validator(mode="after")
    def _check_parts(self) -> Contents:
        if self.manifest.continues:
            raise ValueError("the manifest is that of a file that continues an import")
        if self.manifest.base is not None:
            raise ValueError("the manifest is that of a file that needs another snapshot")
        if [each.part for each in self.parts] != [each.name for each in self.manifest.parts]:
            raise ValueError("the parts in the table of chunks differ from those in the manifest")
        if sum(len(each.chunks) for each in self.parts) > MAX_CHUNKS:
            raise ValueError(f"the table has more than {MAX_CHUNKS} chunks")
        for part, table in zip(self.manifest.parts, self.parts, strict=True):
            numbers = [number for number, _ in table.chunks]
            if table.chunk_bytes % BLOCK_BYTES or any(a >= b for a, b in itertools.pairwise(numbers)):
                raise ValueError(f"the chunks of {part.name} are not in the required order")
            if numbers and numbers[-1] * table.chunk_bytes >= part.size:
                raise ValueError(f"a chunk of {part.name} is out of place")
        return self

    def iterate_chunks(self) -> Iterator[tuple[Place, str]]:
        """Yield the place of each chunk, and the SHA-256 of its data."""
        for index, (part, table) in enumerate(zip(self.manifest.parts, self.parts, strict=True)):
            for number, digest in table.chunks:
                offset = number * table.chunk_bytes
                yield Place(part.name, index, offset, min(table.chunk_bytes, part.size - offset)), digest


class Descriptor(ForeignObject):
    """The digest of a blob, which contains `sha256:`, and its size in bytes."""

    mediaType: Annotated[str, Field(max_length=255)]
    digest: Annotated[str, StringConstraints(pattern=_DIGEST_PATTERN)]
    size: int = Field(ge=1, strict=True)


class _ConfigDescriptor(Descriptor):
    mediaType: Literal["application/vnd.grove.sandbox.snapshot.config.v1+json"]
    size: int = Field(ge=1, le=MAX_DOCUMENT_BYTES, strict=True)


class _ChunkDescriptor(Descriptor):
    mediaType: Literal["application/vnd.grove.sandbox.snapshot.chunk.v1+zstd"]


class Index(ForeignObject):
    """The OCI image manifest of an artifact."""

    schemaVersion: Literal[2]
    mediaType: Literal["application/vnd.oci.image.manifest.v1+json"]
    artifactType: Literal["application/vnd.grove.sandbox.snapshot.v1"]
    config: _ConfigDescriptor
    layers: list[_ChunkDescriptor] = Field(max_length=MAX_CHUNKS, fail_fast=True)
    annotations: Annotated[
        dict[Annotated[str, Field(max_length=255)], Annotated[str, Field(max_length=_MAX_ANNOTATION_BYTES)]],
        BeforeValidator(check_member_count),
    ] = Field(default_factory=dict, max_length=64)


class _Config(ForeignObject):
    version: int = Field(ge=1, strict=True)
    public_key: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{2 * PUBLIC_KEY_BYTES}}}$")]
    signature: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{2 * SIGNATURE_BYTES}}}$")]
    contents: str


@dataclass(frozen=True)
class SignedContents:
    contents: Contents
    public_key: bytes


def choose_chunk_bytes(part_size: int) -> int:
    """Return the size of a part's chunks: a larger part has larger ones, so that an artifact has fewer blobs."""
    chunk_bytes = _MIN_CHUNK_BYTES
    while chunk_bytes < _MAX_CHUNK_BYTES and part_size > chunk_bytes * _CHUNKS_PER_PART:
        chunk_bytes *= 2
    return chunk_bytes


def list_places(manifest: Manifest, extents: Mapping[SnapshotPart, Iterable[tuple[int, int]]]) -> list[Place]:
    """Return the places of the chunks that overlap with ``extents``, in order. Raises Unsupported for too many."""
    places: list[Place] = []
    for index, part in enumerate(manifest.parts):
        chunk_bytes = choose_chunk_bytes(part.size)
        next_number = 0
        for start, end in extents[part.name]:
            for number in range(max(next_number, start // chunk_bytes), -(-end // chunk_bytes)):
                offset = number * chunk_bytes
                places.append(Place(part.name, index, offset, min(chunk_bytes, part.size - offset)))
                next_number = number + 1
                if len(places) > MAX_CHUNKS:
                    raise Unsupported(
                        f"the snapshot has data in more than {MAX_CHUNKS} chunks, the maximum of an artifact: export "
                        "it to a file with `sandboxctl snapshot export`"
                    )
    return places


def build_contents(
    manifest: Manifest, data_bytes: Sequence[int], ancestors: Sequence[str], chunks: Iterable[tuple[Place, str]]
) -> Contents:
    """Return the contents of an artifact. ``chunks``: the chunks in order, and the SHA-256 of each; "" for zeros.

    ``data_bytes``: the size of each part's blocks that are not zero. The extents of a file, from which ``manifest`` has
    it, can change when the file is read, and the config of a snapshot would change with them.
    """
    sized_parts = [
        part.model_copy(update={"data_bytes": size}) for part, size in zip(manifest.parts, data_bytes, strict=True)
    ]
    manifest = manifest.model_copy(update={"parts": sized_parts, "ancestors": []})
    tables: list[list[tuple[int, str]]] = [[] for _ in manifest.parts]
    for place, digest in chunks:
        if digest:
            tables[place.index].append((place.offset // choose_chunk_bytes(manifest.parts[place.index].size), digest))
    parts = [
        PartChunks(part=part.name, chunk_bytes=choose_chunk_bytes(part.size), chunks=table)
        for part, table in zip(manifest.parts, tables, strict=True)
    ]
    return Contents(manifest=manifest, ancestors=list(ancestors), parts=parts)


def compress_chunk(data: bytes) -> bytes:
    """Return the blob of a chunk. Equal data gives equal bytes. Threads can call this in parallel."""
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def decompress_chunk(blob: bytes, length: int, digest: str) -> bytes:
    """Return the ``length`` bytes of a chunk, whose SHA-256 is ``digest``. Raises Invalid."""
    try:
        parameters = zstandard.get_frame_parameters(blob)
        # The frame's own size determines how much is allocated.
        if parameters.content_size != length or parameters.window_size > _MAX_CHUNK_BYTES:
            raise _create_damage_error("a chunk does not have the length that the table states")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_CHUNK_BYTES)
        data: bytes = decompressor.decompress(blob, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError:
        raise _create_damage_error("a chunk cannot be decompressed") from None
    if len(data) != length or hashlib.sha256(data).hexdigest() != digest:
        raise _create_damage_error("the digest of a chunk does not match")
    return data


def get_max_blob_bytes(length: int) -> int:
    """Return the maximum size of the blob of a chunk with ``length`` bytes."""
    return length + (length >> 7) + 1024


def list_data_runs(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each range of whole blocks in ``data`` that are not zero.

    Only these are written to an image, so that its holes stay holes.
    """
    run_start = None
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        if block != _ZEROS[: len(block)]:
            run_start = start if run_start is None else run_start
        elif run_start is not None:
            yield run_start, start
            run_start = None
    if run_start is not None:
        yield run_start, len(data)


def encode_config(contents: Contents, signer: Signer) -> bytes:
    text = contents.model_dump_json()
    return _dump(
        {
            "version": VERSION,
            "public_key": signer.public_key.hex(),
            "signature": signer.sign(_PURPOSE, text.encode()).hex(),
            "contents": text,
        }
    )


def parse_config(data: bytes) -> SignedContents:
    """Return the contents, whose signature is valid. Raises Invalid, or Unsupported for a newer version."""
    try:
        config = _Config.model_validate_json(data)
    except ValidationError as error:
        raise _create_damage_error(f"its config is invalid: {explain(error)[:500]}") from None
    if config.version > VERSION:
        raise Unsupported(
            f"the artifact has format version {config.version}, which a newer release of the gateway wrote; this "
            f"release reads versions up to {VERSION}: upgrade this gateway"
        )
    public_key, text = bytes.fromhex(config.public_key), config.contents.encode()
    if not has_valid_signature(public_key, bytes.fromhex(config.signature), _PURPOSE, text):
        raise _create_damage_error("the signature of its config does not match")
    try:
        return SignedContents(Contents.model_validate_json(text), public_key)
    except ValidationError as error:
        raise _create_damage_error(f"its contents are invalid: {explain(error)[:500]}") from None


def encode_index(config: bytes, layers: Sequence[Descriptor], annotations: dict[str, str]) -> bytes:
    return _dump(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": describe_blob(config, CONFIG_TYPE).model_dump(),
            "layers": [each.model_dump() for each in layers],
            "annotations": {key: value[:_MAX_ANNOTATION_BYTES] for key, value in annotations.items()},
        }
    )


def parse_index(data: bytes) -> Index:
    """Return the OCI manifest in ``data``. Raises Invalid if it is not the manifest of an artifact of this format."""
    try:
        document = json.loads(data)
        kind = document.get("artifactType")
    except (ValueError, RecursionError, AttributeError):
        raise _create_damage_error("its manifest is not JSON") from None
    if kind != ARTIFACT_TYPE:
        raise Invalid(
            f"the reference names {str(kind or 'an image')[:100]!r}, not a snapshot: use a reference that "
            "`sandboxctl snapshot push` has written"
        )
    try:
        return Index.model_validate(document)
    except ValidationError as error:
        raise _create_damage_error(f"its manifest is invalid: {explain(error)[:500]}") from None


def match_layers(contents: Contents, index: Index) -> dict[str, Descriptor]:
    """Return the blob of each chunk, by the SHA-256 of the chunk's data. Raises Invalid."""
    lengths: dict[str, int] = {}
    for place, digest in contents.iterate_chunks():
        if lengths.setdefault(digest, place.length) != place.length:
            raise _create_damage_error("two chunks with different lengths have the same digest")
    if len(lengths) != len(index.layers):
        raise _create_damage_error(f"it has {len(index.layers)} layers, but {len(lengths)} different chunks")
    for length, layer in zip(lengths.values(), index.layers, strict=True):
        if layer.size > get_max_blob_bytes(length):
            raise _create_damage_error("a layer is larger than the chunk in it")
    return dict(zip(lengths, index.layers, strict=True))


def describe_blob(data: bytes, media_type: str) -> Descriptor:
    return Descriptor(mediaType=media_type, digest=compute_blob_digest(data), size=len(data))


def compute_blob_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_blob_digest(text: str) -> bool:
    return re.fullmatch(_DIGEST_PATTERN, text) is not None


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _create_damage_error(reason: str) -> Invalid:
    return Invalid(f"the artifact is damaged: {reason}. Push the snapshot again")
