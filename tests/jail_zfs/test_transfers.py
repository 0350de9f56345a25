"""Test exporting snapshots of jails to files, and importing them, on a real pool."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zfs_core
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer import interrupted
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES, MAGIC, compress_chunk
from sandbox_gateway.engine.transfer.interrupted import Continuation
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid, NameTaken, NoSpace, NotFound, Unsupported
from sandbox_gateway.hosts.base import StreamEncoding
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Snapshot, SnapshotKind
from tests.jail_zfs.snapshot_files import (
    export_snapshot,
    import_snapshot,
    list_objects,
    list_partial_datasets,
    make_file,
    read_manifest,
    read_stream,
)
from tests.support import pools
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE

MakeRunner = Callable[..., EngineRunner]


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


needs_openzfs = pytest.mark.skipif(not pools.IS_OPENZFS, reason="zfs-fuse can neither resume nor compress streams")


def test_a_file_states_how_its_stream_is_encoded(runner: EngineRunner) -> None:
    file = export_snapshot(runner, TEMPLATE)
    version = file[len(MAGIC) : len(MAGIC) + 2]
    if zfs_core.detect_capabilities().send_options:
        assert (read_manifest(file).encoding, version) == (StreamEncoding.COMPRESSED, b"\0\2")
    else:
        assert (read_manifest(file).encoding, version) == (StreamEncoding.PLAIN, b"\0\1")
        assert b'"encoding"' not in file[: len(MAGIC) + 8000], "older releases refuse unknown fields"


@pytest.mark.parametrize("encoding", [StreamEncoding.COMPRESSED, StreamEncoding.RAW])
def test_a_host_with_zfs_fuse_refuses_encoded_streams_before_it_writes(
    runner: EngineRunner, encoding: StreamEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zfs_core, "detect_capabilities", lambda: ZFS_FUSE_CAPABILITIES)
    before = list_objects(runner)
    monkeypatch.setattr(zfs_core, "lzc_receive", None)
    monkeypatch.setattr(zfs_core, "lzc_receive_resumable", None)
    with pytest.raises(Unsupported, match=rf"is {encoding}, but this host has zfs-fuse"):
        import_snapshot(runner, make_file(runner, b"x" * 5000, encoding))
    assert list_objects(runner) == before


@pytest.fixture
def cut_import(runner: EngineRunner) -> bytes:
    """Interrupt the import of a snapshot of the sandbox ``source``. Returns the whole file."""
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "head -c 9000000 /dev/urandom >/root/blob")
    runner.do(runner.engine.snapshots.create("source", name="taken"))
    file = export_snapshot(runner, "taken")
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, file[: len(file) // 2], "copy", lost=True)
    return file


def test_an_interrupted_import_on_zfs_fuse_continues_with_the_rest_of_the_file(
    runner: EngineRunner, cut_import: bytes
) -> None:
    if zfs_core.detect_capabilities().receive_options:
        pytest.skip("OpenZFS keeps what has arrived")
    (partial_import,) = runner.engine.transfers.interrupted_imports.list()
    assert not list_partial_datasets(runner) and partial_import.file is not None
    size = partial_import.file.size
    assert len(cut_import) // 2 - 2 * CHUNK_BYTES < size <= len(cut_import) // 2
    imported = import_snapshot(runner, cut_import[size:], "copy", continuation=Continuation(partial_import.id, size))
    assert imported.id == partial_import.id and not runner.engine.transfers.interrupted_imports.list()
    runner.do(runner.engine.forks.create("copy", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "sha256sum /root/blob") == runner.shell("source", "sha256sum /root/blob")
    with pytest.raises(Unsupported, match="zfs-fuse cannot send the rest of a stream"):
        export_snapshot(runner, "taken", "1-2-3-4")


@needs_openzfs
def test_an_interrupted_import_continues_where_it_ended(
    runner: EngineRunner, make_runner: MakeRunner, cut_import: bytes
) -> None:
    (first,) = runner.engine.transfers.interrupted_imports.list()
    assert [name.rpartition("-")[2] for name in list_partial_datasets(runner)] == [first.id]
    with pytest.raises(NotFound):
        runner.engine.snapshots.get("copy")
    rest = export_snapshot(runner, "taken", first.resume_token)
    assert len(rest) < 0.8 * len(cut_import)
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, rest[: len(rest) // 2], "copy", lost=True)
    (second,) = runner.engine.transfers.interrupted_imports.list()
    assert second.id == first.id and second.resume_token != first.resume_token
    # The first token no longer fits. What has arrived stays.
    last = export_snapshot(runner, "taken", second.resume_token)
    assert len(last) < 0.8 * len(rest)
    imported = import_snapshot(runner, last, "copy")
    assert (imported.id, imported.names) == (first.id, ["copy"])
    assert not runner.engine.transfers.interrupted_imports.list() and not list_partial_datasets(runner)
    digest = runner.shell("source", "sha256sum /root/blob")
    runner.close()
    runner = make_runner(config=runner.config)
    runner.do(runner.engine.forks.create("copy", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "sha256sum /root/blob") == digest


@needs_openzfs
def test_a_rest_that_does_not_fit_is_refused(runner: EngineRunner, cut_import: bytes) -> None:
    imports = runner.engine.transfers.interrupted_imports
    (first,) = imports.list()
    rest = export_snapshot(runner, "taken", first.resume_token)
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, rest[: len(rest) // 2], "copy", lost=True)
    (second,) = imports.list()
    with pytest.raises(NameTaken):
        import_snapshot(runner, rest)
    with pytest.raises(GatewayError, match="ZFS"):
        import_snapshot(runner, rest, "copy")
    (third,) = imports.list()
    assert (third.id, third.resume_token) == (second.id, second.resume_token), "what had arrived was lost"
    imported = import_snapshot(runner, export_snapshot(runner, "taken", third.resume_token), "copy")
    assert imported.id == first.id and not imports.list()
    with pytest.raises(NotFound, match="of which this gateway has nothing"):
        import_snapshot(runner, rest, "other")
    for token in ("nonsense", "1-0-0-00", first.resume_token[:-8], "1-0-1000-" + "00" * 50):
        with pytest.raises(Invalid, match="resume token is invalid"):
            export_snapshot(runner, "taken", token)
    with pytest.raises(Invalid, match="belongs to another snapshot"):
        export_snapshot(runner, TEMPLATE, first.resume_token)


@needs_openzfs
def test_a_whole_file_replaces_an_interrupted_import(runner: EngineRunner, cut_import: bytes) -> None:
    imported = import_snapshot(runner, cut_import, "copy")
    assert imported.names == ["copy"]
    assert not runner.engine.transfers.interrupted_imports.list() and not list_partial_datasets(runner)


@needs_openzfs
def test_an_interrupted_import_can_be_discarded(runner: EngineRunner, cut_import: bytes) -> None:
    imports = runner.engine.transfers.interrupted_imports
    (first,) = imports.list()
    runner.do(imports.discard(first.id))
    assert not imports.list() and not list_partial_datasets(runner)
    with pytest.raises(NotFound):
        runner.do(imports.discard(first.id))


@needs_openzfs
def test_an_interrupted_import_is_removed_later(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted, "KEPT_SECONDS", 0.5)
    file = export_snapshot(runner, TEMPLATE)
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, file[: len(file) // 2], "copy", lost=True)
    wait_until(lambda: not list_partial_datasets(runner), 30)
    assert not runner.engine.transfers.interrupted_imports.list()


@needs_openzfs
def test_only_the_newest_interrupted_imports_are_kept(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted, "_MAX_IMPORTS", 2)
    stream = read_stream("-c", runner.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"])
    for number in range(3):
        file = make_file(runner, stream, StreamEncoding.COMPRESSED, snapshot_id=f"{number:012}")
        with pytest.raises(ConnectionResetError):
            import_snapshot(runner, file[: len(file) // 2], f"copy{number}", lost=True)
    kept_imports = runner.engine.transfers.interrupted_imports.list()
    assert [each.snapshot for each in kept_imports] == [f"{number:012}" for number in (1, 2)]
    assert len(list_partial_datasets(runner)) == 2


@needs_openzfs
def test_an_interrupted_import_is_swept_at_the_next_start(
    runner: EngineRunner, make_runner: MakeRunner, cut_import: bytes
) -> None:
    assert list_partial_datasets(runner)
    runner.close()
    runner = make_runner(config=runner.config)
    assert not list_partial_datasets(runner)


_KILLED_IMPORT = """
import os, signal, sys
from pathlib import Path
import zfs_core
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.transfer import ReceivingTarget
from sandbox_gateway.records import Snapshot, SnapshotKind

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

