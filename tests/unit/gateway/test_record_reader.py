"""A scan reads each record once, and finds everything that was never committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.hosts import directory_records
from sandbox_gateway.hosts.directory_records import MANIFEST, RecordReader
from sandbox_gateway.records import NewerFormat, Snapshot


def _directory(parent: Path, name: str, text: str | None = None) -> Path:
    directory = parent / name
    directory.mkdir()
    if text is not None:
        (directory / MANIFEST).write_text(text)
    return directory


def test_a_record_is_read_once(tmp_path: Path) -> None:
    directory, snapshot = _directory(tmp_path, "a"), Snapshot(names=["s"])
    directory_records.write_record(directory, snapshot)
    reader = RecordReader()
    assert reader.find_newer([directory], Snapshot) == {}
    (directory / MANIFEST).unlink()
    assert reader.read(directory, Snapshot) == snapshot
    with pytest.raises(ValueError, match="it has no manifest"):
        reader.read(directory, Snapshot)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it has no manifest"),
        ("", "its manifest cannot be read: Expecting value"),
        ("[" * 100_000, "its manifest cannot be read"),
        ("\N{EURO SIGN}", "its manifest cannot be read"),
        ('{"id": "x"}', "its manifest cannot be read: id"),
    ],
)
def test_a_damaged_record_keeps_its_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    directory = _directory(tmp_path, "a", text)
    reader = RecordReader()
    assert reader.find_newer([directory], Snapshot) == {}
    with pytest.raises(ValueError, match=reason):
        reader.read(directory, Snapshot)


def test_only_records_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    newer, damaged = _directory(tmp_path, "a", '{"format": 2}'), _directory(tmp_path, "b", "{")
    reader = RecordReader()
    reasons = reader.find_newer([newer, damaged], Snapshot)
    assert list(reasons) == [f"{newer}/{MANIFEST}"] and "its format is 2" in reasons[f"{newer}/{MANIFEST}"]
    with pytest.raises(NewerFormat):
        reader.read(newer, Snapshot)


def test_a_sweep_removes_partial_entries_in_both_levels(tmp_path: Path) -> None:
    kept = _directory(tmp_path, "kept", "{}")
    _directory(_directory(tmp_path, ".partial-new"), "files")
    (kept / ".partial-manifest.json").write_text("{")
    _directory(kept, ".partial-machine")
    deep = _directory(_directory(kept, "machine"), ".partial-deeper")
    names = directory_records.sweep(tmp_path)
    assert sorted(names) == [".partial-machine", ".partial-manifest.json", ".partial-new"]
    assert sorted(path.name for path in kept.iterdir()) == ["machine", MANIFEST] and deep.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_directories_are_sorted_and_leave_out_files_and_hidden_ones(tmp_path: Path) -> None:
    for name in ("b", "a", ".damaged"):
        _directory(tmp_path, name)
    (tmp_path / "file").touch()
    assert directory_records.directories(tmp_path) == [tmp_path / "a", tmp_path / "b"]
