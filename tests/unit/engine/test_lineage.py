"""Tests for the lineage: trees of templates, snapshots and sandboxes, and the same trees as a list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.lineage import MAX_TREE_DEPTH, build_trees, walk_nodes
from sandbox_gateway.errors import Invalid, NotFound
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot, SnapshotKind, now


def test_a_snapshot_without_its_source_sandbox_is_a_child_of_its_parent() -> None:
    index = Index()
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["t"])
    index.put(template)
    index.put(Snapshot(names=["s"], source_sandbox="0" * 12, parent=template.id))
    (tree,) = build_trees(index)
    assert [node["names"] for node in tree["children"]] == [["s"]]


def test_lineage_returns_all_trees_or_one_branch() -> None:
    index = Index()
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["t"])
    source = Sandbox(name="source", forked_from=template.id)
    hour = timedelta(hours=1)
    first_snapshot = Snapshot(names=["first"], source_sandbox=source.id, parent=template.id, created_at=now() + hour)
    second_snapshot = Snapshot(names=["second"], source_sandbox=source.id, doomed=True, created_at=now() + 2 * hour)
    fork = Sandbox(name="fork", forked_from=first_snapshot.id, state=SandboxState.PAUSED)
    orphan = Sandbox(name="lonely", forked_from="0" * 12)
    for record in (second_snapshot, orphan, fork, first_snapshot, source, template):
        index.put(record)

    def simplify_tree(node: dict[str, Any]) -> tuple[str, list[Any]]:
        return node["id"], [simplify_tree(child) for child in node["children"]]

    first_branch = (first_snapshot.id, [(fork.id, [])])
    tree = (template.id, [(source.id, [first_branch, (second_snapshot.id, [])])])
    assert sorted(map(simplify_tree, build_trees(index))) == sorted([tree, (orphan.id, [])])
    assert [simplify_tree(node) for node in build_trees(index, "first")] == [first_branch]
    assert [simplify_tree(node) for node in build_trees(index, source.id)] == tree[1]
    with pytest.raises(NotFound, match="sandbox, snapshot or template"):
        build_trees(index, "nothing")
    nodes = {node["id"]: node for name in ("t", "source", "first", "fork") for node in build_trees(index, name)}
    summaries = {each["names"][0]: (each["kind"], each["hidden"], each.get("state")) for each in nodes.values()}
    assert summaries == {
        "t": ("template", False, None),
        "source": ("sandbox", False, "running"),
        "first": ("snapshot", False, None),
        "fork": ("sandbox", False, "paused"),
    }
    assert build_trees(index, second_snapshot.id)[0]["hidden"]


def _make_chain(length: int) -> list[Snapshot]:
    """Return snapshots, each of which is the parent of the next."""
    start_time = now()
    ids = [f"{number:012x}" for number in range(length)]
    return [
        Snapshot(id=id, parent=parent, created_at=start_time + timedelta(seconds=number))
        for number, (id, parent) in enumerate(zip(ids, ["", *ids], strict=False))
    ]


def test_the_lineage_of_ten_thousand_chained_snapshots_is_a_list() -> None:
    index, chain = Index(), _make_chain(10_000)
    index.load([], chain)
    nodes = list(walk_nodes(index))
    assert [node["id"] for node in nodes] == [each.id for each in chain]
    assert [node["depth"] for node in nodes] == list(range(10_000))
    assert [node["parent"] for node in nodes] == [each.parent for each in chain]
    assert [node["id"] for node in walk_nodes(index, chain[-2].id)] == [each.id for each in chain[-2:]]


def test_trees_that_are_too_deep_are_refused() -> None:
    index, chain = Index(), _make_chain(MAX_TREE_DEPTH + 1)
    index.load([], chain)
    with pytest.raises(Invalid, match=r"deeper than 100 levels.*flat=true.*root"):
        build_trees(index)
    (tree,) = build_trees(index, chain[1].id)
    for snapshot in chain[1:-1]:
        assert tree["id"] == snapshot.id and not {"depth", "parent"} & tree.keys()
        (tree,) = tree["children"]
    assert (tree["id"], tree["children"]) == (chain[-1].id, [])


def test_the_lineage_of_records_that_refer_to_each_other_is_finite() -> None:
    index = Index()
    first_snapshot, second_snapshot = (
        Snapshot(parent="0" * 11 + "2", id="0" * 11 + "1"),
        Snapshot(parent="0" * 11 + "1", id="0" * 11 + "2"),
    )
    index.load([], [first_snapshot, second_snapshot])
    assert build_trees(index) == []
    assert [node["id"] for node in walk_nodes(index, first_snapshot.id)] == [first_snapshot.id, second_snapshot.id]
