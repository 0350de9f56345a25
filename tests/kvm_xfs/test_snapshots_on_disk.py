"""Test when snapshots become durable, and how a scan handles snapshots that are not yet durable."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs import commit_protocol
from sandbox_gateway.hosts.kvm_xfs.files import reflink, snapshots
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.records import Snapshot, SnapshotKind


@pytest.fixture
def synced_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files and directories that have been synced."""
    names: list[str] = []
    monkeypatch.setattr(commit_protocol.os, "fsync", lambda descriptor: names.append(_find_name(descriptor)))
    monkeypatch.setattr(reflink, "count_unique_bytes", lambda path: 0)
    return names


def _find_name(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


@pytest.fixture
def store(tmp_path: Path) -> Snapshots:
    layout = Layout(tmp_path)
    layout.create()
    return Snapshots(layout, Quarantine(tmp_path))


def commit_snapshot(store: Snapshots, kind: SnapshotKind) -> Snapshot:
    snapshot = Snapshot(kind=kind)
    store.partial_files(snapshot).directory.mkdir()
    for name in ("rootfs.img", "kernel", "initrd"):
        (store.partial_files(snapshot).directory / name).write_bytes(b"x")
    store.commit(snapshot)
    return snapshot


def scan_store(store: Snapshots) -> tuple[list[str], list[str]]:
    repaired: list[str] = []
    return [snapshot.id for snapshot in store.scan(repaired)], repaired


def test_commit_syncs_a_snapshot(store: Snapshots, synced_names: list[str]) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.SNAPSHOT)
    assert {"rootfs.img", ".partial-manifest.json", f".partial-{snapshot.id}", "snapshots"} <= set(synced_names)
    assert scan_store(store) == ([snapshot.id], [])


def test_commit_leaves_a_transient_snapshot_unsynced_until_sync(store: Snapshots, synced_names: list[str]) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.TRANSIENT)
    assert synced_names == []
    store.sync(snapshot)
    assert {"rootfs.img", "manifest.json", snapshot.id, "snapshots"} == set(synced_names)
    assert not (store.files(snapshot).directory / "unsynced").exists()
    assert scan_store(store) == ([snapshot.id], [])


def test_commit_does_not_sync_the_base_of_a_template(store: Snapshots, synced_names: list[str]) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.BASE)
    assert synced_names == [] and scan_store(store) == ([snapshot.id], [])


@pytest.mark.usefixtures("synced_names")
def test_sync_of_a_removed_snapshot_does_nothing(store: Snapshots) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.TRANSIENT)
    store.remove(snapshot)
    store.sync(snapshot)
    assert scan_store(store) == ([], [])


def test_scan_syncs_a_transient_snapshot_after_a_gateway_restart(store: Snapshots, synced_names: list[str]) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.TRANSIENT)
    assert scan_store(store) == ([snapshot.id], [])
    assert "rootfs.img" in synced_names
    assert not (store.files(snapshot).directory / "unsynced").exists()


@pytest.mark.usefixtures("synced_names")
@pytest.mark.parametrize("manifest", ["", "{}", None])
def test_scan_removes_an_unsynced_transient_snapshot_after_a_reboot(
    store: Snapshots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manifest: str | None
) -> None:
    snapshot = commit_snapshot(store, SnapshotKind.TRANSIENT)
    if manifest is not None:
        (store.files(snapshot).directory / "manifest.json").write_text(manifest)
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(snapshots, "_BOOT_ID_FILE", tmp_path / "boot_id")
    ids, repaired = scan_store(store)
    assert ids == [] and not store.files(snapshot).directory.exists()
    assert repaired == [f"removed the snapshot {snapshot.id}, which was not synced before the host stopped"]
