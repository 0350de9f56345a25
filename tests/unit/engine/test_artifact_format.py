"""An artifact is read completely or refused with a clear message, whatever its manifest and config contain."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox_gateway.engine.transfer import artifact_format
from sandbox_gateway.engine.transfer.artifact_format import Contents, Descriptor, Place, SignedContents
from sandbox_gateway.engine.transfer.signing import Signer
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.validation import MAX_MEMBERS, explain
from tests.unit.engine.snapshot_file_samples import MIB, SIGNER, STREAM_PARTS, make_manifest

CHUNKS = {
    ("kernel", 0): b"k" * 5000,
    ("initrd", 0): b"i" * 5000,
    ("disk", 0): b"d" * MIB,
    ("disk", 5): b"e" * MIB,
    ("memory", 63): b"d" * MIB,
    ("device_state", 0): b"s" * 3000,
}


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_contents() -> Contents:
    manifest = make_manifest()
    indexes = {part.name.value: index for index, part in enumerate(manifest.parts)}
    chunks = [
        (Place(SnapshotPart(part), indexes[part], number * MIB, len(data)), digest_of(data))
        for (part, number), data in CHUNKS.items()
    ]
    return artifact_format.build_contents(manifest, [5000, 5000, 2 * MIB, MIB, 3000], ["0123456789cd"], chunks)


def make_layers() -> list[Descriptor]:
    blobs = [artifact_format.compress_chunk(data) for data in dict.fromkeys(CHUNKS.values())]
    return [artifact_format.describe_blob(blob, artifact_format.CHUNK_TYPE) for blob in blobs]


CONFIG = artifact_format.encode_config(make_contents(), SIGNER)
INDEX = artifact_format.encode_index(CONFIG, make_layers(), {"title": "x"})


def test_what_is_written_is_read() -> None:
    signed = artifact_format.parse_config(CONFIG)
    assert signed == SignedContents(make_contents(), SIGNER.public_key)
    index = artifact_format.parse_index(INDEX)
    assert index.config.digest == artifact_format.compute_blob_digest(CONFIG)
    layers = artifact_format.match_layers(signed.contents, index)
    assert layers == dict(zip(map(digest_of, dict.fromkeys(CHUNKS.values())), index.layers, strict=True))
    places = [(place.part.value, place.offset // MIB, place.length) for place, _ in signed.contents.iterate_chunks()]
    assert places == [(part, number, len(data)) for (part, number), data in CHUNKS.items()]


def test_equal_data_gives_equal_blobs() -> None:
    data = random.Random(1).randbytes(MIB // 2) + bytes(MIB // 2)
    blob = artifact_format.compress_chunk(data)
    assert artifact_format.compress_chunk(bytearray(data)) == blob
    assert artifact_format.decompress_chunk(blob, len(data), digest_of(data)) == data


def test_chunks_are_at_the_same_places_wherever_the_extents_are() -> None:
    manifest = make_manifest()

    def list_offsets(*extents: tuple[int, int]) -> list[int]:
        parts: Any = {part.name: [] for part in manifest.parts} | {SnapshotPart.DISK: extents}
        return [place.offset // MIB for place in artifact_format.list_places(manifest, parts)]

    assert list_offsets((0, 1), (4096, 8192), (MIB - 1, MIB + 1), (9 * MIB, 11 * MIB)) == [0, 1, 9, 10]
    assert list_offsets((MIB, 2 * MIB), (2 * MIB, 3 * MIB)) == [1, 2]


MANY_MEMBERS = b",".join(b'"%d":1' % number for number in range(300_000))
MANY_ITEMS = b"1," * 1_500_000 + b"1"


@pytest.mark.parametrize(
    "document",
    [
        b'{"artifactType":"%s",%s}' % (artifact_format.ARTIFACT_TYPE.encode(), members)
        for members in (
            MANY_MEMBERS,
            b'"annotations":{%s}' % MANY_MEMBERS,
            b'"config":{%s}' % MANY_MEMBERS,
            b'"layers":[%s]' % MANY_ITEMS,
            b'"layers":[%s]' % b",".join([b'{"a":1,"b":2}'] * 200_000),
        )
    ],
    ids=("unknown members", "annotations", "members of the config", "layers", "members of layers"),
)
def test_a_registry_cannot_send_a_manifest_with_many_errors(document: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic collects all errors of a document, and lets no other thread run meanwhile."""
    check_few_errors(monkeypatch, lambda: artifact_format.parse_index(document))


