"""Test that only one gateway can use a root dataset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zfs_core

from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.jail_zfs.storage import host_lock
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from tests.support.waiting import wait_until


def _change_owner(root: str, **changes: object) -> None:
    zfs_core.lzc_set_prop(
        root, host_lock.OWNER_PROPERTY, json.dumps(json.loads(host_lock._read_own_identity()) | changes)
    )


def test_two_gateways_cannot_share_a_root(storage: ZfsStorage, root: str, lock_directory: Path) -> None:
    with pytest.raises(Conflict, match="another gateway on this machine"):
        ZfsStorage(root, state_root=lock_directory).open()
    assert storage.scan().repaired == [], "the first gateway no longer works"
    storage.close()
    second_storage = ZfsStorage(root, state_root=lock_directory)
    assert second_storage.open() == []
    second_storage.close()
    assert zfs_core.local_props(root) == {}


def test_the_owner_property_prevents_sharing_without_a_shared_lock(root: str, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage\n"
        "ZfsStorage(sys.argv[1], state_root=pathlib.Path(sys.argv[2])).open()\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", program, root, str(tmp_path / "one")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other_gateway:
        assert other_gateway.stdout is not None and other_gateway.stdout.readline() == "open\n"
        with pytest.raises(Conflict, match=f"is still running .process {other_gateway.pid} of host"):
            ZfsStorage(root, state_root=tmp_path / "two").open()
        other_gateway.kill()
    storage = ZfsStorage(root, state_root=tmp_path / "two")
    assert storage.open() == [
        f"{root}: taken over from process {other_gateway.pid} of host {os.uname().nodename}, which has exited"
    ]
    storage.close()


def test_startup_waits_for_the_commands_of_a_killed_gateway(root: str, lock_directory: Path, tmp_path: Path) -> None:
    """Commands that outlive a killed gateway could change datasets that the next gateway has already scanned."""
    zfs_wrapper = tmp_path / "zfs"
    zfs_wrapper.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = snapshot ]; then touch {tmp_path}/began; sleep 2; fi\n'
        f'PATH="${{PATH#{tmp_path}:}}" exec zfs "$@"\n'
    )
    zfs_wrapper.chmod(0o755)
    program = (
        "import sys, pathlib\n"
        "import zfs_core\n"
        "from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage\n"
        "storage = ZfsStorage(sys.argv[1], state_root=pathlib.Path(sys.argv[2]))\n"
        "storage.open()\n"
        "zfs_core.lzc_snapshot([sys.argv[1] + '@late'])\n"
    )
    argv = [sys.executable, "-c", program, root, str(lock_directory)]
    with subprocess.Popen(argv, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}) as gateway:
        wait_until((tmp_path / "began").exists)
        with pytest.raises(Conflict, match="another gateway on this machine"):
            ZfsStorage(root, state_root=lock_directory).open()
        gateway.kill()
    successor = ZfsStorage(root, state_root=lock_directory)
    assert "which has exited" in successor.open()[0]
    assert zfs_core.lzc_exists(f"{root}@late"), "the startup did not wait for the command"
    successor.close()


def test_an_owner_from_an_earlier_boot_is_replaced(root: str, lock_directory: Path) -> None:
    _change_owner(root, kernel="another", pid=1, host="elsewhere")
    storage = ZfsStorage(root, state_root=lock_directory)
    assert "exited when its machine stopped" in storage.open()[0]
    storage.close()


def test_an_owner_in_another_container_is_respected(root: str, lock_directory: Path) -> None:
    _change_owner(root, host="elsewhere", pid=1)
    with pytest.raises(Conflict, match=f"zfs inherit sandbox:owner {root}"):
        ZfsStorage(root, state_root=lock_directory).open()


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}", '{"pid": "x"}'])
def test_an_invalid_owner_is_replaced(root: str, lock_directory: Path, text: str) -> None:
    zfs_core.lzc_set_prop(root, host_lock.OWNER_PROPERTY, text)
    storage = ZfsStorage(root, state_root=lock_directory)
    assert f"replaced the recorded owner {text!r}, which is not valid" in storage.open()[0]
    storage.close()
