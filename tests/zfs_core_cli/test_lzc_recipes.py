"""Test the five playbooks in playbooks/lzc on real ZFS: in check mode, in a real run, and in a repetition.

zfs-fuse cannot continue interrupted transfers; test_an_interrupted_transfer_continues runs only on OpenZFS.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zfs_core.capabilities import detect_capabilities

from tests.support import pools, session
from tests.support.roles import make_environment

Lzc = Callable[..., tuple[int, dict[str, Any]]]
Recipe = Callable[..., list[str]]
PLAYBOOKS = session.REPOSITORY / "playbooks" / "lzc"


@pytest.fixture
def recipe(lzc_path: Path, tmp_path: Path) -> Recipe:
    """Return a function that checks, runs and repeats a playbook. It returns the names of the changed tasks."""

    def run_recipe(name: str, **variables: object) -> list[str]:
        predicted_tasks, changed_tasks, repeated_tasks = (
            _run_playbook(name, lzc_path, tmp_path, variables, arguments) for arguments in (["--check"], [], [])
        )
        assert predicted_tasks == changed_tasks
        assert repeated_tasks == []
        return changed_tasks

    return run_recipe


def _run_playbook(
    name: str, lzc_path: Path, directory: Path, variables: dict[str, object], arguments: list[str]
) -> list[str]:
    extra_variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": "/usr/bin/python3",
        "zfs_hosts": "all",
        **variables,
    }
    argv = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        "localhost,",
        str(PLAYBOOKS / f"{name}.yml"),
        "-e",
        json.dumps(extra_variables),
        "-v",
        *arguments,
    ]
    env = make_environment(directory)
    env["PATH"] = f"{lzc_path.parent}:{env['PATH']}"
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    tasks = re.findall(r"^TASK \[(.*?)\] \**\n((?:(?!TASK|PLAY).*\n)*)", result.stdout, re.MULTILINE)
    return [task for task, output in tasks if re.search("^changed:", output, re.MULTILINE)]


def test_each_recipe_is_tested_and_documented() -> None:
    names = {path.stem for path in PLAYBOOKS.glob("*.yml")} - {"install"}
    page = (session.REPOSITORY / "docs" / "lzc.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| .* \| `zfs_", page, re.MULTILINE)) == names
    assert set(re.findall(r'recipe\(\s*"(\w+)"', Path(__file__).read_text())) == names


def test_only_the_newest_snapshots_are_kept(recipe: Recipe, lzc: Lzc, root: str) -> None:
    lzc("create", f"{root}/below")
    for day in ("01", "02", "03"):
        lzc("snapshot", "--recursive", f"{root}@daily-2026-11-{day}")
    lzc("snapshot", f"{root}@other")
    lzc("hold", "keep", f"{root}/below@daily-2026-11-02")
    changed_tasks = recipe("snapshot_with_retention", zfs_dataset=root, zfs_keep=2)
    assert len(changed_tasks) == 2
    short_names = [name.partition("@")[2] for name in lzc("list", "--type=snapshot", "--depth=0", root)[1]["names"]]
    assert short_names[:2] == ["daily-2026-11-03", "other"]
    assert len(short_names) == 3 and short_names[2].startswith("daily-")
    below = lzc("list", "--type=snapshot", f"{root}/below")[1]["names"]
    assert f"{root}/below@daily-2026-11-02" in below and f"{root}/below@daily-2026-11-01" not in below


@pytest.mark.slow
def test_a_clone_is_created_and_removed(recipe: Recipe, lzc: Lzc, root: str, root_path: Path) -> None:
    lzc("create", f"{root}/data")
    (root_path / "data/file").write_text("data")
    variables = {"zfs_dataset": f"{root}/data", "zfs_clone": f"{root}/test"}
    assert recipe("clone_for_test", **variables) == ["Take the snapshot", "Clone it"]
    (root_path / "test/file").write_text("changed by the test")
    assert (root_path / "data/file").read_text() == "data"
    assert recipe("clone_for_test", **variables, zfs_state="absent") == ["Destroy the clone", "Destroy the snapshot"]
    assert lzc("list", "--type=filesystem,snapshot", root)[1]["names"] == [root, f"{root}/data"]


def test_changes_are_replicated(recipe: Recipe, lzc: Lzc, lzc_path: Path, root: str, root_path: Path) -> None:
    lzc("create", f"{root}/data")
    (root_path / "data/file").write_text("first")
    variables = {"zfs_dataset": f"{root}/data", "zfs_copy": f"{root}/copy", "zfs_receiver": [str(lzc_path)]}
    expected_tasks = ["Take the snapshot", "Send the changes since the newest common snapshot"]
    assert recipe("replicate", **variables, zfs_snapshot="copy-1") == expected_tasks
    (root_path / "data/file").write_text("second")
    assert recipe("replicate", **variables, zfs_snapshot="copy-2") == expected_tasks
    assert lzc("list", "--type=snapshot", f"{root}/copy")[1]["names"] == [f"{root}/copy@copy-{n}" for n in (1, 2)]
    pools.run("zfs", "mount", f"{root}/copy")
    assert (root_path / "copy/file").read_text() == "second"
    lzc("snapshot", f"{root}/copy@copy-3")
    with pytest.raises(AssertionError, match="already exists"):
        _run_playbook("replicate", lzc_path, root_path, {**variables, "zfs_snapshot": "copy-3"}, [])


def test_an_interrupted_transfer_continues(
    recipe: Recipe, lzc: Lzc, lzc_path: Path, root: str, root_path: Path
) -> None:
    if not detect_capabilities().receive_options:
        pytest.skip("zfs-fuse cannot continue transfers: this test runs on OpenZFS")
    lzc("create", f"{root}/data")
    (root_path / "data/file").write_bytes(os.urandom(8 << 20))
    lzc("snapshot", f"{root}/data@copy-1")
    interrupted = f"head -c 4000000 | {lzc_path} receive --resumable {root}/copy@copy-1"
    assert lzc("send", f"{root}/data@copy-1", "--", "sh", "-c", interrupted)[0] != 0
    variables = {"zfs_dataset": f"{root}/data", "zfs_copy": f"{root}/copy", "zfs_receiver": [str(lzc_path)]}
    _, check, run = (
        _run_playbook("replicate", lzc_path, root_path, {**variables, "zfs_snapshot": "copy-1"}, arguments)
        for arguments in (["--check"], [], [])
    )
    assert (check, run) == (["Continue the interrupted transfer"], [])
    pools.run("zfs", "mount", f"{root}/copy")
    assert (root_path / "copy/file").read_bytes() == (root_path / "data/file").read_bytes()


@pytest.mark.slow
def test_a_snapshot_is_held_and_released(recipe: Recipe, lzc: Lzc, root: str) -> None:
    lzc("create", f"{root}/var")
    variables = {"zfs_dataset": root, "zfs_tag": "14.2"}
    assert len(recipe("hold_before_upgrade", **variables)) == 2
    assert lzc("destroy", f"{root}/var@before-14.2")[1]["error"]["kind"] == "in_use"
    assert len(recipe("hold_before_upgrade", **variables, zfs_state="absent")) == 2
    assert lzc("list", "--type=snapshot", root)[1]["names"] == []


def test_a_dataset_is_rolled_back(recipe: Recipe, lzc: Lzc, root: str, root_path: Path) -> None:
    (root_path / "file").write_text("first")
    lzc("snapshot", f"{root}@before")
    (root_path / "file").write_text("second")
    lzc("snapshot", f"{root}@newer")
    assert recipe("roll_back", zfs_snapshot=f"{root}@before", zfs_destroy_newer=True) == ["Roll back"]
    assert (root_path / "file").read_text() == "first"
