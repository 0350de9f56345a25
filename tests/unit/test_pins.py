"""Check that the lists of pinned packages are complete, hashed and consistent, and match the SBOM."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sandbox_gateway
from requirements import sbom
from tests.support.session import REPOSITORY

GATEWAY_DIRECTORY = REPOSITORY / "gateway"
PIN_FILES = sorted(
    [
        *(REPOSITORY / "requirements").glob("*.txt"),
        *GATEWAY_DIRECTORY.glob("requirements*.txt"),
        GATEWAY_DIRECTORY / "extras" / "forkd" / "requirements.txt",
        REPOSITORY / "meta" / "execution-environment.txt",
    ]
)
CLIENT_PAGES = {
    "cubesandbox": "cubesandbox.md",
    "e2b": "e2b.md",
    "e2b-code-interpreter": "e2b.md",
    "forkd": "forkd.md",
}
CLIENT_PIN_FILES = sorted((REPOSITORY / "requirements" / "clients").glob("*.txt"))


@pytest.fixture(scope="module")
def sbom_document() -> dict[str, Any]:
    sbom_document: dict[str, Any] = json.loads((GATEWAY_DIRECTORY / "sbom.cdx.json").read_text())
    return sbom_document


@pytest.mark.parametrize("path", [*PIN_FILES, *CLIENT_PIN_FILES], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_package_has_one_version_and_hashes(path: Path) -> None:
    pins = sbom.read_pins(path)
    assert pins
    for pin in pins:
        assert re.fullmatch(r"\d[\w.]*", pin.version), pin
        assert pin.hashes
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pin.hashes), pin


def test_all_lists_pin_the_same_versions() -> None:
    versions_by_name: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for path in PIN_FILES:
        for pin in sbom.read_pins(path):
            versions_by_name.setdefault(pin.name, set()).add((pin.version, pin.hashes))
    assert {name: versions for name, versions in versions_by_name.items() if len(versions) > 1} == {}


@pytest.mark.parametrize("path", CLIENT_PIN_FILES, ids=lambda path: path.stem)
def test_each_client_set_pins_what_it_requires(path: Path) -> None:
    pins = {pin.name: pin.version for pin in sbom.read_pins(path)}
    requirements = [line for line in path.with_suffix(".in").read_text().splitlines() if not line.startswith("#")]
    assert requirements == [f"{client}=={pins[client]}" for client in CLIENT_PAGES]


def test_the_docs_name_the_oldest_and_the_tested_releases() -> None:
    testing_page = (REPOSITORY / "docs" / "testing.md").read_text()
    for path in [*CLIENT_PIN_FILES, REPOSITORY / "requirements" / "dev.txt"]:
        for pin in sbom.read_pins(path):
            if pin.name in CLIENT_PAGES:
                assert f"| `{pin.name}` | {pin.version} |" in testing_page, pin
            if pin.name in CLIENT_PAGES and path.stem == "oldest":
                page = (REPOSITORY / "docs" / CLIENT_PAGES[pin.name]).read_text()
                assert f"`{pin.name}` {pin.version} or newer" in page.replace("\n", " "), pin
    package = json.loads((REPOSITORY / "tests" / "sdk" / "npm" / "package.json").read_text())
    assert f"| npm `e2b` | {package['dependencies']['e2b']} |" in testing_page


def test_the_requirements_satisfy_the_gateway_package() -> None:
    project = tomllib.loads((GATEWAY_DIRECTORY / "pyproject.toml").read_text())
    pins = {pin.name: pin for pin in sbom.read_host_pins([sbom.RUNTIME_FILE, *sbom.BUILD_FILES])}
    for text in [*project["project"]["dependencies"], *project["build-system"]["requires"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)].version), text


def test_the_requirements_satisfy_the_forkd_package() -> None:
    directory = GATEWAY_DIRECTORY / "extras" / "forkd"
    project = tomllib.loads((directory / "pyproject.toml").read_text())
    pins = {pin.name: pin for pin in sbom.read_pins(directory / "requirements.txt")}
    for text in project["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)].version), text
    build_pins = {f"{pin.name}=={pin.version}" for pin in sbom.read_pins(GATEWAY_DIRECTORY / "requirements-build.txt")}
    assert set(project["build-system"]["requires"]) <= build_pins


def test_freebsd_can_export_with_the_packages_of_linux() -> None:
    """The lists satisfy the dependencies that pyproject.toml names for Linux only, because FreeBSD compiles them."""
    project = tomllib.loads((GATEWAY_DIRECTORY / "pyproject.toml").read_text())
    requirements = {canonicalize_name(Requirement(text).name): text for text in project["project"]["dependencies"]}
    pins = {pin.name: pin for pin in sbom.read_pins(GATEWAY_DIRECTORY / "requirements-transfer.txt")}
    for name in ("cryptography", "zstandard"):
        assert Requirement(requirements[name]).specifier.contains(pins[name].version), name
    build_pins = {pin.name for pin in sbom.read_pins(GATEWAY_DIRECTORY / "requirements-transfer-build.txt")}
    assert "cffi" in build_pins, "both packages need cffi while they are built"


_INSTALL_COMMAND = re.compile(r"\b(?:pip[\d.]*|pipx|uv pip|uv tool) +(?:install|download|wheel|run)\b[^|;&]*")


def find_install_commands(text: str) -> list[str]:
    """Return the commands in a Markdown text that install Python packages, without the path of the program.

    The commands are lines of code blocks, or inline code.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [match[0].strip() for code in lines + spans for match in _INSTALL_COMMAND.finditer(code)]


