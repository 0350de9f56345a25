"""What the datasets of volumes mean. Pure: it reads what was read, and touches nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from sandbox_gateway.hosts.jail_zfs.storage_scan import FACTS, VOLUMES, Facts, Marks, UserProperties
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, QUARANTINE, decode, volume_snapshot_head
from sandbox_gateway.records import Volume, VolumeSnapshot

VOLUME_FACTS = (*FACTS, "mounted", "refquota")
"""The properties ``interpret_volumes`` needs of every dataset and snapshot."""
DOOMED = "sandbox:doomed"
"""On a dataset of a volume that is being removed: from here on it is no volume."""

_KEY = re.compile(r"([0-9a-f]{12})(?:\.([1-9][0-9]*))?")


@dataclass
class VolumeFindings(Marks):
    volumes: list[Volume] = field(default_factory=list)
    snapshots: list[VolumeSnapshot] = field(default_factory=list)
    """In the order they were taken."""
    datasets: dict[str, str] = field(default_factory=dict)
    """Of each volume, by its id."""
    places: dict[str, str] = field(default_factory=dict)
    """Full name of each snapshot, by its id."""
    generations: dict[str, int] = field(default_factory=dict)
    """Of each volume's record, by its id."""
    unmounted: list[str] = field(default_factory=list)
    """Datasets that should be mounted."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Datasets with another quota than their record says, with what it says, in bytes."""
    unreadable: set[str] = field(default_factory=set)
    """Ids of volumes that are there, and whose records cannot be read."""
    doomed: set[str] = field(default_factory=set)
    """Ids of volumes that were being removed."""
    leftover: list[str] = field(default_factory=list)
    """What a volume was before a rollback, or would have become by one; to be retired or removed."""
    uncommitted: list[str] = field(default_factory=list)
    """Datasets that never became a volume's."""
    unfounded: list[str] = field(default_factory=list)
    """Ids of snapshots that were to be part of a sandbox's snapshot, which is not there."""


class _Claim(NamedTuple):
    """A dataset that says it is a volume; the highest is believed."""

    generation: int
    number: int
    dataset: str
    record: Volume


def volume_key(name: str) -> tuple[str, int] | None:
    """``(id, how many rollbacks)`` of the last component of a volume's dataset; None if it is none's."""
    match = _KEY.fullmatch(name)
    return (match[1], int(match[2] or 0)) if match else None


def interpret_volumes(root: str, facts: Facts, local: UserProperties) -> VolumeFindings:
    """``facts``: VOLUME_FACTS of everything below ``root``; ``local``: the user properties set on each itself."""
    return _Reading(root, facts, local).findings


class _Reading:
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
            self._settle(id, rivals)
        for id, names in bare.items():
            self._judge(id, names)
        self._read_snapshots()

    def _read(self, name: str, claims: dict[str, list[_Claim]], bare: dict[str, list[str]]) -> None:
        key, props = volume_key(name.removeprefix(self._prefix)), self._local.get(name, {})
        if key is None:
            self.findings.quarantine(name, props, "it is not named as a volume is")
        elif DOOMED in props:
            self.findings.doomed.add(key[0])
        elif HEAD in props:
            try:
                stored = decode(props, "volume")
                record = stored.record
                assert isinstance(record, Volume)
                if record.id != key[0]:
                    raise ValueError(f"its record is of the volume {record.id}")
            except ValueError as error:
                self._leave(name, key[0], str(error))
                return
            claims.setdefault(key[0], []).append(_Claim(stored.generation, key[1], name, record))
            self.findings.is_well(name, props)
        elif QUARANTINE in props:
            self._leave(name, key[0], props[QUARANTINE])
        else:
            bare.setdefault(key[0], []).append(name)

    def _leave(self, name: str, id: str, why: str) -> None:
        self.findings.quarantine(name, self._local.get(name, {}), why)
        self.findings.unreadable.add(id)

    def _settle(self, id: str, rivals: list[_Claim]) -> None:
        *older, newest = sorted(rivals, key=lambda claim: claim[:2])
        found, facts, dataset = self.findings, self._facts[newest.dataset], newest.dataset
        found.unreadable.discard(id)
        newest.record.host = {"dataset": dataset}
        found.volumes.append(newest.record)
        found.volumes.sort(key=lambda volume: volume.created_at.isoformat())
        found.datasets[id], found.generations[id] = dataset, newest.generation
        if not facts["mounted"].yes:
            found.unmounted.append(dataset)
        if facts["refquota"].number != newest.record.size_mb << 20:
            found.sizes[dataset] = newest.record.size_mb << 20
        found.leftover += [claim.dataset for claim in older]

    def _judge(self, id: str, names: list[str]) -> None:
        """Datasets of a volume that bear no record."""
        for name in names:
            kept = any(each.startswith(f"{name}@") for each in self._facts)
            retired = self._facts[name]["canmount"].value == "noauto"
            if id in self.findings.datasets:
                self.findings.leftover += [] if kept and retired else [name]
            elif id in self.findings.unreadable:
                continue
            elif kept:
                # No mark on it: should its volume come back (`zfs rename`, `zfs receive`), it belongs to it again.
                self.findings.quarantined[name] = f"the volume {id} is gone, and it holds snapshots of it"
            else:
                self.findings.uncommitted.append(name)

    def _read_snapshots(self) -> None:
        """Those of volumes, oldest first; not those of others, nor what ZFS only keeps for its clones."""
        taken = {
            name.partition("@")[2]
            for name, facts in self._facts.items()
            if "@" in name and not name.startswith(self._prefix) and not facts["defer_destroy"].yes
        }
        names = [name for name in self._facts if name.startswith(self._prefix) and "@" in name]
        for name in sorted(names, key=lambda name: self._facts[name]["createtxg"].number):
            dataset, _, short = name.partition("@")
            key, props = volume_key(dataset.removeprefix(self._prefix)), self._local.get(name, {})
            head = props.get(volume_snapshot_head(short))
            if key is None or key[0] not in self.findings.datasets or head is None:
                continue
            if self._facts[name]["defer_destroy"].yes:
                continue
            try:
                record = decode({HEAD: head}, "volume-snapshot").record
                assert isinstance(record, VolumeSnapshot)
                if (record.id, record.volume) != (short, key[0]):
                    raise ValueError(f"its record is of {record.id}, a snapshot of {record.volume}")
            except ValueError as error:
                self.findings.quarantine(name, props, str(error))
                continue
            self.findings.is_well(name, props)
            self.findings.places[short] = name
            if record.sandbox_snapshot and record.sandbox_snapshot not in taken:
                self.findings.unfounded.append(short)
            else:
                self.findings.snapshots.append(record)
