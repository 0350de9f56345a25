"""Continue interrupted streams by their token, the property ``receive_resume_token`` of the destination."""

from __future__ import annotations

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    BadStream,
    DestinationModified,
    FeatureNotSupported,
    PropertyInvalid,
    SnapshotNotFound,
    StreamMismatch,
    StreamTruncated,
)
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, check
from zfs_core.run import run


def send_remainder(token: str, fd: int, seconds: float) -> None:
    """Write the rest of an interrupted stream to ``fd`` (``zfs send -t``). Raises SnapshotNotFound if it is gone."""
    _require_resumable_streams(None)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.MISSING: lambda _: SnapshotNotFound(None),
        Cause.NAME_INVALID: lambda _: PropertyInvalid("receive_resume_token"),
        Cause.OTHER: lambda _: PropertyInvalid("receive_resume_token"),
    }
    check(run("send", "-t", token, stdout=fd, seconds=seconds), "receive_resume_token", "send", specific_errors)


def receive_resumable(
    target: str, fd: int, force: bool, raw: bool, origin: str | None, props: Props, seconds: float
) -> None:
    """Receive a stream, and keep the received part if it is interrupted (``zfs receive -s``)."""
    _require_resumable_streams(target)
    options = ["-u", "-s", *(["-F"] if force else []), *format_property_options(props)]
    options += [] if origin is None else ["-o", f"origin={origin}"]
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.STREAM_MISMATCH: StreamMismatch,
        Cause.DESTINATION_MODIFIED: DestinationModified,
        Cause.BAD_STREAM: lambda _: BadStream(None),
        Cause.STREAM_TRUNCATED: lambda _: StreamTruncated(None),
    }
    check(run("receive", *options, target, stdin=fd, seconds=seconds, name=target), target, "receive", specific_errors)


def _require_resumable_streams(name: str | None) -> None:
    # All versions of ZFS that take options of `zfs receive` can also resume.
    if not detect_capabilities().receive_options:
        raise FeatureNotSupported(name).with_details("zfs-fuse cannot resume streams")
