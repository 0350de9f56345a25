"""Read the files of a snapshot for an export, and write the files of an imported snapshot.

All file names come from the layout. Data from outside never names a file: it is only compared, or written to these
files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.base import MEMORY_PARTS, SnapshotPart, SnapshotSource
from sandbox_gateway.hosts.kvm_xfs import commit_protocol
from sandbox_gateway.hosts.kvm_xfs.files.layout import SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.files.reflink import clone_or_copy_fd, clone_range, punch_hole
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import compute_check
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import create_runs_from_mask
from sandbox_gateway.hosts.kvm_xfs.part_files import PartFiles
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Snapshot
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

_CPU_FIELDS = frozenset({"vendor_id", "cpu family", "model", "model name", "stepping", "flags", "features"})
"""The lines of /proc/cpuinfo that distinguish CPU models. The clock speed, for example, differs at each read."""
_CPU_INFO = Path("/proc/cpuinfo")
_BLOCK_BYTES = 4096
_MIN_SHARED_BYTES = 64 << 10
"""Shorter runs are written, because each shared run is an extent of its own."""

log = Logger("kvm_xfs")


def build_portable_platform(platform: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded platform of a machine in a form that can be compared across hosts.

    The CPU model `host` can mean a different CPU on each host. It is therefore followed by a digest of this
    host's CPU.
    """
    if platform.get("cpu_model") != "host":
        return dict(platform)
    lines = _CPU_INFO.read_text().split("\n\n", 1)[0].splitlines()
    fields = [line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS]
    digest = hashlib.sha256("\n".join(fields).encode()).hexdigest()[:16]
    return {**platform, "cpu_model": f"host {digest}"}


def find_platform_problem(own_platform: Mapping[str, str], other_platform: Mapping[str, str]) -> str:
    """Return, as a clause, why memory captured on ``other_platform`` cannot be restored on ``own_platform``, or ""."""
    for key, value in build_portable_platform(own_platform).items():
        if other_platform.get(key) != value:
            name = key.replace("_", " ")
            return f"it was captured with {name} {other_platform.get(key)!r}, but this host has {value!r}"
    return ""


class SnapshotFileSource(PartFiles):
    """The open files of a snapshot: an implementation of hosts.base.SnapshotSource."""

    def __init__(
        self, files: SnapshotFiles, snapshot: Snapshot, *, memory: bool, base: SnapshotFiles | None = None
    ) -> None:
        """Open the files. ``base``: those of the base. Raises Conflict if they have been removed, or OSError."""
        base_paths = {} if base is None else _list_relative_paths(base, memory=memory)
        super().__init__(_list_paths(files, memory=memory), snapshot.id, base_paths)
        self.architecture = os.uname().machine
        self.platform = build_portable_platform(snapshot.host["platform"]) if memory else {}
        self.line = memory and bool(snapshot.host.get("line"))


