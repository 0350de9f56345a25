"""Detect whether a filesystem has changed since a snapshot. Works with every version of ZFS."""

from __future__ import annotations

import struct

from sandbox_gateway.zfs.capabilities import detect_capabilities
from sandbox_gateway.zfs.exceptions import SnapshotMismatch, SnapshotNotFound, ZFSOutputError
from sandbox_gateway.zfs.listing import list_snapshots, lzc_exists
from sandbox_gateway.zfs.names import Name, filesystem_name, filesystem_of, snapshot_name
from sandbox_gateway.zfs.outcome import error_of
from sandbox_gateway.zfs.parse import parse_get
from sandbox_gateway.zfs.process import read_first_bytes
from sandbox_gateway.zfs.properties import get_props, sync, written_bytes
from sandbox_gateway.zfs.run import run


def has_changed_since(name: Name, snap: Name) -> bool:
    """Return whether the filesystem ``name`` has changed since ``snap``, a snapshot of itself or of an ancestor.

    A change that was undone also counts. Raises FilesystemNotFound, SnapshotNotFound, or SnapshotMismatch if the
    filesystem does not descend from ``snap``.
    """
    target, snapshot = filesystem_name(name), snapshot_name(snap)
    sync(target)
    if not detect_capabilities().written_property:
        return _has_changed_by_comparison(target, snapshot)
    outcome = run("get", "-Hp", "-o", "name,property,value,source", f"written@{snapshot}", target, name=target)
    if outcome.cause is None and (properties := parse_get(outcome.output)) and properties[0].value.isdigit():
        return properties[0].number > 0
    if not lzc_exists(snapshot):
        raise SnapshotNotFound(snapshot)
    return written_bytes(target) > 0 or _is_different(snapshot, _newest_snapshot(target))


def _has_changed_by_comparison(target: str, snapshot: str) -> bool:
    """Compare snapshots pair by pair, because ``unique`` only counts changes since the newest snapshot."""
    if not lzc_exists(snapshot):
        raise SnapshotNotFound(snapshot)
    newest = _newest_snapshot(target)
    return _is_different(snapshot, newest) if written_bytes(target) == 0 else _check_descent(newest, snapshot)


def _newest_snapshot(filesystem: str) -> str:
    """Return the snapshot on which a filesystem's current state is based: its newest snapshot, or its origin."""
    snapshots = list_snapshots(filesystem)
    return snapshots[-1] if snapshots else _origin(filesystem)


def _origin(filesystem: str) -> str:
    return get_props([filesystem], ["origin"])[filesystem]["origin"].value


def _check_descent(snap: str, ancestor: str) -> bool:
    """Return True. Raises SnapshotMismatch if ``snap`` does not descend from ``ancestor``."""
    while snap != "-":
        snapshots = list_snapshots(filesystem_of(snap))
        if ancestor in snapshots[: snapshots.index(snap) + 1]:
            return True
        snap = _origin(filesystem_of(snap))
    raise SnapshotMismatch(ancestor)


_RECORD_BYTES = 312
"""The size of a record in a stream. If nothing changed, the stream consists only of a begin and an end record."""
_END_RECORD = 5


def _is_different(older: str, newer: str) -> bool:
    """Return whether the snapshot ``newer`` differs from its ancestor ``older``."""
    while newer != older:
        snapshots = list_snapshots(filesystem_of(newer)) if newer != "-" else []
        earlier = snapshots[: snapshots.index(newer)] if newer in snapshots else []
        start = older if older in earlier else _origin(filesystem_of(newer)) if newer in snapshots else "-"
        if start == "-":
            raise SnapshotMismatch(older)
        if _stream_has_changes(start, newer):
            return _check_descent(start, older)
        newer = start
    return False


def _stream_has_changes(start: str, end: str) -> bool:
    data, outcome = read_first_bytes("send", "-i", start, end, count=_RECORD_BYTES + 4)
    if outcome is not None:
        raise error_of(outcome, end, "compare snapshots") if outcome.cause else ZFSOutputError(end)
    return bool(struct.unpack_from("=I", data, _RECORD_BYTES)[0] != _END_RECORD)
