"""Determine why ``zfs`` failed.

The exit status only shows that the command failed; the reason is printed to standard error. The wording of zfs-fuse 0.7
and OpenZFS 2.4 is nearly the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto


class Cause(Enum):
    """A reason for a failure of ``zfs``."""

    UNREACHABLE = auto()
    SUSPENDED = auto()
    READ_ONLY = auto()
    NAME_TOO_LONG = auto()
    NAME_INVALID = auto()
    MOUNT_FAILED = auto()
    MOUNT_BUSY = auto()
    """The dataset was unmounted, but is still in use."""
    NOT_MOUNTED = auto()
    ALREADY_MOUNTED = auto()
    SIZE_TOO_SMALL = auto()
    QUOTA_EXCEEDED = auto()
    NO_SPACE = auto()
    POOLS_DIFFER = auto()
    NO_POOL = auto()
    NO_PARENT = auto()
    WRONG_PARENT = auto()
    """The parent is a volume, or a volume would replace a filesystem that cannot be replaced."""
    NOT_LATEST = auto()
    HAS_CLONES = auto()
    HAS_CHILDREN = auto()
    HELD = auto()
    NOT_CLONE = auto()
    SNAPSHOT_CONFLICT = auto()
    TAG_EXISTS = auto()
    TAG_MISSING = auto()
    STREAM_MISMATCH = auto()
    DESTINATION_MODIFIED = auto()
    STREAM_TRUNCATED = auto()
    BAD_STREAM = auto()
    NOT_RELATED = auto()
    STREAM_INVALID = auto()
    """`zfs receive -s` cannot interpret the stream."""
    STREAM_INCOMPATIBLE = auto()
    """The stream contains embedded data, which an encrypted filesystem cannot receive."""
    PROPERTY_INVALID = auto()
    PROPERTY_NOT_SUPPORTED = auto()
    PROPERTY_READ_ONLY = auto()
    EXISTS = auto()
    MISSING = auto()
    BUSY = auto()
    IN_USE = auto()
    """A process has files in the dataset open, or another file system is mounted on it."""
    BOOKMARK_MISMATCH = auto()
    NOT_SUPPORTED = auto()
    """The pool or the stream needs a feature that this ZFS lacks, or that is not enabled."""
    KEY_INVALID = auto()
    KEY_LOADED = auto()
    KEY_NOT_LOADED = auto()
    CHECKPOINT_EXISTS = auto()
    CHECKPOINT_MISSING = auto()
    CHECKPOINT_DISCARDING = auto()
    DEVICE_REMOVAL = auto()
    DEVICE_TOO_BIG = auto()
    RAIDZ_EXPANSION = auto()
    IO_ERROR = auto()
    BROKEN_PIPE = auto()
    """The reader of a stream has closed it."""
    OTHER = auto()


# The first match wins, so the more specific patterns come first.
_PATTERNS: tuple[tuple[Cause, str], ...] = (
    (
        Cause.UNREACHABLE,
        r"zfs-fuse daemon is running|failed to initialize (the )?ZFS|ZFS modules? (?:cannot be|are not|is not)"
        r"|Connection (refused|reset)|zfsfuse_ioctl_read_loop|(?<!\S)/dev/zfs(?![^\s:;,.)])"
        r"|module is not (currently )?loaded",
    ),
    (Cause.SUSPENDED, r"is currently suspended|pool .*is suspended"),
    (Cause.READ_ONLY, r"pool is read-?only|Read-only file system"),
    (Cause.NAME_TOO_LONG, r"name is too long|name too long|tag too long"),
    (Cause.BROKEN_PIPE, r"Broken pipe|signal received"),
    (Cause.CHECKPOINT_DISCARDING, r"currently discarding checkpoint"),
    (Cause.CHECKPOINT_EXISTS, r"checkpoint exists"),
    (Cause.CHECKPOINT_MISSING, r"checkpoint does not exist"),
    (Cause.DEVICE_REMOVAL, r"device removal in progress"),
    (Cause.DEVICE_TOO_BIG, r"device exceeds supported size"),
    (Cause.RAIDZ_EXPANSION, r"raidz expansion in progress"),
    (Cause.KEY_INVALID, r"Incorrect key provided|Raw key too|Hex key too"),
    (Cause.KEY_LOADED, r"Key already loaded"),
    (Cause.KEY_NOT_LOADED, r"Key already unloaded|Key must be loaded|key must be loaded|key not loaded"),
    (Cause.BOOKMARK_MISMATCH, r"source is not an ancestor of the new bookmark"),
    (
        Cause.NOT_SUPPORTED,
        r"bookmark feature not enabled|stream has unsupported feature|feature is not supported"
        r"|pool must be upgraded to receive",
    ),
    (Cause.STREAM_INVALID, r"kernel modules must be upgraded"),
    (Cause.STREAM_INCOMPATIBLE, r"incompatible embedded data stream feature"),
    (Cause.PROPERTY_READ_ONLY, r"'' is readonly"),
    (Cause.PROPERTY_NOT_SUPPORTED, r"must be upgraded to set this property"),
    (
        Cause.NAME_INVALID,
        r"in name|delimiters? |invalid (dataset|snapshot|pool|character)|trailing slash|leading slash|reserved name"
        r"|pool doesn't begin with a letter|self reference|parent reference",
    ),
    (Cause.NOT_LATEST, r"more recent snapshots|clones of previous snapshots"),
    (Cause.NOT_MOUNTED, r"not currently mounted"),
    (Cause.ALREADY_MOUNTED, r"filesystem already mounted"),
    (Cause.HELD, r"it's being held|snapshot has .*holds?"),
    (Cause.IN_USE, r"umount failed|target is busy|[Dd]evice busy|pool or dataset is busy"),
    (Cause.MOUNT_BUSY, r"mountpoint or dataset is busy"),
    (Cause.MOUNT_FAILED, r"but not mounted|cannot mount|mount failed|failed to mount|legacy mountpoint"),
    (Cause.SIZE_TOO_SMALL, r"size is less than current used"),
    (Cause.NO_SPACE, r"out of space|No space left|size is greater than available"),
    (Cause.QUOTA_EXCEEDED, r"[Qq]uota exceeded"),
    (Cause.POOLS_DIFFER, r"pools differ|must be within same pool|not in the same pool|in a different pool"),
    (Cause.NO_POOL, r"no such pool"),
    (Cause.WRONG_PARENT, r"parent (?:'' )?is not a filesystem|cannot overwrite with a ZVOL"),
    (Cause.NO_PARENT, r"parent does not exist"),
    (Cause.HAS_CLONES, r"has dependent clones|snapshot is cloned"),
    (Cause.HAS_CHILDREN, r"has children"),
    (Cause.NOT_CLONE, r"not a cloned filesystem"),
    (Cause.SNAPSHOT_CONFLICT, r"conflicting snapshot"),
    (Cause.TAG_EXISTS, r"tag already exists"),
    (Cause.TAG_MISSING, r"no such tag"),
    (Cause.DESTINATION_MODIFIED, r"has been modified"),
    (
        Cause.STREAM_MISMATCH,
        r"does not\s+match incremental source|destination has snapshots|local origin for clone",
    ),
    (Cause.STREAM_TRUNCATED, r"incomplete stream|failed to read from stream|checksum mismatch or incomplete"),
    (Cause.BAD_STREAM, r"invalid (backup )?stream|checksum mismatch|cannot perform raw receive on top"),
    (Cause.NOT_RELATED, r"must be in same filesystem|incremental source .* does not exist|not an earlier snapshot"),
    (
        Cause.PROPERTY_INVALID,
        r"invalid property|bad numeric value|is readonly|bad property|property value|invalid value"
        r"|can not be modified|must be one of|Only keyformat|can only be set|missing value|is invalid"
        r"|Argument list too long|property is read-only|property cannot be inherited",
    ),
    (Cause.EXISTS, r"already exists|bookmark exists|destination \S* ?exists|[Ff]ile exists"),
    (
        Cause.MISSING,
        r"does not exist|could not find any snapshots|no such (dataset|snapshot|file)|no datasets available",
    ),
    (Cause.BUSY, r"is busy|resource busy"),
    (Cause.IO_ERROR, r"I/O error|Input/output error"),
)
_COMPILED_PATTERNS = tuple((cause, re.compile(pattern)) for cause, pattern in _PATTERNS)
_QUOTED_NAME = re.compile(r"(?<!\w)'[^'\n]*'")
_LIST_HEADING = re.compile(r"^use '-\w' (?:to|for)[^\n]*:$", re.MULTILINE)
_USAGE_HEADING = re.compile(r"^usage:$", re.MULTILINE)


def find_cause(stderr: str, args: Iterable[str] = ()) -> Cause:
    """Determine the cause of a failure from the standard error of ``zfs``.

    Ignores lists of names, quoted names, and the names in ``args``, the arguments of the command.
    """
    text = _LIST_HEADING.split(_USAGE_HEADING.split(stderr, maxsplit=1)[0], maxsplit=1)[0]
    text = _QUOTED_NAME.sub("''", text)
    for name in sorted({name for arg in args for name in _list_names(arg)}, key=len, reverse=True):
        text = text.replace(name, "''")
    return next((cause for cause, pattern in _COMPILED_PATTERNS if pattern.search(text)), Cause.OTHER)


def _list_names(arg: str) -> list[str]:
    """Return the names in an argument, without names of pools. An argument may be ``filesystem@snapshot,snapshot``."""
    filesystem, separator, snapshots = arg.partition("@")
    names = [f"{filesystem}@{snapshot}" for snapshot in snapshots.split(",")] if separator else [arg]
    return [name for name in (filesystem, *names) if re.match(r"[A-Za-z][^/@#=]*[/@#].", name)]


def find_listed_datasets(stderr: str) -> list[str]:
    """Return the datasets that ``zfs`` lists after "use '-R' to destroy the following datasets:", in that order."""
    parts = _LIST_HEADING.split(stderr, maxsplit=1)
    return [line for line in parts[1].split("\n") if line] if len(parts) == 2 else []


def join_lines(stderr: str) -> str:
    """Join the standard error of ``zfs``, without its usage text, into one line of at most 500 characters."""
    lines = _USAGE_HEADING.split(stderr, maxsplit=1)[0].strip().splitlines()
    return "; ".join(line.strip() for line in lines if line.strip())[:500]
