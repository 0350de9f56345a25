"""Check that everything named in meta/execution-environment.yml exists, and that the file is complete."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirements import sbom
from tests.support.session import REPOSITORY

META_DIRECTORY = REPOSITORY / "meta"
REQUIREMENTS_FILE_NAME = "execution-environment.txt"
SECTIONS = {
    *("version", "build_arg_defaults", "dependencies", "images"),
    *("additional_build_steps", "additional_build_files", "options"),
}
DEPENDENCIES = {"python", "galaxy", "system", "python_interpreter", "ansible_core", "ansible_runner", "exclude"}
STEPS = {
    f"{position}_{stage}" for position in ("prepend", "append") for stage in ("base", "galaxy", "builder", "final")
}


@pytest.fixture
def definition() -> dict[str, Any]:
    definition: dict[str, Any] = yaml.safe_load((META_DIRECTORY / "execution-environment.yml").read_text())
    return definition


def test_the_definition_has_version_3(definition: dict[str, Any]) -> None:
    assert definition["version"] == 3
    assert definition.keys() <= SECTIONS
    assert definition["dependencies"].keys() <= DEPENDENCIES
    assert definition["additional_build_steps"].keys() <= STEPS


def test_the_definition_installs_exactly_the_packages_that_the_tests_use(definition: dict[str, Any]) -> None:
    dependencies = definition["dependencies"]
    assert dependencies["python_interpreter"]["package_system"] in dependencies["python_interpreter"]["python_path"]
    assert not {"ansible_core", "ansible_runner"} & dependencies.keys(), "ansible-builder installs these without hashes"
    pins = {pin.name: pin for pin in sbom.read_pins(META_DIRECTORY / REQUIREMENTS_FILE_NAME)}
    assert {"ansible-core", "ansible-runner"} <= pins.keys()
    dev_pins = {pin.name: pin for pin in sbom.read_pins(REPOSITORY / "requirements" / "dev.txt")}
    assert {name: dev_pins[name].version for name in pins} == {name: pin.version for name, pin in pins.items()}
    copy_step, install_step = definition["additional_build_steps"]["append_base"]
    assert f"_build/python/{REQUIREMENTS_FILE_NAME} /tmp/" in copy_step
    assert {"--require-hashes", "--only-binary=:all:", f"/tmp/{REQUIREMENTS_FILE_NAME}"} <= set(install_step.split())


def test_copied_files_exist(definition: dict[str, Any]) -> None:
    artifact_entry, pins_entry = definition["additional_build_files"]
    assert artifact_entry["dest"] == "collections"
    assert pins_entry == {"src": REQUIREMENTS_FILE_NAME, "dest": "python"}


def test_the_installed_collection_is_this_one(definition: dict[str, Any]) -> None:
    """The built, copied and installed artifacts must have the same file name."""
    collection_metadata = yaml.safe_load((REPOSITORY / "galaxy.yml").read_text())
    artifact_name = (
        f"{collection_metadata['namespace']}-{collection_metadata['name']}-{collection_metadata['version']}.tar.gz"
    )
    copied_file, _ = definition["additional_build_files"]
    assert (META_DIRECTORY / copied_file["src"]).resolve() == REPOSITORY / artifact_name
    (installed_collection,) = definition["dependencies"]["galaxy"]["collections"]
    assert installed_collection == {"name": f"{copied_file['dest']}/{artifact_name}", "type": "file"}
    page_text = (REPOSITORY / "docs" / "awx.md").read_text()
    assert set(re.findall(r"registry\.example/sandboxes:([\w.]+)", page_text)) == {collection_metadata["version"]}


def test_the_file_is_also_valid_collection_metadata(definition: dict[str, Any]) -> None:
    """When ansible-builder reads a collection, ``python`` and ``system`` must be files inside the collection's root."""
    for kind in ("python", "system"):
        dependency_file = definition["dependencies"].get(kind)
        assert dependency_file is None or (
            isinstance(dependency_file, str) and (REPOSITORY / dependency_file).is_file()
        )
    assert "python" not in definition["dependencies"], "see the next test"


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "plugins").rglob("*.py")),
    ids=lambda path: str(path.relative_to(REPOSITORY / "plugins")),
)
def test_the_collection_needs_no_python_packages(path: Path) -> None:
    allowed_packages = {*sys.stdlib_module_names, "ansible", "ansible_collections"}
    assert not {name.partition(".")[0] for name in list_imported_packages(path)} - allowed_packages


def list_imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
