"""Translate errors of the operating system into errors that callers see."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from sandbox_gateway.errors import BackendFailed, NoSpace


def is_out_of_space(error: OSError) -> bool:
    """Return whether an operation failed because the file system is full or a quota is reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def create_no_space_error(location: str = "the state file system") -> NoSpace:
    return NoSpace(f"no space left on {location}: remove snapshots or sandboxes, or enlarge the file system")


@contextlib.contextmanager
def translated_os_errors(location: str = "the state file system") -> Iterator[None]:
    """Convert an OSError raised in this context to NoSpace or BackendFailed, with a message for the user.

    ``location``: the file system that the message names if no space is left.
    """
    try:
        yield
    except OSError as error:
        if is_out_of_space(error):
            raise create_no_space_error(location) from None
        raise BackendFailed(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
