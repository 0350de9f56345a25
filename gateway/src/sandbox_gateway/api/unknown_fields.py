"""Check the query parameters, and the fields of request bodies, before they are validated.

A field that a known client has but the gateway does not support is refused. A response header warns about fields and
parameters that no known client has; with `?strict=true`, these are also refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, get_args

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import AliasChoices

from sandbox_gateway.api.body import Body, Refusal
from sandbox_gateway.api.client_requests import IGNORED_PARAMETERS
from sandbox_gateway.api.errors import MAX_SHOWN_CHARS, WARNING_KEY, clip
from sandbox_gateway.errors import Invalid, Unsupported

_MAX_NAMED_FIELDS = 24
"""Maximum number of fields that a warning or an error names."""
_MAX_WARNING_LENGTH = 600
"""Maximum characters of the header. Servers and proxies limit the total size of headers, some to 4 KiB."""
MAX_LIST_ENTRIES = 1000
"""Maximum number of list entries that are examined: no valid list of objects is longer."""
_MAX_PARAMETERS = 100
"""Maximum number of query parameters that are examined."""
_MAX_MATCHED_LENGTH = 40
_SEGMENT_PATTERN = re.compile("{[^}]*}")
_CAPITALS_PATTERN = re.compile("(?<=.)[A-Z]+")
_UNPRINTABLE_PATTERN = re.compile(r'[^\x20-\x7e]|["\\]')


@dataclass(frozen=True)
class _FieldPath:
    path: str
    """The path in the notation of validation errors: `volumeMounts.0.readonly`."""

    @property
    def name(self) -> str:
        """Return ``path`` in a form that is safe in headers and sentences."""
        return clip(_UNPRINTABLE_PATTERN.sub("?", self.path), MAX_SHOWN_CHARS)


@dataclass(frozen=True)
class RefusedField(_FieldPath):
    """A field in ``Body.refused_fields`` or ``Body.misplaced_fields`` with a value that is not accepted."""

    reason: str

    def __str__(self) -> str:
        return f"{self.name}: not supported, {self.reason}"


@dataclass(frozen=True)
class UnknownField(_FieldPath):
    similar_name: str
    """A known field of the same object, or a parameter of the request, with a similar name; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.name} (did you mean {self.similar_name}?)" if self.similar_name else self.name


async def _check_fields(
    request: Request,
    strict: Annotated[
        bool, Query(description="Refuse query parameters and fields this gateway does not know.")
    ] = False,
) -> None:
    """Raise Unsupported for refused fields and, if ``strict``, Invalid for unknown fields and parameters.

    Runs before validation, so that a misspelt field is reported as unknown.
    """
    route: APIRoute = request.scope["route"]
    parameters = list(islice(_find_unknown_parameters(request, route), _MAX_NAMED_FIELDS + 1))
    unknown_names: dict[str, list[UnknownField]] = {"parameter": parameters}
    model = find_model(route.body_field.field_info.annotation) if route.body_field else None
    if model is not None:
        try:
            data = await request.json()  # FastAPI has already parsed it, and Starlette caches the result.
        except (ValueError, RecursionError):
            data = None
        if refused_fields := list(islice(find_refused_fields(model, data), _MAX_NAMED_FIELDS)):
            raise Unsupported("; ".join(map(str, refused_fields)))
        unknown_names["field"] = list(islice(find_unknown_fields(model, data), _MAX_NAMED_FIELDS + 1))
    unknown_names = {noun: names for noun, names in unknown_names.items() if names}
    if unknown_names and strict:
        raise Invalid("; ".join(_describe_unknown_names(noun, names) for noun, names in unknown_names.items()))
    if unknown_names:
        text = "; ".join(
            f"ignored {noun}s: {_join_names([each.name for each in names])}" for noun, names in unknown_names.items()
        )
        request.scope[WARNING_KEY] = f'299 - "{clip(text, _MAX_WARNING_LENGTH)}"'


def _describe_unknown_names(noun: str, names: list[UnknownField]) -> str:
    noun, pronoun = (noun, "it") if len(names) == 1 else (f"{noun}s", "them")
    return f"unknown {noun}: {_join_names([str(each) for each in names])}: correct or remove {pronoun}"


