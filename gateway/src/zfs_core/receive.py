"""Receive streams."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    BadStream,
    DatasetBusy,
    DatasetExists,
    DatasetNotFound,
    DestinationModified,
    FeatureNotSupported,
    NoSpace,
    PropertyInvalid,
    PropertyNotSupported,
    QuotaExceeded,
    ReceivePropertyFailure,
    StreamFeatureIncompatible,
    StreamFeatureInvalid,
    StreamFeatureNotSupported,
    StreamIOError,
    StreamMismatch,
    StreamTruncated,
    WrongParent,
)
from zfs_core.listing import find_types
from zfs_core.names import (
    Name,
    accepts_bytes,
    get_filesystem_name,
    validate_filesystem_name,
    validate_new_snapshot_name,
    validate_snapshot_name,
)
from zfs_core.options import Props, format_property_assignment, format_property_options, validate_property_name
from zfs_core.outcome import ErrorFactory, Outcome, check
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS
from zfs_core.properties import get_props
from zfs_core.property_values import find_number
from zfs_core.run import run
from zfs_core.stream_format import (
    RECORD_BYTES,
    BeginRecord,
    make_package,
    parse_begin_record,
    peek_begin_record,
)

_CHUNK_BYTES = 1 << 20


@dataclass
class _Request:
    """The arguments of a function that receives a stream."""

    target: str
    fd: int
    force: bool
    origin: str | None
    seconds: float
    is_resumable: bool = False
    is_corrective: bool = False
    begin_data: bytes = b""
    """The begin record, if the caller has read it."""
    begin_record: BeginRecord | None = None
    props: Mapping[str, int | str] = field(default_factory=dict)
    """The properties to set as received properties."""
    options: list[str] = field(default_factory=list)


@accepts_bytes
def lzc_receive(
    snapname: Name,
    fd: int,
    force: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Create the snapshot ``snapname`` from the stream on the file descriptor ``fd``, without mounting its filesystem.

    ``force``: roll the filesystem back to the stream's base, and destroy later snapshots, if necessary. ``raw`` has no
    effect, because the stream says whether it is raw. ``origin``: the snapshot of which the filesystem becomes a clone.
    zfs-fuse cannot receive a full stream as a clone. ``props``: properties to set, as if the stream contained them.

    Raises DatasetExists, StreamMismatch, DestinationModified, BadStream, StreamTruncated, DatasetNotFound, WrongParent,
    DatasetBusy, NoSpace, QuotaExceeded, ReadOnlyPool, StreamFeatureNotSupported, StreamFeatureIncompatible,
    ReceivePropertyFailure, StreamIOError, NameInvalid, NameTooLong. Command:
    ``zfs receive -u [-F] [-o origin=ORIGIN] SNAPNAME``.
    """
    _receive(_make_request(snapname, fd, force, origin, props, seconds=seconds))


lzc_recv = lzc_receive


