"""Hold and release snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetNotFound,
    HoldExists,
    HoldFailure,
    HoldNotFound,
    HoldReleaseFailure,
    NameInvalid,
    NameTooLong,
    PoolsDiffer,
    SnapshotNotFound,
    ZFSError,
    ZFSOutputError,
)
from zfs_core.hold_descriptors import release_when_closed, validate_descriptor
from zfs_core.listing import lzc_exists
from zfs_core.names import (
    Name,
    accepts_bytes,
    decode_name,
    get_pool_name,
    get_short_name,
    is_filesystem_name,
    is_snapshot_name,
    is_too_long,
    validate_existing_name,
)
from zfs_core.outcome import check, make_error
from zfs_core.parse import parse_table
from zfs_core.properties import local_props, lzc_inherit_prop, lzc_set_prop
from zfs_core.run import run

_HOLD_PROPERTY_PREFIX = "pyzfs:hold."


@accepts_bytes
def lzc_hold(holds: Mapping[str, Name] | Mapping[bytes, Name], fd: int | None = None) -> list[str]:
    """Place the holds in ``{snapshot: tag}``, all in one pool. Returns the snapshots that do not exist.

    ``fd``: a descriptor of ``/dev/zfs`` that is open for reading. The holds are released when it is closed, even if the
    process is killed after this function has returned. The command cannot do that, so a helper process waits for the
    descriptor to be closed. The holds remain if the helper is also killed, or if the machine crashes. This only works
    on Linux; on other systems, NotImplementedError is raised.

    If a hold fails, places none and raises HoldFailure, whose ``errors`` are HoldExists, NameInvalid, NameTooLong or
    PoolsDiffer. Raises BadHoldCleanupFD for any other ``fd``. If ZFS cannot list holds, each hold is also recorded in a
    user property. Command: ``zfs hold TAG SNAP`` for each.
    """
    if fd is not None:
        validate_descriptor(fd)
    names = {decode_name(snap): decode_name(tag) for snap, tag in holds.items()}
    _check_holds(names, {name: [tag] for name, tag in names.items()}, HoldFailure)
    placed_holds: dict[str, str] = {}
    try:
        missing_snapshots = _place_holds(names, placed_holds)
        if fd is not None and placed_holds:
            release_when_closed(fd, placed_holds)
    except BaseException:
        for name, tag in placed_holds.items():
            with suppress(ZFSError):  # The first failure counts.
                _release(name, tag)
        raise
    return missing_snapshots


def _place_holds(holds: Mapping[str, str], placed_holds: dict[str, str]) -> list[str]:
    """Place the holds in ``{snapshot: tag}``, and add them to ``placed_holds``. Returns the missing snapshots."""
    missing_snapshots: list[str] = []
    for name, tag in holds.items():
        if is_too_long(name):  # No snapshot has this name.
            missing_snapshots.append(name)
            continue
        outcome = run("hold", tag, name, name=name)
        if outcome.cause in (Cause.MISSING, Cause.NO_POOL):
            missing_snapshots.append(name)
        elif outcome.cause is not None:
            raise HoldFailure([make_error(outcome, name, "hold snapshot", {Cause.TAG_EXISTS: HoldExists})])
        else:
            placed_holds[name] = tag
            if not detect_capabilities().lists_holds:
                lzc_set_prop(name, _HOLD_PROPERTY_PREFIX + tag.encode().hex(), str(int(time.time())))
    return missing_snapshots


@accepts_bytes
def lzc_release(holds: Mapping[str, Iterable[Name]] | Mapping[bytes, Iterable[Name]]) -> list[str]:
    """Release the holds in ``{snapshot: [tags]}``, all in one pool.

    If a snapshot was destroyed with ``defer``, releasing its last hold removes it. Returns the snapshots that do not
    exist, and ``SNAPSHOT#TAG`` for each tag that a snapshot does not have. Raises HoldReleaseFailure, whose ``errors``
    are NameInvalid, NameTooLong or PoolsDiffer, or those of the command. In the last case, they also contain
    HoldNotFound for each name that would otherwise be returned. Command: ``zfs release TAG SNAP`` for each.
    """
    names = {decode_name(snap): [decode_name(tag) for tag in tags] for snap, tags in holds.items()}
    _check_holds(names, {}, HoldReleaseFailure)
    missing_holds: list[str] = []
    errors: list[ZFSError] = []
    for name, tags in names.items():
        for tag in tags:
            cause = _release(name, tag, errors.append)
            if cause is Cause.TAG_MISSING:
                missing_holds.append(f"{name}#{tag}")
            elif cause is Cause.MISSING and name not in missing_holds:
                missing_holds.append(name)
    if errors:
        raise HoldReleaseFailure([*errors, *map(HoldNotFound, missing_holds)])
    return missing_holds


def _release(name: str, tag: str, report: Callable[[ZFSError], object] | None = None) -> Cause | None:
    """Release a hold. Returns MISSING, TAG_MISSING or None. Reports other errors."""
    if is_too_long(name):
        return Cause.MISSING
    if not _is_possible_tag(tag):
        return Cause.TAG_MISSING if lzc_exists(name) else Cause.MISSING
    if not detect_capabilities().lists_holds and lzc_exists(name):
        lzc_inherit_prop(name, _HOLD_PROPERTY_PREFIX + tag.encode().hex())
    outcome = run("release", tag, name, name=name)
    if outcome.cause in (Cause.MISSING, Cause.NO_POOL):
        return Cause.MISSING
    if outcome.cause not in (None, Cause.TAG_MISSING) and report is not None:
        report(make_error(outcome, name, "release snapshot hold"))
    return outcome.cause


def _is_possible_tag(tag: str) -> bool:
    return _find_tag_error(tag) is None


def _find_tag_error(tag: str) -> ZFSError | None:
    if not tag or tag.startswith("-") or not tag.isprintable():
        return NameInvalid(tag)
    return NameTooLong(tag) if len(tag.encode()) > detect_capabilities().hold_tag_max else None


def _check_holds(
    names: Iterable[str],
    tags: Mapping[str, Iterable[str]],
    failure_class: type[HoldFailure] | type[HoldReleaseFailure],
) -> None:
    errors: list[ZFSError] = [NameInvalid(name) for name in names if not is_snapshot_name(name)]
    errors += [NameTooLong(name) for name in names if is_too_long(get_short_name(name)) and is_snapshot_name(name)]
    errors += [error for each in tags.values() for tag in each if (error := _find_tag_error(tag))]
    if not errors and len({get_pool_name(name) for name in names}) > 1:
        errors = [PoolsDiffer(None)]
    if errors:
        raise failure_class(errors)


@accepts_bytes
def lzc_get_holds(snapname: Name) -> dict[str, int]:
    """Return the holds of a snapshot, as ``{tag: creation time in Unix seconds}``.

    Raises SnapshotNotFound, NameInvalid, NameTooLong. Before OpenZFS 2.3, the command rounds the time to
    minutes. Command: ``zfs holds -H -p SNAPNAME``.
    """
    target = decode_name(snapname)
    if is_filesystem_name(target):
        raise SnapshotNotFound(target)
    if not is_snapshot_name(target):
        raise NameInvalid(target)
    target = validate_existing_name(target)
    if not detect_capabilities().lists_holds:
        return _read_recorded_holds(target)
    options = ["-H", "-p"] if detect_capabilities().exact_hold_times else ["-H"]
    outcome = check(run("holds", *options, target, name=target), target, "get holds", {Cause.MISSING: SnapshotNotFound})
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
    if text.isdecimal():
        return int(text)
    try:
        return int(time.mktime(time.strptime(text.strip(), "%a %b %d %H:%M %Y")))
    except ValueError:
        raise ZFSOutputError(None).with_details(f"{text!r} is not a time") from None
