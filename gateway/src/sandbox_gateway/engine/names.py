"""Check the names of objects in requests, and format names and references for messages."""

from __future__ import annotations

from collections.abc import Iterable

from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import Record, Snapshot, check_name


def require_valid_name(name: str) -> str:
    """Return ``name``. Raises Invalid, with the naming rule, if it is not a valid name."""
    try:
        return check_name(name)
    except ValueError as error:
        raise Invalid(str(error)) from None


def join_names(records: Iterable[Record]) -> str:
    """Return the names of objects, joined for a message. A snapshot without a name is listed by its id."""
    return ", ".join((*each.names, each.id)[0] if isinstance(each, Snapshot) else each.name for each in records)


def shorten(ref: str) -> str:
    """Return an id or name from a request, shortened for a message."""
    return ref if len(ref) <= 80 else ref[:77] + "..."
