"""Keys stay in order of creation while keys are added and removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.creation_order import CreationOrder, Key

_START = datetime(2026, 1, 1, tzinfo=UTC)
key_strategy = st.tuples(
    st.integers(0, 5).map(lambda seconds: _START + timedelta(seconds=seconds)), st.text("abc", min_size=1, max_size=2)
)


@given(
    added_keys=st.lists(key_strategy, unique_by=lambda key: key[1], max_size=12),
    removed_keys=st.lists(key_strategy, max_size=5),
    start_key=key_strategy,
)
def test_a_walk_yields_the_keys_after_the_start_in_order(
    added_keys: list[Key], removed_keys: list[Key], start_key: Key
) -> None:
    order = CreationOrder()
    for key in added_keys:
        order.add(key)
    for key in removed_keys:
        order.discard(key)
    expected = sorted(set(added_keys) - set(removed_keys))
    assert list(order.walk()) == expected and len(order) == len(expected)
    assert list(order.walk(backwards=True)) == expected[::-1]
    assert list(order.walk(start_key)) == [key for key in expected if key > start_key]
    assert list(order.walk(start_key, backwards=True)) == [key for key in expected[::-1] if key < start_key]
