"""Arithmetic on runs of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.uint64]
"""Shape (n, 2): start and length in bytes of each run of pages, ascending and disjoint."""


def empty() -> Runs:
    return np.empty((0, 2), dtype=np.uint64)


def concatenate(parts: Iterable[Runs]) -> Runs:
    return np.concatenate([empty(), *parts])


def from_mask(mask: NDArray[np.bool_], start: int, page: int) -> Runs:
    """Return the runs of the true entries of ``mask``, which describes consecutive pages from ``start`` on."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8))).reshape(-1, 2)
    return np.stack([edges[:, 0] * page + start, (edges[:, 1] - edges[:, 0]) * page], axis=1).astype(np.uint64)


def total(runs: Runs) -> int:
    """Return the length of all runs in bytes."""
    return int(runs[:, 1].sum())


def union(one: Runs, other: Runs) -> Runs:
    """Return the runs that cover every byte of either."""
    both = np.concatenate([one, other])
    if not len(both):
        return both
    both = both[np.argsort(both[:, 0], kind="stable")]
    starts, ends = both[:, 0], np.maximum.accumulate(both[:, 0] + both[:, 1])
    fresh = np.concatenate(([True], starts[1:] > ends[:-1]))
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:], [len(both)])) - 1
    return np.stack([starts[first], ends[last] - starts[first]], axis=1)


def pieces(runs: Runs, most: int) -> Iterator[Runs]:
    """Yield the runs in groups of at most ``most`` bytes; long runs are split."""
    group: list[tuple[int, int]] = []
    room = most
    for start, length in runs.tolist():
        while length:
            step = min(length, room)
            group.append((start, step))
            start, length, room = start + step, length - step, room - step
            if room == 0:
                yield np.array(group, dtype=np.uint64)
                group, room = [], most
    if group:
        yield np.array(group, dtype=np.uint64)
