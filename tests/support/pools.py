"""Create private pools on real ZFS. Starts the zfs-fuse daemon if necessary, and stops it when no pools are left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zfs_core
from zfs_core.run import mount_lock

from tests.support import session
from tests.support.waiting import wait_until

# A machine can have only one daemon, so all test runs share this lock.
_LOCK_FILE = Path("/var/run/grove-test-zfs-fuse.lock")
_PID_FILE = Path("/var/run/grove-test-zfs-fuse.pid")

IS_OPENZFS = Path("/dev/zfs").exists()
needs_zfs_fuse = pytest.mark.skipif(
    IS_OPENZFS, reason="needs a daemon of its own, but this machine has ZFS in its kernel"
)


@dataclass(frozen=True)
class Pool:
    name: str
    mount_point: Path


def run(*argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``zfs`` or ``zpool`` directly, without the gateway's code."""
    env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ['PATH']}:/sbin:/usr/sbin"}
    lock = mount_lock(argv[1], timeout, None) if argv[1] in ("create", "mount") else contextlib.nullcontext()
    with lock:
        result = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, check=False
        )
    assert not check or result.returncode == 0, f"{argv}: {result.stderr}"
    return result


def is_zfs_available() -> bool:
    return run("zpool", "list", "-H", "-o", "name", check=False).returncode == 0


