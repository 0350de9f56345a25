"""Translate exceptions into the kinds of failure and exit codes of `lzc`."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import Enum

from zfs_core import exceptions
from zfs_core.exceptions import MultipleOperationsFailure, ZFSError, ZFSGenericError


class Kind(Enum):
    """A kind of failure, with its exit code and its meaning."""

    FAILED = (1, "ZFS, or the command that receives a stream, failed for another reason")
    INVALID = (2, "an argument, a name or the value of a property is not valid")
    NOT_FOUND = (3, "a dataset, a snapshot, a hold, a parent or a pool does not exist")
    EXISTS = (4, "the name or the hold already exists")
    IN_USE = (5, "open files, holds, clones, children or newer snapshots prevent the change")
    NO_SPACE = (6, "the pool is full, or a quota is exceeded")
    STREAM = (7, "the stream is damaged or does not match the destination, or the two snapshots are not related")
    NOT_SUPPORTED = (8, "the installed version of ZFS cannot do this")
    UNAVAILABLE = (9, "ZFS is not running, or the pool is suspended or read-only")
    TIMEOUT = (10, "a ZFS command did not finish in time; the change may or may not have been made")

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def exit_code(self) -> int:
        return self.value[0]

    @property
    def meaning(self) -> str:
        return self.value[1]


class CommandError(Exception):
    """A failure of `lzc`. ``related``: the datasets, holds or snapshots that prevented the change."""

    def __init__(self, kind: Kind, message: str, related: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kind, self.message, self.related = kind, message, tuple(related)

    def as_json(self) -> dict[str, object]:
        result: dict[str, object] = {"kind": self.kind.word, "message": self.message}
        return {**result, "related": list(self.related)} if self.related else result


# The first match wins, so subclasses come before their base class.
_KINDS: tuple[tuple[tuple[type[ZFSError], ...], Kind, str], ...] = (
    (
        (exceptions.SnapshotNotLatest,),
        Kind.IN_USE,
        "newer snapshots or bookmarks exist: roll back to the newest one, or pass --destroy-newer",
    ),
    (
        (exceptions.SnapshotIsCloned,),
        Kind.IN_USE,
        "it has clones: destroy or promote them first, or pass --defer to destroy it when its last clone is gone",
    ),
    (
        (exceptions.SnapshotIsHeld,),
        Kind.IN_USE,
        "it is held: release its holds first, or pass --defer to destroy it when its last hold is gone",
    ),
    (
        (exceptions.DatasetBusy,),
        Kind.IN_USE,
        "it is in use: close its files, or remove its snapshots, children and clones first",
    ),
    ((exceptions.BookmarkExists,), Kind.EXISTS, "it already exists: choose another name, or pass --if-absent"),
    ((exceptions.HoldExists,), Kind.EXISTS, "it already has this hold: choose another tag, or pass --if-absent"),
    ((exceptions.DatasetExists,), Kind.EXISTS, "it already exists: choose another name, or pass --if-absent"),
    ((exceptions.HoldNotFound,), Kind.NOT_FOUND, "it does not have this hold: check the tag, or pass --if-present"),
    ((exceptions.ParentNotFound,), Kind.NOT_FOUND, "its parent does not exist: create it first, or pass --parents"),
    (
        (exceptions.DatasetNotFound, exceptions.PoolNotFound, exceptions.BookmarkNotFound),
        Kind.NOT_FOUND,
        "it does not exist: run lzc list POOL to see the names",
    ),
    (
        (exceptions.NoSpace, exceptions.QuotaExceeded),
        Kind.NO_SPACE,
        "there is not enough space: free some space, or raise the quota",
    ),
    (
        (exceptions.DestinationModified,),
        Kind.STREAM,
        "the destination has been modified since the base of the stream: pass --force to discard changes since its "
        "newest snapshot, and also --destroy-newer to lose snapshots that are newer than the base",
    ),
    (
        (exceptions.StreamMismatch, exceptions.SnapshotMismatch),
        Kind.STREAM,
        "the snapshots do not match: the base of an incremental stream must be an earlier snapshot of the same "
        "filesystem, and the newest one at the destination",
    ),
    ((exceptions.BadStream,), Kind.STREAM, "the stream is damaged or incomplete: send it again"),
    (
        (exceptions.StreamFeatureInvalid,),
        Kind.STREAM,
        "the stream is damaged, or needs a newer version of ZFS: send it again, or upgrade ZFS",
    ),
    (
        (exceptions.StreamFeatureIncompatible,),
        Kind.STREAM,
        "an encrypted filesystem cannot receive embedded data: send the stream without it, or with --raw",
    ),
    (
        (exceptions.StreamFeatureNotSupported,),
        Kind.NOT_SUPPORTED,
        "the receiving ZFS lacks a feature of the stream: upgrade the pool, or send without options",
    ),
    (
        (exceptions.BookmarkNotSupported, exceptions.PropertyNotSupported),
        Kind.NOT_SUPPORTED,
        "the pool lacks this feature: enable it with zpool upgrade",
    ),
    ((exceptions.WrongParent,), Kind.INVALID, "its parent cannot have children: choose a name inside a filesystem"),
    (
        (exceptions.EncryptionKeyNotLoaded,),
        Kind.UNAVAILABLE,
        "the encryption key is not loaded: run zfs load-key first",
    ),
    ((exceptions.FeatureNotSupported,), Kind.NOT_SUPPORTED, "this version of ZFS cannot do this: omit the option"),
    (
        (exceptions.ZFSInitializationFailed,),
        Kind.UNAVAILABLE,
        "ZFS cannot be reached: run lzc as root on a machine where ZFS is running",
    ),
    ((exceptions.SuspendedPool,), Kind.UNAVAILABLE, "the pool is suspended: run zpool status to find the device"),
    ((exceptions.ReadOnlyPool,), Kind.UNAVAILABLE, "the pool is read-only: import it again without readonly=on"),
    (
        (exceptions.NameInvalid,),
        Kind.INVALID,
        "the name is not valid: use letters, digits, and _ . : - between the delimiters / @ #",
    ),
    ((exceptions.NameTooLong,), Kind.INVALID, "the name is too long: use at most 255 bytes"),
    ((exceptions.PropertyInvalid,), Kind.INVALID, "a property or its value is not valid: see zfsprops(7)"),
    ((exceptions.DuplicateSnapshots,), Kind.INVALID, "pass only one snapshot of each filesystem"),
    ((exceptions.PoolsDiffer,), Kind.INVALID, "all names must be in the same pool: run lzc once for each pool"),
    (
        (exceptions.ZIOError,),
        Kind.FAILED,
        "a device of the pool cannot be read or written: run zpool status to find it",
    ),
    ((exceptions.MountFailed,), Kind.FAILED, "it cannot be mounted: check its mountpoint"),
)


def describe(error: ZFSError) -> CommandError:
    """Return the failure of `lzc` for an exception of ``zfs_core``."""
    if isinstance(error, MultipleOperationsFailure):
        failures = [describe(each) for each in error.errors]
        related = dict.fromkeys(name for failure in failures for name in failure.related)
        return CommandError(failures[0].kind, "; ".join(failure.message for failure in failures), tuple(related))
    if isinstance(error, ZFSGenericError) and error.errno == errno.ETIMEDOUT:
        return CommandError(Kind.TIMEOUT, f"{_make_prefix(error)}{error.message}: check the pool with zpool status")
    for classes, kind, sentence in _KINDS:
        if isinstance(error, classes):
            details = f" ({error.details})" if error.details else ""
            return CommandError(kind, f"{_make_prefix(error)}{sentence}{details}", error.related)
    details = f": {error.details}" if error.details else ""
    return CommandError(Kind.FAILED, f"{_make_prefix(error)}{error.message}{details}", error.related)


def _make_prefix(error: ZFSError) -> str:
    return "" if error.name is None else f"{error.name!r}: "
