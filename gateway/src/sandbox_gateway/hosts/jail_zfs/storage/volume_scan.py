"""Interpret the datasets of volumes and their snapshots, without changing anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sandbox_gateway.hosts.jail_zfs.storage.marks import SCAN_PROPERTIES, Facts, Marks, UserProperties, is_retired
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    DOOMED_PROPERTY,
    QUARANTINE_PROPERTY,
    RECORD_PROPERTY,
    build_volume_snapshot_property,
    decode,
)
from sandbox_gateway.hosts.jail_zfs.storage.root import VOLUMES, parse_volume_key
from sandbox_gateway.records import NewerFormat, Volume, VolumeSnapshot

VOLUME_SCAN_PROPERTIES = (*SCAN_PROPERTIES, "mounted", "refquota")
"""The native properties that ``interpret_volumes`` reads from every dataset and snapshot."""


@dataclass
class VolumeFindings:
    marks: Marks = field(default_factory=Marks)
    volumes: list[Volume] = field(default_factory=list)
    snapshots: list[VolumeSnapshot] = field(default_factory=list)
    """Oldest first. Those that one command took atomically are in no particular order."""
    datasets: dict[str, str] = field(default_factory=dict)
    """The dataset of each volume, keyed by the volume's id."""
    snapshot_names: dict[str, str] = field(default_factory=dict)
    """The full name of each snapshot, keyed by its id."""
    generations: dict[str, int] = field(default_factory=dict)
    """The generation of each volume's record, keyed by the volume's id."""
    unmounted_datasets: list[str] = field(default_factory=list)
    """Current datasets of volumes that are not mounted."""
    correct_sizes: dict[str, int] = field(default_factory=dict)
    """Datasets whose quota differs from the size in their record, with this size in bytes."""
    unreadable_ids: set[str] = field(default_factory=set)
    """Ids of volumes whose records cannot be read."""
    doomed_ids: set[str] = field(default_factory=set)
    """Ids of volumes whose removal is committed, but not finished."""
    leftover_datasets: list[str] = field(default_factory=list)
    """Datasets that a rollback replaced, or that an uncommitted rollback created, to be retired or removed."""
    uncommitted_datasets: list[str] = field(default_factory=list)
    """Datasets of volumes that were never committed."""
    orphaned_ids: list[str] = field(default_factory=list)
    """Ids of snapshots that were taken together with a sandbox's snapshot that no longer exists."""


class _Claim(NamedTuple):
    """A dataset that has a volume's record, and therefore claims to be its current dataset.

    If several datasets claim the same volume, the claim with the highest generation wins.
    """

    generation: int
    number: int
    dataset: str
    record: Volume


def interpret_volumes(root: str, facts: Facts, local_props: UserProperties) -> VolumeFindings:
    """Interpret the datasets and snapshots of volumes under ``root``.

    ``facts`` contains the VOLUME_SCAN_PROPERTIES of each, and ``local_props`` the user properties that are set on each.
    """
    reader = _Reader(root, facts, local_props)
    claims, unrecorded_names = reader.read_datasets()
    for volume_id, volume_claims in claims.items():
        reader.resolve_claims(volume_id, volume_claims)
    for volume_id, names in unrecorded_names.items():
        reader.read_unrecorded_datasets(volume_id, names)
    reader.read_snapshots()
    return reader.findings


