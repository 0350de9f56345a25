"""An ordinary user of a jail host reads properties of datasets (`zfs get`), files of templates, and the state root."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zfs_core

from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE_PROPERTY, RECORD_PROPERTY
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind
from tests.security.test_host_user_files import assert_host_user_cannot_run, find_readable_files
from tests.support import pools, session

SECRET = "s3cret-value"
ENV = {"API_KEY": SECRET}


@pytest.fixture(scope="module")
def pool(requires_root: None) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.get_run_id()}s", session.get_run_dir()) as pool:
        yield pool


@pytest.fixture
def storage(pool: pools.Pool, tmp_path: Path) -> Iterator[ZfsStorage]:
    name = f"{pool.name}/root"
    pools.run("zfs", "create", name)
    storage = ZfsStorage(name, state_root=tmp_path)
    storage.open()
    storage.scan()
    yield storage
    storage.close()
    pools.destroy_all(name)


@pytest.fixture
def base(storage: ZfsStorage) -> Snapshot:
    return storage.snapshots.create_base(Snapshot(kind=SnapshotKind.BASE), lambda path: None)


def create_sandbox(storage: ZfsStorage, base: Snapshot, **fields: object) -> Sandbox:
    sandbox = Sandbox.model_validate({"name": "web", "env": ENV, **fields})
    storage.instances.clone(base.id, sandbox.instance)
    storage.instances.save(sandbox)
    return sandbox


def restart_gateway(storage: ZfsStorage) -> tuple[list[Sandbox], list[str]]:
    """Return the sandboxes and the notes of the scan that follows a restart of the gateway."""
    storage.close()
    storage.open()
    scan = storage.scan()
    return scan.sandboxes, scan.repaired


def list_properties(storage: ZfsStorage) -> str:
    """Return what every user of the host can see on FreeBSD."""
    return pools.run("zfs", "get", "-H", "-r", "all", storage.root.dataset).stdout


def list_secret_files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "secrets").rglob("*") if path.is_file())


def encode_as_previous_release(sandbox: Sandbox, generation: int) -> dict[str, str]:
    """Encode a record as the releases without secret files did. They split long records into parts."""
    text = sandbox.model_dump_json()
    head = {"v": 1, "kind": "sandbox", "generation": generation}
    if len(text) < 7900:
        return {RECORD_PROPERTY: json.dumps(head | {"record": json.loads(text)})}
    parts = [text[start : start + 8000] for start in range(0, len(text), 8000)]
    head |= {"parts": len(parts), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return {f"{RECORD_PROPERTY}.{generation}.{n}": part for n, part in enumerate(parts)} | {
        RECORD_PROPERTY: json.dumps(head)
    }


def test_a_host_user_cannot_read_environments(storage: ZfsStorage, base: Snapshot, tmp_path: Path) -> None:
    sandbox = create_sandbox(storage, base, metadata={"text": "x" * 10_000})
    storage.snapshots.capture(sandbox.instance, Snapshot(source_sandbox=sandbox.id))
    assert SECRET not in list_properties(storage)
    [file] = list_secret_files(tmp_path)
    assert SECRET in file.read_text()
    assert find_readable_files([file]) == []
    file.chmod(0o644)
    assert find_readable_files([file]) == [], "users can enter the directory"

    assert restart_gateway(storage) == ([sandbox], [])
    assert sandbox.env == ENV
    sandbox.env = {"API_KEY": "another"}
    storage.instances.save(sandbox)
    storage.instances.save(sandbox)
    [new_file] = list_secret_files(tmp_path)
    assert new_file != file and "another" in new_file.read_text()
    storage.remove_record(sandbox)
    assert list_secret_files(tmp_path) == []


@pytest.mark.parametrize("length", [10, 20_000])
def test_environments_of_the_previous_release_are_moved(
    storage: ZfsStorage, base: Snapshot, tmp_path: Path, length: int
) -> None:
    sandbox = create_sandbox(storage, base, env={}, state_reason="y" * length)
    sandbox.env = ENV
    for prop, value in encode_as_previous_release(sandbox, 2).items():
        zfs_core.lzc_set_prop(storage.instances.dataset(sandbox.instance), prop, value)
    assert SECRET in list_properties(storage)
    sandboxes, notes = restart_gateway(storage)
    assert sandboxes == [sandbox] and "moved its environment variables" in notes[0]
    assert SECRET not in list_properties(storage)
    assert SECRET in list_secret_files(tmp_path)[0].read_text()
    assert restart_gateway(storage) == ([sandbox], [])


def test_environments_that_a_previous_release_left_on_retired_instances_are_removed(
    storage: ZfsStorage, base: Snapshot
) -> None:
    sandbox = create_sandbox(storage, base, env={}, state_reason="y" * 20_000)
    storage.snapshots.capture(sandbox.instance, Snapshot(source_sandbox=sandbox.id))
    sandbox.env = ENV
    for prop, value in encode_as_previous_release(sandbox, 2).items():
        zfs_core.lzc_set_prop(storage.instances.dataset(sandbox.instance), prop, value)
    storage.instances.forget(sandbox.instance)
    assert not storage.instances.discard(sandbox.instance)
    assert SECRET in list_properties(storage)
    restart_gateway(storage)
    assert SECRET not in list_properties(storage)


def test_a_missing_file_is_reported_and_can_be_restored(storage: ZfsStorage, base: Snapshot, tmp_path: Path) -> None:
    sandbox = create_sandbox(storage, base)
    [file] = list_secret_files(tmp_path)
    text = file.read_text()
    for damage in (file.unlink, lambda: file.write_text("{")):
        damage()
        [found_sandbox], [note] = restart_gateway(storage)
        assert found_sandbox == sandbox.model_copy(update={"env": {}})
        assert "has no environment variables" in note and str(file) in note
        storage.instances.save(found_sandbox)
        file.write_text(text)
        assert restart_gateway(storage) == ([sandbox], [])


# At each step, the process is killed instead of making the call with this number.
CRASH_SCRIPT = """
import os, signal, sys
from pathlib import Path
import zfs_core
from sandbox_gateway.hosts.jail_zfs.storage import secret_files
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage

