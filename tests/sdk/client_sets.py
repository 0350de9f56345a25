"""Sets of releases of the published Python clients, which the tests of this folder can use in place of those in .venv.

Each file in requirements/clients pins the packages of a set. The set "newest" is in requirements/dev.txt, so it is
already in .venv.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from packaging.version import Version

from requirements import sbom
from tests.support import packages
from tests.support.session import REPOSITORY

CLIENT_BY_FILE = {
    "test_e2b": "e2b",
    "test_e2b_inside": "e2b",
    "test_e2b_code_interpreter": "e2b-code-interpreter",
    "test_cubesandbox": "cubesandbox",
    "test_forkd": "forkd",
}
"""The client that the core tests of each file use."""
CLIENTS = tuple(dict.fromkeys(CLIENT_BY_FILE.values()))
OLDEST, NEWEST = "oldest", "newest"
SETS = (OLDEST, "older", "newer", NEWEST)
_SET_VARIABLE = "GROVE_TEST_CLIENTS"
_SERVER_VARIABLE = "GROVE_TEST_SERVER"


def get_pin_file(name: str) -> Path:
    requirements = REPOSITORY / "requirements"
    return requirements / "dev.txt" if name == NEWEST else requirements / "clients" / f"{name}.txt"


def read_releases(name: str) -> dict[str, str]:
    """Return the release of each client in a set."""
    return {pin.name: pin.version for pin in sbom.read_pins(get_pin_file(name)) if pin.name in CLIENTS}


def make_environment(name: str, kind: str, port: int, template: str) -> dict[str, str]:
    """Install a set if necessary, and return the variables with which tests use this set and a running gateway."""
    environment = {_SET_VARIABLE: name, _SERVER_VARIABLE: json.dumps([kind, port, template])}
    if name != NEWEST:
        environment["PYTHONPATH"] = str(_install(name))
    return environment


def get_running_server() -> tuple[str, int, str] | None:
    """Return the kind of host, the port and the template of the gateway that this process must use, if any."""
    text = os.environ.get(_SERVER_VARIABLE)
    return tuple(json.loads(text)) if text else None


def check_imported_releases() -> None:
    """Check that this process imports the releases of its set, from the directory of the set."""
    name = os.environ[_SET_VARIABLE]
    for client, release in read_releases(name).items():
        module_file = importlib.import_module(client.replace("-", "_")).__file__
        assert importlib.metadata.version(client) == release, f"{client} of the set '{name}' is not the one in use"
        if name != NEWEST:
            assert module_file is not None and Path(module_file).is_relative_to(_install(name)), module_file


def requires_release(client: str, release: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if ``client`` is older than ``release``, the first one that passes the test."""
    current_release = importlib.metadata.version(client)
    return pytest.mark.skipif(
        Version(current_release) < Version(release), reason=f"{client} {current_release} {reason}; {release} does not"
    )


def _install(name: str) -> Path:
    return packages.install(f"clients-{name}", get_pin_file(name).read_text())
