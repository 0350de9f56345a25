"""A snapshot file is read completely or refused with a clear message, whatever bytes it contains."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.engine.transfer import container
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, MAGIC, Chunk, Decoder, Encoder, compress_chunk
from sandbox_gateway.engine.transfer.manifest import Manifest, parse_manifest
from sandbox_gateway.engine.transfer.signing import Signer, check_fingerprint, compute_fingerprint
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from sandbox_gateway.hosts.base import SnapshotPart
from tests.unit.engine.snapshot_file_samples import (
    CHUNKS,
    EDGES,
    FILE,
    JAIL_FIELDS,
    MIB,
    SIGNER,
    STREAM_PARTS,
    make_file,
    make_manifest,
    make_manifest_fields,
)


def make_changed_parts(name: str, size: int, data_bytes: int) -> dict[str, Any]:
    part = {"name": name, "size": size, "data_bytes": data_bytes}
    return {"parts": [part if each["name"] == name else each for each in make_manifest_fields()["parts"]]}


BASE: dict[str, Any] = {"guid": (1 << 64) - 1, "snapshot_id": "ba9876543210", "names": ["monday"]}


def decode_file(file: bytes, piece_bytes: int = 1 << 16) -> list[Chunk]:
    decoder, chunks = Decoder(), []
    for start in range(0, len(file), piece_bytes):
        decoder.feed(file[start : start + piece_bytes])
        chunks += decoder.read_chunks()
    decoder.close()
    return chunks


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_a_file_is_read_back_in_pieces_of_any_size(piece_bytes: int) -> None:
    chunks = decode_file(FILE, piece_bytes)
    expected = [(list(SnapshotPart)[index], offset, data) for index, offset, data in CHUNKS]
    assert [(chunk.part.name, chunk.offset, chunk.data) for chunk in chunks] == expected


def test_the_base_of_an_incremental_file_is_authentic_and_absent_in_whole_files() -> None:
    """Releases that do not know the field refuse a file that has it, because they refuse every unknown field."""
    file, _ = make_file([(0, 0, b"stream".ljust(4096))], **JAIL_FIELDS, base=BASE)
    decoder = Decoder()
    decoder.feed(file)
    manifest = decoder.read_manifest()
    assert isinstance(manifest, Manifest) and manifest.base is not None
    assert manifest.base.model_dump(exclude_defaults=True) == BASE
    with pytest.raises(Invalid, match="signature"):
        decode_file(file.replace(str(BASE["guid"]).encode(), str(BASE["guid"] - 1).encode()))
    assert b'"base"' not in make_file([(0, 0, b"stream".ljust(4096))], **JAIL_FIELDS)[0]


def test_a_decoder_returns_the_manifest_and_the_signer() -> None:
    decoder = Decoder()
    decoder.feed(FILE)
    assert decoder.read_manifest() == make_manifest()
    assert compute_fingerprint(decoder.public_key) == SIGNER.fingerprint


def test_a_file_cut_at_any_byte_is_refused() -> None:
    for size in range(len(FILE)):
        with pytest.raises(Invalid, match=r"^the snapshot file is (empty|incomplete: it ends after \d+ bytes\. )"):
            decode_file(FILE[:size])


def test_a_large_file_cut_at_record_boundaries_or_elsewhere_is_refused() -> None:
    noise = random.Random(1).randbytes(CHUNK_BYTES)
    file, edges = make_file([(2, number * CHUNK_BYTES, noise) for number in range(8)])
    places = {edge + shift for edge in edges[:-1] for shift in (-1, 0, 1) if edge + shift >= 0}
    places |= {random.Random(2).randrange(len(file)) for _ in range(50)}
    for size in places:
        with pytest.raises(Invalid, match=r"is (empty|incomplete)"):
            decode_file(file[:size], CHUNK_BYTES)
    assert len(decode_file(file, CHUNK_BYTES)) == 8


def test_any_changed_byte_is_detected() -> None:
    for position in range(len(FILE)):
        changed_file = bytearray(FILE)
        changed_file[position] ^= 1 << position % 8
        with pytest.raises((Invalid, Unsupported)):
            decode_file(bytes(changed_file))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([0, len(MAGIC) + 2, *EDGES]))
def test_random_bytes_are_refused_with_a_message(noise: bytes, start: int) -> None:
    if start == len(FILE) and not noise:
        return
    with pytest.raises(GatewayError) as error_info:
        decode_file(FILE[:start] + noise)
    assert error_info.value.kind in ("invalid", "unsupported") and len(error_info.value.message) < 700


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(CHUNKS)), st.integers(0, len(CHUNKS)))
def test_missing_duplicate_and_moved_records_are_refused(first: int, second: int) -> None:
    records = [FILE[start:end] for start, end in pairwise(EDGES)]
    moved_records = [*records]
    moved_records[first], moved_records[second] = moved_records[second], moved_records[first]
    for changed_records in (
        [*records[:first], *records[first + 1 :]],
        [*records[: first + 1], *records[first:]],
        moved_records,
    ):
        if changed_records != records:
            with pytest.raises(Invalid):
                decode_file(b"".join(changed_records))


def test_a_file_that_continues_after_its_end_is_refused() -> None:
    with pytest.raises(Invalid, match="contains data after the end record"):
        decode_file(FILE + b"\0")


def test_a_file_of_a_newer_version_is_refused() -> None:
    file = MAGIC + b"\x00\x03" + b"whatever a newer release writes"
    with pytest.raises(Unsupported, match=r"format version 3, which a newer release.*: upgrade this gateway"):
        decode_file(file)


def test_a_file_of_another_format_is_refused_immediately() -> None:
    with pytest.raises(Invalid, match="not a snapshot file"):
        decode_file(b"PK\x03\x04")


# -- version 2, with signed chunks ------------------------------------------------------------------------------------

ENCODED: dict[str, Any] = {
    "host_kind": "jail_zfs",
    "platform": None,
    "line": False,
    "parts": [{"name": "stream", "size": 64 * MIB, "data_bytes": 8 * MIB}],
    "encoding": "compressed",
}
STREAM_CHUNKS = [(0, 0, b"a" * 4096), (0, 8192, b"b" * 8192), (0, 32 * MIB, b"c" * 4096)]


def split_records(file: bytes, edges: list[int]) -> list[bytes]:
    return [file[start:end] for start, end in pairwise(edges)]


def test_chunks_of_an_encoded_stream_are_signed() -> None:
    file, _ = make_file(STREAM_CHUNKS, **ENCODED)
    assert file[len(MAGIC) :][:2] == b"\0\2" and FILE[len(MAGIC) :][:2] == b"\0\1"
    assert [(chunk.offset, chunk.data) for chunk in decode_file(file, 7)] == [each[1:] for each in STREAM_CHUNKS]


def test_a_changed_moved_or_missing_signed_chunk_is_refused_when_it_arrives() -> None:
    head, *chunks, end = split_records(*make_file(STREAM_CHUNKS, **ENCODED))
    other_head, *other_chunks, _ = split_records(*make_file(STREAM_CHUNKS, **ENCODED, continues=True))
    for records in (
        [head, chunks[1]],  # the first is missing
        [head, chunks[0], chunks[2]],
        [head, other_chunks[0]],  # from another file of the same signer
        [other_head, chunks[0]],
        [head, chunks[0], chunks[0]],
    ):
        with pytest.raises(Invalid, match=r"the signature of a chunk does not match|is out of place"):
            decode_file(b"".join([*records, end]))


@given(st.integers(0, 1 << 30), st.integers(1, 255))
@settings(deadline=None, max_examples=150)
def test_no_changed_chunk_of_an_encoded_stream_is_returned(place: int, change: int) -> None:
    file, edges = make_file(STREAM_CHUNKS, **ENCODED)
    place = edges[1] + place % (len(file) - edges[1])
    decoder, chunks = Decoder(), []
    decoder.feed(file[:place] + bytes([file[place] ^ change]) + file[place + 1 :])
    with pytest.raises(GatewayError):
        for chunk in decoder.read_chunks():
            chunks.append(chunk)
        decoder.close()
    assert all((0, chunk.offset, chunk.data) in STREAM_CHUNKS for chunk in chunks)


def test_the_version_cannot_be_changed_to_omit_the_signatures() -> None:
    file, _ = make_file(STREAM_CHUNKS, **ENCODED)
    for other in (file.replace(MAGIC + b"\0\2", MAGIC + b"\0\1", 1), FILE.replace(MAGIC + b"\0\1", MAGIC + b"\0\2", 1)):
        with pytest.raises(Invalid):
            decode_file(other)


# -- files from a malicious signer: the signature is valid, but the contents are not ----------------------------------


def sign_records(records: list[bytes]) -> bytes:
    """Return a file with a valid head, ``records`` and a valid end."""
    encoder = Encoder(SIGNER)
    return b"".join([encoder.encode_head(make_manifest()), *map(encoder._add, records), encoder.encode_end()])


def frame_chunk(part: int, offset: int, length: int, frame: bytes, data: bytes = b"") -> bytes:
    contents = struct.pack(">BQI32s", part, offset, length, hashlib.sha256(data).digest()) + frame
    return b"C" + struct.pack(">I", len(contents)) + contents


def compress(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


DATA = b"x" * 4096
BOMB = compress(bytes(64 * MIB))
CLAIMED_BOMB = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00"
"""A frame header that claims a petabyte, and an empty last block."""
BAD_CHUNKS = {
    "a part that does not exist": frame_chunk(5, 0, 4096, compress(DATA), DATA),
    "outside its part": frame_chunk(0, 4096, 4096, compress(DATA), DATA),
    "an offset that would overflow": frame_chunk(2, (1 << 64) - 4096, 8192, compress(DATA), DATA),
    "more than a chunk may contain": frame_chunk(2, 0, CHUNK_BYTES + 4096, compress(bytes(CHUNK_BYTES + 4096))),
    "no data": frame_chunk(2, 0, 0, compress(b""), b""),
    "a bomb that says its size": frame_chunk(2, 0, 64 * MIB, BOMB),
    "a bomb": frame_chunk(2, 0, 4096, BOMB, DATA),
    "a bomb that claims a petabyte": frame_chunk(2, 0, 4096, CLAIMED_BOMB, DATA),
    "a bomb without its size": frame_chunk(2, 0, 4096, compress(bytes(64 * MIB), write_content_size=False), DATA),
    "two frames": frame_chunk(2, 0, 4096, compress(DATA) * 2, DATA),
    "no frame": frame_chunk(2, 0, 4096, b"", DATA),
    "another digest": frame_chunk(2, 0, 4096, compress(DATA), b"other"),
    "a second head": FILE[len(MAGIC) + 2 : EDGES[1]],
    "an unknown record": b"X" + struct.pack(">I", 0),
    "a record of four gigabytes": b"C" + struct.pack(">I", 0xFFFFFFFF),
    "a chunk that is too short": b"C" + struct.pack(">I", 3) + b"abc",
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_a_bad_record_is_refused_without_much_memory(name: str) -> None:
    file = sign_records([BAD_CHUNKS[name]])
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match=r"^the snapshot file is damaged at byte"):
            decode_file(file)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_only_one_chunk_is_decompressed_at_a_time() -> None:
    encoder, zeros = Encoder(SIGNER), bytes(CHUNK_BYTES)
    chunks = [encoder.encode_chunk(compress_chunk(2, number * CHUNK_BYTES, zeros)) for number in range(8)]
    decoder = Decoder()
    decoder.feed(Encoder(SIGNER).encode_head(make_manifest()) + b"".join(chunks))
    tracemalloc.start()
    try:
        assert decoder.read_manifest() is not None
        assert sum(len(chunk.data) for chunk in decoder.read_chunks()) == 8 * MIB
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_chunks_that_overlap_or_exceed_the_announced_data_are_refused() -> None:
    overlapping_chunks = [frame_chunk(2, offset, 8192, compress(DATA * 2), DATA * 2) for offset in (0, 4096)]
    with pytest.raises(Invalid, match="out of place"):
        decode_file(sign_records(overlapping_chunks))
    zeros = bytes(CHUNK_BYTES)
    nine_mib_chunks = [frame_chunk(2, number * CHUNK_BYTES, CHUNK_BYTES, compress(zeros), zeros) for number in range(9)]
    with pytest.raises(Invalid, match="disk has more data than the manifest says"):
        decode_file(sign_records(nine_mib_chunks))


@pytest.mark.parametrize(
    "chunk",
    [(2, 8192, b"x"), (2, 1, DATA), (2, 8192, DATA + b"x"), (2, 64 * MIB - 100, b"x" * 100), (0, 0, b"x" * 4999)],
    ids=["one byte", "an odd offset", "an odd length", "an odd offset at the end", "almost to the end"],
)
def test_chunks_that_take_more_disk_than_announced_are_refused(
    chunk: tuple[int, int, bytes],
) -> None:
    """A single byte occupies a whole block, so a file that announces 10 MB could occupy 40 GB."""
    with pytest.raises(Invalid, match="does not consist of whole blocks"):
        decode_file(make_file([chunk])[0])


def test_a_signature_by_another_key_is_refused() -> None:
    other_encoder = Encoder(Signer(b"o" * 32))
    head = other_encoder.encode_head(make_manifest())
    foreign_head = head.replace(Signer(b"o" * 32).public_key, SIGNER.public_key)
    with pytest.raises(Invalid, match="the signature of its manifest does not match"):
        decode_file(foreign_head)


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "an unknown field": {"path": "/etc/passwd"},
    "a path as the id": {"snapshot_id": "../../../etc"},
    "a long id": {"snapshot_id": "0" * 13},
    "a hidden kind": {"kind": "base"},
    "a path as the name": {"names": ["../x"]},
    "an option as the name": {"names": ["-rf"]},
    "many names": {"names": [f"n{number}" for number in range(17)]},
    "a description that changes the terminal": {"description": "\x1b]0;x\x07"},
    "a long description": {"description": "x" * 4097},
    "a release with a line end": {"release": "1\n2"},
    "another kind of host": {"host_kind": "jail_zfs"},
    "a compressed stream of another kind of host": {"encoding": "compressed"},
    "an unknown encoding": {"encoding": "zip", "host_kind": "jail_zfs"},
    "a plain stream that continues an import": {"continues": True},
    "a guid of a virtual machine": {"base": BASE},
    "a relative stream": {**JAIL_FIELDS, "base": {**BASE, "parts": ["stream"]}},
    "a relative device state": {"base": {"snapshot_id": "ba9876543210", "parts": ["disk", "device_state"]}},
    "a relative part that is missing": {"base": {"snapshot_id": "ba9876543210", "parts": ["volume"]}},
    "a path as a base": {**JAIL_FIELDS, "base": {**BASE, "snapshot_id": "../../base"}},
    "a path as the name of a base": {**JAIL_FIELDS, "base": {**BASE, "names": ["../base"]}},
    "a base without a guid": {**JAIL_FIELDS, "base": {**BASE, "guid": None}},
    "a guid of 0": {**JAIL_FIELDS, "base": {**BASE, "guid": 0}},
    "a guid of 65 bits": {**JAIL_FIELDS, "base": {**BASE, "guid": 1 << 64}},
    "a guid in quotes": {**JAIL_FIELDS, "base": {**BASE, "guid": "5"}},
    "an unknown field of a base": {**JAIL_FIELDS, "base": {**BASE, "dataset": "tank"}},
    "a base of a rest": {**JAIL_FIELDS, "base": BASE, "encoding": "compressed", "continues": True},
    "a path as an ancestor": {"ancestors": ["../../base"]},
    "many ancestors": {"ancestors": ["0" * 12] * 17},
    "a path as the architecture": {"architecture": "/bin/sh"},
    "too many CPUs": {"sizes": {"cpus": 10**9, "memory_mb": 64, "disk_mb": 64}},
    "no memory": {"sizes": {"cpus": 1, "memory_mb": 0, "disk_mb": 64}},
    "a size as text": {"sizes": {"cpus": "1", "memory_mb": 64, "disk_mb": 64}},
    "a disk that does not fit": {"sizes": {"cpus": 1, "memory_mb": 64, "disk_mb": 10**12}},
    "memory of another size": {"sizes": {"cpus": 1, "memory_mb": 65, "disk_mb": 64}},
    "a machine with options": {"platform": {**make_manifest_fields()["platform"], "machine": "q35,accel=x\n-monitor"}},
    "an option as the CPU": {"platform": {**make_manifest_fields()["platform"], "cpu_model": "-chardev"}},
    "an empty accelerator": {"platform": {**make_manifest_fields()["platform"], "accelerator": ""}},
    "a version that is too long": {"platform": {**make_manifest_fields()["platform"], "qemu_version": "7" * 129}},
    "a line that is not a boolean": {"line": "yes"},
    "memory without a platform": {"platform": None},
    "no parts": {"parts": []},
    "a part with a path": {"parts": [{"name": "../disk", "size": 1, "data_bytes": 1}]},
    "a part twice": {"parts": [*make_manifest_fields()["parts"][:4], make_manifest_fields()["parts"][3]]},
    "parts out of order": {"parts": make_manifest_fields()["parts"][::-1]},
    "a jail with the parts of a machine": {"host_kind": "jail_zfs", "platform": None, "line": False},
    "a jail with memory": {"host_kind": "jail_zfs", "line": False, "parts": STREAM_PARTS},
    "a jail with a serial port": {"host_kind": "jail_zfs", "platform": None, "parts": STREAM_PARTS},
    "a machine with a stream": {"platform": None, "parts": STREAM_PARTS},
    "a stream that is too large": {
        "host_kind": "jail_zfs", "platform": None, "line": False,
        "parts": [{"name": "stream", "size": (1 << 46) + 1, "data_bytes": 1}],
    },
    "a part of size zero": make_changed_parts("kernel", 0, 0),
    "a large device state": make_changed_parts("device_state", 65 * MIB, 1),
    "more data than its size": make_changed_parts("kernel", 1, 2),
}  # fmt: skip


def test_the_manifest_of_a_jail_is_valid() -> None:
    manifest = make_manifest(host_kind="jail_zfs", platform=None, line=False, parts=STREAM_PARTS)
    assert not manifest.has_memory and manifest.sum_data_bytes(memory=False) == 5000


def test_the_manifest_of_these_tests_is_valid() -> None:
    assert make_manifest().has_memory and make_manifest().sum_data_bytes(memory=False) == 10000 + 8 * MIB


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_bad_field_of_the_manifest_is_refused(name: str) -> None:
    text = json.dumps(make_manifest_fields(**BAD_FIELDS[name])).encode()
    head = SIGNER.public_key + SIGNER.sign(container._HEAD_PURPOSE, text) + text
    with pytest.raises(Invalid, match=r"the manifest of the snapshot file is invalid: .*Export the snapshot again"):
        decode_file(MAGIC + b"\x00\x01H" + struct.pack(">I", len(head)) + head)


def make_volume_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "snapshot_id": "0123456789ab",
        "kind": "volume",
        "name": "data",
        "snapshot_name": "monday",
        "size_mb": 64,
        "release": "0.1.0",
        "host_kind": "kvm_xfs",
        "parts": [{"name": "volume", "size": 64 * MIB, "data_bytes": MIB}],
    }
    return fields | changes


@pytest.mark.parametrize("changes", [{}, {"host_kind": "jail_zfs", "parts": STREAM_PARTS}], ids=["image", "stream"])
def test_the_manifest_of_a_volume_is_valid(changes: dict[str, Any]) -> None:
    fields = make_volume_fields(**changes)
    manifest = parse_manifest(json.dumps(fields).encode())
    assert json.loads(manifest.model_dump_json(exclude_defaults=True)) == fields


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../data"},
        {"name": ""},
        {"snapshot_name": "a/b"},
        {"snapshot_id": "short"},
        {"size_mb": 63},
        {"size_mb": 128},
        {"size_mb": "64"},
        {"size_mb": (1 << 26) + 1},
        {"host_kind": "jail_zfs"},
        {"host_kind": "other"},
        {"parts": []},
        {"parts": STREAM_PARTS},
        {"parts": [{"name": "disk", "size": 64 * MIB, "data_bytes": MIB}]},
        {"parts": make_volume_fields()["parts"] * 2},
        {"kind": "snapshot"},
        {"kind": "pool"},
        {"platform": None},
    ],
)
def test_a_bad_field_of_a_volumes_manifest_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="the manifest of the snapshot file is invalid"):
        parse_manifest(json.dumps(make_volume_fields(**changes)).encode())


@pytest.mark.parametrize("text", [b"", b"null", b"[" * 60000, b"{" * 60000, b'{"a":' * 10000, b"\xff", b"1e999"])
def test_text_that_is_not_a_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(Invalid, match="the manifest of the snapshot file is invalid"):
        parse_manifest(text)


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "G" * 64, "0" * 64 + "\n"])
def test_a_fingerprint_has_64_digits(text: str) -> None:
    assert check_fingerprint(SIGNER.fingerprint) == SIGNER.fingerprint
    with pytest.raises(Invalid, match="sandboxctl snapshot signer"):
        check_fingerprint(text)