@accepts_bytes
def lzc_receive_resumable(
    snapname: Name,
    fd: int,
    force: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Receive a stream, and keep what was received if it ends early, so that the rest can follow.

    Otherwise the same as ``lzc_receive``, but raises StreamFeatureInvalid for a stream that ZFS cannot interpret.
    Command: ``zfs receive -s -u SNAPNAME``.
    """
    _require_options("lzc_receive_resumable")
    _receive(_make_request(snapname, fd, force, origin, props, resumable=True, seconds=seconds))


def abort_receive(name: Name) -> None:
    """Discard what an interrupted ``lzc_receive_resumable`` has left in the filesystem ``name``.

    If the stream was to create the filesystem, destroys it. Raises DatasetNotFound, and ZFSGenericError if there is
    nothing to discard. Command: ``zfs receive -A NAME``.
    """
    _require_options("abort_receive")
    target = validate_filesystem_name(name)
    outcome = run("receive", "-A", target, name=target)
    check(outcome, target, "abort receive", {Cause.MISSING: DatasetNotFound})


def receive_header(fd: int) -> tuple[dict[str, Any], bytes]:
    """Read the begin record of a stream. Returns its fields and the record, which the next functions need.

    The fields include ``drr_toname`` (bytes), ``drr_toguid``, ``drr_fromguid``, ``drr_flags`` and ``drr_type``. Raises
    StreamIOError if ``fd`` cannot be read, and BadStream if it contains something else.
    """
    data = b""
    try:
        while len(data) < RECORD_BYTES and (chunk := os.read(fd, RECORD_BYTES - len(data))):
            data += chunk
    except (OSError, OverflowError) as error:
        raise StreamIOError(getattr(error, "errno", None) or errno.EBADF) from None
    record = parse_begin_record(data)
    if record is None:
        raise BadStream()
    fields = {
        "drr_magic": record.magic,
        "drr_versioninfo": record.version_info,
        "drr_creation_time": record.creation_time,
        "drr_type": record.type,
        "drr_flags": record.flags,
        "drr_toguid": record.to_guid,
        "drr_fromguid": record.from_guid,
        "drr_toname": record.to_name,
    }
    return fields, data


@accepts_bytes
def lzc_receive_with_header(
    snapname: Name,
    fd: int,
    begin_record: bytes,
    force: bool = False,
    resumable: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Receive a stream whose begin record ``receive_header`` has read.

    If ``fd`` is a pipe, it is read to its end. In all other respects the same as ``lzc_receive`` and
    ``lzc_receive_resumable``. Command: ``zfs receive -u [-F] [-s] [-o origin=ORIGIN] SNAPNAME``.
    """
    request = _make_request(snapname, fd, force, origin, props, begin_record, resumable, seconds=seconds)
    _receive(request)


@accepts_bytes
def lzc_receive_one(
    snapname: Name,
    fd: int,
    begin_record: bytes,
    force: bool = False,
    resumable: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    cleanup_fd: int = -1,
    action_handle: int = 0,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> tuple[int, int]:
    """Receive a stream whose begin record ``receive_header`` has read. Returns ``(bytes read, action_handle)``.

    ``cleanup_fd`` and ``action_handle`` belong to deduplicated streams, which OpenZFS has not supported since 2.0, so
    they have no effect. Otherwise the same as ``lzc_receive_with_header``. Command:
    ``zfs receive -u [-F] [-s] [-o origin=ORIGIN] SNAPNAME``.
    """
    request = _make_request(snapname, fd, force, origin, props, begin_record, resumable, seconds=seconds)
    return _receive(request), action_handle


@accepts_bytes
def lzc_receive_with_cmdprops(
    snapname: Name,
    fd: int,
    begin_record: bytes,
    force: bool = False,
    resumable: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    cmdprops: Mapping[Any, Any] | None = None,
    key: bytes | None = None,
    cleanup_fd: int = -1,
    action_handle: int = 0,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> tuple[int, int]:
    """Receive a stream, and override some of the properties in it.

    ``cmdprops``: properties to set; with the value None (or a bool, as in libzfs_core), the property is inherited. The
    command reads the stream from its standard input and could not read a key there, so ``key`` causes
    NotImplementedError. Otherwise the same as ``lzc_receive_one``. Command:
    ``zfs receive -u -o PROP=VALUE -x PROP SNAPNAME``.
    """
    _require_options("lzc_receive_with_cmdprops")
    _require_key_absent(key)
    request = _make_request(snapname, fd, force, origin, props, begin_record, resumable, cmdprops, seconds=seconds)
    return _receive(request), action_handle


@accepts_bytes
def lzc_receive_with_heal(
    snapname: Name,
    fd: int,
    begin_record: bytes,
    force: bool = False,
    corrective: bool = True,
    resumable: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    cmdprops: Mapping[Any, Any] | None = None,
    key: bytes | None = None,
    cleanup_fd: int = -1,
    action_handle: int = 0,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> tuple[int, int]:
    """Receive a stream. With ``corrective``, only use it to repair damaged data of the existing snapshot.

    ``zfs receive -c`` has no options for ``force``, ``resumable`` and ``origin``, which are then not used. Otherwise
    the same as ``lzc_receive_with_cmdprops``. Command: ``zfs receive -c SNAPNAME``.
    """
    _require_key_absent(key)
    if corrective and not detect_capabilities().corrective_receive:
        raise NotImplementedError("lzc_receive_with_heal: this version of ZFS cannot repair snapshots")
    request = _make_request(snapname, fd, force, origin, props, begin_record, resumable, cmdprops, seconds=seconds)
    request.is_corrective = corrective
    return _receive(request), action_handle


def _require_options(function_name: str) -> None:
    if not detect_capabilities().receive_options:
        raise NotImplementedError(f"{function_name}: this version of ZFS cannot receive with options")


def _require_key_absent(key: bytes | None) -> None:
    if key:
        raise NotImplementedError(
            "cannot receive with a key: `zfs receive` reads the stream from standard input and cannot also read a key"
        )


def _make_request(
    snapname: Name,
    fd: int,
    force: bool,
    origin: Name | None,
    props: Props,
    begin_data: bytes = b"",
    resumable: bool = False,
    cmdprops: Mapping[Any, Any] | None = None,
    *,
    seconds: float,
) -> _Request:
    target = validate_new_snapshot_name(snapname)
    _validate_input(fd)
    request = _Request(target, fd, force, _validate_origin(origin), seconds, resumable)
    if begin_data:
        request.begin_data, request.begin_record = begin_data, parse_begin_record(begin_data)
    else:
        request.begin_record = peek_begin_record(fd)
    for name, value in (cmdprops or {}).items():
        if value is None or isinstance(value, bool):
            request.options += ["-x", validate_property_name(name)]
        else:
            request.options += ["-o", format_property_assignment(name, value)]
    request.props = _to_stream_props(props)
    if not detect_capabilities().receive_options and (props or cmdprops or resumable):
        raise FeatureNotSupported(target).with_details("zfs-fuse cannot receive streams with options: omit them")
    return request


def _validate_origin(origin: Name | None) -> str | None:
    return None if origin is None else validate_snapshot_name(origin)


def _to_stream_props(props: Props) -> dict[str, int | str]:
    """Return the properties as a stream contains them: the value of a native property is usually a number."""
    result: dict[str, int | str] = {}
    for name, value in (props or {}).items():
        key = validate_property_name(name)
        if isinstance(value, int):
            result[key] = int(value)
        else:
            text = format_property_options({key: value})[1].partition("=")[2]
            result[key] = text if ":" in key else find_number(key, text)
    return result


def _validate_input(fd: int) -> None:
    """Raise StreamIOError unless ``fd`` is open for reading."""
    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError, ValueError):
        raise StreamIOError(errno.EBADF) from None
    if mode == os.O_WRONLY:
        raise StreamIOError(errno.EBADF)


def _receive(request: _Request) -> int:
    """Run the command. Returns the number of bytes that were read from the file descriptor."""
    if request.is_corrective:
        options = ["-c", *request.options]
    else:
        _check_destination(request)
        options = [
            "-u",
            *(["-F"] if request.force else []),
            *(["-s"] if request.is_resumable else []),
            *request.options,
        ]
        if request.origin is not None and detect_capabilities().receive_options:
            options += ["-o", f"origin={request.origin}"]
    with _open_stream(request) as (stdin, count):
        outcome = run("receive", *options, request.target, stdin=stdin, seconds=request.seconds, name=request.target)
    _check_received(request, outcome)
    return count()


def _check_destination(request: _Request) -> None:
    """Raise the exceptions of libzfs_core that depend on the destination and the begin record.

    The command refuses these cases with less specific messages, or finds another way to receive the stream.
    """
    filesystem, record = get_filesystem_name(request.target), request.begin_record
    origins = [] if request.origin is None else [request.origin]
    types = find_types([request.target, filesystem, *origins])
    is_resuming = record is not None and record.is_resuming
    is_clone = bool(origins) or (record is not None and record.is_clone)
    if record is not None and record.is_package:
        raise BadStream().with_details("the stream is a replication stream package: receive it with `zfs receive`")
    if filesystem in types and is_clone and not is_resuming:
        raise BadStream().with_details(
            f"the stream contains a clone, but {filesystem} already exists: choose a new name"
        )
    if request.target in types:
        raise DatasetExists(request.target)
    if filesystem not in types:
        if is_clone and not origins:
            raise BadStream().with_details("the stream contains a clone, but no origin was passed: pass its origin")
        is_incremental = record is not None and record.from_guid != 0 and not is_clone
        if (origins and request.origin not in types) or is_incremental:
            raise DatasetNotFound(request.target)
    if record is not None and not detect_capabilities().receive_options:
        # zfs-fuse finds the origin on its own.
        guids = [facts["guid"].number for facts in get_props(origins, ["guid"]).values()]
        if guids not in ([], [record.from_guid]):
            raise StreamMismatch(filesystem)


_PROPERTY_CAUSES = (
    None,
    Cause.PROPERTY_INVALID,
    Cause.PROPERTY_NOT_SUPPORTED,
    Cause.PROPERTY_READ_ONLY,
    Cause.OTHER,
)
"""The causes of a command that has received the stream, but could not set some properties."""


def _check_received(request: _Request, outcome: Outcome) -> None:
    target, filesystem = request.target, get_filesystem_name(request.target)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.STREAM_MISMATCH: lambda _: StreamMismatch(filesystem),
        Cause.DESTINATION_MODIFIED: lambda _: DestinationModified(filesystem),
        Cause.BUSY: lambda _: DatasetBusy(filesystem),
        Cause.IN_USE: lambda _: DatasetBusy(filesystem),
        Cause.WRONG_PARENT: lambda _: WrongParent(filesystem),
        Cause.NO_SPACE: lambda _: NoSpace(filesystem),
        Cause.QUOTA_EXCEEDED: lambda _: QuotaExceeded(filesystem),
        Cause.NO_PARENT: DatasetNotFound,
        Cause.EXISTS: DatasetExists,
        Cause.BAD_STREAM: lambda _: BadStream(),
        Cause.STREAM_TRUNCATED: lambda _: StreamTruncated(),
        Cause.STREAM_INVALID: lambda _: StreamFeatureInvalid(),
        Cause.STREAM_INCOMPATIBLE: lambda _: StreamFeatureIncompatible(),
        Cause.NOT_SUPPORTED: lambda _: StreamFeatureNotSupported(),
        Cause.IO_ERROR: lambda _: StreamIOError(errno.EIO),
    }
    failed_props = re.findall(r"cannot receive (\S+) property on", outcome.message)
    if failed_props and outcome.cause in _PROPERTY_CAUSES:
        error_class = PropertyNotSupported if outcome.cause is Cause.PROPERTY_NOT_SUPPORTED else PropertyInvalid
        raise ReceivePropertyFailure([outcome.explain(error_class(prop)) for prop in failed_props])
    check(outcome, target, "receive", specific_errors)


@contextlib.contextmanager
def _open_stream(request: _Request) -> Iterator[tuple[int, Callable[[], int]]]:
    """Yield a file descriptor with the complete stream, and a function that returns how many bytes were read.

    The command reads the caller's file itself if possible. Otherwise, a thread copies the stream into a pipe.
    """
    if not request.props and _unread(request.fd, request.begin_data):
        start = _get_position(request.fd)
        yield request.fd, lambda: _get_position(request.fd) - start
        return
    prefix, suffix = request.begin_data, b""
    if request.props:
        if request.begin_record is None:
            prefix, request.begin_record = _read_begin_record(request.fd)
        package_start, suffix = make_package(request.begin_record, request.props)
        prefix = package_start + prefix
    copier = _Copier(request.fd, prefix, suffix)
    copier.start()
    try:
        yield copier.read_fd, lambda: copier.byte_count
    finally:
        os.close(copier.read_fd)
        copier.stop()


def _get_position(fd: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return 0


def _unread(fd: int, data: bytes) -> bool:
    """Move the position of a file back before ``data``, which were read last. Returns whether that was possible."""
    if not data:
        return True
    start = _get_position(fd) - len(data)
    if start < 0:
        return False
    try:
        if os.pread(fd, len(data), start) != data:
            return False
        os.lseek(fd, start, os.SEEK_SET)
    except OSError:
        return False
    return True


def _read_begin_record(fd: int) -> tuple[bytes, BeginRecord]:
    _, data = receive_header(fd)
    record = parse_begin_record(data)
    assert record is not None
    return data, record


class _Copier(threading.Thread):
    """A thread that copies a stream into a pipe, with data before and after it.

    It never blocks in a system call that only the source or the command can finish, so ``stop`` always works.
    """

    def __init__(self, source_fd: int, prefix: bytes, suffix: bytes) -> None:
        super().__init__(name="zfs receive", daemon=True)
        self._source_fd, self._prefix, self._suffix = os.dup(source_fd), prefix, suffix
        self.byte_count = 0
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._stop_read_fd, self._stop_write_fd = os.pipe()

    def run(self) -> None:
        try:
            self._write(self._prefix)
            while self._wait(self._source_fd, select.POLLIN) and (data := os.read(self._source_fd, _CHUNK_BYTES)):
                self.byte_count += len(data)
                self._write(data)
            self._write(self._suffix)
        except OSError:
            pass  # The command has exited, and reports why.
        finally:
            for fd in (self._write_fd, self._source_fd, self._stop_read_fd):
                os.close(fd)

    def stop(self) -> None:
        """Stop the thread. The caller has closed ``read_fd``."""
        os.close(self._stop_write_fd)
        self.join(1.0)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._wait(self._write_fd, select.POLLOUT):
            view = view[os.write(self._write_fd, view) :]

    def _wait(self, fd: int, event: int) -> bool:
        """Wait until a descriptor is ready. Returns False if the thread should stop."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._stop_read_fd, select.POLLIN)
        return all(ready_fd != self._stop_read_fd for ready_fd, _ in poll.poll())
