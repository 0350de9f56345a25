"""Readers of an error see the names that they wrote: fields of the API, options of a module or of a command."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ansible_collections.grove.sandbox.plugins.module_utils import _fields, _refusals
from pydantic import AliasChoices, BaseModel, ValidationError

from sandbox_gateway.api.native import requests
from sandbox_gateway.api.native.naming import to_json_name
from sandbox_gateway.cli import option_names
from sandbox_gateway.cli.app import app
from sandbox_gateway.cli.failure import create_failure_from_response
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.validation import explain

REPOSITORY = Path(__file__).parents[2]
GATEWAY = REPOSITORY / "gateway/src/sandbox_gateway"
MODULES = ("sandbox", "fork", "rollback", "snapshot", "template", "volume")
REQUEST_WRITERS = (*MODULES, "artifacts", "fields", "mounts", "snapshot_files")
NOT_SENTENCES = {"description", "summary", "help"}
"""The keyword arguments whose texts describe the API or the command line."""
CAMEL_CASE = re.compile(r"\b[a-z]+[A-Z]\w*\b")


def list_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for child in model.__subclasses__():
        yield from list_models(child)


def list_request_fields() -> set[str]:
    """Return all camelCase names of fields in request bodies."""
    names: set[str] = set()
    for model in list_models(requests.NativeBody):
        for field in model.model_fields.values():
            choices = field.validation_alias
            aliases = choices.choices if isinstance(choices, AliasChoices) else [field.alias]
            names.update(name for name in aliases if isinstance(name, str) and CAMEL_CASE.fullmatch(name))
    return names


REQUEST_FIELDS = list_request_fields()


def list_texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings in ``node`` that can be sentences. A placeholder in an f-string becomes `…`."""
    if isinstance(node, ast.keyword) and node.arg in NOT_SENTENCES:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # A docstring.
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from list_texts(child)


def list_sentences() -> list[str]:
    """Return the texts of the gateway that name a field of a request."""
    sentences = []
    for path in sorted(GATEWAY.rglob("*.py")):
        if "cli" in path.relative_to(GATEWAY).parts:
            continue
        for text in list_texts(ast.parse(path.read_text())):
            if text.count(" ") > 2 and REQUEST_FIELDS.intersection(CAMEL_CASE.findall(text)):
                sentences.append(text)
    return sentences


SENTENCES = list_sentences()


def list_module_options() -> set[str]:
    """Return the names of all options and suboptions of the modules that change something."""

    def walk(arguments: Mapping[str, Any]) -> Iterator[str]:
        for name, declaration in arguments.items():
            yield name
            yield from walk(declaration.get("options") or {})

    prefix = "ansible_collections.grove.sandbox.plugins.module_utils."
    return {name for each in MODULES for name in walk(importlib.import_module(f"{prefix}_{each}").ARGUMENTS)}


