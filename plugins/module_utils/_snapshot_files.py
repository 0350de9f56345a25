# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Recognize files with snapshots, and write them so that a file gets its final name only when it is complete.

The gateway checks everything in a file. This module only reads which snapshot it contains.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import stat
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ansible_collections.grove.sandbox.plugins.module_utils import _age
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action, Planner, failures_conditional

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._artifacts import Artifact
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

_MAGIC = b"\x89GROVE-SNAPSHOT\r\n\x1a\n"
_NEWEST_VERSION = 2
_RECORD = struct.Struct(">cI")
_PREFIX_BYTES = len(_MAGIC) + 2
_HEAD_BYTES = 32 + 64
_END_BYTES = 32 + 64
_MAX_MANIFEST_BYTES = 64 << 10
_END_RECORD = _RECORD.pack(b"E", _END_BYTES)
_END_RECORD_BYTES = len(_END_RECORD) + _END_BYTES
_MAX_HEAD_BYTES = _PREFIX_BYTES + _RECORD.size + _HEAD_BYTES + _MAX_MANIFEST_BYTES
_PIECE_BYTES = 256 << 10
_PARTIAL_CONTENT = 206
_SKIPPED_BYTES_PER_SECOND = 10 << 20
"""The gateway creates the bytes that it does not send again at least this fast."""
PRIVATE_MODE = 0o600
_UNKNOWN_ID = "unknown"
"""In place of the id of a snapshot, if nothing says what an encrypted file contains."""
_MAX_RECORD_BYTES = 64 << 10


@dataclass(frozen=True)
class SnapshotFile:
    """A file that contains a snapshot of a sandbox or a volume, or a template.

    ``head``: the beginning of its contents, with the manifest. ``is_complete``: whether the contents have their final
    record; of an encrypted file, only ``age`` knows that at its end. ``mode``: the permissions of the file.
    ``recipients``: for whom it is encrypted, as far as that is known.

    For an encrypted file that may be overwritten, ``head`` is empty, and the manifest contains only what its export
    has recorded.
    """

    manifest: dict[str, Any]
    head: bytes
    is_complete: bool
    mode: int
    recipients: tuple[str, ...] = ()

    @property
    def snapshot_id(self) -> str:
        return str(self.manifest.get("snapshot_id", ""))

    @property
    def base_refs(self) -> tuple[str, ...]:
        """The id and the names, in the gateway that exported it, of the snapshot that the file needs, if any."""
        base = self.manifest.get("base") or {}
        return (str(base["snapshot_id"]), *map(str, base.get("names") or ())) if base else ()

    @property
    def has_volume(self) -> bool:
        return self.manifest.get("kind") == "volume"

    @property
    def has_memory(self) -> bool:
        return self.manifest.get("platform") is not None

    @property
    def data_bytes(self) -> int:
        return sum(part["data_bytes"] for part in self.manifest["parts"])


def observe_exported_file(
    client: Client, path: str, recipients: Sequence[str], *, has_volume: bool
) -> tuple[SnapshotFile | None, Failure | None]:
    """Find out which snapshot the file of an export contains, if it exists.

    Also returns why a task cannot use the file, cannot encrypt it, or cannot transfer snapshots. ``recipients``: for
    whom the task encrypts the file. ``has_volume``: whether the task is about a snapshot of a volume.
    """
    file, failure = _observe_file(client, path, lambda: _read_exported_file(path, recipients), has_volume=has_volume)
    if failure is None and recipients:
        try:
            with failures_conditional("only if no earlier task of the run installs age"):
                _age.check_recipients(recipients, client.timeout)
        except Failure as problem:
            failure = problem
    return file, failure


def observe_imported_file(
    client: Client, path: str, identity: str, *, has_volume: bool
) -> tuple[SnapshotFile | None, Failure | None]:
    """Read which snapshot the file of an import contains, like ``observe_exported_file``.

    ``identity``: the path of the file with the key that decrypts it, or "".
    """
    return _observe_file(
        client, path, lambda: read_snapshot_file(path, identity, client.timeout), has_volume=has_volume
    )


