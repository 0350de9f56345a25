"""What ZFS refuses, as ``libzfs_core.exceptions`` names it, and how the words of the ``zfs`` command tell which.

The exit status of ``zfs`` says only that it failed; the reason is on standard error, in words that are the same from
zfs-fuse 0.7 to OpenZFS 2.4 but for small things. ``cause_of`` reads them, ``zfs`` makes the exception.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from enum import Enum, auto


class ZFSError(Exception):
    """Base of all. ``errno``, ``message`` and ``name`` as in libzfs_core.

    Beyond libzfs_core: ``said`` is what the command wrote, ``related`` are the datasets it listed as being in the way.
    """

    errno: int = errno.EIO
    message: str = "ZFS operation failed"
    name: str | None = None
    said: str = ""
    related: tuple[str, ...] = ()

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.name = name

    def because(self, said: str, related: Sequence[str] = ()) -> ZFSError:
        """The same error, with what the command said."""
        self.said, self.related = said, tuple(related)
        return self

    def __str__(self) -> str:
        text = f"[Errno {self.errno}] {self.message}" + ("" if self.name is None else f": '{self.name}'")
        return f"{text} ({self.said})" if self.said else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.errno!r}, {self.message!r}, {self.name!r})"


class ZFSGenericError(ZFSError):
    def __init__(self, errno: int, name: str | None, message: str) -> None:
        super().__init__(name)
        self.errno = errno
        self.message = message


class ZFSInitializationFailed(ZFSError):
    """ZFS cannot be reached at all: no command, no module, no daemon. Whether the last change was made is unknown."""

    errno = errno.ENXIO
    message = "ZFS cannot be reached"


class ZFSOutputError(ZFSError):
    """The command succeeded, and what it wrote cannot be read (it ended in the middle, a column is missing)."""

    errno = errno.EIO
    message = "the output of zfs cannot be read"


class MultipleOperationsFailure(ZFSError):
    def __init__(self, errors: Sequence[ZFSError], suppressed_count: int = 0) -> None:
        super().__init__(None)
        self.errors = list(errors)
        self.suppressed_count = suppressed_count
        self.errno = self.errors[0].errno

    def __str__(self) -> str:
        return f"[Errno {self.errno}] {self.message}: " + "; ".join(str(error) for error in self.errors)


class DatasetNotFound(ZFSError):
    errno = errno.ENOENT
    message = "Dataset not found"


class FilesystemNotFound(DatasetNotFound):
    message = "Filesystem not found"


class SnapshotNotFound(DatasetNotFound):
    message = "Snapshot not found"


class ParentNotFound(ZFSError):
    errno = errno.ENOENT
    message = "Parent not found"


class PoolNotFound(ZFSError):
    errno = errno.EXDEV
    message = "No such pool"


class PoolsDiffer(ZFSError):
    errno = errno.EXDEV
    message = "Source and target belong to different pools"


class DatasetExists(ZFSError):
    errno = errno.EEXIST
    message = "Dataset already exists"


class FilesystemExists(DatasetExists):
    message = "Filesystem already exists"


class SnapshotExists(DatasetExists):
    message = "Snapshot already exists"


class DuplicateSnapshots(ZFSError):
    errno = errno.EXDEV
    message = "Requested multiple snapshots of the same filesystem"


class SnapshotNotLatest(ZFSError):
    errno = errno.EEXIST
    message = "Snapshot is not the latest"


class SnapshotIsCloned(ZFSError):
    errno = errno.EEXIST
    message = "Snapshot is cloned"


class SnapshotIsHeld(ZFSError):
    errno = errno.EBUSY
    message = "Snapshot is held"


class SnapshotMismatch(ZFSError):
    errno = errno.ENODEV
    message = "Snapshot is not descendant of source snapshot"


class SnapshotFailure(MultipleOperationsFailure):
    message = "Creation of snapshot(s) failed for one or more reasons"


class SnapshotDestructionFailure(MultipleOperationsFailure):
    message = "Destruction of snapshot(s) failed for one or more reasons"


class HoldFailure(MultipleOperationsFailure):
    message = "Placement of hold(s) failed for one or more reasons"


class HoldReleaseFailure(MultipleOperationsFailure):
    message = "Release of hold(s) failed for one or more reasons"


class HoldExists(ZFSError):
    errno = errno.EEXIST
    message = "Hold with a given tag already exists on snapshot"


class HoldNotFound(ZFSError):
    errno = errno.ENOENT
    message = "Hold with a given tag does not exist on snapshot"


class NotClone(ZFSError):
    errno = errno.EINVAL
    message = "Filesystem is not a clone, can not promote"


class DatasetBusy(ZFSError):
    errno = errno.EBUSY
    message = "Dataset is busy"


class MountFailed(ZFSError):
    """Not in libzfs_core, which mounts nothing."""

    errno = errno.EIO
    message = "Filesystem cannot be mounted"


class NoSpace(ZFSError):
    errno = errno.ENOSPC
    message = "No space left"


class QuotaExceeded(ZFSError):
    errno = errno.EDQUOT
    message = "Quota exceeded"


class NameInvalid(ZFSError):
    errno = errno.EINVAL
    message = "Invalid name"


class SnapshotNameInvalid(NameInvalid):
    message = "Invalid name for snapshot"


class FilesystemNameInvalid(NameInvalid):
    message = "Invalid name for filesystem or volume"


class NameTooLong(ZFSError):
    errno = errno.ENAMETOOLONG
    message = "Dataset name is too long"


class PropertyInvalid(ZFSError):
    errno = errno.EINVAL
    message = "Invalid property or property value"


class DatasetTypeInvalid(ZFSError):
    errno = errno.EINVAL
    message = "Specified dataset type is unknown"


class FeatureNotSupported(ZFSError):
    errno = errno.ENOTSUP
    message = "Feature is not supported in this version"


class ReadOnlyPool(ZFSError):
    errno = errno.EROFS
    message = "Pool is read-only"


class SuspendedPool(ZFSError):
    errno = errno.EAGAIN
    message = "Pool is suspended"


class StreamMismatch(ZFSError):
    errno = errno.ENODEV
    message = "Stream is not applicable to destination dataset"


class DestinationModified(ZFSError):
    errno = errno.ETXTBSY if hasattr(errno, "ETXTBSY") else errno.EBUSY
    message = "Destination dataset has modifications that can not be undone"


class BadStream(ZFSError):
    errno = errno.EINVAL
    message = "Bad backup stream"


class StreamTruncated(BadStream):
    message = "Incomplete stream"


class Cause(Enum):
    """Why ``zfs`` failed."""

    UNREACHABLE = auto()
    SUSPENDED = auto()
    READ_ONLY = auto()
    NAME_TOO_LONG = auto()
    NAME_INVALID = auto()
    MOUNT_FAILED = auto()
    MOUNT_BUSY = auto()
    """It was unmounted, and something still holds it."""
    NOT_MOUNTED = auto()
    ALREADY_MOUNTED = auto()
    TOO_SMALL = auto()
    QUOTA = auto()
    NO_SPACE = auto()
    POOLS_DIFFER = auto()
    NO_POOL = auto()
    NO_PARENT = auto()
    NOT_LATEST = auto()
    HAS_CLONES = auto()
    HAS_CHILDREN = auto()
    HELD = auto()
    NOT_CLONE = auto()
    SNAPSHOT_CONFLICT = auto()
    TAG_EXISTS = auto()
    TAG_MISSING = auto()
    STREAM_MISMATCH = auto()
    MODIFIED = auto()
    STREAM_TRUNCATED = auto()
    BAD_STREAM = auto()
    NOT_RELATED = auto()
    PROPERTY = auto()
    EXISTS = auto()
    MISSING = auto()
    BUSY = auto()
    IN_USE = auto()
    """A process has files of it open, or a mount is on it."""
    OTHER = auto()


# The first that matches tells; what is more particular comes first.
_WORDS: tuple[tuple[Cause, str], ...] = (
    (
        Cause.UNREACHABLE,
        r"zfs-fuse daemon is running|failed to initialize (the )?ZFS|ZFS modules? (?:cannot be|are not|is not)"
        r"|Connection (refused|reset)|zfsfuse_ioctl_read_loop|/dev/zfs|module is not (currently )?loaded",
    ),
    (Cause.SUSPENDED, r"I/O is currently suspended|pool .*is suspended"),
    (Cause.READ_ONLY, r"pool is read-?only|Read-only file system"),
    (Cause.NAME_TOO_LONG, r"name is too long|name too long|tag too long"),
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
    (Cause.TOO_SMALL, r"size is less than current used"),
    (Cause.NO_SPACE, r"out of space|No space left|size is greater than available"),
    (Cause.QUOTA, r"[Qq]uota exceeded"),
    (Cause.POOLS_DIFFER, r"pools differ|must be within same pool|not in the same pool"),
    (Cause.NO_POOL, r"no such pool"),
    (Cause.NO_PARENT, r"parent does not exist|parent is not a filesystem"),
    (Cause.HAS_CLONES, r"has dependent clones|snapshot is cloned"),
    (Cause.HAS_CHILDREN, r"has children"),
    (Cause.NOT_CLONE, r"not a cloned filesystem"),
    (Cause.SNAPSHOT_CONFLICT, r"conflicting snapshot"),
    (Cause.TAG_EXISTS, r"tag already exists"),
    (Cause.TAG_MISSING, r"no such tag"),
    (Cause.MODIFIED, r"has been modified"),
    (
        Cause.STREAM_MISMATCH,
        r"does not\s+match incremental source|destination has snapshots|local origin for clone",
    ),
    (Cause.STREAM_TRUNCATED, r"incomplete stream|failed to read from stream|checksum mismatch or incomplete"),
    (Cause.BAD_STREAM, r"invalid (backup )?stream|invalid stream"),
    (Cause.NOT_RELATED, r"must be in same filesystem|incremental source .* does not exist|not an earlier snapshot"),
    (
        Cause.PROPERTY,
        r"invalid property|bad numeric value|is readonly|bad property|property value|invalid value"
        r"|can not be modified|must be one of|can only be set|missing value|is invalid|Argument list too long",
    ),
    (Cause.EXISTS, r"already exists|destination \S* ?exists|[Ff]ile exists"),
    (
        Cause.MISSING,
        r"does not exist|could not find any snapshots|no such (dataset|snapshot|file)|no datasets available",
    ),
    (Cause.BUSY, r"is busy|resource busy"),
)
_CAUSES = tuple((cause, re.compile(words)) for cause, words in _WORDS)
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'")
_NAMES_FOLLOW = re.compile(r"^use '-\w' (?:to|for)[^\n]*:$", re.MULTILINE)
_USAGE = re.compile(r"^usage:$", re.MULTILINE)


def cause_of(stderr: str) -> Cause:
    """Read the reason from what ``zfs`` wrote; names in quotes and lists of names take no part in it."""
    text = _NAMES_FOLLOW.split(_USAGE.split(stderr, maxsplit=1)[0], maxsplit=1)[0]
    text = _QUOTED.sub("''", text)
    return next((cause for cause, words in _CAUSES if words.search(text)), Cause.OTHER)


def listed_names(stderr: str) -> list[str]:
    """The datasets that ``zfs`` lists after "use '-R' to destroy the following datasets:", in its order."""
    parts = _NAMES_FOLLOW.split(stderr, maxsplit=1)
    return [line for line in parts[1].split("\n") if line] if len(parts) == 2 else []


def sentence(stderr: str) -> str:
    """What ``zfs`` wrote in one line of at most 500 characters, without its usage text."""
    lines = _USAGE.split(stderr, maxsplit=1)[0].strip().splitlines()
    return "; ".join(line.strip() for line in lines if line.strip())[:500]
