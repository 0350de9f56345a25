"""Represent the outcome of a ``zfs`` command, and create exceptions for failures."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetBusy,
    DatasetExists,
    DatasetNotFound,
    MountFailed,
    NameInvalid,
    NameTooLong,
    NoSpace,
    PoolsDiffer,
    PropertyInvalid,
    PropertyNotSupported,
    QuotaExceeded,
    QuotaTooSmall,
    WrongParent,
    ZFSError,
    ZFSGenericError,
    ZIOError,
)

ErrorFactory = Callable[[str], ZFSError]
"""A function that creates an error for the dataset with the given name."""

_ERRORS: dict[Cause, ErrorFactory] = {
    Cause.NO_SPACE: NoSpace,
    Cause.SIZE_TOO_SMALL: QuotaTooSmall,
    Cause.QUOTA_EXCEEDED: QuotaExceeded,
    Cause.NAME_INVALID: NameInvalid,
    Cause.NAME_TOO_LONG: NameTooLong,
    Cause.PROPERTY_INVALID: PropertyInvalid,
    Cause.PROPERTY_READ_ONLY: PropertyInvalid,
    Cause.PROPERTY_NOT_SUPPORTED: PropertyNotSupported,
    Cause.IO_ERROR: ZIOError,
    Cause.BUSY: DatasetBusy,
    Cause.IN_USE: DatasetBusy,
    Cause.MOUNT_BUSY: DatasetBusy,
    Cause.MISSING: DatasetNotFound,
    Cause.EXISTS: DatasetExists,
    Cause.NO_POOL: DatasetNotFound,
    Cause.NO_PARENT: DatasetNotFound,
    Cause.WRONG_PARENT: WrongParent,
    Cause.POOLS_DIFFER: PoolsDiffer,
    Cause.MOUNT_FAILED: MountFailed,
}


@dataclass(frozen=True)
class Outcome:
    """The result of a finished command.

    ``output``: its standard output. ``message``: its standard error, in one line. ``cause``: why it failed, or None if
    it succeeded. ``related``: the datasets that the message lists.
    """

    output: str
    message: str
    cause: Cause | None
    related: tuple[str, ...] = ()

    def explain(self, error: ZFSError) -> ZFSError:
        """Add the message and the related datasets to ``error``, and return ``error``."""
        return error.with_details(self.message, self.related)


def make_error(
    outcome: Outcome, name: str, action: str, specific_errors: Mapping[Cause, ErrorFactory] | None = None
) -> ZFSError:
    """Return the exception for a failed command.

    ``action`` completes the sentence "Failed to …". ``specific_errors`` maps causes to exceptions, and takes
    precedence over the exceptions that all commands share.
    """
    assert outcome.cause is not None
    factory = (specific_errors or {}).get(outcome.cause) or _ERRORS.get(outcome.cause)
    return outcome.explain(factory(name) if factory else ZFSGenericError(errno.EIO, name, f"Failed to {action}"))


def check(
    outcome: Outcome, name: str, action: str, specific_errors: Mapping[Cause, ErrorFactory] | None = None
) -> Outcome:
    """Return the outcome if the command succeeded. Otherwise, raise the exception that ``make_error`` returns."""
    if outcome.cause is not None:
        raise make_error(outcome, name, action, specific_errors)
    return outcome
