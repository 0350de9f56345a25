"""Write snapshots of sandboxes and volumes to files, and read them.

A new file gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sandbox_gateway.cli.client import Client
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.progress import progress_shown

_PIECE_BYTES = 256 << 10
_MAX_HEAD_BYTES = 65 << 10
_END_RECORD = struct.pack(">cI", b"E", 32 + 64)
_END_BYTES = len(_END_RECORD) + 32 + 64
"""The size of the record that ends a file: see ``engine.transfer.container``."""


def export(client: Client, path: str, snapshot: str, file: str, **params: str) -> int:
    """Write a snapshot to ``file``, which must not exist, or to standard output. Return the number of bytes.

    ``path``: the route that returns the file. ``snapshot``: its name, for the progress bar.
    """
    with _output_opened(file) as output, progress_shown(f"exporting {snapshot}") as advance:

        def write(piece: bytes) -> None:
            output.write(piece)
            advance(len(piece))

        _download(client, path, output, write, params)
        # A response without a length (from a proxy that speaks HTTP/1.0) looks complete if the connection is lost.
        if not output.has_end():
            raise Failure(
                f"the connection to the gateway was lost before all of {file} had arrived",
                ExitCode.UNREACHABLE,
                "export the snapshot again",
            )
        return output.size


def _download(
    client: Client, path: str, output: _Output, write: Callable[[bytes], object], params: Mapping[str, Any]
) -> None:
    """Download a file, or the rest of the one that an interrupted export has left behind."""

    def discard_unless_partial(status: int) -> None:
        if status != http.HTTPStatus.PARTIAL_CONTENT:  # An older gateway sends the whole file.
            output.empty()

    if output.size:
        try:
            client.download(
                path, write, discard_unless_partial, offset=output.size, digest=output.compute_digest(), **params
            )
            return
        except Failure as failure:
            if failure.code != ExitCode.CONFLICT:
                raise
            output.empty()  # It is the beginning of a different file.
    client.download(path, write, **params)


def import_(client: Client, path: str, file: str, name: str, trust: list[str]) -> Any:
    """Import ``file``, or standard input, and return the new snapshot or volume. ``path``: the route that reads it."""
    with contextlib.ExitStack() as stack:
        with _errors_explained("read", file):
            source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            size = None if file == "-" else os.fstat(source.fileno()).st_size
            continuation = _find_interrupted_import(client, source, size or 0)
        advance = stack.enter_context(progress_shown(f"importing {file}", size))
        advance(continuation.get("offset", 0))
        return client.upload(path, _read_pieces(source, file, advance), name=name, trust=trust, **continuation)


def _find_interrupted_import(client: Client, source: BinaryIO, size: int) -> dict[str, Any]:
    """Return the parameters that continue an interrupted import of a file of ``size`` bytes, or {}.

    The file is then read up to where the import continues. Raises OSError.
    """
    try:
        interrupted_imports = client.get("/interrupted-imports") if size else []
    except Failure:
        return {}  # An older gateway. If there is another reason, the import shows it.
    for each in interrupted_imports:
        received_bytes = each.get("receivedBytes") or 0
        if 0 < received_bytes <= size and f'"snapshot_id":"{each["snapshotID"]}"'.encode() in _peek(source):
            digest = _compute_digest(source.fileno(), received_bytes)
            if digest == each["receivedDigest"]:
                source.seek(received_bytes)
                return {"resume": each["id"], "offset": received_bytes}
    return {}


def _peek(source: BinaryIO) -> bytes:
    """Return the beginning of a file, which contains its manifest."""
    return os.pread(source.fileno(), _MAX_HEAD_BYTES, 0)


def _compute_digest(descriptor: int, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a file. Raises OSError."""
    hasher = hashlib.sha256()
    for offset in range(0, size, _PIECE_BYTES):
        hasher.update(os.pread(descriptor, min(_PIECE_BYTES, size - offset), offset))
    return hasher.hexdigest()


def _read_pieces(source: BinaryIO, file: str, advance: Callable[[int], None]) -> Iterator[bytes]:
    while True:
        with _errors_explained("read", file):
            piece = source.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece
        advance(len(piece))


class _Output:
    """Standard output, or a file that is being written. ``size``: the number of bytes in it."""

    def __init__(self, file: str, descriptor: int | None) -> None:
        """``descriptor``: of the file, which can contain the beginning of a snapshot file. None: standard output."""
        self._file = file
        self._descriptor = descriptor
        self.size = 0 if descriptor is None else os.lseek(descriptor, 0, os.SEEK_END)
        self._last_bytes = b""

    def write(self, piece: bytes) -> None:
        self._last_bytes = (self._last_bytes + piece[-_END_BYTES:])[-_END_BYTES:]
        self.size += len(piece)
        with _errors_explained("write", self._file):
            if self._descriptor is None:
                sys.stdout.buffer.write(piece)
                return
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]

    def has_end(self) -> bool:
        """Return whether the last record of a snapshot file has been written."""
        last_bytes = self._last_bytes
        if self._descriptor is not None:
            last_bytes = os.pread(self._descriptor, _END_BYTES, max(0, self.size - _END_BYTES))
        return len(last_bytes) == _END_BYTES and last_bytes.startswith(_END_RECORD)

    def compute_digest(self) -> str:
        assert self._descriptor is not None
        with _errors_explained("read", self._file):
            return _compute_digest(self._descriptor, self.size)

    def empty(self) -> None:
        assert self._descriptor is not None
        with _errors_explained("write", self._file):
            os.ftruncate(self._descriptor, 0)
            self.size = os.lseek(self._descriptor, 0, os.SEEK_SET)


@contextlib.contextmanager
def _output_opened(file: str) -> Iterator[_Output]:
    """Yield standard output, or a new file that gets the name ``file`` if the context ends without an error.

    Until then, it is called `.NAME.partial`, and only its owner can read it. If an export is killed, or loses its
    connection, the next one continues with this file.
    """
    if file == "-":
        yield _Output(file, None)
        with _errors_explained("write", file):
            sys.stdout.buffer.flush()
        return
    final_path = Path(file)
    if final_path.exists():
        raise Failure(f"{file} already exists", ExitCode.USAGE, "choose a different file, or remove it first")
    partial_path = final_path.with_name(f".{final_path.name}.partial")
    with _errors_explained("write", file):
        descriptor = _open_partial_file(partial_path)
    try:
        output = _Output(file, descriptor)
        try:
            yield output
            with _errors_explained("write", file):
                os.fsync(descriptor)
                partial_path.rename(final_path)
        except BaseException as error:
            if not (output.size and isinstance(error, Failure) and error.code == ExitCode.UNREACHABLE):
                with contextlib.suppress(OSError):
                    partial_path.unlink()
            raise
    finally:
        os.close(descriptor)
    with _errors_explained("write", file):
        _sync_directory(final_path.parent)


def _open_partial_file(path: Path) -> int:
    """Create a file, or open the one that an export left behind, and lock it. Raises Failure and OSError."""
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
