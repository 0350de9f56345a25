"""Plans of `sandbox_snapshot` for `export_to`, depending on the existing file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot_files import read_snapshot_file

from sandbox_gateway.engine.transfer.container import MAGIC
from tests.unit.engine.snapshot_file_samples import CHUNKS, FILE, JAIL_FIELDS, make_file, make_manifest_fields

FILE_WITHOUT_MEMORY = make_file(CHUNKS[:4], platform=None, line=False, parts=make_manifest_fields()["parts"][:3])[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write_file(path: Path, contents: bytes, mode: int = 0o600) -> None:
    path.write_bytes(contents)
    path.chmod(mode)


BASE = {"id": "ba9876543210", "backend": "jail_zfs"}
BASE_FIELDS = {"guid": 5, "snapshot_id": BASE["id"], "names": ["monday"]}
JAIL_FILE = make_file([(0, 0, b"stream".ljust(4096))], **JAIL_FIELDS)[0]
INCREMENTAL_FILE = make_file([(0, 0, b"stream".ljust(4096))], **JAIL_FIELDS, base=BASE_FIELDS)[0]


def plan_export(
    path: Path, *, memory: str = "full", since: str = "", base: dict[str, Any] | None = None
) -> tuple[Action, ...]:
    """Return the planned actions to export the snapshot in FILE, whose memory mode is ``memory``, to ``path``.

    ``since``: the option ``export_since``. ``base``: the snapshot with this name or id.
    """
    snapshot: dict[str, Any] = {
        "id": "0123456789ab",
        "name": "golden",
        "description": "",
        "source_sandbox_id": "s",
        "status": "ready",
        "volumes": [],
        "prewarm": 0,
        "imported_from": "",
        "memory": memory,
    }
    options = {name: option.get("default") for name, option in _snapshot.ARGUMENTS.items()}
    options |= {"name": ["golden"], "export_to": str(path), "export_since": since}
    current_state = _snapshot.CurrentState({"golden": snapshot}, base=base, file=read_snapshot_file(str(path)))
    plan = _snapshot.plan(_snapshot.parse_desired_state(options), current_state)
    for failure in plan.failures.values():
        raise failure
    return tuple(plan.actions)


@pytest.mark.parametrize(
    ("contents", "memory", "verbs"),
    [
        (FILE, "full", []),
        (FILE, "incremental", []),
        (FILE_WITHOUT_MEMORY, "none", []),
        (FILE_WITHOUT_MEMORY, "full", ["export"]),
        (FILE[:-1], "full", ["export"]),
    ],
    ids=["full", "incremental", "none", "memory is missing in the file", "the file was cut off"],
)
def test_a_file_counts_as_exported_only_if_a_run_would_write_the_same(
    path: Path, contents: bytes, memory: str, verbs: list[str]
) -> None:
    write_file(path, contents)
    assert [action.verb for action in plan_export(path, memory=memory)] == verbs


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o700])
def test_a_readable_file_with_guest_memory_becomes_private(path: Path, mode: int) -> None:
    write_file(path, FILE, mode)
    (action,) = plan_export(path)
    assert (action.verb, action.changes[0].before["file_mode"]) == ("protect", f"{mode:04o}")
    _snapshot.apply(action, Client("unix:///nowhere"))
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == FILE
    assert not plan_export(path)


def test_the_permissions_of_a_file_behind_a_planted_link_do_not_change(path: Path) -> None:
    write_file(path, FILE, 0o644)
    (action,) = plan_export(path)
    victim = path.rename(path.with_name("victim"))
    path.symlink_to(victim)
    with pytest.raises(Failure, match="cannot be written"):
        _snapshot.apply(action, Client("unix:///nowhere"))
    assert victim.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("contents", "since", "base", "verbs"),
    [
        (INCREMENTAL_FILE, "monday", BASE, []),
        (INCREMENTAL_FILE, "monday", {**BASE, "id": "0a9876543210"}, ["export"]),
        (INCREMENTAL_FILE, "", None, ["export"]),
        (JAIL_FILE, "monday", BASE, ["export"]),
        (JAIL_FILE, "", None, []),
        (INCREMENTAL_FILE, "monday", None, []),
        (INCREMENTAL_FILE, "ba9876543210", None, []),
    ],
    ids=[
        "the same base",
        "another base with its name",
        "whole instead of incremental",
        "incremental instead of whole",
        "whole",
        "the base was removed",
        "the base was removed, by id",
    ],
)
def test_an_incremental_file_counts_as_exported_if_its_base_is_the_same(
    path: Path, contents: bytes, since: str, base: dict[str, Any] | None, verbs: list[str]
) -> None:
    write_file(path, contents)
    actions = plan_export(path, memory="none", since=since, base=base)
    assert [action.verb for action in actions] == verbs
    assert all(action.request.get("since", "") == since for action in actions)


def test_an_export_since_a_missing_snapshot_is_refused_before_the_first_change(path: Path) -> None:
    with pytest.raises(Failure, match="snapshot 'monday' not found: set export_since") as refusal:
        plan_export(path, since="monday")
    assert refusal.value.kind == "not_found"


@pytest.mark.parametrize("base", ["monday", [], {}, {"snapshot_id": 5}, {"snapshot_id": "ba9876543210", "names": "x"}])
def test_a_file_whose_base_is_malformed_is_damaged(path: Path, base: Any) -> None:
    fields = json.dumps({**make_manifest_fields(), "base": base}).encode()
    contents = FILE[: len(MAGIC) + 2] + b"H" + (96 + len(fields)).to_bytes(4, "big") + bytes(96) + fields
    write_file(path, contents)
    with pytest.raises(Failure, match="is damaged"):
        read_snapshot_file(str(path))