@pytest.mark.parametrize("part", ["chunks", "ancestors", "parts", "manifest"])
def test_a_registry_cannot_send_contents_with_many_errors(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = json.loads(json.loads(CONFIG)["contents"])
    if part == "chunks":
        contents["parts"][0]["chunks"] = [[-1, "x"]] * 19_000
    elif part == "manifest":
        contents["manifest"] = {str(number): 1 for number in range(100_000)}
    else:
        contents[part] = [1] * 300_000
    text = json.dumps(contents, separators=(",", ":"))
    config = {
        "version": 1,
        "public_key": SIGNER.public_key.hex(),
        "signature": SIGNER.sign(artifact_format._PURPOSE, text.encode()).hex(),
        "contents": text,
    }
    check_few_errors(monkeypatch, lambda: artifact_format.parse_config(json.dumps(config).encode()))


def check_few_errors(monkeypatch: pytest.MonkeyPatch, parse: Callable[[], object]) -> None:
    error_counts = []

    def explain_and_count(error: ValidationError) -> str:
        error_counts.append(error.error_count())
        return explain(error)

    monkeypatch.setattr(artifact_format, "explain", explain_and_count)
    with pytest.raises(Invalid):
        parse()
    assert error_counts[0] <= 2 * MAX_MEMBERS


@pytest.mark.parametrize(
    ("size", "chunk_bytes"), [(1, MIB), (4096 * MIB, MIB), (4096 * MIB + 1, 2 * MIB), (1 << 46, 16 * MIB)]
)
def test_larger_parts_have_larger_chunks(size: int, chunk_bytes: int) -> None:
    assert artifact_format.choose_chunk_bytes(size) == chunk_bytes


def test_a_snapshot_with_too_much_data_is_refused() -> None:
    parts = [{"name": name, "size": 1 << 30, "data_bytes": 0} for name in ("kernel", "initrd")]
    parts.append({"name": "disk", "size": 1 << 40, "data_bytes": 1 << 40})
    manifest = make_manifest(
        parts=parts, platform=None, line=False, sizes={"cpus": 1, "memory_mb": 64, "disk_mb": 1 << 20}
    )
    extents: Any = {part.name: [(0, part.size)] for part in manifest.parts}
    with pytest.raises(Unsupported, match="more than 20000 chunks"):
        artifact_format.list_places(manifest, extents)


def test_the_largest_artifact_fits_into_its_documents() -> None:
    manifest = make_manifest(
        parts=[
            {"name": "kernel", "size": 5000, "data_bytes": 5000},
            {"name": "initrd", "size": 5000, "data_bytes": 5000},
            {"name": "disk", "size": 1 << 40, "data_bytes": 1 << 40},
        ],
        platform=None,
        line=False,
        sizes={"cpus": 1, "memory_mb": 64, "disk_mb": 1 << 20},
    )
    count = artifact_format.MAX_CHUNKS
    chunks = [
        (Place(SnapshotPart.DISK, 2, (40_000 + number) << 24, 1 << 24), f"{number:064x}") for number in range(count)
    ]
    contents = artifact_format.build_contents(manifest, [5000, 5000, 1 << 40], ["0123456789cd"] * 16, chunks)
    config = artifact_format.encode_config(contents, SIGNER)
    layer = Descriptor(mediaType=artifact_format.CHUNK_TYPE, digest=f"sha256:{'a' * 64}", size=16_777_216)
    index = artifact_format.encode_index(config, [layer] * count, {"title": "x" * 64})
    assert max(len(config), len(index)) <= artifact_format.MAX_DOCUMENT_BYTES
    assert len(artifact_format.parse_index(index).layers) == count
    assert artifact_format.parse_config(config).contents == contents


def change(document: bytes, *path: Any, value: Any) -> bytes:
    """Return a document with one changed field; ``value`` None removes it."""
    data = json.loads(document)
    target = data
    for key in path[:-1]:
        target = target[key]
    if value is None:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        change(INDEX, "schemaVersion", value=1),
        change(INDEX, "mediaType", value="application/json"),
        change(INDEX, "artifactType", value=None),
        change(INDEX, "artifactType", value={"a": 1}),
        change(INDEX, "unknown", value=1),
        change(INDEX, "layers", value=[{}]),
        change(INDEX, "layers", 0, "size", value=-1),
        change(INDEX, "layers", 0, "size", value="5"),
        change(INDEX, "layers", 0, "digest", value="sha256:../../../../etc/passwd"),
        change(INDEX, "layers", 0, "digest", value="sha256:" + "A" * 64),
        change(INDEX, "layers", 0, "digest", value="sha256:" + "a" * 64 + "\n"),
        change(INDEX, "layers", 0, "urls", value=["http://evil.example/"]),
        change(INDEX, "layers", 0, "mediaType", value="text/plain"),
        change(INDEX, "config", "size", value=5 << 20),
        change(INDEX, "config", "mediaType", value="text/plain"),
        change(INDEX, "annotations", value={"a": "b" * 5000}),
    ],
)
def test_an_invalid_manifest_is_refused(document: bytes) -> None:
    with pytest.raises(Invalid):
        artifact_format.parse_index(document)


def sign(contents: str, signer: Signer = SIGNER) -> bytes:
    config = json.loads(CONFIG)
    config["contents"] = contents
    config["signature"] = signer.sign(b"snapshot artifact", contents.encode()).hex()
    return json.dumps(config).encode()


