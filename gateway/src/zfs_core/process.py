"""Run the ``zfs`` command as a process with a timeout."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from typing import IO

from zfs_core.causes import Cause, cause_of, find_listed_datasets, join_lines
from zfs_core.exceptions import ReadOnlyPool, SuspendedPool, ZFSGenericError, ZFSInitializationFailed
from zfs_core.outcome import Outcome

TIMEOUT_SECONDS = 60.0
"""Timeout of a command that does not transfer a stream."""
TRANSFER_TIMEOUT_SECONDS = 3600.0
"""Timeout of ``zfs send`` and ``zfs receive``."""

_inherited_files: frozenset[IO[str]] = frozenset()
"""Files that every command inherits.

A lock on one of them lasts until the last command has exited, even if the process that took the lock was killed."""

_EXTRA_PATH = "/sbin:/usr/sbin:/bin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_REMEDY = (
    "start it (Linux: modprobe zfs, or the zfs-fuse daemon; FreeBSD: kldload zfs, service zfs start), "
    "then try again; the last change may or may not have been made"
)


def execute(
    args: tuple[str, ...],
    seconds: float = TIMEOUT_SECONDS,
    stdin: int | None = None,
    stdout: int | None = None,
    name: str | None = None,
    program: str = "zfs",
) -> Outcome:
    """Run ``zfs`` with ``args`` for at most ``seconds``. ``stdin`` and ``stdout`` may be file descriptors.

    ``program`` may also be ``zpool``.

    Raises only errors that no caller can handle: ZFSInitializationFailed, SuspendedPool, ReadOnlyPool, and
    ZFSGenericError(ETIMEDOUT). ``name``: the dataset that the error messages mention.
    """
    try:
        process = subprocess.Popen(
            [program, *args],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env=_build_environment(),
            pass_fds=_list_inherited_fds(),
        )
    except FileNotFoundError:
        raise ZFSInitializationFailed().with_details(
            f"the `{program}` command is not installed: install ZFS, or run the jail_zfs_host role"
        ) from None
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ZFSGenericError(
            errno.ETIMEDOUT, name, f"`{program} {args[0]}` did not finish within {seconds:g} s and was killed"
        ) from None
    except BaseException:
        _kill(process)
        raise
    return _make_outcome(args, process.returncode, out or b"", err or b"", name)


def read_first_bytes(*args: str, count: int, seconds: float = TIMEOUT_SECONDS) -> tuple[bytes, Outcome | None]:
    """Run ``zfs`` with ``args`` until it has written ``count`` bytes. Returns these bytes and the outcome.

    If the command ends earlier, returns all its output. Otherwise, the outcome is None.
    """
    process = subprocess.Popen(
        ["zfs", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_build_environment(),
        pass_fds=_list_inherited_fds(),
    )
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        data = _read(process.stdout, count)
        if len(data) == count:
            return data, None
        out, err = process.communicate()
        return data, _make_outcome(args, process.returncode, out, err, None)
    finally:
        timer.cancel()
        _kill(process)


def inherit_file(file: IO[str]) -> None:
    """Make every later command inherit ``file``, so that a lock on it lasts until the last command has exited."""
    global _inherited_files
    _inherited_files |= {file}


def stop_inheriting(file: IO[str]) -> None:
    global _inherited_files
    _inherited_files -= {file}


def _list_inherited_fds() -> list[int]:
    return [file.fileno() for file in _inherited_files if not file.closed]


def _build_environment() -> dict[str, str]:
    """Return the environment of a command. It contains no other variables, because these may contain secrets."""
    return {"PATH": f"{os.environ.get('PATH', '')}:{_EXTRA_PATH}".lstrip(":"), "LC_ALL": "C"}


def _read(stream: IO[bytes], count: int) -> bytes:
    data = b""
    while len(data) < count and (more := stream.read(count - len(data))):
        data += more
    return data


def _make_outcome(args: tuple[str, ...], status: int, out: bytes, err: bytes, name: str | None) -> Outcome:
    stderr_text = err.decode(errors="replace")
    if status == 0:
        return Outcome(out.decode(errors="replace"), join_lines(stderr_text), None)
    # zfs-fuse prints some internal errors on standard output.
    stderr_text = stderr_text if stderr_text.strip() else out.decode(errors="replace")
    cause = Cause.BROKEN_PIPE if status == -signal.SIGPIPE else cause_of(stderr_text)
    message = join_lines(stderr_text) or f"`zfs {args[0]}` exited with code {status} and without a message"
    if cause is Cause.UNREACHABLE:
        raise ZFSInitializationFailed().with_details(f"{message}; {_REMEDY}")
    if cause is Cause.SUSPENDED:
        raise SuspendedPool(name).with_details(message)
    if cause is Cause.READ_ONLY:
        raise ReadOnlyPool(name).with_details(message)
    return Outcome(out.decode(errors="replace"), message, cause, tuple(find_listed_datasets(stderr_text)))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process. Wait at most one second for its exit, because a command may hang in the kernel."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
