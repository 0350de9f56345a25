"""Send snapshots as streams, and receive them."""

from __future__ import annotations

from collections.abc import Sequence

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    BadStream,
    DatasetNotFound,
    DestinationModified,
    FeatureNotSupported,
    PoolsDiffer,
    SnapshotMismatch,
    SnapshotNotFound,
    StreamMismatch,
    StreamTruncated,
)
from zfs_core.listing import lzc_exists
from zfs_core.names import Name, decode_name, pool_of, validate_new_snapshot_name, validate_snapshot_name
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, check
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS
from zfs_core.run import run


def lzc_send(
    snapname: Name,
    fromsnap: Name | None,
    fd: int,
    flags: Sequence[str] | None = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Write the stream of a snapshot, or of the changes since ``fromsnap``, to the file descriptor ``fd``.

    Raises FeatureNotSupported if there are ``flags``. Also raises SnapshotNotFound, SnapshotMismatch, PoolsDiffer,
    NameInvalid, NameTooLong.
    """
    target = validate_snapshot_name(snapname)
    if flags:
        raise FeatureNotSupported(target).with_details(
            "not all versions of ZFS can receive streams with flags: omit the flags"
        )
    incremental_options = [] if fromsnap is None else ["-i", validate_snapshot_name(fromsnap)]
    if incremental_options and pool_of(incremental_options[1]) != pool_of(target):
        raise PoolsDiffer(target)
    outcome = run("send", *incremental_options, target, stdout=fd, seconds=seconds, name=target)
    specific_errors: dict[Cause, ErrorFactory] = {Cause.MISSING: SnapshotNotFound, Cause.NOT_RELATED: SnapshotMismatch}
    check(outcome, target, "send", specific_errors)


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
    """Create the snapshot ``snapname`` from the stream on the file descriptor ``fd``.

    If the snapshot's filesystem does not exist, creates it without mounting it. On zfs-fuse, ``origin`` must exist but
    is otherwise ignored, and ``props`` or ``raw`` cause FeatureNotSupported. Also raises DatasetExists, StreamMismatch,
    DestinationModified, BadStream, DatasetNotFound, NoSpace, QuotaExceeded, DatasetBusy.
    """
    target = validate_new_snapshot_name(snapname)
    options = ["-u", *(["-F"] if force else [])]
    if not detect_capabilities().receive_options:
        if props or raw:
            raise FeatureNotSupported(target).with_details(
                "zfs-fuse cannot receive streams with options: omit props and raw"
            )
        if origin is not None and not lzc_exists(validate_snapshot_name(origin)):
            raise DatasetNotFound(decode_name(origin))
    else:
        options += format_property_options(props)
        options += [] if origin is None else ["-o", f"origin={validate_snapshot_name(origin)}"]
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.STREAM_MISMATCH: StreamMismatch,
        Cause.DESTINATION_MODIFIED: DestinationModified,
        Cause.BAD_STREAM: lambda _: BadStream(None),
        Cause.STREAM_TRUNCATED: lambda _: StreamTruncated(None),
    }
    check(run("receive", *options, target, stdin=fd, seconds=seconds, name=target), target, "receive", specific_errors)
