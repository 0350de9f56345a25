"""Store each volume on disk as an image, with the volume's snapshots next to it.

An image is a sparse file that contains a file system; its length is the volume's size. Renaming a directory commits a
volume or a snapshot, renaming a file commits a rollback, and the new length of the image commits growth. If the size in
a record is smaller than the image, growth was interrupted, and the next start corrects the record.

This module does not know whether a volume is in use. The caller must freeze the volume's server while the image
is cloned.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from sandbox_gateway.errors import BackendFailed, Conflict
from sandbox_gateway.hosts.base import Scan, SnapshotPart
from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import VOLUME_IMAGE_NAME, VOLUME_SNAPSHOTS_NAME, Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS
from sandbox_gateway.hosts.kvm_xfs.part_files import PartFiles
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.record_files import MANIFEST, RecordReader
from sandbox_gateway.hosts.kvm_xfs.volumes.file_system import format_image
from sandbox_gateway.hosts.kvm_xfs.volumes.pending_snapshots import PendingSnapshot
from sandbox_gateway.hosts.kvm_xfs.volumes.ports import Ports
from sandbox_gateway.records import Volume, VolumeSnapshot

_NEW_IMAGE = f"{PARTIAL_PREFIX}new.img"
_OLD_IMAGE = f"{PARTIAL_PREFIX}old.img"


class VolumeStore:
    """Manages the volumes in one state root. Methods raise GatewayError, or OSError if the file system fails."""

    def __init__(self, layout: Layout, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._root = layout.volumes
        self.growing_volumes: list[Volume] = []
        """Volumes whose growth was interrupted: ``scan`` found their images to be longer than recorded."""

    def image(self, volume: str) -> Path:
        return self._root / volume / VOLUME_IMAGE_NAME

    def require_image(self, volume: str) -> Path:
        """Return the path of a volume's image. Raises Conflict if the image was damaged and only snapshots remain."""
        if not (image := self.image(volume)).exists():
            raise Conflict(
                f"the image of volume {volume} was damaged and moved to quarantine: roll the volume back to one of its "
                "snapshots"
            )
        return image

    # -- creating, growing, removing --------------------------------------------------------------------------------

    async def create(self, volume: Volume, source: VolumeSnapshot | None) -> None:
        """Create a volume of at least ``volume.size_mb`` MiB, empty or from ``source``. On failure, remove it."""
        final_directory = self._root / volume.id
        with _partial_directory(final_directory) as partial_directory:
            (partial_directory / VOLUME_SNAPSHOTS_NAME).mkdir(mode=0o700)
            if source is None:
                await _format(partial_directory / VOLUME_IMAGE_NAME, volume)
            else:
                await asyncio.to_thread(
                    reflink.clone,
                    self._snapshot_directory(source) / VOLUME_IMAGE_NAME,
                    partial_directory / VOLUME_IMAGE_NAME,
                )
            await asyncio.to_thread(_finish_volume, partial_directory, final_directory, volume)

    def begin_import(self, volume: Volume) -> Path:
        """Create the partial directory of a volume, and return the path of the image to write in it."""
        image = self.partial_image(volume)
        image.parent.mkdir(mode=0o700)
        (image.parent / VOLUME_SNAPSHOTS_NAME).mkdir(mode=0o700)
        return image

    def partial_image(self, volume: Volume) -> Path:
        return commit_protocol.get_partial_directory(self._root / volume.id) / VOLUME_IMAGE_NAME

    def commit_import(self, volume: Volume) -> None:
        _finish_volume(self.partial_image(volume).parent, self._root / volume.id, volume)

    def discard_import(self, volume: Volume) -> None:
        """Remove a volume that is being imported, whether or not it is committed."""
        commit_protocol.undo(self._root / volume.id)

    def grow(self, volume: str, size_mb: int) -> None:
        """Extend a volume's image to ``size_mb`` MiB. The caller must then update the record with ``save``."""
        image = self.require_image(volume)
        _extend(image, size_mb)
        commit_protocol.sync_file(image)

    def save(self, volume: Volume) -> None:
        record_files.write_record(self._root / volume.id, volume)

    def remove(self, volume: str) -> None:
        """Remove a volume and its snapshots with one rename. The next start sweeps any remaining files."""
        commit_protocol.remove_durably(self._root / volume)

    def remove_snapshot(self, snapshot: VolumeSnapshot) -> None:
        commit_protocol.remove_durably(self._snapshot_directory(snapshot))

    # -- snapshots --------------------------------------------------------------------------------------------------

    def create_pending_snapshot(self, snapshot: VolumeSnapshot) -> PendingSnapshot:
        return PendingSnapshot(self.require_image(snapshot.volume), self._snapshot_directory(snapshot), snapshot)

    def open_snapshot(self, snapshot: VolumeSnapshot) -> PartFiles:
        return PartFiles({SnapshotPart.VOLUME: self._snapshot_directory(snapshot) / VOLUME_IMAGE_NAME}, snapshot.id)

    def stage(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Clone a snapshot's image next to the volume's image, for ``swap``, and extend it to the volume's size."""
        new_image = self._root / volume.id / _NEW_IMAGE
        new_image.unlink(missing_ok=True)
        try:
            reflink.clone(self._snapshot_directory(snapshot) / VOLUME_IMAGE_NAME, new_image)
            _extend(new_image, volume.size_mb)
            commit_protocol.sync_file(new_image)
        except BaseException:
            new_image.unlink(missing_ok=True)
            raise

    def swap(self, volume: str) -> None:
        """Replace the image with the staged copy. Keeps the old image until ``remove_staged_files``."""
        directory = self._root / volume
        (directory / _OLD_IMAGE).unlink(missing_ok=True)
        if (directory / VOLUME_IMAGE_NAME).exists():
            (directory / _OLD_IMAGE).hardlink_to(directory / VOLUME_IMAGE_NAME)
        (directory / _NEW_IMAGE).rename(directory / VOLUME_IMAGE_NAME)
        commit_protocol.sync_directory(directory)

    def swap_back(self, volume: str) -> None:
        """Undo ``swap``: restore the old image. Does nothing if the image was not swapped."""
        directory = self._root / volume
        if (directory / _OLD_IMAGE).exists():
            (directory / _OLD_IMAGE).replace(directory / VOLUME_IMAGE_NAME)
            commit_protocol.sync_directory(directory)

    def remove_staged_files(self, volume: str) -> None:
        """Remove the staged copy and the old image."""
        with contextlib.suppress(OSError):  # If this fails, the next start removes the files.
            for name in (_NEW_IMAGE, _OLD_IMAGE):
                (self._root / volume / name).unlink(missing_ok=True)

    def _snapshot_directory(self, snapshot: VolumeSnapshot) -> Path:
        return self._root / snapshot.volume / VOLUME_SNAPSHOTS_NAME / snapshot.id

    # -- scanning ---------------------------------------------------------------------------------------------------

    def scan(self, scan: Scan, reader: RecordReader) -> Ports:
        """Sweep the volumes, quarantine or repair damaged ones, and add the usable ones to ``scan``.

        ``scan`` must already contain the sandbox snapshots. Assigns a port to each volume. Returns the pool of ports.
        """
        snapshot_ids = {"", *(snapshot.id for snapshot in scan.snapshots)}
        removed_names = commit_protocol.sweep(self._root)
        for directory in commit_protocol.list_directories(self._root):
            if (directory / VOLUME_SNAPSHOTS_NAME).is_dir():
                removed_names += commit_protocol.sweep(directory / VOLUME_SNAPSHOTS_NAME)
            snapshots = self._scan_snapshots(directory, snapshot_ids, scan.repaired, reader)
            with self._quarantine.quarantined_if_damaged(directory, scan.repaired):
                scan.volumes.append(self._scan_volume(directory, snapshots, scan.repaired, reader))
                scan.volume_snapshots += snapshots
        scan.repaired += [f"removed {name}, which was never committed" for name in removed_names]
        return self._assign_ports(scan)

    def _scan_snapshots(
        self, directory: Path, snapshot_ids: Collection[str], repaired: list[str], reader: RecordReader
    ) -> list[VolumeSnapshot]:
        """Return the intact snapshots of a volume. Removes those that belong to an uncommitted sandbox snapshot."""
        if not (directory / VOLUME_SNAPSHOTS_NAME).is_dir():
            return []
        intact_snapshots = []
        for entry in commit_protocol.list_directories(directory / VOLUME_SNAPSHOTS_NAME):
            with self._quarantine.quarantined_if_damaged(entry, repaired):
                snapshot = _read_snapshot(entry, directory.name, reader)
                if snapshot.sandbox_snapshot in snapshot_ids:
                    intact_snapshots.append(snapshot)
                elif self._quarantine.contains(snapshot.sandbox_snapshot):
                    raise ValueError(f"it belongs to snapshot {snapshot.sandbox_snapshot}, which is damaged")
                else:
                    commit_protocol.remove_durably(entry)
                    repaired.append(
                        f"removed the snapshot {entry.name} of volume {directory.name}, because its sandbox snapshot "
                        "was never committed"
                    )
        return intact_snapshots

    def _scan_volume(
        self, directory: Path, snapshots: list[VolumeSnapshot], repaired: list[str], reader: RecordReader
    ) -> Volume:
        """Return a volume's record, repaired if necessary. Raises ValueError if no intact image or snapshot is left."""
        length_mb = _read_length_mb(directory / VOLUME_IMAGE_NAME)
        try:
            volume = reader.read(directory, Volume)
            if volume.id != directory.name:
                raise ValueError(f"its manifest belongs to {volume.id}")
        except ValueError as error:
            volume = self._recreate_record(directory, length_mb, snapshots, str(error), repaired)
        if length_mb < volume.size_mb:
            if not snapshots:
                raise ValueError(f"{VOLUME_IMAGE_NAME} is missing or too short")
            suffix = self._move_to_quarantine(directory / VOLUME_IMAGE_NAME)
            repaired.append(
                f"the image of volume {volume.id} is missing or too short{suffix}: roll the volume back to "
                "one of its snapshots, which are intact"
            )
        elif length_mb > volume.size_mb:
            volume.size_mb = length_mb
            self.growing_volumes.append(volume)
            repaired.append(
                f"completed the interrupted growth of volume {volume.id}, whose size is now {length_mb} MiB"
            )
        return volume

    def _recreate_record(
        self, directory: Path, length_mb: int, snapshots: list[VolumeSnapshot], reason: str, repaired: list[str]
    ) -> Volume:
        """Recreate a volume's damaged record. The volume keeps its id, because sandboxes refer to it."""
        size_mb = max([length_mb, *(snapshot.size_mb for snapshot in snapshots)])
        try:
            volume = Volume(id=directory.name, name=directory.name, size_mb=size_mb)
        except ValidationError:
            raise ValueError(reason) from None
        suffix = self._move_to_quarantine(directory / MANIFEST)
        self._save_if_possible(volume)
        repaired.append(f"the record of volume {volume.id} is damaged ({reason}){suffix}: use its id {volume.id}")
        return volume

    def _move_to_quarantine(self, path: Path) -> str:
        """Move a damaged file to the quarantine, if it exists. Returns a clause to append to a sentence."""
        return f" and was moved to {self._quarantine.move(path)}" if path.exists() else ""

    def _assign_ports(self, scan: Scan) -> Ports:
        """Assign a unique port to each volume. If two volumes have the same port, the older volume keeps it."""
        used_ports: set[int] = set()
        unassigned_volumes: list[Volume] = []
        for volume in sorted(scan.volumes, key=lambda each: each.created_at):
            port = volume.host.get("port", 0)
            if port in VOLUME_PORTS and port not in used_ports:
                used_ports.add(port)
            else:
                unassigned_volumes.append(volume)
        ports = Ports(used_ports)
        for volume in unassigned_volumes:
            volume.host["port"] = ports.take()
            self._save_if_possible(volume)
            scan.repaired.append(f"volume {volume.id} now has port {volume.host['port']} and is mounted again")
        return ports

    def _save_if_possible(self, volume: Volume) -> None:
        """Write a repaired record. If this fails, for example on a full disk, the next start repairs it again."""
        with contextlib.suppress(OSError):
            self.save(volume)


async def _format(image: Path, volume: Volume) -> None:
    try:
        await format_image(image, volume.id, volume.size_mb)
    except BackendFailed as error:
        if (message := os.strerror(errno.ENOSPC)) in error.message:
            raise OSError(errno.ENOSPC, message) from None  # Raise the same error as the other methods.
        raise


@contextlib.contextmanager
def _partial_directory(final_directory: Path) -> Iterator[Path]:
    """Create and yield the partial directory that is to become ``final_directory``. On failure, remove both."""
    partial_directory = commit_protocol.get_partial_directory(final_directory)
    partial_directory.mkdir(mode=0o700)
    try:
        yield partial_directory
    except BaseException:
        commit_protocol.undo(final_directory)
        raise


def _finish_volume(partial_directory: Path, final_directory: Path, volume: Volume) -> None:
    _extend(partial_directory / VOLUME_IMAGE_NAME, volume.size_mb)
    commit_protocol.sync_file(partial_directory / VOLUME_IMAGE_NAME)
    record_files.write_record(partial_directory, volume)
    commit_protocol.commit(final_directory)


def _extend(image: Path, size_mb: int) -> None:
    if image.stat().st_size < size_mb << 20:
        os.truncate(image, size_mb << 20)


def _read_length_mb(image: Path) -> int:
    """Return the length of an image in whole MiB, or 0 if it does not exist."""
    try:
        return image.stat().st_size >> 20
    except OSError:
        return 0


def _read_snapshot(directory: Path, volume: str, reader: RecordReader) -> VolumeSnapshot:
    """Read a snapshot's record, and check the record and the image. Raises ValueError with the reason."""
    snapshot = reader.read(directory, VolumeSnapshot)
    if (snapshot.id, snapshot.volume) != (directory.name, volume):
        raise ValueError(f"its manifest belongs to {snapshot.id} of volume {snapshot.volume}")
    if _read_length_mb(directory / VOLUME_IMAGE_NAME) < snapshot.size_mb:
        raise ValueError(f"{VOLUME_IMAGE_NAME} is missing or too short")
    return snapshot
