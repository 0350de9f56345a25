"""The order of objects stays sorted while objects are added and removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.creation_order import CreationOrder, Key

_START = datetime(2026, 1, 1, tzinfo=UTC)
keys = st.tuples(
    st.integers(0, 5).map(lambda seconds: _START + timedelta(seconds=seconds)), st.text("abc", min_size=1, max_size=2)
)


@given(added=st.lists(keys, unique_by=lambda key: key[1], max_size=12), removed=st.lists(keys, max_size=5), after=keys)
def test_a_walk_yields_the_remaining_keys_after_another(added: list[Key], removed: list[Key], after: Key) -> None:
    order = CreationOrder()
    for key in added:
        order.add(key)
    for key in removed:
        order.discard(key)
    expected = sorted(set(added) - set(removed))
    assert list(order.walk()) == expected and len(order) == len(expected)
    assert list(order.walk(backwards=True)) == expected[::-1]
    assert list(order.walk(after)) == [key for key in expected if key > after]
    assert list(order.walk(after, backwards=True)) == [key for key in expected[::-1] if key < after]
