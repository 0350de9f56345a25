"""Find, commit and remove the files of snapshots and templates."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout, MemoryDirectory, SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.files.memory_roots import sync_image_directory
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.record_files import RecordReader
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Snapshot, SnapshotKind

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

log = Logger("kvm_xfs")


class Snapshots:
    """Manages the snapshots and templates in one state root. Methods raise OSError if the file system fails."""

    def __init__(self, layout: Layout, quarantine: Quarantine) -> None:
        self._layout = layout
        self._quarantine = quarantine

    def scan(self, repaired: list[str], reader: RecordReader | None = None) -> list[Snapshot]:
        """Return the intact snapshots. Quarantines damaged snapshots and adds a sentence for each to ``repaired``."""
        reader = reader or RecordReader()
        intact_snapshots = []
        for parent in (self._layout.templates, self._layout.snapshots):
            for directory in commit_protocol.list_directories(parent):
                files = SnapshotFiles(directory)
                boot_id = _read_unsynced_boot_id(files)
                if boot_id is not None and boot_id != _BOOT_ID_FILE.read_text():
                    commit_protocol.remove(directory)
                    repaired.append(
                        f"removed the snapshot {directory.name}, which was not synced before the host stopped"
                    )
                    continue
                with self._quarantine.quarantined_if_damaged(directory, repaired):
                    snapshot = reader.read(directory, Snapshot)
                    if memory_directory := MemoryDirectory.from_snapshot(snapshot):
                        files = SnapshotFiles(directory, memory_directory)
                    intact_snapshots.append(_require_complete_files(files, snapshot))
                    if boot_id is not None:
                        _sync(files)  # The gateway has restarted since the snapshot was taken, but the host has not.
        return intact_snapshots

    def files(self, snapshot: Snapshot) -> SnapshotFiles:
        return self._layout.snapshot(snapshot)

    def partial_files(self, snapshot: Snapshot) -> SnapshotFiles:
        """Return the paths of the files in the directory in which a snapshot is being created."""
        files = self.files(snapshot)
        return SnapshotFiles(commit_protocol.get_partial_directory(files.directory), files.memory_directory)

    def _find_directory(self, snapshot: Snapshot) -> Path:
        return self.files(snapshot).directory

    def commit(self, snapshot: Snapshot) -> None:
        """Sync the images of a snapshot, set its ``disk_bytes_unique``, and commit it with its record.

        A transient snapshot is not synced, because forks are waiting for it. Call ``sync`` later. Neither is the base
        of a template, which does not outlive the build.
        """
        partial_files = self.partial_files(snapshot)
        is_durable = snapshot.kind not in (SnapshotKind.TRANSIENT, SnapshotKind.BASE)
        if is_durable:
            commit_protocol.sync_files(_find_existing_images(partial_files))
            sync_image_directory(partial_files)
        else:
            partial_files.unsynced_marker.write_text(_BOOT_ID_FILE.read_text())
        snapshot.disk_bytes_unique = reflink.count_unique_bytes(partial_files.disk)
        record_files.write_record(partial_files.directory, snapshot, durable=is_durable)
        commit_protocol.commit(self._find_directory(snapshot), durable=is_durable)

    def sync(self, snapshot: Snapshot) -> None:
        """Make a committed snapshot durable. Does nothing if the snapshot has been removed."""
        with contextlib.suppress(FileNotFoundError):
            _sync(self.files(snapshot))

    def save(self, snapshot: Snapshot) -> None:
        """Replace a committed snapshot's record."""
        record_files.write_record(self._find_directory(snapshot), snapshot)

    def undo(self, snapshot: Snapshot) -> None:
        """Remove all files of a snapshot, whether it is committed or not."""
        commit_protocol.undo(self._find_directory(snapshot))
        _remove_external_image(self.files(snapshot))

    def remove(self, snapshot: Snapshot) -> None:
        """Remove a snapshot. If its memory root is unmounted, its image remains until a scan finds the root mounted."""
        files = self.files(snapshot)
        if files.memory_directory is None:
            commit_protocol.remove(files.directory)
        else:
            # After a crash of the host, a snapshot must not exist without its image, which is on another file system.
            commit_protocol.remove_durably(files.directory)
            _remove_external_image(files)

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the paths of a snapshot's directory and memory files, for display."""
        files = self.files(snapshot)
        paths = {"dir": str(files.directory)}
        if snapshot.memory is not MemoryMode.NONE:
            paths |= {"memory": str(files.memory), "vmstate": str(files.device_state)}
        return paths


def _find_existing_images(files: SnapshotFiles) -> list[Path]:
    return [path for path in (files.disk, files.memory, files.device_state) if path.exists()]


def _sync(files: SnapshotFiles) -> None:
    directory = files.directory
    commit_protocol.sync_files([*_find_existing_images(files), directory / record_files.MANIFEST])
    sync_image_directory(files)
    commit_protocol.sync_directory(directory)
    commit_protocol.sync_directory(directory.parent)
    files.unsynced_marker.unlink()


def _read_unsynced_boot_id(files: SnapshotFiles) -> str | None:
    """Return the id of the host's boot in which an unsynced snapshot was taken, or None if it has been synced."""
    try:
        with open(files.unsynced_marker) as file:  # noqa: PTH123 - faster for thousands of snapshots
            return file.read()
    except FileNotFoundError:
        return None


def _remove_external_image(files: SnapshotFiles) -> None:
    """Remove a snapshot's memory image if it is in a memory root."""
    if files.memory_directory is None:
        return
    try:
        files.memory.unlink(missing_ok=True)
    except OSError as error:
        log.warning("a memory image could not be removed", path=str(files.memory), reason=error.strerror)


def _read_size(path: Path) -> int:
    """Return the size of a file in bytes, or -1 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - faster for thousands of snapshots
    except FileNotFoundError:
        return -1


def _require_complete_files(files: SnapshotFiles, snapshot: Snapshot) -> Snapshot:
    """Return ``snapshot`` if its files exist and are long enough. Raises ValueError with the reason if not."""
    if snapshot.id != files.directory.name:
        raise ValueError(f"its manifest belongs to {snapshot.id}")
    min_sizes = {files.disk: 1, files.kernel: 1, files.initrd: 1}
    if snapshot.memory is not MemoryMode.NONE:
        min_sizes[files.device_state] = 1
        if files.memory_directory is None:  # An image in a memory root may be unavailable without being damaged.
            min_sizes[files.memory] = snapshot.resources.memory_mb << 20
    for path, size in min_sizes.items():
        if _read_size(path) < size:
            raise ValueError(f"{path.name} is missing or too short")
    return snapshot
