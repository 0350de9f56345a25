"""How a scan interprets the datasets of volumes, without ZFS."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, QUARANTINE, encode, volume_snapshot_head
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import DOOMED, VOLUME_FACTS, VolumeFindings, interpret_volumes
from sandbox_gateway.records import Volume, VolumeSnapshot
from sandbox_gateway.zfs.parse import Property

ROOT = "tank/g"
ONE = Volume(name="one", size_mb=64)
MARK = VolumeSnapshot(name="mark", volume=ONE.id, size_mb=64)


def place(volume: Volume, number: int = 0) -> str:
    return f"{ROOT}/volumes/{volume.id}{f'.{number}' if number else ''}"


class Tree:
    """Datasets and snapshots as ZFS would list them."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, Property]] = {}
        self.local: dict[str, dict[str, str]] = {}

    def add(self, name: str, props: dict[str, str] | None = None, **facts: Any) -> Tree:
        usual = {
            "createtxg": str(len(self.facts)),
            "defer_destroy": "off",
            "canmount": "on",
            "mounted": "yes",
            "refquota": str(64 << 20),
        }
        values = {key: str(value) for key, value in (usual | facts).items()}
        assert set(values) == set(VOLUME_FACTS)
        self.facts[name] = {key: Property(name, key, value, "local") for key, value in values.items()}
        self.local[name] = props or {}
        return self

    def volume(self, volume: Volume, number: int = 0, generation: int = 1, **facts: Any) -> Tree:
        return self.add(place(volume, number), encode(volume, generation), **facts)

    def snapshot(self, record: VolumeSnapshot, dataset: str, **facts: Any) -> Tree:
        return self.add(f"{dataset}@{record.id}", {volume_snapshot_head(record.id): encode(record, 1)[HEAD]}, **facts)

    def read(self) -> VolumeFindings:
        return interpret_volumes(ROOT, self.facts, self.local)


def test_volumes_and_their_snapshots() -> None:
    tree = Tree().add(ROOT).add(f"{ROOT}/volumes").volume(ONE).snapshot(MARK, place(ONE))
    tree.add(f"{place(ONE)}@hourly")
    found = tree.read()
    assert found.volumes == [ONE.model_copy(update={"host": {"dataset": place(ONE)}})]
    assert (found.snapshots, found.snapshot_names) == ([MARK], {MARK.id: f"{place(ONE)}@{MARK.id}"})
    assert (found.datasets, found.quarantined, found.leftover, found.uncommitted) == ({ONE.id: place(ONE)}, {}, [], [])


def test_the_newest_record_of_a_volume_counts() -> None:
    """A rollback was interrupted after its commit: the old dataset is retired with its snapshots."""
    tree = Tree().volume(ONE, generation=3).volume(ONE, 1, generation=4).snapshot(MARK, place(ONE))
    found = tree.read()
    assert (found.datasets, found.leftover) == ({ONE.id: place(ONE, 1)}, [place(ONE)])
    assert found.snapshots == [MARK]


@pytest.mark.parametrize("retired", [True, False])
def test_leftovers_of_a_rollback(retired: bool) -> None:
    tree = Tree().volume(ONE, 2)
    tree.add(place(ONE), canmount="noauto" if retired else "on").snapshot(MARK, place(ONE))
    tree.add(place(ONE, 3))  # was about to become the volume
    found = tree.read()
    assert found.leftover == [place(ONE, 3)] if retired else [place(ONE), place(ONE, 3)]
    assert (found.snapshots, found.uncommitted, found.quarantined) == ([MARK], [], {})


def test_uncommitted_datasets_are_swept() -> None:
    found = Tree().add(place(ONE)).read()
    assert (found.uncommitted, found.volumes, found.quarantined) == ([place(ONE)], [], {})


def test_a_dataset_with_snapshots_is_never_swept() -> None:
    found = Tree().add(place(ONE)).snapshot(MARK, place(ONE)).read()
    assert (found.uncommitted, found.leftover, found.snapshots) == ([], [], [])
    assert list(found.quarantined) == [place(ONE)] and found.to_mark == {}


def test_a_volume_being_removed_is_not_listed() -> None:
    tree = Tree().add(place(ONE, 1), encode(ONE, 2) | {DOOMED: "yes"})
    tree.add(place(ONE), canmount="noauto").snapshot(MARK, place(ONE))
    found = tree.read()
    assert (found.doomed, found.volumes, found.snapshots, found.quarantined) == ({ONE.id}, [], [], {})
    assert (found.leftover, found.uncommitted) == ([], [])


def test_damaged_records_and_their_dependents_are_left_alone() -> None:
    other = Volume(name="other", size_mb=64)
    tree = Tree().add(place(ONE), {HEAD: "{not json"}).snapshot(MARK, place(ONE)).add(place(ONE, 1))
    tree.add(place(other), encode(ONE, 1)).add(f"{ROOT}/volumes/odd one")
    found = tree.read()
    assert found.unreadable == {ONE.id, other.id}
    assert (found.volumes, found.snapshots, found.uncommitted, found.leftover) == ([], [], [], [])
    assert set(found.quarantined) == {place(ONE), place(other), f"{ROOT}/volumes/odd one"} == set(found.to_mark)
    healed = Tree().add(place(ONE), encode(ONE, 1) | {QUARANTINE: "not JSON"}).read()
    assert (healed.mended, [volume.id for volume in healed.volumes]) == ([place(ONE)], [ONE.id])


def test_damaged_snapshots() -> None:
    foreign = VolumeSnapshot(name="x", volume="0" * 12, size_mb=64)
    tree = Tree().volume(ONE).snapshot(foreign, place(ONE))
    tree.add(f"{place(ONE)}@{MARK.id}", {volume_snapshot_head(MARK.id): '{"v": 1}'})
    found = tree.read()
    assert found.snapshots == [] and len(found.quarantined) == 2


def test_a_volumes_part_without_its_sandbox_snapshot_is_swept() -> None:
    with_it, without, hidden = (
        VolumeSnapshot(name=f"s{n}", volume=ONE.id, size_mb=64, sandbox_snapshot=str(n) * 12) for n in range(3)
    )
    tree = Tree().volume(ONE)
    for record in (with_it, without, hidden):
        tree.snapshot(record, place(ONE))
    # a damaged record still counts as a record, since it may be repaired
    tree.add(f"{ROOT}/sandboxes/{'a' * 12}@{'0' * 12}", {HEAD: "{not json"})
    tree.add(f"{ROOT}/sandboxes/{'a' * 12}@{'2' * 12}", defer_destroy="on")
    found = tree.read()
    assert found.snapshots == [with_it]
    assert found.orphaned == [without.id, hidden.id]


def test_a_dataset_that_contradicts_its_record() -> None:
    found = Tree().volume(ONE, refquota=128 << 20, mounted="no").read()
    assert (found.unmounted, found.sizes) == ([place(ONE)], {place(ONE): 64 << 20})


def test_each_snapshot_of_one_command_has_its_own_record() -> None:
    """`zfs snapshot` sets all properties on all snapshots."""
    other = Volume(name="other", size_mb=64)
    records = [MARK, VolumeSnapshot(name="more", volume=other.id, size_mb=64)]
    every = {volume_snapshot_head(record.id): encode(record, 1)[HEAD] for record in records}
    tree = Tree().volume(ONE).volume(other)
    for record in records:
        dataset = place(ONE if record.volume == ONE.id else other)
        tree.add(f"{dataset}@{record.id}", every | {HEAD: "that of the sandbox's snapshot"})
    assert tree.read().snapshots == records
