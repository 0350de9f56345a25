"""Test the storage with a private zfs-fuse daemon that can be killed.

Run `python -m tests.jail_zfs.alone SCENARIO DIRECTORY` as root in new mount and PID namespaces. The scenarios are
`dead`, in which the daemon is not running, and `killed`, in which it is killed while objects are created, and then
restarted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zfs_core

from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support import pools

_POOL_NAME = "alone"


def _hide_daemon() -> None:
    """Hide the machine's daemon from this process, and unmount its file systems, which would otherwise stay in use."""
    for directory in ("/run/zfs", "/run/lock/zfs", "/var/lib/zfs"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True, timeout=30)
    _unmount("")


def _unmount(prefix: str) -> None:
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, path, kind, *_ = line.split()
        if kind == "fuse.zfs" and path.startswith(prefix):
            subprocess.run(["umount", "-l", path], check=False, timeout=30)


@contextlib.contextmanager
def _private_pool(directory: Path) -> Iterator[Path]:
    """Run a private daemon with a pool. Yields the daemon's pid file."""
    pid_file, image = directory / "pid", directory / "image"
    with image.open("wb") as file:
        file.truncate(2048 << 20)  # sparse; an engine refuses forks if too little of a pool is free
    pools.start_daemon(pid_file)
    try:
        pools.run("zpool", "create", "-O", "atime=off", "-m", str(directory / "mnt"), _POOL_NAME, str(image))
        yield pid_file
    finally:
        pools.run("zpool", "destroy", "-f", _POOL_NAME, check=False)
        pools.stop_daemon(pid_file)


def _kill(pid_file: Path) -> None:
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


def _restart_daemon(pid_file: Path, directory: Path) -> None:
    _unmount(str(directory))
    pools.start_daemon(pid_file)


def check_dead_daemon(directory: Path) -> None:
    lock_directory = directory / "locks"
    try:
        ZfsStorage("tank/grove", state_root=lock_directory).open()
    except BackendFailed as error:
        assert "zfs-fuse daemon is running" in error.message, error.message
        assert "start it" in error.message, error.message
    else:
        raise AssertionError("the storage was opened without a daemon")
    with _private_pool(directory) as pid_file:
        storage = ZfsStorage(_POOL_NAME, state_root=lock_directory)
        storage.open()
        base = storage.snapshots.create_base(Snapshot(), lambda path: (path / "file").touch() or None)
        sandbox = Sandbox(name="web")
        storage.instances.clone(base.id, sandbox.instance)
        storage.instances.save(sandbox)
        _kill(pid_file)
        for operation in (
            lambda: storage.instances.clone(base.id, "0" * 12),
            lambda: storage.instances.save(sandbox),
            lambda: storage.snapshots.capture(sandbox.instance, Snapshot()),
            lambda: storage.instances.has_diverged(sandbox.instance, base.id),
            lambda: storage.instances.discard(sandbox.instance),
            lambda: storage.snapshots.destroy(base.id),
            lambda: storage.instances.count_unique_bytes(sandbox.instance),
            storage.scan,
        ):
            try:
                operation()
            except BackendFailed as error:
                assert "ZFS cannot be reached" in error.message, error.message
            else:
                raise AssertionError("the operation succeeded without a daemon")
        storage.close()
        _restart_daemon(pid_file, directory)
        restarted_storage = ZfsStorage(_POOL_NAME, state_root=lock_directory)
        restarted_storage.open()
        scan = restarted_storage.scan()
        assert ([s.id for s in scan.sandboxes], [s.id for s in scan.snapshots]) == ([sandbox.id], [base.id]), scan
        restarted_storage.instances.mount(sandbox.instance)
        assert (restarted_storage.instances.path(sandbox.instance) / "file").exists()
        restarted_storage.close()


def check_killed_daemon(directory: Path) -> None:
    """Check that every acknowledged object exists, and that every other object is complete or does not exist."""
    lock_directory = directory / "locks"
    rng = random.Random(int(os.environ.get("GROVE_TEST_SEED", "7")))
    with _private_pool(directory) as pid_file:
        storage = ZfsStorage(_POOL_NAME, state_root=lock_directory)
        storage.open()
        base = storage.snapshots.create_base(Snapshot(), lambda path: (path / "file").touch() or None)
        storage.close()
        acknowledged_objects: dict[str, str] = {}
        for _ in range(5):
            storage = ZfsStorage(_POOL_NAME, state_root=lock_directory)
            storage.open()
            storage.scan()
            writer = threading.Thread(target=_create_until_failure, args=(storage, base.id, acknowledged_objects))
            writer.start()
            time.sleep(0.2 + rng.random() * 0.3)
            _kill(pid_file)
            writer.join(60)
            assert not writer.is_alive()
            storage.close()
            _restart_daemon(pid_file, directory)
            _check_objects(lock_directory, acknowledged_objects)


def _create_until_failure(storage: ZfsStorage, base_id: str, acknowledged_objects: dict[str, str]) -> None:
    with contextlib.suppress(GatewayError):
        while True:
            sandbox = Sandbox(name="web", metadata={"text": "x" * 5000})
            storage.instances.clone(base_id, sandbox.instance)
            storage.instances.save(sandbox)
            acknowledged_objects[sandbox.id] = "sandbox"
            snapshot = storage.snapshots.capture(sandbox.instance, Snapshot(recipe={"text": "y" * 20_000}))
            acknowledged_objects[snapshot.id] = "snapshot"
            storage.snapshots.save(snapshot)


def _check_objects(lock_directory: Path, acknowledged_objects: dict[str, str]) -> None:
    storage = ZfsStorage(_POOL_NAME, state_root=lock_directory)
    storage.open()
    scan = storage.scan()
    ids = {record.id for record in (*scan.sandboxes, *scan.snapshots)}
    assert set(acknowledged_objects) <= ids, set(acknowledged_objects) - ids
    assert len(ids - set(acknowledged_objects)) <= 6, (
        "the scan found more than the base and one unacknowledged object per kill"
    )
    assert all("removed, because it was never committed" in note for note in scan.repaired), scan.repaired
    for name in zfs_core.list_datasets(f"{_POOL_NAME}/sandboxes", depth=1)[1:]:
        assert name.rpartition("/")[2] in {sandbox.instance for sandbox in scan.sandboxes}
    assert storage.scan().repaired == []
    storage.close()


if __name__ == "__main__":
    _hide_daemon()
    {"dead": check_dead_daemon, "killed": check_killed_daemon}[sys.argv[1]](Path(sys.argv[2]))
