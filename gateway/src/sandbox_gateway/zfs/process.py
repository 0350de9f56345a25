"""Run the ``zfs`` command as a process with a timeout."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from typing import IO

from sandbox_gateway.command import child_environment
from sandbox_gateway.zfs.causes import Cause, cause_of, find_names, one_line
from sandbox_gateway.zfs.exceptions import ReadOnlyPool, SuspendedPool, ZFSGenericError, ZFSInitializationFailed
from sandbox_gateway.zfs.outcome import Outcome

SECONDS = 60.0
"""Timeout in seconds of a command that transfers no data."""
TRANSFER_SECONDS = 3600.0
"""Timeout in seconds of send and receive."""

_inherited_files: frozenset[IO[str]] = frozenset()
"""Files that every command inherits. A lock on one of them lasts until the last command has ended, even if the process
that took the lock was killed earlier."""

_MORE_PATH = "/sbin:/usr/sbin:/bin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_HELP = (
    "start it (Linux: modprobe zfs, or the zfs-fuse daemon; FreeBSD: kldload zfs, service zfs start), "
    "then try again; the last change may or may not have been made"
)


def execute(
    args: tuple[str, ...],
    seconds: float = SECONDS,
    stdin: int | None = None,
    stdout: int | None = None,
    name: str | None = None,
) -> Outcome:
    """Run ``zfs args`` for at most ``seconds``. ``stdin`` and ``stdout`` may be file descriptors.

    Raises only errors that no caller can handle: ZFSInitializationFailed, SuspendedPool, ReadOnlyPool, and
    ZFSGenericError(ETIMEDOUT). ``name`` is the dataset in their text.
    """
    try:
        process = subprocess.Popen(
            ["zfs", *args],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env=_environment(),
            pass_fds=_inherited_fds(),
        )
    except FileNotFoundError:
        raise ZFSInitializationFailed(name).with_details(
            "the command `zfs` is not installed: install ZFS, or run the role jail_zfs_host"
        ) from None
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ZFSGenericError(
            errno.ETIMEDOUT, name, f"`zfs {args[0]}` did not end within {seconds:g} s and was stopped"
        ) from None
    except BaseException:
        _kill(process)
        raise
    return _outcome(args, process.returncode, out or b"", err or b"", name)


def read_first_bytes(*args: str, count: int, seconds: float = SECONDS) -> tuple[bytes, Outcome | None]:
    """Return the first ``count`` bytes of the output of ``zfs args``, without waiting for the rest.

    The outcome is None if the command wrote that many bytes.
    """
    process = subprocess.Popen(
        ["zfs", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        pass_fds=_inherited_fds(),
    )
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        data = _read(process.stdout, count)
        if len(data) == count:
            return data, None
        out, err = process.communicate()
        return data, _outcome(args, process.returncode, out, err, None)
    finally:
        timer.cancel()
        _kill(process)


def inherit_file(file: IO[str]) -> None:
    """Let every later command inherit ``file``, so that a lock on it lasts until the last command has ended."""
    global _inherited_files
    _inherited_files |= {file}


def stop_inheriting(file: IO[str]) -> None:
    global _inherited_files
    _inherited_files -= {file}


def _inherited_fds() -> list[int]:
    return [file.fileno() for file in _inherited_files if not file.closed]


def _environment() -> dict[str, str]:
    return child_environment(PATH=f"{os.environ.get('PATH', '')}:{_MORE_PATH}".lstrip(":"))


def _read(stream: IO[bytes], count: int) -> bytes:
    data = b""
    while len(data) < count and (more := stream.read(count - len(data))):
        data += more
    return data


def _outcome(args: tuple[str, ...], status: int, out: bytes, err: bytes, name: str | None) -> Outcome:
    text = err.decode(errors="replace")
    if status == 0:
        return Outcome(out.decode(errors="replace"), one_line(text), None)
    # zfs-fuse writes some internal errors to standard output..
    text = text if text.strip() else out.decode(errors="replace")
    cause, said = cause_of(text), one_line(text) or f"`zfs {args[0]}` exited with {status} and no message"
    if cause is Cause.UNREACHABLE:
        raise ZFSInitializationFailed(name).with_details(f"{said}; {_HELP}")
    if cause is Cause.SUSPENDED:
        raise SuspendedPool(name).with_details(said)
    if cause is Cause.READ_ONLY:
        raise ReadOnlyPool(name).with_details(said)
    return Outcome(out.decode(errors="replace"), said, cause, tuple(find_names(text)))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and wait only a moment, because a command that hangs in the kernel does not end."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
