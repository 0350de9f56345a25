"""Run ``zfs`` commands, serializing mounts if the installed ZFS requires it, and retrying while a dataset is busy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zfs_core import process
from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.command_register import waiting
from zfs_core.exceptions import ZFSGenericError
from zfs_core.hold_descriptors import wait_for_releases
from zfs_core.outcome import Outcome
from zfs_core.process import execute

_RETRY_SECONDS: dict[Cause | None, float] = {Cause.BUSY: 10.0, Cause.MOUNT_BUSY: 10.0, Cause.IN_USE: 0.8}
_MOUNTING_COMMANDS = frozenset({"create", "clone", "mount", "rename", "rollback", "receive"})
_MOUNT_PROPERTIES = {"mountpoint", "canmount", "sharenfs", "sharesmb", "zoned", "jailed"}
_REMOUNT_PROPERTIES = {"atime", "relatime", "devices", "exec", "setuid", "readonly", "rdonly", "xattr", "nbmand"}
_MOUNTING_PROPERTIES = frozenset(_MOUNT_PROPERTIES | _REMOUNT_PROPERTIES)
"""Properties for which `zfs set` and `zfs inherit` mount file systems, or mount them again with other options."""
_WAITING_SHARE = 3 / 4
_NEGLIGIBLE_SECONDS = 1.0
_MAX_LOCK_SECONDS = 10.0
"""How long a command keeps others from mounting. A command that takes longer is probably hung."""
_FUSE_DIRECTORY = Path("/var/run/zfs")


def run(
    *args: str,
    seconds: float | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    name: str | None = None,
    precheck: Callable[[float], None] | None = None,
    program: str = "zfs",
) -> Outcome:
    """Run ``zfs`` with ``args``. The other parameters and the exceptions are the same as for ``execute``.

    ``seconds`` includes the time spent waiting for other commands, which is at most three quarters of it, and the time
    of ``precheck``. The rest is left for the command, so that it is not killed because other commands were slow.

    ``precheck`` is called first, with its timeout. On zfs-fuse, no other command can mount a file system between it and
    the command.
    """
    seconds = process.TIMEOUT_SECONDS if seconds is None else seconds
    start = time.monotonic()
    wait_for_releases(seconds * _WAITING_SHARE)
    with contextlib.ExitStack() as stack:
        if _may_mount(args):
            waiting_seconds = max(0.0, start + seconds * _WAITING_SHARE - time.monotonic())
            stack.enter_context(mount_lock(args[0], waiting_seconds, name))
        if precheck is not None:
            precheck(max(0.0, start + seconds - time.monotonic()) / 2)
        waited_seconds = time.monotonic() - start
        remaining_seconds = seconds if waited_seconds < _NEGLIGIBLE_SECONDS else round(seconds - waited_seconds, 1)
        return execute(args, remaining_seconds, stdin, stdout, name, program)


def _may_mount(args: tuple[str, ...]) -> bool:
    """Return whether a command may mount a file system. `receive -u` only does so if `-F` replaces a mounted one."""
    if args[0] in ("set", "inherit"):
        return not _MOUNTING_PROPERTIES.isdisjoint(word.partition("=")[0] for word in args[1:-1])
    return args[0] in _MOUNTING_COMMANDS and not (args[0] == "receive" and "-u" in args and "-F" not in args)


def run_with_retries(*args: str, name: str | None = None, precheck: Callable[[float], None] | None = None) -> Outcome:
    """Run ``zfs`` with ``args``, and retry for a limited time while the dataset is busy.

    zfs-fuse unmounts a dataset before destroying it, and then reports it as busy until the daemon has written its data.
    That takes milliseconds, or seconds on a full pool. If a process has files open, the retries stop sooner, because
    the process rarely closes them in time.
    """
    start, delay = time.monotonic(), 0.01
    while True:
        outcome = run(*args, name=name, precheck=precheck)
        if time.monotonic() + delay - start > _RETRY_SECONDS.get(outcome.cause, 0.0):
            return outcome
        time.sleep(delay)
        delay = min(delay * 2, 0.25)


@contextlib.contextmanager
def mount_lock(verb: str, seconds: float, name: str | None) -> Iterator[None]:
    """On zfs-fuse, allow only one command on the machine to mount a file system at a time.

    Waits for at most ``seconds``. Meanwhile, ``list_running_commands`` contains the command. Releases the lock after
    ``_MAX_LOCK_SECONDS``, so that a hung command does not prevent all others.

    Threads of the zfs-fuse daemon announce new mounts to another thread through one pipe, each with two writes and
    without a lock. If the writes of two threads interleave, all file systems hang until the daemon is restarted. The
    two writes take microseconds, so they rarely meet those of a command that runs on without the lock.
    """
    if detect_capabilities().concurrent_mounts or not _FUSE_DIRECTORY.is_dir():
        yield
        return
    directory_fd = os.open(_FUSE_DIRECTORY, os.O_RDONLY)
    try:
        if not _try_lock(directory_fd):
            with waiting(f"zfs {verb}", name, seconds):
                _wait_for_lock(directory_fd, verb, seconds, name)
        release_timer = threading.Timer(_MAX_LOCK_SECONDS, fcntl.flock, (directory_fd, fcntl.LOCK_UN))
        release_timer.daemon = True
        release_timer.start()
        try:
            yield
        finally:
            release_timer.cancel()
            release_timer.join()  # Otherwise, it could unlock another file with the same descriptor.
    finally:
        os.close(directory_fd)


def _wait_for_lock(directory_fd: int, verb: str, seconds: float, name: str | None) -> None:
    deadline = time.monotonic() + seconds
    while not _try_lock(directory_fd):
        if time.monotonic() > deadline:
            raise ZFSGenericError(
                errno.ETIMEDOUT,
                name,
                f"`zfs {verb}` waited {seconds:.3g} s for another command that mounts a file system, and was not "
                "started: try again",
            )
        time.sleep(0.002)


def _try_lock(directory_fd: int) -> bool:
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
