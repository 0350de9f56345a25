"""`python -m tests.jail_zfs.alone STORY DIRECTORY`, as root in its own mount and process namespaces: a private zfs-fuse
daemon that can be killed at any time.

Stories: `dead` (no daemon answers), `killed` (the daemon is killed while objects are created, and restarted).
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

from sandbox_gateway import zfs
from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import Sandbox, Snapshot
from tests.jail_zfs import pools

_POOL = "alone"


def _hide_daemon() -> None:
    """Hide the machine's daemon and its mounts from here on (visible mounts would be pinned)."""
    for directory in ("/run/zfs", "/run/lock/zfs", "/var/lib/zfs"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True, timeout=30)
    _unmount("")


def _unmount(below: str) -> None:
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, path, kind, *_ = line.split()
        if kind == "fuse.zfs" and path.startswith(below):
            subprocess.run(["umount", "-l", path], check=False, timeout=30)


@contextlib.contextmanager
def _private_pool(directory: Path) -> Iterator[Path]:
    """Run a daemon with a pool; yields the daemon's pid file."""
    pid_file, image = directory / "pid", directory / "image"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    pools.start_daemon(pid_file)
    try:
        pools.run("zpool", "create", "-O", "atime=off", "-m", str(directory / "mnt"), _POOL, str(image))
        yield pid_file
    finally:
        pools.run("zpool", "destroy", "-f", _POOL, check=False)
        pools.stop_daemon(pid_file)


def _kill(pid_file: Path) -> None:
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


def _restart_daemon(pid_file: Path, directory: Path) -> None:
    _unmount(str(directory))
    pools.start_daemon(pid_file)


def dead(directory: Path) -> None:
    locks = directory / "locks"
    try:
        ZfsStorage("tank/grove", lock_directory=locks).open()
    except BackendFailed as error:
        assert "zfs-fuse daemon is running" in error.message, error.message
        assert "start it" in error.message, error.message
    else:
        raise AssertionError("a daemon answered")
    with _private_pool(directory) as pid_file:
        storage = ZfsStorage(_POOL, lock_directory=locks)
        storage.open()
        base = storage.snapshots.create_base(Snapshot(), lambda path: (path / "file").touch() or None)
        sandbox = Sandbox(name="web")
        storage.instances.clone(base.id, sandbox.instance)
        storage.instances.save(sandbox)
        _kill(pid_file)
        for use in (
            lambda: storage.instances.clone(base.id, "0" * 12),
            lambda: storage.instances.save(sandbox),
            lambda: storage.snapshots.capture(sandbox.instance, Snapshot()),
            lambda: storage.instances.has_diverged(sandbox.instance, base.id),
            lambda: storage.instances.discard(sandbox.instance),
            lambda: storage.snapshots.destroy(base.id),
            lambda: storage.instances.usage(sandbox.instance),
            storage.scan,
        ):
            try:
                use()
            except BackendFailed as error:
                assert "ZFS cannot be reached" in error.message, error.message
            else:
                raise AssertionError("it cannot have been done")
        storage.close()
        _restart_daemon(pid_file, directory)
        again = ZfsStorage(_POOL, lock_directory=locks)
        again.open()
        found = again.scan()
        assert ([s.id for s in found.sandboxes], [s.id for s in found.snapshots]) == ([sandbox.id], [base.id]), found
        again.instances.mount(sandbox.instance)
        assert (again.instances.path(sandbox.instance) / "file").exists()
        again.close()


def killed(directory: Path) -> None:
    """Check that every acknowledged object is there, and that every other one is complete or does not exist."""
    locks = directory / "locks"
    dice = random.Random(int(os.environ.get("GROVE_TEST_SEED", "7")))
    with _private_pool(directory) as pid_file:
        storage = ZfsStorage(_POOL, lock_directory=locks)
        storage.open()
        base = storage.snapshots.create_base(Snapshot(), lambda path: (path / "file").touch() or None)
        storage.close()
        answered: dict[str, str] = {}
        for _ in range(5):
            storage = ZfsStorage(_POOL, lock_directory=locks)
            storage.open()
            storage.scan()
            busy = threading.Thread(target=_create_until_failure, args=(storage, base.id, answered))
            busy.start()
            time.sleep(0.2 + dice.random() * 0.3)
            _kill(pid_file)
            busy.join(60)
            assert not busy.is_alive()
            storage.close()
            _restart_daemon(pid_file, directory)
            _check(locks, answered)


def _create_until_failure(storage: ZfsStorage, base: str, answered: dict[str, str]) -> None:
    with contextlib.suppress(GatewayError):
        while True:
            sandbox = Sandbox(name="web", metadata={"text": "x" * 5000})
            storage.instances.clone(base, sandbox.instance)
            storage.instances.save(sandbox)
            answered[sandbox.id] = "sandbox"
            snapshot = storage.snapshots.capture(sandbox.instance, Snapshot(recipe={"text": "y" * 20_000}))
            answered[snapshot.id] = "snapshot"
            storage.snapshots.save(snapshot)


def _check(locks: Path, answered: dict[str, str]) -> None:
    storage = ZfsStorage(_POOL, lock_directory=locks)
    storage.open()
    found = storage.scan()
    ids = {record.id for record in (*found.sandboxes, *found.snapshots)}
    assert set(answered) <= ids, set(answered) - ids
    assert len(ids - set(answered)) <= 6, "the base, and one that was made and not answered for each time"
    assert all("removed, because it was never committed" in note for note in found.repaired), found.repaired
    for name in zfs.list_datasets(f"{_POOL}/sandboxes", depth=1)[1:]:
        assert name.rpartition("/")[2] in {sandbox.instance for sandbox in found.sandboxes}
    assert storage.scan().repaired == []
    storage.close()


if __name__ == "__main__":
    _hide_daemon()
    {"dead": dead, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
