"""`sandboxctl snapshot export` and `import`: files are complete or absent, and only their owner can read them."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from sandbox_gateway.cli.failure import ExitCode
from sandbox_gateway.engine.transfer.container import Decoder
from sandbox_gateway.engine.transfer.interrupted import InterruptedImport
from sandbox_gateway.engine.transfer.manifest import Manifest
from sandbox_gateway.records import Snapshot, SnapshotKind
from tests.api.test_transfers import interrupt_import, make_foreign_file, record_skipped_sizes
from tests.cli.running import SANDBOXCTL_COMMAND, Run, check_success
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.memory_host import MemorySource, MemoryTarget


@pytest.fixture
def taken_snapshot(api: httpx.Client) -> None:
    """A snapshot with the name `taken`."""
    api.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
    api.post("/sandboxes/source/snapshots", json={"name": "taken"}).raise_for_status()


@pytest.mark.parametrize("uses_tcp", [False, True], ids=["unix", "tcp"])
def test_a_snapshot_is_exported_and_imported(
    run: Run, memory_gateway: MemoryGateway, taken_snapshot: None, tmp_path: Path, uses_tcp: bool
) -> None:
    options = {"url": memory_gateway.url, "token": ADMIN_KEY} if uses_tcp else {}
    file = tmp_path / "taken.snapshot"
    export_outcome = check_success(run("snapshot", "export", "taken", str(file), **options))
    assert export_outcome.out == f"{file}: {file.stat().st_size} bytes\n"
    assert file.stat().st_mode & 0o777 == 0o600 and [*tmp_path.iterdir()] == [file]
    refusal = run("snapshot", "import", str(file), **options)
    assert refusal.code == 4 and "choose a different name" in refusal.err
    imported_snapshot = check_success(run("--json", "snapshot", "import", str(file), "--name", "copy", **options)).json
    assert imported_snapshot["names"] == ["copy"]
    assert "copy" in check_success(run("snapshot", "list")).out


def test_an_import_without_memory_says_why(
    run: Run, memory_gateway: MemoryGateway, taken_snapshot: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_success(run("snapshot", "export", "taken", str(tmp_path / "file")))
    monkeypatch.setattr(memory_gateway.host, "import_problem", "it was captured elsewhere")
    outcome = check_success(run("snapshot", "import", str(tmp_path / "file"), "--name", "copy"))
    assert "imported without its memory, so forks boot from the disk: it was captured elsewhere" in outcome.err


def test_a_signer_is_trusted_by_its_fingerprint(run: Run, memory_gateway: MemoryGateway, tmp_path: Path) -> None:
    contents, fingerprint = make_foreign_file()
    (tmp_path / "file").write_bytes(contents)
    refusal = run("snapshot", "import", str(tmp_path / "file"))
    assert refusal.code == 1 and fingerprint in refusal.err and "--trust" in refusal.err
    check_success(run("snapshot", "import", str(tmp_path / "file"), "--trust", "0" * 64, "--trust", fingerprint))
    own_fingerprint = check_success(run("snapshot", "signer")).out.strip()
    assert own_fingerprint == check_success(run("--json", "snapshot", "signer")).json["fingerprint"] != fingerprint


def test_interrupted_imports_are_listed_and_discarded(
    run: Run, memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no interrupted imports" in check_success(run("snapshot", "interrupted")).err
    imports = memory_gateway.engine.transfers.interrupted_imports
    target = MemoryTarget(Snapshot(kind=SnapshotKind.TEMPLATE, id="0123456789ab"), memory_gateway.host)
    expires_at = datetime(2040, 1, 1, tzinfo=UTC)
    fields = ("0123456789ab", "ba9876543210", "f" * 64, "1-token", expires_at)
    each = InterruptedImport(*fields, target)  # type: ignore[arg-type]
    imports._imports[each.signer, each.snapshot] = each
    out = check_success(run("snapshot", "interrupted")).out
    assert "0123456789ab" in out and "ba9876543210" in out and "1-token" in out
    (item,) = check_success(run("--json", "snapshot", "interrupted")).json
    assert item["id"] == each.id and item["expiresAt"].startswith("2040-01-01")
    check_success(run("snapshot", "interrupted", "--discard", each.id))
    assert not imports.list() and not memory_gateway.host.partial_imports
    assert run("snapshot", "interrupted", "--discard", each.id).code == ExitCode.NOT_FOUND


def test_interrupted_transfers_continue(
    run: Run,
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    taken_snapshot: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped_sizes = record_skipped_sizes(monkeypatch)
    file, original = tmp_path / "file", api.get("/snapshots/taken/export").content
    (tmp_path / ".file.partial").write_bytes(original[:1000])
    check_success(run("snapshot", "export", "taken", str(file)))
    assert file.read_bytes() == original and skipped_sizes == [1000]
    interrupt_import(memory_gateway, api, original, len(original) - 50, monkeypatch)
    assert "bytes" in check_success(run("snapshot", "interrupted")).out
    (item,) = check_success(run("--json", "snapshot", "interrupted")).json
    imported_snapshot = check_success(run("--json", "snapshot", "import", str(file), "--name", "copy")).json
    assert (imported_snapshot["snapshotID"], imported_snapshot["names"]) == (item["id"], ["copy"])
    assert api.get("/interrupted-imports").json() == [] and memory_gateway.host.partial_imports == set()


def test_files_can_be_piped(run: Run, memory_gateway: MemoryGateway, taken_snapshot: None) -> None:
    command = [*SANDBOXCTL_COMMAND, "--url", memory_gateway.unix_url, "snapshot", "export", "taken", "-"]
    export_process = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert export_process.stderr == b""
    check_success(run("snapshot", "import", "-", "--name", "copy", stdin=export_process.stdout))


def test_the_error_for_a_large_file_refused_early_is_shown(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 << 20)
    refusal = run("snapshot", "import", str(tmp_path / "file"))
    assert refusal.code == 2 and "not a snapshot file" in refusal.err


def test_an_export_that_fails_leaves_no_file(
    run: Run, memory_gateway: MemoryGateway, taken_snapshot: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_read, file = MemorySource.read, tmp_path / "file"
    assert run("snapshot", "export", "nothing", str(file)).code == 3

    def fail(source: MemorySource, part: str, *args: int) -> bytes:
        if part == "memory":
            raise OSError(5, "Input/output error")
        return original_read(source, part, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MemorySource, "read", fail)
    lost_outcome = run("snapshot", "export", "taken", str(file))
    assert lost_outcome.code == 5 and "was lost" in lost_outcome.err
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [".file.partial"], "the next export continues with it"
    (tmp_path / ".file.partial").unlink()
    file.write_text("mine")
    refusal = run("snapshot", "export", "taken", str(file))
    assert refusal.code == 2 and "exists" in refusal.err and file.read_text() == "mine"
    assert run("snapshot", "export", "taken", str(tmp_path / "no" / "file")).code == 2
    assert run("snapshot", "import", str(tmp_path / "no")).code == 2


def test_an_export_prints_json_on_request(run: Run, taken_snapshot: None, tmp_path: Path) -> None:
    outcome = check_success(run("--json", "snapshot", "export", "taken", str(tmp_path / "file"), "--no-memory"))
    assert json.loads(outcome.out)["bytes"] == (tmp_path / "file").stat().st_size


def test_a_volume_is_exported_and_imported(run: Run, memory_gateway: MemoryGateway, tmp_path: Path) -> None:
    check_success(run("volume", "create", "data", "--size", "64M"))
    check_success(run("volume", "snapshot", "data", "--name", "monday"))
    file = tmp_path / "data.volume"
    outcome = check_success(run("volume", "export", "data@monday", str(file)))
    assert outcome.out == f"{file}: {file.stat().st_size} bytes\n" and file.stat().st_mode & 0o777 == 0o600
    assert run("volume", "import", str(file)).code == 4
    volume = check_success(run("--json", "volume", "import", str(file), "--name", "copy")).json
    assert (volume["name"], volume["sizeMB"]) == ("copy", 64)
    assert "copy" in check_success(run("volume", "list")).out
    refusal = run("volume", "export", "data", str(tmp_path / "other"))
    assert refusal.code == 2 and "sandboxctl volume snapshot data --name NAME" in refusal.err
    refusal = run("snapshot", "import", str(file), "--name", "snapshot")
    assert refusal.code != 0 and "sandboxctl volume import" in refusal.err


def test_a_snapshot_is_not_exported_since_itself(run: Run, taken_snapshot: None, tmp_path: Path) -> None:
    refusal = run("snapshot", "export", "taken", str(tmp_path / "file"), "--since", "taken")
    assert refusal.code != 0 and "cannot be exported since itself" in refusal.err
    assert not [*tmp_path.iterdir()]
    run("snapshot", "export", "taken", str(tmp_path / "file"), "--since", "base")
    manifest = read_manifest(tmp_path / "file")
    assert manifest.base is not None and manifest.base.names == ["base"]


def read_manifest(path: Path) -> Manifest:
    decoder = Decoder()
    decoder.feed(path.read_bytes())
    manifest = decoder.read_manifest()
    assert isinstance(manifest, Manifest)
    return manifest