def _observe_file(
    client: Client, path: str, read_file: Callable[[], SnapshotFile | None], *, has_volume: bool
) -> tuple[SnapshotFile | None, Failure | None]:
    try:
        # Only gateways that can transfer snapshots have a key. It is not an object on which a plan depends.
        client.call("GET", "/signer")
        with _file_failures_conditional(path):
            return _require_kind(read_file(), path, has_volume), None
    except Failure as failure:
        return None, failure


def _file_failures_conditional(path: str) -> contextlib.AbstractContextManager[None]:
    """Mark failures that depend on the contents of a file: plan sessions do not know what earlier tasks write."""
    return failures_conditional(f"only if no earlier task of the run writes {path}")


def _require_kind(file: SnapshotFile | None, path: str, has_volume: bool) -> SnapshotFile | None:
    if file is not None and file.snapshot_id != _UNKNOWN_ID and file.has_volume != has_volume:
        contents, module = ("a volume", "sandbox_volume") if file.has_volume else ("a sandbox", "sandbox_snapshot")
        raise Failure(
            f"{path} contains a snapshot of {contents}: use it with the module {module}, or choose another path"
        )
    return file


def require_complete_file(file: SnapshotFile | None, path: str) -> SnapshotFile:
    """Return the file that a task imports. Raises Failure unless it exists and is complete."""
    with _file_failures_conditional(path):
        if file is None:
            raise Failure(f"{path} does not exist: correct import_from, or copy the file to this host")
        if not file.is_complete:
            raise Failure(f"{path} is not complete: copy it again, or export the snapshot again")
    return file


def find_origin_conflict(
    source: SnapshotFile | Artifact | None, location: str, imported_from: str, other_origin: str
) -> str:
    """Return how an existing object was created instead of from the source, or "" if it was created from it.

    The object can outlive its source. ``location``: the path or the reference of the source. ``imported_from``: the
    snapshot from which the object was imported, or "". ``other_origin``: how it was created if it was not imported.
    """
    if not imported_from:
        return f"{other_origin}, not imported from {location}"
    if source is None or imported_from == source.snapshot_id:
        return ""
    return f"was imported from snapshot {imported_from}, but {location} contains snapshot {source.snapshot_id}"


def add_import_plan(
    planner: Planner,
    name: str,
    plan_one: Callable[[], list[Action]],
    file: SnapshotFile | None,
    path: str,
    imported_from: str,
) -> None:
    """Add the actions of a task that imports a file.

    If the file of an existing object is missing, an earlier task may write it in the run, and then the import fails.
    ``imported_from``: the snapshot in the file from which the object was imported, or "".
    """
    if not imported_from or file is not None:
        planner.add(name, plan_one)
        return

    def plan_conditionally() -> list[Action]:
        with _file_failures_conditional(path):
            return plan_one()

    planner.add(name, plan_conditionally)
    planner.add_unexpected_failure(
        Failure(f"{name!r} was imported from snapshot {imported_from}, but {path} contains another", "conflict"),
        f"only if an earlier task of the run writes {path}",
    )


def require_writable_file(client: Client, path: str) -> None:
    """Raise Failure if no file can be created at ``path``.

    In check mode, nothing is required, because an earlier task may be one that would create the directory.
    """
    if not client.is_planning:
        _require_writable_directory(path)


def export_to_file(
    client: Client, resource_path: str, path: str, since: str = "", recipients: Sequence[str] = ()
) -> None:
    """Write the snapshot at the API's ``resource_path`` to a file. Plan sessions write no files. Raises Failure.

    ``since``: write only what differs from this snapshot. A plan session finds out whether that is possible.
    ``recipients``: encrypt the file for them.
    """
    query = {"since": since} if since else {}
    if not client.is_planning:
        with new_file_opened(path, recipients, client.timeout) as file:
            _download(client, f"{resource_path}/export", file, query)
    elif since:
        client.call("GET", f"{resource_path}/export", query=query)


