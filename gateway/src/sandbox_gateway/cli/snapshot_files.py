"""Write snapshots of sandboxes and volumes to files, and read them.

A new file gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sandbox_gateway.cli.client import Client
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.progress import progress_shown

_PIECE_BYTES = 256 << 10
_END_RECORD = struct.pack(">cI", b"E", 32 + 64)
_END_BYTES = len(_END_RECORD) + 32 + 64
"""The size of the record that ends a file: see ``engine.transfer.container``."""


def export(client: Client, path: str, snapshot: str, file: str, **params: str) -> int:
    """Write a snapshot to ``file``, which must not exist, or to standard output. Return the number of bytes.

    ``path``: the route that returns the file. ``snapshot``: its name, for the progress bar.
    """
    written_bytes, last_bytes = 0, b""
    with _output_opened(file) as write_file, progress_shown(f"exporting {snapshot}") as advance:

        def write(piece: bytes) -> None:
            nonlocal written_bytes, last_bytes
            write_file(piece)
            written_bytes += len(piece)
            last_bytes = (last_bytes + piece[-_END_BYTES:])[-_END_BYTES:]
            advance(len(piece))

        client.download(path, write, **params)
        # A response without a length (from a proxy that speaks HTTP/1.0) looks complete if the connection is lost.
        if len(last_bytes) < _END_BYTES or not last_bytes.startswith(_END_RECORD):
            raise Failure(
                f"the connection to the gateway was lost before all of {file} had arrived",
                ExitCode.UNREACHABLE,
                "export the snapshot again",
            )
    return written_bytes


def import_(client: Client, path: str, file: str, name: str, trust: list[str]) -> Any:
    """Import ``file``, or standard input, and return the new snapshot or volume. ``path``: the route that reads it."""
    with contextlib.ExitStack() as stack:
        with _errors_explained("read", file):
            source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            size = None if file == "-" else os.fstat(source.fileno()).st_size
        advance = stack.enter_context(progress_shown(f"importing {file}", size))
        return client.upload(path, _read_pieces(source, file, advance), name=name, trust=trust)


def _read_pieces(source: BinaryIO, file: str, advance: Callable[[int], None]) -> Iterator[bytes]:
    while True:
        with _errors_explained("read", file):
            piece = source.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece
        advance(len(piece))


@contextlib.contextmanager
def _output_opened(file: str) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to standard output, or to ``file`` if the context ends without an error.

    Until then, the contents are in `.NAME.partial`, which only its owner can read. If an export is killed, the next one
    reuses this file.
    """
    if file == "-":
        with _errors_explained("write", file):
            yield sys.stdout.buffer.write
            sys.stdout.buffer.flush()
        return
    final_path = Path(file)
    if final_path.exists():
        raise Failure(f"{file} already exists", ExitCode.USAGE, "choose a different file, or remove it first")
    partial_path = final_path.with_name(f".{final_path.name}.partial")
    with _errors_explained("write", file):
        descriptor = _open_partial_file(partial_path)

    def write(piece: bytes) -> None:
        with _errors_explained("write", file):
            while piece:
                piece = piece[os.write(descriptor, piece) :]

    try:
        try:
            yield write
            with _errors_explained("write", file):
                os.fsync(descriptor)
                partial_path.rename(final_path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial_path.unlink()
            raise
    finally:
        os.close(descriptor)
    with _errors_explained("write", file):
        _sync_directory(final_path.parent)


def _open_partial_file(path: Path) -> int:
    """Create a file, or empty the one that a killed export left behind, and lock it. Raises Failure and OSError."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            is_new = True
        except FileExistsError:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            is_new = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_new:
                _require_own_file(path, descriptor)
            # An export that has just finished may have removed or renamed the file.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                    os.fchmod(descriptor, 0o600)
                    os.ftruncate(descriptor, 0)
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Failure(
                f"another export is writing {path}", ExitCode.CONFLICT, "try again when it is finished"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _require_own_file(path: Path, descriptor: int) -> None:
    """Raise Failure if another user could read what is written to the file, or if it has other hard links."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        raise Failure(f"{path} was not created by an export that this user ran", ExitCode.USAGE, "remove it first")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _errors_explained(verb: str, file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "check the path, its permissions, and the free space"
        raise Failure(f"cannot {verb} {file}: {error.strerror or error}", ExitCode.USAGE, hint) from None