def start_daemon(pid_file: Path) -> None:
    """Start zfs-fuse. It may outlive this run, so its environment does not contain the run's mark.

    zfs-fuse refuses to start if its pid file exists.
    """
    env = {key: value for key, value in os.environ.items() if key != session.RUN_VARIABLE}
    program = shutil.which("zfs-fuse", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert program, "ZFS is not running, and zfs-fuse is not installed"
    deadline = time.monotonic() + 20
    while not is_zfs_available():
        assert time.monotonic() < deadline, "zfs-fuse does not start"
        if pid_file.exists() and not _is_running(int(pid_file.read_text() or 0)):
            pid_file.unlink()
        # It also refuses to start for a moment after another daemon has exited.
        argv = [program, "--no-kstat-mount", "-p", str(pid_file)]
        subprocess.run(argv, stdin=subprocess.DEVNULL, env=env, timeout=30, check=False)
        time.sleep(0.2)


def stop_daemon(pid_file: Path) -> None:
    pid = int(pid_file.read_text())
    if not _is_running(pid):
        pid_file.unlink()
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    pid_file.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Return whether the process is a running zfs-fuse. A stale pid file may contain the pid of another process."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return name.endswith("(zfs-fuse") and fields.split()[0] != "Z"
    except OSError:
        return False


def destroy_all(dataset: str) -> None:
    """Destroy a dataset and all its descendants.

    Retries, because zfs-fuse reports a mounted dataset as busy at the first attempt, and for as long as the dataset is
    mounted in a mount namespace that another test created.
    """
    deadline = time.monotonic() + 60
    while (result := run("zfs", "destroy", "-R", dataset, check=False)).returncode != 0:
        if "does not exist" in result.stderr:
            return
        assert time.monotonic() < deadline, result.stderr
        time.sleep(0.05)


@contextlib.contextmanager
def _daemon_locked() -> Iterator[Path]:
    """Prevent other test runs from starting or stopping the daemon. Yields the path of its pid file."""
    with _LOCK_FILE.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _PID_FILE


@contextlib.contextmanager
def pool(name: str, directory: Path, *, megabytes: int = 1024) -> Iterator[Pool]:
    """Create a pool on a sparse file in ``directory``, mount it there, and destroy it with all datasets at the end."""
    image, mount_point = directory / f"{name}.img", directory / name
    with _daemon_locked() as pid_file:
        if not is_zfs_available():
            start_daemon(pid_file)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        run("zpool", "create", "-O", "atime=off", "-m", str(mount_point), name, str(image))
    try:
        with _kept_responsive(mount_point):
            yield Pool(name, mount_point)
    finally:
        with _daemon_locked() as pid_file:
            _destroy_pool(name)
            image.unlink()
            shutil.rmtree(mount_point, ignore_errors=True)
            _stop_unused_daemon(pid_file)


def destroy_pools(names: Iterable[str]) -> None:
    """Destroy the pools with these names, which belong to killed runs."""
    with _daemon_locked() as pid_file:
        for name in names:
            _destroy_pool(name)
        _stop_unused_daemon(pid_file)


def _stop_unused_daemon(pid_file: Path) -> None:
    """Stop the daemon that ``pool`` started, if no pools are left."""
    if pid_file.exists() and not _list_pool_names():
        stop_daemon(pid_file)


@contextlib.contextmanager
def _kept_responsive(mount_point: Path) -> Iterator[None]:
    """Keep sending requests to zfs-fuse inside the context, so that it cannot become hung.

    A single thread of zfs-fuse polls all file systems, and then does a blocking read from one that has a request. If
    the kernel withdraws that request in between, because its process was stopped or killed, zfs-fuse reads no requests
    for any file system until the one that it is reading from receives another request.
    """
    stop_event = threading.Event()

    def watch() -> None:
        while not stop_event.wait(1):
            if not _all_respond([mount_point], 2):
                _all_respond(_list_mount_points_below(mount_point), 10)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def _list_mount_points_below(mount_point: Path) -> list[Path]:
    mount_points = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [path for path in mount_points if path.is_relative_to(mount_point)]


def _all_respond(mounts: list[Path], timeout: float) -> bool:
    """Query the size of each file system, and return whether all respond in time.

    A hung request blocks only its thread.
    """

    def query(mount: Path) -> None:
        with contextlib.suppress(OSError):
            os.statvfs(mount)

    threads = [threading.Thread(target=query, args=(mount,), daemon=True) for mount in mounts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def mounts_kept_in_use() -> Iterator[None]:
    """Create a mount namespace that keeps all current mounts in use inside the context, even if they are unmounted.

    Other tests create such namespaces all the time. On FreeBSD, an unfinished forced unmount has the same effect.
    """
    holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sleep", "infinity"])
    own_namespace = Path("/proc/self/ns/mnt").readlink()
    try:
        wait_until(lambda: Path(f"/proc/{holder.pid}/ns/mnt").readlink() != own_namespace)
        yield
    finally:
        holder.kill()
        holder.wait(30)


@contextlib.contextmanager
def kept_unmountable(dataset: str) -> Iterator[None]:
    """Unmount a dataset, and keep it in use inside the context, so that it cannot be mounted.

    OpenZFS mounts a dataset that another mount namespace uses, but not one that is being sent. The dataset must contain
    2 MiB, because `zfs send` sets the size of the pipe to 1 MiB.
    """
    if not IS_OPENZFS:
        with mounts_kept_in_use():
            zfs_core.unmount(dataset)
            yield
        return
    zfs_core.unmount(dataset)
    sender = _start_sending(dataset)
    try:
        yield
    finally:
        sender.kill()
        sender.communicate(timeout=30)


def _start_sending(dataset: str) -> subprocess.Popen[bytes]:
    """Start `zfs send`, and wait until it owns the dataset. Retries while another mount namespace uses the dataset."""
    deadline = time.monotonic() + 30
    while True:
        sender = subprocess.Popen(["zfs", "send", dataset], stdout=subprocess.PIPE, bufsize=0)
        assert sender.stdout is not None
        if sender.stdout.read(1):
            return sender
        sender.communicate(timeout=30)
        assert time.monotonic() < deadline, f"{dataset} cannot be sent"
        time.sleep(0.1)


def read_mount_ids(directory: Path) -> dict[str, str]:
    """Return the kernel's ids of the mounts below a directory, by path. Unmounting and mounting again changes an id."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {row[4]: row[0] for row in rows if Path(row[4]).is_relative_to(directory)}


def _destroy_pool(name: str) -> None:
    """Destroy a pool. Retries, because mount namespaces that other tests create keep its mounts in use.

    Checks the list of pools, because a failed attempt may also report that a dataset in the pool does not exist.
    """
    deadline = time.monotonic() + 180
    while name in _list_pool_names():
        result = run("zpool", "destroy", "-f", name, check=False)
        assert time.monotonic() < deadline, f"the pool {name} cannot be destroyed: {result.stderr}"
        time.sleep(0.1)


def _list_pool_names() -> list[str]:
    return run("zpool", "list", "-H", "-o", "name").stdout.split()
