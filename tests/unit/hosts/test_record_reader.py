"""A scan reads each record once, and finds everything that was never committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.record_files import MANIFEST, RecordReader
from sandbox_gateway.records import NewerFormat, Snapshot


def _create_directory(parent: Path, name: str, text: str | None = None) -> Path:
    directory = parent / name
    directory.mkdir()
    if text is not None:
        (directory / MANIFEST).write_text(text)
    return directory


def test_a_record_is_read_once(tmp_path: Path) -> None:
    directory, snapshot = _create_directory(tmp_path, "a"), Snapshot(names=["s"])
    record_files.write_record(directory, snapshot)
    reader = RecordReader()
    assert reader.find_newer_records([directory], Snapshot) == {}
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
    directory = _create_directory(tmp_path, "a", text)
    reader = RecordReader()
    assert reader.find_newer_records([directory], Snapshot) == {}
    with pytest.raises(ValueError, match=reason):
        reader.read(directory, Snapshot)


def test_only_records_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    newer_directory, damaged_directory = (
        _create_directory(tmp_path, "a", '{"format": 2}'),
        _create_directory(tmp_path, "b", "{"),
    )
    reader = RecordReader()
    reasons = reader.find_newer_records([newer_directory, damaged_directory], Snapshot)
    assert (
        list(reasons) == [f"{newer_directory}/{MANIFEST}"]
        and "its format is 2" in reasons[f"{newer_directory}/{MANIFEST}"]
    )
    with pytest.raises(NewerFormat):
        reader.read(newer_directory, Snapshot)


def test_a_sweep_removes_partial_entries_at_both_levels(tmp_path: Path) -> None:
    kept_directory = _create_directory(tmp_path, "kept", "{}")
    _create_directory(_create_directory(tmp_path, ".partial-new"), "files")
    (kept_directory / ".partial-manifest.json").write_text("{")
    _create_directory(kept_directory, ".partial-machine")
    deep_directory = _create_directory(_create_directory(kept_directory, "machine"), ".partial-deeper")
    removed_names = commit_protocol.sweep(tmp_path)
    assert sorted(removed_names) == [".partial-machine", ".partial-manifest.json", ".partial-new"]
    assert sorted(path.name for path in kept_directory.iterdir()) == ["machine", MANIFEST] and deep_directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_directory_lists_are_sorted_and_omit_files_and_hidden_directories(tmp_path: Path) -> None:
    for name in ("b", "a", ".damaged"):
        _create_directory(tmp_path, name)
    (tmp_path / "file").touch()
    assert commit_protocol.list_directories(tmp_path) == [tmp_path / "a", tmp_path / "b"]
