"""Names of objects, in requests and in messages."""

from __future__ import annotations

from collections.abc import Iterable

from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import Record, Snapshot, check_name


def require_valid_name(name: str) -> str:
    """Return ``name``. Raises Invalid with the rule if it is not allowed."""
    try:
        return check_name(name)
    except ValueError as error:
        raise Invalid(str(error)) from None


def names_of(records: Iterable[Record]) -> str:
    """Join the names of objects for a message; uses the id of a snapshot without a name."""
    return ", ".join((*each.names, each.id)[0] if isinstance(each, Snapshot) else each.name for each in records)
