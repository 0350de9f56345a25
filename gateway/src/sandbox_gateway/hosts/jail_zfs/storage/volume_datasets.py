"""Manage the datasets of volumes: current datasets, and former datasets that are kept for their snapshots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sandbox_gateway import zfs
from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.marks import is_retired
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, decode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import DOOMED, volume_key
from sandbox_gateway.records import Volume


class VolumeDatasets:
    """The datasets of all volumes. Methods may raise ZFSError."""

    def __init__(self, root: RootDataset, ballast: Ballast, records: PropertyStore) -> None:
        self._root = root
        self._ballast = ballast
        self._records = records
        self._current: dict[str, str] = {}
        """Dataset of each volume, by its id."""

    # ---- the volume of a dataset, and the dataset of a volume ----

    def load(self, datasets: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._current = dict(datasets)

    def set(self, volume_id: str, dataset: str) -> None:
        with self._root.index_lock:
            self._current[volume_id] = dataset

    def remove(self, volume_id: str) -> None:
        with self._root.index_lock:
            self._current.pop(volume_id, None)

    def is_known(self, volume_id: str) -> bool:
        with self._root.index_lock:
            return volume_id in self._current

    def current(self, volume_id: str) -> str:
        """Return the current dataset of a volume. Raises NotFound."""
        with self._root.index_lock:
            try:
                return self._current[volume_id]
            except KeyError:
                raise NotFound("volume", volume_id) from None

    def all_of(self, volume_id: str) -> list[str]:
        """Return all datasets of a volume, newest first."""
        found = []
        for dataset in zfs.list_datasets(f"{self._root.dataset}/{VOLUMES}", depth=1)[1:]:
            key = volume_key(dataset.rpartition("/")[2])
            if key is not None and key[0] == volume_id:
                found.append((key[1], dataset))
        return [dataset for _, dataset in sorted(found, reverse=True)]

    def owner(self, dataset: str) -> str:
        """Return the id of the volume that a dataset belongs to; the dataset itself if it belongs to no volume."""
        parent, _, name = dataset.rpartition("/")
        key = volume_key(name)
        return key[0] if key is not None and parent == f"{self._root.dataset}/{VOLUMES}" else dataset

    def identify(self, clone: str) -> tuple[str, str]:
        """Return ``(volume id, name)`` of a clone for an error message; ``(dataset, dataset)`` if it has no volume."""
        owner = self.owner(clone)
        try:
            record = decode(zfs.local_props(self._current.get(owner, clone)), "volume").record
        except (ValueError, zfs.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Volume)
        return record.id, record.name

    # ---- paths ----

    @property
    def directory(self) -> Path:
        """Return the directory on the host in which volumes are mounted."""
        return Path(os.path.realpath(self._root.mountpoint)) / VOLUMES

    def path(self, dataset: str) -> Path:
        return self.directory / dataset.rpartition("/")[2]

    # ---- retiring and destroying ----

    def is_retired_for_snapshots(self, dataset: str) -> bool:
        facts = zfs.get_props([dataset], ["canmount", HEAD])[dataset]
        return is_retired(facts["canmount"], facts[HEAD].is_local) and bool(zfs.list_snapshots(dataset))

    def retire(self, dataset: str) -> None:
        """Unmount a dataset and drop its record. It is kept for its snapshots, or destroyed if it has none."""
        if not zfs.list_snapshots(dataset):
            self.destroy(dataset)
            return
        self._records.remove(dataset)
        zfs.unmount(dataset)
        self._ballast.run_even_if_full(lambda: zfs.lzc_set_prop(dataset, "canmount", "noauto"))
        self._remove_mount_point(dataset)

    def destroy(self, dataset: str) -> None:
        """Destroy a dataset without snapshots, and retired datasets that are no longer needed."""
        origin = zfs.get_props([dataset], ["origin"])[dataset]["origin"].value
        zfs.unmount(dataset)
        zfs.lzc_destroy(dataset)
        self._remove_mount_point(dataset)
        if origin != "-":
            self.destroy_if_unused(origin.partition("@")[0])

    def _remove_mount_point(self, dataset: str) -> None:
        """Remove the mount point of a dataset. Ignores failures, because an empty mount point does no harm."""
        with suppress(OSError):
            self.path(dataset).rmdir()

    def destroy_if_unused(self, dataset: str) -> None:
        """Destroy a retired dataset if it has no snapshots. On failure, the next scan retries.

        Datasets of doomed volumes are left to ``VolumeStorage.finish_removal``.
        """
        with suppress(zfs.exceptions.ZFSError):
            facts = zfs.get_props([dataset], ["canmount", HEAD, DOOMED])[dataset]
            disposable = is_retired(facts["canmount"], facts[HEAD].is_local) and not facts[DOOMED].is_local
            if disposable and self.owner(dataset) != dataset and not zfs.list_snapshots(dataset):
                self.destroy(dataset)
