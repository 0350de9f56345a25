"""Pack snapshots into files, and unpack them.

The files are the gateway's own snapshot files. forkd's packs contain files for Firecracker, which a gateway cannot use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from sandbox_gateway_forkd.gateway import Failure, Gateway

_PIECE_BYTES = 256 << 10
_FORKD_PACK_MAGIC = b"\x28\xb5\x2f\xfd"
"""forkd's packs are compressed with zstd. The gateway's files begin with bytes of their own."""
_END_RECORD = struct.pack(">cI", b"E", 32 + 64)
_END_BYTES = len(_END_RECORD) + 32 + 64
"""The size of the record that ends a snapshot file."""


async def pack(gateway: Gateway, tag: str, path: Path) -> None:
    """Write a snapshot or template to a file, which replaces ``path`` when it is complete. Raises Failure."""
    with _partial_file_opened(path) as descriptor:

        def write(piece: bytes) -> None:
            with _errors_explained("write", path):
                while piece:
                    piece = piece[os.write(descriptor, piece) :]

        await gateway.download(f"/snapshots/{quote(tag, safe='')}/export", write)
        # A response without a length (from a proxy that speaks HTTP/1.0) looks complete if the connection is lost.
        size = os.fstat(descriptor).st_size
        last_bytes = os.pread(descriptor, _END_BYTES, max(0, size - _END_BYTES))
        if len(last_bytes) < _END_BYTES or not last_bytes.startswith(_END_RECORD):
            raise Failure(f"the connection was lost before all of {path} had arrived: run the command again")


async def unpack(gateway: Gateway, path: Path, tag: str, trust: Sequence[str]) -> tuple[str, str]:
    """Import a snapshot from a file. Raises Failure.

    Returns its name, or its id if it has none, and the reason why its memory was omitted, or "". ``tag``: its name, or
    "" for the names in the file. ``trust``: fingerprints of gateways whose signatures to accept.
    """
    with _errors_explained("read", path), path.open("rb") as source:
        if source.read(len(_FORKD_PACK_MAGIC)) == _FORKD_PACK_MAGIC:
            raise Failure(
                f"{path} is compressed with zstd, like the packs of forkd itself, which contain files for Firecracker: "
                "unpack a file that this program packed, or build a template from the root file system in the pack"
            )
        source.seek(0)
        params = {"name": tag, "trust": trust} if tag else {"trust": trust}
        try:
            snapshot = await gateway.upload("/snapshots/import", _read_pieces(source, path), params)
        except Failure as failure:
            raise Failure(f"{failure}{_find_hint(failure)}", failure.status, failure.kind) from None
    names, imported = snapshot.get("names") or [snapshot.get("snapshotID")], snapshot.get("imported") or {}
    return str(names[0]), str(imported.get("omittedMemory") or "")


def _find_hint(failure: Failure) -> str:
    """Return how to name the remedy of a gateway's error with options of this program."""
    hints = {"name_taken": " (set --tag to a different name)", "untrusted": " (with the option --trust)"}
    return hints.get(failure.kind, "")


async def _read_pieces(source: BinaryIO, path: Path) -> AsyncIterator[bytes]:
    while True:
        with _errors_explained("read", path):
            piece = source.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece


@contextlib.contextmanager
def _partial_file_opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of a new file that replaces ``path`` if the context ends without an error.

    Until then, it is called `.NAME.partial`, and only its owner can read it.
    """
    if path.is_dir():
        raise Failure(f"{path} is a directory: name a file in it")
    partial_path = path.with_name(f".{path.name}.partial")
    with _errors_explained("write", path):
        descriptor = os.open(partial_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        _lock(partial_path, descriptor)
        try:
            with _errors_explained("write", path):
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, 0)
            yield descriptor
            with _errors_explained("write", path):
                os.fsync(descriptor)
                partial_path.replace(path)
                _sync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                partial_path.unlink()
            raise
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    """Raise Failure unless the file is this user's own, is still called ``path``, and no other program writes it."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise Failure(f"{path} was not created by this program for this user: remove it first")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(path.lstat(), status)
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    if not is_current:
        raise Failure(f"another `forkd pack` is writing {path}: try again when it is finished")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _errors_explained(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(
            f"cannot {verb} {path} ({error.strerror or error}): check the path, its permissions and the free space"
        ) from None
