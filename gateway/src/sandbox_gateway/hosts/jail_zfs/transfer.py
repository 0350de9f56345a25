"""Export snapshots of jails and volumes as ZFS streams, and import them.

The header of a file states the size of each part, so an export stores the whole stream in an unnamed temporary file,
which a crash cannot leave behind. ZFS must not receive data of an unknown signer. Therefore, an import does the same
(``StreamTarget``), unless each piece of the file is authentic when it arrives (``ReceivingTarget``).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, Protocol

from zfs_core.stream_format import RECORD_BYTES, parse_begin_record

from sandbox_gateway.errors import BackendFailed, GatewayError, NoSpace, Timeout
from sandbox_gateway.hosts.base import ImportBase, SnapshotPart, StreamEncoding
from sandbox_gateway.hosts.jail_zfs.storage.snapshot_streams import check_stream
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("jail_zfs")

_MAX_ZERO_CHUNK_BYTES = 1 << 20
_PIPE_SECONDS = 60


class StreamSource:
    """The stream of a snapshot: an implementation of hosts.base.SnapshotSource and PartSource."""

    line = False
    relative_parts: frozenset[SnapshotPart] = frozenset()

    def __init__(self, file: BinaryIO, encoding: StreamEncoding) -> None:
        self._file = file
        self.encoding = encoding
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


def open_source(
    directory: Path, reserve_bytes: int, *, measure: Callable[[], int], send: Callable[[int], StreamEncoding]
) -> StreamSource:
    """Send a snapshot to a temporary file in ``directory``, on whose disk ``reserve_bytes`` stay free. Blocks.

    ``measure``: returns how many bytes the stream will have at most. ``send``: writes it to a descriptor. Raises
    GatewayError.
    """
    # If the dataset is compressed, and zfs-fuse sends it, the stream can be larger. Sending it then fails.
    file = _create_file(directory, measure() + reserve_bytes, "export the snapshot")
    try:
        encoding = send(file.fileno())
        return StreamSource(file, encoding)
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
        calls: StorageCalls,
        *,
        receive: Callable[[int], None],
        discard: Callable[[], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._calls = calls
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
        await finish_despite_cancellation(self._calls.run(self._receive_file))
        self._on_commit()

    def _receive_file(self) -> None:
        assert self._file is not None
        with self._file:
            self._receive(self._file.fileno())

    async def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        await clean_up(log, run_in_thread(self._discard))


class Receiver(Protocol):
    """Receives the streams of snapshots. Methods block, are thread-safe, and raise GatewayError."""

    def receive_part(self, record: Snapshot, file: int, size: int, *, base: ImportBase | None = None) -> None:
        """Receive a stream of ``size`` bytes, or its rest, from a pipe. If the pipe ends early, keeps what arrived.

        ``base``: the snapshot that the stream needs.
        """

    def complete(self, record: Snapshot) -> None:
        """Commit the record of a snapshot that has been received, and give its dataset the final name."""

    def get_resume_token(self, record: Snapshot) -> str:
        """Return the token of a snapshot that was received in part, or "" if nothing of it was kept."""

    def discard(self, record: Snapshot) -> None:
        """Remove a snapshot, whether it was received completely or in part."""


class ReceivingTarget:
    """A snapshot that ZFS receives while it arrives: an implementation of hosts.base.ResumableTarget.

    Each piece that is written must be authentic. Methods may be called in different threads, but not concurrently.
    ``base``: the snapshot that the stream needs. Such an import cannot be resumed.
    """

    def __init__(
        self,
        receiver: Receiver,
        snapshot: Snapshot,
        size: int,
        *,
        on_commit: Callable[[Snapshot], None],
        base: ImportBase | None = None,
    ) -> None:
        self._receiver = receiver
        self._on_commit = on_commit
        self._base = base
        self._start(snapshot, size, is_resuming=False)

    def _start(self, snapshot: Snapshot, size: int, *, is_resuming: bool) -> None:
        self._snapshot, self._size, self._is_resuming = snapshot, size, is_resuming
        self._position = 0
        self._begin_record = b""
        self._pipe: _Pipe | None = None

    def resume(self, snapshot: Snapshot, sizes: Mapping[SnapshotPart, int]) -> None:
        self._start(snapshot, sizes[SnapshotPart.STREAM], is_resuming=True)

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        self._write_zeros(offset)
        self._write_next(data)

    def _write_zeros(self, end: int) -> None:
        """Write the bytes up to ``end`` that the file omits because they are zero."""
        while self._position < end:
            self._write_next(bytes(min(end - self._position, _MAX_ZERO_CHUNK_BYTES)))

    def _write_next(self, data: bytes) -> None:
        self._position += len(data)
        if self._pipe is None:
            self._begin_record += data
            if len(self._begin_record) < RECORD_BYTES:
                return
            data = self._begin_record
            check_stream(parse_begin_record(data), is_resuming=self._is_resuming, base=self._base)
            self._pipe = _Pipe(lambda fd: self._receiver.receive_part(self._snapshot, fd, self._size, base=self._base))
        self._pipe.write(data)

    async def commit(self) -> None:
        await finish_despite_cancellation(run_in_thread(self._finish))
        self._on_commit(self._snapshot)

    def _finish(self) -> None:
        self._write_zeros(self._size)
        if self._pipe is None:
            check_stream(None)
        else:
            self._pipe.close()
        # Nothing uses this dataset, because it is never mounted.
        self._receiver.complete(self._snapshot)

    async def suspend(self) -> str:
        return await finish_despite_cancellation(run_in_thread(self._suspend))

    def _suspend(self) -> str:
        self._close_pipe()
        if self._base is not None:
            return ""  # Nothing would prevent the removal of the base until the import is resumed.
        with contextlib.suppress(GatewayError):
            return self._receiver.get_resume_token(self._snapshot)
        return ""

    async def discard(self) -> None:
        await clean_up(log, run_in_thread(self._discard))

    def _discard(self) -> None:
        self._close_pipe()
        self._receiver.discard(self._snapshot)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(GatewayError):
                self._pipe.close()


class _Pipe:
    """A pipe whose contents ``work``, which gets its descriptor, reads in another thread."""

    def __init__(self, work: Callable[[int], None]) -> None:
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._result: Future[None] = Future()
        threading.Thread(target=self._run, args=(work, read_fd), name="zfs receive", daemon=True).start()

    def _run(self, work: Callable[[int], None], read_fd: int) -> None:
        try:
            work(read_fd)
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)
        finally:
            os.close(read_fd)

    def write(self, data: bytes) -> None:
        """Write everything. Raises the error of ``work`` if it has ended, or Timeout if it does not read."""
        view = memoryview(data)
        poll = select.poll()
        poll.register(self._write_fd, select.POLLOUT)
        try:
            while view:
                if not poll.poll(_PIPE_SECONDS * 1000):
                    raise Timeout(
                        f"`zfs receive` has not read anything for {_PIPE_SECONDS} s: run `zpool status` to find out "
                        "whether the pool responds"
                    )
                view = view[os.write(self._write_fd, view) :]
        except BrokenPipeError:
            self._result.result()
            raise BackendFailed("`zfs receive` ended before the end of the stream: import the snapshot again") from None

    def close(self) -> None:
        """End the contents, and wait for ``work``. Raises its error. May be called again."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1
        self._result.result()


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
