"""The format of a snapshot file.

A file is the magic bytes and the version, then records. A record is its type (one byte), the length of its contents
(four bytes, big-endian), and the contents:

* ``H``, the head: the signer's public key (32 bytes), a signature of the manifest (64), the manifest (JSON).
* ``C``, a chunk: the index of its part (1), its offset in the part (8), its length (4), its SHA-256 (32), in version 2
  a signature (64), and its data, one zstd frame. Chunks are in ascending order, and at most ``CHUNK_BYTES`` long. They
  begin at multiples of ``BLOCK_BYTES``, and end there or at the end of their part: a file system stores whole blocks,
  so smaller chunks would use more disk space than the manifest says.
* ``E``, the end: the SHA-256 of everything before this record (32), and its signature (64).

``Encoder`` creates the bytes of a file, and ``Decoder`` checks them. Both keep at most one chunk in memory. The
manifest is authentic, and so are the chunks of version 2, whose signatures cover the manifest, the place of the chunk,
and the end of the previous chunk. Nothing else that a ``Decoder`` returns is authentic before ``Decoder.close`` has
returned.

Files with a compressed or raw stream have version 2, so that older releases, which cannot check such streams, refuse
them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from sandbox_gateway.engine.transfer.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    VolumeManifest,
    parse_manifest,
)
from sandbox_gateway.engine.transfer.signing import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Signer,
    has_valid_signature,
)
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from sandbox_gateway.hosts.base import StreamEncoding

MAGIC = b"\x89GROVE-SNAPSHOT\r\n\x1a\n"
"""Like PNG's, so that a transfer that changes line endings or stops at the first NUL is detected immediately."""
VERSION = 2
_PLAIN_VERSION = 1
CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 4096
_VERSION_STRUCT = struct.Struct(">H")
_RECORD_STRUCT = struct.Struct(">cI")
_CHUNK_STRUCT = struct.Struct(">BQI32s")
_PLACE_STRUCT = struct.Struct(">BQ")
_HEAD_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
_END_BYTES = 32 + SIGNATURE_BYTES
_MAX_COMPRESSED_BYTES = CHUNK_BYTES + (CHUNK_BYTES >> 7) + 1024
_MAX_RECORD_BYTES = {
    b"H": _HEAD_BYTES + MAX_MANIFEST_BYTES,
    b"C": _CHUNK_STRUCT.size + SIGNATURE_BYTES + _MAX_COMPRESSED_BYTES,
    b"E": _END_BYTES,
}
_HEAD_PURPOSE, _CHUNK_PURPOSE, _END_PURPOSE = b"snapshot file head", b"snapshot file chunk", b"snapshot file end"


@dataclass(frozen=True)
class Chunk:
    part: Part
    offset: int
    data: bytes


