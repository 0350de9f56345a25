"""Define the paths of objects in the state root, and of memory images in memory roots.

docs/design.md ("On-disk layout", "Memory roots") contains the complete trees, with the files that other modules define.
A rename commits a snapshot or a volume (`commit_protocol`). A sandbox exists as soon as its manifest exists.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX, list_directories
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind

VOLUME_IMAGE_NAME = "volume.img"
"""The file name of the image of a volume or of a volume's snapshot."""
VOLUME_SNAPSHOTS_NAME = "snapshots"
"""The name of the directory of a volume's snapshots, in the volume's directory."""


class Layout:
    """The paths of objects in one state root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.templates = root / "templates"
        self.snapshots = root / "snapshots"
        self.sandboxes = root / "sandboxes"
        self.volumes = root / "volumes"
        self.memory_roots = root / "memory-roots.json"
        self.serving = root / "serving"

    def create(self) -> None:
        for directory in (self.templates, self.snapshots, self.sandboxes, self.volumes):
            directory.mkdir(mode=0o711, parents=True, exist_ok=True)

    def restrict_access(self, cache: Path) -> None:
        """Revoke other users' access to files that older releases created in the state root and in ``cache``.

        Directories remain searchable, because QEMU runs as another user.
        """
        for path in [*self.root.glob("*.json"), *cache.glob("rootfs-*.tar")]:
            with contextlib.suppress(FileNotFoundError):
                if _is_open_to_others(path.lstat().st_mode):
                    path.chmod(0o600)
        for parent in (self.templates, self.snapshots, self.sandboxes, self.volumes):
            _restrict_files(parent)

    def snapshot(self, snapshot: Snapshot) -> SnapshotFiles:
        is_template = snapshot.kind in (SnapshotKind.BASE, SnapshotKind.TEMPLATE)
        directory = (self.templates if is_template else self.snapshots) / snapshot.id
        return SnapshotFiles(directory, MemoryDirectory.from_snapshot(snapshot))

    def sandbox(self, sandbox: Sandbox) -> Path:
        return self.sandboxes / sandbox.id

    def instance(self, sandbox: Sandbox) -> InstanceFiles:
        return InstanceFiles(self.sandboxes / sandbox.id / sandbox.instance)

    def instances(self) -> Iterator[Path]:
        for sandbox in list_directories(self.sandboxes):
            yield from list_directories(sandbox)

    def volume_snapshots(self) -> Iterator[Path]:
        for volume in list_directories(self.volumes):
            if (volume / VOLUME_SNAPSHOTS_NAME).is_dir():
                yield from list_directories(volume / VOLUME_SNAPSHOTS_NAME)


def _restrict_files(directory: Path | str) -> None:
    """Revoke other users' access to the files in ``directory`` and its subdirectories.

    Skips directories that only their owner can search, because nobody else can open the files in them.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) and mode & 0o011:
                    _restrict_files(entry.path)
                elif _is_open_to_others(mode):
                    Path(entry).chmod(0o600)


def _is_open_to_others(mode: int) -> bool:
    return stat.S_ISREG(mode) and bool(mode & 0o077)


_DISK, _KERNEL, _INITRD = "rootfs.img", "kernel", "initrd"
_IMAGE_SUFFIX = ".img"
_MEMORY_LOCATION_KEY = "memory"
"""The key in ``Snapshot.host`` that says where the memory image is, unless it is in the snapshot's directory."""


class MemoryDirectory:
    """The paths of one gateway's memory images in the memory root ``root``.

    ``gateway`` is the name of the gateway's directory.
    """

    def __init__(self, root: Path, gateway: str) -> None:
        self.root = root
        self.gateway = gateway
        self.directory = root / gateway
        self.snapshots = self.directory / "snapshots"
        self.machines = self.directory / "machines"

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> MemoryDirectory | None:
        """Return the memory directory of a snapshot, or None if its memory image is in the snapshot's directory.

        Raises ValueError if the record is damaged.
        """
        location = snapshot.host.get(_MEMORY_LOCATION_KEY)
        if location is None:
            return None
        try:
            return cls(Path(location["root"]), str(location["gateway"]))
        except (KeyError, TypeError):
            raise ValueError(f"its host.{_MEMORY_LOCATION_KEY} does not contain a root and a gateway") from None

    def record_location(self, snapshot: Snapshot) -> None:
        """Record in a snapshot that its memory image is in this directory."""
        snapshot.host[_MEMORY_LOCATION_KEY] = {"root": str(self.root), "gateway": self.gateway}

    def snapshot(self, id: str) -> Path:
        return self.snapshots / f"{id}{_IMAGE_SUFFIX}"

    def list_snapshot_images(self) -> dict[str, Path]:
        """Return the memory images of snapshots, keyed by the id of the snapshot."""
        images = sorted(self.snapshots.glob(f"*{_IMAGE_SUFFIX}"))
        return {image.name.removesuffix(_IMAGE_SUFFIX): image for image in images}

    def list_machine_files(self) -> list[Path]:
        """Return the hard links of all machines."""
        return sorted(self.machines.glob("*/*"))

    def find_machine_file(self, link: Path) -> Path:
        """Return the file that ``link``, a symbolic link in the directory of a machine, refers to."""
        return self.machines / link.parent.name / link.name


class SnapshotFiles:
    """The paths of the files of one snapshot or template.

    ``memory`` and ``device_state`` exist only if the snapshot includes memory. ``memory_directory`` is where the memory
    image is, or None if it is in ``directory``.
    """

    def __init__(self, directory: Path, memory_directory: MemoryDirectory | None = None) -> None:
        self.directory = directory
        self.disk = directory / _DISK
        self.memory_directory = memory_directory
        self.memory = directory / "memory.img"
        if memory_directory is not None:
            self.memory = memory_directory.snapshot(directory.name.removeprefix(PARTIAL_PREFIX))
        self.device_state = directory / "device.state"
        self.kernel = directory / _KERNEL
        self.initrd = directory / _INITRD
        self.unsynced_marker = directory / "unsynced"
        """Exists while data may not be on the device yet. Contains the id of the host's boot."""


class InstanceFiles:
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
