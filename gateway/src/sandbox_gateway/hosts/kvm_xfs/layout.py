"""Where everything lies under the state root, and how a thing comes to exist there: by one rename.

    templates/<id>/   snapshots/<id>/      rootfs.img [memory.img device.state] kernel initrd manifest.json
    sandboxes/<id>/                        manifest.json and one directory per machine:
        <instance>/                        rootfs.img memory.base kernel initrd run/
    volumes/<id>/                          volume.img manifest.json and one directory per snapshot of it:
        snapshots/<id>/                    volume.img manifest.json
    serving/                               what the volumes' servers need while they run; nothing after a reboot

A snapshot and a volume are made in `.partial-<id>` and renamed into place; a sandbox exists once its manifest does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.hosts.kvm_xfs.bounded_log import LOG_BYTES
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot, now

log = Logger("kvm_xfs")

PARTIAL = ".partial-"
DAMAGED = ".damaged"
MANIFEST = "manifest.json"
_OLD_LOG = "run/qemu.log"

Record = TypeVar("Record", Sandbox, Snapshot, Volume, VolumeSnapshot)


class Layout:
    """Paths under one state root."""

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

    def close_to_others(self, cache: Path) -> None:
        """Take from other users of the host what an older release let them read: files below the state root and the
        root file systems in ``cache``. Directories stay: QEMU runs as one of them, and passes through."""
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

    def partial(self, snapshot: Snapshot) -> Path:
        final = self.snapshot(snapshot)
        return final.with_name(PARTIAL + final.name)

    def sandbox(self, sandbox: Sandbox) -> Path:
        return self.sandboxes / sandbox.id

    def instance(self, sandbox: Sandbox) -> Instance:
        return Instance(self.sandboxes / sandbox.id / sandbox.instance)

    def instances(self) -> Iterator[Path]:
        for sandbox in directories(self.sandboxes):
            yield from directories(sandbox)

    def quarantine(self, path: Path) -> Path:
        """Move what cannot be understood out of the way, under a name that says when."""
        damaged = self.root / DAMAGED
        damaged.mkdir(mode=0o700, exist_ok=True)
        target = damaged / f"{path.parent.name}-{path.name}-{now():%Y%m%dT%H%M%S%f}"
        path.rename(target)
        return target

    @contextlib.contextmanager
    def quarantining(self, directory: Path, repaired: list[str]) -> Iterator[None]:
        """A ValueError within says that ``directory`` is damaged: it is moved away, and ``repaired`` says so."""
        try:
            yield
        except ValueError as error:
            if not any(directory.iterdir()):
                directory.rmdir()
                repaired.append(f"removed the empty {directory.name}")
                return
            kept = self.quarantine(directory)
            repaired.append(f"{directory.name} is damaged ({error}): moved to {kept}")
            log.warning("quarantined", path=str(directory), to=str(kept), reason=str(error))

    def damaged_sandboxes(self) -> list[str]:
        """Where the sandboxes are that were moved away."""
        return [str(path) for path in sorted((self.root / DAMAGED).glob(f"{self.sandboxes.name}-*"))]

    def quarantined(self, id: str) -> bool:
        """Was the snapshot or sandbox ``id`` moved away?"""
        return any((self.root / DAMAGED).glob(f"*-{id}-*"))


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


def has_old_log(directory: Path) -> bool:
    """Whether the machine was started by an older release, with a log on disk."""
    return (directory / _OLD_LOG).exists()


def empty_old_log(directory: Path) -> None:
    """Empty such a log if it has grown. Raises OSError."""
    log = directory / _OLD_LOG
    if log.stat().st_size > LOG_BYTES:
        os.truncate(log, 0)


def read_manifest(directory: Path, kind: type[Record]) -> Record:
    """The record in a directory. Raises ValueError with what is wrong with it."""
    try:
        return kind.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except (OSError, ValidationError) as error:
        raise ValueError(f"its manifest cannot be read: {str(error).splitlines()[0]}") from None


def write_manifest(directory: Path, record: BaseModel) -> None:
    """Write the record so that after a crash either the old or the new one is there, whole."""
    text = json.dumps(record.model_dump(mode="json"), indent=1)
    fresh = directory / f"{PARTIAL}{MANIFEST}"
    with fresh.open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(directory / MANIFEST)
    sync_directory(directory)


def unlink_manifest(directory: Path) -> None:
    """What is in ``directory`` ceases to exist; removing its files may follow at leisure."""
    with contextlib.suppress(FileNotFoundError):
        (directory / MANIFEST).unlink()
        sync_directory(directory)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def commit(partial: Path, final: Path) -> None:
    """Make a finished directory exist under its name, on the disk too."""
    sync_directory(partial)
    partial.rename(final)
    sync_directory(final.parent)


def remove_tree(directory: Path) -> None:
    """Remove a directory so that a crash half-way leaves a name the next sweep knows."""
    if not directory.exists():
        return
    doomed = directory.with_name(PARTIAL + directory.name.removeprefix(PARTIAL))
    if doomed != directory:
        directory.rename(doomed)
    shutil.rmtree(doomed)


def sweep(parent: Path) -> list[str]:
    """Remove what was never finished in ``parent`` and in its directories; returns the names."""
    swept = []
    for entry in [*parent.glob(f"{PARTIAL}*"), *parent.glob(f"*/{PARTIAL}*")]:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        swept.append(entry.name)
    return swept


def directories(parent: Path) -> list[Path]:
    return [entry for entry in sorted(parent.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Turn what the operating system says into a sentence for the caller."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("no space left on the state file system: remove snapshots or sandboxes, or grow it") from None
        raise BackendFailed(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
