"""ZFS that is not there, and that goes away in the middle of things: zfs-fuse's daemon in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support import session


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs namespaces (Linux)")
@pytest.mark.parametrize("story", ["dead", "killed"])
def test_the_daemon_is(story: str, need_root: None) -> None:
    directory = session.run_dir() / f"zfs-{story}"
    directory.mkdir()
    # whatever the story leaves running ends with the shell that is the first process there
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*unshare, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.jail_zfs.alone", story]
    done = subprocess.run([*argv, str(directory)], cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(directory)


def test_without_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandbox_gateway.hosts.jail_zfs import zfs, zfs_command

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(zfs_command, "_MORE_PATH", "/nonexistent")
    with pytest.raises(zfs.exceptions.ZFSInitializationFailed, match="run the role jail_zfs_host"):
        zfs.reachable()
