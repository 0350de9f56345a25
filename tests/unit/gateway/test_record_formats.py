"""Records of an older release can be read. Those of a newer release are preserved in full or refused, but never lost.

The previous release's records are literals, so that they do not change with the code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY, Kind, decode, encode
from sandbox_gateway.hosts.kvm_xfs import record_files
from sandbox_gateway.records import (
    FORMAT,
    MemoryMode,
    NewerFormat,
    Record,
    Sandbox,
    Snapshot,
    Volume,
    VolumeSnapshot,
    parse_record,
    refuse_newer_records,
)

_RESOURCES = {"cpus": 2, "memory_mb": 512, "disk_mb": 4096}
_MOUNT = {"volume": "00000000000d", "path": "/data", "read_only": True}
_OLD_RECORDS: dict[type[Record], dict[str, Any]] = {
    Sandbox: {
        "id": "00000000000a",
        "name": "web",
        "instance": "00000000000b",
        "state": "paused",
        "state_reason": "its host went down while it ran",
        "template_id": "00000000000c",
        "forked_from": "00000000000c",
        "head": "00000000000c",
        "base": "00000000000c",
        "parent_sandbox": "",
        "pause_snapshot": "",
        "cold_start": False,
        "resources": _RESOURCES,
        "network": {"allow_internet": False, "allow_out": ["10.0.0.0/8"], "deny_out": [], "allow_public_traffic": True},
        "metadata": {"team": "a"},
        "env": {"A": "b"},
        "created_at": "2026-01-02T03:04:05.000006Z",
        "started_at": "2026-01-02T03:04:06Z",
        "end_at": "2026-01-02T04:04:05Z",
        "timeout": 3600.0,
        "on_timeout": "pause",
        "auto_resume": True,
        "idempotency_key": "key",
        "branches": 3,
        "mounts": [_MOUNT],
        "host": {"slot": 4, "pid": 1234, "address": "10.231.0.18", "platform": {"accelerator": "tcg"}, "line": True},
    },
    Snapshot: {
        "id": "00000000000c",
        "kind": "template",
        "names": ["plain"],
        "description": "for tests",
        "source_sandbox": "",
        "origin_sandbox": "",
        "template_id": "00000000000c",
        "parent": "",
        "origin": "00000000000c",
        "status": "ready",
        "created_at": "2026-01-02T03:04:05.000006Z",
        "updated_at": "2026-01-02T03:04:05.000006Z",
        "expires_at": None,
        "retention": {"keep_last": 3, "keep_daily": None, "max_age": 86400.0},
        "prewarm": 2,
        "doomed": False,
        "memory": "soft_dirty",
        "memory_bytes_written": 4096,
        "disk_bytes_unique": 8192,
        "pause_ms": 5.5,
        "resources": _RESOURCES,
        "mounts": [_MOUNT],
        "volumes": [{"volume": "00000000000d", "snapshot": "00000000000e"}],
        "recipe_digest": "d1",
        "source_digest": "",
        "recipe": {"source": "debian", "packages": ["git"]},
        "host": {"platform": {"accelerator": "tcg"}, "line": True},
    },
    Volume: {
        "id": "00000000000d",
        "name": "data",
        "size_mb": 64,
        "from_snapshot": "",
        "owner": "00000000000a",
        "created_at": "2026-01-02T03:04:05.000006Z",
        "host": {"port": 21001},
    },
    VolumeSnapshot: {
        "id": "00000000000e",
        "name": "mark",
        "volume": "00000000000d",
        "size_mb": 64,
        "sandbox_snapshot": "00000000000c",
        "created_at": "2026-01-02T03:04:05.000006Z",
    },
}
_KINDS: dict[type[Record], Kind] = {
    Sandbox: "sandbox",
    Snapshot: "snapshot",
    Volume: "volume",
    VolumeSnapshot: "volume-snapshot",
}
_NEWER_RECORDS: dict[str, tuple[type[Record], dict[str, Any], str]] = {
    "format": (Volume, {"format": FORMAT + 1}, f"its format is {FORMAT + 1}, and this release reads formats up to"),
    "unreadable_format": (Sandbox, {"format": 99, "name": {"first": "web"}}, "its format is 99"),
    "memory": (Snapshot, {"memory": "teleported"}, "its memory is 'teleported', which this release does not know"),
    "state": (Sandbox, {"state": "frozen", "on_timeout": "sell"}, "its state is 'frozen'"),
    "kind": (Snapshot, {"kind": "dream"}, "its kind is 'dream'"),
}


def _make_property(kind: Kind, record: dict[str, Any], version: int = 1) -> dict[str, str]:
    return {RECORD_PROPERTY: json.dumps({"v": version, "kind": kind, "generation": 7, "record": record})}


def _write_manifest(directory: Path, record: dict[str, Any]) -> Path:
    (directory / "manifest.json").write_text(json.dumps(record))
    return directory


@pytest.mark.parametrize("kind", _OLD_RECORDS)
def test_a_record_from_the_last_release_is_converted_to_this_format(kind: type[Record], tmp_path: Path) -> None:
    record = record_files.read_record(_write_manifest(tmp_path, _OLD_RECORDS[kind]), kind)
    assert decode(_make_property(_KINDS[kind], _OLD_RECORDS[kind]), _KINDS[kind]) == (7, record, "")
    expected = {**_OLD_RECORDS[kind], "format": FORMAT, "generation": 0}
    if kind is Sandbox:
        expected["network"] = {**expected["network"], "mask_request_host": ""}
        expected |= {"departure": None, "arrival": None}
    if kind is Snapshot:
        expected |= {"imported": None, "named_at": {}, "start": None, "tagged_names": []}
    if kind is Volume:
        expected["imported"] = None
    record_files.write_record(tmp_path, record)
    assert json.loads((tmp_path / "manifest.json").read_text()) == expected
    env = expected.pop("env", {})
    secret_file = f"{'0' * 12}.{'0' * 16}" if env else ""
    assert json.loads(encode(record, 8, secret_file)[RECORD_PROPERTY])["record"] == expected


def test_the_former_name_of_the_timeout_is_converted() -> None:
    old_record = {key: value for key, value in _OLD_RECORDS[Sandbox].items() if key != "timeout"} | {"life": 60.0}
    saved_record = parse_record(Sandbox, old_record).model_dump()
    assert saved_record["timeout"] == 60 and "life" not in saved_record


def test_a_saved_record_keeps_the_fields_of_a_newer_release() -> None:
    newer_record = {
        **_OLD_RECORDS[Snapshot],
        "colour": "blue",
        "resources": {**_RESOURCES, "gpus": 1},
        "mounts": [{**_MOUNT, "cache": "none"}],
        "retention": {"keep_last": 3, "keep_hourly": 5},
    }
    snapshot = parse_record(Snapshot, newer_record).model_copy(update={"description": "changed"}, deep=True)
    saved_record = snapshot.model_dump(mode="json")
    assert (saved_record["colour"], saved_record["resources"]["gpus"], saved_record["mounts"][0]["cache"]) == (
        "blue",
        1,
        "none",
    )
    assert (saved_record["retention"]["keep_hourly"], saved_record["description"]) == (5, "changed")


@pytest.mark.parametrize("case", _NEWER_RECORDS)
def test_a_record_in_a_newer_format_is_not_treated_as_damaged(case: str, tmp_path: Path) -> None:
    kind, changes, reason = _NEWER_RECORDS[case]
    newer_record = _OLD_RECORDS[kind] | changes
    with pytest.raises(NewerFormat, match=reason):
        record_files.read_record(_write_manifest(tmp_path, newer_record), kind)
    with pytest.raises(NewerFormat, match=reason):
        decode(_make_property(_KINDS[kind], newer_record), _KINDS[kind])


def test_properties_with_a_newer_encoding_are_not_treated_as_damaged() -> None:
    with pytest.raises(NewerFormat, match="its encoding has version 3, but this release reads versions up to 2"):
        decode(_make_property("volume", _OLD_RECORDS[Volume], version=3), "volume")


@pytest.mark.parametrize(
    "changes", [{"memory": 5}, {"memory": "teleported", "size": 0, "names": 7}, {"id": "no id"}, {"format": "x"}]
)
def test_a_damaged_record_is_not_mistaken_for_a_newer_one(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        parse_record(Snapshot, _OLD_RECORDS[Snapshot] | changes)
    with pytest.raises(ValueError, match="cannot be read"):
        record_files.read_record(_write_manifest(tmp_path, _OLD_RECORDS[Snapshot] | changes), Snapshot)


def test_every_memory_mode_of_the_last_release_is_known() -> None:
    modes = ["none", "full", "incremental", "compare", "soft_dirty", "written", "live"]
    assert [parse_record(Snapshot, _OLD_RECORDS[Snapshot] | {"memory": mode}).memory for mode in modes] == [
        MemoryMode(mode) for mode in modes
    ]


def test_the_refusal_names_a_record_and_a_remedy() -> None:
    refuse_newer_records({})
    with pytest.raises(BackendFailed) as error_info:
        refuse_newer_records({"/s/a/manifest.json": "its format is 2", "/s/b/manifest.json": "its format is 3"})
    assert error_info.value.message == (
        "/s/a/manifest.json was written by a newer release of the gateway (its format is 2), as was 1 other record. "
        "Nothing was changed. Install the newer release again; to use this release, first delete these objects with "
        "the newer one"
    )
