"""Operations on runs of pages give the same results as operations on sets of page numbers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.hosts.kvm_xfs.memory import runs
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs

PAGES = 80
START = 1 << 47
sets = st.sets(st.integers(0, PAGES - 1))


def runs_of(numbers: set[int]) -> Runs:
    mask = np.zeros(PAGES, dtype=np.bool_)
    mask[sorted(numbers)] = True
    return runs.from_mask(mask, START, 4096)


def numbers_of(page_runs: Runs) -> list[int]:
    return [
        (address - START) // 4096
        for start, length in page_runs.tolist()
        for address in range(start, start + length, 4096)
    ]


@given(numbers=sets)
def test_runs_cover_exactly_the_pages_of_a_mask(numbers: set[int]) -> None:
    page_runs = runs_of(numbers)
    assert numbers_of(page_runs) == sorted(numbers)
    assert runs.total(page_runs) == len(numbers) * 4096
    assert all(first[0] + first[1] < second[0] for first, second in itertools.pairwise(page_runs))


@given(one=sets, other=sets)
def test_a_union_contains_each_page_once(one: set[int], other: set[int]) -> None:
    assert numbers_of(runs.union(runs_of(one), runs_of(other))) == sorted(one | other)


@given(parts=st.lists(sets, max_size=6))
def test_the_union_of_many_runs_equals_the_union_of_the_sets(parts: list[set[int]]) -> None:
    page_runs = runs.empty()
    for part in parts:
        page_runs = runs.union(page_runs, runs_of(part))
    assert numbers_of(page_runs) == sorted(set().union(*parts))


@given(numbers=sets, limit=st.integers(1, 9))
def test_pieces_are_bounded_and_keep_the_order(numbers: set[int], limit: int) -> None:
    pieces = list(runs.split(runs_of(numbers), limit * 4096))
    assert all(0 < runs.total(piece) <= limit * 4096 for piece in pieces)
    assert [number for piece in pieces for number in numbers_of(piece)] == sorted(numbers)
