"""Operations on runs of pages give the same results as operations on sets of page numbers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.hosts.kvm_xfs.memory import page_runs as runs
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs

PAGE_COUNT = 80
START_ADDRESS = 1 << 47
page_sets = st.sets(st.integers(0, PAGE_COUNT - 1))


def make_runs(numbers: set[int]) -> Runs:
    mask = np.zeros(PAGE_COUNT, dtype=np.bool_)
    mask[sorted(numbers)] = True
    return runs.create_runs_from_mask(mask, START_ADDRESS, 4096)


def list_page_numbers(page_runs: Runs) -> list[int]:
    return [
        (address - START_ADDRESS) // 4096
        for start, length in page_runs.tolist()
        for address in range(start, start + length, 4096)
    ]


@given(numbers=page_sets)
def test_runs_cover_exactly_the_pages_of_a_mask(numbers: set[int]) -> None:
    page_runs = make_runs(numbers)
    assert list_page_numbers(page_runs) == sorted(numbers)
    assert runs.count_bytes(page_runs) == len(numbers) * 4096
    assert all(first[0] + first[1] < second[0] for first, second in itertools.pairwise(page_runs))


@given(first_set=page_sets, second_set=page_sets)
def test_a_union_contains_each_page_once(first_set: set[int], second_set: set[int]) -> None:
    assert list_page_numbers(runs.union(make_runs(first_set), make_runs(second_set))) == sorted(first_set | second_set)


@given(parts=st.lists(page_sets, max_size=6))
def test_the_union_of_many_runs_equals_the_union_of_the_sets(parts: list[set[int]]) -> None:
    page_runs = runs.create_empty_runs()
    for part in parts:
        page_runs = runs.union(page_runs, make_runs(part))
    assert list_page_numbers(page_runs) == sorted(set().union(*parts))


@given(numbers=page_sets, limit=st.integers(1, 9))
def test_pieces_are_bounded_and_keep_the_order(numbers: set[int], limit: int) -> None:
    pieces = list(runs.split(make_runs(numbers), limit * 4096))
    assert all(0 < runs.count_bytes(piece) <= limit * 4096 for piece in pieces)
    assert [number for piece in pieces for number in list_page_numbers(piece)] == sorted(numbers)
