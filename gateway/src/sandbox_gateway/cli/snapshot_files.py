"""Write snapshots of sandboxes and volumes to files, and read them.

A new file gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http
import itertools
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sandbox_gateway.cli import encryption
from sandbox_gateway.cli.client import Client
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.progress import progress_shown

_PIECE_BYTES = 256 << 10
_MAX_HEAD_BYTES = 65 << 10
_END_RECORD = struct.pack(">cI", b"E", 32 + 64)
_END_BYTES = len(_END_RECORD) + 32 + 64
"""The size of the record that ends a file: see ``engine.transfer.container``."""


def export(client: Client, path: str, snapshot: str, file: str, recipients: Sequence[str] = (), **params: str) -> int:
    """Write a snapshot to ``file``, which must not exist, or to standard output. Return the number of bytes.

    ``path``: the route that returns the file. ``snapshot``: its name, for the progress bar. ``recipients``: encrypt
    the file for these keys.
    """
    encryption.check_recipients(recipients)
    with _output_opened(file, recipients) as output, progress_shown(f"exporting {snapshot}") as advance:

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
        output.finish()
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


def import_(client: Client, path: str, file: str, name: str, trust: list[str], identity: str = "") -> Any:
    """Import ``file``, or standard input, and return the new snapshot or volume. ``path``: the route that reads it.

    ``identity``: the path of the file with the key that decrypts it.
    """
    encryption.check_identity(identity)
    with contextlib.ExitStack() as stack:
        with _errors_explained("read", file):
            source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            size = None if file == "-" else _find_size(source)
            beginning = _read_beginning(source, is_stream=size is None)
        _require_matching_identity(file, beginning, identity)
        consumed = beginning if size is None else b""
        if identity:
            # A wrong identity is an error before the request.
            pieces = _read_ahead(stack.enter_context(encryption.decryption_started(identity, file, source, consumed)))
            advance = stack.enter_context(progress_shown(f"importing {file}", size))
            return client.upload(path, _count_pieces(pieces, advance), name=name, trust=trust)
        with _errors_explained("read", file):
            continuation = _find_interrupted_import(client, source, size or 0)
        advance = stack.enter_context(progress_shown(f"importing {file}", size))
        advance(continuation.get("offset", 0))
        pieces = itertools.chain([consumed] if consumed else [], _read_pieces(source, file))
        return client.upload(path, _count_pieces(pieces, advance), name=name, trust=trust, **continuation)


def _find_size(source: BinaryIO) -> int | None:
    """Return the size of a file, or None for a pipe. Raises OSError."""
    status = os.fstat(source.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_beginning(source: BinaryIO, *, is_stream: bool) -> bytes:
    """Return the bytes that show whether a file is encrypted. A stream is then after them. Raises OSError."""
    if is_stream:
        return source.read(encryption.BEGINNING_BYTES)
    return os.pread(source.fileno(), encryption.BEGINNING_BYTES, 0)


def _require_matching_identity(file: str, beginning: bytes, identity: str) -> None:
    """Raise Failure unless an identity is given exactly if the file is encrypted."""
    if encryption.is_encrypted(beginning) and not identity:
        raise Failure(
            f"{file} is encrypted",
            ExitCode.USAGE,
            "pass the file with the key that decrypts it with --age-identity KEYFILE",
        )
    if identity and not encryption.is_encrypted(beginning):
        raise Failure(f"{file} is not encrypted with age", ExitCode.USAGE, "omit --age-identity, or check the file")


def _read_ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Read the first piece now, and return all pieces."""
    first_pieces = list(itertools.islice(pieces, 1))
    return itertools.chain(first_pieces, pieces)


def _count_pieces(pieces: Iterable[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        advance(len(piece))


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


def _read_pieces(source: BinaryIO, file: str) -> Iterator[bytes]:
    while True:
        with _errors_explained("read", file):
            piece = source.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece


class _Output:
    """Standard output, or a file that is being written. ``size``: the number of bytes in it."""

    def __init__(
        self, file: str, descriptor: int | None, encrypted_output: encryption.Encryption | None = None
    ) -> None:
        """``descriptor``: of the file, which can contain the beginning of a snapshot file. None: standard output.

        ``encrypted_output``: writes to it instead. The size is then that of the contents until ``finish``.
        """
        self._file = file
        self._descriptor = descriptor
        self._encrypted_output = encrypted_output
        # `age` already writes to the file, and its position is that of the descriptor.
        self.size = 0 if descriptor is None or encrypted_output is not None else os.lseek(descriptor, 0, os.SEEK_END)
        self._last_bytes = b""

    def write(self, piece: bytes) -> None:
        self._last_bytes = (self._last_bytes + piece[-_END_BYTES:])[-_END_BYTES:]
        self.size += len(piece)
        if self._encrypted_output is not None:
            self._encrypted_output.write(piece)
            return
        with _errors_explained("write", self._file):
            if self._descriptor is None:
                sys.stdout.buffer.write(piece)
                return
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]

    def has_end(self) -> bool:
        """Return whether the last record of a snapshot file has been written."""
        last_bytes = self._last_bytes
        if self._descriptor is not None and self._encrypted_output is None:
            last_bytes = os.pread(self._descriptor, _END_BYTES, max(0, self.size - _END_BYTES))
        return len(last_bytes) == _END_BYTES and last_bytes.startswith(_END_RECORD)

    def finish(self) -> None:
        """Wait until everything has been encrypted, if it is."""
        if self._encrypted_output is not None:
            self._encrypted_output.finish()
            if self._descriptor is not None:
                self.size = os.fstat(self._descriptor).st_size

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
def _output_opened(file: str, recipients: Sequence[str] = ()) -> Iterator[_Output]:
    """Yield standard output, or a new file that gets the name ``file`` if the context ends without an error.

    Until then, it is called `.NAME.partial`, and only its owner can read it. If an export is killed, or loses its
    connection, the next one continues with this file, unless it is encrypted for ``recipients``.
    """
    if file == "-":
        sys.stdout.flush()
        with _encryption_started(recipients, file, None) as encrypted_output:
            yield _Output(file, None, encrypted_output)
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
        can_continue = False
        try:
            with _encryption_started(recipients, file, descriptor) as encrypted_output:
                output = _Output(file, descriptor, encrypted_output)
                try:
                    yield output
                except Failure as failure:
                    can_continue = bool(output.size) and failure.code == ExitCode.UNREACHABLE and not recipients
                    raise
            with _errors_explained("write", file):
                os.fsync(descriptor)
                partial_path.rename(final_path)
        except BaseException:
            if not can_continue:
                with contextlib.suppress(OSError):
                    partial_path.unlink()
            raise
    finally:
        os.close(descriptor)
    with _errors_explained("write", file):
        _sync_directory(final_path.parent)


@contextlib.contextmanager
def _encryption_started(
    recipients: Sequence[str], file: str, descriptor: int | None
) -> Iterator[encryption.Encryption | None]:
    """Yield what encrypts an output, or None if there are no recipients. ``descriptor``: None for standard output."""
    if not recipients:
        yield None
        return
    if descriptor is None:
        descriptor = sys.stdout.fileno()
    else:
        with _errors_explained("write", file):
            os.ftruncate(descriptor, 0)  # Encryption cannot continue.
    with encryption.encryption_started(recipients, file, descriptor) as encrypted_output:
        yield encrypted_output


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
