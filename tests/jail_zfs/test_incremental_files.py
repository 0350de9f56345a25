"""Test files that contain only what differs from another snapshot, on a real pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zfs_core

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer import transfers
from sandbox_gateway.engine.transfer.container import CHUNK_BYTES
from sandbox_gateway.engine.transfer.interrupted import Continuation
from sandbox_gateway.engine.transfer.manifest import Base
from sandbox_gateway.errors import BackendFailed, GatewayError, InUse, Invalid, NotFound
from sandbox_gateway.hosts.base import ImportBase, StreamEncoding
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
from tests.support.worlds import TEMPLATE

MakeRunner = Callable[..., EngineRunner]
ENCODING = StreamEncoding.COMPRESSED if pools.IS_OPENZFS else StreamEncoding.PLAIN
SEND_OPTIONS = ("-c",) if pools.IS_OPENZFS else ()


@pytest.fixture
def source(runner: EngineRunner) -> None:
    """A sandbox with the snapshots "monday" and "tuesday", each of which adds a small file."""
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    for name in ("monday", "tuesday"):
        runner.shell("source", f"head -c 100000 /dev/urandom >/root/{name}")
        runner.do(runner.engine.snapshots.create("source", name=name))


def get_guid(name: str) -> int:
    return zfs_core.get_props([name], ["guid"])[name]["guid"].number


def get_zfs_name(runner: EngineRunner, ref: str) -> str:
    """Return the current full name of a snapshot."""
    return runner.engine.host._storage.snapshots.get_full_name(runner.engine.snapshots.get(ref).id)  # type: ignore[attr-defined]


def get_origin(runner: EngineRunner, ref: str) -> str:
    """Return the snapshot of which the dataset of a snapshot is a clone."""
    dataset = get_zfs_name(runner, ref).partition("@")[0]
    return zfs_core.get_props([dataset], ["origin"])[dataset]["origin"].value


def make_base(runner: EngineRunner, ref: str) -> Base:
    return Base(guid=get_guid(get_zfs_name(runner, ref)), snapshot_id=runner.engine.snapshots.get(ref).id)


def test_another_gateway_recognizes_the_base_by_its_guid(
    runner: EngineRunner, source: None, make_runner: MakeRunner
) -> None:
    digests = runner.shell("source", "cd /root; sha256sum monday tuesday")
    whole_file = export_snapshot(runner, "tuesday")
    files = {
        "template": export_snapshot(runner, TEMPLATE),
        "monday": export_snapshot(runner, "monday", since=TEMPLATE),
        "tuesday": export_snapshot(runner, "tuesday", since="monday"),
        "both": export_snapshot(runner, "tuesday", since=TEMPLATE),
    }
    assert max(len(files[name]) for name in ("monday", "tuesday", "both")) < len(whole_file) / 10
    assert b'"base":{"guid":' in files["both"][:4096] and b'"base"' not in whole_file[:4096]
    trust = [runner.engine.transfers.get_signer().fingerprint]
    # Another pool would not have these copies either. zfs-fuse could choose one of them.
    runner.do(runner.engine.sandboxes.delete("source"))
    for name in ("tuesday", "monday", TEMPLATE):
        runner.do(runner.engine.snapshots.delete(name))
    runner.close()

    other = make_runner()
    template = other.engine.snapshots.get(TEMPLATE)
    before = list_objects(other)
    copied_template = import_snapshot(other, files["template"], "copied-template", trust=trust)
    for name, base_name in (("monday", "copied-template"), ("tuesday", "monday"), ("both", "copied-template")):
        imported = import_snapshot(other, files[name], name, trust=trust)
        base = other.engine.snapshots.get(base_name)
        assert get_origin(other, name) == get_zfs_name(other, base_name)
        assert (imported.parent, imported.template_id, imported.origin) == (base.id, *2 * [copied_template.id])
        assert imported.imported and imported.imported.snapshot == read_manifest(files[name]).snapshot_id
    other.close()

    other = make_runner(config=other.config)
    assert other.engine.snapshots.get("tuesday").parent == other.engine.snapshots.get("monday").id
    # A copy of a base is a base itself.
    assert len(export_snapshot(other, "tuesday", since="monday")) < len(whole_file) / 10
    # As with forks, the data of a base remains until its last clone is gone.
    other.do(other.engine.snapshots.delete("monday"))
    assert other.engine.snapshots.get("tuesday").parent == copied_template.id
    other.do(other.engine.snapshots.delete("copied-template"))
    assert other.engine.snapshots.get("tuesday").parent == ""
    for name in ("tuesday", "both"):
        other.do(other.engine.forks.create(name, ForkSpec(names=["fork"])))
        assert other.shell("fork", "cd /root; sha256sum monday tuesday") == digests
        other.shell("fork", "rm /root/tuesday")
        other.do(other.engine.sandboxes.rollback("fork", name))
        assert other.shell("fork", "cd /root; sha256sum monday tuesday") == digests
        other.do(other.engine.sandboxes.delete("fork"))
    for name in ("both", "tuesday"):
        other.do(other.engine.snapshots.delete(name))
    assert list_objects(other) == before and template.id in other.engine.index.snapshots


def test_a_template_that_needs_another_template_outlives_it(runner: EngineRunner, source: None) -> None:
    """Templates have datasets of their own, which do not belong to sandboxes either."""
    template_name = get_zfs_name(runner, TEMPLATE)
    base = make_base(runner, TEMPLATE)
    stream = read_stream(*SEND_OPTIONS, "-i", template_name, get_zfs_name(runner, "monday"))
    copy = import_snapshot(runner, export_snapshot(runner, TEMPLATE), "copied-template")
    before = list_objects(runner)
    imported = import_snapshot(runner, make_file(runner, stream, ENCODING, base=base, kind="template"), "second")
    assert (imported.kind, imported.template_id) == (SnapshotKind.TEMPLATE, imported.id)
    assert imported.parent in (copy.id, base.snapshot_id)
    dataset = f"{runner.config.jail_zfs.dataset}/_template-{imported.id}"
    assert list_objects(runner) - before == {dataset, f"{dataset}@base"}
    runner.do(runner.engine.snapshots.delete("copied-template"))
    runner.do(runner.engine.forks.create("second", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "ls /root/monday").strip() == "/root/monday"
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.do(runner.engine.snapshots.delete("second"))
    copied_dataset = f"{runner.config.jail_zfs.dataset}/_template-{copy.id}"
    assert list_objects(runner) == before - {copied_dataset, f"{copied_dataset}@base"}


def test_an_unusable_base_is_refused_with_the_usable_ones(runner: EngineRunner, source: None) -> None:
    engine = runner.engine
    monday, tuesday, template = (engine.snapshots.get(name) for name in ("monday", "tuesday", TEMPLATE))
    runner.do(engine.forks.create("monday", ForkSpec(names=["fork"])))
    forked = runner.do(engine.snapshots.create("fork", name="forked"))
    pattern = rf"use one of these: 'monday' \({monday.id}\), '{TEMPLATE}' \({template.id}\)$"
    for base in ("forked", "tuesday"):
        with pytest.raises(Invalid, match=pattern):
            export_snapshot(runner, "tuesday", since=base)
    with pytest.raises(Invalid, match=rf"'monday' .* cannot be exported since 'tuesday' \({tuesday.id}\)"):
        export_snapshot(runner, "monday", since="tuesday")
    with pytest.raises(Invalid, match=rf"'forked' \({forked.id}\).* use one of these: 'monday' \({monday.id}\)$"):
        export_snapshot(runner, "forked", since=TEMPLATE)
    with pytest.raises(Invalid, match="there is none, so omit 'since'"):
        export_snapshot(runner, TEMPLATE, since="monday")
    with pytest.raises(Invalid, match="omit 'resumeToken' or 'since'"):
        export_snapshot(runner, "tuesday", "1-2-3-4", since="monday")
    # A sandbox's dataset is renamed when the sandbox is deleted.
    runner.do(engine.sandboxes.delete("source"))
    assert read_manifest(export_snapshot(runner, "tuesday", since="monday")).base


def test_a_file_without_its_base_is_refused_before_its_contents_are_read(
    runner: EngineRunner, source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monday = runner.engine.snapshots.get("monday")
    file = export_snapshot(runner, "tuesday", since="monday")
    runner.do(runner.engine.snapshots.delete("monday"))
    before = list_objects(runner)
    monkeypatch.setattr(runner.engine.host, "begin_import", None)
    with pytest.raises(
        NotFound, match=rf"differs from snapshot 'monday' \({monday.id}\) .*: import it first, or export"
    ):
        import_snapshot(runner, file, "copy")
    with pytest.raises(NotFound, match="import it first"):
        import_snapshot(runner, file[:4096], "copy")
    assert list_objects(runner) == before


def test_a_stream_must_need_exactly_what_the_manifest_says(runner: EngineRunner, source: None) -> None:
    name, monday, template = (get_zfs_name(runner, ref) for ref in ("tuesday", "monday", TEMPLATE))
    whole, since_monday, since_template = (
        read_stream(*SEND_OPTIONS, *arguments, name) for arguments in ([], ["-i", monday], ["-i", template])
    )
    monday_base, template_base = make_base(runner, "monday"), make_base(runner, TEMPLATE)
    before = list_objects(runner)
    for stream, base, problem in (
        (whole, monday_base, "does not need the snapshot that the file names"),
        (since_monday, template_base, "does not need the snapshot that the file names"),
        (since_template, monday_base, "does not need the snapshot that the file names"),
        (since_monday, None, "needs another snapshot"),
        (since_template, None, "needs another snapshot"),
        (b"x" * 5000, monday_base, "does not begin with the header"),
    ):
        with pytest.raises(Invalid, match=problem):
            import_snapshot(runner, make_file(runner, stream, ENCODING, base=base))
        assert list_objects(runner) == before
    unknown_base = Base(guid=12345, snapshot_id=monday_base.snapshot_id)
    with pytest.raises(NotFound, match="import it first"):
        import_snapshot(runner, make_file(runner, since_monday, ENCODING, base=unknown_base))
    for damaged_stream in (since_monday[:400], since_monday[:-312], since_monday[:-300] + b"x" * 300):
        with pytest.raises(GatewayError):
            import_snapshot(runner, make_file(runner, damaged_stream, ENCODING, base=monday_base))
        assert list_objects(runner) == before
    import_snapshot(runner, make_file(runner, since_monday, ENCODING, base=monday_base), "copy")


def test_a_snapshot_outside_the_gateways_root_is_never_a_base(
    runner: EngineRunner, source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zfs-fuse looks for the base in the whole pool."""
    outside = f"{runner.config.jail_zfs.dataset}-outside"
    base = make_base(runner, "monday")
    stream = read_stream(*SEND_OPTIONS, "-i", get_zfs_name(runner, "monday"), get_zfs_name(runner, "tuesday"))
    sent = subprocess.Popen(["zfs", "send", get_zfs_name(runner, "monday")], stdout=subprocess.PIPE)
    subprocess.run(["zfs", "receive", "-u", f"{outside}@copy"], stdin=sent.stdout, check=True, timeout=60)
    assert sent.wait(60) == 0 and get_guid(f"{outside}@copy") == base.guid
    problem = f"as a clone of {outside}@copy, which does not belong to this gateway"
    file, before = make_file(runner, stream, ENCODING, base=base), list_objects(runner)
    try:
        try:
            import_snapshot(runner, file, "copy")
        except BackendFailed as error:
            assert problem in error.message and not pools.IS_OPENZFS
            assert list_objects(runner) == before
        else:
            assert get_origin(runner, "copy") == get_zfs_name(runner, "monday")
            runner.do(runner.engine.snapshots.delete("copy"))
        runner.do(runner.engine.snapshots.delete("monday"))
        before = list_objects(runner)
        with pytest.raises(NotFound, match="import it first"):
            import_snapshot(runner, file, "copy")
        # Even if the gateway believed that the base exists, ZFS must not use the other one.
        streams, tuesday_id = runner.engine.host._storage.streams, runner.engine.snapshots.get("tuesday").id  # type: ignore[attr-defined]
        monkeypatch.setattr(streams, "find_by_guid", lambda guid: [tuesday_id])
        find = streams._names.find
        monkeypatch.setattr(streams._names, "find", lambda id: f"{outside}@copy" if id == tuesday_id else find(id))
        with pytest.raises(BackendFailed, match=problem):
            import_snapshot(runner, file, "copy")
        assert list_objects(runner) == before and get_guid(f"{outside}@copy") == base.guid
    finally:
        monkeypatch.undo()
        pools.destroy_all(outside)


