"""The options `export_to` and `import_from` of `sandbox_volume`, with the gateway and a host in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot, _volume
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, run

from tests.api.test_volume_files import export_volume, read_color, snapshot
from tests.support.memory_gateway import MemoryGateway

__all__ = ["snapshot"]  # a fixture that all tests use


def run_module(gateway: MemoryGateway, kind: Any = _volume, *, check: bool = False, **options: Any) -> dict[str, Any]:
    defaults = {name: option.get("default") for name, option in kind.ARGUMENTS.items()}
    # Each check run has its own plan session.
    check_options = {"check_run": f"a check run with files, {time.monotonic_ns()}"} if check else {}
    params = {"gateway_url": gateway.unix_url, **check_options}
    return run(kind, {**defaults, **params, **options}, check_mode=check)


def list_actions(result: dict[str, Any]) -> list[str]:
    assert not result.get("failed"), result["msg"]
    return [action for outcome in result["outcomes"] for action in outcome["actions"]]


def test_the_module_exports_a_snapshot_once_and_imports_it_once(
    memory_gateway: MemoryGateway, api: httpx.Client, snapshot: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    export_options = {"name": ["data"], "snapshots": ["monday"], "export_to": str(file)}
    assert list_actions(run_module(memory_gateway, check=True, **export_options)) == ["export"]
    assert not file.exists()
    assert list_actions(run_module(memory_gateway, **export_options)) == ["export"]
    assert file.stat().st_mode & 0o777 == 0o600 and [*tmp_path.iterdir()] == [file]
    assert not run_module(memory_gateway, **export_options)["changed"]
    file.chmod(0o644)
    assert list_actions(run_module(memory_gateway, **export_options)) == ["protect"]
    assert file.stat().st_mode & 0o777 == 0o600
    import_options = {"name": ["copy"], "import_from": str(file), "size_mb": 128}
    predicted_result = run_module(memory_gateway, check=True, **import_options)
    assert list_actions(predicted_result) == ["import", "grow"]
    result = run_module(memory_gateway, **import_options)
    assert list_actions(result) == ["import", "grow"]
    expected = (snapshot["snapshotID"], 128)
    for volume in (predicted_result["volume"], result["volume"]):
        assert (volume["imported_from"], volume["size_mb"]) == expected
    assert read_color(api, "copy") == "blue"
    assert not run_module(memory_gateway, **import_options)["changed"]
    # A file of a newer snapshot replaces it, which the older import does not match any more.
    newer_options = {**export_options, "snapshots": ["tuesday"]}
    assert list_actions(run_module(memory_gateway, **newer_options)) == ["capture", "export"]
    refusal = run_module(memory_gateway, **import_options)
    assert refusal["failure"]["kind"] == "conflict" and "already exists and was imported from" in refusal["msg"]
    file.unlink()
    assert not run_module(memory_gateway, **import_options)["changed"]


def test_the_module_refuses_files_of_another_kind(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path
) -> None:
    volume_file, snapshot_file, other_file = (tmp_path / name for name in ("volume", "snapshot", "other"))
    volume_file.write_bytes(export_volume(api))
    api.post("/sandboxes/writer/snapshots", json={"name": "taken"}).raise_for_status()
    snapshot_file.write_bytes(api.get("/snapshots/taken/export").content)
    other_file.write_text("other")
    for file in (snapshot_file, other_file):
        contents = file.read_bytes()
        for options in ({"name": ["data"], "snapshots": ["new"], "export_to": str(file)}, {
            "name": ["copy"], "import_from": str(file)
        }):  # fmt: skip
            result = run_module(memory_gateway, **options)
            assert result["failed"] and str(file) in result["msg"] and not result["changed"]
        assert file.read_bytes() == contents
    for options in ({"name": ["taken"], "export_to": str(volume_file)}, {
        "name": ["copy"], "import_from": str(volume_file)
    }):  # fmt: skip
        result = run_module(memory_gateway, _snapshot, **options)
        assert "contains a snapshot of a volume: use it with the module sandbox_volume" in result["msg"]
    assert [each["name"] for each in api.get("/volumes/data/snapshots").json()] == ["monday"]


def test_the_module_takes_no_snapshot_for_an_export_that_cannot_be_written(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path
) -> None:
    options = {"name": ["data"], "snapshots": ["tuesday"], "export_to": str(tmp_path / "backups" / "file")}
    assert list_actions(run_module(memory_gateway, check=True, **options)) == ["capture", "export"]
    refusal = run_module(memory_gateway, **options)
    assert not refusal["changed"] and f"create the directory {tmp_path}/backups first" in refusal["msg"]
    assert [each["name"] for each in api.get("/volumes/data/snapshots").json()] == ["monday"]


def test_check_mode_knows_that_an_earlier_task_may_write_the_file(
    memory_gateway: MemoryGateway, tmp_path: Path
) -> None:
    refusal = run_module(memory_gateway, check=True, name=["copy"], import_from=str(tmp_path / "file"))
    assert refusal["failed"] and "does not exist" in refusal["msg"]
    assert refusal[PLAN_KEY]["unknown"] == [f"only if no earlier task of the run writes {tmp_path}/file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ["a", "b"], "import_from": "/file"}, "a file contains one volume, but there are 2 names"),
        ({"name": ["a"], "snapshots": ["x", "y"], "export_to": "/file"}, "there are 2 entries in snapshots"),
        ({"name": ["a"], "export_to": "/file"}, "there are 0 entries in snapshots"),
        ({"name": ["a"], "state": "absent", "import_from": "/file"}, "valid only with state: present"),
        ({"name": ["a"], "snapshots": ["x"], "absent_snapshots": ["x", "y"]}, "absent_snapshots contains x, which"),
        ({"name": ["a"], "rollback_to": "x", "absent_snapshots": ["x"]}, "absent_snapshots contains x, which"),
        ({"name": ["a"], "state": "absent", "absent_snapshots": ["x"]}, "set purge: true"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    memory_gateway: MemoryGateway, options: dict[str, Any], message: str
) -> None:
    assert message in run_module(memory_gateway, **options)["msg"]


def test_a_damaged_manifest_of_a_volume_is_refused_by_the_module(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path
) -> None:
    file = export_volume(api)
    size = json.dumps("size_mb").encode() + b":64"
    assert file.count(size) == 1
    (tmp_path / "file").write_bytes(file.replace(size, size[:-2] + b"[]"))
    assert "is damaged" in run_module(memory_gateway, name=["copy"], import_from=str(tmp_path / "file"))["msg"]