dataset, state_root, step = sys.argv[1:]
storage = ZfsStorage(dataset, state_root=Path(state_root))
storage.open()
[sandbox] = storage.scan().sandboxes

def kill(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

if step == "before the file is complete":
    secret_files.json.dump = kill
elif step == "between file and record":
    zfs_core.lzc_set_prop = kill
elif step == "before the old file is removed":
    secret_files.SecretFiles.remove_superseded_files = kill
elif step == "before the file of a removed sandbox is removed":
    secret_files.SecretFiles.remove = kill
    storage.remove_record(sandbox)
sandbox.env = {"API_KEY": "another"}
storage.instances.save(sandbox)
"""


@pytest.mark.parametrize(
    ("step", "expected_env"),
    [
        ("before the file is complete", ENV),
        ("between file and record", ENV),
        ("before the old file is removed", {"API_KEY": "another"}),
        ("before the file of a removed sandbox is removed", None),
    ],
)
def test_a_killed_gateway_leaves_no_secrets_behind(
    storage: ZfsStorage, base: Snapshot, tmp_path: Path, step: str, expected_env: dict[str, str] | None
) -> None:
    create_sandbox(storage, base)
    storage.close()
    result = subprocess.run(
        [sys.executable, "-c", CRASH_SCRIPT, storage.root.dataset, str(tmp_path), step],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert len(list_secret_files(tmp_path)) == (1 if expected_env is None else 2)
    sandboxes, notes = restart_gateway(storage)
    assert [sandbox.env for sandbox in sandboxes] == ([] if expected_env is None else [expected_env])
    assert "which no record referred to" in notes[-1]
    assert len(list_secret_files(tmp_path)) == len(sandboxes)


def test_environments_are_durable_before_their_record(
    storage: ZfsStorage, base: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and its directory entry survive a power failure that the record survives."""
    durable_files: list[tuple[Path, int]] = []
    original_set_prop, original_fsync = zfs_core.lzc_set_prop, os.fsync

    def record_fsync(descriptor: int) -> None:
        original_fsync(descriptor)
        durable_files.append((Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size))

    def check_and_set_prop(*arguments: Any, **options: Any) -> None:
        [file] = list_secret_files(tmp_path)
        assert durable_files[0] == (file, file.stat().st_size), "the whole file"
        assert [path for path, _ in durable_files] == [file, file.parent]
        original_set_prop(*arguments, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(zfs_core, "lzc_set_prop", check_and_set_prop)
    sandbox = create_sandbox(storage, base)
    assert len(durable_files) == 2
    monkeypatch.undo()
    assert restart_gateway(storage) == ([sandbox], [])


def test_files_of_another_dataset_are_kept(
    storage: ZfsStorage, base: Snapshot, pool: pools.Pool, tmp_path: Path
) -> None:
    """An administrator can start the gateway with another dataset and the same state root, and later switch back."""
    create_sandbox(storage, base)
    storage.close()
    other_name = f"{pool.name}/other"
    pools.run("zfs", "create", other_name)
    other = ZfsStorage(other_name, state_root=tmp_path)
    try:
        other.open()
        other.scan()
        other.close()
    finally:
        pools.destroy_all(other_name)
    storage.open()
    ((sandbox,), notes) = restart_gateway(storage)
    assert (sandbox.env, notes) == (ENV, [])


def test_files_are_kept_while_a_record_is_damaged(storage: ZfsStorage, base: Snapshot, tmp_path: Path) -> None:
    sandbox = create_sandbox(storage, base)
    dataset = storage.instances.dataset(sandbox.instance)
    head = zfs_core.local_props(dataset)[RECORD_PROPERTY]
    zfs_core.lzc_set_prop(dataset, RECORD_PROPERTY, head[:-10])
    assert restart_gateway(storage)[0] == []
    assert QUARANTINE_PROPERTY in zfs_core.local_props(dataset) and len(list_secret_files(tmp_path)) == 1
    zfs_core.lzc_set_prop(dataset, RECORD_PROPERTY, head)
    assert restart_gateway(storage)[0] == [sandbox]


def test_a_host_user_cannot_reach_a_template_during_its_build(storage: ZfsStorage) -> None:
    """The root file system of a template may contain a set-user-ID program of its author."""

    def fill_directory(path: Path) -> None:
        shutil.copyfile("/usr/bin/id", path / "program")
        (path / "program").chmod(0o4755)
        assert path.stat().st_mode & 0o777 == 0o755, "users of the jail cannot enter its root directory"
        assert_host_user_cannot_run(path / "program")
        assert find_readable_files([path / "program"]) == []

    storage.snapshots.create_base(Snapshot(kind=SnapshotKind.BASE), fill_directory)
