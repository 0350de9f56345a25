"""Send snapshots as streams."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    FeatureNotSupported,
    NameInvalid,
    NameTooLong,
    PoolsDiffer,
    SnapshotMismatch,
    SnapshotNotFound,
    StreamIOError,
    UnknownStreamFeature,
    ZFSError,
    ZFSOutputError,
)
from zfs_core.listing import find_types
from zfs_core.names import (
    Name,
    accepts_bytes,
    decode_name,
    get_pool_name,
    get_short_name,
    is_bookmark_name,
    is_filesystem_name,
    is_snapshot_name,
    is_too_long,
)
from zfs_core.outcome import Outcome, make_error
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS
from zfs_core.properties import get_props
from zfs_core.run import run
from zfs_core.stream_format import make_resume_token

_FLAG_OPTIONS = {"embedded_data": "-e", "large_blocks": "-L", "compress": "-c", "raw": "-w"}
_FLAG_NAMES_IN_TOKENS = {
    "embedded_data": "embedok",
    "large_blocks": "largeblockok",
    "compress": "compressok",
    "raw": "rawok",
}


@accepts_bytes
def lzc_send(
    snapname: Name,
    fromsnap: Name | None,
    fd: int,
    flags: Iterable[Name] | None = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Write the stream of a snapshot, or of the changes since ``fromsnap``, to the file descriptor ``fd``.

    ``fromsnap`` may be a bookmark. ``snapname`` may be a filesystem that is unmounted or read-only, whose current
    state is then sent. ``flags``: ``embedded_data``, ``large_blocks``, ``compress``, ``raw``.

    Raises SnapshotNotFound, SnapshotMismatch, PoolsDiffer, NameInvalid, NameTooLong, UnknownStreamFeature, and
    StreamIOError if nothing can be written to ``fd``. Raises FeatureNotSupported if this version of ZFS does not
    support flags.
    Command: ``zfs send [-e] [-L] [-c] [-w] [-i FROMSNAP] SNAPNAME``.
    """
    options = _format_flags(flags)
    target, source = _validate_send_names(snapname, fromsnap, may_be_filesystem=True)
    if options and not detect_capabilities().send_options:
        raise FeatureNotSupported(target).with_details("zfs-fuse cannot send with flags: omit the flags")
    _validate_output(fd)
    incremental_options = [] if source is None else ["-i", source]
    outcome = run("send", *options, *incremental_options, target, stdout=fd, seconds=seconds, name=target)
    if outcome.cause is not None:
        raise _make_send_error(outcome, target, source, "send")


