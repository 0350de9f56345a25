"""Record findings of a scan, which are written back to single datasets and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE
from sandbox_gateway.zfs.parse import Property

FACTS = ("createtxg", "defer_destroy", "canmount")
"""Native properties of every dataset and snapshot that a scan needs."""

Facts = Mapping[str, Mapping[str, Property]]
UserProperties = Mapping[str, Mapping[str, str]]


def is_retired(canmount: Property, has_record: bool) -> bool:
    """Return whether a dataset is retired: the last step of retiring it is to forbid mounting."""
    return not has_record and canmount.value == "noauto"


@dataclass
class Marks:
    quarantined: dict[str, str] = field(default_factory=dict)
    """Datasets and snapshots whose records cannot be read or conflict, with the reason in ASCII."""
    to_mark: dict[str, str] = field(default_factory=dict)
    """Quarantined datasets and snapshots that are not marked with this reason yet."""
    mended: list[str] = field(default_factory=list)
    """Datasets and snapshots that are marked as quarantined, but can be read again."""
    stale: list[tuple[str, str]] = field(default_factory=list)
    """``(name, property)`` of parts of uncommitted records."""

    def quarantine(self, name: str, props: Mapping[str, str], reason: str) -> None:
        ascii = "".join(c if " " <= c <= "~" else " " for c in reason.encode("ascii", "replace").decode())
        text = " ".join(ascii.split())[:500] or "damaged"
        self.quarantined[name] = text
        if props.get(QUARANTINE) != text:
            self.to_mark[name] = text

    def confirm(self, name: str, props: Mapping[str, str]) -> None:
        """Record that a dataset or snapshot can be read."""
        if QUARANTINE in props:
            self.mended.append(name)

    def notes(self) -> list[str]:
        """Return a sentence for each quarantined or repaired dataset and snapshot."""
        notes = [f"{name}: left unchanged, because {reason}" for name, reason in self.quarantined.items()]
        return notes + [f"{name}: its record can be read again" for name in self.mended]
