"""Manage the root dataset, under which a gateway stores everything."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import BackendFailed, Busy, Conflict
from sandbox_gateway.hosts.jail_zfs.storage.slow_commands import list_slow_commands

TEMPLATE_PREFIX = "_template-"
"""Prefix of the datasets of templates."""
_COMMON_PROPERTIES = {"atime": "off", "com.sun:auto-snapshot": "false"}
UNMOUNTED_PROPERTIES = {"canmount": "noauto", **_COMMON_PROPERTIES}
"""The properties of datasets that exist only for their snapshots."""
IMPORT_PREFIX = "import-"
"""Prefix of the datasets of unfinished imports, in RETIRED."""
SANDBOXES, RETIRED, VOLUMES = CONTAINERS = ("sandboxes", "retired", "volumes")

_LOCK_POLL_SECONDS = 0.5
_VOLUME_KEY_PATTERN = re.compile(r"([0-9a-f]{12})(?:\.([1-9][0-9]*))?")


def parse_volume_key(name: str) -> tuple[str, int] | None:
    """Parse the last component of a dataset's name into ``(volume id, rollback number)``.

    Returns None if it is not the name of a volume's dataset.
    """
    match = _VOLUME_KEY_PATTERN.fullmatch(name)
    return (match[1], int(match[2] or 0)) if match else None


class RootDataset:
    """The root dataset, its mount point, and the locks that the storage modules share."""

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self._mountpoint: Path | None = None
        self.index_lock = threading.RLock()
        """Guards the maps from ids to datasets and snapshots.

        The event loop acquires it too, so no thread runs a command while it holds this lock."""
        self._tree_lock = threading.RLock()
        self._tree_lock_owner = 0
        """The thread that acquired the tree lock last."""

    @property
    def mountpoint(self) -> Path:
        """Return the root dataset's mount point, with symbolic links resolved, as in the output of `jls` and `mount`.

        Raises Conflict if ``mount`` has not been called.
        """
        if self._mountpoint is None:
            raise Conflict("the storage is not open yet: wait until the gateway has started")
        return self._mountpoint

    @contextlib.contextmanager
    def tree_locked(self) -> Iterator[None]:
        """Prevent other threads from moving or removing datasets that other datasets may depend on.

        Raises Busy if the thread that holds the lock waits for a hung command.
        """
        while not self._tree_lock.acquire(timeout=_LOCK_POLL_SECONDS):
            if commands := list_slow_commands(thread=self._tree_lock_owner):
                raise Busy(
                    f"`{commands[0].command}` has been running on {commands[0].name} for "
                    f"{time.time() - commands[0].started_at:.0f} s. Until it finishes, no other dataset can be moved "
                    "or removed: try again later"
                )
        try:
            self._tree_lock_owner = threading.get_ident()
            yield
        finally:
            self._tree_lock.release()

    def path(self, dataset: str) -> Path:
        """Return the mount point of the root dataset or of a dataset below it. Raises Conflict like ``mountpoint``."""
        return self.mountpoint / dataset[len(self.dataset) :].lstrip("/")

    def build_child_name(self, container: str, name: str) -> str:
        """Return the full name of a dataset in one of CONTAINERS."""
        return f"{self.dataset}/{container}/{name}"

    def check(self) -> None:
        """Raise ZFSInitializationFailed if ZFS cannot be reached, or BackendFailed if the dataset does not exist."""
        zfs_core.check_reachable()
        if not zfs_core.lzc_exists(self.dataset):
            raise BackendFailed(
                f"the dataset {self.dataset} does not exist: run `zfs create {self.dataset}` or the jail_zfs_host role"
            )

    def mount(self) -> None:
        """Create missing containers, and mount the dataset and its containers.

        Raises BackendFailed if the dataset has no usable mount point, and DatasetBusy.
        """
        facts = zfs_core.get_props([self.dataset], ["mountpoint", "type"])[self.dataset]
        path = facts["mountpoint"].value
        if facts["type"].value != "filesystem" or not path.startswith("/"):
            raise BackendFailed(
                f"the dataset {self.dataset} has no usable mount point (mountpoint={path}): run `zfs set "
                f"mountpoint=/some/directory {self.dataset}`"
            )
        # First, because the error needs it if the mount point is busy.
        self._mountpoint = Path(os.path.realpath(path))
        zfs_core.mount(self.dataset)
        for name in CONTAINERS:
            self._ensure_container(f"{self.dataset}/{name}")
        # Users of the host must not reach set-user-ID programs, which root in a jail can create and which the root file
        # systems of templates contain.
        for directory in (self._mountpoint, *(self._mountpoint / name for name in CONTAINERS)):
            directory.chmod(0o700)

    def _ensure_container(self, name: str) -> None:
        if not zfs_core.lzc_exists(name):
            # exclude instances from tools that snapshot all datasets, because snapshots would prevent their removal
            zfs_core.lzc_create(name, props=_COMMON_PROPERTIES, mounted=True)
        zfs_core.mount(name)
