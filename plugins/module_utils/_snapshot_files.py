# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Recognize the files that contain snapshots, and write them so that a file is complete if it has its name.

The gateway checks everything in a file. This module only reads which snapshot it contains.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

_MAGIC = b"\x89GROVE-SNAPSHOT\r\n\x1a\n"
_VERSION = 1
_RECORD = struct.Struct(">cI")
_PREFIX_BYTES = len(_MAGIC) + 2
_HEAD_BYTES = 32 + 64
_END_BYTES = 32 + 64
_MAX_MANIFEST_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10


@dataclass(frozen=True)
class SnapshotFile:
    """A file with a snapshot. ``head``: its beginning, which contains the manifest. ``is_complete``: it has an end."""

    manifest: dict[str, Any]
    head: bytes
    is_complete: bool

    @property
    def snapshot_id(self) -> str:
        return str(self.manifest.get("snapshot_id", ""))

    @property
    def has_memory(self) -> bool:
        return self.manifest.get("platform") is not None

    @property
    def data_bytes(self) -> int:
        return sum(part["data_bytes"] for part in self.manifest["parts"])


def read_snapshot_file(path: str) -> SnapshotFile | None:
    """Return what a file says about its snapshot, or None if the file does not exist. Raises Failure."""
    try:
        with Path(path).open("rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None


def _read(path: str, file: BinaryIO) -> SnapshotFile:
    prefix = file.read(_PREFIX_BYTES + _RECORD.size)
    if prefix[: len(_MAGIC)] != _MAGIC or len(prefix) < _PREFIX_BYTES + _RECORD.size:
        raise Failure(f"{path} is not a snapshot file: choose another path, or remove the file first")
    version = int.from_bytes(prefix[len(_MAGIC) : _PREFIX_BYTES], "big")
    kind, length = _RECORD.unpack_from(prefix, _PREFIX_BYTES)
    if version != _VERSION:
        raise Failure(
            f"{path} has format version {version}, but this release of the collection reads version {_VERSION}: "
            "upgrade the collection",
            "unsupported",
        )
    contents = file.read(length) if _HEAD_BYTES < length <= _HEAD_BYTES + _MAX_MANIFEST_BYTES else b""
    try:
        manifest = json.loads(contents[_HEAD_BYTES:])
        sizes = manifest["sizes"]
        is_valid = kind == b"H" and len(contents) == length and isinstance(manifest["snapshot_id"], str)
        is_valid = is_valid and all(isinstance(sizes[key], int) for key in ("cpus", "memory_mb", "disk_mb"))
        is_valid = is_valid and all(isinstance(part["data_bytes"], int) for part in manifest["parts"])
    except (ValueError, RecursionError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise Failure(f"{path} is damaged: copy it again, or export the snapshot again")
    end = os.fstat(file.fileno()).st_size - _RECORD.size - _END_BYTES
    file.seek(max(0, end))
    is_complete = file.read(_RECORD.size) == _RECORD.pack(b"E", _END_BYTES)
    return SnapshotFile(manifest, prefix + contents, is_complete)


def read_head(path: str) -> list[bytes]:
    """Return the beginning of a file, from which a plan session predicts an import. Raises Failure."""
    file = read_snapshot_file(path)
    return [file.head] if file else []


def read_pieces(path: str) -> Iterator[bytes]:
    """Yield the contents of a file. Raises Failure."""
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary file, readable only by its owner, that replaces ``path`` if the context ends without an error.

    Raises Failure.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            temporary.replace(target)
        except OSError as error:
            raise Failure(
                f"{path} cannot be written ({error.strerror or error}): check the path, its permissions, and the free "
                "space"
            ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
