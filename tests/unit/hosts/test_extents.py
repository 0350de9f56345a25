"""A guest can fragment its disk into millions of extents, and the gateway does not keep them in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gateway.errors import Timeout
from sandbox_gateway.hosts.kvm_xfs.files import reflink

BLOCK = 4096
BATCH_COUNT, BATCH_SIZE = 20, 512


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk in which every second block is a hole, and every fourth one is shared."""

    def list_extents(path: Path, descriptor: int, start: int) -> list[tuple[reflink.Extent, bool]]:
        first = -(-start // (2 * BLOCK))
        last = BATCH_COUNT * BATCH_SIZE - 1
        return [
            (reflink.Extent(index * 2 * BLOCK, index * 3 * BLOCK, BLOCK, bool(index % 2)), index == last)
            for index in range(first, first + BATCH_SIZE)
        ]

    monkeypatch.setattr(reflink, "_list_extents", list_extents)
    path = tmp_path / "disk"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (reflink.count_unique_bytes, BATCH_COUNT * BATCH_SIZE // 2 * BLOCK),
        (lambda disk: reflink.have_same_extents(disk, disk, seconds=60), True),
    ],
    ids=["count_unique_bytes", "have_same_extents"],
)
def test_a_fragmented_disk_does_not_fill_the_memory(disk: Path, measure: Callable[[Path], int], expected: int) -> None:
    tracemalloc.start()
    try:
        assert measure(disk) == expected
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_comparison_of_a_fragmented_disk_ends_in_time(disk: Path) -> None:
    with pytest.raises(Timeout, match="too many extents"):
        reflink.have_same_extents(disk, disk, seconds=0)
