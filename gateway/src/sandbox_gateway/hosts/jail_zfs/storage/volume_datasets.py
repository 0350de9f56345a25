"""Manage the datasets of volumes: the current ones, and former ones that are kept because they have snapshots."""

from __future__ import annotations

from collections.abc import Mapping

import zfs_core

from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.dataset_tree import DatasetTree
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import DOOMED_PROPERTY, decode
from sandbox_gateway.hosts.jail_zfs.storage.property_store import PropertyStore
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, RootDataset, parse_volume_key
from sandbox_gateway.records import Volume


class VolumeDatasets:
    """Manages the datasets of all volumes. Methods may raise ZFSError."""

    def __init__(self, root: RootDataset, ballast: Ballast, records: PropertyStore) -> None:
        self._root = root
        self.tree = DatasetTree(root, VOLUMES, ballast, records, self._is_disposable)
        self._current_datasets: dict[str, str] = {}
        """The current dataset of each volume, keyed by the volume's id."""

    # ---- the volume of a dataset, and the dataset of a volume ----

    def load(self, datasets: Mapping[str, str]) -> None:
        with self._root.index_lock:
            self._current_datasets = dict(datasets)

    def set_current(self, volume_id: str, dataset: str) -> None:
        with self._root.index_lock:
            self._current_datasets[volume_id] = dataset

    def remove(self, volume_id: str) -> None:
        with self._root.index_lock:
            self._current_datasets.pop(volume_id, None)

    def is_known(self, volume_id: str) -> bool:
        with self._root.index_lock:
            return volume_id in self._current_datasets

    def get_current(self, volume_id: str) -> str:
        """Return the current dataset of a volume. Raises NotFound."""
        with self._root.index_lock:
            try:
                return self._current_datasets[volume_id]
            except KeyError:
                raise NotFound("volume", volume_id) from None

    def list_all(self, volume_id: str) -> list[str]:
        """Return all datasets of a volume, current and former, newest first."""
        numbered_datasets = []
        for dataset in zfs_core.list_datasets(f"{self._root.dataset}/{VOLUMES}", depth=1)[1:]:
            key = parse_volume_key(dataset.rpartition("/")[2])
            if key is not None and key[0] == volume_id:
                numbered_datasets.append((key[1], dataset))
        return [dataset for _, dataset in sorted(numbered_datasets, reverse=True)]

    def find_owner(self, dataset: str) -> str:
        """Return the id of the volume that a dataset belongs to, or the dataset's name if it belongs to no volume."""
        parent, _, name = dataset.rpartition("/")
        key = parse_volume_key(name)
        return key[0] if key is not None and parent == f"{self._root.dataset}/{VOLUMES}" else dataset

    def identify(self, clone: str) -> tuple[str, str]:
        """Return the id and the name of a clone's volume, for error messages.

        If the clone belongs to no volume, both values are the name of the clone.
        """
        volume_id = self.find_owner(clone)
        try:
            record = decode(zfs_core.local_props(self._current_datasets.get(volume_id, clone)), "volume").record
        except (ValueError, zfs_core.exceptions.DatasetNotFound):
            return clone, clone
        assert isinstance(record, Volume)
        return record.id, record.name

    # ---- whether a dataset is still needed ----

    def is_retired_with_snapshots(self, dataset: str) -> bool:
        return self.tree.is_retired(dataset) and bool(zfs_core.list_snapshots(dataset))

    def _is_disposable(self, dataset: str) -> bool:
        """Return whether a dataset of a volume is retired.

        Returns False for datasets of doomed volumes: ``VolumeStorage.finish_removal`` destroys them.
        """
        if self.find_owner(dataset) == dataset:
            return False
        return self.tree.is_retired(dataset) and DOOMED_PROPERTY not in zfs_core.local_props(dataset)
