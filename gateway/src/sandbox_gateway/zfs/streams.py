"""Send snapshots as streams, and receive them."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_gateway.zfs.capabilities import detect_capabilities
from sandbox_gateway.zfs.causes import Cause
from sandbox_gateway.zfs.exceptions import (
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
from sandbox_gateway.zfs.listing import lzc_exists
from sandbox_gateway.zfs.names import Name, decode_name, new_snapshot_name, pool_of, snapshot_name
from sandbox_gateway.zfs.options import Props, property_options
from sandbox_gateway.zfs.outcome import ErrorFactory, check
from sandbox_gateway.zfs.process import TRANSFER_TIMEOUT_SECONDS
from sandbox_gateway.zfs.run import run


def lzc_send(
    snapname: Name,
    fromsnap: Name | None,
    fd: int,
    flags: Sequence[str] | None = None,
    *,
    seconds: float = TRANSFER_TIMEOUT_SECONDS,
) -> None:
    """Write the stream of a snapshot, or of the changes since ``fromsnap``, to ``fd``.

    Raises FeatureNotSupported if there are ``flags``. Also raises SnapshotNotFound, SnapshotMismatch, PoolsDiffer,
    NameInvalid, NameTooLong.
    """
    target = snapshot_name(snapname)
    if flags:
        raise FeatureNotSupported(target).with_details(
            "not all versions of ZFS can receive streams with flags: omit the flags"
        )
    start = [] if fromsnap is None else ["-i", snapshot_name(fromsnap)]
    if start and pool_of(start[1]) != pool_of(target):
        raise PoolsDiffer(target)
    outcome = run("send", *start, target, stdout=fd, seconds=seconds, name=target)
    specific: dict[Cause, ErrorFactory] = {Cause.MISSING: SnapshotNotFound, Cause.NOT_RELATED: SnapshotMismatch}
    check(outcome, target, "send", specific)


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
    """Create the snapshot ``snapname`` from the stream on ``fd``. Creates its filesystem, unmounted, if necessary.

    zfs-fuse ignores ``origin`` if it exists, and does not support ``props`` and ``raw``: they cause
    FeatureNotSupported. Also raises DatasetExists, StreamMismatch, DestinationModified, BadStream, DatasetNotFound,
    NoSpace, QuotaExceeded, DatasetBusy.
    """
    target = new_snapshot_name(snapname)
    options = ["-u", *(["-F"] if force else [])]
    if not detect_capabilities().receive_options:
        if props or raw:
            raise FeatureNotSupported(target).with_details(
                "zfs-fuse cannot receive streams with options: pass no props, and raw=False"
            )
        if origin is not None and not lzc_exists(snapshot_name(origin)):
            raise DatasetNotFound(decode_name(origin))
    else:
        options += property_options(props)
        options += [] if origin is None else ["-o", f"origin={snapshot_name(origin)}"]
    specific: dict[Cause, ErrorFactory] = {
        Cause.STREAM_MISMATCH: StreamMismatch,
        Cause.MODIFIED: DestinationModified,
        Cause.BAD_STREAM: lambda _: BadStream(None),
        Cause.STREAM_TRUNCATED: lambda _: StreamTruncated(None),
    }
    check(run("receive", *options, target, stdin=fd, seconds=seconds, name=target), target, "receive", specific)
