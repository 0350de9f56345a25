"""Check the names of objects in requests, and format names and references for messages."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import DEFAULT_TAG, TAG_SEPARATOR, Record, Snapshot, check_name, check_template_name


def require_valid_name(name: str) -> str:
    """Return ``name``. Raises Invalid, with the naming rule, if it is not a valid name."""
    try:
        return check_name(name)
    except ValueError as error:
        raise Invalid(str(error)) from None


def require_valid_template_name(name: str) -> str:
    """Return a NAME or NAME:TAG as the index knows it. Raises Invalid, with the naming rule, if it is not valid."""
    try:
        return remove_default_tag(check_template_name(name))
    except ValueError as error:
        raise Invalid(str(error)) from None


def remove_default_tag(name: str) -> str:
    """Return NAME for NAME:default, and other names unchanged."""
    return name.removesuffix(TAG_SEPARATOR + DEFAULT_TAG)


def split_tag(name: str) -> tuple[str, str]:
    """Return the name and the tag in NAME:TAG. A name without a tag has the tag "default"."""
    base_name, _, tag = name.partition(TAG_SEPARATOR)
    return base_name, tag or DEFAULT_TAG


def create_build_id(template_id: str) -> str:
    """Return the id of a template's build: the template's id as a UUID, because E2B's clients accept nothing else."""
    return str(UUID(int=int(template_id, 16)))


def parse_build_id(build_id: str) -> str:
    """Return the template id in a build id, or "" if ``build_id`` is malformed. The template need not exist."""
    template_id = build_id[-12:]
    try:
        return template_id if create_build_id(template_id) == build_id else ""
    except ValueError:
        return ""


def join_names(records: Iterable[Record]) -> str:
    """Return the names of objects, joined for a message. A snapshot without a name is listed by its id."""
    return ", ".join((*each.all_names, each.id)[0] if isinstance(each, Snapshot) else each.name for each in records)


def shorten(ref: str) -> str:
    """Return an id or name from a request, shortened for a message."""
    return ref if len(ref) <= 80 else ref[:77] + "..."
