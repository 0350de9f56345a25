"""Test that the argument specification of each role lists all options and their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from jinja2 import Environment, nodes

from tests.support import session

ROLES = sorted((session.REPOSITORY / "roles").iterdir())

_PARSER = Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"])
_EXPRESSION_KEYWORDS = ("changed_when", "failed_when", "that", "until", "when", "var")
"""Keywords whose values are expressions without braces."""


def load_yaml(role: Path, name: str) -> Any:
    return yaml.safe_load((role / name).read_text())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_specification_and_defaults_have_the_same_options(role: Path) -> None:
    options = load_yaml(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load_yaml(role, "defaults/main.yml")
    # An option without a default is required, or leaving it out has a meaning.
    options_without_default = {name for name, option in options.items() if "default" not in option}
    assert set(defaults) <= set(options)
    assert set(options) - set(defaults) <= options_without_default
    assert all(name.startswith(f"{role.name}_") for name in options)
    for name, value in defaults.items():
        # Templates, for example for another path on FreeBSD, evaluate to the specification's default on Linux.
        if not (isinstance(value, str) and "{{" in value):
            assert options[name].get("default", "" if value == "" else None) == value, name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_has_a_type_and_description(role: Path) -> None:
    specification = load_yaml(role, "meta/argument_specs.yml")["argument_specs"]["main"]
    assert specification["short_description"] and specification["description"] and specification["author"]

    def check_options(options: dict[str, Any], prefix: str) -> None:
        for name, option in options.items():
            assert option.get("description") and option.get("type"), f"{prefix}{name}"
            assert option["type"] != "list" or option.get("elements"), f"{prefix}{name}"
            check_options(option.get("options", {}), f"{prefix}{name}.")

    check_options(specification["options"], f"{role.name}: ")


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_are_accepted(role: Path) -> None:
    options = load_yaml(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = {
        name: value for name, value in load_yaml(role, "defaults/main.yml").items() if not find_variables(value)
    }
    optional_options = {name: {**option, "required": False} for name, option in options.items()}
    result = ArgumentSpecValidator(optional_options).validate(defaults)
    assert not result.error_messages
    assert {name: result.validated_parameters[name] for name in defaults} == defaults


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_is_used(role: Path) -> None:
    used_variables = find_variables_of_role(role)
    unused_options = [
        name
        for name in load_yaml(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
        if name not in used_variables
    ]
    assert not unused_options, "these options have no effect"


def test_a_variable_mentioned_in_text_does_not_count_as_used() -> None:
    assert find_variables(
        {"name": "about a_name", "when": ["a is defined", "not b.c"], "msg": "{{ d | default(e) }}"}
    ) == {
        "a",
        "b",
        "d",
        "e",
    }


def find_variables_of_role(role: Path) -> set[str]:
    """Return the variables that a role's tasks, handlers, variables, defaults and templates use."""
    names: set[str] = set()
    for path in role.rglob("*"):
        if path.suffix == ".j2":
            names |= find_names(path.read_text())
        elif path.suffix == ".yml" and path.parent.name != "meta":
            for document in yaml.safe_load_all(path.read_text()):
                names |= find_variables(document)
    return names


def find_variables(value: Any, key: str = "") -> set[str]:
    """Return the variables that the templates in a YAML value use. ``key`` is the key that holds the value."""
    if isinstance(value, dict):
        return {
            name
            for nested_key, each in value.items()
            for name in find_variables(nested_key) | find_variables(each, nested_key)
        }
    if isinstance(value, list):
        return {name for each in value for name in find_variables(each, key)}
    if not isinstance(value, str):
        return set()
    text = f"{{{{ {value} }}}}" if key in _EXPRESSION_KEYWORDS and "{{" not in value else value
    return find_names(text)


def find_names(template: str) -> set[str]:
    return {name.name for name in _PARSER.parse(template).find_all(nodes.Name) if name.ctx == "load"}
