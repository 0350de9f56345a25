"""Run the ``zfs`` command as a process with a timeout."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import IO

from zfs_core.causes import Cause, find_cause, find_listed_datasets, join_lines
from zfs_core.command_register import tracked
from zfs_core.exceptions import ReadOnlyPool, SuspendedPool, ZFSGenericError, ZFSInitializationFailed
from zfs_core.outcome import Outcome

TIMEOUT_SECONDS = 60.0
"""Timeout of a command that does not transfer a stream."""
TRANSFER_TIMEOUT_SECONDS = 3600.0
"""Timeout of ``zfs send`` and ``zfs receive``."""

_START_REMEDIES = {
    errno.E2BIG: ". Pass fewer or shorter names and properties",
    errno.EACCES: ". Check that you may execute the program, and search the directories in PATH",
}

_inherited_files: frozenset[IO[str]] = frozenset()
"""Files that every command inherits.

A lock on one of them lasts until the last command has exited, even if the process that took the lock was killed."""

_KILL_WAIT_SECONDS = 1.0
_EXTRA_PATH = "/sbin:/usr/sbin:/bin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_REMEDY = (
    "start it (Linux: modprobe zfs, or the zfs-fuse daemon; FreeBSD: kldload zfs, service zfs start), "
    "then try again; the last change may or may not have been made"
)


def execute(
    args: tuple[str, ...],
    seconds: float | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    name: str | None = None,
    program: str = "zfs",
) -> Outcome:
    """Run ``zfs`` with ``args`` for at most ``seconds`` (by default, TIMEOUT_SECONDS).

    ``stdin`` and ``stdout`` may be file descriptors.

    ``program`` may also be ``zpool``.

    Raises only errors that no caller can handle: ZFSInitializationFailed, SuspendedPool, ReadOnlyPool,
    ZFSGenericError(ETIMEDOUT), and ZFSGenericError with another errno if the command could not be started. ``name``:
    the dataset that the error messages mention.
    """
    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    process = _start([program, *args], stdin, stdout, name)
    with _killed_at_end(process, seconds, name):
        out, err = process.communicate(timeout=seconds)
    return _make_outcome(args, process.returncode, out or b"", err or b"", name)


def read_first_bytes(*args: str, count: int, seconds: float | None = None) -> tuple[bytes, Outcome | None]:
    """Run ``zfs`` with ``args`` until it has written ``count`` bytes. Returns these bytes and the outcome.

    If the command exits earlier, returns all its output. Otherwise, the outcome is None. Raises
    ZFSGenericError(ETIMEDOUT) after ``seconds`` (by default, TIMEOUT_SECONDS).
    """
    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    process = _start(["zfs", *args], None, None, None)
    with _killed_at_end(process, seconds, None):
        data = _read(process, count, deadline)
        if len(data) == count:
            return data, None
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    return data, _make_outcome(args, process.returncode, out, err, None)


def _start(argv: list[str], stdin: int | None, stdout: int | None, name: str | None) -> subprocess.Popen[bytes]:
    """Start a command. Raises ZFSInitializationFailed, or ZFSGenericError with the errno of the system call."""
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env=_build_environment(),
            pass_fds=_list_inherited_fds(),
        )
    except FileNotFoundError:
        raise ZFSInitializationFailed().with_details(
            f"the `{argv[0]}` command is not installed: install ZFS, or add its directory to PATH"
        ) from None
    except OSError as error:
        remedy = _START_REMEDIES.get(error.errno or 0, "")
        raise ZFSGenericError(
            error.errno or errno.EIO, name, f"`{argv[0]} {argv[1]}` could not be started: {error.strerror}{remedy}"
        ) from None


@contextlib.contextmanager
def _killed_at_end(process: subprocess.Popen[bytes], seconds: float, name: str | None) -> Iterator[None]:
    """Kill the process at the end of this context, unless it has exited.

    Raises ZFSGenericError(ETIMEDOUT) instead of TimeoutExpired.
    """
    try:
        with tracked(process, name, seconds) as running_command:
            try:
                yield
            finally:
                if process.returncode is None:
                    _kill(process)
    except subprocess.TimeoutExpired:
        fate = (
            "was killed" if process.returncode is not None else "could not be killed, because it is hung in the kernel"
        )
        raise ZFSGenericError(
            errno.ETIMEDOUT, name, f"`{running_command.command}` did not finish within {seconds:g} s and {fate}"
        ) from None


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
    """Return the environment of a command. It omits all other variables, because they may contain secrets."""
    return {"PATH": f"{os.environ.get('PATH', '')}:{_EXTRA_PATH}".lstrip(":"), "LC_ALL": "C"}


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    """Read ``count`` bytes, or fewer if the output ends. Raises TimeoutExpired at the deadline.

    Killing the process would not end a blocking read, because a process hung in the kernel keeps its pipes open.
    """
    assert process.stdout is not None
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(data) < count:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired(process.args, 0.0)
            if not (chunk := os.read(process.stdout.fileno(), count - len(data))):
                break
            data += chunk
    return data


def _make_outcome(args: tuple[str, ...], status: int, out: bytes, err: bytes, name: str | None) -> Outcome:
    stderr_text = err.decode(errors="replace")
    if status == 0:
        return Outcome(out.decode(errors="replace"), join_lines(stderr_text), None)
    # zfs-fuse prints some internal errors on standard output.
    stderr_text = stderr_text if stderr_text.strip() else out.decode(errors="replace")
    cause = Cause.BROKEN_PIPE if status == -signal.SIGPIPE else find_cause(stderr_text, args[1:])
    message = join_lines(stderr_text) or f"`zfs {args[0]}` exited with code {status} and without a message"
    if cause is Cause.UNREACHABLE:
        raise ZFSInitializationFailed().with_details(f"{message}; {_REMEDY}")
    if cause is Cause.SUSPENDED:
        raise SuspendedPool(name).with_details(message)
    if cause is Cause.READ_ONLY:
        raise ReadOnlyPool(name).with_details(message)
    return Outcome(out.decode(errors="replace"), message, cause, tuple(find_listed_datasets(stderr_text)))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process. Wait only briefly for its exit, because a command may hang in the kernel."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_WAIT_SECONDS)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