def _find_unknown_parameters(request: Request, route: APIRoute) -> Iterator[UnknownField]:
    """Yield the parameters of the query that neither ``route`` nor any known client has."""
    known_names = [*_list_parameters(route.dependant), "strict"]
    ignored_names = IGNORED_PARAMETERS.get(f"{request.method} {_SEGMENT_PATTERN.sub('{}', route.path)}", {})
    for name in list(request.query_params)[:_MAX_PARAMETERS]:
        if name not in known_names and name not in ignored_names:
            yield UnknownField(name, _find_similar(name, known_names))


def _list_parameters(dependant: Dependant) -> Iterator[str]:
    """Yield the names of the query parameters of a route, and of what it depends on."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _list_parameters(each)


CheckFields = Depends(_check_fields)


def find_unknown_fields(model: type[Body], data: Any) -> Iterator[UnknownField]:
    """Yield the fields of ``data`` and its nested objects that neither ``model`` nor any known client has."""
    for owner, prefix, name, _ in _walk(model, data):
        if name not in get_fields(owner) and name not in owner.ignored_fields and find_refusal(owner, name) is None:
            yield UnknownField(f"{prefix}{name}", _find_similar_name(name, owner))


def find_refused_fields(model: type[Body], data: Any) -> Iterator[RefusedField]:
    """Yield the fields of ``data`` and its nested objects that ``model`` refuses."""
    for owner, prefix, name, value in _walk(model, data):
        refusal = find_refusal(owner, name)
        if refusal is not None and not refusal.accepts(value):
            yield RefusedField(f"{prefix}{name}", refusal.reason)


def find_refusal(model: type[Body], name: str) -> Refusal | None:
    """Return the refusal of the field ``name``, which may be in snake_case, or None if ``model`` does not refuse it."""
    return _list_refusals(model).get(name)


def _walk(model: type[Body], data: Any, prefix: str = "") -> Iterator[tuple[type[Body], str, str, Any]]:
    """Yield (model, prefix of the path, name, value) for each field of ``data`` and its nested objects."""
    if not isinstance(data, dict):
        return
    fields = get_fields(model)
    for name, value in data.items():
        yield model, prefix, name, value
        nested_model = fields.get(name)
        if nested_model is None:
            continue
        if isinstance(value, list):
            for index, entry in enumerate(value[:MAX_LIST_ENTRIES]):
                yield from _walk(nested_model, entry, f"{prefix}{name}.{index}.")
        else:
            yield from _walk(nested_model, value, f"{prefix}{name}.")


@cache
def _list_refusals(model: type[Body]) -> dict[str, Refusal]:
    """Return the refusals of ``model`` by the names of their fields, each as in JSON and in snake_case."""
    refusals = {**model.misplaced_fields, **model.refused_fields}
    snake_case = {
        _CAPITALS_PATTERN.sub(lambda match: f"_{match[0].lower()}", name): refusals[name] for name in refusals
    }
    return snake_case | refusals


@cache
def get_fields(model: type[Body]) -> dict[str, type[Body] | None]:
    """Return every field name that ``model`` accepts, with the model of its nested objects, or None."""
    fields: dict[str, type[Body] | None] = {}
    for name, field in model.model_fields.items():
        validation_alias = field.validation_alias
        choices = validation_alias.choices if isinstance(validation_alias, AliasChoices) else [validation_alias]
        for accepted_name in (name, field.alias, *choices):
            if isinstance(accepted_name, str):
                fields[accepted_name] = find_model(field.annotation)
    return fields


def find_model(annotation: Any) -> type[Body] | None:
    """Return the model in an annotation: Network for `Network | None`, VolumeMount for `list[VolumeMount]`."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next((model for arg in get_args(annotation) if (model := find_model(arg))), None)


def _find_similar_name(name: str, model: type[Body]) -> str:
    return _find_similar(name, (field.alias or key for key, field in model.model_fields.items()))


def _find_similar(name: str, known_names: Iterable[str]) -> str:
    name_by_normal_form = {_normalize(known_name): known_name for known_name in known_names}
    matches = difflib.get_close_matches(_normalize(name[:_MAX_MATCHED_LENGTH]), name_by_normal_form, n=1)
    return name_by_normal_form[matches[0]] if matches else ""


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _join_names(names: list[str]) -> str:
    return ", ".join([*names[:_MAX_NAMED_FIELDS], "and more"] if len(names) > _MAX_NAMED_FIELDS else names)
