"""ZFS's errors as the gateway's: the sentence a caller reads, with the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid, NoSpace, OverQuota
from sandbox_gateway.hosts.jail_zfs import zfs

P = ParamSpec("P")
R = TypeVar("R")


def translating(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise the gateway's errors for ZFS's."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated():
            return function(*args, **kwargs)

    return wrapper


@contextmanager
def translated() -> Iterator[None]:
    """Turn a ZFSError into the GatewayError that says it to a caller."""
    try:
        yield
    except zfs.exceptions.MultipleOperationsFailure as error:
        raise gateway_error(error.errors[0]) from error
    except zfs.exceptions.ZFSError as error:
        raise gateway_error(error) from error


def gateway_error(error: zfs.exceptions.ZFSError) -> GatewayError:
    name = f" {error.name}" if error.name else ""
    match error:
        case zfs.exceptions.NoSpace():
            pool = (error.name or "").partition("/")[0] or "ZFS"
            return NoSpace(f"the pool {pool} has no space left{name and f' for{name}'}: remove snapshots or sandboxes")
        case zfs.exceptions.QuotaExceeded():
            return OverQuota(f"the disk quota of{name} does not allow this: what it holds is more")
        case zfs.exceptions.ZFSInitializationFailed():
            return BackendFailed(f"ZFS cannot be reached: {error.said}")
        case zfs.exceptions.DatasetBusy():
            listed = f" ({', '.join(error.related)})" if error.related else ""
            return Busy(f"the dataset{name} is busy{listed}: a process or a mount still uses it; try again")
        case zfs.exceptions.SuspendedPool() | zfs.exceptions.ReadOnlyPool():
            return BackendFailed(f"{error.message}:{name or ' the pool'} takes no writes; see `zpool status`")
        case zfs.exceptions.NameInvalid() | zfs.exceptions.NameTooLong() | zfs.exceptions.PropertyInvalid():
            return Invalid(f"ZFS does not take{name}: {error.said or error.message}")
    return BackendFailed(f"ZFS failed: {error}")
