"""Volumes on disk: an image each, and beside it the snapshots of it.

An image is sparse and holds a file system of its own; its length is what fits in. A volume and a snapshot of one come
to exist by the rename of a directory, a rollback happens by the rename of a file, and growth by the image's new
length: a record that says less is of a growth that was cut off, and follows at the next start.

Nothing here knows whether a volume is in use; what must stand still while an image is cloned is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from sandbox_gateway.errors import BackendFailed, Busy, Conflict
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.kvm_xfs import layout, reflink
from sandbox_gateway.hosts.kvm_xfs.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.volume_server import VOLUME_PORTS, format_image
from sandbox_gateway.records import Volume, VolumeSnapshot

IMAGE = "volume.img"
_SNAPSHOTS = "snapshots"
_NEW = f"{layout.PARTIAL}new.img"
_OLD = f"{layout.PARTIAL}old.img"


class VolumeStore:
    """The volumes under one state root. Methods raise OSError as the file system does, and GatewayError."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._root = layout.volumes
        self.growing: list[Volume] = []
        """Found by ``scan``: the image is longer already, the rest of their growth was cut off."""

    def image(self, volume: str) -> Path:
        return self._root / volume / IMAGE

    def whole_image(self, volume: str) -> Path:
        """Raises Conflict where a damaged one was moved away and only the snapshots are left."""
        if not (image := self.image(volume)).exists():
            raise Conflict(f"volume {volume} has lost its image: roll it back to one of its snapshots")
        return image

    # -- making, growing, removing ----------------------------------------------------------------------------------

    async def create(self, volume: Volume, source: VolumeSnapshot | None) -> None:
        """A new volume, empty or as ``source``, at least ``volume.size_mb`` MiB long; nothing remains on failure."""
        final = self._root / volume.id
        with _undoing(final) as partial:
            (partial / _SNAPSHOTS).mkdir(mode=0o700)
            if source is None:
                await _format(partial / IMAGE, volume)
            else:
                await asyncio.to_thread(reflink.clone, self._snapshot(source) / IMAGE, partial / IMAGE)
            await asyncio.to_thread(_finish_volume, partial, final, volume)

    def grow(self, volume: str, size_mb: int) -> None:
        """Commits the new length; the record is the caller's, with ``save``."""
        image = self.whole_image(volume)
        _lengthen(image, size_mb)
        layout.sync_file(image)

    def save(self, volume: Volume) -> None:
        layout.write_manifest(self._root / volume.id, volume)

    def remove(self, volume: str) -> None:
        """A volume and the snapshots of it, by one rename; what cannot be cleared away then is swept at a start."""
        _remove(self._root / volume)

    def remove_snapshot(self, snapshot: VolumeSnapshot) -> None:
        _remove(self._snapshot(snapshot))

    # -- snapshots --------------------------------------------------------------------------------------------------

    def recording(self, snapshot: VolumeSnapshot) -> Recording:
        return Recording(self.whole_image(snapshot.volume), self._snapshot(snapshot), snapshot)

    def stage(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Lay what ``snapshot`` holds beside the image, as long as the volume has become since; for ``swap``."""
        new = self._root / volume.id / _NEW
        new.unlink(missing_ok=True)
        try:
            reflink.clone(self._snapshot(snapshot) / IMAGE, new)
            _lengthen(new, volume.size_mb)
            layout.sync_file(new)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def swap(self, volume: str) -> None:
        """Put what was staged in the image's place, and keep the old one aside until ``settle``."""
        directory = self._root / volume
        (directory / _OLD).unlink(missing_ok=True)
        if (directory / IMAGE).exists():
            (directory / _OLD).hardlink_to(directory / IMAGE)
        (directory / _NEW).rename(directory / IMAGE)
        layout.sync_directory(directory)

    def swap_back(self, volume: str) -> None:
        """Undo ``swap``; what was staged is gone. Nothing happens where there is nothing to bring back."""
        directory = self._root / volume
        if (directory / _OLD).exists():
            (directory / _OLD).replace(directory / IMAGE)
            layout.sync_directory(directory)

    def settle(self, volume: str) -> None:
        """Remove what ``stage`` and ``swap`` left beside the image."""
        with contextlib.suppress(OSError):  # The next start does it.
            for name in (_NEW, _OLD):
                (self._root / volume / name).unlink(missing_ok=True)

    def _snapshot(self, snapshot: VolumeSnapshot) -> Path:
        return self._root / snapshot.volume / _SNAPSHOTS / snapshot.id

    # -- finding them again -----------------------------------------------------------------------------------------

    def scan(self, scan: Scan) -> Ports:
        """Sweep, quarantine and mend; adds what there is to ``scan``, which knows the sandboxes' snapshots already.

        Each volume has a port afterwards; returns those that are left.
        """
        kept = {"", *(snapshot.id for snapshot in scan.snapshots)}
        swept = layout.sweep(self._root)
        for directory in layout.directories(self._root):
            if (directory / _SNAPSHOTS).is_dir():
                swept += layout.sweep(directory / _SNAPSHOTS)
            snapshots = self._scan_snapshots(directory, kept, scan.repaired)
            with self._layout.quarantining(directory, scan.repaired):
                scan.volumes.append(self._scan_volume(directory, snapshots, scan.repaired))
                scan.volume_snapshots += snapshots
        scan.repaired += [f"removed {name}, which was never finished" for name in swept]
        return self._settle_ports(scan)

    def _scan_snapshots(self, directory: Path, kept: Collection[str], repaired: list[str]) -> list[VolumeSnapshot]:
        found = []
        for place in layout.directories(directory / _SNAPSHOTS) if (directory / _SNAPSHOTS).is_dir() else []:
            with self._layout.quarantining(place, repaired):
                snapshot = _whole_snapshot(place, directory.name)
                if snapshot.sandbox_snapshot in kept:
                    found.append(snapshot)
                elif self._layout.quarantined(snapshot.sandbox_snapshot):
                    raise ValueError(f"it belongs to snapshot {snapshot.sandbox_snapshot}, which is damaged")
                else:
                    _remove(place)
                    repaired.append(f"removed {place.name} of volume {directory.name}, whose snapshot was not finished")
        return found

    def _scan_volume(self, directory: Path, snapshots: list[VolumeSnapshot], repaired: list[str]) -> Volume:
        """The record of what lies there, mended. Raises ValueError where neither an image nor a snapshot is left."""
        length_mb = _length_mb(directory / IMAGE)
        try:
            volume = layout.read_manifest(directory, Volume)
            if volume.id != directory.name:
                raise ValueError(f"its manifest is of {volume.id}")
        except ValueError as error:
            volume = self._without_record(directory, length_mb, snapshots, str(error), repaired)
        if length_mb < volume.size_mb:
            if not snapshots:
                raise ValueError(f"{IMAGE} is missing or too short")
            moved = self._moved(directory / IMAGE)
            repaired.append(
                f"the image of volume {volume.id} is missing or too short{moved}: its snapshots stay, roll it back to "
                "one of them"
            )
        elif length_mb > volume.size_mb:
            volume.size_mb = length_mb
            self.growing.append(volume)
            repaired.append(f"volume {volume.id} was growing: it has {length_mb} MiB now")
        return volume

    def _without_record(
        self, directory: Path, length_mb: int, snapshots: list[VolumeSnapshot], reason: str, repaired: list[str]
    ) -> Volume:
        """A record for files that have lost theirs: who mounts them knows them by id."""
        size_mb = max([length_mb, *(snapshot.size_mb for snapshot in snapshots)])
        try:
            volume = Volume(id=directory.name, name=directory.name, size_mb=size_mb)
        except ValidationError:
            raise ValueError(reason) from None
        moved = self._moved(directory / layout.MANIFEST)
        self._save_if_possible(volume)
        repaired.append(f"the record of volume {volume.id} is damaged ({reason}){moved}: it goes by its id")
        return volume

    def _moved(self, path: Path) -> str:
        """Move a damaged file away; the middle of a sentence."""
        return f" and was moved to {self._layout.quarantine(path)}" if path.exists() else ""

    def _settle_ports(self, scan: Scan) -> Ports:
        """Of two volumes with one port the older keeps it."""
        taken: set[int] = set()
        without: list[Volume] = []
        for volume in sorted(scan.volumes, key=lambda each: each.created_at):
            port = volume.host.get("port", 0)
            if port in VOLUME_PORTS and port not in taken:
                taken.add(port)
            else:
                without.append(volume)
        ports = Ports(taken)
        for volume in without:
            volume.host["port"] = ports.take()
            self._save_if_possible(volume)
            scan.repaired.append(f"volume {volume.id} has port {volume.host['port']} now: it is mounted anew")
        return ports

    def _save_if_possible(self, volume: Volume) -> None:
        """A full file system keeps nobody from starting: what is mended in memory is mended again the next time."""
        with contextlib.suppress(OSError):
            self.save(volume)


class Recording:
    """A snapshot of a volume in the making: ``prepare``, ``take`` (the one quick step), ``commit``; else ``undo``."""

    def __init__(self, image: Path, final: Path, snapshot: VolumeSnapshot) -> None:
        self.volume = snapshot.volume
        self._image = image
        self._final = final
        self._partial = _partial(final)
        self._snapshot = snapshot
        self._begun = False
        self._stack = contextlib.ExitStack()

    def prepare(self) -> None:
        """Everything slow that can be done ahead: descriptors, and the image on the disk."""
        self._partial.parent.mkdir(mode=0o700, exist_ok=True)
        self._partial.mkdir(mode=0o700)
        self._begun = True
        self._source = self._open(self._image, os.O_RDONLY)
        self._target = self._open(self._partial / IMAGE, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fsync(self._source)

    def take(self) -> None:
        reflink.clone_fd(self._source, self._target)

    def commit(self) -> None:
        os.fsync(self._target)
        layout.write_manifest(self._partial, self._snapshot)
        layout.commit(self._partial, self._final)

    def undo(self) -> None:
        """Nothing remains of it, committed or not."""
        if self._begun:
            _undo(self._partial, self._final)

    def close(self) -> None:
        self._stack.close()

    def _open(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, descriptor)
        return descriptor


class Ports:
    """Ports for volumes; one that was given back is not given out again while there is another."""

    def __init__(self, taken: Collection[int]) -> None:
        self._taken = set(taken)
        # The memory of guests names ports: another place to begin at every start keeps them from coming round.
        self._next = secrets.randbelow(len(VOLUME_PORTS))

    def take(self) -> int:
        """Raises Busy when there is none."""
        for step in range(len(VOLUME_PORTS)):
            place = (self._next + step) % len(VOLUME_PORTS)
            if VOLUME_PORTS[place] not in self._taken:
                self._next = place + 1
                self._taken.add(VOLUME_PORTS[place])
                return VOLUME_PORTS[place]
        raise Busy(f"this host keeps at most {len(VOLUME_PORTS)} volumes: remove some first")

    def give_back(self, port: int) -> None:
        self._taken.discard(port)


async def _format(image: Path, volume: Volume) -> None:
    try:
        await format_image(image, volume.id, volume.size_mb)
    except BackendFailed as error:
        if (full := os.strerror(errno.ENOSPC)) in error.message:
            raise OSError(errno.ENOSPC, full) from None  # As everything else here says it.
        raise


@contextlib.contextmanager
def _undoing(final: Path) -> Iterator[Path]:
    """Yields the directory in which ``final`` is to be made; on failure nothing remains of either."""
    partial = _partial(final)
    partial.mkdir(mode=0o700)
    try:
        yield partial
    except BaseException:
        _undo(partial, final)
        raise


def _undo(partial: Path, final: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial, ignore_errors=True)
    else:  # Renamed already; what failed came after.
        _remove(final)


def _partial(final: Path) -> Path:
    return final.with_name(layout.PARTIAL + final.name)


def _finish_volume(partial: Path, final: Path, volume: Volume) -> None:
    _lengthen(partial / IMAGE, volume.size_mb)
    layout.sync_file(partial / IMAGE)
    layout.write_manifest(partial, volume)
    layout.commit(partial, final)


def _lengthen(image: Path, size_mb: int) -> None:
    if image.stat().st_size < size_mb << 20:
        os.truncate(image, size_mb << 20)


def _remove(directory: Path) -> None:
    """Remove a directory if it is there: gone with the rename, on the disk too."""
    doomed = _partial(directory)
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    layout.sync_directory(directory.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def _length_mb(image: Path) -> int:
    """0: it is not there. A remainder does not count."""
    try:
        return image.stat().st_size >> 20
    except OSError:
        return 0


def _whole_snapshot(directory: Path, volume: str) -> VolumeSnapshot:
    """Check that a snapshot is what its place says, and its image as long as it must be; ValueError says what not."""
    snapshot = layout.read_manifest(directory, VolumeSnapshot)
    if (snapshot.id, snapshot.volume) != (directory.name, volume):
        raise ValueError(f"its manifest is of {snapshot.id} of volume {snapshot.volume}")
    if _length_mb(directory / IMAGE) < snapshot.size_mb:
        raise ValueError(f"{IMAGE} is missing or too short")
    return snapshot
