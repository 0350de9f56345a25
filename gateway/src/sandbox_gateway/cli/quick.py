"""Parse the command lines of queries without the command-line library.

``parse`` understands only complete and correct command lines. All other command lines, such as those with `--help` or
an unknown option, are left to `app`, which has the same commands and reports errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sandbox_gateway.cli import queries
from sandbox_gateway.cli.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_JSON_OPTION = "--json"
_GLOBAL_OPTIONS = {"--url": "url", "--token": "token", "--token-file": "token_file"}
REPEATABLE_PARAMETERS = ("metadata",)
"""Parameters whose options can be given several times."""


class Query:
    """A function of `queries`, with the number of its operands and the parameters of its options."""

    def __init__(
        self, run: Callable[..., None], operand_count: int = 0, options: Mapping[str, str] | None = None
    ) -> None:
        self.run = run
        self.operand_count = operand_count
        self.options = dict(options or {})


QUERIES: dict[tuple[str, ...], Query] = {
    ("list",): Query(
        queries.list_sandboxes,
        options={
            "--state": "state",
            "--template": "template",
            "--snapshot": "snapshot",
            "--metadata": "metadata",
            "-m": "metadata",
        },
    ),
    ("show",): Query(queries.show_sandbox, 1),
    ("usage",): Query(queries.show_usage, 1),
    ("health",): Query(queries.show_health),
    ("snapshot", "list"): Query(queries.list_snapshots, options={"--sandbox": "sandbox", "--template": "template"}),
    ("snapshot", "show"): Query(queries.show_snapshot, 1),
    ("template", "list"): Query(queries.list_templates),
    ("template", "show"): Query(queries.show_template, 1),
    ("volume", "list"): Query(queries.list_volumes),
    ("volume", "show"): Query(queries.show_volume, 1),
    ("host", "list"): Query(queries.list_hosts),
}


def parse(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return a function that runs the query, or None if `app` has to parse the command line."""
    if "_SANDBOXCTL_COMPLETE" in os.environ:  # The shell asks for completions.
        return None
    words, operand_words = list(arguments), []
    global_options: dict[str, Any] = {}
    while words and words[0].startswith("-"):
        if (word := words.pop(0)) == _JSON_OPTION:
            global_options["json"] = True
        elif (option := _parse_option(word, words, _GLOBAL_OPTIONS)) is not None:
            global_options[option[0]] = option[1]
        else:
            return None
    query = QUERIES.get(name := tuple(words[:1])) or QUERIES.get(name := tuple(words[:2]))
    if query is None:
        return None
    words = words[len(name) :]
    parameters: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word == _JSON_OPTION:
            global_options["json"] = True
        elif not word.startswith("-"):
            operand_words.append(word)
        elif (option := _parse_option(word, words, query.options)) is None:
            return None
        elif option[0] in REPEATABLE_PARAMETERS:
            parameters.setdefault(option[0], []).append(option[1])
        else:
            parameters[option[0]] = option[1]
    if len(operand_words) != query.operand_count:
        return None
    return partial(query.run, _create_settings(global_options), *operand_words, **parameters)


def _parse_option(word: str, words: list[str], options: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the parameter and the value of the option ``word``, or None if the option is unknown or has no value.

    Remove the value from ``words`` if it is the next word.
    """
    name, separator, value = word.partition("=")
    if name not in options or (separator and not name.startswith("--")):
        return None
    if not separator:
        if not words or words[0].startswith("-"):
            return None
        value = words.pop(0)
    return options[name], value


def _create_settings(options: Mapping[str, Any]) -> Settings:
    defaults = {
        "url": os.environ.get("SANDBOX_GATEWAY_URL", ""),
        "token": os.environ.get("SANDBOX_GATEWAY_TOKEN", ""),
    }
    return Settings(**{**defaults, **options})
