"""Create, combine and split runs of consecutive pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.uint64]
"""An array of shape (n, 2): start and length of each run of pages in bytes. Runs are ascending and disjoint."""


def create_empty_runs() -> Runs:
    return np.empty((0, 2), dtype=np.uint64)


def concatenate(parts: Iterable[Runs]) -> Runs:
    return np.concatenate([create_empty_runs(), *parts])


def create_runs_from_mask(mask: NDArray[np.bool_], start: int, page_bytes: int) -> Runs:
    """Return the runs of the pages whose entries in ``mask`` are true. The first page is at the address ``start``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8))).reshape(-1, 2)
    starts, lengths = edges[:, 0] * page_bytes + start, (edges[:, 1] - edges[:, 0]) * page_bytes
    return np.stack([starts, lengths], axis=1).astype(np.uint64)


def count_bytes(runs: Runs) -> int:
    """Return the total length of the runs in bytes."""
    return int(runs[:, 1].sum())


def union(one: Runs, other: Runs) -> Runs:
    """Return the runs that cover every byte in ``one`` or ``other``."""
    combined = np.concatenate([one, other])
    if not len(combined):
        return combined
    combined = combined[np.argsort(combined[:, 0], kind="stable")]
    starts, ends = combined[:, 0], np.maximum.accumulate(combined[:, 0] + combined[:, 1])
    is_start = np.concatenate(([True], starts[1:] > ends[:-1]))
    first_indexes = np.flatnonzero(is_start)
    last_indexes = np.concatenate((first_indexes[1:], [len(combined)])) - 1
    return np.stack([starts[first_indexes], ends[last_indexes] - starts[first_indexes]], axis=1)


def split(runs: Runs, max_bytes: int) -> Iterator[Runs]:
    """Yield the runs in groups of ``max_bytes`` bytes; the last may be smaller. Splits runs at the group boundaries."""
    group: list[tuple[int, int]] = []
    remaining = max_bytes
    for start, length in runs.tolist():
        while length:
            size = min(length, remaining)
            group.append((start, size))
            start, length, remaining = start + size, length - size, remaining - size
            if remaining == 0:
                yield np.array(group, dtype=np.uint64)
                group, remaining = [], max_bytes
    if group:
        yield np.array(group, dtype=np.uint64)
