"""Running the ``zfs`` command: an argument list, a deadline, why it failed, another try where that helps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandbox_gateway.command import child_environment
from sandbox_gateway.hosts.jail_zfs.zfs_errors import (
    Cause,
    DatasetBusy,
    DatasetExists,
    DatasetNotFound,
    MountFailed,
    NameInvalid,
    NameTooLong,
    NoSpace,
    PoolsDiffer,
    PropertyInvalid,
    QuotaExceeded,
    ReadOnlyPool,
    SuspendedPool,
    ZFSError,
    ZFSGenericError,
    ZFSInitializationFailed,
    cause_of,
    listed_names,
    sentence,
)

SECONDS = 60.0
"""Deadline of a command that moves no data."""
TRANSFER_SECONDS = 3600.0
"""Deadline of send and receive."""

_PATIENCE: dict[Cause | None, float] = {Cause.BUSY: 10.0, Cause.MOUNT_BUSY: 10.0, Cause.IN_USE: 0.8}
"""Seconds."""
_MOUNTING = frozenset({"create", "clone", "mount", "rename", "rollback", "receive"})
_FUSE_DIRECTORY = Path("/var/run/zfs")
_MORE_PATH = "/sbin:/usr/sbin:/bin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_HELP = (
    "start it (Linux: modprobe zfs, or the zfs-fuse daemon; FreeBSD: kldload zfs, service zfs start), "
    "then try again; what was asked last may or may not have been done"
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``cause`` is None if it succeeded."""

    out: str
    said: str
    cause: Cause | None
    related: tuple[str, ...] = ()

    def error(self, error: ZFSError) -> ZFSError:
        """``error`` with what was said."""
        return error.because(self.said, self.related)


def _environment() -> dict[str, str]:
    return child_environment(PATH=f"{os.environ.get('PATH', '')}:{_MORE_PATH}".lstrip(":"))


