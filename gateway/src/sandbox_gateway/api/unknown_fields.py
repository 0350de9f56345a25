"""Find unknown fields in request bodies: a header warns about them, and `?strict=true` refuses them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, get_args

from fastapi import Depends, Query, Request
from pydantic import AliasChoices

from sandbox_gateway.api.body import Body
from sandbox_gateway.api.errors import MAX_SHOWN_CHARS, WARNING, clip
from sandbox_gateway.errors import Invalid

_MAX_NAMED_FIELDS = 24
"""Maximum number of fields that a warning or an error names."""
_MAX_WARNING_LENGTH = 600
"""Maximum characters of the header. Servers and proxies limit the total size of headers, some to 4 KiB."""
_MAX_LIST_ENTRIES = 100
"""Maximum number of list entries that are examined: no valid list of objects is longer."""
_MAX_MATCHED_LENGTH = 40
_UNPRINTABLE = re.compile(r'[^\x20-\x7e]|["\\]')


@dataclass(frozen=True)
class UnknownField:
    path: str
    """The path in the notation of validation errors: `volumeMounts.0.readonly`."""
    similar: str
    """A known field of the same object with a similar name; empty if there is none."""

    @property
    def name(self) -> str:
        """Return ``path`` in a form that is safe in headers and sentences."""
        return clip(_UNPRINTABLE.sub("?", self.path), MAX_SHOWN_CHARS)

    def __str__(self) -> str:
        return f"{self.name} (did you mean {self.similar}?)" if self.similar else self.name


async def _check_fields(
    request: Request,
    strict: Annotated[bool, Query(description="Refuse a body that has fields this gateway does not know.")] = False,
) -> None:
    """Raise Invalid if ``strict``. Runs before validation, so that a misspelt field is reported as unknown."""
    body = request.scope["route"].body_field
    model = _model_in(body.field_info.annotation) if body else None
    if model is None:
        return
    try:
        data = await request.json()  # FastAPI has already parsed it, and Starlette caches the result.
    except (ValueError, RecursionError):
        return
    unknown = list(islice(find_unknown_fields(model, data), _MAX_NAMED_FIELDS + 1))
    if unknown and strict:
        noun, pronoun = ("field", "it") if len(unknown) == 1 else ("fields", "them")
        raise Invalid(f"unknown {noun}: {_join_names([str(field) for field in unknown])}: correct or remove {pronoun}")
    if unknown:
        text = f"ignored fields: {_join_names([field.name for field in unknown])}"
        request.scope[WARNING] = f'299 - "{clip(text, _MAX_WARNING_LENGTH)}"'


CheckFields = Depends(_check_fields)


def find_unknown_fields(model: type[Body], data: Any, prefix: str = "") -> Iterator[UnknownField]:
    """Yield the fields of ``data`` and its nested objects that neither ``model`` nor any known client has."""
    if not isinstance(data, dict):
        return
    fields = _fields_of(model)
    for name, value in data.items():
        if name in fields:
            nested = fields[name]
            if nested is not None:
                yield from _find_nested(nested, value, f"{prefix}{name}.")
        elif name not in model.ignored:
            yield UnknownField(f"{prefix}{name}", _find_similar(name, model))


def _find_nested(model: type[Body], value: Any, prefix: str) -> Iterator[UnknownField]:
    if isinstance(value, list):
        for index, entry in enumerate(value[:_MAX_LIST_ENTRIES]):
            yield from find_unknown_fields(model, entry, f"{prefix}{index}.")
    else:
        yield from find_unknown_fields(model, value, prefix)


@cache
def _fields_of(model: type[Body]) -> dict[str, type[Body] | None]:
    """Return every field name that ``model`` accepts, with the model of nested objects if there are any."""
    fields: dict[str, type[Body] | None] = {}
    for name, field in model.model_fields.items():
        aliases = field.validation_alias
        choices = aliases.choices if isinstance(aliases, AliasChoices) else [aliases]
        for known in (name, field.alias, *choices):
            if isinstance(known, str):
                fields[known] = _model_in(field.annotation)
    return fields


def _model_in(annotation: Any) -> type[Body] | None:
    """Return the model in an annotation: Network for `Network | None`, VolumeMount for `list[VolumeMount]`."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _model_in(arg))), None)


def _find_similar(name: str, model: type[Body]) -> str:
    known = {
        _normalize(field_name): field_name
        for field_name in (field.alias or key for key, field in model.model_fields.items())
    }
    matches = difflib.get_close_matches(_normalize(name[:_MAX_MATCHED_LENGTH]), known, n=1)
    return known[matches[0]] if matches else ""


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _join_names(names: list[str]) -> str:
    return ", ".join([*names[:_MAX_NAMED_FIELDS], "and more"] if len(names) > _MAX_NAMED_FIELDS else names)
