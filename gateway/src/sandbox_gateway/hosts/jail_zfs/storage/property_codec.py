"""Encode and decode records as user properties of the datasets or snapshots that they describe.

The property ``sandbox:record`` contains one line of JSON: ``{"v": 1, "kind", "generation", "record": {…}}``. The value
of a property is limited to 8191 bytes, so a longer record is split into parts, ``sandbox:record.<generation>.<n>``. In
that case, ``sandbox:record`` contains the number of parts and a checksum (``parts``, ``sha256``) instead of the record.
Setting ``sandbox:record`` commits the record, because ZFS sets a property atomically. ``generation`` increases with
every write.

Every user of the host can read properties. The environment of a sandbox is therefore stored in a file instead
(``secret_files``), whose name is in ``sandbox:record`` (``secrets``). Such a record has version 2, because releases
that read only version 1 would lose the environment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import NewerFormat, Record, Sandbox, Snapshot, Volume, VolumeSnapshot, parse_record
from sandbox_gateway.validation import explain

_VERSION, _VERSION_WITH_SECRETS = 1, 2
"""The versions of the encoding, ``v``. The format of the record itself is ``records.FORMAT``."""
RECORD_PROPERTY = "sandbox:record"
"""The property that contains a record, or describes its parts."""
QUARANTINE_PROPERTY = "sandbox:quarantine"
"""The property that records why the gateway does not touch a dataset or snapshot."""
DOOMED_PROPERTY = "sandbox:doomed"
"""The property that marks the datasets of a volume whose removal is committed."""

_SECRET_FILE_PATTERN = re.compile(r"[0-9a-f]{12}\.[0-9a-f]{16}")
_PART_PATTERN = re.compile(r"sandbox:record\.(\d+)\.(\d+)")
_MAX_INLINE_BYTES = 7900
_PART_BYTES = 8000
_MAX_RECORD_BYTES = 256 * 1024

Kind = Literal["sandbox", "snapshot", "volume", "volume-snapshot"]
_KINDS: dict[Kind, type[Record]] = {
    "sandbox": Sandbox,
    "snapshot": Snapshot,
    "volume": Volume,
    "volume-snapshot": VolumeSnapshot,
}


class StoredRecord(NamedTuple):
    """A record and its generation."""

    generation: int
    record: Record
    secret_file: str = ""
    """The name of the file with the environment of a sandbox.

    Empty if the sandbox has no environment, or if an older release wrote the record. Until the file has been read, the
    environment of the record is empty.
    """


def encode(record: Record, generation: int, secret_file: str = "") -> dict[str, str]:
    """Return the properties that store ``record``, ending with ``sandbox:record``.

    ``secret_file``: the name of the file with the environment, if ``record`` is a sandbox with an environment.
    Raises Invalid if the record is too long.
    """
    kind = next(kind for kind, type_ in _KINDS.items() if isinstance(record, type_))
    fields = record.model_dump(mode="json")
    if (length := len(_to_json(fields))) > _MAX_RECORD_BYTES:
        raise Invalid(
            f"the record of {kind} {record.id} is {length} bytes long, but the limit is {_MAX_RECORD_BYTES}: "
            "shorten its metadata, its environment or its recipe"
        )
    if fields.pop("env", {}) and not secret_file:
        raise ValueError("the environment of a sandbox must be in a file")
    text = _to_json(fields)
    head: dict[str, Any] = {"v": _VERSION, "kind": kind, "generation": generation}
    if secret_file:
        head |= {"v": _VERSION_WITH_SECRETS, "secrets": secret_file}
    if len(text) <= _MAX_INLINE_BYTES:
        return {RECORD_PROPERTY: f'{_to_json(head)[:-1]},"record":{text}}}'}
    parts = [text[start : start + _PART_BYTES] for start in range(0, len(text), _PART_BYTES)]
    head |= {"parts": len(parts), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return {f"{RECORD_PROPERTY}.{generation}.{n}": part for n, part in enumerate(parts)} | {
        RECORD_PROPERTY: _to_json(head)
    }


def decode(props: Mapping[str, str], kind: Kind) -> StoredRecord:
    """Return the record that ``encode`` stored in ``props``, and its generation.

    Raises ValueError with a description of the defect if the properties are invalid, and NewerFormat if a newer release
    wrote them.
    """
    if RECORD_PROPERTY not in props:
        raise ValueError(f"the property {RECORD_PROPERTY} is missing")
    head = _parse_object(props[RECORD_PROPERTY], RECORD_PROPERTY)
    generation = head.get("generation")
    version = head.get("v")
    if isinstance(version, int) and version > _VERSION_WITH_SECRETS:
        raise NewerFormat(
            f"its encoding has version {version}, but this release reads versions up to {_VERSION_WITH_SECRETS}"
        )
    if (
        version not in (_VERSION, _VERSION_WITH_SECRETS)
        or not isinstance(generation, int)
        or isinstance(generation, bool)
        or generation < 0
    ):
        raise ValueError(f"the property {RECORD_PROPERTY} has an unknown version or an invalid generation")
    if head.get("kind") != kind:
        raise ValueError(f"expected the record of a {kind}, but found the record of a {str(head.get('kind'))[:20]}")
    secret_file = head.get("secrets", "")
    if not isinstance(secret_file, str) or (secret_file and not _SECRET_FILE_PATTERN.fullmatch(secret_file)):
        raise ValueError(f"the property {RECORD_PROPERTY} contains an invalid file name")
    data = (
        head.get("record") if "parts" not in head else _parse_object(_join_parts(props, head, generation), "its record")
    )
    try:
        return StoredRecord(generation, parse_record(_KINDS[kind], data), secret_file)
    except ValidationError as error:
        raise ValueError(explain(error)[:500]) from None


def build_volume_snapshot_property(snapshot_id: str) -> str:
    """Return the name of the property that contains the record of a volume's snapshot.

    The name contains the id because one `zfs snapshot` of several datasets sets the same properties on all of them.
    """
    return f"sandbox:volume-snapshot.{snapshot_id}"


def find_stale_parts(props: Mapping[str, str]) -> list[str]:
    """Return the names of properties that contain parts of superseded or uncommitted records."""
    try:
        generation = _parse_object(props[RECORD_PROPERTY], RECORD_PROPERTY).get("generation")
    except (KeyError, ValueError):
        generation = None
    return [name for name in props if (match := _PART_PATTERN.fullmatch(name)) and int(match[1]) != generation]


def _join_parts(props: Mapping[str, str], head: Mapping[str, Any], generation: int) -> str:
    count = head["parts"]
    if not isinstance(count, int) or not 0 < count <= _MAX_RECORD_BYTES // _PART_BYTES + 1:
        raise ValueError(f"the property {RECORD_PROPERTY} has an invalid number of parts")
    names = [f"{RECORD_PROPERTY}.{generation}.{n}" for n in range(count)]
    if missing_names := [name for name in names if name not in props]:
        raise ValueError(f"the property {missing_names[0]} is missing")
    text = "".join(props[name] for name in names)
    if hashlib.sha256(text.encode(errors="replace")).hexdigest() != head.get("sha256"):
        raise ValueError("the parts of the record do not match its checksum")
    return text


def _parse_object(text: str, description: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{description} is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{description} is not a JSON object")
    return value


def _to_json(value: object) -> str:
    """Encode ``value`` as one line of ASCII JSON, which ``zfs`` does not alter."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
