"""The values of the keys in etcd, as JSON. Unknown fields are ignored, so that members may have different releases."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from sandbox_gateway.records import Record, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot

FORMAT = 1


class _Value(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    def dump(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises ValueError."""
        return cls.model_validate_json(data)

    @classmethod
    def try_parse(cls, data: bytes) -> Self | None:
        """Return None if the value cannot be read."""
        try:
            return cls.parse(data)
        except ValueError:
            return None


class FleetRecord(_Value):
    """The settings that all members must agree on."""

    secret: str
    """A fingerprint of the secret."""
    domain: str
    format: int = FORMAT


class HostRecord(_Value):
    """A host that has joined at some time. It stays when the host goes, so that nobody else takes its name."""

    host_id: str
    """A random id that the host keeps on its disk."""
    cordoned: bool = False
    """It gets no new sandboxes."""
    signer: str = ""
    """The fingerprint of the key with which it signs exported and pushed snapshots. Empty: it cannot export any."""


class Load(_Value):
    """The sizes of a host, and the free part of each, in bytes."""

    memory_total: int = 0
    memory_free: int = 0
    disk_total: int = 0
    disk_free: int = 0
    sandboxes: int = 0
    max_sandboxes: int = 0
    memory_reserve: int = 0
    """The part of `memory_free` that new machines must leave free."""


class MemberRecord(_Value):
    """A running gateway."""

    host_id: str
    address: str
    kind: str
    platform: dict[str, str] = {}
    labels: dict[str, str] = {}
    version: str = ""
    load: Load = Load()


MoveState = Literal["begun", "committed", "adopted", "aborted"]


class MoveRecord(_Value):
    """A move of a sandbox to another host."""

    id: str
    source: str
    """The host that the sandbox leaves."""
    target: str
    state: MoveState = "begun"
    """The target has the sandbox if the move is committed. When it has created the sandbox, the move is adopted.

    Otherwise, the source has the sandbox.
    """


class ObjectRecord(_Value):
    """An object that has a name or an id."""

    kind: str
    """sandbox, snapshot, template, volume or volume_snapshot."""
    id: str
    content: str = ""
    """Objects with the same content can have the same name: copies of a template or a snapshot. Empty: no copies."""
    created_at: datetime | None = None


@dataclass(frozen=True)
class Holder:
    """A host with an object that has a certain name or id. Sandboxes and volumes share instances, to save memory."""

    host: str
    kind: str
    is_id: bool
    content: str = ""
    created_at: datetime | None = None

    def may_share_name(self, other: Holder) -> bool:
        """Return whether both may have the same name: copies, and templates, which get their names build by build."""
        if self.kind != other.kind:
            return False
        return self.kind == "template" or (self.content != "" and self.content == other.content)


def describe_object(record: Record) -> ObjectRecord | None:
    """Return the value for an object; None if only its own host needs to know it."""
    if isinstance(record, Sandbox):
        return ObjectRecord(kind="sandbox", id=record.id)
    if isinstance(record, Volume):
        return ObjectRecord(kind="volume", id=record.id)
    if isinstance(record, VolumeSnapshot):
        return ObjectRecord(kind="volume_snapshot", id=record.id)
    return _describe_snapshot(record)


def _describe_snapshot(snapshot: Snapshot) -> ObjectRecord | None:
    if snapshot.doomed or snapshot.kind not in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE):
        return None
    origin = snapshot.imported.snapshot if snapshot.imported else snapshot.id
    content = snapshot.recipe_digest or origin if snapshot.kind is SnapshotKind.TEMPLATE else origin
    return ObjectRecord(kind=snapshot.kind.value, id=snapshot.id, content=content, created_at=snapshot.created_at)
