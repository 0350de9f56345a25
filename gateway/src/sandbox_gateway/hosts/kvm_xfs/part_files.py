"""Read the files that an export contains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.base import SnapshotPart, StreamEncoding
from sandbox_gateway.hosts.kvm_xfs.files.reflink import can_list_extents, list_data_ranges, list_differing_ranges
from sandbox_gateway.hosts.os_errors import translated_os_errors


class PartFiles:
    """Open files with the parts of a snapshot: an implementation of hosts.base.PartSource."""

    encoding = StreamEncoding.PLAIN

    def __init__(
        self,
        paths: Mapping[SnapshotPart, Path],
        snapshot_id: str,
        base_paths: Mapping[SnapshotPart, Path] = MappingProxyType({}),
    ) -> None:
        """Open the files. Raises Conflict if they have been removed, or OSError.

        ``base_paths``: the files of the base. Parts that can share blocks with them are relative.
        """
        with ExitStack() as stack:
            self._descriptors = {part: _open(path, snapshot_id, stack) for part, path in paths.items()}
            bases = {part: _open(path, "since which it is exported", stack) for part, path in base_paths.items()}
            self._bases = {
                part: base
                for part, base in bases.items()
                if part in paths and _are_comparable(self._descriptors[part], base)
            }
            self.relative_parts = frozenset(self._bases)
            self.sizes = {part: os.fstat(descriptor).st_size for part, descriptor in self._descriptors.items()}
            self._stack = stack.pop_all()

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        with translated_os_errors():
            if part in self._bases:
                # The files may have been removed.
                yield from list_differing_ranges(*map(_get_path, (self._descriptors[part], self._bases[part])))
            else:
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


def _open(path: Path, snapshot_id: str, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Conflict(f"snapshot {snapshot_id} is being removed: export a different snapshot") from None
    stack.callback(os.close, descriptor)
    return descriptor


def _get_path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


def _are_comparable(descriptor: int, other: int) -> bool:
    """Return whether two files have the same size, and are on the same file system, which can list their extents."""
    status, other_status = os.fstat(descriptor), os.fstat(other)
    return can_list_extents(descriptor) and (status.st_dev, status.st_size) == (
        other_status.st_dev,
        other_status.st_size,
    )
