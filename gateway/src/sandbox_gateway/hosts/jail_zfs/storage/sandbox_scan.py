"""Interpret the datasets of sandboxes and their snapshots, without changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sandbox_gateway.hosts.jail_zfs.storage.marks import Facts, Marks, UserProperties, is_retired
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    QUARANTINE_PROPERTY,
    RECORD_PROPERTY,
    StoredRecord,
    decode,
    find_stale_parts,
)
from sandbox_gateway.hosts.jail_zfs.storage.root import (
    IMPORT_PREFIX,
    RETIRED,
    SANDBOXES,
    TEMPLATE_PREFIX,
    VOLUMES,
)
from sandbox_gateway.records import NewerFormat, Sandbox, Snapshot


@dataclass
class SandboxFindings:
    marks: Marks = field(default_factory=Marks)
    snapshots: list[Snapshot] = field(default_factory=list)
    """Oldest first."""
    sandboxes: list[Sandbox] = field(default_factory=list)
    snapshot_names: dict[str, str] = field(default_factory=dict)
    """The full name of each snapshot, keyed by its id."""
    generations: dict[str, int] = field(default_factory=dict)
    """The generation of each record, keyed by the id of the sandbox or snapshot."""
    secret_files: dict[str, str] = field(default_factory=dict)
    """The name of each sandbox's environment file, keyed by the sandbox's id. Omits sandboxes without such a file."""
    multipart_names: set[str] = field(default_factory=set)
    """Datasets and snapshots that have parts of records."""
    uncommitted_instances: list[str] = field(default_factory=list)
    """Instances without a record, to be removed."""
    superseded_instances: dict[str, str] = field(default_factory=dict)
    """Instances whose sandbox has a newer instance, with the reason for removing them."""
    empty_datasets: list[str] = field(default_factory=list)
    """Retired datasets and datasets of templates that have no snapshots."""
    unfinished_imports: list[str] = field(default_factory=list)
    """Datasets of imports that were interrupted, to be destroyed with their snapshots."""
    pending_moves: list[str] = field(default_factory=list)
    """Retired datasets with snapshots that have not been moved from ``sandboxes/`` yet."""


class _Claim(NamedTuple):
    """An instance that has a sandbox's record, and therefore claims to be its current instance.

    If several instances claim the same sandbox, the claim with the highest generation wins.
    """

    generation: int
    createtxg: int
    instance: str
    record: Sandbox
    secret_file: str


def interpret_sandboxes(root: str, facts: Facts, local_props: UserProperties) -> SandboxFindings:
    """Interpret the datasets and snapshots under ``root``.

    ``facts`` contains the SCAN_PROPERTIES of each, and ``local_props`` the user properties that are set on each.
    """
    reader = _Reader(root, facts, local_props)
    reader.read_snapshots()
    reader.resolve_claims(reader.read_instances())
    reader.find_parts()
    reader.find_empty_datasets()
    return reader.findings


class _Reader:
    def __init__(self, root: str, facts: Facts, local_props: UserProperties) -> None:
        self._root = root
        self._facts = facts
        self._local_props = local_props
        self._unmoved_datasets: set[str] = set()
        self._import_prefix = f"{root}/{RETIRED}/{IMPORT_PREFIX}"
        self.findings = SandboxFindings()

    def _get_props(self, name: str) -> Mapping[str, str]:
        return self._local_props.get(name, {})

    def read_snapshots(self) -> None:
        for name in self._list_snapshot_names():
            self._read_snapshot(name)

    def _list_snapshot_names(self) -> list[str]:
        """Return the names of snapshots with a record, oldest first. Skips hidden snapshots and those of volumes."""
        names = (
            name
            for name, facts in self._facts.items()
            if "@" in name and not facts["defer_destroy"].is_on and RECORD_PROPERTY in self._get_props(name)
            if not name.startswith((f"{self._root}/{VOLUMES}/", self._import_prefix))
        )
        return sorted(names, key=lambda name: self._facts[name]["createtxg"].number)

    def _read_snapshot(self, name: str) -> None:
        stored_record = self._decode(name, "snapshot")
        if stored_record is None or not isinstance(record := stored_record.record, Snapshot):
            return
        if record.id in self.findings.snapshot_names:
            other_name = self.findings.snapshot_names[record.id]
            self._quarantine(name, f"{other_name} also has the record of the snapshot {record.id}")
            return
        self.findings.snapshot_names[record.id] = name
        self.findings.generations[record.id] = stored_record.generation
        self.findings.snapshots.append(record)
        self._note_readable(name)

    def read_instances(self) -> dict[str, list[_Claim]]:
        prefix = f"{self._root}/{SANDBOXES}/"
        claims: dict[str, list[_Claim]] = {}
        for name, facts in self._facts.items():
            instance = name.removeprefix(prefix)
            if not name.startswith(prefix) or "@" in name or "/" in instance:
                continue
            if RECORD_PROPERTY not in self._get_props(name):
                self._read_unrecorded_instance(name, instance)
            elif (stored_record := self._decode(name, "sandbox")) and isinstance(
                record := stored_record.record, Sandbox
            ):
                if record.instance != instance:
                    self._quarantine(name, f"its record belongs to the instance {record.instance}")
                    continue
                claim = _Claim(
                    stored_record.generation, facts["createtxg"].number, instance, record, stored_record.secret_file
                )
                claims.setdefault(record.id, []).append(claim)
                self._note_readable(name)
        return claims

    def _read_unrecorded_instance(self, name: str, instance: str) -> None:
        if QUARANTINE_PROPERTY in self._get_props(name):
            self._quarantine(name, self._get_props(name)[QUARANTINE_PROPERTY])
        elif is_retired(self._facts[name]["canmount"], has_record=False):
            self._unmoved_datasets.add(name)
        else:
            self.findings.uncommitted_instances.append(instance)

    def resolve_claims(self, claims: Mapping[str, list[_Claim]]) -> None:
        """Choose the instance of each sandbox: if several have a record of it, the newest record wins."""
        for sandbox_id, sandbox_claims in claims.items():
            *older_claims, newest_claim = sorted(sandbox_claims, key=lambda claim: claim[:2])
            self.findings.generations[sandbox_id] = newest_claim.generation
            self.findings.sandboxes.append(newest_claim.record)
            if newest_claim.secret_file:
                self.findings.secret_files[sandbox_id] = newest_claim.secret_file
            for claim in older_claims:
                self.findings.superseded_instances[claim.instance] = (
                    f"the instance of sandbox {sandbox_id} is now {newest_claim.instance}"
                )
        self.findings.sandboxes.sort(key=lambda sandbox: sandbox.created_at.isoformat())

    def _decode(self, name: str, kind: Literal["sandbox", "snapshot"]) -> StoredRecord | None:
        try:
            return decode(self._get_props(name), kind)
        except NewerFormat as error:
            self.findings.marks.newer_records[name] = str(error)
            return None
        except ValueError as error:
            self._quarantine(name, str(error))
            return None

    def _quarantine(self, name: str, reason: str) -> None:
        self.findings.marks.quarantine(name, self._get_props(name), reason)

    def _note_readable(self, name: str) -> None:
        self.findings.marks.note_readable_record(name, self._get_props(name))

    def find_parts(self) -> None:
        """Find the parts of records, and determine which of them are stale.

        Parts of quarantined records are kept, because they may help repair the records. Parts of retired instances
        are stale. If an older release wrote them, they may contain the environments of sandboxes.
        """
        retired_prefix = f"{self._root}/{RETIRED}/"
        readable_names = {
            *self.findings.snapshot_names.values(),
            *(f"{self._root}/{SANDBOXES}/{s.instance}" for s in self.findings.sandboxes),
            *(name for name in self._local_props if name.startswith(retired_prefix) and "@" not in name),
            *self._unmoved_datasets,
        }
        for name, props in self._local_props.items():
            if any(prop.startswith(f"{RECORD_PROPERTY}.") for prop in props):
                self.findings.multipart_names.add(name)
            if name in readable_names:
                self.findings.marks.stale_parts += [(name, prop) for prop in find_stale_parts(props)]

    def find_empty_datasets(self) -> None:
        prefixes = (f"{self._root}/{RETIRED}/", f"{self._root}/{TEMPLATE_PREFIX}")
        datasets_with_snapshots = {name.partition("@")[0] for name in self._facts if "@" in name}
        disposable_datasets = {name for name in self._facts if name.startswith(prefixes) and "@" not in name}
        self.findings.unfinished_imports = sorted(
            name for name in disposable_datasets if name.startswith(self._import_prefix)
        )
        disposable_datasets -= {*self.findings.unfinished_imports}
        self.findings.empty_datasets = sorted((disposable_datasets | self._unmoved_datasets) - datasets_with_snapshots)
        self.findings.pending_moves = sorted(self._unmoved_datasets & datasets_with_snapshots)
