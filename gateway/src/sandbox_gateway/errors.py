"""Errors that callers see.

Every error has a stable machine-readable ``kind``, an HTTP status, a message that says what is wrong and how to fix
it, and the ids of the objects that block the request (``blockers``). For some kinds, ``details`` contains the facts of
the message as structured data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox_gateway.control_characters import remove_control_characters


class GatewayError(Exception):
    """The base class of all errors that callers see. Any other exception is a bug (status 500)."""

    kind = "backend_failed"
    status = 500

    def __init__(self, message: str, *, blockers: Sequence[str] = (), details: Mapping[str, Any] | None = None) -> None:
        """Create an error. Control characters are removed from ``message``, because it may quote a guest's data."""
        self.message = remove_control_characters(message)
        super().__init__(self.message)
        self.blockers = list(blockers)
        self.details = dict(details or {})


class NotFound(GatewayError):
    kind = "not_found"
    status = 404

    def __init__(self, noun: str, ref: str, *, message: str = "", resource: str = "", parent: str = "") -> None:
        """Create an error. ``noun``: the kind of object ("sandbox", "template", …). ``ref``: the requested id or name.

        ``message`` replaces the default message. ``details`` contains ``resource``, by default ``noun``, and
        ``parent``, the id or name of the object that was searched for ``ref``.
        """
        details = {"resource": resource or noun, "parent": parent}
        super().__init__(message or f"{noun} {ref!r} not found", details=details)


class Gone(GatewayError):
    """The object was deleted while a request was using it."""

    kind = "gone"
    status = 410


class InUse(GatewayError):
    kind = "in_use"
    status = 409


class InUseExternally(InUse):
    """A host cannot remove an object, because something that the engine does not manage depends on it.

    The engine catches this error and raises one that names the object. ``users``: the names of the users by id, for
    each kind of user. ``remedy``: a sentence that says how to release the object.
    """

    def __init__(self, users: Mapping[str, Mapping[str, str]], remedy: str) -> None:
        names = [name for group in users.values() for name in group.values()]
        super().__init__(", ".join(names), blockers=[id for group in users.values() for id in group])
        self.users = users
        self.remedy = remedy


class NameTaken(GatewayError):
    kind = "name_taken"
    status = 409


class Conflict(GatewayError):
    """The object is in the wrong state: for example, the request pauses a sandbox that is already paused."""

    kind = "conflict"
    status = 409


class Invalid(GatewayError):
    kind = "invalid"
    status = 400


class Unsupported(GatewayError):
    """This gateway, host or snapshot does not support the request."""

    kind = "unsupported"
    status = 400


class Unauthorized(GatewayError):
    kind = "unauthorized"
    status = 401


class Forbidden(GatewayError):
    kind = "forbidden"
    status = 403


class Untrusted(GatewayError):
    """A file is signed with a key that the caller has not declared as trusted."""

    kind = "untrusted"
    status = 403


class OverQuota(GatewayError):
    kind = "over_quota"
    status = 413


class Busy(GatewayError):
    """A limit was reached, or a lock could not be acquired in time. The client can retry later."""

    kind = "busy"
    status = 429


class OutputLost(GatewayError):
    """A limit was reached after a request had taken effect, or a command had started.

    Sending the request again repeats the operation.
    """

    kind = "output_lost"
    status = 429


class Timeout(GatewayError):
    kind = "timeout"
    status = 504


class Unavailable(GatewayError):
    """In a fleet: etcd or the gateway of another host does not answer. The client can retry later."""

    kind = "unavailable"
    status = 503


class NoSpace(GatewayError):
    kind = "no_space"
    status = 507


class BackendFailed(GatewayError):
    """A command or machine of the host failed. The message names it and quotes its output."""
