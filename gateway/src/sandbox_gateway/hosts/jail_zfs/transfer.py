"""Export snapshots of jails as ZFS streams, and import them.

The header of a file states the size of each part, and a file can be authenticated only after its end has been read.
Therefore, exports and imports store the whole stream in an unnamed temporary file, which a crash cannot leave behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_streams import SnapshotStreams
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("jail_zfs")


class StreamSource:
    """The stream of a snapshot: an implementation of hosts.base.SnapshotSource."""

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


def open_source(streams: SnapshotStreams, snapshot: Snapshot, directory: Path, reserve_bytes: int) -> StreamSource:
    """Send a snapshot to a temporary file in ``directory``, on whose disk ``reserve_bytes`` stay free. Blocks.

    Raises GatewayError.
    """
    # If the dataset is compressed, the stream can be larger. Sending it then fails.
    file = _create_file(directory, streams.measure(snapshot.id) + reserve_bytes, "export the snapshot")
    try:
        streams.send(snapshot.id, file.fileno())
        return StreamSource(file)
    except BaseException:
        file.close()
        raise


class StreamTarget:
    """A snapshot that is being imported: an implementation of hosts.base.SnapshotTarget."""

    def __init__(
        self, streams: SnapshotStreams, snapshot: Snapshot, directory: Path, on_commit: Callable[[Snapshot], None]
    ) -> None:
        self._streams = streams
        self._snapshot = snapshot
        self._directory = directory
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
        self._snapshot.host = {"zfsSnapshot": self._streams.get_full_name(self._snapshot)}
        await finish_despite_cancellation(run_in_thread(self._receive))
        self._on_commit(self._snapshot)

    def _receive(self) -> None:
        assert self._file is not None
        with self._file:
            self._streams.receive(self._snapshot, self._file.fileno())

    async def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        await clean_up(log, run_in_thread(self._streams.discard, self._snapshot))


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
