"""Create, export and import files with snapshots of jails, on a gateway inside the test's process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import zfs_core

from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, Decoder, Encoder, compress_chunk
from sandbox_gateway.engine.transfer.interrupted import Continuation
from sandbox_gateway.engine.transfer.manifest import Base, Manifest, Part, Sizes
from sandbox_gateway.hosts.base import SnapshotPart, StreamEncoding
from sandbox_gateway.records import Snapshot
from tests.support.live import EngineRunner


def export_snapshot(runner: EngineRunner, ref: str, resume_token: str = "", since: str = "") -> bytes:
    async def read() -> bytes:
        export = await runner.engine.transfers.export(ref, since=since, resume_token=resume_token)
        try:
            return b"".join([piece async for piece in export.read_pieces()])
        finally:
            await export.close()

    return runner.do(read())


def import_snapshot(
    runner: EngineRunner,
    file: bytes,
    name: str | None = None,
    *,
    lost: bool = False,
    continuation: Continuation | None = None,
    trust: Sequence[str] = (),
) -> Snapshot:
    """Import a file. ``lost``: the connection is lost at its end."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 100_000):
            yield file[start : start + 100_000]
        if lost:
            raise ConnectionResetError

    return runner.do(runner.engine.transfers.import_(pieces(), name=name, continuation=continuation, trust=trust))


def make_file(
    runner: EngineRunner,
    stream: bytes,
    encoding: StreamEncoding = StreamEncoding.PLAIN,
    snapshot_id: str = "0123456789ab",
    base: Base | None = None,
    kind: Literal["snapshot", "template"] = "snapshot",
) -> bytes:
    """Return a snapshot file that the gateway has signed, with ``stream`` as its contents.

    ``base``: the snapshot that the manifest says the stream needs.
    """
    encoder = Encoder(runner.engine.transfers.get_signer())
    manifest = Manifest(
        snapshot_id=snapshot_id,
        kind=kind,
        names=["made"],
        description="",
        release="1",
        host_kind="jail_zfs",
        architecture=os.uname().machine,
        sizes=Sizes(cpus=1, memory_mb=256, disk_mb=1024),
        platform=None,
        line=False,
        encoding=encoding,
        base=base,
        parts=[Part(name=SnapshotPart.STREAM, size=len(stream), data_bytes=len(stream))],
    )
    records = [encoder.encode_head(manifest)]
    for start in range(0, len(stream), CHUNK_BYTES):
        data = stream[start : start + CHUNK_BYTES]
        if data.strip(b"\0"):
            records.append(encoder.encode_chunk(compress_chunk(0, start, data)))
    return b"".join([*records, encoder.encode_end()])


def list_objects(runner: EngineRunner) -> set[str]:
    """Return the names of all datasets and snapshots of the gateway."""
    return {*zfs_core.get_tree(runner.config.jail_zfs.dataset, ["createtxg"])}


def read_manifest(file: bytes) -> Manifest:
    decoder = Decoder()
    decoder.feed(file[:CHUNK_BYTES])
    manifest = decoder.read_manifest()
    assert isinstance(manifest, Manifest)
    return manifest


def list_partial_datasets(runner: EngineRunner) -> list[str]:
    return [name for name in list_objects(runner) if "/retired/import-" in name]


def read_stream(*arguments: str) -> bytes:
    return subprocess.run(["zfs", "send", *arguments], capture_output=True, check=True, timeout=60).stdout
