"""A guest can fragment its disk into millions of extents, and the gateway does not keep them in memory."""

from __future__ import annotations

import asyncio
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.errors import Timeout
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import Sandbox, Snapshot

BLOCK = 4096
BATCH_COUNT, BATCH_SIZE = 20, 512


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk in which every second block is a hole, and every fourth one is shared."""

    def read_batch(path: Path, descriptor: int, start: int) -> npt.NDArray[np.void]:
        first = -(-start // (2 * BLOCK))
        indexes = np.arange(first, first + BATCH_SIZE, dtype=np.uint64)
        batch = np.zeros(BATCH_SIZE, reflink._FIEMAP_EXTENT)
        batch["logical"], batch["physical"], batch["length"] = indexes * 2 * BLOCK, indexes * 3 * BLOCK, BLOCK
        batch["flags"] = np.where(indexes % 2, reflink._FIEMAP_EXTENT_SHARED, 0)
        if first + BATCH_SIZE == BATCH_COUNT * BATCH_SIZE:
            batch["flags"][-1] |= reflink._FIEMAP_EXTENT_LAST
        return batch

    monkeypatch.setattr(reflink, "_read_batch", read_batch)
    path = tmp_path / "disk"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (reflink.count_unique_bytes, BATCH_COUNT * BATCH_SIZE // 2 * BLOCK),
        (lambda disk: reflink.have_same_extents(disk, disk), True),
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


@pytest.mark.parametrize(
    "measure",
    [
        lambda disk: reflink.count_unique_bytes(disk, seconds=0),
        lambda disk: reflink.have_same_extents(disk, disk, seconds=0),
    ],
    ids=["count_unique_bytes", "have_same_extents"],
)
def test_a_walk_of_a_fragmented_disk_ends_in_time(disk: Path, measure: Callable[[Path], int]) -> None:
    with pytest.raises(Timeout, match="too many extents"):
        measure(disk)


@pytest.mark.parametrize(
    "measure",
    [reflink.count_unique_bytes, lambda disk: reflink.have_same_extents(disk, disk)],
    ids=["count_unique_bytes", "have_same_extents"],
)
def test_a_walk_does_not_run_python_code_for_each_extent(disk: Path, measure: Callable[[Path], int]) -> None:
    """Otherwise, a few walks of fragmented disks would keep the event loop from running."""
    line_count = 0

    def count_lines(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line_count
        if frame.f_code.co_filename != reflink.__file__:
            return None
        line_count += event == "line"
        return count_lines

    sys.settrace(count_lines)
    try:
        measure(disk)
    finally:
        sys.settrace(None)
    assert 0 < line_count < BATCH_COUNT * BATCH_SIZE / 4


def test_files_are_compared_extent_by_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of the files end at different extents, and sharing has split some of them."""
    rows = [(0, 100, 10), (10, 110, 5), (20, 300, 10), (30, 400, 10), (40, 410, 10)]
    split_rows = [(0, 100, 10), (10, 110, 2), (12, 112, 3), (20, 300, 10), (30, 400, 20)]
    changed_rows = [*split_rows[:4], (30, 500, 20)]

    def list_batches(rows: list[tuple[int, int, int]], size: int) -> list[npt.NDArray[np.void]]:
        batches = [
            np.zeros(len(rows[index : index + size]), reflink._FIEMAP_EXTENT) for index in range(0, len(rows), size)
        ]
        for number, row in enumerate(rows):
            entry = batches[number // size]
            entry["logical"][number % size], entry["physical"][number % size], entry["length"][number % size] = row
        return batches

    files = {"a": list_batches(rows, 2), "b": list_batches(split_rows, 3), "c": list_batches(changed_rows, 5)}
    files["shorter"] = list_batches(rows[:3], 2)
    monkeypatch.setattr(reflink, "_walk_batches", lambda path, _: iter(files[path.name]))
    results = {(one, other): reflink.have_same_extents(Path(one), Path(other)) for one in files for other in files}
    equal_pairs = {pair for pair, are_equal in results.items() if are_equal}
    assert equal_pairs == {(name, name) for name in files} | {("a", "b"), ("b", "a")}


@pytest.mark.parametrize("query", ["has_diverged", "measure_usage"])
async def test_a_virtual_machine_has_one_query_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    host = KvmXfsHost(Config.model_validate({"host": {"state_root": str(tmp_path)}}))
    may_end = threading.Event()
    running: list[float] = []

    def walk(*arguments: Any) -> bool:
        running.append(arguments[-1])
        assert may_end.wait(60)
        return True

    monkeypatch.setattr(reflink, "have_same_extents", walk)
    monkeypatch.setattr(reflink, "count_unique_bytes", walk)
    monkeypatch.setattr(Snapshots, "files", lambda *_: SimpleNamespace(disk=tmp_path))
    sandbox = Sandbox(name="a")
    args = (sandbox, Snapshot()) if query == "has_diverged" else (sandbox,)
    call = partial(getattr(host, query), *args)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call(), 0.1)
        assert running == [2.0], "the host limits the time of the walk"
    finally:
        may_end.set()
