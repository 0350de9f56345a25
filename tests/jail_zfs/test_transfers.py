"""Export snapshots of jails to files, and import them, on a real pool."""

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
from tests.support.live import Live, engines
from tests.support.worlds import TEMPLATE

MakeLive = Callable[..., Live]


@pytest.fixture
def make_live(jail_zfs_world: JailZfsWorld) -> Iterator[MakeLive]:
    with engines(jail_zfs_world) as make_live:
        yield make_live


@pytest.fixture
def live(make_live: MakeLive) -> Live:
    return make_live()


def export(live: Live, ref: str) -> bytes:
    async def read() -> bytes:
        export = await live.engine.transfers.export(ref)
        try:
            return b"".join([piece async for piece in export.read_pieces()])
        finally:
            await export.close()

    return live.do(read())


def import_(live: Live, file: bytes, name: str | None = None) -> Snapshot:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 100_000):
            yield file[start : start + 100_000]

    return live.do(live.engine.transfers.import_(pieces(), name=name))


def make_file(live: Live, stream: bytes) -> bytes:
    """Return a snapshot file that the gateway has signed, with ``stream`` as its contents."""
    encoder = Encoder(live.engine.transfers.get_signer())
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
    chunks = []
    for start in range(0, len(stream), CHUNK_BYTES):
        data = stream[start : start + CHUNK_BYTES]
        if data.strip(b"\0"):
            chunks.append(encoder.encode_chunk(compress_chunk(0, start, data)))
    return b"".join([encoder.encode_head(manifest), *chunks, encoder.encode_end()])


def list_objects(live: Live) -> set[str]:
    """Return the names of all datasets and snapshots of the gateway."""
    return {*zfs_core.get_tree(live.config.jail_zfs.dataset, ["createtxg"])}


def test_an_imported_snapshot_is_forked_after_the_original_is_gone(live: Live, make_live: MakeLive) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "head -c 3000000 /dev/urandom >/root/blob && ln -s blob /root/link")
    digest = live.shell("source", "sha256sum /root/link")
    snapshot = live.do(live.engine.snapshots.create("source", name="taken", description="a blob"))
    file = export(live, "taken")
    live.do(live.engine.sandboxes.delete("source"))
    live.do(live.engine.snapshots.delete("taken"))
    before = list_objects(live)
    imported = import_(live, file)
    assert (imported.names, imported.description, imported.resources) == (["taken"], "a blob", snapshot.resources)
    assert imported.imported and imported.imported.snapshot == snapshot.id
    dataset = f"{live.config.jail_zfs.dataset}/retired/{imported.id}"
    assert list_objects(live) - before == {dataset, f"{dataset}@{imported.id}"}
    live.close()
    live = make_live(config=live.config)
    live.do(live.engine.forks.create("taken", ForkSpec(names=["fork"])))
    assert live.shell("fork", "sha256sum /root/link") == digest
    live.do(live.engine.sandboxes.delete("fork"))
    live.do(live.engine.snapshots.delete("taken"))
    assert list_objects(live) == before


def test_a_template_is_imported_as_a_template(live: Live) -> None:
    before = list_objects(live)
    imported = import_(live, export(live, TEMPLATE), name="copy")
    assert imported.kind is SnapshotKind.TEMPLATE
    live.do(live.engine.forks.create("copy", ForkSpec(names=["fork"])))
    assert live.shell("fork", "echo alive").strip() == "alive"
    live.do(live.engine.sandboxes.delete("fork"))
    live.do(live.engine.snapshots.delete("copy"))
    assert list_objects(live) == before


def read_stream(*arguments: str) -> bytes:
    return subprocess.run(["zfs", "send", *arguments], capture_output=True, check=True, timeout=60).stdout


@pytest.fixture
def foreign_streams(live: Live) -> dict[str, bytes]:
    """Streams that are not those of one whole snapshot, by the problem that an error must name."""
    dataset = f"{live.config.jail_zfs.dataset}/foreign"
    zfs_core.lzc_create(dataset)
    for name in ("a", "b"):
        zfs_core.lzc_snapshot([f"{dataset}@{name}"])
    streams = {
        "needs another snapshot": read_stream("-i", f"{dataset}@a", f"{dataset}@b"),
        "is a package of several snapshots": read_stream("-R", f"{dataset}@b"),
        "does not begin like a ZFS stream": b"x" * 5000,
    }
    pools.destroy_all(dataset)
    return streams


def test_foreign_streams_are_refused_and_leave_nothing(live: Live, foreign_streams: dict[str, bytes]) -> None:
    before = list_objects(live)
    for problem, stream in foreign_streams.items():
        with pytest.raises(Invalid, match=problem):
            import_(live, make_file(live, stream))
        assert list_objects(live) == before


def test_a_damaged_stream_is_refused_and_leaves_nothing(live: Live) -> None:
    stream = read_stream(live.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"])
    before = list_objects(live)
    for damaged_stream in (stream[: len(stream) // 2], stream[:5000] + b"x" * 5000 + stream[10000:]):
        with pytest.raises(GatewayError):
            import_(live, make_file(live, damaged_stream))
        assert list_objects(live) == before


def test_an_import_that_fails_at_its_last_step_leaves_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    file = export(live, TEMPLATE)
    before = list_objects(live)

    def fail(source: str, target: str) -> None:
        raise zfs_core.exceptions.ZFSGenericError(5, source, "Cannot rename")

    monkeypatch.setattr(zfs_core, "lzc_rename", fail)
    with pytest.raises(BackendFailed):
        import_(live, file, name="copy")
    assert list_objects(live) == before


def test_an_interrupted_import_is_removed_at_the_next_start(
    live: Live, make_live: MakeLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export(live, TEMPLATE)
    before = list_objects(live)

    def fail(*_: object, **__: object) -> None:
        raise zfs_core.exceptions.ZFSGenericError(5, "", "the process was killed")

    with monkeypatch.context() as patch:
        for name in ("lzc_rename", "lzc_destroy_snaps", "lzc_destroy"):
            patch.setattr(zfs_core, name, fail)
        with pytest.raises(BackendFailed):
            import_(live, file, name="copy")
    assert any("/retired/import-" in name and "@" in name for name in list_objects(live) - before)
    live.close()
    live = make_live(config=live.config)
    assert list_objects(live) == before
    assert [template.name for template in live.engine.templates.list()] == [TEMPLATE]


def test_a_stream_needs_room_in_the_state_directory(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    file = export(live, TEMPLATE)
    before = list_objects(live)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(NoSpace, match=f"not enough space in {live.config.host.state_root} to export the snapshot"):
        export(live, TEMPLATE)
    with pytest.raises(NoSpace, match="to import the snapshot"):
        import_(live, file, name="copy")
    assert list_objects(live) == before
