"""Replace the names of request fields in the gateway's messages with the options of the running command."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

_OPTION_BY_FIELD = {
    "allowInternetAccess: false": "no-internet",
    "cpuCount": "cpus",
    "diskSizeMB": "disk",
    "envVars": "env",
    "fromSnapshot": "from",
    "labels": "host-label",
    "memory: false": "no-memory",
    "memory: none": "no-memory",
    "registryPassword": "registry-password-file",
    "volumeMounts": "volume",
    "volumeMounts: []": "no-volumes",
    "when=unused": "when-unused",
}
"""The options, without dashes, that are not named like their field."""

_QUOTED_FIELD = re.compile(
    r"(?<!\w)'(?P<field>[a-z]+[A-Z]\w*|[a-z]\w*(?=[:=]))(?:(?P<separator>: |=)(?P<value>[^']*))?'"
)
"""A field in a sentence: 'coldStart', or 'coldStart: true'. A lower-case word in quotes may also be a user's name."""
_LOCATION = re.compile(r"(?:^|(?<=; ))(?P<path>[A-Za-z]+(?:\.\w+)*)(?=: )")
"""The path of an invalid field, which precedes the reason: `volumeMounts.0.readOnly: ...`."""
_CAPITALS = re.compile("[A-Z]+")


def map_options(parameters: Iterable[Any]) -> dict[str, str]:
    """Return the options of a command, by name without dashes, and its arguments, by lower-case name.

    ``parameters``: as in a Typer command. The value of an option that needs no value ends with "=".
    """
    options: dict[str, str] = {}
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            options.setdefault((parameter.metavar or parameter.name).lower(), parameter.metavar or parameter.name)
            continue
        option = max(parameter.opts, key=len)
        options[option.lstrip("-")] = f"{option}=" if parameter.is_flag else option
    return options


def name_options(message: str, options: Mapping[str, str]) -> str:
    """Return the gateway's message with options of the running command in place of fields.

    ``options``: as returned by ``map_options``. Fields without an option stay unchanged.
    """
    message = _QUOTED_FIELD.sub(lambda match: _format_option(match, options) or match[0], message)
    return _LOCATION.sub(lambda match: _format_location(match["path"], options), message)


def _format_option(match: re.Match[str], options: Mapping[str, str]) -> str:
    field, value = match["field"], match["value"] or ""
    whole = f"{field}{match['separator'] or ''}{value}"
    if whole in _OPTION_BY_FIELD:
        return options.get(_OPTION_BY_FIELD[whole], "").removesuffix("=")
    option = _find_option(field, options)
    if not option or not value or option.endswith("="):
        return option.removesuffix("=")
    return f"{option} {value}"


def _format_location(path: str, options: Mapping[str, str]) -> str:
    """Return the first part of ``path`` that is an option, and the rest in parentheses."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if option := _find_option(part, options).removesuffix("="):
            rest = ".".join(parts[index + 1 :])
            return f"{option} ({rest})" if rest else option
    return path


def _find_option(field: str, options: Mapping[str, str]) -> str:
    name = _CAPITALS.sub(lambda match: f"-{match[0].lower()}", field)
    return options.get(_OPTION_BY_FIELD.get(field) or re.sub("-(mb|id)$", "", name), "")
