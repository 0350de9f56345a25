"""The lineage: the trees of templates, snapshots and sandboxes, derived from the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.names import shorten
from sandbox_gateway.errors import Invalid, NotFound
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind

Trees = list[dict[str, Any]]
MAX_TREE_DEPTH = 100
"""Maximum depth of nested trees. Many JSON parsers refuse deeper ones, some from 100 levels of nesting."""


def build_trees(index: Index, root: str | None = None) -> Trees:
    """Return the trees of templates, snapshots and sandboxes as nested dictionaries.

    ``root``: return only the tree under this object. Raises NotFound if ``root`` does not exist, and Invalid if a
    tree is deeper than ``MAX_TREE_DEPTH``.
    """
    trees: Trees = []
    path: list[dict[str, Any]] = []
    for node in walk_nodes(index, root):
        depth = node.pop("depth")
        del node["parent"], path[depth:]
        if depth >= MAX_TREE_DEPTH:
            raise Invalid(
                f"the lineage is deeper than {MAX_TREE_DEPTH} levels, and most JSON parsers reject that: request it "
                "as a list (flat=true), or request the tree under one object (root)"
            )
        node["children"] = []
        (path[-1]["children"] if path else trees).append(node)
        path.append(node)
    return trees


def walk_nodes(index: Index, root: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the trees, each before its descendants, with ``parent`` (an id, or "") and ``depth``.

    ``root`` has the same meaning as in ``build_trees``. The depth is not limited by ``MAX_TREE_DEPTH``.
    """
    records = _read_records(index)
    children: dict[str, list[str]] = {}
    for id, record in records.items():
        children.setdefault(_find_parent(record, records), []).append(id)
    root_ids = children.get("", [])
    if root is not None:
        id = root if root in records else index.find_owner(root)
        if id not in records:
            raise NotFound("sandbox, snapshot or template", shorten(root), resource="sandbox")
        root_ids = [id]
    stack = [(id, "", 0) for id in reversed(root_ids)]
    seen_ids: set[str] = set()
    while stack:
        id, parent, depth = stack.pop()
        if id in seen_ids:
            continue  # Damaged records may form a cycle.
        seen_ids.add(id)
        yield {**_create_node(records[id]), "parent": parent, "depth": depth}
        stack += [(child, id, depth + 1) for child in reversed(children.get(id, ()))]


def list_ancestors(index: Index, snapshot: Snapshot) -> list[Snapshot]:
    """Return the visible snapshots and templates from which a snapshot descends, its root first."""
    return [each for each in _walk_ancestors(index, snapshot) if not each.is_hidden][::-1]


def list_children(index: Index, snapshot: Snapshot) -> list[Snapshot]:
    """Return the visible snapshots whose nearest visible ancestor is ``snapshot``, oldest first."""

    def find_visible_parent(each: Snapshot) -> Snapshot | None:
        return next((ancestor for ancestor in _walk_ancestors(index, each) if not ancestor.is_hidden), None)

    others = index.walk_snapshots([SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE])
    return [each for each in others if (parent := find_visible_parent(each)) and parent.id == snapshot.id]


def _walk_ancestors(index: Index, snapshot: Snapshot) -> Iterator[Snapshot]:
    """Yield the snapshots from which a snapshot descends, the nearest first."""
    seen_ids = {snapshot.id}
    # Damaged records may form a cycle.
    while (id := _find_parent(snapshot, index.snapshots)) and id not in seen_ids:
        seen_ids.add(id)
        snapshot = index.snapshots[id]
        yield snapshot


def _read_records(index: Index) -> dict[str, Sandbox | Snapshot]:
    """Return the records by id: all snapshots, then all sandboxes, each oldest first."""
    snapshots = index.walk_snapshots(SnapshotKind, include_hidden=True)
    return {each.id: each for each in snapshots} | {each.id: each for each in index.walk_sandboxes()}


def _find_parent(record: Sandbox | Snapshot, records: Mapping[str, Any]) -> str:
    """Return the id of the object under which ``record`` is shown in the lineage, or "" if it is a root."""
    if isinstance(record, Sandbox):
        ancestor_ids = [record.forked_from, record.template_id]
    else:
        # A snapshot whose source was removed is shown under its own parent.
        ancestor_ids = [record.source_sandbox, record.parent, record.origin]
    return next((each for each in ancestor_ids if each in records and each != record.id), "")


def _create_node(record: Sandbox | Snapshot) -> dict[str, Any]:
    if isinstance(record, Sandbox):
        node: dict[str, Any] = {"id": record.id, "kind": "sandbox", "names": [record.name], "hidden": False}
        return node | {"state": record.state.value}
    return {"id": record.id, "kind": record.kind.value, "names": record.all_names, "hidden": record.is_hidden}
