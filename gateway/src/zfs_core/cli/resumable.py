"""Resume interrupted streams with their token, the property ``receive_resume_token`` of the receiving filesystem."""

from __future__ import annotations

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import get_value
from zfs_core.outcome import make_error
from zfs_core.run import run
from zfs_core.stream_format import parse_resume_token


def send_remainder(token: str, fd: int, seconds: float) -> None:
    """Write the rest of an interrupted stream to ``fd``. Command: ``zfs send -t TOKEN``."""
    _require_resumable_streams()
    name = find_sent_snapshot(token)
    outcome = run("send", "-t", token, stdout=fd, seconds=seconds, name=name)
    if outcome.cause is Cause.MISSING:
        raise CommandError(
            Kind.NOT_FOUND,
            f"{name!r} no longer exists: abort the transfer with zfs receive -A, and send another snapshot",
            [name],
        )
    if outcome.cause is not None:
        raise make_error(outcome, name, "send")


def find_sent_snapshot(token: str) -> str:
    """Return the full name of the snapshot that an interrupted stream contains."""
    try:
        return str(parse_resume_token(token)["toname"])
    except (ValueError, KeyError, IndexError):
        raise CommandError(
            Kind.INVALID, f"{token[:40]!r} is not a resume token: run lzc get receive_resume_token FILESYSTEM"
        ) from None


def find_resumed_snapshot(filesystem: str) -> str | None:
    """Return the short name of the snapshot that a filesystem has received in part, or None."""
    _require_resumable_streams()
    token = get_value(filesystem, "receive_resume_token")
    return None if token == "-" else find_sent_snapshot(token).partition("@")[2]


def _require_resumable_streams() -> None:
    if not detect_capabilities().send_options:
        raise CommandError(Kind.NOT_SUPPORTED, "this version of ZFS cannot resume streams: send the whole stream again")
