"""Find, commit and remove snapshots and templates on the disk."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sandbox_gateway.hosts import directory_records
from sandbox_gateway.hosts.directory_records import Quarantine
from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Layout
from sandbox_gateway.records import Memory, Snapshot, SnapshotKind

_UNSYNCED = "unsynced"
"""A file in a snapshot that the device may not hold yet; contains the id of the host's boot."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Snapshots:
    """The snapshots and templates below one state root. Methods raise OSError for errors of the file system."""

    def __init__(self, layout: Layout, quarantine: Quarantine) -> None:
        self._layout = layout
        self._quarantine = quarantine

    def scan(self, repaired: list[str]) -> list[Snapshot]:
        """Return the intact snapshots. Damaged snapshots are moved away and reported in ``repaired``."""
        found = []
        for parent in (self._layout.templates, self._layout.snapshots):
            for directory in directory_records.directories(parent):
                if _is_lost(directory):
                    directory_records.remove(directory)
                    repaired.append(f"removed {directory.name}, the source of clones, which was not yet on the device")
                    continue
                with self._quarantine.guarding(directory, repaired):
                    found.append(_check_whole(directory, directory_records.read_record(directory, Snapshot)))
        return found

    def path(self, snapshot: Snapshot) -> Path:
        return self._layout.snapshot(snapshot)

    def partial(self, snapshot: Snapshot) -> Path:
        """Return the directory in which the snapshot is created."""
        return directory_records.partial_of(self.path(snapshot))

    def commit(self, snapshot: Snapshot) -> None:
        """Sync the images of an uncommitted snapshot, measure it, and commit it with its record.

        A transient snapshot is not synced, because its forks wait for it: call ``sync`` later.
        """
        partial = self.partial(snapshot)
        durable = snapshot.kind is not SnapshotKind.TRANSIENT
        if durable:
            directory_records.sync_files(_images_in(partial))
        else:
            (partial / _UNSYNCED).write_text(_BOOT_ID.read_text())
        snapshot.disk_bytes_unique = reflink.unique_bytes(partial / "rootfs.img")
        directory_records.write_record(partial, snapshot, durable=durable)
        directory_records.commit(self.path(snapshot), durable=durable)

    def sync(self, snapshot: Snapshot) -> None:
        """Make a committed snapshot durable, unless it is removed meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            _sync(self.path(snapshot))

    def save(self, snapshot: Snapshot) -> None:
        """Replace a committed snapshot's record."""
        directory_records.write_record(self.path(snapshot), snapshot)

    def undo(self, snapshot: Snapshot) -> None:
        """Remove all files of a snapshot, committed or not."""
        directory_records.undo(self.path(snapshot))

    def remove(self, snapshot: Snapshot) -> None:
        directory_records.remove(self.path(snapshot))

    def files_of(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the paths of a snapshot's directory and memory files, for display."""
        place = self.path(snapshot)
        files = {} if snapshot.memory is Memory.NONE else {"memory": "memory.img", "vmstate": "device.state"}
        return {"dir": str(place), **{part: str(place / name) for part, name in files.items()}}


def _images_in(directory: Path) -> list[Path]:
    return [path for name in ("rootfs.img", "memory.img", "device.state") if (path := directory / name).exists()]


def _sync(directory: Path) -> None:
    directory_records.sync_files([*_images_in(directory), directory / directory_records.MANIFEST])
    directory_records.sync_directory(directory)
    directory_records.sync_directory(directory.parent)
    (directory / _UNSYNCED).unlink()


def _is_lost(directory: Path) -> bool:
    """Return whether the host went down before a snapshot was synced; syncs it if only the gateway ended."""
    try:
        boot_id = (directory / _UNSYNCED).read_text()
    except FileNotFoundError:
        return False
    if boot_id != _BOOT_ID.read_text():
        return True
    _sync(directory)
    return False


def _check_whole(directory: Path, snapshot: Snapshot) -> Snapshot:
    """Check that a snapshot's images exist and have the right length. Raises ValueError with the reason."""
    if snapshot.id != directory.name:
        raise ValueError(f"its manifest belongs to {snapshot.id}")
    needed = {"rootfs.img": 1, "kernel": 1, "initrd": 1}
    if snapshot.memory is not Memory.NONE:
        needed |= {"memory.img": snapshot.resources.memory_mb << 20, "device.state": 1}
    for name, size in needed.items():
        path = directory / name
        if not path.exists() or path.stat().st_size < size:
            raise ValueError(f"{name} is missing or too short")
    return snapshot
