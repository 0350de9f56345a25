"""Measure the export of a snapshot to a file, and the import of that file, compared with the zstd command."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.context import Context, KvmXfs
from benchmarks.measure import Result, Target
from sandbox_gateway.hosts.kvm_xfs.files.reflink import list_data_ranges
from sandbox_gateway.records import Snapshot

_MAX_RATIO = 1 / 0.7
"""At least 0.7 times the throughput of zstd."""
_TIMEOUT_SECONDS = 600
_READ_BYTES = 1 << 20


class Transfer:
    name = "transfer"
    title = "a snapshot in a file"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=10, quick=1)
        result = Result(self.name, self.title, {"rounds": rounds})
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        directory = host.mount_point / "transfer"
        directory.mkdir()
        with host.temporary_snapshot() as snapshot, ctx.showing_progress("transfers", rounds) as steps:
            for _ in range(rounds):
                _measure(host, snapshot, directory, samples)
                steps.advance()
        title = "`zstd -3 -T0` of the same extents, to a file"
        result.add_measure("data", "data in the snapshot's files", "bytes", samples=samples["data"])
        result.add_measure("zstd", f"floor: {title}", samples=samples["zstd"])
        target = Target("ratio", _MAX_RATIO)
        result.add_measure("export", "export to a file", samples=samples["export"], floor="zstd", target=target)
        result.add_measure("unzstd", "floor: `zstd -d` of that file, to a file", samples=samples["unzstd"])
        result.add_measure("import", "import of the exported file", samples=samples["import"], floor="unzstd")
        result.add_measure(
            "zstd_bytes", f"floor: the size of the file: {title}", "bytes", samples=samples["zstd_bytes"]
        )
        result.add_measure(
            "export_bytes", "size of an export", "bytes", samples=samples["export_bytes"], floor="zstd_bytes"
        )
        return result


def _measure(host: KvmXfs, snapshot: Snapshot, directory: Path, samples: dict[str, list[float]]) -> None:
    compressed, exported, restored = directory / "zst", directory / "export", directory / "restored"
    samples["data"].append(_drop_caches_and_count_bytes(host, snapshot))
    samples["zstd"].append(_time_zstd(_list_image_paths(host, snapshot), compressed))
    samples["zstd_bytes"].append(compressed.stat().st_size)
    _drop_caches_and_count_bytes(host, snapshot)
    start = time.perf_counter()
    host.live.do(_export_snapshot(host, snapshot, exported), timeout=_TIMEOUT_SECONDS)
    samples["export"].append((time.perf_counter() - start) * 1000)
    samples["export_bytes"].append(exported.stat().st_size)
    start = time.perf_counter()
    subprocess.run(["zstd", "-q", "-d", compressed, "-o", restored], check=True, timeout=_TIMEOUT_SECONDS)
    samples["unzstd"].append((time.perf_counter() - start) * 1000)
    start = time.perf_counter()
    imported = host.live.do(host.live.engine.transfers.import_(_read_pieces(exported)), timeout=_TIMEOUT_SECONDS)
    samples["import"].append((time.perf_counter() - start) * 1000)
    host.delete_snapshot(imported)
    for path in (compressed, exported, restored):
        path.unlink()


def _list_image_paths(host: KvmXfs, snapshot: Snapshot) -> list[Path]:
    directory = host.config.host.state_root / "snapshots" / snapshot.id
    return [directory / name for name in ("rootfs.img", "memory.img", "device.state")]


def _drop_caches_and_count_bytes(host: KvmXfs, snapshot: Snapshot) -> int:
    """Drop the files from the page cache, so that both sides read them from the disk, and return their data's size."""
    size = 0
    for path in _list_image_paths(host, snapshot):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += sum(end - start for start, end in list_data_ranges(file.fileno()))
    return size


def _time_zstd(paths: list[Path], target: Path) -> float:
    """Compress the extents of the files into ``target``. Returns the time in ms."""
    start_time = time.perf_counter()
    with subprocess.Popen(["zstd", "-q", "-3", "-T0", "-o", target], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        pipe = process.stdin.fileno()
        for path in paths:
            with path.open("rb") as file:
                for start, end in list_data_ranges(file.fileno()):
                    while start < end:
                        start += os.sendfile(pipe, file.fileno(), start, end - start)
        process.stdin.close()
        if process.wait(_TIMEOUT_SECONDS) != 0:
            raise RuntimeError("zstd failed")
    return (time.perf_counter() - start_time) * 1000


async def _export_snapshot(host: KvmXfs, snapshot: Snapshot, target: Path) -> None:
    export = await host.live.engine.transfers.export(snapshot.id)
    try:
        with target.open("wb", buffering=0) as file:
            async for piece in export.read_pieces():
                file.write(piece)
    finally:
        await export.close()


async def _read_pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece
