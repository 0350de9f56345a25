"""Print the software bill of materials of a host's gateway as CycloneDX JSON, from the pins and package metadata.

`sbom.py DIRECTORY`: DIRECTORY contains the installed pinned packages, which state their licences and dependencies. The
output has neither a timestamp nor a serial number, so it is reproducible.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from license_expression import Licensing, get_spdx_licensing
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GATEWAY = Path(__file__).resolve().parent.parent / "gateway"
RUNTIME_FILE = "requirements.txt"
BUILD_FILES = ("requirements-build.txt", "requirements-maturin.txt")
HOSTS = (
    {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux", "extra": ""},
    {"sys_platform": "freebsd14", "os_name": "posix", "platform_system": "FreeBSD", "extra": ""},
)
GATEWAY_NAME = "sandbox-gateway"


@dataclass(frozen=True)
class Pin:
    """A package in a pin file. ``marker``: the environments in which to install it; "" for all."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def reference(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def read_pins(path: Path) -> list[Pin]:
    pins = []
    for line in re.sub(r"\\\n", " ", path.read_text()).splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        requirement, *hashes = line.split(" --hash=")
        package = Requirement(requirement)
        digests = tuple(sorted(digest.strip().removeprefix("sha256:") for digest in hashes))
        version = str(package.specifier).removeprefix("==")
        pins.append(Pin(canonicalize_name(package.name), version, str(package.marker or ""), digests))
    return pins


def is_for_host(marker: Marker | str | None, host: dict[str, str]) -> bool:
    return not marker or Marker(str(marker)).evaluate(dict(host))


def is_for_any_host(marker: Marker | str | None) -> bool:
    """Return whether the marker matches any supported host."""
    return any(is_for_host(marker, host) for host in HOSTS)


def read_host_pins(names: Iterable[str]) -> list[Pin]:
    return [pin for name in names for pin in read_pins(GATEWAY / name) if is_for_any_host(pin.marker)]


@cache
def load_spdx_licensing() -> Licensing:
    return get_spdx_licensing()


def find_licences(package: Distribution) -> list[dict[str, Any]]:
    """Return the SPDX expression in the metadata; if there is none, the licence names from the classifiers."""
    for field in ("License-Expression", "License"):
        expression = (package.metadata.get_all(field) or [""])[0]
        if expression and not load_spdx_licensing().validate(expression).errors:
            return [{"expression": expression}]
    classifiers = package.metadata.get_all("Classifier") or []
    return [{"license": {"name": name.rpartition(" :: ")[2]}} for name in classifiers if name.startswith("License")]


def build_component(pin: Pin, scope: str, package: Distribution) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": pin.reference,
        "name": pin.name,
        "version": pin.version,
        "purl": pin.reference,
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        "licenses": find_licences(package),
    }
    if pin.marker:
        component["properties"] = [{"name": f"{GATEWAY_NAME}:marker", "value": pin.marker}]
    return component


def find_references(requirements: Iterable[str], pins: dict[str, Pin]) -> list[str]:
    """Return the sorted references of the pins that satisfy ``requirements``."""
    entries = [Requirement(requirement) for requirement in requirements]
    names = {canonicalize_name(entry.name) for entry in entries if is_for_any_host(entry.marker)}
    return sorted(pins[name].reference for name in names & pins.keys())


def build_document(project: dict[str, Any], version: str, packages: dict[str, Distribution]) -> dict[str, Any]:
    """Return the SBOM. ``project``: the project table of pyproject.toml; ``packages``: all pinned packages by name."""
    scoped_pins = [(pin, "required") for pin in read_host_pins([RUNTIME_FILE])] + [
        (pin, "optional") for pin in read_host_pins(BUILD_FILES)
    ]
    pins = {pin.name: pin for pin, _ in scoped_pins}
    dependencies = [{"ref": GATEWAY_NAME, "dependsOn": find_references(project["dependencies"], pins)}]
    dependencies += [
        {"ref": pin.reference, "dependsOn": find_references(packages[name].requires or [], pins)}
        for name, pin in pins.items()
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": GATEWAY_NAME,
                "name": GATEWAY_NAME,
                "version": version,
                "description": project["description"],
                "licenses": [{"expression": project["license"]["text"]}],
            },
        },
        "components": [build_component(pin, scope, packages[pin.name]) for pin, scope in scoped_pins],
        "dependencies": dependencies,
    }


def read_gateway_version() -> str:
    source = (GATEWAY / "src" / "sandbox_gateway" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    assert match, "the gateway has no __version__"
    return match[1]


def find_packages(path: list[str]) -> dict[str, Distribution]:
    return {canonicalize_name(package.name): package for package in distributions(path=path)}


def main() -> None:
    project = tomllib.loads((GATEWAY / "pyproject.toml").read_text())["project"]
    document = build_document(project, read_gateway_version(), find_packages([sys.argv[1]]))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
