"""Tests for the index: lookups, a single namespace in which names can be reserved, and lineage as trees."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.index import MAX_TREE_DEPTH, Index
from sandbox_gateway.errors import Invalid, NameTaken, NotFound
from sandbox_gateway.records import (
    NAME_PATTERN,
    Mount,
    Retention,
    Sandbox,
    SandboxState,
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


@given(duplicates=st.lists(names, unique=True, max_size=8))
def test_a_duplicate_name_stays_with_the_older_object(duplicates: list[str]) -> None:
    index = Index()
    older = [Sandbox(name=name) for name in duplicates]
    newer = [Sandbox(name=name, created_at=now() + timedelta(hours=1)) for name in duplicates]
    problems = index.load([*newer, *older], [])
    assert len(problems) == len(duplicates)
    for sandbox in older:
        assert index.sandbox(sandbox.name).id == sandbox.id
    for sandbox in newer:
        assert index.sandbox(sandbox.id).name == sandbox.id


def test_hidden_objects_have_no_name() -> None:
    index = Index()
    index.put(Snapshot(names=["gone"], doomed=True))
    with pytest.raises(NotFound):
        index.snapshot("gone")
    with index.reserved(["gone"]):
        pass


def test_a_snapshot_moves_to_its_sources_parent() -> None:
    index = Index()
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["t"])
    index.put(template)
    index.put(Snapshot(names=["s"], source_sandbox="0" * 12, parent=template.id))
    (tree,) = index.lineage()
    assert [node["names"] for node in tree["children"]] == [["s"]]


@given(ref=st.text(max_size=300))
def test_invalid_references_are_not_found(ref: str) -> None:
    with pytest.raises(NotFound) as error_info:
        Index().sandbox(ref)
    assert "not found" in error_info.value.message and len(error_info.value.message) < 700


def test_objects_are_found_by_id_and_name_until_they_are_removed() -> None:
    index = Index()
    sandbox, snapshot, volume = Sandbox(name="box"), Snapshot(names=["shot", "alias"]), Volume(name="data")
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["ground"])
    for record in (sandbox, snapshot, volume, template):
        index.put(record)
    assert index.sandbox("box") is index.sandbox(sandbox.id) is sandbox
    assert index.snapshot("shot") is index.snapshot("alias") is index.snapshot(snapshot.id) is snapshot
    assert index.volume("data") is index.volume(volume.id) is volume
    assert index.snapshot("ground") is template
    assert [index.owner(name) for name in ("box", "alias", volume.id, "other")] == [
        sandbox.id, snapshot.id, volume.id, "",
    ]  # fmt: skip
    assert not any(map(index.is_free, ("box", "shot", "data", sandbox.id, snapshot.id, volume.id)))
    assert index.is_free("other")
    for record in (sandbox, snapshot, volume):
        index.remove(record.id)
    for find, kind, name in (
        (index.sandbox, "sandbox", "box"), (index.snapshot, "snapshot", "alias"), (index.volume, "volume", "data"),
    ):  # fmt: skip
        with pytest.raises(NotFound, match=f"^{kind} '?{name}'? not found"):
            find(name)
        assert index.is_free(name)


def test_a_renamed_object_is_found_only_by_its_new_name() -> None:
    index = Index()
    sandbox = Sandbox(name="before")
    index.put(sandbox)
    index.put(sandbox.model_copy(update={"name": "after"}))
    assert index.owner("after") == sandbox.id and index.is_free("before")


def test_only_visible_snapshots_of_the_requested_kinds_are_found() -> None:
    index = Index()
    kinds = {kind: Snapshot(kind=kind, names=[kind.value]) for kind in SnapshotKind}
    for snapshot in kinds.values():
        index.put(snapshot)
    doomed = Snapshot(doomed=True)
    index.put(doomed)
    for kind, snapshot in kinds.items():
        if kind in (SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE):
            assert index.snapshot(snapshot.id) is snapshot
        else:
            with pytest.raises(NotFound):
                index.snapshot(snapshot.id)
        assert index.snapshot(snapshot.id, kinds=[kind]) is snapshot
    with pytest.raises(NotFound, match=r"^template"):
        index.snapshot("snapshot", what="template", kinds=[SnapshotKind.TEMPLATE])
    with pytest.raises(NotFound):
        index.snapshot(doomed.id)


def test_a_taken_name_is_refused_with_its_owner() -> None:
    index = Index()
    sandbox = Sandbox(name="a")
    index.put(sandbox)
    with index.reserved(["b"]):
        assert not index.is_free("b")
        with pytest.raises(NameTaken) as error_info, index.reserved(["a", "b", "c"]):
            pass
    assert (
        f"'a' ({sandbox.id}), 'b' (being created)" in error_info.value.message and "'c'" not in error_info.value.message
    )
    assert error_info.value.blockers == [sandbox.id]
    assert index.is_free("b") and index.is_free("c")


def test_an_object_is_pinned_until_its_last_pin_is_released() -> None:
    index = Index()
    one, other = Snapshot(), Snapshot()
    with index.pinned(one, other):
        with index.pinned(one):
            assert index.is_pinned(one) and index.is_pinned(other)
        assert index.is_pinned(one)
    assert not index.is_pinned(one) and not index.is_pinned(other)
    with pytest.raises(ZeroDivisionError), index.pinned(one):
        _ = 1 / 0
    assert not index.is_pinned(one)


def test_volume_snapshots_and_mounts_are_found() -> None:
    index = Index()
    volume, other = Volume(name="data"), Volume(name="other")
    newer = VolumeSnapshot(name="newer", volume=volume.id, size_mb=64, created_at=now() + timedelta(hours=1))
    older = VolumeSnapshot(name="older", volume=volume.id, size_mb=64)
    same_name = VolumeSnapshot(name="older", volume=other.id, size_mb=64)
    mount = Mount(volume=volume.id, path="/data")
    sandbox = Sandbox(name="box", mounts=[mount, Mount(volume=other.id, path="/other")])
    assert index.load([sandbox], [], [volume, other], [newer, older, same_name]) == []
    assert index.snapshots_of(volume) == [older, newer]
    assert index.volume_snapshot("older", volume) is older and index.volume_snapshot("older", other) is same_name
    assert index.volume_snapshot(newer.id) is index.volume_snapshot(newer.id, volume) is newer
    assert index.mounts_of(volume) == [(sandbox, mount)]
    with pytest.raises(NotFound, match=r"snapshot .* of volume 'other' not found"):
        index.volume_snapshot(newer.id, other)
    with pytest.raises(NotFound, match=r"volume snapshot .* not found"):
        index.volume_snapshot("newer")
    index.remove(older.id)
    assert index.snapshots_of(volume) == [newer] and index.is_free("newer")


def test_a_mount_of_a_missing_volume_is_reported_and_kept() -> None:
    index = Index()
    sandbox = Sandbox(name="box", mounts=[Mount(volume="0" * 12, path="/data")])
    (sentence,) = index.load([sandbox], [])
    assert "000000000000" in sentence and sandbox.id in sentence and "/data" in sentence
    assert index.sandbox("box").mounts == sandbox.mounts


def test_the_newer_of_two_snapshots_loses_only_the_shared_name() -> None:
    index = Index()
    older = Snapshot(names=["a"])
    newer = Snapshot(names=["a", "b"], created_at=now() + timedelta(hours=1))
    (sentence,) = index.load([], [newer, older])
    assert "'a'" in sentence and newer.id in sentence and older.id in sentence
    assert index.snapshot("a") is older and index.snapshot("b") is newer and newer.names == ["b"]


def test_volume_snapshots_in_a_snapshot_are_found() -> None:
    index = Index()
    included, other = (VolumeSnapshot(name=name, volume=new_id(), size_mb=64) for name in ("a", "b"))
    ids = (included.id, new_id())
    snapshot = Snapshot(volumes=[VolumeCapture(volume=included.volume, snapshot=id) for id in ids])
    for record in (included, other, snapshot):
        index.put(record)
    assert index.volume_snapshots_in(snapshot) == [included]


def test_lineage_returns_all_trees_or_one_branch() -> None:
    index = Index()
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["t"])
    source = Sandbox(name="source", forked_from=template.id)
    hour = timedelta(hours=1)
    first = Snapshot(names=["first"], source_sandbox=source.id, parent=template.id, created_at=now() + hour)
    second = Snapshot(names=["second"], source_sandbox=source.id, doomed=True, created_at=now() + 2 * hour)
    fork = Sandbox(name="fork", forked_from=first.id, state=SandboxState.PAUSED)
    orphan = Sandbox(name="lonely", forked_from="0" * 12)
    for record in (second, orphan, fork, first, source, template):
        index.put(record)

    def tree_of(node: dict[str, Any]) -> tuple[str, list[Any]]:
        return node["id"], [tree_of(child) for child in node["children"]]

    first_branch = (first.id, [(fork.id, [])])
    tree = (template.id, [(source.id, [first_branch, (second.id, [])])])
    assert sorted(map(tree_of, index.lineage())) == sorted([tree, (orphan.id, [])])
    assert [tree_of(node) for node in index.lineage("first")] == [first_branch]
    assert [tree_of(node) for node in index.lineage(source.id)] == tree[1]
    with pytest.raises(NotFound, match="sandbox, snapshot or template"):
        index.lineage("nothing")
    nodes = {node["id"]: node for name in ("t", "source", "first", "fork") for node in index.lineage(name)}
    summaries = {each["names"][0]: (each["kind"], each["hidden"], each.get("state")) for each in nodes.values()}
    assert summaries == {
        "t": ("template", False, None),
        "source": ("sandbox", False, "running"),
        "first": ("snapshot", False, None),
        "fork": ("sandbox", False, "paused"),
    }
    assert index.lineage(second.id)[0]["hidden"]


def test_a_long_reference_is_shortened() -> None:
    for ref, expected in (("a" * 80, "a" * 80), ("a" * 81, "a" * 77 + "...")):
        with pytest.raises(NotFound) as error_info:
            Index().volume(ref)
        assert re.search(rf"(?<!a){re.escape(expected)}(?!a|\.)", error_info.value.message), error_info.value.message


def _chain(length: int) -> list[Snapshot]:
    """Return snapshots of which each is the parent of the next."""
    start = now()
    ids = [f"{number:012x}" for number in range(length)]
    return [
        Snapshot(id=id, parent=parent, created_at=start + timedelta(seconds=number))
        for number, (id, parent) in enumerate(zip(ids, ["", *ids], strict=False))
    ]


def test_the_lineage_of_a_chain_of_ten_thousand_snapshots_is_a_list() -> None:
    index, chain = Index(), _chain(10_000)
    index.load([], chain)
    nodes = list(index.walk_lineage())
    assert [node["id"] for node in nodes] == [each.id for each in chain]
    assert [node["depth"] for node in nodes] == list(range(10_000))
    assert [node["parent"] for node in nodes] == [each.parent for each in chain]
    assert [node["id"] for node in index.walk_lineage(chain[-2].id)] == [each.id for each in chain[-2:]]


def test_trees_that_are_too_deep_are_refused() -> None:
    index, chain = Index(), _chain(MAX_TREE_DEPTH + 1)
    index.load([], chain)
    with pytest.raises(Invalid, match=r"deeper than 100 levels.*flat=true.*root"):
        index.lineage()
    (tree,) = index.lineage(chain[1].id)
    for snapshot in chain[1:-1]:
        assert tree["id"] == snapshot.id and not {"depth", "parent"} & tree.keys()
        (tree,) = tree["children"]
    assert (tree["id"], tree["children"]) == (chain[-1].id, [])


def test_the_lineage_of_records_that_refer_to_each_other_ends() -> None:
    index = Index()
    one, two = Snapshot(parent="0" * 11 + "2", id="0" * 11 + "1"), Snapshot(parent="0" * 11 + "1", id="0" * 11 + "2")
    index.load([], [one, two])
    assert index.lineage() == []
    assert [node["id"] for node in index.walk_lineage(one.id)] == [one.id, two.id]


def test_lists_are_sorted_and_leave_out_hidden_snapshots() -> None:
    index, start = Index(), now()
    kinds = [SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE, SnapshotKind.PAUSE, SnapshotKind.SNAPSHOT]
    snapshots = [Snapshot(kind=kind, created_at=start + timedelta(seconds=number)) for number, kind in enumerate(kinds)]
    doomed = Snapshot(doomed=True)
    for snapshot in (*snapshots[::-1], doomed):
        index.put(snapshot)
    first, template, _, last = snapshots
    visible = [SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE]
    assert list(index.walk_snapshots(visible)) == [first, template, last]
    assert list(index.walk_snapshots(visible, backwards=True)) == [last, template, first]
    assert list(index.walk_snapshots(visible, (first.created_at, first.id))) == [template, last]
    assert list(index.walk_snapshots([SnapshotKind.SNAPSHOT])) == [first, last]
    index.remove(first.id)
    assert list(index.walk_snapshots([SnapshotKind.SNAPSHOT])) == [last]


def test_a_record_that_was_changed_in_place_leaves_nothing_behind() -> None:
    index = Index()
    sandbox = Sandbox(name="before", forked_from="0" * 12)
    index.put(sandbox)
    sandbox.name, sandbox.forked_from, sandbox.created_at = "after", "1" * 12, now()
    index.put(sandbox)
    assert index.is_free("before") and index.owner("after") == sandbox.id
    assert index.sandboxes_using(Snapshot(id="0" * 12)) == []
    assert index.sandboxes_using(Snapshot(id="1" * 12)) == list(index.walk_sandboxes()) == [sandbox]
    index.remove(sandbox.id)
    assert index.is_free("after") and list(index.walk_sandboxes()) == [] and sandbox.id not in index


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("expiring", {"expires_at": now()}),
        ("retained", {"retention": Retention(keep_last=1)}),
        ("prewarmed", {"prewarm": 1}),
        ("collectable", {"doomed": True}),
        ("collectable", {"kind": SnapshotKind.TRANSIENT}),
    ],
)
def test_groups_follow_the_records(group: str, changes: dict[str, Any]) -> None:
    index, snapshot = Index(), Snapshot()
    index.put(snapshot)
    assert getattr(index, group) == set()
    index.put(snapshot.model_copy(update=changes))
    assert [each.id for each in index.snapshots_in(getattr(index, group))] == [snapshot.id]
    index.put(snapshot)
    assert getattr(index, group) == set()
    index.put(snapshot.model_copy(update=changes))
    index.remove(snapshot.id)
    assert getattr(index, group) == set()


@pytest.mark.parametrize("changes", [{"doomed": True}, {"kind": SnapshotKind.PAUSE}])
def test_hidden_snapshots_do_not_expire(changes: dict[str, Any]) -> None:
    index = Index()
    index.put(Snapshot(expires_at=now(), retention=Retention(keep_last=1)).model_copy(update=changes))
    assert index.expiring == index.retained == set()


def test_the_version_of_retained_snapshots_changes_with_them() -> None:
    index, snapshot = Index(), Snapshot(retention=Retention(keep_last=1))
    versions = [index.retained_version]
    for change in (
        lambda: index.put(snapshot),
        lambda: index.put(snapshot.model_copy(update={"parent": "0" * 12})),
        lambda: index.remove(snapshot.id),
    ):
        change()
        versions.append(index.retained_version)
    assert versions == sorted(set(versions))
    index.put(Snapshot())
    assert index.retained_version == versions[-1]
