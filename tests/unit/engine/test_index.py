"""Tests for the index: lookups, and a single namespace in which names can be reserved."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.index import Index
from sandbox_gateway.errors import NameTaken, NotFound
from sandbox_gateway.records import (
    NAME_PATTERN,
    Mount,
    Retention,
    Sandbox,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeCapture,
    VolumeSnapshot,
    new_id,
    now,
)

names = st.from_regex(NAME_PATTERN, fullmatch=True)


def test_sandboxes_snapshots_and_templates_share_one_namespace() -> None:
    index = Index()
    index.put(Sandbox(name="a"))
    index.put(Snapshot(names=["b"]))
    for name in ("a", "b"):
        with pytest.raises(NameTaken, match=name), index.reserved([name]):
            pass


def test_a_reserved_name_is_taken_until_it_is_released() -> None:
    index = Index()
    with index.reserved(["x"]), pytest.raises(NameTaken, match="being created"), index.reserved(["x"]):
        pass
    with index.reserved(["x"]):
        pass


def test_a_name_requested_twice_is_taken() -> None:
    with pytest.raises(NameTaken), Index().reserved(["x", "x"]):
        pass


@given(duplicate_names=st.lists(names, unique=True, max_size=8))
def test_a_duplicate_name_stays_with_the_older_object(duplicate_names: list[str]) -> None:
    index = Index()
    older_sandboxes = [Sandbox(name=name) for name in duplicate_names]
    newer_sandboxes = [Sandbox(name=name, created_at=now() + timedelta(hours=1)) for name in duplicate_names]
    problems = index.load([*newer_sandboxes, *older_sandboxes], [])
    assert len(problems) == len(duplicate_names)
    for sandbox in older_sandboxes:
        assert index.get_sandbox(sandbox.name).id == sandbox.id
    for sandbox in newer_sandboxes:
        assert index.get_sandbox(sandbox.id).name == sandbox.id


def test_hidden_objects_have_no_name() -> None:
    index = Index()
    index.put(Snapshot(names=["gone"], doomed=True))
    with pytest.raises(NotFound):
        index.get_snapshot("gone")
    with index.reserved(["gone"]):
        pass


@given(ref=st.text(max_size=300))
def test_invalid_references_are_not_found(ref: str) -> None:
    with pytest.raises(NotFound) as error_info:
        Index().get_sandbox(ref)
    assert "not found" in error_info.value.message and len(error_info.value.message) < 700


def test_objects_are_found_by_id_and_name_until_they_are_removed() -> None:
    index = Index()
    sandbox, snapshot, volume = Sandbox(name="box"), Snapshot(names=["shot", "alias"]), Volume(name="data")
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["ground"])
    for record in (sandbox, snapshot, volume, template):
        index.put(record)
    assert index.get_sandbox("box") is index.get_sandbox(sandbox.id) is sandbox
    assert index.get_snapshot("shot") is index.get_snapshot("alias") is index.get_snapshot(snapshot.id) is snapshot
    assert index.get_volume("data") is index.get_volume(volume.id) is volume
    assert index.get_snapshot("ground") is template
    assert [index.find_owner(name) for name in ("box", "alias", volume.id, "other")] == [
        sandbox.id, snapshot.id, volume.id, "",
    ]  # fmt: skip
    assert not any(map(index.is_name_free, ("box", "shot", "data", sandbox.id, snapshot.id, volume.id)))
    assert index.is_name_free("other")
    for record in (sandbox, snapshot, volume):
        index.remove(record.id)
    for find, kind, name in (
        (index.get_sandbox, "sandbox", "box"), (index.get_snapshot, "snapshot", "alias"),
        (index.get_volume, "volume", "data"),
    ):  # fmt: skip
        with pytest.raises(NotFound, match=f"^{kind} '?{name}'? not found"):
            find(name)
        assert index.is_name_free(name)


def test_a_renamed_object_is_found_only_by_its_new_name() -> None:
    index = Index()
    sandbox = Sandbox(name="before")
    index.put(sandbox)
    index.put(sandbox.model_copy(update={"name": "after"}))
    assert index.find_owner("after") == sandbox.id and index.is_name_free("before")


def test_only_visible_snapshots_of_the_requested_kinds_are_found() -> None:
    index = Index()
    snapshots_by_kind = {kind: Snapshot(kind=kind, names=[kind.value]) for kind in SnapshotKind}
    for snapshot in snapshots_by_kind.values():
        index.put(snapshot)
    doomed_snapshot = Snapshot(doomed=True)
    index.put(doomed_snapshot)
    for kind, snapshot in snapshots_by_kind.items():
        if kind in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE):
            assert index.get_snapshot(snapshot.id) is snapshot
        else:
            with pytest.raises(NotFound):
                index.get_snapshot(snapshot.id)
        assert index.get_snapshot(snapshot.id, kinds=[kind]) is snapshot
    with pytest.raises(NotFound, match=r"^template"):
        index.get_snapshot("snapshot", noun="template", kinds=[SnapshotKind.TEMPLATE])
    with pytest.raises(NotFound):
        index.get_snapshot(doomed_snapshot.id)


def test_a_taken_name_is_refused_with_its_owner() -> None:
    index = Index()
    sandbox = Sandbox(name="a")
    index.put(sandbox)
    with index.reserved(["b"]):
        assert not index.is_name_free("b")
        with pytest.raises(NameTaken) as error_info, index.reserved(["a", "b", "c"]):
            pass
    assert (
        f"'a' ({sandbox.id}), 'b' (being created)" in error_info.value.message and "'c'" not in error_info.value.message
    )
    assert error_info.value.blockers == [sandbox.id]
    assert index.is_name_free("b") and index.is_name_free("c")


def test_an_object_is_pinned_until_its_last_pin_is_released() -> None:
    index = Index()
    first_snapshot, second_snapshot = Snapshot(), Snapshot()
    with index.pinned(first_snapshot, second_snapshot):
        with index.pinned(first_snapshot):
            assert index.is_pinned(first_snapshot) and index.is_pinned(second_snapshot)
        assert index.is_pinned(first_snapshot)
    assert not index.is_pinned(first_snapshot) and not index.is_pinned(second_snapshot)
    with pytest.raises(ZeroDivisionError), index.pinned(first_snapshot):
        _ = 1 / 0
    assert not index.is_pinned(first_snapshot)


def test_volume_snapshots_and_mounts_are_found() -> None:
    index = Index()
    volume, other_volume = Volume(name="data"), Volume(name="other")
    newer_snapshot = VolumeSnapshot(name="newer", volume=volume.id, size_mb=64, created_at=now() + timedelta(hours=1))
    older_snapshot = VolumeSnapshot(name="older", volume=volume.id, size_mb=64)
    same_name_snapshot = VolumeSnapshot(name="older", volume=other_volume.id, size_mb=64)
    mount = Mount(volume=volume.id, path="/data")
    sandbox = Sandbox(name="box", mounts=[mount, Mount(volume=other_volume.id, path="/other")])
    assert index.load([sandbox], [], [volume, other_volume], [newer_snapshot, older_snapshot, same_name_snapshot]) == []
    assert index.list_volume_snapshots(volume) == [older_snapshot, newer_snapshot]
    assert (
        index.get_volume_snapshot("older", volume) is older_snapshot
        and index.get_volume_snapshot("older", other_volume) is same_name_snapshot
    )
    assert (
        index.get_volume_snapshot(newer_snapshot.id)
        is index.get_volume_snapshot(newer_snapshot.id, volume)
        is newer_snapshot
    )
    assert index.list_mounts(volume) == [(sandbox, mount)]
    with pytest.raises(NotFound, match=r"snapshot .* of volume 'other' not found"):
        index.get_volume_snapshot(newer_snapshot.id, other_volume)
    with pytest.raises(NotFound, match=r"volume snapshot .* not found"):
        index.get_volume_snapshot("newer")
    index.remove(older_snapshot.id)
    assert index.list_volume_snapshots(volume) == [newer_snapshot] and index.is_name_free("newer")


def test_a_mount_of_a_missing_volume_is_reported_and_kept() -> None:
    index = Index()
    sandbox = Sandbox(name="box", mounts=[Mount(volume="0" * 12, path="/data")])
    (problem,) = index.load([sandbox], [])
    assert "000000000000" in problem and sandbox.id in problem and "/data" in problem
    assert index.get_sandbox("box").mounts == sandbox.mounts


def test_the_newer_of_two_snapshots_loses_only_the_shared_name() -> None:
    index = Index()
    older_snapshot = Snapshot(names=["a"])
    newer_snapshot = Snapshot(names=["a", "b"], created_at=now() + timedelta(hours=1))
    (problem,) = index.load([], [newer_snapshot, older_snapshot])
    assert "'a'" in problem and newer_snapshot.id in problem and older_snapshot.id in problem
    assert (
        index.get_snapshot("a") is older_snapshot
        and index.get_snapshot("b") is newer_snapshot
        and newer_snapshot.names == ["b"]
    )


def test_volume_snapshots_in_a_snapshot_are_found() -> None:
    index = Index()
    included_snapshot, other_snapshot = (VolumeSnapshot(name=name, volume=new_id(), size_mb=64) for name in ("a", "b"))
    ids = (included_snapshot.id, new_id())
    snapshot = Snapshot(volumes=[VolumeCapture(volume=included_snapshot.volume, snapshot=id) for id in ids])
    for record in (included_snapshot, other_snapshot, snapshot):
        index.put(record)
    assert index.list_included_volume_snapshots(snapshot) == [included_snapshot]


def test_a_long_reference_is_shortened() -> None:
    for ref, expected in (("a" * 80, "a" * 80), ("a" * 81, "a" * 77 + "...")):
        with pytest.raises(NotFound) as error_info:
            Index().get_volume(ref)
        assert re.search(rf"(?<!a){re.escape(expected)}(?!a|\.)", error_info.value.message), error_info.value.message


def test_lists_are_sorted_and_leave_out_hidden_snapshots() -> None:
    index, start_time = Index(), now()
    kinds = [SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE, SnapshotKind.PAUSE, SnapshotKind.SNAPSHOT]
    snapshots = [
        Snapshot(kind=kind, created_at=start_time + timedelta(seconds=number)) for number, kind in enumerate(kinds)
    ]
    doomed_snapshot = Snapshot(doomed=True)
    for snapshot in (*snapshots[::-1], doomed_snapshot):
        index.put(snapshot)
    first_snapshot, template, _, last_snapshot = snapshots
    visible_kinds = [SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE]
    assert list(index.walk_snapshots(visible_kinds)) == [first_snapshot, template, last_snapshot]
    assert list(index.walk_snapshots(visible_kinds, backwards=True)) == [last_snapshot, template, first_snapshot]
    assert list(index.walk_snapshots(visible_kinds, (first_snapshot.created_at, first_snapshot.id))) == [
        template,
        last_snapshot,
    ]
    assert list(index.walk_snapshots([SnapshotKind.SNAPSHOT])) == [first_snapshot, last_snapshot]
    index.remove(first_snapshot.id)
    assert list(index.walk_snapshots([SnapshotKind.SNAPSHOT])) == [last_snapshot]


def test_a_record_that_was_changed_in_place_leaves_nothing_behind() -> None:
    index = Index()
    sandbox = Sandbox(name="before", forked_from="0" * 12)
    index.put(sandbox)
    sandbox.name, sandbox.forked_from, sandbox.created_at = "after", "1" * 12, now()
    index.put(sandbox)
    assert index.is_name_free("before") and index.find_owner("after") == sandbox.id
    assert index.list_dependent_sandboxes(Snapshot(id="0" * 12)) == []
    assert index.list_dependent_sandboxes(Snapshot(id="1" * 12)) == list(index.walk_sandboxes()) == [sandbox]
    index.remove(sandbox.id)
    assert index.is_name_free("after") and list(index.walk_sandboxes()) == [] and sandbox.id not in index


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("expiring_ids", {"expires_at": now()}),
        ("prewarmed_ids", {"prewarm": 1}),
        ("collectable_ids", {"doomed": True}),
        ("collectable_ids", {"kind": SnapshotKind.TRANSIENT}),
    ],
)
def test_groups_follow_the_records(group: str, changes: dict[str, Any]) -> None:
    index, snapshot = Index(), Snapshot()
    index.put(snapshot)
    assert getattr(index, group) == set()
    index.put(snapshot.model_copy(update=changes))
    assert [each.id for each in index.list_grouped_snapshots(getattr(index, group))] == [snapshot.id]
    index.put(snapshot)
    assert getattr(index, group) == set()
    index.put(snapshot.model_copy(update=changes))
    index.remove(snapshot.id)
    assert getattr(index, group) == set()


def list_series(index: Index) -> dict[str, set[str]]:
    return {source: set(index.series[source]) for source in index.series}


@pytest.mark.parametrize("changes", [{"doomed": True}, {"kind": SnapshotKind.PAUSE}])
def test_hidden_snapshots_do_not_expire(changes: dict[str, Any]) -> None:
    index = Index()
    index.put(Snapshot(expires_at=now(), retention=Retention(keep_last=1)).model_copy(update=changes))
    assert not index.expiring_ids and not list_series(index)


def test_series_follow_the_records() -> None:
    index, snapshot = Index(), Snapshot(source_sandbox="a" * 12, retention=Retention(keep_last=1))

    def take_changes() -> set[str]:
        changed_series, index.changed_series = index.changed_series, set()
        return changed_series

    index.put(snapshot)
    assert list_series(index) == {"a" * 12: {snapshot.id}} and take_changes() == {"a" * 12}
    copy = index.copy()
    assert list_series(copy) == list_series(index) and copy.changed_series == {"a" * 12}, (
        "the copy applies all rules itself"
    )
    index.put(snapshot.model_copy(update={"parent": "0" * 12}))
    assert take_changes() == {"a" * 12}
    index.put(Snapshot(source_sandbox="b" * 12))
    assert take_changes() == set()
    index.remove(snapshot.id)
    assert list_series(index) == {} and take_changes() == {"a" * 12}
    assert list_series(copy) == {"a" * 12: {snapshot.id}}
