"""Test how a scan interprets the datasets of volumes, without ZFS."""

from __future__ import annotations

from typing import Any

import pytest
from zfs_core.parse import Property

from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    DOOMED_PROPERTY,
    QUARANTINE_PROPERTY,
    RECORD_PROPERTY,
    build_volume_snapshot_property,
    encode,
)
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VOLUME_SCAN_PROPERTIES, VolumeFindings, interpret_volumes
from sandbox_gateway.records import Volume, VolumeSnapshot

ROOT = "tank/g"
VOLUME = Volume(name="one", size_mb=64)
SNAPSHOT = VolumeSnapshot(name="mark", volume=VOLUME.id, size_mb=64)


def make_dataset_name(volume: Volume, number: int = 0) -> str:
    return f"{ROOT}/volumes/{volume.id}{f'.{number}' if number else ''}"


class Tree:
    """A tree of datasets and snapshots, as ZFS would list it."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, Property]] = {}
        self.local: dict[str, dict[str, str]] = {}

    def add(self, name: str, props: dict[str, str] | None = None, **facts: Any) -> Tree:
        defaults = {
            "createtxg": str(len(self.facts)),
            "defer_destroy": "off",
            "canmount": "on",
            "mounted": "yes",
            "refquota": str(64 << 20),
        }
        values = {key: str(value) for key, value in (defaults | facts).items()}
        assert set(values) == set(VOLUME_SCAN_PROPERTIES)
        self.facts[name] = {key: Property(name, key, value, "local") for key, value in values.items()}
        self.local[name] = props or {}
        return self

    def add_volume(self, volume: Volume, number: int = 0, generation: int = 1, **facts: Any) -> Tree:
        return self.add(make_dataset_name(volume, number), encode(volume, generation), **facts)

    def add_snapshot(self, record: VolumeSnapshot, dataset: str, **facts: Any) -> Tree:
        return self.add(
            f"{dataset}@{record.id}",
            {build_volume_snapshot_property(record.id): encode(record, 1)[RECORD_PROPERTY]},
            **facts,
        )

    def interpret(self) -> VolumeFindings:
        return interpret_volumes(ROOT, self.facts, self.local)


def test_volumes_and_their_snapshots_are_found() -> None:
    tree = Tree().add(ROOT).add(f"{ROOT}/volumes").add_volume(VOLUME).add_snapshot(SNAPSHOT, make_dataset_name(VOLUME))
    tree.add(f"{make_dataset_name(VOLUME)}@hourly")
    findings = tree.interpret()
    assert findings.volumes == [VOLUME.model_copy(update={"host": {"dataset": make_dataset_name(VOLUME)}})]
    assert (findings.snapshots, findings.snapshot_names) == (
        [SNAPSHOT],
        {SNAPSHOT.id: f"{make_dataset_name(VOLUME)}@{SNAPSHOT.id}"},
    )
    assert (
        findings.datasets,
        findings.marks.quarantine_reasons,
        findings.leftover_datasets,
        findings.uncommitted_datasets,
    ) == (
        {VOLUME.id: make_dataset_name(VOLUME)},
        {},
        [],
        [],
    )


def test_the_newest_record_of_a_volume_is_used() -> None:
    """If a rollback was interrupted after its commit, the old dataset must still be retired."""
    tree = (
        Tree()
        .add_volume(VOLUME, generation=3)
        .add_volume(VOLUME, 1, generation=4)
        .add_snapshot(SNAPSHOT, make_dataset_name(VOLUME))
    )
    findings = tree.interpret()
    assert (findings.datasets, findings.leftover_datasets) == (
        {VOLUME.id: make_dataset_name(VOLUME, 1)},
        [make_dataset_name(VOLUME)],
    )
    assert findings.snapshots == [SNAPSHOT]


@pytest.mark.parametrize("is_retired", [True, False])
def test_leftovers_of_a_rollback_are_found(is_retired: bool) -> None:
    tree = Tree().add_volume(VOLUME, 2)
    tree.add(make_dataset_name(VOLUME), canmount="noauto" if is_retired else "on").add_snapshot(
        SNAPSHOT, make_dataset_name(VOLUME)
    )
    tree.add(make_dataset_name(VOLUME, 3))  # created by an uncommitted rollback
    findings = tree.interpret()
    assert (
        findings.leftover_datasets == [make_dataset_name(VOLUME, 3)]
        if is_retired
        else [make_dataset_name(VOLUME), make_dataset_name(VOLUME, 3)]
    )
    assert (findings.snapshots, findings.uncommitted_datasets) == ([SNAPSHOT], [])
    assert findings.marks.quarantine_reasons == {}


def test_uncommitted_datasets_are_found() -> None:
    findings = Tree().add(make_dataset_name(VOLUME)).interpret()
    assert (findings.uncommitted_datasets, findings.volumes, findings.marks.quarantine_reasons) == (
        [make_dataset_name(VOLUME)],
        [],
        {},
    )


def test_a_dataset_with_snapshots_but_no_record_is_quarantined() -> None:
    findings = Tree().add(make_dataset_name(VOLUME)).add_snapshot(SNAPSHOT, make_dataset_name(VOLUME)).interpret()
    assert (findings.uncommitted_datasets, findings.leftover_datasets, findings.snapshots) == ([], [], [])
    assert list(findings.marks.quarantine_reasons) == [make_dataset_name(VOLUME)] and findings.marks.pending_marks == {}


def test_a_volume_being_removed_is_not_listed() -> None:
    tree = Tree().add(make_dataset_name(VOLUME, 1), encode(VOLUME, 2) | {DOOMED_PROPERTY: "yes"})
    tree.add(make_dataset_name(VOLUME), canmount="noauto").add_snapshot(SNAPSHOT, make_dataset_name(VOLUME))
    findings = tree.interpret()
    assert (findings.doomed_ids, findings.volumes, findings.snapshots, findings.marks.quarantine_reasons) == (
        {VOLUME.id},
        [],
        [],
        {},
    )
    assert (findings.leftover_datasets, findings.uncommitted_datasets) == ([], [])


def test_damaged_records_are_quarantined() -> None:
    other_volume = Volume(name="other", size_mb=64)
    tree = (
        Tree()
        .add(make_dataset_name(VOLUME), {RECORD_PROPERTY: "{not json"})
        .add_snapshot(SNAPSHOT, make_dataset_name(VOLUME))
        .add(make_dataset_name(VOLUME, 1))
    )
    tree.add(make_dataset_name(other_volume), encode(VOLUME, 1)).add(f"{ROOT}/volumes/odd one")
    findings = tree.interpret()
    assert findings.unreadable_ids == {VOLUME.id, other_volume.id}
    assert (findings.volumes, findings.snapshots, findings.uncommitted_datasets, findings.leftover_datasets) == (
        [],
        [],
        [],
        [],
    )
    assert (
        set(findings.marks.quarantine_reasons)
        == {make_dataset_name(VOLUME), make_dataset_name(other_volume), f"{ROOT}/volumes/odd one"}
        == set(findings.marks.pending_marks)
    )
    recovered_findings = (
        Tree().add(make_dataset_name(VOLUME), encode(VOLUME, 1) | {QUARANTINE_PROPERTY: "not JSON"}).interpret()
    )
    assert (recovered_findings.marks.recovered_names, [volume.id for volume in recovered_findings.volumes]) == (
        [make_dataset_name(VOLUME)],
        [VOLUME.id],
    )


def test_damaged_snapshot_records_are_quarantined() -> None:
    foreign_snapshot = VolumeSnapshot(name="x", volume="0" * 12, size_mb=64)
    tree = Tree().add_volume(VOLUME).add_snapshot(foreign_snapshot, make_dataset_name(VOLUME))
    tree.add(f"{make_dataset_name(VOLUME)}@{SNAPSHOT.id}", {build_volume_snapshot_property(SNAPSHOT.id): '{"v": 1}'})
    findings = tree.interpret()
    assert findings.snapshots == [] and len(findings.marks.quarantine_reasons) == 2


def test_records_of_a_newer_release_are_neither_damaged_nor_leftovers() -> None:
    head = encode(VOLUME, 1)[RECORD_PROPERTY].replace('"v":1', '"v":3')
    findings = Tree().add(make_dataset_name(VOLUME), {RECORD_PROPERTY: head}).interpret()
    assert list(findings.marks.newer_records) == [make_dataset_name(VOLUME)]
    assert (findings.marks.quarantine_reasons, findings.volumes, findings.uncommitted_datasets) == ({}, [], [])
    head = encode(SNAPSHOT, 1)[RECORD_PROPERTY].replace('"format":1', '"format":2')
    snapshot_name = f"{make_dataset_name(VOLUME)}@{SNAPSHOT.id}"
    findings = (
        Tree().add_volume(VOLUME).add(snapshot_name, {build_volume_snapshot_property(SNAPSHOT.id): head}).interpret()
    )
    assert (list(findings.marks.newer_records), findings.marks.quarantine_reasons) == ([snapshot_name], {})


def test_a_volume_snapshot_without_its_sandbox_snapshot_is_orphaned() -> None:
    valid_snapshot, orphaned_snapshot, hidden_snapshot = (
        VolumeSnapshot(name=f"s{n}", volume=VOLUME.id, size_mb=64, sandbox_snapshot=str(n) * 12) for n in range(3)
    )
    tree = Tree().add_volume(VOLUME)
    for record in (valid_snapshot, orphaned_snapshot, hidden_snapshot):
        tree.add_snapshot(record, make_dataset_name(VOLUME))
    # A damaged record still counts, because it may be repaired.
    tree.add(f"{ROOT}/sandboxes/{'a' * 12}@{'0' * 12}", {RECORD_PROPERTY: "{not json"})
    tree.add(f"{ROOT}/sandboxes/{'a' * 12}@{'2' * 12}", defer_destroy="on")
    findings = tree.interpret()
    assert findings.snapshots == [valid_snapshot]
    assert findings.orphaned_ids == [orphaned_snapshot.id, hidden_snapshot.id]


def test_differences_between_dataset_and_record_are_found() -> None:
    findings = Tree().add_volume(VOLUME, refquota=128 << 20, mounted="no").interpret()
    assert (findings.unmounted_datasets, findings.correct_sizes) == (
        [make_dataset_name(VOLUME)],
        {make_dataset_name(VOLUME): 64 << 20},
    )


def test_each_snapshot_of_one_command_has_its_own_record() -> None:
    """One `zfs snapshot` command sets all properties on all snapshots that it takes."""
    other_volume = Volume(name="other", size_mb=64)
    records = [SNAPSHOT, VolumeSnapshot(name="more", volume=other_volume.id, size_mb=64)]
    props = {build_volume_snapshot_property(record.id): encode(record, 1)[RECORD_PROPERTY] for record in records}
    tree = Tree().add_volume(VOLUME).add_volume(other_volume)
    for record in records:
        dataset = make_dataset_name(VOLUME if record.volume == VOLUME.id else other_volume)
        tree.add(f"{dataset}@{record.id}", props | {RECORD_PROPERTY: "the record of the sandbox's snapshot"})
    assert tree.interpret().snapshots == records
