"""Hold and release snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetNotFound,
    FeatureNotSupported,
    HoldExists,
    HoldFailure,
    HoldNotFound,
    HoldReleaseFailure,
    NameInvalid,
    NameTooLong,
    SnapshotNotFound,
    ZFSOutputError,
)
from zfs_core.listing import lzc_exists
from zfs_core.names import Name, decode_name, validate_snapshot_name
from zfs_core.outcome import check, error_of
from zfs_core.parse import parse_table
from zfs_core.properties import local_props, lzc_inherit_prop, lzc_set_prop
from zfs_core.run import run

_HOLD_PROPERTY_PREFIX = "pyzfs:hold."


def lzc_hold(holds: Mapping[str, Name] | Mapping[bytes, Name], fd: int | None = None) -> list[str]:
    """Place the holds in ``{snapshot: tag}``. Returns the snapshots that do not exist.

    Raises HoldFailure, whose ``errors`` are HoldExists, NameInvalid or NameTooLong. ``fd`` must be None, because a hold
    placed by the command outlives the process. If ZFS cannot list holds, each hold is also recorded in a user property.
    """
    if fd is not None:
        raise FeatureNotSupported(None).with_details(
            "the command cannot bind a hold to a file descriptor: pass fd=None"
        )
    missing_snapshots, errors = [], []
    for snap, tag_name in holds.items():
        target, tag = _check_hold(HoldFailure, snap, tag_name)
        outcome = run("hold", tag, target, name=target)
        if outcome.cause is Cause.MISSING:
            missing_snapshots.append(target)
        elif outcome.cause is not None:
            errors.append(error_of(outcome, target, "hold snapshot", {Cause.TAG_EXISTS: HoldExists}))
        elif not detect_capabilities().lists_holds:
            lzc_set_prop(target, _HOLD_PROPERTY_PREFIX + tag.encode().hex(), str(int(time.time())))
    if errors:
        raise HoldFailure(errors)
    return missing_snapshots


def lzc_release(holds: Mapping[str, Iterable[Name]] | Mapping[bytes, Iterable[Name]]) -> list[str]:
    """Release the holds in ``{snapshot: [tags]}``. Returns the snapshots that do not exist.

    If a snapshot was destroyed with ``defer``, releasing its last hold removes it. Raises HoldReleaseFailure, whose
    ``errors`` are HoldNotFound, NameInvalid or NameTooLong.
    """
    missing_snapshots, errors = [], []
    for snap, tags in holds.items():
        for tag_name in tags:
            target, tag = _check_hold(HoldReleaseFailure, snap, tag_name)
            if not detect_capabilities().lists_holds and lzc_exists(target):
                lzc_inherit_prop(target, _HOLD_PROPERTY_PREFIX + tag.encode().hex())
            outcome = run("release", tag, target, name=target)
            if outcome.cause is Cause.MISSING:
                missing_snapshots.append(target)
            elif outcome.cause is not None:
                errors.append(error_of(outcome, target, "release snapshot hold", {Cause.TAG_MISSING: HoldNotFound}))
    if errors:
        raise HoldReleaseFailure(errors)
    return missing_snapshots


def _check_hold(failure_class: type[HoldFailure] | type[HoldReleaseFailure], snap: Name, tag: Name) -> tuple[str, str]:
    try:
        target, text = validate_snapshot_name(snap), decode_name(tag)
    except (NameInvalid, NameTooLong) as error:
        raise failure_class([error]) from None
    if not text or text.startswith("-") or not text.isprintable():
        raise failure_class([NameInvalid(text)])
    if len(text.encode()) > 120:
        raise failure_class([NameTooLong(text)])
    return target, text


def lzc_get_holds(snapname: Name) -> dict[str, int]:
    """Return the holds of a snapshot, as ``{tag: creation time in Unix seconds}``. Raises SnapshotNotFound."""
    target = validate_snapshot_name(snapname)
    if not detect_capabilities().lists_holds:
        return _read_recorded_holds(target)
    outcome = check(run("holds", "-H", target, name=target), target, "get holds", {Cause.MISSING: SnapshotNotFound})
    return {tag: _to_unix_seconds(date) for _, tag, date in parse_table(outcome.output, 3)}


def _read_recorded_holds(target: str) -> dict[str, int]:
    try:
        props = local_props(target)
    except DatasetNotFound:
        raise SnapshotNotFound(target) from None
    return {
        bytes.fromhex(prop.removeprefix(_HOLD_PROPERTY_PREFIX)).decode(): int(value)
        for prop, value in props.items()
        if prop.startswith(_HOLD_PROPERTY_PREFIX)
    }


def _to_unix_seconds(text: str) -> int:
    try:
        return int(time.mktime(time.strptime(text.strip(), "%a %b %d %H:%M %Y")))
    except ValueError:
        raise ZFSOutputError(None).with_details(f"{text!r} is not a time") from None
