"""Define the paths below the state root.

    templates/<id>/   snapshots/<id>/      rootfs.img [memory.img device.state] kernel initrd manifest.json
    sandboxes/<id>/                        manifest.json and one directory per machine:
        <instance>/                        rootfs.img memory.base [memory.last …] kernel initrd run/
    volumes/<id>/                          volume.img manifest.json and one directory per snapshot of it:
        snapshots/<id>/                    volume.img manifest.json
    serving/                               files of running volume servers; unused after a reboot

A rename commits a snapshot or a volume (`hosts.directory_records`). A sandbox exists as soon as its manifest exists.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandbox_gateway.hosts.directory_records import directories
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind

VOLUME_SNAPSHOTS = "snapshots"
"""The directory of a volume's snapshots, in the volume's directory."""


class Layout:
    """Paths below one state root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.templates = root / "templates"
        self.snapshots = root / "snapshots"
        self.sandboxes = root / "sandboxes"
        self.volumes = root / "volumes"
        self.serving = root / "serving"

    def create(self) -> None:
        for directory in (self.templates, self.snapshots, self.sandboxes, self.volumes):
            directory.mkdir(mode=0o711, parents=True, exist_ok=True)

    def restrict_access(self, cache: Path) -> None:
        """Remove other users' access to files of older releases below the state root and in ``cache``.

        Directories remain searchable, because QEMU runs as another user.
        """
        parents = (self.templates, self.snapshots, self.sandboxes, self.volumes)
        paths = [*self.root.glob("*.json"), *cache.glob("rootfs-*.tar")]
        paths += [
            Path(directory, name) for parent in parents for directory, _, names in os.walk(parent) for name in names
        ]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode) and mode & 0o077:
                    path.chmod(0o600)

    def snapshot(self, snapshot: Snapshot) -> SnapshotFiles:
        is_template = snapshot.kind in (SnapshotKind.BASE, SnapshotKind.TEMPLATE)
        return SnapshotFiles((self.templates if is_template else self.snapshots) / snapshot.id)

    def sandbox(self, sandbox: Sandbox) -> Path:
        return self.sandboxes / sandbox.id

    def instance(self, sandbox: Sandbox) -> Instance:
        return Instance(self.sandboxes / sandbox.id / sandbox.instance)

    def instances(self) -> Iterator[Path]:
        for sandbox in directories(self.sandboxes):
            yield from directories(sandbox)

    def volume_snapshots(self) -> Iterator[Path]:
        for volume in directories(self.volumes):
            if (volume / VOLUME_SNAPSHOTS).is_dir():
                yield from directories(volume / VOLUME_SNAPSHOTS)


_DISK, _KERNEL, _INITRD = "rootfs.img", "kernel", "initrd"


class SnapshotFiles:
    """The paths of the files of one snapshot or template. ``memory`` and ``device_state`` only exist with memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = directory / _DISK
        self.memory = directory / "memory.img"
        self.device_state = directory / "device.state"
        self.kernel = directory / _KERNEL
        self.initrd = directory / _INITRD
        self.unsynced = directory / "unsynced"
        """Exists while data may not be on the device yet. Contains the id of the host's boot."""


class Instance:
    """The paths of one machine's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = directory / _DISK
        self.memory = directory / "memory.base"
        """The image that the machine was started from."""
        self.last_memory = directory / "memory.last"
        """The image of its latest capture, as a hard link, so that it outlives the snapshot."""
        self.last_memory_check = directory / "memory.last.json"
        """The `ImageCheck` of ``last_memory``."""
        self.taken_marker = directory / "memory.taken"
        """Exists while some pages whose marks were taken are not in an image yet."""
        self.kernel = directory / _KERNEL
        self.initrd = directory / _INITRD
        self.run = directory / "run"
        self.qmp = self.run / "qmp.sock"
