"""Collect the findings of a scan that ``PropertyStore.mark`` writes to datasets and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zfs_core.parse import Property

from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE_PROPERTY

SCAN_PROPERTIES = ("createtxg", "defer_destroy", "canmount")
"""The native properties that a scan reads from every dataset and snapshot."""

Facts = Mapping[str, Mapping[str, Property]]
UserProperties = Mapping[str, Mapping[str, str]]


def is_retired(canmount: Property, has_record: bool) -> bool:
    """Return whether a dataset is retired: it has no record and is not mounted automatically."""
    return not has_record and canmount.value == "noauto"


@dataclass
class Marks:
    newer_records: dict[str, str] = field(default_factory=dict)
    """Datasets and snapshots whose records only a newer release can read, with the reason."""
    quarantine_reasons: dict[str, str] = field(default_factory=dict)
    """Datasets and snapshots whose records cannot be read or conflict, with the reason in ASCII."""
    pending_marks: dict[str, str] = field(default_factory=dict)
    """Quarantined datasets and snapshots that are not marked with their reason yet, with the reason."""
    recovered_names: list[str] = field(default_factory=list)
    """Datasets and snapshots that are marked as quarantined, but can be read again."""
    stale_parts: list[tuple[str, str]] = field(default_factory=list)
    """Parts of uncommitted records, as ``(dataset or snapshot, property)``."""

    def quarantine(self, name: str, props: Mapping[str, str], reason: str) -> None:
        ascii_reason = "".join(c if " " <= c <= "~" else " " for c in reason.encode("ascii", "replace").decode())
        text = " ".join(ascii_reason.split())[:500] or "damaged"
        self.quarantine_reasons[name] = text
        if props.get(QUARANTINE_PROPERTY) != text:
            self.pending_marks[name] = text

    def note_readable_record(self, name: str, props: Mapping[str, str]) -> None:
        """Note that the record of a dataset or snapshot can be read."""
        if QUARANTINE_PROPERTY in props:
            self.recovered_names.append(name)

    def list_notes(self) -> list[str]:
        """Return a sentence for each quarantined or recovered dataset and snapshot."""
        notes = [f"{name}: left unchanged, because {reason}" for name, reason in self.quarantine_reasons.items()]
        return notes + [f"{name}: its record can be read again" for name in self.recovered_names]