class Encoder:
    """Creates a file: the results of ``encode_head``, ``encode_chunk`` for each chunk in order, and ``encode_end``."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._digest = hashlib.sha256()
        self._head_digest = b""
        self._has_signed_chunks = False
        self._last_chunk = (0, 0)

    def encode_head(self, manifest: Manifest | VolumeManifest) -> bytes:
        # Without the fields that older releases do not know, unless they matter.
        text = manifest.model_dump_json(exclude_defaults=True).encode()
        contents = self._signer.public_key + self._signer.sign(_HEAD_PURPOSE, text) + text
        self._head_digest = hashlib.sha256(contents).digest()
        self._has_signed_chunks = manifest.encoding is not StreamEncoding.PLAIN
        prefix = MAGIC + _VERSION_STRUCT.pack(VERSION if self._has_signed_chunks else _PLAIN_VERSION)
        return self._add(prefix + _frame(b"H", contents))

    def encode_chunk(self, contents: bytes) -> bytes:
        """Return the record of a chunk. ``contents``: the result of ``compress_chunk``."""
        if self._has_signed_chunks:
            head, data = contents[: _CHUNK_STRUCT.size], contents[_CHUNK_STRUCT.size :]
            message = _build_chunk_message(self._head_digest, self._last_chunk, head)
            contents = head + self._signer.sign(_CHUNK_PURPOSE, message) + data
            index, offset, length, _ = _CHUNK_STRUCT.unpack(head)
            self._last_chunk = (index, offset + length)
        return self._add(_frame(b"C", contents))

    def encode_end(self) -> bytes:
        digest = self._digest.digest()
        return _frame(b"E", digest + self._signer.sign(_END_PURPOSE, digest))

    def _add(self, record: bytes) -> bytes:
        self._digest.update(record)
        return record


def compress_chunk(part: int, offset: int, data: bytes) -> bytes:
    """Return the contents of a chunk record. ``part``: its index in the manifest. Threads can call this in parallel."""
    # Only one thread at a time can use a compressor.
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=True)
    return _CHUNK_STRUCT.pack(part, offset, len(data), hashlib.sha256(data).digest()) + compressor.compress(data)


def _build_chunk_message(head_digest: bytes, last_chunk: tuple[int, int], head: bytes) -> bytes:
    """Return what the signature of a chunk covers. ``last_chunk``: the part and the end of the previous chunk."""
    return head_digest + _PLACE_STRUCT.pack(*last_chunk) + head


def _frame(kind: bytes, contents: bytes) -> bytes:
    return _RECORD_STRUCT.pack(kind, len(contents)) + contents


class Decoder:
    """Checks a file that arrives in pieces. Call ``read_chunks`` after each ``feed``, and ``close`` at the end.

    Errors are Invalid, or Unsupported for a file of a newer version. After an error, the decoder must not be used.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
        self._position = 0
        """The offset in the file at which the buffer begins."""
        self._has_prefix = False
        self._head_digest = b""
        self.has_signed_chunks = False
        """Whether each chunk is authentic when ``read_chunks`` yields it."""
        self._is_complete = False
        self._last_chunk = (0, 0)
        """The index of the last chunk's part, and the offset of its end."""
        self._part_data_bytes = 0
        """The bytes in the chunks of that part."""
        self._manifest: Manifest | VolumeManifest | None = None
        self.public_key = b""
        """The key of the signer."""

    def feed(self, data: bytes) -> None:
        """Add bytes of the file."""
        self._buffer += data

    def read_manifest(self) -> Manifest | VolumeManifest | None:
        """Return the manifest, which is authentic, or None if it has not arrived yet."""
        if (
            self._manifest is None
            and (self._has_prefix or self._read_prefix())
            and (record := self._take_record()) is not None
        ):
            self._read_head(record[1])
        return self._manifest

    def read_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks that have arrived. Only one of them is in memory at a time."""
        if self.read_manifest() is None:
            return
        while (record := self._take_record()) is not None:
            kind, contents = record
            if kind == b"C":
                yield self._read_chunk(contents)
            else:
                self._read_end(contents)
        if self._is_complete and self._buffer:
            raise self._create_damage_error("it contains data after the end record")

    def close(self) -> None:
        """Raise Invalid unless the whole file has arrived. If it has, all chunks are authentic."""
        if not self._is_complete:
            raise self.create_incomplete_file_error()

    def drop_incomplete_record(self) -> tuple[int, str]:
        """Forget the beginning of a record that has not arrived completely.

        Returns the number of bytes that were used before it, and their SHA-256. The next ``feed`` continues there.
        """
        self._buffer.clear()
        return self._position, self._digest.hexdigest()

    def create_incomplete_file_error(self) -> Invalid:
        if not self._has_prefix and not self._buffer:
            return Invalid("the snapshot file is empty: export the snapshot again")
        return Invalid(
            f"the snapshot file is incomplete: it ends after {self._position + len(self._buffer)} bytes. Copy it "
            "again, or export the snapshot again"
        )

    def _read_prefix(self) -> bool:
        size = min(len(MAGIC), len(self._buffer))
        if self._buffer[:size] != MAGIC[:size]:
            raise Invalid(
                "this is not a snapshot file, or it was changed in transit: use a file that "
                "`sandboxctl snapshot export` wrote, and copy it as binary data"
            )
        if len(self._buffer) < len(MAGIC) + _VERSION_STRUCT.size:
            return False
        (version,) = _VERSION_STRUCT.unpack_from(self._buffer, len(MAGIC))
        if version > VERSION:
            raise Unsupported(
                f"the snapshot file has format version {version}, which a newer release of the gateway wrote; this "
                f"release reads versions up to {VERSION}: upgrade this gateway, or export the snapshot with an older "
                "release"
            )
        if version < 1:
            raise self._create_damage_error("its format version is 0")
        self._has_prefix = True
        self.has_signed_chunks = version > _PLAIN_VERSION
        self._consume(len(MAGIC) + _VERSION_STRUCT.size)
        return True

    def _take_record(self) -> tuple[bytes, bytes] | None:
        """Remove the next complete record from the buffer, and return its type and contents, or None."""
        if self._is_complete or len(self._buffer) < _RECORD_STRUCT.size:
            return None
        kind, length = _RECORD_STRUCT.unpack_from(self._buffer)
        if kind not in _MAX_RECORD_BYTES or (kind == b"H") != (self._manifest is None):
            raise self._create_damage_error("it contains an unexpected record")
        if length > _MAX_RECORD_BYTES[kind]:
            raise self._create_damage_error(f"it contains a record of {length} bytes, more than the format allows")
        if len(self._buffer) < _RECORD_STRUCT.size + length:
            return None
        contents = bytes(self._buffer[_RECORD_STRUCT.size : _RECORD_STRUCT.size + length])
        self._consume(_RECORD_STRUCT.size + length, is_hashed=kind != b"E")
        return kind, contents

    def _consume(self, size: int, *, is_hashed: bool = True) -> None:
        if is_hashed:
            self._digest.update(self._buffer[:size])
        del self._buffer[:size]
        self._position += size

    def _read_head(self, contents: bytes) -> None:
        public_key, signature = contents[:PUBLIC_KEY_BYTES], contents[PUBLIC_KEY_BYTES:_HEAD_BYTES]
        text = contents[_HEAD_BYTES:]
        if len(contents) < _HEAD_BYTES or not has_valid_signature(public_key, signature, _HEAD_PURPOSE, text):
            raise self._create_damage_error("the signature of its manifest does not match")
        self.public_key = public_key
        self._head_digest = hashlib.sha256(contents).digest()
        self._manifest = parse_manifest(text)

    def _read_chunk(self, contents: bytes) -> Chunk:
        assert self._manifest is not None
        head_size = _CHUNK_STRUCT.size + (SIGNATURE_BYTES if self.has_signed_chunks else 0)
        if len(contents) < head_size:
            raise self._create_damage_error("a chunk is too short")
        index, offset, length, digest = _CHUNK_STRUCT.unpack_from(contents)
        if self.has_signed_chunks:
            message = _build_chunk_message(self._head_digest, self._last_chunk, contents[: _CHUNK_STRUCT.size])
            signature = contents[_CHUNK_STRUCT.size : head_size]
            if not has_valid_signature(self.public_key, signature, _CHUNK_PURPOSE, message):
                raise self._create_damage_error("the signature of a chunk does not match")
        if index >= len(self._manifest.parts):
            raise self._create_damage_error("a chunk does not belong to any part")
        part = self._manifest.parts[index]
        end = offset + length
        if not 0 < length <= CHUNK_BYTES or end > part.size or (index, offset) < self._last_chunk:
            raise self._create_damage_error(f"a chunk of {part.name} is out of place")
        if offset % BLOCK_BYTES or (end % BLOCK_BYTES and end != part.size):
            raise self._create_damage_error(f"a chunk does not consist of whole blocks of {part.name}")
        if index != self._last_chunk[0]:
            self._part_data_bytes = 0
        self._part_data_bytes += length
        if self._part_data_bytes > part.data_bytes:
            raise self._create_damage_error(f"{part.name} has more data than the manifest says")
        data = self._decompress(contents[head_size:], length)
        if hashlib.sha256(data).digest() != digest:
            raise self._create_damage_error(f"the digest of a chunk of {part.name} does not match")
        self._last_chunk = (index, end)
        return Chunk(part, offset, data)

    def _decompress(self, frame: bytes, length: int) -> bytes:
        """Decompress one frame whose content must be exactly ``length`` bytes long.

        Checks the frame's header first, because the decompressor allocates as much memory as the header states.
        """
        try:
            parameters = zstandard.get_frame_parameters(frame)
            if parameters.content_size != length or parameters.window_size > CHUNK_BYTES:
                raise self._create_damage_error("a chunk does not have the length that it states")
            data: bytes = self._decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
        except zstandard.ZstdError:
            raise self._create_damage_error("the data of a chunk cannot be decompressed") from None
        if len(data) != length:
            raise self._create_damage_error("a chunk does not have the length that it states")
        return data

    def _read_end(self, contents: bytes) -> None:
        digest, signature = contents[:32], contents[32:]
        if digest != self._digest.digest():
            raise self._create_damage_error("its digest does not match")
        if not has_valid_signature(self.public_key, signature, _END_PURPOSE, digest):
            raise self._create_damage_error("its signature does not match")
        self._is_complete = True

    def _create_damage_error(self, reason: str) -> GatewayError:
        return Invalid(
            f"the snapshot file is damaged at byte {self._position}: {reason}. Copy it again, or export the snapshot "
            "again"
        )
