"""Translate the errors of ZFS into the gateway's errors, with remedies."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import zfs_core

from sandbox_gateway.errors import (
    BackendFailed,
    Busy,
    GatewayError,
    Invalid,
    NoSpace,
    OverQuota,
    Timeout,
    Unsupported,
)

P = ParamSpec("P")
R = TypeVar("R")


class DatasetInUse(Busy):
    """A jail, a mount or a process uses the file system ``dataset``."""

    def __init__(self, dataset: str) -> None:
        super().__init__(f"the dataset {dataset} is busy: a process or a mount still uses it, so try again later")
        self.dataset = dataset


def translate_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it raises GatewayError instead of ZFSError."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated_errors():
            return function(*args, **kwargs)

    return wrapper


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise GatewayError instead of ZFSError inside this context."""
    try:
        yield
    except zfs_core.exceptions.MultipleOperationsFailure as error:
        raise to_gateway_error(error.errors[0]) from error
    except zfs_core.exceptions.ZFSError as error:
        raise to_gateway_error(error) from error


def to_gateway_error(error: zfs_core.exceptions.ZFSError) -> GatewayError:
    name_suffix = f" {error.name}" if error.name else ""
    match error:
        case zfs_core.exceptions.QuotaTooSmall() | zfs_core.exceptions.QuotaExceeded():
            return OverQuota(
                f"the disk quota of{name_suffix or ' the dataset'} is too small for its data: choose a larger quota"
            )
        case zfs_core.exceptions.NoSpace():
            pool = (error.name or "").partition("/")[0] or "ZFS"
            return NoSpace(
                f"the pool {pool} has no space left{name_suffix and f' for{name_suffix}'}: remove snapshots or "
                "sandboxes"
            )
        case zfs_core.exceptions.ZFSInitializationFailed():
            return BackendFailed(f"ZFS cannot be reached: {error.details}")
        case zfs_core.exceptions.DatasetBusy(related=()) if error.name and "@" not in error.name:
            return DatasetInUse(error.name)
        case zfs_core.exceptions.DatasetBusy():
            dependents_suffix = f" ({', '.join(error.related)})" if error.related else ""
            return Busy(
                f"the dataset{name_suffix} is busy{dependents_suffix}: a process or a mount still uses it, so try "
                "again later"
            )
        case zfs_core.exceptions.SuspendedPool() | zfs_core.exceptions.ReadOnlyPool():
            return BackendFailed(
                f"the pool of{name_suffix or ' the dataset'} does not accept writes ({error.message}): run "
                "`zpool status` to find the cause"
            )
        case (
            zfs_core.exceptions.NameInvalid()
            | zfs_core.exceptions.NameTooLong()
            | zfs_core.exceptions.PropertyInvalid()
        ):
            return Invalid(f"ZFS rejected{name_suffix or ' the request'}: {error.details or error.message}")
        case zfs_core.exceptions.StreamFeatureIncompatible():
            return Unsupported(
                f"this host's encrypted datasets cannot receive the stream ({error.details}): import the snapshot on a "
                "host without encryption"
            )
        case zfs_core.exceptions.StreamFeatureNotSupported() | zfs_core.exceptions.StreamFeatureInvalid():
            return Unsupported(
                f"this host's ZFS cannot receive the stream ({error.details}): upgrade ZFS or the pool, or import the "
                "snapshot on another host"
            )
        case zfs_core.exceptions.BadStream() | zfs_core.exceptions.StreamMismatch():
            return Invalid(
                f"ZFS cannot receive the stream ({error.details or error.message}): export the snapshot again"
            )
        case zfs_core.exceptions.ZFSGenericError(errno=errno.ETIMEDOUT):
            return Timeout(
                f"{error.message}{name_suffix and f' on{name_suffix}'}: the change may or may not have been made. Run "
                "`zpool status` to find out whether the pool responds. While commands hang, GET /health lists them"
            )
    return BackendFailed(f"ZFS failed: {error}")


def check_quota(origin: str, size_mb: int | None, noun: str = "disk") -> None:
    """Raise OverQuota if the snapshot ``origin`` is larger than ``size_mb``.

    zfs-fuse reports "out of space" if a clone would be larger than its quota.
    """
    referenced = zfs_core.get_props([origin], ["referenced"])[origin]["referenced"].number
    if size_mb is not None and referenced > size_mb << 20:
        raise OverQuota(
            f"a {noun} of {size_mb} MiB is too small, because the snapshot contains {(referenced >> 20) + 1} MiB: "
            "choose a larger size"
        )


def attempt(name: str, action: str, reason: str, change: Callable[[], object]) -> str:
    """Call ``change`` and describe its result. Returns "" for a successful change without a ``reason``."""
    try:
        change()
    except (GatewayError, zfs_core.exceptions.ZFSError) as error:
        return f"{name}: could not be {action} yet: {error}"
    return reason and f"{name}: {action}, {reason}"