def make_signed(*path: Any, value: Any) -> bytes:
    """Return a config with a changed field in its contents and a valid signature."""
    return sign(change(json.loads(CONFIG)["contents"].encode(), *path, value=value).decode())


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        change(CONFIG, "version", value=0),
        change(CONFIG, "signature", value="00" * 64),
        change(CONFIG, "signature", value="x"),
        change(CONFIG, "public_key", value=Signer(b"o" * 32).public_key.hex()),
        change(CONFIG, "contents", value=json.loads(CONFIG)["contents"] + " "),
        change(CONFIG, "unknown", value=1),
        sign("{}", Signer(b"o" * 32)),
        sign("{}"),
        sign("[" * 100_000),
        make_signed("unknown", value=1),
        make_signed("ancestors", value=["x"]),
        make_signed("ancestors", value=["0123456789ab"] * 17),
        make_signed("manifest", "snapshot_id", value="../.."),
        make_signed("manifest", "names", value=["a/b"]),
        make_signed("manifest", "kind", value="volume"),
        make_signed("parts", 0, "part", value="disk"),
        make_signed("parts", 4, value=None),
        make_signed("parts", 2, "chunk_bytes", value=MIB + 1),
        make_signed("parts", 2, "chunk_bytes", value=4096),
        make_signed("parts", 2, "chunk_bytes", value=32 * MIB),
        make_signed("parts", 2, "chunks", value=[[5, "a" * 64], [0, "a" * 64]]),
        make_signed("parts", 2, "chunks", value=[[5, "a" * 64], [5, "a" * 64]]),
        make_signed("parts", 2, "chunks", value=[[64, "a" * 64]]),
        make_signed("parts", 2, "chunks", value=[[-1, "a" * 64]]),
        make_signed("parts", 2, "chunks", value=[[0, "A" * 64]]),
        make_signed("parts", 2, "chunks", value=[[0, "a" * 64, 1]]),
        make_signed("parts", 2, "chunks", value=[["0", "a" * 64]]),
    ],
)
def test_an_invalid_config_is_refused(config: bytes) -> None:
    with pytest.raises(Invalid):
        artifact_format.parse_config(config)


def test_an_artifact_contains_a_whole_stream() -> None:
    manifest = make_manifest(host_kind="jail_zfs", platform=None, line=False, parts=STREAM_PARTS, encoding="compressed")
    contents = artifact_format.build_contents(
        manifest, [5000], [], [(Place(SnapshotPart.STREAM, 0, 0, 5000), "a" * 64)]
    )
    text = contents.model_dump_json()
    assert artifact_format.parse_config(sign(text)).contents == contents
    continuing_text = change(text.encode(), "manifest", "continues", value=True).decode()
    with pytest.raises(Invalid, match="continues an import"):
        artifact_format.parse_config(sign(continuing_text))


def test_a_newer_version_is_refused_with_a_remedy() -> None:
    with pytest.raises(Unsupported, match="upgrade this gateway"):
        artifact_format.parse_config(change(CONFIG, "version", value=2))


@settings(deadline=None)
@given(st.data())
def test_no_change_of_a_byte_is_accepted_as_the_same_contents(data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(CONFIG) - 1))
    changed_config = bytearray(CONFIG)
    changed_config[position] ^= data.draw(st.integers(1, 255))
    try:
        signed = artifact_format.parse_config(bytes(changed_config))
    except GatewayError:
        return
    assert signed == artifact_format.parse_config(CONFIG)


def test_layers_match_the_table() -> None:
    contents, index = make_contents(), artifact_format.parse_index(INDEX)
    for layers in (index.layers[1:], [*index.layers, index.layers[0]]):
        with pytest.raises(Invalid, match="layers"):
            artifact_format.match_layers(contents, index.model_copy(update={"layers": layers}))
    large_layer = index.layers[0].model_copy(update={"size": 10_000})
    with pytest.raises(Invalid, match="larger than the chunk"):
        artifact_format.match_layers(contents, index.model_copy(update={"layers": [large_layer, *index.layers[1:]]}))


def test_a_blob_that_is_not_its_chunk_is_refused() -> None:
    data = b"d" * MIB
    other_frames = [
        b"",
        b"noise",
        artifact_format.compress_chunk(b"x" * MIB),
        artifact_format.compress_chunk(data[1:]),
        artifact_format.compress_chunk(bytes(200 * MIB)),
        artifact_format.compress_chunk(data) + b"x",
        artifact_format.compress_chunk(data)[:-1],
        artifact_format.compress_chunk(data) * 2,
        zstandard.ZstdCompressor(write_content_size=False).compress(data),
    ]
    for frame in other_frames:
        with pytest.raises(Invalid):
            artifact_format.decompress_chunk(frame, MIB, digest_of(data))


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ("", []),
        ("0", []),
        ("1", [(0, 1)]),
        ("0110", [(1, 3)]),
        ("10101", [(0, 1), (2, 3), (4, 5)]),
        ("0011", [(2, 4)]),
    ],
)
def test_only_blocks_with_data_are_written(blocks: str, runs: list[tuple[int, int]]) -> None:
    data = b"".join(bytes(4095) + bytes([int(block)]) for block in blocks)
    assert list(artifact_format.list_data_runs(data)) == [(start * 4096, end * 4096) for start, end in runs]
    assert list(artifact_format.list_data_runs(data + b"\0\1"))[-1:] == [
        (runs[-1][0] * 4096 if blocks.endswith("1") else len(data), len(data) + 2)
    ]