def _download(client: Client, resource_path: str, file: NewFile, query: Mapping[str, str]) -> None:
    """Download a file, or the rest of the one that an interrupted export has left behind. Raises Failure."""

    def discard_unless_partial(status: int) -> None:
        if status != _PARTIAL_CONTENT:  # An older gateway sends the whole file.
            file.empty()

    if file.size:
        digest, seconds = file.compute_digest(), file.size / _SKIPPED_BYTES_PER_SECOND
        try:
            client.download(
                resource_path,
                file.write,
                discard_unless_partial,
                timeout=seconds,
                offset=file.size,
                digest=digest,
                **query,
            )
            return
        except Failure as failure:
            if failure.kind != "conflict":
                raise
            file.empty()  # It is the beginning of a different file.
    client.download(resource_path, file.write, **query)


def import_from_file(client: Client, resource_path: str, path: str, identity: str = "", **query: Any) -> None:
    """Import a file, or the rest of it, if the gateway has its beginning from an interrupted import. Raises Failure.

    A plan session predicts the import from the beginning of the file. ``identity``: the path of the file with the key
    that decrypts it. An encrypted file is always sent whole.
    """
    if client.is_planning:
        client.upload(f"{resource_path}/import", lambda: read_head(path, identity, client.timeout), **query)
        return
    if identity:
        with contextlib.ExitStack() as stack:

            def read_decrypted_pieces() -> Iterator[bytes]:
                return stack.enter_context(contextlib.closing(_decrypt_pieces(path, identity, client.timeout)))

            client.upload(f"{resource_path}/import", read_decrypted_pieces, **query)
        return
    continuation = _find_interrupted_import(client, path)
    offset = continuation.get("offset", 0)
    client.upload(f"{resource_path}/import", lambda: read_pieces(path, offset), **query, **continuation)


def _find_interrupted_import(client: Client, path: str) -> dict[str, Any]:
    """Return the parameters of a request that sends only the rest of the file, or {}. Raises Failure."""
    file = read_snapshot_file(path)
    try:
        interrupted_imports = client.call("GET", "/interrupted-imports").data if file else []
    except Failure:
        return {}  # An older gateway. If there is another reason, the import shows it.
    for each in interrupted_imports:
        received_bytes = each.get("receivedBytes") or 0
        if file and each["snapshotID"] == file.snapshot_id and received_bytes:
            digest = hashlib.sha256()
            for piece in read_pieces(path, size=received_bytes):
                digest.update(piece)
            if digest.hexdigest() == each["receivedDigest"]:
                return {"resume": each["id"], "offset": received_bytes}
    return {}


def protect_file(client: Client, path: str) -> None:
    """Make a file readable only by its owner. Plan sessions change no files. Raises Failure."""
    if not client.is_planning:
        make_private(path)


def read_snapshot_file(path: str, identity: str = "", timeout: float = 0.0) -> SnapshotFile | None:
    """Read which snapshot a file contains. Returns None if the file does not exist. Raises Failure.

    ``identity``: the path of the file with the key that decrypts it. Only its beginning is decrypted. ``timeout``: how
    many seconds each step of the decryption may take.
    """
    with _read_errors_explained(path):
        try:
            with Path(path).open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if not _has_matching_identity(path, file, identity):
                    manifest, head = _parse_head(path, file.read)
                    return SnapshotFile(manifest, head, _has_end(file.fileno()), mode)
        except FileNotFoundError:
            return None
        with contextlib.closing(_decrypt_pieces(path, identity, timeout)) as pieces:
            manifest, head = _parse_head(path, _Reader(pieces).read)
        return SnapshotFile(manifest, head, True, mode)


def _has_matching_identity(path: str, file: BinaryIO, identity: str) -> bool:
    """Return whether a file is encrypted. Raises Failure unless there is an identity exactly if it is."""
    is_encrypted = _age.is_encrypted(os.pread(file.fileno(), _age.BEGINNING_BYTES, 0))
    if is_encrypted and not identity:
        raise Failure(f"{path} is encrypted: set age_identity to the path of the file with the key that decrypts it")
    if identity and not is_encrypted:
        raise Failure(f"{path} is not encrypted with age: omit age_identity, or correct import_from")
    return is_encrypted


