"""Each module's documentation matches its argument specification, option by option."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.grove.sandbox.plugins.module_utils._module import arguments

from tests.collection.predictions import THINGS
from tests.support.session import REPOSITORY

PLUGINS = REPOSITORY / "plugins"
MODULES = sorted((PLUGINS / "modules").glob("*.py"))
_SAME = ("type", "elements", "choices", "required")


def documentation(path: Path) -> dict[str, Any]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DOCUMENTATION":
            found: Any = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(found, dict)
            return found
    raise AssertionError(f"{path.name} has no DOCUMENTATION")


def documented_options(module: Path) -> dict[str, Any]:
    """The options of a module, including those of its fragments."""
    document = documentation(module)
    options = dict(document["options"])
    for fragment in document["extends_documentation_fragment"]:
        name = fragment.removeprefix("grove.sandbox.")
        for option, entry in (documentation(PLUGINS / "doc_fragments" / f"{name}.py").get("options") or {}).items():
            assert option not in options, f"{module.stem} documents {option} of its fragment again"
            options[option] = entry
    return options


def differences(documented: dict[str, Any], accepted: dict[str, Any], within: str = "") -> list[str]:
    """The differences between the two, one line for each."""
    found = [f"{within}{name} is documented only" for name in documented.keys() - accepted.keys()]
    found += [f"{within}{name} is accepted only" for name in accepted.keys() - documented.keys()]
    for name in sorted(documented.keys() & accepted.keys()):
        ours, theirs = documented[name], accepted[name]
        if not ours.get("description"):
            found.append(f"{within}{name} has no description")
        for key in _SAME:
            if (ours.get(key) or None) != (theirs.get(key) or None):
                found.append(f"{within}{name}: {key} {ours.get(key)!r} is documented, {theirs.get(key)!r} accepted")
        if ours.get("default") != theirs.get("default") or type(ours.get("default")) is not type(theirs.get("default")):
            found.append(
                f"{within}{name}: default {ours.get('default')!r} is documented, {theirs.get('default')!r} accepted"
            )
        if sorted(ours.get("aliases") or []) != sorted(theirs.get("aliases") or []):
            found.append(
                f"{within}{name}: aliases {ours.get('aliases')} are documented, {theirs.get('aliases')} accepted"
            )
        found += differences(ours.get("suboptions") or {}, theirs.get("options") or {}, f"{within}{name}.")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_documented_options_are_accepted(module: Path) -> None:
    assert not differences(documented_options(module), arguments(THINGS[module.stem]))


def test_a_difference_is_noticed() -> None:
    documented = documented_options(PLUGINS / "modules" / "sandbox_fork.py")
    accepted = arguments(THINGS["sandbox_fork"])
    del documented["timeout"], accepted["count"]
    accepted["exact"]["default"] = None
    accepted["state"]["choices"] = ["present"]
    accepted["volumes"]["options"]["clone"]["type"] = "str"
    assert differences(documented, accepted) == [
        "count is documented only",
        "timeout is accepted only",
        "exact: default False is documented, None accepted",
        "state: choices ['present', 'absent'] is documented, ['present'] accepted",
        "volumes.clone: type 'bool' is documented, 'str' accepted",
    ]
