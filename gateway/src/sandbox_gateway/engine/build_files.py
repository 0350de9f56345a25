"""Store the archives that clients upload for the COPY steps of builds, until no build has used them for a day.

The name of an archive is the digest of its files, which is checked when it arrives, unless E2B's client has computed
it: see ``image_steps.name_unchecked_archive``. Nothing on the host unpacks an archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandbox_gateway.engine.archive_digest import ArchiveHasher
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.image_steps import find_archive, name_unchecked_archive
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.transfer.transfers import Transfers, join_into_batches
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NoSpace, OverQuota
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import finish_despite_cancellation

_MAX_TOTAL_SIZE_FACTOR = 4
"""The maximum total size of all archives, as a multiple of the maximum size of one."""
_MAX_UNUSED_SECONDS = 86400
_MIN_KEEP_SECONDS = 3600
"""An archive that was used within this time is not removed to make room: its build may be about to start."""
_SWEEP_INTERVAL_SECONDS = 3600
_PIECE_BYTES = 1 << 20
_MAX_ANNOUNCED = 1000
_PARTIAL_PREFIX = ".partial-"
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

log = Logger("templates")


@dataclass(frozen=True)
class StoredArchive:
    """An open archive."""

    size: int
    _file: BinaryIO

    async def read_pieces(self) -> AsyncIterator[bytes]:
        os.utime(self._file.fileno())
        while piece := await finish_despite_cancellation(asyncio.to_thread(self._file.read, _PIECE_BYTES)):
            yield piece


class BuildFiles:
    def __init__(self, context: Context, room: RoomMonitor, transfers: Transfers) -> None:
        self._room = room
        self._transfers = transfers
        self._directory = context.config.host.state_root / "build-files"
        self._limit_mb = context.config.limits.upload_mb
        self._max_bytes = self._limit_mb << 20
        self._announced_names: set[str] = set()
        self._uploading_bytes = 0
        """The sizes that running uploads have announced."""

    def open(self) -> None:
        """Remove the partial files of interrupted uploads."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.glob(f"{_PARTIAL_PREFIX}*"):
            path.unlink()

    async def watch(self) -> None:
        """Remove archives that no build has used for a day. Never returns."""
        while True:
            try:
                await asyncio.to_thread(self._remove_unused_archives)
            except OSError as error:
                log.error("unused archives could not be removed", reason=str(error))
            await asyncio.sleep(_SWEEP_INTERVAL_SECONDS)

    def _remove_unused_archives(self) -> None:
        for path, status in self._list_archives():
            if time.time() - status.st_mtime > _MAX_UNUSED_SECONDS:
                path.unlink(missing_ok=True)

    def _list_archives(self) -> list[tuple[Path, os.stat_result]]:
        """Return the complete archives, least recently used first."""
        paths = [path for path in self._directory.iterdir() if not path.name.startswith(_PARTIAL_PREFIX)]
        return sorted(((path, path.stat()) for path in paths), key=lambda entry: entry[1].st_mtime)

    @property
    def max_archive_bytes(self) -> int:
        return self._max_bytes

    def has(self, name: str) -> bool:
        """Return whether the archive exists or was announced."""
        return name in self._announced_names or (self._directory / name).exists()

    def announce(self, name: str) -> None:
        """In a plan session, make builds behave as if the archive were stored, because the run will upload it."""
        if len(self._announced_names) >= _MAX_ANNOUNCED:
            raise OverQuota(f"the plan session has more than {_MAX_ANNOUNCED} uploads: split the play")
        self._announced_names.add(name)

    def mark_used(self, name: str) -> bool:
        """Return whether the archive exists. If it does, mark it as used now."""
        try:
            os.utime(self._directory / name)
        except FileNotFoundError:
            return False
        return True

    def require_archives(self, commands: Iterable[str]) -> None:
        """Raise Conflict unless all archives that these commands copy exist."""
        for name in filter(None, map(find_archive, commands)):
            if not self.has(name):
                raise _create_missing_error(name)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[StoredArchive]:
        """Open an archive. Raises Conflict if it does not exist."""
        if name in self._announced_names:
            yield StoredArchive(0, io.BytesIO())
            return
        try:
            file = (self._directory / name).open("rb")
        except FileNotFoundError:
            raise _create_missing_error(name) from None
        with file:
            yield StoredArchive(os.fstat(file.fileno()).st_size, file)

    async def store(
        self, digest: str, pieces: AsyncIterator[bytes], announced_size: int | None, *, is_checked: bool
    ) -> None:
        """Store an archive, replacing one with the same digest. ``announced_size``: None if it is unknown.

        ``is_checked``: raise Invalid unless the archive has this digest.
        """
        name = digest if is_checked else name_unchecked_archive(digest)
        hasher = ArchiveHasher() if is_checked else None
        size = self._max_bytes if announced_size is None else announced_size
        if size > self._max_bytes:
            raise self._create_too_large_error()
        with self._transfers.slot_held():
            async with self._room.reserved_for_import(size, 0, subject="the upload") as pending_upload:
                self._uploading_bytes += size
                path = self._directory / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"
                try:
                    await finish_despite_cancellation(asyncio.to_thread(self._make_room))
                    with os.fdopen(os.open(path, _CREATE_FLAGS, 0o600), "wb") as file:
                        received_bytes = 0
                        async for batch in join_into_batches(pieces):
                            received_bytes += len(batch)
                            if received_bytes > self._max_bytes:
                                raise self._create_too_large_error()
                            await finish_despite_cancellation(asyncio.to_thread(_write, file, batch, hasher))
                            pending_upload.count_written_bytes(len(batch), memory=False)
                        if hasher is not None:
                            _require_digest(digest, hasher.compute())
                        await finish_despite_cancellation(asyncio.to_thread(_flush, file))
                    path.rename(self._directory / name)
                except OSError as error:
                    raise _create_storage_error(error) from None
                finally:
                    self._uploading_bytes -= size
                    path.unlink(missing_ok=True)
        log.info("archive stored", name=name, bytes=received_bytes)

    def _make_room(self) -> None:
        """Remove the least recently used archives until the running uploads fit. Raises OverQuota."""
        archives = self._list_archives()
        excess = (
            sum(status.st_size for _, status in archives)
            + self._uploading_bytes
            - _MAX_TOTAL_SIZE_FACTOR * self._max_bytes
        )
        for path, status in archives:
            if excess <= 0 or time.time() - status.st_mtime < _MIN_KEEP_SECONDS:
                break
            path.unlink(missing_ok=True)
            excess -= status.st_size
        if excess > 0:
            raise OverQuota(
                f"the archives that builds have used within the last hour would take up more than "
                f"{_MAX_TOTAL_SIZE_FACTOR * self._limit_mb} MiB, four times limits.upload_mb: try again later, or "
                "raise that limit"
            )

    def _create_too_large_error(self) -> OverQuota:
        return OverQuota(
            f"the archive is larger than {self._limit_mb} MiB (limits.upload_mb): list files that the template "
            "does not need in .dockerignore, or raise that limit"
        )


def _write(file: BinaryIO, batch: bytes, hasher: ArchiveHasher | None) -> None:
    """Write a piece of an archive, and add it to ``hasher``. Blocks."""
    file.write(batch)
    if hasher is not None:
        hasher.feed(batch)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _require_digest(announced_digest: str, digest: str) -> None:
    """Raise Invalid unless the two are equal."""
    if digest != announced_digest:
        raise Invalid(
            f"the files in the archive have the digest {digest}, but the client announced {announced_digest}: upload "
            "the files again, under the digest that docs/api.md describes"
        )


def _create_missing_error(name: str) -> Conflict:
    return Conflict(
        f"the archive of a COPY step ({name}) is not stored on this gateway, which removes archives that no "
        "build has used for a day: build the template again with the client, so that it uploads the files"
    )


def _create_storage_error(error: OSError) -> BackendFailed | NoSpace:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace("no space left for the archive: remove snapshots or sandboxes, or enlarge the file system")
    return BackendFailed(f"the archive cannot be stored: {error.strerror}. Look at the gateway's log")
