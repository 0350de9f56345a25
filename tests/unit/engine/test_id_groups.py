"""Test that a copy of groups of ids is independent of its original."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.id_groups import IdGroups

Model = dict[str, list[str]]
changes = st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.sampled_from("abc"), st.sampled_from("xyz")))


def apply_changes(groups: IdGroups, model: Model, changes: list[tuple[str, str, str]]) -> None:
    for verb, group, id in changes:
        getattr(groups, verb)(group, id)
        ids = model.setdefault(group, [])
        if verb == "discard" and id in ids:
            ids.remove(id)
        elif verb == "add" and id not in ids:
            ids.append(id)


def check_groups(groups: IdGroups, model: Model) -> None:
    assert set(groups) == {group for group, ids in model.items() if ids}
    assert {group: list(groups[group]) for group in "abc"} == {group: model.get(group, []) for group in "abc"}


@given(changes, st.lists(st.tuples(changes, changes), max_size=3))
def test_copies_are_independent(
    history: list[tuple[str, str, str]],
    later_changes: list[tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]],
) -> None:
    original_groups, model = IdGroups(), Model()
    apply_changes(original_groups, model, history)
    copies = []
    for own_changes, changes_of_copy in later_changes:
        copy, copy_model = original_groups.copy(), {group: ids.copy() for group, ids in model.items()}
        apply_changes(copy, copy_model, changes_of_copy)
        apply_changes(original_groups, model, own_changes)
        copies.append((copy, copy_model))
    check_groups(original_groups, model)
    for copy, copy_model in copies:
        check_groups(copy, copy_model)