def run(
    *args: str,
    seconds: float = SECONDS,
    stdin: int | None = None,
    stdout: int | None = None,
    name: str | None = None,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """Run ``zfs args`` for at most ``seconds``; ``stdin`` and ``stdout`` may be file descriptors.

    ``before`` is called first: on zfs-fuse nothing is mounted between it and the command. Its errors are raised.

    Raises only what no function below can mend: ZFSInitializationFailed, SuspendedPool, ReadOnlyPool, and
    ZFSGenericError(ETIMEDOUT). ``name`` is the dataset they name.
    """
    with mount_turn(args[0], seconds, name):
        if before is not None:
            before()
        return _run(args, seconds, stdin, stdout, name)


def _run(args: tuple[str, ...], seconds: float, stdin: int | None, stdout: int | None, name: str | None) -> Outcome:
    try:
        process = subprocess.Popen(
            ["zfs", *args],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env=_environment(),
        )
    except FileNotFoundError:
        raise ZFSInitializationFailed(name).because(
            "the command `zfs` is not installed: install ZFS, or run the role jail_zfs_host"
        ) from None
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _give_up(process)
        raise ZFSGenericError(
            errno.ETIMEDOUT, name, f"`zfs {args[0]}` did not end within {seconds:g} s and was stopped"
        ) from None
    except BaseException:
        _give_up(process)
        raise
    return _judged(args, process.returncode, out or b"", err or b"", name)


@contextlib.contextmanager
def mount_turn(verb: str, seconds: float, name: str | None) -> Iterator[None]:
    """Of the commands that mount something, one at a time on zfs-fuse, on the whole machine.

    Two of its threads tell a third of a new mount through one pipe, in two pieces each and without a lock: if the
    pieces mix, the daemon answers no file system any more, for ever.
    """
    if verb not in _MOUNTING or not flavour().fuse or not _FUSE_DIRECTORY.is_dir():
        yield
        return
    directory = os.open(_FUSE_DIRECTORY, os.O_RDONLY)
    try:
        deadline = time.monotonic() + seconds
        while not _locked(directory):
            if time.monotonic() > deadline:
                raise ZFSGenericError(errno.ETIMEDOUT, name, f"`zfs {verb}` had no turn within {seconds:g} s")
            time.sleep(0.002)
        yield
    finally:
        os.close(directory)


def _locked(directory: int) -> bool:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _judged(args: tuple[str, ...], status: int, out: bytes, err: bytes, name: str | None) -> Outcome:
    text = err.decode(errors="replace")
    if status == 0:
        return Outcome(out.decode(errors="replace"), sentence(text), None)
    # zfs-fuse writes some internal errors to standard output
    text = text if text.strip() else out.decode(errors="replace")
    cause, said = cause_of(text), sentence(text) or f"`zfs {args[0]}` ended with {status} and said nothing"
    if cause is Cause.UNREACHABLE:
        raise ZFSInitializationFailed(name).because(f"{said}; {_HELP}")
    if cause is Cause.SUSPENDED:
        raise SuspendedPool(name).because(said)
    if cause is Cause.READ_ONLY:
        raise ReadOnlyPool(name).because(said)
    return Outcome(out.decode(errors="replace"), said, cause, tuple(listed_names(text)))


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """Kill it, and wait only a moment: a command that hangs in the kernel does not die."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def run_patiently(*args: str, name: str | None = None, before: Callable[[], None] | None = None) -> Outcome:
    """``run``, tried again while the dataset is busy, for as long as that may end by itself.

    zfs-fuse unmounts a dataset that is to be destroyed and then finds it busy, until its daemon has written what it
    still had (milliseconds; seconds on a full pool). That a process has files open ends less often.
    """
    began, wait = time.monotonic(), 0.01
    while True:
        outcome = run(*args, name=name, before=before)
        patience = _PATIENCE.get(outcome.cause, 0.0)
        if time.monotonic() + wait - began > patience:
            return outcome
        time.sleep(wait)
        wait = min(wait * 2, 0.25)


def first_bytes(*args: str, count: int, seconds: float = SECONDS) -> tuple[bytes, Outcome | None]:
    """The first ``count`` bytes that ``zfs args`` writes; the rest is not waited for.

    The outcome is None if there were so many.
    """
    process = subprocess.Popen(
        ["zfs", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        got = _read(process.stdout, count)
        if len(got) == count:
            return got, None
        out, err = process.communicate()
        return got, _judged(args, process.returncode, out, err, None)
    finally:
        timer.cancel()
        _give_up(process)


def _read(stream: IO[bytes], count: int) -> bytes:
    got = b""
    while len(got) < count and (more := stream.read(count - len(got))):
        got += more
    return got


@dataclass(frozen=True)
class Flavour:
    """Which ZFS it is. ``version`` is (0, 7) for zfs-fuse."""

    fuse: bool
    version: tuple[int, ...]


_flavour: Flavour | None = None


def flavour() -> Flavour:
    """Asked once. zfs-fuse has no ``zfs version``; every OpenZFS since 0.8 has."""
    global _flavour
    if _flavour is None:
        outcome = run("version")
        if outcome.cause is not None and "unrecognized command" not in outcome.said:
            raise outcome.error(ZFSGenericError(errno.EIO, None, "`zfs version` failed"))
        if outcome.cause is None:
            match = re.search(r"^zfs-(\d+)\.(\d+)(?:\.(\d+))?", outcome.out, re.MULTILINE)
            _flavour = Flavour(False, tuple(int(part) for part in match.groups() if part) if match else ())
        else:
            _flavour = Flavour(True, (0, 7))
    return _flavour


Make = Callable[[str], ZFSError]
_ANYWHERE: dict[Cause, Make] = {
    Cause.NO_SPACE: NoSpace,
    Cause.TOO_SMALL: QuotaExceeded,
    Cause.QUOTA: QuotaExceeded,
    Cause.NAME_INVALID: NameInvalid,
    Cause.NAME_TOO_LONG: NameTooLong,
    Cause.PROPERTY: PropertyInvalid,
    Cause.BUSY: DatasetBusy,
    Cause.IN_USE: DatasetBusy,
    Cause.MOUNT_BUSY: DatasetBusy,
    Cause.MISSING: DatasetNotFound,
    Cause.EXISTS: DatasetExists,
    Cause.NO_POOL: DatasetNotFound,
    Cause.NO_PARENT: DatasetNotFound,
    Cause.POOLS_DIFFER: PoolsDiffer,
    Cause.MOUNT_FAILED: MountFailed,
}


def failure(outcome: Outcome, name: str, doing: str, known: Mapping[Cause, Make] | None = None) -> ZFSError:
    """The exception for a command that failed; ``known`` says what is particular to the function."""
    assert outcome.cause is not None
    make = (known or {}).get(outcome.cause) or _ANYWHERE.get(outcome.cause)
    return outcome.error(make(name) if make else ZFSGenericError(errno.EIO, name, f"Failed to {doing}"))


def checked(outcome: Outcome, name: str, doing: str, known: Mapping[Cause, Make] | None = None) -> Outcome:
    if outcome.cause is not None:
        raise failure(outcome, name, doing, known)
    return outcome
