"""What can go wrong, in the words a caller reads.

Every error carries a stable machine word (``kind``), the HTTP status that suits it, a sentence that says
what is wrong and how to mend it, and the ids of what stands in the way (``blockers``).
"""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_gateway.printable import printable


class GatewayError(Exception):
    """Base of all errors a caller is meant to see; anything else that escapes is a bug (500)."""

    kind = "backend_failed"
    status = 500

    def __init__(self, message: str, *, blockers: Sequence[str] = ()) -> None:
        """``message`` may repeat what a guest, or a program that read a guest's files, said."""
        self.message = printable(message)
        super().__init__(self.message)
        self.blockers = list(blockers)


class NotFound(GatewayError):
    kind = "not_found"
    status = 404

    def __init__(self, what: str, ref: str) -> None:
        """``what`` is the noun ("sandbox", "template", …), ``ref`` the id or name that was asked for."""
        super().__init__(f"{what} {ref!r} not found")


class InUse(GatewayError):
    kind = "in_use"
    status = 409


class NameTaken(GatewayError):
    kind = "name_taken"
    status = 409


class Conflict(GatewayError):
    """The thing is in a state in which this cannot be done (pausing what is paused, …)."""

    kind = "conflict"
    status = 409


class Invalid(GatewayError):
    kind = "invalid"
    status = 400


class Unsupported(GatewayError):
    """This host, or this snapshot, cannot do what was asked."""

    kind = "unsupported"
    status = 400


class Unauthorized(GatewayError):
    kind = "unauthorized"
    status = 401


class Forbidden(GatewayError):
    kind = "forbidden"
    status = 403


class OverQuota(GatewayError):
    kind = "over_quota"
    status = 413


class Busy(GatewayError):
    """A cap or a lock was not free in time; trying again later is the remedy."""

    kind = "busy"
    status = 429


class Timeout(GatewayError):
    kind = "timeout"
    status = 504


class NoSpace(GatewayError):
    kind = "no_space"
    status = 507


class BackendFailed(GatewayError):
    """A command or machine below us failed; the message names it and what it said."""
