"""Test exporting snapshots of jails to files, and importing them, on a real pool."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace

import pytest
import zfs_core

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, Encoder, compress_chunk
from sandbox_gateway.engine.transfer.manifest import Manifest, Part, Sizes
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid, NoSpace
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.records import Snapshot, SnapshotKind
from tests.jail_zfs import pools
from tests.support.jail_world import JailZfsWorld
from tests.support.live import EngineRunner, engines
from tests.support.worlds import TEMPLATE

MakeRunner = Callable[..., EngineRunner]


@pytest.fixture
def make_runner(jail_zfs_world: JailZfsWorld) -> Iterator[MakeRunner]:
    with engines(jail_zfs_world) as make_runner:
        yield make_runner


@pytest.fixture
def runner(make_runner: MakeRunner) -> EngineRunner:
    return make_runner()


def export_snapshot(runner: EngineRunner, ref: str) -> bytes:
    async def read() -> bytes:
        export = await runner.engine.transfers.export(ref)
        try:
            return b"".join([piece async for piece in export.read_pieces()])
        finally:
            await export.close()

    return runner.do(read())


def import_snapshot(runner: EngineRunner, file: bytes, name: str | None = None) -> Snapshot:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 100_000):
            yield file[start : start + 100_000]

    return runner.do(runner.engine.transfers.import_(pieces(), name=name))


def make_file(runner: EngineRunner, stream: bytes) -> bytes:
    """Return a snapshot file that the gateway has signed, with ``stream`` as its contents."""
    encoder = Encoder(runner.engine.transfers.get_signer())
    manifest = Manifest(
        snapshot_id="0123456789ab",
        kind="snapshot",
        names=["made"],
        description="",
        release="1",
        host_kind="jail_zfs",
        architecture=os.uname().machine,
        sizes=Sizes(cpus=1, memory_mb=256, disk_mb=1024),
        platform=None,
        line=False,
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


def test_an_imported_snapshot_is_forked_after_the_original_is_gone(
    runner: EngineRunner, make_runner: MakeRunner
) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "head -c 3000000 /dev/urandom >/root/blob && ln -s blob /root/link")
    digest = runner.shell("source", "sha256sum /root/link")
    snapshot = runner.do(runner.engine.snapshots.create("source", name="taken", description="a blob"))
    file = export_snapshot(runner, "taken")
    runner.do(runner.engine.sandboxes.delete("source"))
    runner.do(runner.engine.snapshots.delete("taken"))
    before = list_objects(runner)
    imported = import_snapshot(runner, file)
    assert (imported.names, imported.description, imported.resources) == (["taken"], "a blob", snapshot.resources)
    assert imported.imported and imported.imported.snapshot == snapshot.id
    dataset = f"{runner.config.jail_zfs.dataset}/retired/{imported.id}"
    assert list_objects(runner) - before == {dataset, f"{dataset}@{imported.id}"}
    runner.close()
    runner = make_runner(config=runner.config)
    runner.do(runner.engine.forks.create("taken", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "sha256sum /root/link") == digest
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.do(runner.engine.snapshots.delete("taken"))
    assert list_objects(runner) == before


def test_a_template_is_imported_as_a_template(runner: EngineRunner) -> None:
    before = list_objects(runner)
    imported = import_snapshot(runner, export_snapshot(runner, TEMPLATE), name="copy")
    assert imported.kind is SnapshotKind.TEMPLATE
    runner.do(runner.engine.forks.create("copy", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "echo alive").strip() == "alive"
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.do(runner.engine.snapshots.delete("copy"))
    assert list_objects(runner) == before


def read_stream(*arguments: str) -> bytes:
    return subprocess.run(["zfs", "send", *arguments], capture_output=True, check=True, timeout=60).stdout


@pytest.fixture
def foreign_streams(runner: EngineRunner) -> dict[str, bytes]:
    """Streams that do not contain exactly one complete snapshot, by the problem that the error must name."""
    dataset = f"{runner.config.jail_zfs.dataset}/foreign"
    zfs_core.lzc_create(dataset)
    for name in ("a", "b"):
        zfs_core.lzc_snapshot([f"{dataset}@{name}"])
    streams = {
        "needs another snapshot": read_stream("-i", f"{dataset}@a", f"{dataset}@b"),
        "is a package of several snapshots": read_stream("-R", f"{dataset}@b"),
        "does not begin with the header of a ZFS stream": b"x" * 5000,
    }
    pools.destroy_all(dataset)
    return streams


def test_foreign_streams_are_refused_and_leave_nothing_behind(
    runner: EngineRunner, foreign_streams: dict[str, bytes]
) -> None:
    before = list_objects(runner)
    for problem, stream in foreign_streams.items():
        with pytest.raises(Invalid, match=problem):
            import_snapshot(runner, make_file(runner, stream))
        assert list_objects(runner) == before


def test_a_damaged_stream_is_refused_and_leaves_nothing_behind(runner: EngineRunner) -> None:
    stream = read_stream(runner.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"])
    before = list_objects(runner)
    for damaged_stream in (stream[: len(stream) // 2], stream[:5000] + b"x" * 5000 + stream[10000:]):
        with pytest.raises(GatewayError):
            import_snapshot(runner, make_file(runner, damaged_stream))
        assert list_objects(runner) == before


def test_an_import_that_fails_at_its_last_step_leaves_nothing_behind(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_snapshot(runner, TEMPLATE)
    before = list_objects(runner)

    def fail(source: str, target: str) -> None:
        raise zfs_core.exceptions.ZFSGenericError(5, source, "Cannot rename")

    monkeypatch.setattr(zfs_core, "lzc_rename", fail)
    with pytest.raises(BackendFailed):
        import_snapshot(runner, file, name="copy")
    assert list_objects(runner) == before


def test_an_interrupted_import_is_removed_at_the_next_start(
    runner: EngineRunner, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_snapshot(runner, TEMPLATE)
    before = list_objects(runner)

    def fail(*_: object, **__: object) -> None:
        raise zfs_core.exceptions.ZFSGenericError(5, "", "the process was killed")

    with monkeypatch.context() as patch:
        for name in ("lzc_rename", "lzc_destroy_snaps", "lzc_destroy"):
            patch.setattr(zfs_core, name, fail)
        with pytest.raises(BackendFailed):
            import_snapshot(runner, file, name="copy")
    assert any("/retired/import-" in name and "@" in name for name in list_objects(runner) - before)
    runner.close()
    runner = make_runner(config=runner.config)
    assert list_objects(runner) == before
    assert [template.names for template in runner.engine.templates.list()] == [[TEMPLATE]]


def test_a_stream_needs_room_in_the_state_directory(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    file = export_snapshot(runner, TEMPLATE)
    before = list_objects(runner)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(NoSpace, match=f"not enough space in {runner.config.host.state_root} to export the snapshot"):
        export_snapshot(runner, TEMPLATE)
    with pytest.raises(NoSpace, match="to import the snapshot"):
        import_snapshot(runner, file, name="copy")
    assert list_objects(runner) == before
