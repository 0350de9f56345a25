"""Send snapshots as streams to standard output, a file or a command, and receive them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import require_existing, require_parent
from zfs_core.cli.losses import find_receive_losses
from zfs_core.cli.report import Report
from zfs_core.cli.resumable import find_resumed_snapshot, send_remainder
from zfs_core.exceptions import BadStream, StreamIOError, ZFSError
from zfs_core.listing import lzc_exists
from zfs_core.names import get_filesystem_name
from zfs_core.properties import get_props
from zfs_core.receive import lzc_receive, lzc_receive_resumable, lzc_receive_with_header, receive_header
from zfs_core.send import lzc_send

_TAIL_BYTES = 64 << 10
_DRAIN_SECONDS = 5.0
_KILL_WAIT_SECONDS = 1.0


def send(options: Namespace, report: Report) -> None:
    if options.resume_token is None and options.snapshot is None:
        raise CommandError(Kind.INVALID, "pass the snapshot to send, or --resume-token")
    if options.resume_token is not None and (options.snapshot or options.base):
        raise CommandError(
            Kind.INVALID,
            "--resume-token identifies the snapshot to send: omit the snapshot and --from, or omit the token",
        )
    if options.resume_token is None:
        require_existing(report, *[name for name in (options.base, options.snapshot) if name])
    label = options.snapshot or "the rest of an interrupted stream"
    if options.file and options.if_absent and options.file.exists():
        report.keep(str(options.file))
    elif options.file:
        if options.file.exists():
            raise CommandError(
                Kind.EXISTS, f"the file {str(options.file)!r} already exists: choose another, or pass --if-absent"
            )
        if not options.file.parent.is_dir():
            raise CommandError(Kind.NOT_FOUND, f"the directory {str(options.file.parent)!r} does not exist: create it")
        report.change("send", label, partial(_send_to_file, options), file=str(options.file))
    elif options.command:
        _send_and_report(label, options, report)
    elif not report.check:
        if sys.stdout.isatty():
            raise CommandError(Kind.INVALID, "standard output is a terminal: use a pipe, --file, or -- COMMAND")
        _send_to_fd(sys.stdout.fileno(), options)


def _send_to_fd(fd: int, options: Namespace) -> None:
    if options.resume_token is not None:
        send_remainder(options.resume_token, fd, options.timeout)
    else:
        lzc_send(options.snapshot, options.base, fd, options.flags, seconds=options.timeout)


def _send_to_file(options: Namespace) -> None:
    """Write the stream to a new file, which gets its name only once it is complete. Only its owner can read it."""
    path: Path = options.file
    try:
        fd, part = tempfile.mkstemp(prefix=".lzc-", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(fd, "wb"):
                _send_to_fd(fd, options)
                os.fsync(fd)
            _publish(Path(part), path)
        finally:
            Path(part).unlink(missing_ok=True)
        _sync_directory(path.parent)
    except FileExistsError:
        raise CommandError(
            Kind.EXISTS,
            f"another program has created the file {str(path)!r} in the meantime: choose another name",
        ) from None
    except OSError as error:
        raise CommandError(Kind.FAILED, f"the file {str(path)!r} cannot be written: {error.strerror}") from None


def _publish(part: Path, path: Path) -> None:
    """Give a complete file its name. Raises FileExistsError if the name is taken."""
    try:
        path.hardlink_to(part)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # This file system has no hard links. The empty file reserves the name.
        path.touch(exist_ok=False)
        part.replace(path)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _send_and_report(label: str, options: Namespace, report: Report) -> None:
    if not report.check:
        report.results["receiver"] = receiver = _send_to_command(options)
        if receiver.get("changed") is False:
            report.keep(label)
            return
    report.changes.append({"action": "send", "name": label, "to": options.command})


def _send_to_command(options: Namespace) -> dict[str, object]:
    """Send to the standard input of a command. Returns its JSON object, or its exit code.

    If both sides fail, the command's error is raised, because it is usually the cause. ``--timeout`` applies to both.
    """
    deadline = time.monotonic() + options.timeout
    try:
        receiver = subprocess.Popen(
            options.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise CommandError(
            Kind.INVALID, f"{options.command[0]!r} cannot be run ({error.strerror}): check the command after --"
        ) from None
    assert receiver.stdin is not None and receiver.stdout is not None and receiver.stderr is not None
    # The command blocks if nobody reads what it prints while it receives.
    output, errors = _Tail(receiver.stdout), _Tail(receiver.stderr)
    sending_error: ZFSError | None = None
    has_ended = True
    try:
        try:
            # The receiver must see the end of the stream, so its standard input is closed before the wait.
            with receiver.stdin:
                _send_to_fd(receiver.stdin.fileno(), options)
        except ZFSError as error:
            sending_error = error
        receiver.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        has_ended = False
    finally:
        receiver.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            receiver.wait(_KILL_WAIT_SECONDS)
    if not has_ended:
        raise sending_error or CommandError(
            Kind.TIMEOUT, f"{options.command[0]!r} did not exit within {options.timeout:g} s and was killed"
        )
    result = _parse_result(output.read())
    if receiver.returncode != 0:
        raise _make_receiver_error(options.command, receiver.returncode, result, errors.read().decode(errors="replace"))
    # A receiver that already has the snapshot does not read the stream.
    if sending_error is not None and result.get("changed") is not False:
        raise sending_error
    return result or {"exit_code": 0}


class _Tail:
    """Reads the output of a command in a thread and keeps the tail."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._data = file, b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._file:
            while data := os.read(self._file.fileno(), _TAIL_BYTES):
                self._data = (self._data + data)[-_TAIL_BYTES:]

    def read(self) -> bytes:
        """Return the tail of the output. Call it after the command has exited."""
        # A process that the command left in the background may keep the pipe open.
        self._thread.join(_DRAIN_SECONDS)
        return self._data


