"""Generate the configuration reference from the declarations in config.py."""

from __future__ import annotations

import json
import types
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_HEAD = """# Configuration

`sandbox-gateway serve --config FILE` reads one TOML file. Every section is optional, and so is every key except those
that are marked as required. Unknown keys are errors. To validate a file, run `sandbox-gateway check --config FILE`.

This page is generated from the declarations in `config.py` (`sandbox-gateway config-docs`).
"""


def render_page(config: type[BaseModel]) -> str:
    fields = config.model_fields
    top_level_fields = {name: field for name, field in fields.items() if not _find_section_model(field)}
    parts = [_HEAD]
    if top_level_fields:
        parts.append(f"## Top level\n\n{_render_table(top_level_fields)}")
    for field in fields.values():
        if section := _find_section_model(field):
            parts.append(f"## {(section.__doc__ or section.__name__).strip()}\n\n{_render_table(section.model_fields)}")
    return "\n".join(parts)


def _find_section_model(field: FieldInfo) -> type[BaseModel] | None:
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _render_table(fields: dict[str, FieldInfo]) -> str:
    rows = [
        f"| `{name}` | {_format_type(field)} | {_format_default(field)} | {_format_description(field)} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _format_description(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def _format_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(value, default=_to_plain_value)}`"


def _to_plain_value(value: object) -> Any:
    return value.value if isinstance(value, Enum) else str(value)


def _format_type(field: FieldInfo) -> str:
    limits = _format_limits(field)
    return f"{_format_type_name(field.annotation)}{f', {limits}' if limits else ''}"


def _format_limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, word):g}"
        for word, sign in signs.items()
        for limit in field.metadata
        if hasattr(limit, word)
    ]
    return ", ".join(bounds)


def _format_type_name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(arg)}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_format_type_name(arg) for arg in args if arg is not type(None))
    if origin is dict:
        return f"table of {_format_type_name(args[1])}s"
    if origin is list:
        return f"list of {_format_type_name(args[0])}s"
    type_names = {str: "string", Path: "path", bool: "boolean", int: "integer", float: "number"}
    return type_names.get(kind, str(kind))
