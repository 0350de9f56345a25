"""What a tree of datasets with their properties means. Pure: it reads what was read, and touches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sandbox_gateway.hosts.jail_zfs.zfs_parse import Property
from sandbox_gateway.hosts.jail_zfs.zfs_records import HEAD, QUARANTINE, Stored, decode, stale_parts
from sandbox_gateway.records import Sandbox, Snapshot

FACTS = ("createtxg", "defer_destroy", "canmount")
"""The properties ``interpret`` needs of every dataset and snapshot."""
TEMPLATE = "_template-"
VOLUMES = "volumes"

Facts = Mapping[str, Mapping[str, Property]]
UserProperties = Mapping[str, Mapping[str, str]]


@dataclass
class Marks:
    """What is to be written on datasets and snapshots themselves."""

    quarantined: dict[str, str] = field(default_factory=dict)
    """What cannot be read or is claimed twice, with the reason, in ASCII."""
    to_mark: dict[str, str] = field(default_factory=dict)
    """Those of them that do not say so yet."""
    mended: list[str] = field(default_factory=list)
    """What says it is damaged and is not."""
    stale: list[tuple[str, str]] = field(default_factory=list)
    """``(name, property)``: parts of records that are no longer, or never were, committed."""

    def quarantine(self, name: str, props: Mapping[str, str], reason: str) -> None:
        why = " ".join(reason.encode("ascii", "replace").decode().split())[:500] or "damaged"
        self.quarantined[name] = why
        if props.get(QUARANTINE) != why:
            self.to_mark[name] = why

    def is_well(self, name: str, props: Mapping[str, str]) -> None:
        if QUARANTINE in props:
            self.mended.append(name)


@dataclass
class Findings(Marks):
    snapshots: list[Snapshot] = field(default_factory=list)
    """In the order they were taken."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Full name of each snapshot, by its id."""
    generations: dict[str, int] = field(default_factory=dict)
    """Of each record, by the id of what it describes."""
    long: set[str] = field(default_factory=set)
    """What has parts of records."""
    uncommitted: list[str] = field(default_factory=list)
    """Instances without a record: to be swept."""
    superseded: dict[str, str] = field(default_factory=dict)
    """Instances whose sandbox is another by now: to be swept, each with the reason."""
    empty: list[str] = field(default_factory=list)
    """Retired datasets and bases without snapshots."""
    to_move: list[str] = field(default_factory=list)
    """What is retired and still among the sandboxes, with snapshots."""


class _Claim(NamedTuple):
    """An instance that says it embodies a sandbox; the highest is believed."""

    generation: int
    createtxg: int
    instance: str
    record: Sandbox


def is_retired(canmount: Property, has_record: bool) -> bool:
    """Of a dataset among the sandboxes: the last thing done to one that is retired is to forbid its mounting."""
    return not has_record and canmount.value == "noauto"


def interpret(root: str, facts: Facts, local: UserProperties) -> Findings:
    """``facts``: FACTS of everything below ``root``; ``local``: the user properties set on each itself."""
    return _Reading(root, facts, local).findings


class _Reading:
    def __init__(self, root: str, facts: Facts, local: UserProperties) -> None:
        self._root = root
        self._facts = facts
        self._local = local
        self._retired_in_place: set[str] = set()
        self.findings = Findings()
        for name in self._snapshots():
            self._read_snapshot(name)
        self._settle(self._claims())
        self._find_parts()
        self._find_empty()

    def _props(self, name: str) -> Mapping[str, str]:
        return self._local.get(name, {})

    def _snapshots(self) -> list[str]:
        """Oldest first, without those that ZFS only keeps for their clones, those of volumes, and others' own."""
        names = (
            name
            for name, facts in self._facts.items()
            if "@" in name and not facts["defer_destroy"].yes and HEAD in self._props(name)
            if not name.startswith(f"{self._root}/{VOLUMES}/")
        )
        return sorted(names, key=lambda name: self._facts[name]["createtxg"].number)

    def _read_snapshot(self, name: str) -> None:
        stored = self._decoded(name, "snapshot")
        if stored is None or not isinstance(record := stored.record, Snapshot):
            return
        if record.id in self.findings.places:
            self._quarantine(name, f"{self.findings.places[record.id]} is the snapshot {record.id} already")
            return
        self.findings.places[record.id] = name
        self.findings.generations[record.id] = stored.generation
        self.findings.snapshots.append(record)
        self._is_well(name)

    def _claims(self) -> dict[str, list[_Claim]]:
        prefix = f"{self._root}/sandboxes/"
        claims: dict[str, list[_Claim]] = {}
        for name, facts in self._facts.items():
            instance = name.removeprefix(prefix)
            if not name.startswith(prefix) or "@" in name or "/" in instance:
                continue
            if HEAD not in self._props(name):
                self._read_uncommitted(name, instance)
            elif (stored := self._decoded(name, "sandbox")) and isinstance(record := stored.record, Sandbox):
                if record.instance != instance:
                    self._quarantine(name, f"its record is of the instance {record.instance}")
                    continue
                claim = _Claim(stored.generation, facts["createtxg"].number, instance, record)
                claims.setdefault(record.id, []).append(claim)
                self._is_well(name)
        return claims

    def _read_uncommitted(self, name: str, instance: str) -> None:
        if QUARANTINE in self._props(name):
            self._quarantine(name, self._props(name)[QUARANTINE])
        elif is_retired(self._facts[name]["canmount"], has_record=False):
            self._retired_in_place.add(name)
        else:
            self.findings.uncommitted.append(instance)

    def _settle(self, claims: Mapping[str, list[_Claim]]) -> None:
        """Two instances of one sandbox: the record that was written last counts."""
        for sandbox_id, rivals in claims.items():
            *older, newest = sorted(rivals, key=lambda claim: claim[:2])
            self.findings.generations[sandbox_id] = newest.generation
            self.findings.sandboxes.append(newest.record)
            for claim in older:
                self.findings.superseded[claim.instance] = f"sandbox {sandbox_id} is {newest.instance} by now"
        self.findings.sandboxes.sort(key=lambda sandbox: sandbox.created_at.isoformat())

    def _decoded(self, name: str, kind: Literal["sandbox", "snapshot"]) -> Stored | None:
        try:
            return decode(self._props(name), kind)
        except ValueError as error:
            self._quarantine(name, str(error))
            return None

    def _quarantine(self, name: str, reason: str) -> None:
        self.findings.quarantine(name, self._props(name), reason)

    def _is_well(self, name: str) -> None:
        self.findings.is_well(name, self._props(name))

    def _find_parts(self) -> None:
        """The parts of what is quarantined are left: they may be what mends it."""
        well = {
            *self.findings.places.values(),
            *(f"{self._root}/sandboxes/{s.instance}" for s in self.findings.sandboxes),
        }
        for name, props in self._local.items():
            if any(prop.startswith(f"{HEAD}.") for prop in props):
                self.findings.long.add(name)
            if name in well:
                self.findings.stale += [(name, prop) for prop in stale_parts(props)]

    def _find_empty(self) -> None:
        prefixes = (f"{self._root}/retired/", f"{self._root}/{TEMPLATE}")
        kept = {name.partition("@")[0] for name in self._facts if "@" in name}
        away = {name for name in self._facts if name.startswith(prefixes) and "@" not in name}
        self.findings.empty = sorted((away | self._retired_in_place) - kept)
        self.findings.to_move = sorted(self._retired_in_place & kept)