def _parse_result(output: bytes) -> dict[str, object]:
    """Return the JSON object that `lzc receive` printed, or {} if the command printed something else."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def _make_receiver_error(command: list[str], status: int, result: dict[str, object], errors: str) -> CommandError:
    error = result.get("error")
    if isinstance(error, dict):
        kind = next((kind for kind in Kind if kind.word == error.get("kind")), Kind.FAILED)
        return CommandError(kind, f"the receiver failed: {error.get('message')}")
    text = "; ".join(errors.strip().splitlines()[-3:])[:500] or "it printed no error"
    return CommandError(Kind.FAILED, f"{command[0]!r} exited with code {status}: {text}")


def receive(options: Namespace, report: Report) -> None:
    if (options.destroy_newer or options.replace) and not options.force:
        raise CommandError(Kind.INVALID, "--destroy-newer and --replace require --force: add it, or omit them")
    target, filesystem = _find_target(options, report), get_filesystem_name(options.target)
    if report.exists(target):
        if not options.if_absent:
            raise CommandError(Kind.EXISTS, f"{target!r} already exists: choose another name, or pass --if-absent")
        _check_received_snapshot(target, options, report)
        report.keep(target)
        return
    if not report.exists(filesystem):
        require_parent(report, filesystem)
    if options.origin:
        require_existing(report, options.origin)
    if options.file and not options.file.is_file():
        raise CommandError(Kind.NOT_FOUND, f"the file {str(options.file)!r} does not exist: check its path")
    if report.check and not options.file:
        # Reading the stream would break the sender's pipe.
        report.change("receive", target, lambda: None)
        return
    if not options.file and sys.stdin.isatty():
        raise CommandError(Kind.INVALID, "standard input is a terminal: use a pipe, or --file")
    changes: list[dict[str, object]] = [{"action": "receive", "name": target}]
    with _open_source(options.file) as file:
        begin_record = b""
        if options.force:
            header, begin_record = receive_header(file.fileno())
            if report.exists(filesystem):
                changes = [*find_receive_losses(filesystem, header, options), *changes]
        report.apply_changes_together(changes, partial(_receive_from_fd, file.fileno(), begin_record, options, target))


def _check_received_snapshot(target: str, options: Namespace, report: Report) -> None:
    """Raise CommandError if the stream contains another snapshot than ``target``, which exists."""
    guid = _read_guid(options, report) if lzc_exists(target) else None
    if guid is not None and guid != get_props([target], ["guid"])[target]["guid"].number:
        raise CommandError(
            Kind.EXISTS,
            f"{target!r} already exists, but the stream contains another snapshot: choose another name, or destroy it "
            "first (lzc destroy)",
            [target],
        )


def _read_guid(options: Namespace, report: Report) -> int | None:
    """Return the GUID of the snapshot in the stream, or None if there is no stream that can be read."""
    if not options.file.is_file() if options.file else (report.check or sys.stdin.isatty()):
        return None
    with _open_source(options.file) as file:
        if not select.select([file], [], [], options.timeout)[0]:
            message = f"no stream arrived on standard input within {options.timeout:g} s: check the sender"
            raise CommandError(Kind.TIMEOUT, message)
        try:
            header, _ = receive_header(file.fileno())
        except (BadStream, StreamIOError):
            return None
    # A replication stream package has no GUID.
    return header["drr_toguid"] or None


def _find_target(options: Namespace, report: Report) -> str:
    """Return the name of the snapshot to receive. For an interrupted stream, the filesystem's token contains it."""
    name: str = options.target
    if "@" in name:
        return name
    if not options.resumable:
        raise CommandError(
            Kind.INVALID, f"{name!r} is not a valid name for a snapshot: use FILESYSTEM@SNAPSHOT, or add --resumable"
        )
    require_existing(report, name)
    snapshot = find_resumed_snapshot(name)
    if snapshot is None:
        raise CommandError(
            Kind.INVALID, f"{name!r} has no interrupted stream to continue: pass the snapshot, such as {name}@copy"
        )
    return f"{name}@{snapshot}"


def _receive_from_fd(fd: int, begin_record: bytes, options: Namespace, target: str) -> None:
    """Receive a stream. ``begin_record``: its first record, if it has been read from ``fd`` already."""
    arguments = {"origin": options.origin, "props": dict(options.set), "seconds": options.timeout}
    if begin_record:
        lzc_receive_with_header(target, fd, begin_record, options.force, options.resumable, **arguments)
    elif options.resumable:
        lzc_receive_resumable(target, fd, **arguments)
    else:
        lzc_receive(target, fd, **arguments)


@contextlib.contextmanager
def _open_source(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandError(Kind.FAILED, f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    with file:
        yield file
