"""Store memory images on file systems other than the state root's, and detect when they are not mounted.

The gateway creates a directory with a random name in a memory root when it uses the root for the first time, and
remembers the root. If the directory is missing later, the root is not mounted. The gateway then creates nothing in it,
because images would fill the file system that contains the mount point.

The gateway keeps no files open, so a root can be unmounted unless a machine maps an image in it. Each use checks the
root again.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.base import MemoryDisk
from sandbox_gateway.hosts.kvm_xfs import commit_protocol
from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX
from sandbox_gateway.hosts.kvm_xfs.files import held_images
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout, MemoryDirectory, SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Snapshot, new_id
from sandbox_gateway.validation import explain

log = Logger("kvm_xfs")


class _KnownRoots(BaseModel):
    """The contents of the file `Layout.memory_roots`."""

    gateway: str
    """The name of this gateway's directory in each memory root."""
    roots: list[Path]
    """The roots in which the gateway has created this directory."""


class MemoryRoots:
    """Manages the memory images of one gateway. ``root`` is the configured memory root, or None."""

    def __init__(self, layout: Layout, root: Path | None) -> None:
        self._layout = layout
        self._root = root

    def open(self) -> None:
        """Use the configured root if it is available. Raises BackendFailed if the known roots cannot be read."""
        self._read_known_roots()
        try:
            self.find_capture_directory()
        except Conflict as error:
            log.warning("memory root not available", reason=error.message)

    def find_capture_directory(self) -> MemoryDirectory | None:
        """Return where to store the memory image of a new snapshot, or None for the snapshot's own directory.

        Raises Conflict if the configured root is not available.
        """
        if self._root is None:
            return None
        known_roots = self._read_known_roots()
        directory = MemoryDirectory(self._root, known_roots.gateway)
        if self._root not in known_roots.roots:
            self._start_using(directory, known_roots)
        elif problem := _find_problem(directory):
            raise Conflict(
                f"the memory root {self._root} is not available: {problem}. Mount it, or take a snapshot without memory"
            )
        return directory

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        """Return why the memory of a snapshot cannot be restored now, as a clause, or "" if it can."""
        memory_directory = MemoryDirectory.from_snapshot(snapshot)
        if snapshot.memory is MemoryMode.NONE or memory_directory is None:
            return ""
        if problem := _find_problem(memory_directory):
            return problem
        files = self._layout.snapshot(snapshot)
        try:
            if files.memory.stat().st_size >= snapshot.resources.memory_mb << 20:
                return ""
            return f"{files.memory} is too short"
        except OSError as error:
            return f"{files.memory}: {error.strerror}"

    def require_memory(self, snapshot: Snapshot) -> None:
        """Raise Conflict if the memory of a snapshot cannot be restored now."""
        if problem := self.find_memory_problem(snapshot):
            raise Conflict(
                f"the memory of snapshot {snapshot.id} is not available: {problem}. Mount its memory root, or boot "
                "from its disk with 'coldStart: true', or resume a paused sandbox with 'memory: false'"
            )

    def sweep(self, quarantine: Quarantine, repaired: list[str]) -> None:
        """Remove images that belong to neither a snapshot nor a machine. Adds a sentence for each to ``repaired``.

        Skips roots that are not mounted. Keeps the images of objects in quarantine.
        """
        known_roots = self._read_known_roots()
        held_files = {*self._list_held_files(quarantine)} if known_roots.roots else set()
        for root in known_roots.roots:
            directory = MemoryDirectory(root, known_roots.gateway)
            if _find_problem(directory):
                continue
            for id, image in directory.list_snapshot_images().items():
                if not self._has_snapshot(id) and not quarantine.contains(id):
                    image.unlink()
                    repaired.append(f"removed the memory image {image}, which belonged to no snapshot")
            for file in directory.list_machine_files():
                if file not in held_files:
                    held_images.remove_targets([file])
                    repaired.append(f"removed the memory image {file}, which belonged to no machine")

    def measure_disk(self) -> MemoryDisk | None:
        """Return the space on the configured root's file system, or None if images are stored in the state root."""
        if self._root is None:
            return None
        try:
            known_roots = self._read_known_roots()
            if self._root in known_roots.roots and (
                problem := _find_problem(MemoryDirectory(self._root, known_roots.gateway))
            ):
                return MemoryDisk(str(self._root), problem=problem)
            status = os.statvfs(self._root)
        except OSError as error:
            return MemoryDisk(str(self._root), problem=f"{self._root}: {error.strerror}")
        return MemoryDisk(str(self._root), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)

    def _has_snapshot(self, id: str) -> bool:
        return any((parent / id).exists() for parent in (self._layout.templates, self._layout.snapshots))

    def _list_held_files(self, quarantine: Quarantine) -> Iterator[Path]:
        """Yield the files in memory roots that machines use, including those of sandboxes in quarantine."""
        for directory in [*self._layout.instances(), *quarantine.list_subdirectories()]:
            yield from held_images.list_targets_in(directory)

    def _start_using(self, directory: MemoryDirectory, known_roots: _KnownRoots) -> None:
        """Create the gateway's directory in the configured root. Raises Conflict if the root cannot be used."""
        try:
            problem = _find_root_problem(directory.root)
            if not problem:
                self._write_known_roots(known_roots)  # The name must not change if a later step is interrupted.
                for path in (directory.directory, directory.snapshots, directory.machines):
                    path.mkdir(mode=0o700, exist_ok=True)
                _check_mapping(directory.directory / "probe")
                commit_protocol.sync_directory(directory.directory)
                commit_protocol.sync_directory(directory.root)
        except OSError as error:
            problem = f"{error.filename or directory.root}: {error.strerror}"
        if problem:
            raise Conflict(
                f"the memory root {directory.root} cannot be used: {problem}. Create the directory on a mounted file "
                "system, or change kvm_xfs.memory_root"
            )
        self._write_known_roots(_KnownRoots(gateway=known_roots.gateway, roots=[*known_roots.roots, directory.root]))
        log.info("using a memory root", root=str(directory.root), directory=str(directory.directory))

    def _read_known_roots(self) -> _KnownRoots:
        path = self._layout.memory_roots
        try:
            return _KnownRoots.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _KnownRoots(gateway=new_id(), roots=[])
        except (OSError, ValidationError) as error:
            reason = explain(error) if isinstance(error, ValidationError) else error.strerror
            raise BackendFailed(
                f"{path} cannot be read ({reason}): restore it. If you remove it instead, the gateway uses new "
                "directories in memory roots, and no longer removes unused images from the old ones"
            ) from None

    def _write_known_roots(self, known_roots: _KnownRoots) -> None:
        path = self._layout.memory_roots
        temporary_file = path.with_name(PARTIAL_PREFIX + path.name)
        with temporary_file.open("w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(known_roots.model_dump(mode="json")))
            file.flush()
            os.fsync(file.fileno())
        temporary_file.rename(path)
        commit_protocol.sync_directory(path.parent)


def require_held_image(link: Path) -> None:
    """Raise Conflict if the image that a running machine was started from is in a memory root that is not mounted."""
    if link.is_symlink() and not link.exists():
        raise Conflict(
            f"the memory image of the running machine is not available: {link.readlink()} does not exist. Mount its "
            "memory root, or take a snapshot without memory"
        )


def sync_image_directory(files: SnapshotFiles) -> None:
    """Make the name of a snapshot's memory image durable, if the image is in a memory root that is mounted."""
    if files.memory_directory is not None and files.memory.exists():
        commit_protocol.sync_directory(files.memory.parent)


def _find_problem(directory: MemoryDirectory) -> str:
    """Return why a gateway's directory in a memory root cannot be used, as a clause, or "" if it can."""
    try:
        if problem := _find_root_problem(directory.root):
            return problem
        if not directory.snapshots.is_dir():
            return f"{directory.root} is not mounted, because {directory.directory} does not exist"
    except OSError as error:
        return f"{error.filename or directory.root}: {error.strerror}"
    return ""


def _find_root_problem(root: Path) -> str:
    if not root.is_dir():
        return f"the directory {root} does not exist"
    status = root.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        return f"users other than root can write to {root} (allow only root, for example with mode 0700)"
    return ""


def _check_mapping(path: Path) -> None:
    """Check that /proc/self/maps and stat() report the same device for a file. Captures depend on this.

    Raises OSError.
    """
    try:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            status = os.fstat(file.fileno())
            with mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE):
                maps = Path("/proc/self/maps").read_text()
    finally:
        path.unlink(missing_ok=True)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    if not any(line.split()[3:5] == [device, str(status.st_ino)] for line in maps.splitlines()):
        raise OSError(
            None,
            "the kernel reports a different device for mapped files than for open files (use XFS or ext4)",
            str(path),
        )
