"""Write records to the datasets and snapshots that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import zfs_core

from sandbox_gateway.hosts.jail_zfs.storage.ballast import Ballast
from sandbox_gateway.hosts.jail_zfs.storage.marks import Marks
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    QUARANTINE_PROPERTY,
    RECORD_PROPERTY,
    encode,
    find_stale_parts,
)
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.secret_files import SecretFiles
from sandbox_gateway.records import Record, Sandbox


class PropertyStore:
    def __init__(self, root: RootDataset, ballast: Ballast, secret_files: SecretFiles) -> None:
        self._lock = root.index_lock
        self._ballast = ballast
        self._secret_files = secret_files
        self._generations: dict[str, int] = {}
        """The generation of each object's newest record, keyed by the object's id."""
        self._multipart_names: set[str] = set()
        """Datasets and snapshots that have, or may have, parts of records."""

    def load(self, generations: Mapping[str, int], multipart_names: set[str]) -> None:
        """Replace the state with the result of a scan."""
        with self._lock:
            self._generations, self._multipart_names = dict(generations), multipart_names

    def add_generations(self, generations: Mapping[str, int]) -> None:
        with self._lock:
            self._generations |= generations

    def note_multipart_name(self, name: str) -> None:
        with self._lock:
            self._multipart_names.add(name)

    def forget(self, record_id: str, name: str) -> None:
        with self._lock:
            self._generations.pop(record_id, None)
            self._multipart_names.discard(name)

    def write(self, name: str, record: Record) -> None:
        """Commit a new version of the record on the dataset or snapshot ``name``."""
        with self._lock:
            generation = self._generations[record.id] = self._generations.get(record.id, 0) + 1
        secret_file = self._secret_files.write(record) if isinstance(record, Sandbox) else ""
        props = encode(record, generation, secret_file)
        for prop, value in props.items():
            self._ballast.run_even_if_full(partial(zfs_core.lzc_set_prop, name, prop, value))
        self._secret_files.remove_superseded_files(record.id)
        if name in self._multipart_names:
            self._remove_stale_parts(name)
        if len(props) > 1:
            self._multipart_names.add(name)

    @staticmethod
    def _remove_stale_parts(name: str) -> None:
        """Remove stale parts of a record. Ignores failures: the record is committed, and the next scan retries."""
        with suppress(zfs_core.exceptions.ZFSError):
            for prop in find_stale_parts(zfs_core.local_props(name)):
                zfs_core.lzc_inherit_prop(name, prop)

    def remove(self, dataset: str) -> None:
        """Remove the record of a dataset, if it has one."""
        if RECORD_PROPERTY in zfs_core.local_props(dataset):
            self._ballast.run_even_if_full(lambda: zfs_core.lzc_inherit_prop(dataset, RECORD_PROPERTY))

    def mark(self, marks: Marks) -> None:
        """Write the findings of a scan to datasets and snapshots. Ignores failures, such as a full pool."""
        with suppress(zfs_core.exceptions.ZFSError):
            for name, reason in marks.pending_marks.items():
                zfs_core.lzc_set_prop(name, QUARANTINE_PROPERTY, reason)
            for name in marks.recovered_names:
                zfs_core.lzc_inherit_prop(name, QUARANTINE_PROPERTY)
            for name, prop in marks.stale_parts:
                zfs_core.lzc_inherit_prop(name, prop)