class SnapshotFileTarget:
    """The files of a snapshot in its partial directory: an implementation of hosts.base.ImportTarget."""

    def __init__(self, snapshots: Snapshots, snapshot: Snapshot, platform: Mapping[str, str], *, line: bool) -> None:
        """``platform``: this host's platform, which equals the platform of the memory."""
        self._snapshots = snapshots
        self._snapshot = snapshot
        self._files = snapshots.partial_files(snapshot)
        self._has_memory = snapshot.memory is not MemoryMode.NONE
        self._location = "the state file system"
        if self._files.memory_directory is not None:
            self._location += f" or in the memory root {self._files.memory_directory.root}"
        if self._has_memory:
            snapshot.host |= {"platform": dict(platform), "line": line}
        self._descriptors: dict[SnapshotPart, int] = {}
        self._bases: list[SnapshotFileSource] = []
        self._unshareable_parts: set[SnapshotPart] = set()
        """The parts whose file system cannot share extents with the bases."""
        self._relative_parts: set[SnapshotPart] = set()
        """The parts that began with the contents of the base."""
        self._stack = ExitStack()

    def create(
        self, sizes: Mapping[SnapshotPart, int], base_paths: Mapping[SnapshotPart, Path] = MappingProxyType({})
    ) -> None:
        """Create the files: clones of ``base_paths``, or else single holes. Raises GatewayError."""
        with translated_os_errors(self._location):
            self._files.directory.mkdir(mode=0o700)
            for part, path in _list_paths(self._files, memory=self._has_memory).items():
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._stack.callback(os.close, descriptor)
                if part in base_paths:
                    self._relative_parts.add(part)
                    _clone_base(base_paths[part], descriptor, part, sizes[part])
                else:
                    os.ftruncate(descriptor, sizes[part])
                self._descriptors[part] = descriptor

    def use_bases(self, bases: Sequence[SnapshotSource]) -> None:
        self._bases = [base for base in bases if isinstance(base, SnapshotFileSource)]

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        descriptor, position = self._descriptors[part], 0
        with translated_os_errors(self._location):
            is_zero = part in self._relative_parts and data == bytes(len(data))
            if is_zero and punch_hole(descriptor, offset, len(data)):
                return
            for start, end in self._share(part, offset, data):
                write_all(descriptor, data[position:start], offset + position)
                position = end
            write_all(descriptor, data[position:], offset + position)

    def _share(self, part: SnapshotPart, offset: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Share the runs of blocks that a base has at the same place. Yield the (start, end) of each in ``data``."""
        for base in self._bases if part not in self._unshareable_parts else ():
            source = base.get_descriptor(part)
            if source is None:
                continue
            runs = _list_equal_runs(data, os.pread(source, len(data), offset))
            for start, end in runs:
                if not clone_range(source, self._descriptors[part], offset + start, end - start):
                    self._unshareable_parts.add(part)
                    return
                yield start, end
            if runs:
                return

    async def commit(self) -> None:
        with translated_os_errors(self._location):
            await finish_despite_cancellation(asyncio.to_thread(self._commit))

    def _commit(self) -> None:
        self._stack.close()
        if self._has_memory:
            self._snapshot.host["image"] = compute_check(self._files.memory).model_dump(mode="json")
        # The commit of a snapshot does not sync these, because a capture shares them with its machine.
        commit_protocol.sync_files([self._files.kernel, self._files.initrd])
        self._snapshots.commit(self._snapshot)

    async def discard(self) -> None:
        self._stack.close()
        await clean_up(log, asyncio.to_thread(self._snapshots.undo, self._snapshot))


def _list_equal_runs(data: bytes, other_data: bytes) -> list[tuple[int, int]]:
    """Return the (start, end) of each long run of whole blocks that are equal in both."""
    length = min(len(data), len(other_data)) // _BLOCK_BYTES * _BLOCK_BYTES
    blocks, other_blocks = (
        np.frombuffer(each, np.uint64, length // 8).reshape(-1, _BLOCK_BYTES // 8) for each in (data, other_data)
    )
    runs = create_runs_from_mask((blocks == other_blocks).all(axis=1), 0, _BLOCK_BYTES).tolist()
    return [(start, start + size) for start, size in runs if size >= _MIN_SHARED_BYTES]


def list_base_paths(files: SnapshotFiles, parts: Collection[SnapshotPart]) -> dict[SnapshotPart, Path]:
    """Return the paths of these parts of a base."""
    return {part: path for part, path in _list_paths(files, memory=True).items() if part in parts}


def _list_relative_paths(files: SnapshotFiles, *, memory: bool) -> dict[SnapshotPart, Path]:
    """Return the paths of the parts of a base that exist, and that can differ little from those of a later snapshot."""
    paths = _list_paths(files, memory=memory)
    return {part: path for part, path in paths.items() if part is not SnapshotPart.DEVICE_STATE and path.exists()}


def _clone_base(path: Path, descriptor: int, part: SnapshotPart, size: int) -> None:
    """Let a new file begin with the contents of a part of the base. Raises GatewayError or OSError."""
    with path.open("rb") as base:
        if os.fstat(base.fileno()).st_size != size:
            raise Invalid(f"the {part} of the snapshot that the file needs has another size here: import a whole file")
        clone_or_copy_fd(base.fileno(), descriptor)


def _list_paths(files: SnapshotFiles, *, memory: bool) -> dict[SnapshotPart, Path]:
    paths = {
        SnapshotPart.KERNEL: files.kernel,
        SnapshotPart.INITRD: files.initrd,
        SnapshotPart.DISK: files.disk,
        SnapshotPart.MEMORY: files.memory,
        SnapshotPart.DEVICE_STATE: files.device_state,
    }
    return {part: path for part, path in paths.items() if memory or part not in MEMORY_PARTS}
