"""Private pools on real ZFS: starts zfs-fuse's daemon if none runs, and ends it when no pool is left."""

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

from sandbox_gateway.zfs.run import mount_lock
from tests.support import session
from tests.support.waiting import eventually

# the machine has only one daemon, so it has only one lock, too
_LOCK = Path("/var/run/grove-test-zfs-fuse.lock")
_PID_FILE = Path("/var/run/grove-test-zfs-fuse.pid")


@dataclass(frozen=True)
class Pool:
    name: str
    mount_point: Path


def run(*argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``zfs`` or ``zpool``, as a person would."""
    env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ['PATH']}:/sbin:/usr/sbin"}
    turn = mount_lock(argv[1], timeout, None) if argv[1] in ("create", "mount") else contextlib.nullcontext()
    with turn:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, check=False
        )
    assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
    return done


def is_answering() -> bool:
    return run("zpool", "list", "-H", "-o", "name", check=False).returncode == 0


def start_daemon(pid_file: Path) -> None:
    """Start zfs-fuse, which refuses to start if its pid file exists. It may outlive this run, so it lacks the run's
    mark.
    """
    env = {key: value for key, value in os.environ.items() if key != session.MARK}
    program = shutil.which("zfs-fuse", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert program, "neither does ZFS answer, nor is zfs-fuse installed"
    deadline = time.monotonic() + 20
    while not is_answering():
        assert time.monotonic() < deadline, "zfs-fuse does not start"
        if pid_file.exists() and not _is_running(int(pid_file.read_text() or 0)):
            pid_file.unlink()
        # it also refuses for a moment after another daemon has ended
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
    """Whether the pid is a running zfs-fuse; a stale pid file may name any other process."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return name.endswith("(zfs-fuse") and rest.split()[0] != "Z"
    except OSError:
        return False


def destroy_all(dataset: str) -> None:
    """Destroy the dataset and everything below it. zfs-fuse says "busy" once for each mounted dataset, and also while a
    new mount namespace (of another test) holds one.
    """
    deadline = time.monotonic() + 60
    while (done := run("zfs", "destroy", "-R", dataset, check=False)).returncode != 0:
        if "does not exist" in done.stderr:
            return
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.05)


@contextlib.contextmanager
def _exclusive() -> Iterator[Path]:
    """A lock on starting and ending the daemon, shared by all state directories; yields the path of its pid file."""
    with _LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _PID_FILE


@contextlib.contextmanager
def pool(name: str, directory: Path, *, megabytes: int = 1024) -> Iterator[Pool]:
    """A pool on a sparse file in ``directory``, mounted there; destroyed at the end with all its content."""
    image, mount_point = directory / f"{name}.img", directory / name
    with _exclusive() as pid_file:
        if not is_answering():
            start_daemon(pid_file)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        run("zpool", "create", "-O", "atime=off", "-m", str(mount_point), name, str(image))
    try:
        with _keep_awake(mount_point):
            yield Pool(name, mount_point)
    finally:
        with _exclusive() as pid_file:
            _destroy(name)
            image.unlink()
            shutil.rmtree(mount_point, ignore_errors=True)
            _stop_unused_daemon(pid_file)


def destroy_left(names: Iterable[str]) -> None:
    """Destroy the pools of runs that were killed."""
    with _exclusive() as pid_file:
        for name in names:
            _destroy(name)
        _stop_unused_daemon(pid_file)


def _stop_unused_daemon(pid_file: Path) -> None:
    """End the daemon that was started for pools, with the last of them."""
    if pid_file.exists() and not run("zpool", "list", "-H", "-o", "name").stdout.strip():
        stop_daemon(pid_file)


@contextlib.contextmanager
def _keep_awake(mount_point: Path) -> Iterator[None]:
    """Keep this zfs-fuse awake inside the context.

    Its only listener polls all file systems and then does a blocking read from one with a request. If the kernel
    withdraws that request in between, because its process was stopped or killed, zfs-fuse reads no request for any
    file system until this one has another."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if not _all_answer([mount_point], 2):
                _all_answer(_mounted_below(mount_point), 10)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _mounted_below(mount_point: Path) -> list[Path]:
    targets = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [target for target in targets if target.is_relative_to(mount_point)]


def _all_answer(mounts: list[Path], seconds: float) -> bool:
    """Ask each file system for its size; returns whether all answered in time. Hung requests block only threads."""

    def ask(mount: Path) -> None:
        with contextlib.suppress(OSError):
            os.statvfs(mount)

    asking = [threading.Thread(target=ask, args=(mount,), daemon=True) for mount in mounts]
    for thread in asking:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in asking:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in asking)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Keep current mounts in use inside the context, even if they are unmounted: a new mount namespace holds them, too.

    Other tests create such namespaces all the time. On FreeBSD, a forced unmount that has not ended has the same
    effect.
    """
    holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sleep", "infinity"])
    own = Path("/proc/self/ns/mnt").readlink()
    try:
        eventually(lambda: Path(f"/proc/{holder.pid}/ns/mnt").readlink() != own)
        yield
    finally:
        holder.kill()
        holder.wait(30)


def mount_ids(below: Path) -> dict[str, str]:
    """The kernel's ids of the mounts below a directory; a mount that is unmounted and mounted again has a new id."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {row[4]: row[0] for row in rows if Path(row[4]).is_relative_to(below)}


def _destroy(name: str) -> None:
    """Tries repeatedly: new mount namespaces of other tests hold the pool's mounts."""
    deadline = time.monotonic() + 180
    while (done := run("zpool", "destroy", "-f", name, check=False)).returncode != 0:
        if "no such pool" in done.stderr:
            return
        assert time.monotonic() < deadline, f"the pool {name} cannot be destroyed: {done.stderr}"
        time.sleep(0.1)
