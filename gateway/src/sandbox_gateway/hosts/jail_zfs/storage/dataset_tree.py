"""Destroy the datasets of instances and volumes, or retire them while they have snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zfs_core

from sandbox_gateway.hosts.jail_zfs.storage import marks
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset


class DatasetTree:
    """The datasets in one container of the root dataset, and the datasets from which they were cloned.

    ``is_disposable`` decides whether a dataset is destroyed after its last snapshot. Methods may raise ZFSError.
    """

    def __init__(
        self,
        root: RootDataset,
        container: str,
        ballast: Ballast,
        records: PropertyStore,
        is_disposable: Callable[[str], bool],
    ) -> None:
        self._root = root
        self._container = container
        self._ballast = ballast
        self._records = records
        self._is_disposable = is_disposable

    @property
    def directory(self) -> Path:
        """Return the directory on the host in which the datasets are mounted."""
        return self._root.mountpoint / self._container

    def path(self, dataset: str) -> Path:
        """Return the mount point of a dataset."""
        return self.directory / dataset.rpartition("/")[2]

    @staticmethod
    def is_retired(dataset: str) -> bool:
        props = zfs_core.get_props([dataset], ["canmount", RECORD_PROPERTY])[dataset]
        return marks.is_retired(props["canmount"], props[RECORD_PROPERTY].is_local)

    def destroy_or_retire(self, dataset: str) -> bool:
        """Destroy a dataset and return True. If it has snapshots, retire it and return False.

        A retired dataset is unmounted, has no record, and has the property ``canmount=noauto``.
        """
        if not zfs_core.list_snapshots(dataset):
            self.destroy(dataset)
            return True
        self._records.remove(dataset)
        zfs_core.unmount(dataset)
        self._ballast.run_even_if_full(lambda: zfs_core.lzc_set_prop(dataset, "canmount", "noauto"))
        self._remove_mount_point(dataset)
        return False

    def destroy(self, dataset: str) -> None:
        """Destroy a dataset that has no snapshots, and then its origin's dataset if nothing else needs it."""
        origin = zfs_core.get_props([dataset], ["origin"])[dataset]["origin"].value
        zfs_core.unmount(dataset)
        zfs_core.lzc_destroy(dataset, unmounted=True)
        self._remove_mount_point(dataset)
        if origin != "-":
            self.destroy_if_unused(origin.partition("@")[0])

    def destroy_if_unused(self, dataset: str) -> None:
        """Destroy a dataset if it is disposable and has no snapshots.

        Then does the same for its origin's dataset. Ignores failures, because the next scan retries.
        """
        with suppress(zfs_core.exceptions.ZFSError):
            if self._is_disposable(dataset) and not zfs_core.list_snapshots(dataset):
                self.destroy(dataset)

    def _remove_mount_point(self, dataset: str) -> None:
        """Remove the mount point of a dataset. Ignores failures, because an empty mount point does no harm."""
        with suppress(OSError):
            self.path(dataset).rmdir()
