"""ZFS that is unavailable or fails in the middle of operations: zfs-fuse's daemon in its own namespace."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from sandbox_gateway import zfs
from sandbox_gateway.zfs import process
from tests.support import session


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs namespaces (Linux)")
@pytest.mark.parametrize("story", ["dead", "killed"])
def test_an_unavailable_daemon(story: str, need_root: None) -> None:
    directory = session.run_dir() / f"zfs-{story}"
    directory.mkdir()
    # processes that the story leaves running end with the shell, which is the first process there
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*unshare, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.jail_zfs.alone", story]
    done = subprocess.run([*argv, str(directory)], cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(directory)


def test_a_missing_zfs_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(process, "_MORE_PATH", "/nonexistent")
    with pytest.raises(zfs.exceptions.ZFSInitializationFailed, match="run the role jail_zfs_host"):
        zfs.check_reachable()
