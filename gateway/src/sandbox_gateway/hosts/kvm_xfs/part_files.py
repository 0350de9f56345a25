"""Read the files that an export contains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.base import SnapshotPart, StreamEncoding
from sandbox_gateway.hosts.kvm_xfs.files.reflink import list_data_ranges
from sandbox_gateway.hosts.os_errors import translated_os_errors


class PartFiles:
    """Open files with the parts of a snapshot: an implementation of hosts.base.PartSource."""

    encoding = StreamEncoding.PLAIN

    def __init__(self, paths: Mapping[SnapshotPart, Path], snapshot_id: str) -> None:
        """Open the files. Raises Conflict if they have been removed, or OSError."""
        self._descriptors: dict[SnapshotPart, int] = {}
        with ExitStack() as stack:
            for part, path in paths.items():
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    raise Conflict(f"snapshot {snapshot_id} is being removed: export a different snapshot") from None
                stack.callback(os.close, descriptor)
                self._descriptors[part] = descriptor
            self.sizes = {part: os.fstat(descriptor).st_size for part, descriptor in self._descriptors.items()}
            self._stack = stack.pop_all()

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        with translated_os_errors():
            yield from list_data_ranges(self._descriptors[part])

    def read(self, part: SnapshotPart, offset: int, length: int) -> bytes:
        with translated_os_errors():
            data = os.pread(self._descriptors[part], length, offset)
        if len(data) != length:
            raise BackendFailed(
                f"the {part} of the snapshot was truncated during the export: export a different snapshot"
            )
        return data

    def get_descriptor(self, part: SnapshotPart) -> int | None:
        return self._descriptors.get(part)

    def close(self) -> None:
        self._stack.close()