@pytest.mark.parametrize("when_unused", [False, True])
def test_a_base_cannot_be_removed_while_a_file_that_needs_it_is_imported(
    runner: EngineRunner, source: None, when_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    file = export_snapshot(runner, "tuesday", since="monday")
    monday = runner.engine.snapshots.get("monday")

    async def read() -> AsyncIterator[bytes]:
        yield file[: len(file) // 2]
        if when_unused:
            await runner.engine.snapshots.delete("monday", when_unused=True)
        else:
            with pytest.raises(InUse):
                await runner.engine.snapshots.delete("monday")
        yield file[len(file) // 2 :]

    imported = runner.do(runner.engine.transfers.import_(read(), name="copy"))
    assert (monday.id in runner.engine.index.snapshots) == (not when_unused)
    runner.do(runner.engine.snapshots.delete("tuesday"))
    runner.do(runner.engine.sandboxes.delete("source"))
    runner.do(runner.engine.forks.create(imported.id, ForkSpec(names=["fork"])))
    assert runner.shell("fork", "ls /root/monday /root/tuesday").split() == ["/root/monday", "/root/tuesday"]


def test_an_interrupted_import_continues_if_its_base_still_exists(
    runner: EngineRunner, source: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    file = export_snapshot(runner, "tuesday", since="monday")
    imports = runner.engine.transfers.interrupted_imports
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, file[: len(file) // 2], "copy", lost=True)
    if zfs_core.detect_capabilities().receive_options:
        assert not imports.list() and not list_partial_datasets(runner), "nothing would protect the base"
        return
    (partial_import,) = imports.list()
    size = partial_import.file.size if partial_import.file else 0
    rest = Continuation(partial_import.id, size)
    imported = import_snapshot(runner, file[size:], "copy", continuation=rest)
    assert (imported.id, imported.parent) == (partial_import.id, runner.engine.snapshots.get("monday").id)
    with pytest.raises(ConnectionResetError):
        import_snapshot(runner, file[: len(file) // 2], "again", lost=True)
    (partial_import,) = imports.list()
    runner.do(runner.engine.snapshots.delete("monday"))
    with pytest.raises(NotFound, match="import it first"):
        import_snapshot(runner, file[size:], "again", continuation=Continuation(partial_import.id, size))


_KILLED_IMPORT = """
import os, signal, sys
from pathlib import Path
import zfs_core
from sandbox_gateway.hosts.base import ImportBase
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Snapshot, SnapshotKind

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

root, state_root, step, guid = sys.argv[1:]
storage = ZfsStorage(root, state_root=Path(state_root))
storage.open()
storage.scan()
if step == "received":
    receive = zfs_core.lzc_receive
    zfs_core.lzc_receive = lambda *args, **kwargs: (receive(*args, **kwargs), die())
else:
    setattr(zfs_core, step, die)
with open(Path(state_root, "stream"), "r+b") as file:
    record = Snapshot(kind=SnapshotKind.TEMPLATE, id="ba9876543210")
    base = ImportBase(Snapshot(kind=SnapshotKind.TEMPLATE, id="0123456789ab"), int(guid))
    storage.streams.receive(record, file.fileno(), base=base)
"""


@pytest.mark.parametrize("step", ["received", "lzc_set_prop", "lzc_rename"])
def test_an_import_whose_gateway_is_killed_leaves_only_the_base(root: str, tmp_path: Path, step: str) -> None:
    storage = ZfsStorage(root, state_root=tmp_path)
    storage.open()
    storage.scan()
    base = Snapshot(kind=SnapshotKind.TEMPLATE, id="0123456789ab")
    storage.snapshots.create_base(base, lambda directory: (directory / "file").write_bytes(os.urandom(CHUNK_BYTES)))
    name = storage.snapshots.get_full_name(base.id)
    dataset = name.partition("@")[0]
    zfs_core.lzc_snapshot([f"{dataset}@later"])
    (tmp_path / "stream").write_bytes(read_stream("-i", name, f"{dataset}@later"))
    zfs_core.lzc_destroy_snaps([f"{dataset}@later"], False)
    storage.close()
    before = {*zfs_core.get_tree(root, ["type"])}
    arguments = [root, str(tmp_path), step, str(get_guid(name))]
    killed = subprocess.run([sys.executable, "-c", _KILLED_IMPORT, *arguments], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    partial = {*zfs_core.get_tree(root, ["type"])} - before
    assert len(partial) == 2 and all("/retired/import-" in each for each in partial)
    storage.open()
    assert any("its import was interrupted" in note for note in storage.scan().repaired)
    assert {*zfs_core.get_tree(root, ["type"])} == before
    with (tmp_path / "stream").open("r+b") as file:
        record = Snapshot(kind=SnapshotKind.TEMPLATE, id="ba9876543210")
        storage.streams.receive(record, file.fileno(), base=ImportBase(base, get_guid(name)))
    assert {each.id for each in storage.scan().snapshots} == {base.id, record.id}
    # The base is hidden while its clone exists, and then removed.
    assert not storage.snapshots.destroy(base.id)
    assert [each.id for each in storage.scan().snapshots] == [record.id]
    assert storage.snapshots.destroy(record.id)
    assert {each for each in zfs_core.get_tree(root, ["type"]) if "_template-" in each} == set()
    storage.close()
