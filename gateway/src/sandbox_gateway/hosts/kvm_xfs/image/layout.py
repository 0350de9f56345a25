"""Paths below the state root.

    templates/<id>/   snapshots/<id>/      rootfs.img [memory.img device.state] kernel initrd manifest.json
    sandboxes/<id>/                        manifest.json and one directory per machine:
        <instance>/                        rootfs.img memory.base kernel initrd run/
    volumes/<id>/                          volume.img manifest.json and one directory per snapshot of it:
        snapshots/<id>/                    volume.img manifest.json
    serving/                               files of running volume servers; obsolete after a reboot

Snapshots and volumes are committed by a rename (`hosts.directory_records`); a sandbox exists once its manifest does.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandbox_gateway.hosts.directory_records import directories
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind


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
        """Make files private that an older release left readable, below the state root and in ``cache``.

        Directories stay searchable, because QEMU runs as another user.
        """
        parents = (self.templates, self.snapshots, self.sandboxes, self.volumes)
        found = [*self.root.glob("*.json"), *cache.glob("rootfs-*.tar")]
        found += [Path(place, name) for parent in parents for place, _, names in os.walk(parent) for name in names]
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode) and mode & 0o077:
                    path.chmod(0o600)

    def snapshot(self, snapshot: Snapshot) -> Path:
        built = snapshot.kind in (SnapshotKind.BASE, SnapshotKind.TEMPLATE)
        return (self.templates if built else self.snapshots) / snapshot.id

    def sandbox(self, sandbox: Sandbox) -> Path:
        return self.sandboxes / sandbox.id

    def instance(self, sandbox: Sandbox) -> Instance:
        return Instance(self.sandboxes / sandbox.id / sandbox.instance)

    def instances(self) -> Iterator[Path]:
        for sandbox in directories(self.sandboxes):
            yield from directories(sandbox)


class Instance:
    """The files of one machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = directory / "rootfs.img"
        self.memory = directory / "memory.base"
        self.kernel = directory / "kernel"
        self.initrd = directory / "initrd"
        self.run = directory / "run"
        self.qmp = self.run / "qmp.sock"
