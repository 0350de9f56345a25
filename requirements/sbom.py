"""Print the software bill of materials of a host's gateway: CycloneDX JSON, from the pins and packages' metadata.

`sbom.py DIRECTORY`: DIRECTORY contains the installed pinned packages, the source of licences and dependencies. The
output has no timestamp and no serial number, so it is reproducible.
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
RUNTIME = "requirements.txt"
BUILD = ("requirements-build.txt", "requirements-maturin.txt")
HOSTS = (
    {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux", "extra": ""},
    {"sys_platform": "freebsd14", "os_name": "posix", "platform_system": "FreeBSD", "extra": ""},
)
NAME = "sandbox-gateway"


@dataclass(frozen=True)
class Pin:
    """One package of a pin file. ``marker``: where to install it; empty for everywhere."""

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
        parsed = Requirement(requirement)
        digests = tuple(sorted(found.strip().removeprefix("sha256:") for found in hashes))
        version = str(parsed.specifier).removeprefix("==")
        pins.append(Pin(canonicalize_name(parsed.name), version, str(parsed.marker or ""), digests))
    return pins


def is_for(marker: Marker | str | None, host: dict[str, str]) -> bool:
    return not marker or Marker(str(marker)).evaluate(dict(host))


def is_for_hosts(marker: Marker | str | None) -> bool:
    """Whether the marker matches any supported host."""
    return any(is_for(marker, host) for host in HOSTS)


def host_pins(names: Iterable[str]) -> list[Pin]:
    return [pin for name in names for pin in read_pins(GATEWAY / name) if is_for_hosts(pin.marker)]


@cache
def spdx() -> Licensing:
    return get_spdx_licensing()


def licences(package: Distribution) -> list[dict[str, Any]]:
    """The licence in the metadata: an SPDX expression if it is one, else the names of the classifiers."""
    for field in ("License-Expression", "License"):
        said = (package.metadata.get_all(field) or [""])[0]
        if said and not spdx().validate(said).errors:
            return [{"expression": said}]
    classifiers = package.metadata.get_all("Classifier") or []
    return [{"license": {"name": said.rpartition(" :: ")[2]}} for said in classifiers if said.startswith("License")]


def component(pin: Pin, scope: str, package: Distribution) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": pin.reference,
        "name": pin.name,
        "version": pin.version,
        "purl": pin.reference,
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        "licenses": licences(package),
    }
    if pin.marker:
        made["properties"] = [{"name": f"{NAME}:marker", "value": pin.marker}]
    return made


def needed(requirements: Iterable[str], pins: dict[str, Pin]) -> list[str]:
    """References of the pins that satisfy ``requirements``."""
    parsed = [Requirement(requirement) for requirement in requirements]
    names = {canonicalize_name(requirement.name) for requirement in parsed if is_for_hosts(requirement.marker)}
    return sorted(pins[name].reference for name in names & pins.keys())


def document(project: dict[str, Any], version: str, packages: dict[str, Distribution]) -> dict[str, Any]:
    """The SBOM. ``project``: the table of pyproject.toml; ``packages``: all pinned packages by name."""
    scoped = [(pin, "required") for pin in host_pins([RUNTIME])] + [(pin, "optional") for pin in host_pins(BUILD)]
    pins = {pin.name: pin for pin, _ in scoped}
    graph = [{"ref": NAME, "dependsOn": needed(project["dependencies"], pins)}]
    graph += [
        {"ref": pin.reference, "dependsOn": needed(packages[name].requires or [], pins)} for name, pin in pins.items()
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": NAME,
                "name": NAME,
                "version": version,
                "description": project["description"],
                "licenses": [{"expression": project["license"]["text"]}],
            },
        },
        "components": [component(pin, scope, packages[pin.name]) for pin, scope in scoped],
        "dependencies": graph,
    }


def gateway_version() -> str:
    source = (GATEWAY / "src" / "sandbox_gateway" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    assert found, "the gateway has no __version__"
    return found[1]


def installed(path: list[str]) -> dict[str, Distribution]:
    return {canonicalize_name(package.name): package for package in distributions(path=path)}


def main() -> None:
    project = tomllib.loads((GATEWAY / "pyproject.toml").read_text())["project"]
    made = document(project, gateway_version(), installed([sys.argv[1]]))
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main()
