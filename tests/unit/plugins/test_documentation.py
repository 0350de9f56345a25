"""Test that the documentation of each module matches its argument specification."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.grove.sandbox.plugins.module_utils._client import PLANNED_ID_PREFIX
from ansible_collections.grove.sandbox.plugins.module_utils._info import Listing
from ansible_collections.grove.sandbox.plugins.module_utils._module import make_argument_spec
from ansible_collections.grove.sandbox.plugins.module_utils._run import CONDITIONAL_OPTIONS

from tests.collection.predictions import RESOURCE_KINDS
from tests.support.session import REPOSITORY

PLUGIN_DIRECTORY = REPOSITORY / "plugins"
MODULE_PATHS = sorted((PLUGIN_DIRECTORY / "modules").glob("*.py"))
_COMPARED_KEYS = ("type", "elements", "choices", "required")


def load_documentation(path: Path) -> dict[str, Any]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DOCUMENTATION":
            document: Any = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(document, dict)
            return document
    raise AssertionError(f"{path.name} has no DOCUMENTATION")


def list_documented_options(module: Path) -> dict[str, Any]:
    """Return a module's documented options, including the options from its doc fragments."""
    document = load_documentation(module)
    options = dict(document["options"])
    for fragment in document["extends_documentation_fragment"]:
        name = fragment.removeprefix("grove.sandbox.")
        for option, entry in (
            load_documentation(PLUGIN_DIRECTORY / "doc_fragments" / f"{name}.py").get("options") or {}
        ).items():
            assert option not in options, f"{module.stem} documents {option}, which its fragment already documents"
            options[option] = entry
    return options


def find_differences(
    documented_options: dict[str, Any], accepted_options: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Return the differences between documented and accepted options, one line for each."""
    differences = [f"{prefix}{name} is documented only" for name in documented_options.keys() - accepted_options.keys()]
    differences += [f"{prefix}{name} is accepted only" for name in accepted_options.keys() - documented_options.keys()]
    for name in sorted(documented_options.keys() & accepted_options.keys()):
        doc, spec = documented_options[name], accepted_options[name]
        if not doc.get("description"):
            differences.append(f"{prefix}{name} has no description")
        for key in _COMPARED_KEYS:
            if (doc.get(key) or None) != (spec.get(key) or None):
                differences.append(f"{prefix}{name}: {key} {doc.get(key)!r} is documented, {spec.get(key)!r} accepted")
        if doc.get("default") != spec.get("default") or type(doc.get("default")) is not type(spec.get("default")):
            differences.append(
                f"{prefix}{name}: default {doc.get('default')!r} is documented, {spec.get('default')!r} accepted"
            )
        if sorted(doc.get("aliases") or []) != sorted(spec.get("aliases") or []):
            differences.append(
                f"{prefix}{name}: aliases {doc.get('aliases')} are documented, {spec.get('aliases')} accepted"
            )
        differences += find_differences(doc.get("suboptions") or {}, spec.get("options") or {}, f"{prefix}{name}.")
    return differences


@pytest.mark.parametrize("module", MODULE_PATHS, ids=lambda module: module.stem)
def test_documented_options_are_accepted(module: Path) -> None:
    assert not find_differences(list_documented_options(module), make_argument_spec(RESOURCE_KINDS[module.stem]))


def test_differences_are_detected() -> None:
    documented_options = list_documented_options(PLUGIN_DIRECTORY / "modules" / "sandbox_fork.py")
    accepted_options = make_argument_spec(RESOURCE_KINDS["sandbox_fork"])
    del documented_options["timeout"], accepted_options["count"]
    accepted_options["exact"]["default"] = None
    accepted_options["state"]["choices"] = ["present"]
    accepted_options["volumes"]["options"]["clone"]["type"] = "str"
    assert find_differences(documented_options, accepted_options) == [
        "count is documented only",
        "timeout is accepted only",
        "exact: default False is documented, None accepted",
        "state: choices ['present', 'absent'] is documented, ['present'] accepted",
        "volumes.clone: type 'bool' is documented, 'str' accepted",
    ]


def list_unpredicted_failures() -> dict[str, int]:
    """Return the number of cases of docs/predictions.md in which the run differs from the prediction, by module."""
    sections = (REPOSITORY / "docs" / "predictions.md").read_text().split("\n## ")[1:]
    rows = {
        section.partition("\n")[0]: [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
        for section in sections
    }
    return {name: sum(predicted != actual for _, predicted, actual, *_ in cases) for name, cases in rows.items()}


@pytest.mark.parametrize("module", MODULE_PATHS, ids=lambda module: module.stem)
def test_the_check_mode_attribute_names_each_exception(module: Path) -> None:
    attribute = load_documentation(module).get("attributes", {}).get("check_mode", {"support": "full"})
    details = " ".join(attribute.get("details", ()))
    resource_kind = RESOURCE_KINDS[module.stem]
    conditions = [option for option in CONDITIONAL_OPTIONS if option in resource_kind.ARGUMENTS]
    is_listing = isinstance(resource_kind, Listing)
    starts_machines = not is_listing and resource_kind.SINGULAR == "sandbox"
    has_unpredicted_failures = starts_machines or list_unpredicted_failures()[module.stem] > 0
    assert all(f"O({option}=true)" in details for option in conditions)
    assert ("Check mode cannot predict" in details) is has_unpredicted_failures
    assert ("a machine fails to start" in details) is starts_machines
    assert ("almost full" in details) is (starts_machines or module.stem in ("sandbox_snapshot", "sandbox_template"))
    assert attribute["support"] == ("partial" if conditions or has_unpredicted_failures else "full")
    # Modules that can change something refuse to work without their action plugin.
    assert ("without its action plugin" in details) is is_listing


def test_modules_with_exceptions_are_found() -> None:
    assert {name: count for name, count in list_unpredicted_failures().items() if count} == {
        "sandbox_template": 1,
        "sandbox_volume": 1,
    }


def test_the_attributes_describe_plans() -> None:
    attributes = load_documentation(PLUGIN_DIRECTORY / "doc_fragments" / "attributes.py")["attributes"]
    for name in ("check_mode", "diff_mode"):
        assert "tasks before it" in attributes[name]["description"], name
        assert PLANNED_ID_PREFIX in attributes[name]["description"], name
