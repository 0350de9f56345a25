"""Export snapshots of jails and volumes as ZFS streams, and import them.

The header of a file states the size of each part, and a file can be authenticated only after its end has been read.
Therefore, exports and imports store the whole stream in an unnamed temporary file, which a crash cannot leave behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("jail_zfs")


class Streams(Protocol):
    """Sends the snapshots of either sandboxes or volumes. Methods block, are thread-safe, and raise GatewayError."""

    def measure(self, snapshot_id: str) -> int:
        """Return the number of bytes that the snapshot's files use in the pool."""

    def send(self, snapshot_id: str, file: int) -> None:
        """Write a stream that contains the whole snapshot, without properties, to the descriptor ``file``."""


class StreamSource:
    """The stream of a snapshot: an implementation of hosts.base.SnapshotSource and PartSource."""

    line = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.architecture = os.uname().machine
        self.platform: Mapping[str, str] = {}
        self.sizes = {SnapshotPart.STREAM: os.fstat(file.fileno()).st_size}

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        yield 0, self.sizes[part]

    def read(self, part: SnapshotPart, offset: int, length: int) -> bytes:
        data = os.pread(self._file.fileno(), length, offset)
        if len(data) != length:
            raise BackendFailed("the stream of the snapshot was truncated while it was being exported: export it again")
        return data

    def close(self) -> None:
        self._file.close()


def open_source(streams: Streams, snapshot_id: str, directory: Path, reserve_bytes: int) -> StreamSource:
    """Send a snapshot to a temporary file in ``directory``, on whose disk ``reserve_bytes`` stay free. Blocks.

    Raises GatewayError.
    """
    # If the dataset is compressed, the stream can be larger. Sending it then fails.
    file = _create_file(directory, streams.measure(snapshot_id) + reserve_bytes, "export the snapshot")
    try:
        streams.send(snapshot_id, file.fileno())
        return StreamSource(file)
    except BaseException:
        file.close()
        raise


class StreamTarget:
    """A snapshot or volume that is being imported: an implementation of hosts.base.ImportTarget.

    ``receive``: creates it from the stream in a descriptor. ``discard``: removes it, and what a failed ``receive`` left
    behind. Both block. ``on_commit``: called at the end of ``commit``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        receive: Callable[[int], None],
        discard: Callable[[], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._receive = receive
        self._discard = discard
        self._on_commit = on_commit
        self._file: BinaryIO | None = None

    def create(self, size: int, reserve_bytes: int) -> None:
        """Create the temporary file for a stream of ``size`` bytes. Raises GatewayError."""
        self._file = _create_file(self._directory, size + reserve_bytes, "import the snapshot")
        with translated_os_errors(str(self._directory)):
            os.ftruncate(self._file.fileno(), size)

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        assert self._file is not None
        with translated_os_errors(str(self._directory)):
            write_all(self._file.fileno(), data, offset)

    async def commit(self) -> None:
        await finish_despite_cancellation(run_in_thread(self._receive_file))
        self._on_commit()

    def _receive_file(self) -> None:
        assert self._file is not None
        with self._file:
            self._receive(self._file.fileno())

    async def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        await clean_up(log, run_in_thread(self._discard))


def _create_file(directory: Path, size: int, action: str) -> BinaryIO:
    """Create a temporary file in ``directory``, on whose disk at least ``size`` bytes are free. Raises GatewayError."""
    with translated_os_errors(str(directory)):
        if shutil.disk_usage(directory).free < size:
            raise NoSpace(
                f"there is not enough space in {directory} to {action}: the whole stream is stored there first. Free "
                "some space there"
            )
        # Not in the pool, because zfs-fuse could deadlock.
        return tempfile.TemporaryFile(dir=directory, prefix="stream-")
