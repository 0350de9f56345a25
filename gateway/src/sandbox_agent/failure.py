"""Errors that the agent returns. Each has a Connect code, an HTTP status and a message."""

from __future__ import annotations

import errno

# https://connectrpc.com/docs/protocol#error-codes
STATUS_BY_CODE = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}

_CODE_AND_STATUS_BY_ERRNO = {
    errno.ENOENT: ("not_found", 404),
    errno.EEXIST: ("already_exists", 409),
    errno.EACCES: ("permission_denied", 403),
    errno.EPERM: ("permission_denied", 403),
    errno.EROFS: ("permission_denied", 403),
    errno.ENOSPC: ("resource_exhausted", 507),
    errno.EDQUOT: ("resource_exhausted", 507),
    errno.EMFILE: ("resource_exhausted", 503),
    errno.ENFILE: ("resource_exhausted", 503),
    errno.EAGAIN: ("resource_exhausted", 503),
    errno.ENOMEM: ("resource_exhausted", 503),
    errno.EISDIR: ("invalid_argument", 400),
    errno.ENOTDIR: ("invalid_argument", 400),
    errno.EINVAL: ("invalid_argument", 400),
    errno.ENAMETOOLONG: ("invalid_argument", 400),
    errno.ELOOP: ("invalid_argument", 400),
    errno.ENOTEMPTY: ("failed_precondition", 400),
    errno.EBUSY: ("failed_precondition", 409),
}


class Failure(Exception):
    """An error for the client. ``code``: a Connect code; ``status``: the HTTP status of a unary response."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        # The message becomes JSON, but may contain a file name that is not UTF-8.
        message = message.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or STATUS_BY_CODE[code]


def invalid_argument(message: str) -> Failure:
    return Failure("invalid_argument", message)


def from_os_error(error: OSError, path: str = "") -> Failure:
    """Return the Failure for an OSError. ``path`` replaces the file name in the error."""
    code, status = _CODE_AND_STATUS_BY_ERRNO.get(error.errno or 0, ("internal", 500))
    file_name = path or error.filename or ""
    reason = error.strerror or str(error)
    return Failure(code, f"{file_name}: {reason}" if file_name else reason, status)
