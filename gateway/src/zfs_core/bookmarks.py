"""Create, list and destroy bookmarks: points in a filesystem's history from which incremental streams can be sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    BookmarkDestructionFailure,
    BookmarkExists,
    BookmarkFailure,
    BookmarkMismatch,
    BookmarkNameInvalid,
    BookmarkNotSupported,
    BookmarkSourceInvalid,
    FilesystemNotFound,
    NameInvalid,
    NameTooLong,
    PoolsDiffer,
    SnapshotNotFound,
    ZFSError,
)
from zfs_core.listing import find_types
from zfs_core.names import (
    Name,
    accepts_bytes,
    decode_name,
    get_pool_name,
    get_short_name,
    is_bookmark_name,
    is_snapshot_name,
    is_too_long,
    validate_bookmark_name,
    validate_filesystem_name,
)
from zfs_core.outcome import ErrorFactory, check, make_error
from zfs_core.parse import parse_table
from zfs_core.run import run

_PROPERTIES = ("guid", "createtxg", "creation")


_ERRORS: dict[Cause, ErrorFactory] = {
    Cause.EXISTS: BookmarkExists,
    Cause.MISSING: SnapshotNotFound,
    Cause.NOT_SUPPORTED: BookmarkNotSupported,
}


def _require_support(function_name: str) -> None:
    if not detect_capabilities().bookmarks:
        raise NotImplementedError(f"{function_name}: this version of ZFS does not support bookmarks")


@accepts_bytes
def lzc_bookmark(bookmarks: Mapping[str, Name] | Mapping[bytes, Name]) -> None:
    """Create the bookmarks in ``{bookmark: snapshot or bookmark}``. If one fails, creates none.

    Raises BookmarkFailure, whose ``errors`` are BookmarkExists, SnapshotNotFound, BookmarkMismatch,
    BookmarkSourceInvalid, BookmarkNameInvalid, NameTooLong, PoolsDiffer or BookmarkNotSupported. Command:
    ``zfs bookmark SOURCE BOOKMARK`` for each.
    """
    _require_support("lzc_bookmark")
    sources = {decode_name(name): decode_name(source) for name, source in bookmarks.items()}
    if errors := [error for name, source in sources.items() if (error := _find_name_error(name, source, sources))]:
        raise BookmarkFailure(errors)
    types = find_types([*sources, *sources.values()])
    if errors := [
        SnapshotNotFound(name) if source not in types else BookmarkExists(name)
        for name, source in sources.items()
        if source not in types or name in types
    ]:
        raise BookmarkFailure(errors)
    created_names: list[str] = []
    for name, source in sources.items():
        outcome = run("bookmark", source, name, name=name)
        if outcome.cause is not None:
            for created_name in created_names:
                run("destroy", created_name, name=created_name)
            mismatch = outcome.explain(BookmarkMismatch(source)) if outcome.cause is Cause.BOOKMARK_MISMATCH else None
            raise BookmarkFailure([mismatch or make_error(outcome, name, "create bookmark", _ERRORS)])
        created_names.append(name)


def _find_name_error(name: str, source: str, sources: Mapping[str, str]) -> ZFSError | None:
    if not is_bookmark_name(name):
        return BookmarkNameInvalid(name)
    if not is_snapshot_name(source) and not is_bookmark_name(source):
        return BookmarkSourceInvalid(source)
    if is_too_long(name):
        return NameTooLong(name)
    if any(get_pool_name(each) != get_pool_name(name) for each in sources):
        return PoolsDiffer(name)
    return None


@accepts_bytes
def lzc_get_bookmarks(fsname: Name, props: Iterable[Name] | None = None) -> dict[str, dict[str, int]]:
    """Return ``{short name: {property: number}}`` for the bookmarks of a filesystem.

    The properties are ``guid``, ``createtxg`` and ``creation`` (Unix seconds) of the snapshot that was bookmarked.
    Ignores other properties, as libzfs_core does. Raises FilesystemNotFound, NameInvalid, NameTooLong. Command:
    ``zfs list -p -d 1 -t bookmark FSNAME``.
    """
    _require_support("lzc_get_bookmarks")
    target = validate_filesystem_name(fsname)
    prop_names = [name for name in map(decode_name, props or []) if name in _PROPERTIES]
    columns = ["name", *prop_names]
    outcome = run("list", "-H", "-p", "-d", "1", "-t", "bookmark", "-o", ",".join(columns), target, name=target)
    rows = parse_table(
        check(outcome, target, "list bookmarks", {Cause.MISSING: FilesystemNotFound}).output, len(columns)
    )
    return {
        get_short_name(row[0]): {name: int(value) for name, value in zip(prop_names, row[1:], strict=True)}
        for row in rows
    }


@accepts_bytes
def lzc_destroy_bookmarks(bookmarks: Iterable[Name]) -> None:
    """Destroy bookmarks. Skips bookmarks that do not exist.

    If a name is invalid, destroys none and raises BookmarkDestructionFailure. Command: ``zfs destroy BOOKMARK`` for
    each.
    """
    _require_support("lzc_destroy_bookmarks")
    names: list[str] = []
    errors: list[ZFSError] = []
    for bookmark in bookmarks:
        try:
            names.append(validate_bookmark_name(bookmark))
        except (NameInvalid, NameTooLong) as error:
            errors.append(error)
    if errors:
        raise BookmarkDestructionFailure(errors)
    for name in names:
        outcome = run("destroy", name, name=name)
        if outcome.cause not in (None, Cause.MISSING, Cause.NO_POOL):
            errors.append(make_error(outcome, name, "destroy bookmark"))
    if errors:
        raise BookmarkDestructionFailure(errors)
