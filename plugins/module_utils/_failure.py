# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What went wrong, in the words a user reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

_LONGEST = 64 << 10
"""Characters of a sentence: it may quote what a sandbox said."""
_NOT_PRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tabs and line ends, marks that reorder text, and halves of characters."""


def printable(text: str) -> str:
    """``text`` without what a terminal would obey."""
    return _NOT_PRINTABLE.sub("", text)


class Failure(Exception):
    """A refusal or an error: a sentence, the gateway's stable word for it, and what stands in the way.

    What it quotes from a gateway or a sandbox is made printable here, and bounded.
    ``status`` is the HTTP status where the gateway answered, else None.
    """

    def __init__(
        self, message: str, kind: str = "invalid", *, blockers: Iterable[str] = (), status: int | None = None
    ) -> None:
        message = printable(message)
        if len(message) > _LONGEST:
            message = message[:_LONGEST] + "..."
        super().__init__(message)
        self.message = message
        self.kind = printable(kind)
        self.blockers = [printable(each) for each in blockers]
        self.status = status

    def as_dict(self) -> dict[str, Any]:
        """The ``failure`` of a module's result."""
        return {"kind": self.kind, "message": self.message, "blockers": self.blockers, "status": self.status}


def join(failures: dict[str, Failure], asked: int) -> Failure:
    """One failure that speaks for several, by the names they belong to."""
    sentences = list(dict.fromkeys(failure.message for failure in failures.values()))
    first = next(iter(failures.values()))
    if len(sentences) == 1:
        return first
    text = f"{len(failures)} of {asked} cannot be done: " + "; ".join(sentences)
    blockers = [blocker for failure in failures.values() for blocker in failure.blockers]
    return Failure(text, first.kind, blockers=dict.fromkeys(blockers), status=first.status)


@contextlib.contextmanager
def still_there(what: str, ref: str, ident: str) -> Iterator[None]:
    """For calls that need what the plan has found: where it went meanwhile, the failure says so, by the user's name."""
    try:
        yield
    except Failure as failure:
        if failure.kind != "not_found" or ident not in failure.message:
            raise
        raise Failure(
            f"{what} {ref!r} was there when this task began and is not found any more: somebody removed it meanwhile, "
            "or it expired; make it again, or name another",
            "not_found",
            status=failure.status,
        ) from None