class _Reader:
    def __init__(self, root: str, facts: Facts, local_props: UserProperties) -> None:
        self._prefix = f"{root}/{VOLUMES}/"
        self._facts = facts
        self._local_props = local_props
        self.findings = VolumeFindings()

    def read_datasets(self) -> tuple[dict[str, list[_Claim]], dict[str, list[str]]]:
        """Return the volumes' datasets with a readable record, and those without one, keyed by the volume's id.

        Omits the datasets of doomed volumes.
        """
        claims: dict[str, list[_Claim]] = {}
        unrecorded_names: dict[str, list[str]] = {}
        for name in self._facts:
            if name.startswith(self._prefix) and "@" not in name:
                self._read_dataset(name, claims, unrecorded_names)
        for volume_id in self.findings.doomed_ids:
            claims.pop(volume_id, None)
            unrecorded_names.pop(volume_id, None)
        return claims, unrecorded_names

    def _read_dataset(self, name: str, claims: dict[str, list[_Claim]], unrecorded_names: dict[str, list[str]]) -> None:
        key, props = parse_volume_key(name.removeprefix(self._prefix)), self._local_props.get(name, {})
        if key is None:
            self.findings.marks.quarantine(name, props, "its name is not the name of a volume")
        elif DOOMED_PROPERTY in props:
            self.findings.doomed_ids.add(key[0])
        elif RECORD_PROPERTY in props:
            try:
                stored_record = decode(props, "volume")
                record = stored_record.record
                assert isinstance(record, Volume)
                if record.id != key[0]:
                    raise ValueError(f"its record belongs to the volume {record.id}")
            except NewerFormat as error:
                self.findings.marks.newer_records[name] = str(error)
                return
            except ValueError as error:
                self._quarantine(name, key[0], str(error))
                return
            claims.setdefault(key[0], []).append(_Claim(stored_record.generation, key[1], name, record))
            self.findings.marks.note_readable_record(name, props)
        elif QUARANTINE_PROPERTY in props:
            self._quarantine(name, key[0], props[QUARANTINE_PROPERTY])
        else:
            unrecorded_names.setdefault(key[0], []).append(name)

    def _quarantine(self, name: str, volume_id: str, reason: str) -> None:
        self.findings.marks.quarantine(name, self._local_props.get(name, {}), reason)
        self.findings.unreadable_ids.add(volume_id)

    def resolve_claims(self, volume_id: str, volume_claims: list[_Claim]) -> None:
        *older_claims, newest_claim = sorted(volume_claims, key=lambda claim: claim[:2])
        findings, facts, dataset = self.findings, self._facts[newest_claim.dataset], newest_claim.dataset
        findings.unreadable_ids.discard(volume_id)
        newest_claim.record.host = {"dataset": dataset}
        findings.volumes.append(newest_claim.record)
        findings.volumes.sort(key=lambda volume: volume.created_at.isoformat())
        findings.datasets[volume_id], findings.generations[volume_id] = dataset, newest_claim.generation
        if not facts["mounted"].is_on:
            findings.unmounted_datasets.append(dataset)
        if facts["refquota"].number != newest_claim.record.size_mb << 20:
            findings.correct_sizes[dataset] = newest_claim.record.size_mb << 20
        findings.leftover_datasets += [claim.dataset for claim in older_claims]

    def read_unrecorded_datasets(self, volume_id: str, names: list[str]) -> None:
        for name in names:
            canmount = self._facts[name]["canmount"]
            has_snapshots = any(each.startswith(f"{name}@") for each in self._facts)
            if volume_id in self.findings.datasets:
                is_needed = has_snapshots and is_retired(canmount, has_record=False)
                self.findings.leftover_datasets += [] if is_needed else [name]
            elif volume_id in self.findings.unreadable_ids:
                continue
            elif has_snapshots:
                # Do not mark the dataset: an administrator may restore its volume (`zfs rename`, `zfs receive`).
                reason = f"it has snapshots of the volume {volume_id}, which does not exist"
                self.findings.marks.quarantine_reasons[name] = reason
            else:
                self.findings.uncommitted_datasets.append(name)

    def read_snapshots(self) -> None:
        """Read snapshots, oldest first.

        Skips snapshots that other tools created and snapshots that are marked for deferred destruction.
        """
        sandbox_snapshot_ids = {
            name.partition("@")[2]
            for name, facts in self._facts.items()
            if "@" in name and not name.startswith(self._prefix) and not facts["defer_destroy"].is_on
        }
        names = [name for name in self._facts if name.startswith(self._prefix) and "@" in name]
        for name in sorted(names, key=lambda name: self._facts[name]["createtxg"].number):
            dataset, _, snapshot_id = name.partition("@")
            key, props = parse_volume_key(dataset.removeprefix(self._prefix)), self._local_props.get(name, {})
            record_text = props.get(build_volume_snapshot_property(snapshot_id))
            if key is None or key[0] not in self.findings.datasets or record_text is None:
                continue
            if self._facts[name]["defer_destroy"].is_on:
                continue
            try:
                record = decode({RECORD_PROPERTY: record_text}, "volume-snapshot").record
                assert isinstance(record, VolumeSnapshot)
                if (record.id, record.volume) != (snapshot_id, key[0]):
                    raise ValueError(f"its record belongs to the snapshot {record.id} of the volume {record.volume}")
            except NewerFormat as error:
                self.findings.marks.newer_records[name] = str(error)
                continue
            except ValueError as error:
                self.findings.marks.quarantine(name, props, str(error))
                continue
            self.findings.marks.note_readable_record(name, props)
            self.findings.snapshot_names[snapshot_id] = name
            if record.sandbox_snapshot and record.sandbox_snapshot not in sandbox_snapshot_ids:
                self.findings.orphaned_ids.append(snapshot_id)
            else:
                self.findings.snapshots.append(record)