@accepts_bytes
def lzc_send_resume(
    snapname: Name,
    fromsnap: Name | None,
    fd: int,
    flags: Iterable[Name] | None = None,
    resumeobj: int = 0,
    resumeoff: int = 0,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Write the rest of a stream that was interrupted.

    ``resumeobj`` and ``resumeoff`` are in the token that the receiving filesystem has as ``receive_resume_token`` (see
    ``parse_resume_token``). Otherwise the same as ``lzc_send``. Command: ``zfs send -t TOKEN``, with a token made of
    these values.
    """
    flag_names = [decode_name(flag) for flag in flags or []]
    _format_flags(flag_names)
    if not detect_capabilities().send_options:
        raise NotImplementedError("lzc_send_resume: this version of ZFS cannot resume streams")
    target, source = _validate_send_names(snapname, fromsnap, may_be_filesystem=False)
    _validate_output(fd)
    names = [target] if source is None else [target, source]
    if len(find_types(names)) < len(names):
        raise SnapshotNotFound(target)
    values: dict[str, int | str | None] = {"object": resumeobj, "offset": resumeoff, "bytes": 0}
    values |= {"toguid": _get_number(target, "guid"), "toname": target}
    if source is not None:
        values["fromguid"] = _get_number(source, "guid")
    values |= {_FLAG_NAMES_IN_TOKENS[flag]: None for flag in flag_names}
    outcome = run("send", "-t", make_resume_token(values), stdout=fd, seconds=seconds, name=target)
    if outcome.cause is not None:
        raise _make_send_error(outcome, target, source, "resume send")


@accepts_bytes
def lzc_send_space(snapname: Name, fromsnap: Name | None = None, flags: Iterable[Name] | None = None) -> int:
    """Estimate the size, in bytes, of the stream that ``lzc_send`` would write with these arguments.

    Raises SnapshotNotFound, SnapshotMismatch, PoolsDiffer, NameInvalid, NameTooLong, UnknownStreamFeature. Command:
    ``zfs send -n -v -P [-e] [-L] [-c] [-w] [-i FROMSNAP] SNAPNAME``.
    """
    options = _format_flags(flags)
    target, source = _validate_send_names(snapname, fromsnap, may_be_filesystem=False)
    if not detect_capabilities().send_options:
        raise NotImplementedError("lzc_send_space: this version of ZFS cannot estimate the size of a stream")
    incremental_options = [] if source is None else ["-i", source]
    outcome = run("send", "-n", "-v", "-P", *options, *incremental_options, target, name=target)
    if outcome.cause is not None:
        raise _make_send_error(outcome, target, source, _ESTIMATE)
    sizes = [line.partition("\t")[2] for line in outcome.output.splitlines() if line.startswith("size\t")]
    if len(sizes) != 1 or not sizes[0].isdecimal():
        raise ZFSOutputError(target).with_details(f"expected a line `size BYTES` in {outcome.output[:200]!r}")
    return int(sizes[0])


_ESTIMATE = "estimate backup stream size"


def _format_flags(flags: Iterable[Name] | None) -> list[str]:
    names = [decode_name(flag) for flag in flags or []]
    for name in names:
        if name not in _FLAG_OPTIONS:
            raise UnknownStreamFeature(name)
    return [_FLAG_OPTIONS[name] for name in names]


def _validate_send_names(snapname: Name, fromsnap: Name | None, *, may_be_filesystem: bool) -> tuple[str, str | None]:
    target, source = decode_name(snapname), None if fromsnap is None else decode_name(fromsnap)
    if source is not None and not is_snapshot_name(source) and not is_bookmark_name(source):
        raise NameInvalid(source)
    if not is_snapshot_name(target) and not (may_be_filesystem and is_filesystem_name(target)):
        raise NameInvalid(target)
    for name in (source, target):
        if name is not None and is_too_long(name):
            raise NameTooLong(name)
    if source is not None and get_pool_name(source) != get_pool_name(target):
        raise PoolsDiffer(target)
    return target, source


def _validate_output(fd: int) -> None:
    """Raise StreamIOError unless ``fd`` is open for writing."""
    try:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError, ValueError):
        raise StreamIOError(errno.EBADF) from None
    if mode == os.O_RDONLY:
        raise StreamIOError(errno.EBADF)


def _make_send_error(outcome: Outcome, target: str, source: str | None, action: str) -> ZFSError:
    """Return the exception for a failed command. Only some versions of ZFS print a specific message."""
    if outcome.cause is Cause.BROKEN_PIPE:
        return outcome.explain(StreamIOError(errno.EPIPE))
    names = [target] if source is None else [target, source]
    if len(find_types(names)) < len(set(names)):
        return outcome.explain(SnapshotNotFound(target))
    if source is not None and (outcome.cause is Cause.NOT_RELATED or not _is_earlier(source, target)):
        return outcome.explain(SnapshotMismatch(target))
    if outcome.cause is Cause.IO_ERROR and action != _ESTIMATE:
        return outcome.explain(StreamIOError(errno.EIO))
    return make_error(outcome, target, action)


def _is_earlier(source: str, target: str) -> bool:
    """Return whether ``source`` was taken before ``target``, in the same filesystem or one that it was cloned from."""
    if "@" in target and _get_number(source, "createtxg") >= _get_number(target, "createtxg"):
        return False
    filesystem = _get_dataset(target)
    while filesystem != _get_dataset(source):
        origin = get_props([filesystem], ["origin"])[filesystem]["origin"].value
        if "@" not in origin:
            return False
        filesystem = _get_dataset(origin)
    return True


def _get_number(name: str, prop: str) -> int:
    return get_props([name], [prop])[name][prop].number


def _get_dataset(name: str) -> str:
    return name if is_filesystem_name(name) else name[: -len(get_short_name(name)) - 1]
