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

`sandbox-gateway serve --config FILE` reads one TOML file. Every key is optional. An unknown key is an error, and
`sandbox-gateway check --config FILE` checks a file. This page is generated from the declarations in `config.py`
(`sandbox-gateway config-docs`).
"""


def page(config: type[BaseModel]) -> str:
    fields = config.model_fields
    plain = {name: field for name, field in fields.items() if not _section(field)}
    parts = [_HEAD]
    if plain:
        parts.append(f"## Top level\n\n{_table(plain)}")
    for field in fields.values():
        if section := _section(field):
            parts.append(f"## {(section.__doc__ or section.__name__).strip()}\n\n{_table(section.model_fields)}")
    return "\n".join(parts)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = [f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field)} |" for name, field in fields.items()]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(value, default=_plain)}`"


def _plain(value: object) -> Any:
    return value.value if isinstance(value, Enum) else str(value)


def _type(field: FieldInfo) -> str:
    limits = _limits(field)
    return f"{_type_name(field.annotation)}{f', {limits}' if limits else ''}"


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(limit, word):g}"
        for word, sign in signs.items()
        for limit in field.metadata
        if hasattr(limit, word)
    ]
    return ", ".join(found)


def _type_name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(arg)}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"list of {_type_name(args[0])}s"
    names = {str: "string", Path: "path", bool: "boolean", int: "integer", float: "number"}
    return names.get(kind, str(kind))
