"""What changed since a snapshot, told exactly by every version of ZFS."""

from __future__ import annotations

import struct

from sandbox_gateway.hosts.jail_zfs.zfs_command import (
    failure,
    first_bytes,
    flavour,
    run,
)
from sandbox_gateway.hosts.jail_zfs.zfs_errors import (
    SnapshotMismatch,
    SnapshotNotFound,
    ZFSOutputError,
)
from sandbox_gateway.hosts.jail_zfs.zfs_parse import (
    Name,
    filesystem_name,
    filesystem_of,
    parse_get,
    snapshot_name,
)
from sandbox_gateway.hosts.jail_zfs.zfs_props import (
    get_props,
    list_snapshots,
    lzc_exists,
    sync,
    written,
)


def changed_since(name: Name, snap: Name) -> bool:
    """Was anything written to the filesystem ``name`` since ``snap``, one of its own snapshots or of its ancestors'?

    What was written and taken back counts. Raises FilesystemNotFound, SnapshotNotFound, SnapshotMismatch (it does not
    descend from ``snap``).
    """
    target, since = filesystem_name(name), snapshot_name(snap)
    sync(target)
    if flavour().fuse:
        return _changed_since_on_fuse(target, since)
    outcome = run("get", "-Hp", "-o", "name,property,value,source", f"written@{since}", target, name=target)
    if outcome.cause is None and (found := parse_get(outcome.out)) and found[0].value.isdigit():
        return found[0].number > 0
    if not lzc_exists(since):
        raise SnapshotNotFound(since)
    return written(target) > 0 or _differ(since, _newest(target))


def _changed_since_on_fuse(target: str, since: str) -> bool:
    """``unique`` of a head is what it has beyond its newest snapshot; older ones are compared pair by pair."""
    if not lzc_exists(since):
        raise SnapshotNotFound(since)
    newest = _newest(target)
    return _differ(since, newest) if written(target) == 0 else _descends(newest, since)


def _newest(filesystem: str) -> str:
    """The snapshot that a filesystem's present state was built upon; its own newest, else its origin."""
    own = list_snapshots(filesystem)
    return own[-1] if own else _origin(filesystem)


def _origin(filesystem: str) -> str:
    return get_props([filesystem], ["origin"])[filesystem]["origin"].value


def _descends(snap: str, ancestor: str) -> bool:
    """True, or SnapshotMismatch."""
    while snap != "-":
        own = list_snapshots(filesystem_of(snap))
        if ancestor in own[: own.index(snap) + 1]:
            return True
        snap = _origin(filesystem_of(snap))
    raise SnapshotMismatch(ancestor)


_RECORD = 312
"""Bytes of a record in a stream; the first is the beginning, and the second the end where nothing changed."""
_END = 5


def _differ(older: str, newer: str) -> bool:
    """Do two snapshots of one line of descent differ?"""
    while newer != older:
        own = list_snapshots(filesystem_of(newer)) if newer != "-" else []
        before = own[: own.index(newer)] if newer in own else []
        start = older if older in before else _origin(filesystem_of(newer)) if newer in own else "-"
        if start == "-":
            raise SnapshotMismatch(older)
        if _stream_has_changes(start, newer):
            return _descends(start, older)
        newer = start
    return False


def _stream_has_changes(start: str, end: str) -> bool:
    got, outcome = first_bytes("send", "-i", start, end, count=_RECORD + 4)
    if outcome is not None:
        raise failure(outcome, end, "compare snapshots") if outcome.cause else ZFSOutputError(end)
    return bool(struct.unpack_from("=I", got, _RECORD)[0] != _END)
