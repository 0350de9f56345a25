"""Arithmetic on runs of pages, against sets."""

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


def numbers_of(found: Runs) -> list[int]:
    return [
        (address - START) // 4096 for start, length in found.tolist() for address in range(start, start + length, 4096)
    ]


@given(numbers=sets)
def test_runs_of_a_mask_are_its_pages(numbers: set[int]) -> None:
    found = runs_of(numbers)
    assert numbers_of(found) == sorted(numbers)
    assert runs.total(found) == len(numbers) * 4096
    assert all(first[0] + first[1] < second[0] for first, second in itertools.pairwise(found))


@given(one=sets, other=sets)
def test_union_has_each_page_once(one: set[int], other: set[int]) -> None:
    assert numbers_of(runs.union(runs_of(one), runs_of(other))) == sorted(one | other)


@given(parts=st.lists(sets, max_size=6))
def test_union_of_many_is_that_of_the_sets(parts: list[set[int]]) -> None:
    found = runs.empty()
    for part in parts:
        found = runs.union(found, runs_of(part))
    assert numbers_of(found) == sorted(set().union(*parts))


@given(numbers=sets, limit=st.integers(1, 9))
def test_pieces_are_bounded_and_keep_the_order(numbers: set[int], limit: int) -> None:
    pieces = list(runs.pieces(runs_of(numbers), limit * 4096))
    assert all(0 < runs.total(piece) <= limit * 4096 for piece in pieces)
    assert [number for piece in pieces for number in numbers_of(piece)] == sorted(numbers)
