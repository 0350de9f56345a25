"""Test exporting snapshots of volumes to files and importing them as volumes, with real file systems."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, Decoder, Encoder, compress_chunk
from sandbox_gateway.engine.transfer.manifest import VolumeManifest
from sandbox_gateway.errors import GatewayError, Invalid, NameTaken
from sandbox_gateway.records import Volume
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, World


def export_volume(runner: EngineRunner, volume: str, snapshot: str) -> bytes:
    async def read() -> bytes:
        export = await runner.engine.transfers.export_volume(volume, snapshot)
        try:
            return b"".join([piece async for piece in export.read_pieces()])
        finally:
            await export.close()

    return runner.do(read())


def import_volume(runner: EngineRunner, file: bytes, name: str | None = None) -> Volume:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 100_000):
            yield file[start : start + 100_000]

    return runner.do(runner.engine.transfers.import_volume(pieces(), name=name))


def mount(runner: EngineRunner, name: str, volume: str) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=[name], mounts=[MountSpec(volume, "/data")])))


def fill_volume(runner: EngineRunner) -> str:
    """Create the volume `data` with files in it, and its snapshot `monday`. Return a description of the files."""
    runner.do(runner.engine.volumes.create("data", 64))
    mount(runner, "writer", "data")
    runner.shell("writer", "cd /data && head -c 3000000 /dev/urandom >blob && ln -s blob link && mkdir -m 750 inner")
    runner.shell("writer", "cd /data && echo secret >inner/file && chmod 600 inner/file && sync")
    description = describe_files(runner, "writer")
    runner.do(runner.engine.volumes.create_snapshot("data", "monday"))
    runner.shell("writer", "echo later >/data/later && rm /data/blob && sync")
    return description


def describe_files(runner: EngineRunner, sandbox: str) -> str:
    return runner.shell(sandbox, "cd /data && find . -printf '%p %m %y %l\\n' | sort && sha256sum blob inner/file")


def measure_volume(runner: EngineRunner, sandbox: str) -> int:
    """Return the size of the volume's file system in MiB, as a program in the sandbox sees it."""
    return int(runner.shell(sandbox, "df -m --output=size /data").split()[-1])


def test_an_imported_volume_has_the_files_of_the_snapshot_and_is_independent(
    make_runner: Callable[..., EngineRunner],
) -> None:
    runner = make_runner()
    description = fill_volume(runner)
    snapshot = runner.engine.volumes.list_snapshots("data")[0]
    file = export_volume(runner, "data", "monday")
    with pytest.raises(NameTaken):
        import_volume(runner, file)
    runner.do(runner.engine.sandboxes.delete("writer"))
    runner.do(runner.engine.volumes.delete("data", with_snapshots=True))
    volume = import_volume(runner, file)
    assert (volume.name, volume.size_mb, volume.from_snapshot) == ("data", 64, "")
    assert volume.imported and volume.imported.snapshot == snapshot.id
    assert import_volume(runner, file, "other").id != volume.id
    mount(runner, "reader", "data")
    assert describe_files(runner, "reader") == description
    runner.do(runner.engine.volumes.grow("data", 128))
    assert measure_volume(runner, "reader") > 64
    runner.do(runner.engine.sandboxes.delete("reader"))
    runner.close()
    runner = make_runner(config=runner.config)
    found = runner.engine.volumes.get("data")
    assert (found.id, found.size_mb, found.imported) == (volume.id, 128, volume.imported)
    mount(runner, "again", "data")
    runner.do(runner.engine.volumes.create_snapshot("data", "tuesday"))
    assert measure_volume(runner, "again") > 64 and describe_files(runner, "again") == description
    runner.shell("again", "rm /data/link && sync")
    mount(runner, "second", "other")
    assert describe_files(runner, "second") == description, "the volumes do not share files"


def replace_contents(runner: EngineRunner, file: bytes, change: Callable[[bytearray], None]) -> bytes:
    """Return a file, signed by the gateway, whose first chunk was changed."""
    decoder = Decoder()
    decoder.feed(file)
    manifest = decoder.read_manifest()
    assert isinstance(manifest, VolumeManifest)
    encoder = Encoder(runner.engine.transfers.get_signer())
    records = [encoder.encode_head(manifest)]
    for number, chunk in enumerate(decoder.read_chunks()):
        data = bytearray(chunk.data)
        if not number:
            change(data)
        records.append(encoder.encode_chunk(compress_chunk(0, chunk.offset, bytes(data))))
    return b"".join([*records, encoder.encode_end()])


def overwrite(start: int, value: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[start : start + len(value)] = value

    return change


SUPERBLOCK = 1024
DAMAGES = {
    "no file system": overwrite(0, b"x" * 8192),
    "block descriptors": overwrite(4096, b"\xff" * 4096),
    "foreign journal": overwrite(SUPERBLOCK + 0xD0, b"j" * 16),
    "journal on a disk": overwrite(SUPERBLOCK + 0xE4, b"\x08\x01\0\0"),
}


def test_contents_that_the_host_cannot_use_are_refused_and_leave_nothing_behind(
    runner: EngineRunner, world: World
) -> None:
    runner.do(runner.engine.volumes.create("data", 64))
    runner.do(runner.engine.volumes.create_snapshot("data", "monday"))
    file = export_volume(runner, "data", "monday")
    traces = world.read_traces(runner.config)
    damages = DAMAGES if world.kind == "kvm_xfs" else {"no stream": overwrite(0, b"x" * 100)}
    for name, change in damages.items():
        with pytest.raises(Invalid, match="snapshot file"):
            import_volume(runner, replace_contents(runner, file, change), name="damaged")
        assert world.read_traces(runner.config) == traces, name
    for damaged_file in (file[:-1], file[: len(file) // 2], file[:-200] + b"x" + file[-199:]):
        with pytest.raises(GatewayError):
            import_volume(runner, damaged_file, name="damaged")
        assert world.read_traces(runner.config) == traces
    assert [volume.name for volume in runner.engine.volumes.list()] == ["data"]
    import_volume(runner, file, name="whole")


def test_a_snapshot_can_be_removed_while_it_is_exported(runner: EngineRunner) -> None:
    fill_volume(runner)

    async def export_removed_snapshot() -> bytes:
        export = await runner.engine.transfers.export_volume("data", "monday")
        try:
            await runner.engine.volumes.delete_snapshot("data", "monday")
            return b"".join([piece async for piece in export.read_pieces()])
        finally:
            await export.close()

    file = runner.do(export_removed_snapshot())
    assert len(file) > 3 * CHUNK_BYTES // 2
    import_volume(runner, file, name="copy")


def test_a_cancelled_import_is_kept_until_it_is_discarded(runner: EngineRunner, world: World) -> None:
    fill_volume(runner)
    file = export_volume(runner, "data", "monday")
    traces = world.read_traces(runner.config)

    async def cancel_import() -> None:
        has_begun = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield file[: len(file) // 2]
            has_begun.set()
            await asyncio.sleep(3600)

        task = asyncio.create_task(runner.engine.transfers.import_volume(pieces(), name="copy"))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    imports = runner.engine.transfers.interrupted_imports
    runner.do(cancel_import())
    (kept,) = imports.list()
    runner.do(imports.discard(kept.id))
    assert world.read_traces(runner.config) == traces
    import_volume(runner, file, name="copy")
