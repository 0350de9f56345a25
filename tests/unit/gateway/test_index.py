"""Names: one namespace, reserved before any work; lineage as trees."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.index import Index
from sandbox_gateway.errors import NameTaken, NotFound
from sandbox_gateway.records import NAME_PATTERN, Sandbox, Snapshot, SnapshotKind, now

names = st.from_regex(NAME_PATTERN, fullmatch=True)


def test_sandboxes_snapshots_and_templates_share_one_namespace() -> None:
    index = Index()
    index.put(Sandbox(name="a"))
    index.put(Snapshot(names=["b"]))
    for name in ("a", "b"):
        with pytest.raises(NameTaken, match=name), index.reserved([name]):
            pass


def test_a_reserved_name_is_taken_until_it_is_let_go() -> None:
    index = Index()
    with index.reserved(["x"]), pytest.raises(NameTaken, match="being made"), index.reserved(["x"]):
        pass
    with index.reserved(["x"]):
        pass


def test_a_name_asked_for_twice_is_taken() -> None:
    with pytest.raises(NameTaken), Index().reserved(["x", "x"]):
        pass


@given(taken=st.lists(names, unique=True, max_size=8))
def test_the_older_keeps_a_name_found_twice(taken: list[str]) -> None:
    index = Index()
    older = [Sandbox(name=name) for name in taken]
    newer = [Sandbox(name=name, created_at=now() + timedelta(hours=1)) for name in taken]
    clashes = index.load([*newer, *older], [])
    assert len(clashes) == len(taken)
    for sandbox in older:
        assert index.sandbox(sandbox.name).id == sandbox.id
    for sandbox in newer:
        assert index.sandbox(sandbox.id).name == sandbox.id


def test_what_is_hidden_has_no_name() -> None:
    index = Index()
    index.put(Snapshot(names=["gone"], doomed=True))
    with pytest.raises(NotFound):
        index.snapshot("gone")
    with index.reserved(["gone"]):
        pass


def test_a_snapshot_whose_source_is_gone_hangs_where_the_source_hung() -> None:
    index = Index()
    template = Snapshot(kind=SnapshotKind.TEMPLATE, names=["t"])
    index.put(template)
    index.put(Snapshot(names=["s"], source_sandbox="0" * 12, parent=template.id))
    (tree,) = index.lineage()
    assert [node["names"] for node in tree["children"]] == [["s"]]


@given(ref=st.text(max_size=300))
def test_wild_references_are_not_found_in_a_short_sentence(ref: str) -> None:
    with pytest.raises(NotFound) as refusal:
        Index().sandbox(ref)
    assert "not found" in refusal.value.message and len(refusal.value.message) < 700
