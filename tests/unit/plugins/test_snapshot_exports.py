"""Plans of `sandbox_snapshot` for `export_to`, depending on the existing file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot_files import read_snapshot_file

from tests.unit.engine.test_snapshot_files import CHUNKS, FILE, make_file, make_manifest_fields

FILE_WITHOUT_MEMORY = make_file(CHUNKS[:4], platform=None, line=False, parts=make_manifest_fields()["parts"][:3])[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write_file(path: Path, contents: bytes, mode: int = 0o600) -> None:
    path.write_bytes(contents)
    path.chmod(mode)


def plan_export(path: Path, *, memory: str = "full") -> tuple[Action, ...]:
    """Return the planned actions to export the snapshot in FILE, whose memory mode is ``memory``, to ``path``."""
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
    parse_desired_state = _snapshot.parse_desired_state({**options, "name": ["golden"], "export_to": str(path)})
    current_state = _snapshot.CurrentState({"golden": snapshot}, file=read_snapshot_file(str(path)))
    plan = _snapshot.plan(parse_desired_state, current_state)
    assert not plan.failures
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