def installs_only_pinned_packages(command: str) -> bool:
    """Return whether pip checks the hashes of all files that it downloads, or downloads none."""
    options = set(command.split())
    if {"--no-index", "--no-deps", "--no-build-isolation"} <= options:
        return True
    return "--require-hashes" in options and bool({"--no-build-isolation", "--only-binary=:all:"} & options)


def test_documented_commands_install_pinned_packages() -> None:
    """The section about suppliers in security.md names the exceptions."""
    _, _, section = (REPOSITORY / "docs" / "security.md").read_text().partition("## A supplier of packages\n")
    exceptions = set(find_install_commands(section.partition("\n## ")[0]))
    folders = ("docs", "gateway", "requirements", "roles", "playbooks", "benchmarks", "tests")
    pages = [*REPOSITORY.glob("*.md"), *(page for folder in folders for page in (REPOSITORY / folder).rglob("*.md"))]
    commands = {
        command for page in pages if page.name != "security.md" for command in find_install_commands(page.read_text())
    }
    assert {command for command in commands if not installs_only_pinned_packages(command)} == exceptions


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nvenv/bin/pip install \\\n    package\n```\n",
        "Run `python3 -m pip install\n'package>=1,<2'` first.",
        "```console\n$ cd x && pip3 install --require-hashes -r list.txt\n```\n",
        "`pip install --no-index ./package`",
        "`pipx install package`",
    ],
)
def test_a_command_without_hashes_is_detected(text: str) -> None:
    (command,) = find_install_commands(text)
    assert not installs_only_pinned_packages(command)


@pytest.mark.parametrize("host", sbom.HOSTS, ids=lambda host: host["sys_platform"])
def test_every_host_gets_all_dependencies(sbom_document: dict[str, Any], host: dict[str, str]) -> None:
    """The packages installed on each kind of host include all of their dependencies."""
    installed_references = {
        pin.reference
        for pin in sbom.read_host_pins([sbom.RUNTIME_FILE, *sbom.BUILD_FILES])
        if sbom.is_for_host(pin.marker, host)
    }
    has_numpy = any(reference.startswith("pkg:pypi/numpy@") for reference in installed_references)
    assert has_numpy == (host["sys_platform"] == "linux")
    dependencies = {entry["ref"]: set(entry["dependsOn"]) for entry in sbom_document["dependencies"]}
    assert not set().union(*(dependencies[reference] for reference in installed_references)) - installed_references


def test_the_sbom_lists_exactly_the_pins(sbom_document: dict[str, Any]) -> None:
    expected_components = {
        (pin.name, pin.version, pin.hashes, pin.marker, scope)
        for names, scope in (([sbom.RUNTIME_FILE], "required"), (sbom.BUILD_FILES, "optional"))
        for pin in sbom.read_host_pins(names)
    }
    assert {_describe_component(component) for component in sbom_document["components"]} == expected_components
    assert len(sbom_document["components"]) == len(expected_components)
    assert sbom_document["metadata"]["component"]["version"] == sandbox_gateway.__version__


def _describe_component(component: dict[str, Any]) -> tuple[object, ...]:
    markers = [entry["value"] for entry in component.get("properties", [])]
    hashes = tuple(entry["content"] for entry in component["hashes"])
    return component["name"], component["version"], hashes, *(markers or [""]), component["scope"]


def test_the_sbom_has_the_licences_and_dependencies_of_installed_packages(sbom_document: dict[str, Any]) -> None:
    packages = sbom.find_packages(sys.path)
    pins = {pin.name: pin for pin in sbom.read_host_pins([sbom.RUNTIME_FILE, *sbom.BUILD_FILES])}
    dependencies = {entry["ref"]: entry["dependsOn"] for entry in sbom_document["dependencies"]}
    compared_package_count = 0
    for component in sbom_document["components"]:
        assert component["licenses"], component["name"]
        package = packages.get(component["name"])
        if package is not None and package.version == component["version"]:
            compared_package_count += 1
            assert component["licenses"] == sbom.find_licences(package)
            assert dependencies[component["bom-ref"]] == sbom.find_references(package.requires or [], pins)
    assert compared_package_count >= len(sbom.read_host_pins([sbom.RUNTIME_FILE])), (
        "the test environment has different packages from a host"
    )


def test_the_sbom_is_valid_cyclonedx(sbom_document: dict[str, Any]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(sbom_document)) is None
    assert validator.validate_str(json.dumps({**sbom_document, "components": [{"name": "no type"}]})) is not None
