# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The exception for errors that are reported to the user."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

_MAX_MESSAGE_CHARACTERS = 64 << 10
"""Maximum number of characters in a message, which may quote output of a sandbox."""
_UNPRINTABLE_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tabs and line breaks, bidirectional marks, and lone surrogates."""


def make_printable(text: str) -> str:
    """Return ``text`` without control characters that could affect a terminal."""
    return _UNPRINTABLE_CHARACTERS.sub("", text)


class Failure(Exception):
    """An error with a message, a stable identifier (``kind``), and the resources that cause it (``blockers``).

    The constructor removes control characters and truncates the message. ``status`` is the HTTP status of the
    gateway's response, or None if there was none. ``condition`` says when a predicted failure occurs, and is empty if
    it always does. ``is_expected``: whether a check-mode run predicts that the condition holds.
    """

    condition = ""
    is_expected = True

    def __init__(
        self, message: str, kind: str = "invalid", *, blockers: Iterable[str] = (), status: int | None = None
    ) -> None:
        message = make_printable(message)
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = message[:_MAX_MESSAGE_CHARACTERS] + "..."
        super().__init__(message)
        self.message = message
        self.kind = make_printable(kind)
        self.blockers = [make_printable(each) for each in blockers]
        self.status = status

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as it appears in a module's result."""
        return {"kind": self.kind, "message": self.message, "blockers": self.blockers, "status": self.status}


class UnusableBody(Failure):
    """The body of an upload turns out to be unusable after a part of it was sent."""


def join_failures(failures: dict[str, Failure], total: int) -> Failure:
    """Combine the failures of several resources, keyed by name, into one. ``total`` is the number of resources."""
    messages = list(dict.fromkeys(failure.message for failure in failures.values()))
    first_failure = next(iter(failures.values()))
    if len(messages) == 1:
        return first_failure
    message = f"{len(failures)} of {total} failed: " + "; ".join(messages)
    blockers = [blocker for failure in failures.values() for blocker in failure.blockers]
    return Failure(message, first_failure.kind, blockers=dict.fromkeys(blockers), status=first_failure.status)


@contextlib.contextmanager
def removal_explained(kind: str, ref: str, ident: str) -> Iterator[None]:
    """Replace a "not found" error about ``ident`` with one that names the resource as the user did.

    Use it around requests that need a resource that existed when the task was planned.
    """
    try:
        yield
    except Failure as failure:
        if failure.kind != "not_found" or ident not in failure.message:
            raise
        raise Failure(
            f"{kind} {ref!r} existed when this task began, but it has been removed or has expired since: create "
            f"it again, or use another {kind}",
            "not_found",
            status=failure.status,
        ) from None