root, state_root, step = sys.argv[1:]
storage = ZfsStorage(root, state_root=Path(state_root))
storage.open()
storage.scan()
stream = Path(state_root, "stream").read_bytes()
record = Snapshot(kind=SnapshotKind.TEMPLATE, id="ba9876543210")
target = ReceivingTarget(storage.streams, record, len(stream), on_commit=die)
target.write(SnapshotPart.STREAM, 0, stream[: len(stream) // 2])
if step == "half":
    die()
target.write(SnapshotPart.STREAM, len(stream) // 2, stream[len(stream) // 2 :])
target._pipe.close()
if step == "received":
    die()
setattr(zfs_core, step, die)
target._finish()
"""


@needs_openzfs
@pytest.mark.parametrize("step", ["half", "received", "lzc_set_prop", "lzc_rename"])
def test_an_import_whose_gateway_is_killed_is_swept_at_the_next_start(root: str, tmp_path: Path, step: str) -> None:
    storage = ZfsStorage(root, state_root=tmp_path)
    storage.open()
    storage.scan()
    original = Snapshot(kind=SnapshotKind.TEMPLATE, id="0123456789ab")
    storage.snapshots.create_base(original, lambda directory: (directory / "file").write_bytes(os.urandom(4 << 20)))
    with (tmp_path / "stream").open("wb") as file:
        storage.streams.send(original.id, file.fileno())
    storage.close()
    before = {*zfs_core.get_tree(root, ["type"])}
    killed = subprocess.run([sys.executable, "-c", _KILLED_IMPORT, root, str(tmp_path), step], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert {*zfs_core.get_tree(root, ["type"])} > before, "the import has not begun"
    # The new gateway waits until `zfs receive` has noticed that the old one is gone.
    storage.open()
    assert any("its import was interrupted" in note for note in storage.scan().repaired)
    assert {*zfs_core.get_tree(root, ["type"])} == before
    storage.close()


@needs_openzfs
def test_no_unsigned_piece_reaches_zfs(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed chunk is refused even if its digest was changed accordingly, and nothing is kept."""
    stream = read_stream("-c", runner.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"])
    file = make_file(runner, stream, StreamEncoding.COMPRESSED)
    compressed = compress_chunk(0, 0, stream[:CHUNK_BYTES])
    start = file.index(compressed[:45])
    forged = compress_chunk(0, 0, stream[:4096] + b"x" * 4096 + stream[8192:CHUNK_BYTES])
    signature = file[start + 45 : start + 45 + 64]
    record = forged[:45] + signature + forged[45:]
    changed = file[: start - 5] + b"C" + len(record).to_bytes(4, "big") + record
    calls: list[object] = []
    monkeypatch.setattr(zfs_core, "lzc_receive_resumable", lambda *args, **_: calls.append(args))
    with pytest.raises(Invalid, match="the signature of a chunk does not match"):
        import_snapshot(runner, changed)
    assert not calls and not list_partial_datasets(runner)


@needs_openzfs
def test_an_encrypted_snapshot_is_sent_raw(root: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    encryption = ["-o", "encryption=on", "-o", "keyformat=raw", "-o", f"keylocation=file://{key_file}"]
    pools.run("zfs", "create", *encryption, f"{root}/encrypted")
    pools.run("zfs", "create", f"{root}/plain")
    storages = [ZfsStorage(f"{root}/{name}", state_root=tmp_path / name) for name in ("encrypted", "plain")]
    for storage in storages:
        storage.open()
        storage.scan()
    source, target = storages
    original = Snapshot(kind=SnapshotKind.TEMPLATE, id="0123456789ab")
    source.snapshots.create_base(original, lambda directory: (directory / "file").write_text("secret words"))
    copy = Snapshot(kind=SnapshotKind.TEMPLATE, id="ba9876543210")
    with (tmp_path / "stream").open("w+b") as file:
        assert source.streams.send(original.id, file.fileno()) is StreamEncoding.RAW
        assert b"secret words" not in (tmp_path / "stream").read_bytes()
        file.seek(0)
        target.streams.receive(copy, file.fileno())
    dataset = f"{root}/plain/_template-{copy.id}"
    with pytest.raises(GatewayError):
        target.instances.clone(copy.id, "locked")
    pools.run("zfs", "load-key", "-L", f"file://{key_file}", dataset)
    assert (target.instances.clone(copy.id, "open") / "file").read_text() == "secret words"
    for storage in storages:
        storage.close()


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


ENCODINGS = pytest.mark.parametrize(
    "encoding", [StreamEncoding.PLAIN, pytest.param(StreamEncoding.COMPRESSED, marks=needs_openzfs)]
)


@ENCODINGS
def test_foreign_streams_are_refused_and_leave_nothing_behind(
    runner: EngineRunner, foreign_streams: dict[str, bytes], encoding: StreamEncoding
) -> None:
    before = list_objects(runner)
    for problem, stream in foreign_streams.items():
        with pytest.raises(Invalid, match=problem):
            import_snapshot(runner, make_file(runner, stream, encoding))
        assert list_objects(runner) == before


@ENCODINGS
def test_a_damaged_stream_is_refused_and_leaves_nothing_behind(runner: EngineRunner, encoding: StreamEncoding) -> None:
    stream = read_stream(runner.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"])
    before = list_objects(runner)
    for damaged_stream in (stream[: len(stream) // 2], stream[:5000] + b"x" * 5000 + stream[10000:]):
        with pytest.raises(GatewayError):
            import_snapshot(runner, make_file(runner, damaged_stream, encoding))
        assert not runner.engine.transfers.interrupted_imports.list()
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
    # Only a plain stream is stored before ZFS receives it.
    file = make_file(runner, read_stream(runner.engine.snapshots.get(TEMPLATE).host["zfsSnapshot"]))
    before = list_objects(runner)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(NoSpace, match=f"not enough space in {runner.config.host.state_root} to export the snapshot"):
        export_snapshot(runner, TEMPLATE)
    with pytest.raises(NoSpace, match="to import the snapshot"):
        import_snapshot(runner, file, name="copy")
    assert list_objects(runner) == before
