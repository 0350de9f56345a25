"""Define the exceptions of ZFS, under the same names as in ``libzfs_core.exceptions``."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from zfs_core.constants import ECHRNG, ECKSUM, ETIME, zfs_errno


class ZFSError(Exception):
    """The base class of all exceptions. ``errno``, ``message`` and ``name`` are as in libzfs_core.

    If the caller passed names as bytes, ``name`` is bytes, too. Two attributes are not in libzfs_core: ``details``,
    usually the output of the command, and ``related``, the datasets that prevented the operation.
    """

    errno: int = errno.EIO
    message: str = "ZFS operation failed"
    name: str | None = None
    details: str = ""
    related: tuple[str, ...] = ()

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.name = name

    def with_details(self, details: str, related: Sequence[str] = ()) -> ZFSError:
        """Set ``details`` and ``related``, and return this error."""
        self.details, self.related = details, tuple(related)
        return self

    def __str__(self) -> str:
        text = f"[Errno {self.errno}] {self.message}" + ("" if self.name is None else f": '{_decode(self.name)}'")
        return f"{text} ({_decode(self.details)})" if self.details else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.errno!r}, {self.message!r}, {self.name!r})"


def _decode(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")


class ZFSGenericError(ZFSError):
    def __init__(self, errno: int, name: str | None, message: str) -> None:
        super().__init__(name)
        self.errno = errno
        self.message = message


class ZFSInitializationFailed(ZFSError):
    """The command, the kernel module or the daemon is unavailable. The last change may or may not have been made."""

    message = "ZFS cannot be reached"

    def __init__(self, errno: int = errno.ENXIO) -> None:
        super().__init__(None)
        self.errno = errno


class ZFSOutputError(ZFSError):
    """The command succeeded, but its output is incomplete or malformed."""

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


class WrongParent(ZFSError):
    errno = zfs_errno.ZFS_ERR_WRONG_PARENT
    message = "Parent dataset is not a filesystem"


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


class BookmarkExists(ZFSError):
    errno = errno.EEXIST
    message = "Bookmark already exists"


class BookmarkNotFound(ZFSError):
    """Never raised, as in libzfs_core: destroying a bookmark that does not exist succeeds."""

    errno = errno.ENOENT
    message = "Bookmark not found"


class BookmarkMismatch(ZFSError):
    errno = errno.EINVAL
    message = "source is not an ancestor of the new bookmark's dataset"


class BookmarkSourceInvalid(ZFSError):
    errno = errno.EINVAL
    message = "Bookmark source is not a valid snapshot or existing bookmark"


class BookmarkNotSupported(ZFSError):
    errno = errno.ENOTSUP
    message = "Bookmark feature is not supported"


class BookmarkFailure(MultipleOperationsFailure):
    message = "Creation of bookmark(s) failed for one or more reasons"


class BookmarkDestructionFailure(MultipleOperationsFailure):
    message = "Destruction of bookmark(s) failed for one or more reasons"


class BadHoldCleanupFD(ZFSError):
    errno = errno.EBADF
    message = "Bad file descriptor as cleanup file descriptor"


class HoldFailure(MultipleOperationsFailure):
    message = "Placement of hold(s) failed for one or more reasons"


class HoldReleaseFailure(MultipleOperationsFailure):
    message = "Release of hold(s) failed for one or more reasons"


class HoldExists(ZFSError):
    errno = errno.EEXIST
    message = "Hold with a given tag already exists on snapshot"


class HoldNotFound(ZFSError):
    """``lzc_release`` returns holds that do not exist. This error only accompanies others in HoldReleaseFailure."""

    errno = errno.ENOENT
    message = "Hold with a given tag does not exist on snapshot"


class NotClone(ZFSError):
    errno = errno.EINVAL
    message = "Filesystem is not a clone, can not promote"


class DatasetBusy(ZFSError):
    errno = errno.EBUSY
    message = "Dataset is busy"


class MountFailed(ZFSError):
    """A filesystem cannot be mounted. libzfs_core has no such error, because it does not mount filesystems."""

    errno = errno.EIO
    message = "Filesystem cannot be mounted"


class NoSpace(ZFSError):
    errno = errno.ENOSPC
    message = "No space left"


class QuotaTooSmall(NoSpace):
    """A quota would be smaller than the data. libzfs_core reports this as NoSpace, although the pool has space."""

    message = "Quota is smaller than the data"


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


class BookmarkNameInvalid(NameInvalid):
    message = "Invalid name for bookmark"


class PropertyNotSupported(ZFSError):
    errno = errno.ENOTSUP
    message = "Property is not supported in this version"


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
    errno = ECKSUM
    message = "Bad backup stream"


class StreamTruncated(BadStream):
    """The stream ended early. In libzfs_core, this is not a subclass of BadStream.

    Some versions of the command report both with the same message.
    """

    errno = zfs_errno.ZFS_ERR_STREAM_TRUNCATED
    message = "incomplete stream"


class StreamFeatureNotSupported(ZFSError):
    errno = errno.ENOTSUP
    message = "Stream contains unsupported feature"


class UnknownStreamFeature(ZFSError):
    errno = errno.ENOTSUP
    message = "Unknown feature requested for stream"


class StreamFeatureInvalid(ZFSError):
    """`zfs receive -s` cannot interpret the stream: it needs a newer version of ZFS, or it is damaged."""

    errno = errno.EINVAL
    message = "Kernel modules must be upgraded to receive this stream"


class StreamFeatureIncompatible(ZFSError):
    errno = errno.EINVAL
    message = "Incompatible embedded feature with encrypted receive"


class ReceivePropertyFailure(MultipleOperationsFailure):
    message = "Receiving of properties failed for one or more reasons"


class StreamIOError(ZFSError):
    message = "I/O error while writing or reading stream"

    def __init__(self, errno: int) -> None:
        super().__init__(None)
        self.errno = errno


class ZIOError(ZFSError):
    """A device failed. Sending and receiving raise StreamIOError(EIO) instead, as in libzfs_core."""

    errno = errno.EIO
    message = "I/O error"


class UnknownCryptCommand(ZFSError):
    errno = errno.EINVAL
    message = "Specified crypt command is invalid"


class EncryptionKeyNotLoaded(ZFSError):
    errno = errno.EACCES
    message = "Encryption key is not currently loaded"


class EncryptionKeyAlreadyLoaded(ZFSError):
    errno = errno.EEXIST
    message = "Encryption key is already loaded"


class EncryptionKeyInvalid(ZFSError):
    errno = errno.EACCES
    message = "Incorrect encryption key provided"


class ZCPError(ZFSError):
    """A channel program failed."""

    message = "Channel program failed"


class ZCPSyntaxError(ZCPError):
    errno = errno.EINVAL
    message = "Channel program contains syntax errors"

    def __init__(self, details: str) -> None:
        super().__init__(None)
        self.details = details


class ZCPRuntimeError(ZCPError):
    errno = ECHRNG
    message = "Channel programs encountered a runtime error"

    def __init__(self, details: str) -> None:
        super().__init__(None)
        self.details = details


class ZCPLimitInvalid(ZCPError):
    errno = errno.EINVAL
    message = "Channel program called with invalid limits"


class ZCPTimeout(ZCPError):
    errno = ETIME
    message = "Channel program timed out"


class ZCPSpaceError(ZCPError):
    errno = errno.ENOSPC
    message = "Channel program exhausted the memory limit"


class ZCPMemoryError(ZCPError):
    errno = errno.ENOMEM
    message = "Channel program return value too large"


class ZCPPermissionError(ZCPError):
    errno = errno.EPERM
    message = "Channel programs must be run as root"


class CheckpointExists(ZFSError):
    errno = zfs_errno.ZFS_ERR_CHECKPOINT_EXISTS
    message = "Pool already has a checkpoint"


class CheckpointNotFound(ZFSError):
    errno = zfs_errno.ZFS_ERR_NO_CHECKPOINT
    message = "Pool does not have a checkpoint"


class CheckpointDiscarding(ZFSError):
    errno = zfs_errno.ZFS_ERR_DISCARDING_CHECKPOINT
    message = "Pool checkpoint is being discarded"


class DeviceRemovalRunning(ZFSError):
    errno = zfs_errno.ZFS_ERR_DEVRM_IN_PROGRESS
    message = "A vdev is currently being removed"


class DeviceTooBig(ZFSError):
    errno = zfs_errno.ZFS_ERR_VDEV_TOO_BIG
    message = "One or more top-level vdevs exceed the maximum vdev size"


class RaidzExpansionRunning(ZFSError):
    errno = zfs_errno.ZFS_ERR_RAIDZ_EXPAND_IN_PROGRESS
    message = "A raidz device is currently expanding"