def find_commands() -> dict[str, dict[str, str]]:
    """Return the options of each command of `sandboxctl`, by command."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, dict[str, str]]]:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                yield from walk(child, f"{path} {name}".strip())
        else:
            yield path, option_names.map_options(command.params)

    return dict(walk(typer.main.get_command(app), ""))


COMMANDS = find_commands()


def test_the_walk_finds_the_sentences() -> None:
    fields = {field for text in SENTENCES for field in CAMEL_CASE.findall(text)}
    assert {"diskSizeMB", "volumeMounts", "coldStart", "allowInternetAccess", "readyTimeout", "keepLast"} <= fields
    assert len(SENTENCES) > 15


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_quote_fields(sentence: str) -> None:
    named_fields = REQUEST_FIELDS.intersection(CAMEL_CASE.findall(sentence))
    quoted_fields = {match["field"] for match in option_names._QUOTED_FIELD.finditer(sentence)}
    location = option_names._LOCATION.match(sentence)
    assert named_fields <= quoted_fields | set(location["path"].split(".") if location else ())


def test_the_table_of_options_is_complete() -> None:
    """Every field that the code of the modules writes has an option, and every option exists."""
    written_names = {
        text
        for name in REQUEST_WRITERS
        for text in list_texts(ast.parse((REPOSITORY / f"plugins/module_utils/_{name}.py").read_text()))
    }
    assert REQUEST_FIELDS & written_names == set(filter(CAMEL_CASE.fullmatch, _fields.OPTIONS_BY_FIELD))
    assert set(_fields.OPTIONS_BY_FIELD.values()) <= list_module_options()


@pytest.mark.parametrize("sentence", SENTENCES)
def test_messages_of_modules_name_no_field(sentence: str) -> None:
    message = _refusals.name_options(sentence, {})
    remaining_fields = REQUEST_FIELDS.intersection(CAMEL_CASE.findall(message))
    # No module sends these, so no module shows the sentences that name them.
    assert remaining_fields <= REQUEST_FIELDS - _fields.OPTIONS_BY_FIELD.keys()


@pytest.mark.parametrize("field", sorted(_fields.OPTIONS_BY_FIELD))
def test_locations_name_options(field: str) -> None:
    option = _fields.OPTIONS_BY_FIELD[field]
    assert (
        _fields.replace_fields(f"network.{field}.0: wrong; {field}: bad") == f"network.{option}.0: wrong; {option}: bad"
    )


def test_a_users_name_stays_unchanged() -> None:
    message = "sandbox 'myBox' not found"
    assert _fields.replace_fields(message) == option_names.name_options(message, COMMANDS["create"]) == message


def find_commands_with(field: str) -> list[dict[str, str]]:
    return [options for options in COMMANDS.values() if option_names._find_option(field, options).startswith("--")]


SENT_BY_COMMANDS = sorted(field for field in REQUEST_FIELDS if find_commands_with(field))


def test_commands_have_options_for_the_fields_that_they_send() -> None:
    source = "".join(path.read_text() for path in (GATEWAY / "cli").glob("*.py"))
    written_fields = {field for field in REQUEST_FIELDS if re.search(rf'"{field}":|\["{field}"\] =', source)}
    # NAME:PATH:ro, the value of --volume, contains readOnly. The contents of .dockerignore have no option.
    assert written_fields - set(SENT_BY_COMMANDS) == {"ignoreFile", "readOnly"}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_messages_of_commands_name_no_field(sentence: str) -> None:
    for field in REQUEST_FIELDS.intersection(CAMEL_CASE.findall(sentence)):
        for options in find_commands_with(field):
            message = option_names.name_options(sentence, options)
            assert field not in CAMEL_CASE.findall(message), message


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("create", "boot from its disk with 'coldStart: true'", "boot from its disk with --cold-start"),
        ("create", "block them with 'allowInternetAccess: false'", "block them with --no-internet"),
        ("create", "use 'volumeMounts', or 'volumeMounts: []'", "use --volume, or --no-volumes"),
        ("create", "volumeMounts.0.path: must be absolute", "--volume (0.path): must be absolute"),
        ("create", "network.allowOut.2: not an address", "--allow-out (2): not an address"),
        ("create", "cpuCount: too many; memoryMB: too little", "--cpus: too many; --memory: too little"),
        ("template build", "set 'diskSizeMB' to 512 or more", "set --disk to 512 or more"),
        ("snapshot import", "import the file with 'trust: 12ab'", "import the file with --trust 12ab"),
        ("snapshot create", "set 'keepLast', 'keepDaily' or 'maxAge'", "set --keep-last, --keep-daily or --max-age"),
        ("snapshot delete", "or pass 'when=unused' to delete it", "or pass --when-unused to delete it"),
        ("volume create", "sizeMB: too small", "--size: too small"),
        ("volume grow", "sizeMB: too small", "SIZE: too small"),
        ("kill", "set 'diskSizeMB' to 512", "set 'diskSizeMB' to 512"),
    ],
)  # fmt: skip
def test_options_of_commands(command: str, message: str, expected: str) -> None:
    failure = create_failure_from_response(400, {"kind": "invalid", "message": message}, COMMANDS[command])
    assert failure.message == expected
    assert create_failure_from_response(400, {"kind": "invalid", "message": message}).message == message


def test_the_api_spells_the_fields_of_recipes() -> None:
    with pytest.raises(ValidationError) as error_info:
        Recipe(ready_timeout=-1)
    assert explain(error_info.value, to_json_name).startswith("readyTimeout: ")
