"""Interpret the datasets of volumes and their snapshots, without changing anything."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from sandbox_gateway.hosts.jail_zfs.storage.marks import FACTS, Facts, Marks, UserProperties
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, QUARANTINE, decode, volume_snapshot_head
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES
from sandbox_gateway.records import Volume, VolumeSnapshot

VOLUME_FACTS = (*FACTS, "mounted", "refquota")
"""Native properties of every dataset and snapshot that ``interpret_volumes`` needs."""
DOOMED = "sandbox:doomed"
"""User property that marks the datasets of a volume whose removal is committed."""

_KEY = re.compile(r"([0-9a-f]{12})(?:\.([1-9][0-9]*))?")


@dataclass
class VolumeFindings(Marks):
    volumes: list[Volume] = field(default_factory=list)
    snapshots: list[VolumeSnapshot] = field(default_factory=list)
    """Oldest first."""
    datasets: dict[str, str] = field(default_factory=dict)
    """Dataset of each volume, by its id."""
    snapshot_names: dict[str, str] = field(default_factory=dict)
    """Full name of each snapshot, by its id."""
    generations: dict[str, int] = field(default_factory=dict)
    """Generation of each volume's record, by its id."""
    unmounted: list[str] = field(default_factory=list)
    """Datasets that should be mounted."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Datasets whose quota differs from their record, with the size in the record, in bytes."""
    unreadable: set[str] = field(default_factory=set)
    """Ids of volumes whose records cannot be read."""
    doomed: set[str] = field(default_factory=set)
    """Ids of volumes whose removal is committed but not finished."""
    leftover: list[str] = field(default_factory=list)
    """Datasets from before a rollback or of an uncommitted rollback, to be retired or removed."""
    uncommitted: list[str] = field(default_factory=list)
    """Datasets of volumes that were never committed."""
    orphaned: list[str] = field(default_factory=list)
    """Ids of snapshots that belong to a missing snapshot of a sandbox."""


class _Claim(NamedTuple):
    """A dataset with the record of a volume.

    If several datasets have a record of one volume, the highest claim wins.
    """

    generation: int
    number: int
    dataset: str
    record: Volume


def volume_key(name: str) -> tuple[str, int] | None:
    """Parse the last component of a volume's dataset: ``(id, number of rollbacks)``; None if it is malformed."""
    match = _KEY.fullmatch(name)
    return (match[1], int(match[2] or 0)) if match else None


def interpret_volumes(root: str, facts: Facts, local: UserProperties) -> VolumeFindings:
    """Interpret VOLUME_FACTS of everything below ``root``, and ``local``, the user properties set locally."""
    return _Reader(root, facts, local).findings


class _Reader:
    def __init__(self, root: str, facts: Facts, local: UserProperties) -> None:
        self._prefix = f"{root}/{VOLUMES}/"
        self._facts = facts
        self._local = local
        self.findings = VolumeFindings()
        claims: dict[str, list[_Claim]] = {}
        bare: dict[str, list[str]] = {}
        for name in facts:
            if name.startswith(self._prefix) and "@" not in name:
                self._read(name, claims, bare)
        for id in self.findings.doomed:
            claims.pop(id, None)
            bare.pop(id, None)
        for id, rivals in claims.items():
            self._resolve_claims(id, rivals)
        for id, names in bare.items():
            self._read_without_record(id, names)
        self._read_snapshots()

    def _read(self, name: str, claims: dict[str, list[_Claim]], bare: dict[str, list[str]]) -> None:
        key, props = volume_key(name.removeprefix(self._prefix)), self._local.get(name, {})
        if key is None:
            self.findings.quarantine(name, props, "its name is not the name of a volume")
        elif DOOMED in props:
            self.findings.doomed.add(key[0])
        elif HEAD in props:
            try:
                stored = decode(props, "volume")
                record = stored.record
                assert isinstance(record, Volume)
                if record.id != key[0]:
                    raise ValueError(f"its record belongs to the volume {record.id}")
            except ValueError as error:
                self._quarantine(name, key[0], str(error))
                return
            claims.setdefault(key[0], []).append(_Claim(stored.generation, key[1], name, record))
            self.findings.confirm(name, props)
        elif QUARANTINE in props:
            self._quarantine(name, key[0], props[QUARANTINE])
        else:
            bare.setdefault(key[0], []).append(name)

    def _quarantine(self, name: str, id: str, reason: str) -> None:
        self.findings.quarantine(name, self._local.get(name, {}), reason)
        self.findings.unreadable.add(id)

    def _resolve_claims(self, id: str, rivals: list[_Claim]) -> None:
        *older, newest = sorted(rivals, key=lambda claim: claim[:2])
        found, facts, dataset = self.findings, self._facts[newest.dataset], newest.dataset
        found.unreadable.discard(id)
        newest.record.host = {"dataset": dataset}
        found.volumes.append(newest.record)
        found.volumes.sort(key=lambda volume: volume.created_at.isoformat())
        found.datasets[id], found.generations[id] = dataset, newest.generation
        if not facts["mounted"].is_on:
            found.unmounted.append(dataset)
        if facts["refquota"].number != newest.record.size_mb << 20:
            found.sizes[dataset] = newest.record.size_mb << 20
        found.leftover += [claim.dataset for claim in older]

    def _read_without_record(self, id: str, names: list[str]) -> None:
        for name in names:
            kept = any(each.startswith(f"{name}@") for each in self._facts)
            retired = self._facts[name]["canmount"].value == "noauto"
            if id in self.findings.datasets:
                self.findings.leftover += [] if kept and retired else [name]
            elif id in self.findings.unreadable:
                continue
            elif kept:
                # Do not mark the dataset: it belongs to its volume again if the volume is restored (`zfs rename`, `zfs
                # receive`).
                self.findings.quarantined[name] = f"it has snapshots of the volume {id}, which does not exist"
            else:
                self.findings.uncommitted.append(name)

    def _read_snapshots(self) -> None:
        """Read snapshots, oldest first; skips other tools' snapshots and those marked for deferred destruction."""
        taken = {
            name.partition("@")[2]
            for name, facts in self._facts.items()
            if "@" in name and not name.startswith(self._prefix) and not facts["defer_destroy"].is_on
        }
        names = [name for name in self._facts if name.startswith(self._prefix) and "@" in name]
        for name in sorted(names, key=lambda name: self._facts[name]["createtxg"].number):
            dataset, _, short = name.partition("@")
            key, props = volume_key(dataset.removeprefix(self._prefix)), self._local.get(name, {})
            head = props.get(volume_snapshot_head(short))
            if key is None or key[0] not in self.findings.datasets or head is None:
                continue
            if self._facts[name]["defer_destroy"].is_on:
                continue
            try:
                record = decode({HEAD: head}, "volume-snapshot").record
                assert isinstance(record, VolumeSnapshot)
                if (record.id, record.volume) != (short, key[0]):
                    raise ValueError(f"its record belongs to {record.id}, a snapshot of {record.volume}")
            except ValueError as error:
                self.findings.quarantine(name, props, str(error))
                continue
            self.findings.confirm(name, props)
            self.findings.snapshot_names[short] = name
            if record.sandbox_snapshot and record.sandbox_snapshot not in taken:
                self.findings.orphaned.append(short)
            else:
                self.findings.snapshots.append(record)
