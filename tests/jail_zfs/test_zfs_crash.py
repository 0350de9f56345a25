"""Test the storage while ZFS is unavailable or fails, with a private zfs-fuse daemon in its own namespace."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import zfs_core
from zfs_core import process

from tests.support import pools, session


@pools.needs_zfs_fuse
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux namespaces")
@pytest.mark.parametrize("scenario", ["dead", "killed"])
def test_storage_survives_an_unavailable_daemon(scenario: str, requires_root: None) -> None:
    directory = session.get_run_dir() / f"zfs-{scenario}"
    directory.mkdir()
    # The shell is the first process of the namespace: when it exits, the kernel kills processes that still run there.
    unshare_command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    argv = [*unshare_command, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.jail_zfs.alone", scenario]
    result = subprocess.run(
        [*argv, str(directory)], cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    shutil.rmtree(directory)


def test_a_missing_zfs_command_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(process, "_EXTRA_PATH", "/nonexistent")
    with pytest.raises(zfs_core.exceptions.ZFSInitializationFailed, match="add its directory to PATH"):
        zfs_core.check_reachable()