def _decrypt_pieces(path: str, identity: str, timeout: float) -> Generator[bytes, None, None]:
    with _read_errors_explained(path):
        yield from _age.decrypt(path, identity, timeout)


class _Reader:
    """Reads from pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = b""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        while len(self._buffer) < size and (piece := next(self._pieces, b"")):
            self._buffer += piece
        result, self._buffer = self._buffer[:size], self._buffer[size:]
        return result


def _read_exported_file(path: str, recipients: Sequence[str]) -> SnapshotFile | None:
    """Find out which snapshot the file of an export contains, without decrypting it. Raises Failure."""
    with _read_errors_explained(path):
        try:
            with Path(path).open("rb") as file:
                status, beginning = os.fstat(file.fileno()), file.read(_age.BEGINNING_BYTES)
        except FileNotFoundError:
            return None
    if not _age.is_encrypted(beginning):
        return read_snapshot_file(path)
    if not recipients:
        raise Failure(f"{path} is encrypted: set age_recipients, choose another path, or remove the file first")
    return _read_export_record(path, status) or SnapshotFile(
        {"snapshot_id": _UNKNOWN_ID}, b"", False, stat.S_IMODE(status.st_mode)
    )


def _get_record_path(path: str) -> Path:
    return Path(path).with_name(f".{Path(path).name}.exported")


def _read_export_record(path: str, status: os.stat_result) -> SnapshotFile | None:
    """Return what the export of an encrypted file has recorded, or None if that does not describe the file any more."""
    try:
        descriptor = os.open(_get_record_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            record_status = os.fstat(descriptor)
            if not stat.S_ISREG(record_status.st_mode) or record_status.st_uid != os.geteuid():
                return None
            record = json.loads(file.read(_MAX_RECORD_BYTES))
        if (record["size"], record["mtime_ns"]) != (status.st_size, status.st_mtime_ns):
            return None
        since = record["since"]
        manifest = {
            "snapshot_id": str(record["snapshot_id"]),
            "kind": record["kind"],
            "platform": {} if record["with_memory"] else None,
            "base": since and {"snapshot_id": since["snapshot_id"], "names": list(since.get("names", ()))},
        }
        recipients = tuple(sorted(map(str, record["recipients"])))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return SnapshotFile(manifest, b"", True, stat.S_IMODE(status.st_mode), recipients)


def _write_export_record(path: str, head: bytes, status: os.stat_result, recipients: Sequence[str]) -> None:
    """Record what an encrypted file contains, so that a host without the identity knows it.

    ``head``: the beginning of the contents. ``status``: of the file. Raises Failure and OSError.
    """
    manifest, _head = _parse_head(path, io.BytesIO(head).read)
    file = SnapshotFile(manifest, b"", True, PRIVATE_MODE)
    record = {
        "snapshot_id": file.snapshot_id,
        "kind": manifest["kind"],
        "with_memory": file.has_memory,
        "since": manifest.get("base"),
        "recipients": list(recipients),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    record_path = _get_record_path(path)
    record_path.unlink(missing_ok=True)
    descriptor = os.open(record_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)
    with os.fdopen(descriptor, "w") as file_object:
        json.dump(record, file_object)


def _parse_head(path: str, read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """Return the manifest, and the beginning of a file, up to its end. Raises Failure.

    ``read``: returns as many bytes as it is told, or fewer at the end.
    """
    prefix = read(_PREFIX_BYTES + _RECORD.size)
    if prefix[: len(_MAGIC)] != _MAGIC or len(prefix) < _PREFIX_BYTES + _RECORD.size:
        raise Failure(f"{path} is not a snapshot file: choose another path, or remove the file first")
    version = int.from_bytes(prefix[len(_MAGIC) : _PREFIX_BYTES], "big")
    kind, length = _RECORD.unpack_from(prefix, _PREFIX_BYTES)
    if not 1 <= version <= _NEWEST_VERSION:
        raise Failure(
            f"{path} has format version {version}, but this release of the collection reads only versions up to "
            f"{_NEWEST_VERSION}: upgrade the collection",
            "unsupported",
        )
    contents = read(length) if _HEAD_BYTES < length <= _HEAD_BYTES + _MAX_MANIFEST_BYTES else b""
    try:
        manifest = json.loads(contents[_HEAD_BYTES:])
        sizes = manifest if manifest["kind"] == "volume" else manifest["sizes"]
        size_keys = ("size_mb",) if manifest["kind"] == "volume" else ("cpus", "memory_mb", "disk_mb")
        is_valid = kind == b"H" and len(contents) == length and isinstance(manifest["snapshot_id"], str)
        is_valid = is_valid and all(isinstance(sizes[key], int) for key in size_keys)
        is_valid = is_valid and all(isinstance(part["data_bytes"], int) for part in manifest["parts"])
        base = manifest.get("base")
        is_valid = is_valid and (base is None or isinstance(base["snapshot_id"], str))
        is_valid = is_valid and (base is None or isinstance(base.get("names", []), list))
    except (ValueError, RecursionError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise Failure(f"{path} is damaged: copy it again, or export the snapshot again")
    return manifest, prefix + contents


def _has_end(descriptor: int) -> bool:
    """Return whether a file has the final record of a snapshot file."""
    start = os.fstat(descriptor).st_size - _END_RECORD_BYTES
    return start >= 0 and os.pread(descriptor, _RECORD.size, start) == _END_RECORD


def read_head(path: str, identity: str = "", timeout: float = 0.0) -> list[bytes]:
    """Return the beginning of a file, from which a plan session predicts an import, like ``read_snapshot_file``."""
    file = read_snapshot_file(path, identity, timeout)
    return [file.head] if file else []


def read_pieces(path: str, offset: int = 0, size: int = sys.maxsize) -> Iterator[bytes]:
    """Yield at most ``size`` bytes of a file, from ``offset``. Raises Failure."""
    with _read_errors_explained(path), Path(path).open("rb") as file:
        file.seek(offset)
        while piece := file.read(min(_PIECE_BYTES, size)):
            size -= len(piece)
            yield piece


@contextlib.contextmanager
def _read_errors_explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None


def _require_writable_directory(path: str) -> None:
    """Raise Failure if the directory of a file does not exist, or if no file can be created in it."""
    directory = Path(path).absolute().parent
    if not directory.is_dir():
        raise Failure(f"{path} cannot be written: create the directory {directory} first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Failure(f"{path} cannot be written: no file can be created in {directory}: check its permissions")


def make_private(path: str) -> None:
    """Make a file readable only by its owner. Raises Failure."""
    with _write_errors_explained(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, PRIVATE_MODE)
        finally:
            os.close(descriptor)


class NewFile:
    """A snapshot file that is being written. ``size``: the number of bytes before encryption.

    Its methods raise Failure.
    """

    def __init__(self, path: str, descriptor: int, encryption: _age.Encryption | None = None) -> None:
        """``descriptor``: of a file that can contain the beginning of a snapshot file.

        ``encryption``: writes to it instead, and the file is empty.
        """
        self._path = path
        self._descriptor = descriptor
        self._encryption = encryption
        # `age` already writes to the file, and its position is that of the descriptor.
        self.size = 0 if encryption else os.lseek(descriptor, 0, os.SEEK_END)
        self.head = b""
        """The beginning of the contents, if they are encrypted."""
        self._last_bytes = b""

    def write(self, piece: bytes) -> None:
        self.size += len(piece)
        if self._encryption is not None:
            self.head += piece[: max(0, _MAX_HEAD_BYTES - len(self.head))]
            self._last_bytes = (self._last_bytes + piece[-_END_RECORD_BYTES:])[-_END_RECORD_BYTES:]
            self._encryption.write(piece)
            return
        with _write_errors_explained(self._path):
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]

    def has_end(self) -> bool:
        """Return whether the contents have the final record of a snapshot file."""
        if self._encryption is None:
            return _has_end(self._descriptor)
        return len(self._last_bytes) == _END_RECORD_BYTES and self._last_bytes.startswith(_END_RECORD)

    def finish(self) -> None:
        """Wait until everything has been encrypted, if it is."""
        if self._encryption is not None:
            self._encryption.finish()

    def compute_digest(self) -> str:
        """Return the SHA-256 of the contents."""
        digest = hashlib.sha256()
        with _write_errors_explained(self._path):
            for offset in range(0, self.size, _PIECE_BYTES):
                digest.update(os.pread(self._descriptor, _PIECE_BYTES, offset))
        return digest.hexdigest()

    def empty(self) -> None:
        with _write_errors_explained(self._path):
            os.ftruncate(self._descriptor, 0)
            self.size = os.lseek(self._descriptor, 0, os.SEEK_SET)


@contextlib.contextmanager
def new_file_opened(path: str, recipients: Sequence[str] = (), timeout: float = 0.0) -> Iterator[NewFile]:
    """Yield a new snapshot file, which replaces ``path`` if the context exits without an error.

    Until then, it is called `.NAME.partial`, and only its owner can read it. If an export is killed, or loses its
    connection, the next one continues with this file. Raises Failure, for example if the end of the snapshot file is
    missing.

    ``recipients``: encrypt the file for them. It cannot continue then, and `.NAME.exported` says what it contains.
    ``timeout``: how many seconds each step of the encryption may take.
    """
    target_path = Path(path)
    partial_path = target_path.with_name(f".{target_path.name}.partial")
    with _write_errors_explained(path):
        descriptor = _open_partial_file(partial_path)
    try:
        can_continue = False
        try:
            with contextlib.ExitStack() as stack:
                encryption = stack.enter_context(_encryption_started(recipients, path, descriptor, timeout))
                file = NewFile(path, descriptor, encryption)
                try:
                    yield file
                    if not file.has_end():
                        raise Failure(
                            f"the connection to the gateway was lost before all of {path} had arrived: export the "
                            "snapshot again",
                            "unreachable",
                        )
                except Failure as failure:
                    can_continue = bool(file.size) and failure.kind == "unreachable" and not recipients
                    raise
                file.finish()
            with _write_errors_explained(path):
                os.fsync(descriptor)
                if recipients:
                    # If the task is killed before the next step, the record does not match the older file.
                    _write_export_record(path, file.head, os.fstat(descriptor), recipients)
                partial_path.replace(target_path)
        except BaseException:
            if not can_continue:
                with contextlib.suppress(OSError):
                    partial_path.unlink()
            raise
    finally:
        os.close(descriptor)
    with _write_errors_explained(path):
        _sync_directory(target_path.parent)


@contextlib.contextmanager
def _encryption_started(
    recipients: Sequence[str], path: str, descriptor: int, timeout: float
) -> Iterator[_age.Encryption | None]:
    """Yield what encrypts a file, or None if there are no recipients. Raises Failure."""
    if not recipients:
        yield None
        return
    with _write_errors_explained(path):
        os.ftruncate(descriptor, 0)  # Encryption cannot continue.
    with _age.encryption_started(recipients, path, descriptor, timeout) as encryption:
        yield encryption


def _open_partial_file(path: Path) -> int:
    """Create a file, or open the one that an export left behind, and lock it. Raises Failure and OSError."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)
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
                    os.fchmod(descriptor, PRIVATE_MODE)
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Failure(f"another export is writing {path}: try again when it is finished", "busy") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _require_own_file(path: Path, descriptor: int) -> None:
    """Raise Failure if another user could read what is written to the file, or if it has other hard links."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        raise Failure(f"{path} was not created by an export that this user ran: remove it first")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _write_errors_explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(
            f"{path} cannot be written ({error.strerror or error}): check the path, its permissions, and the free space"
        ) from None
