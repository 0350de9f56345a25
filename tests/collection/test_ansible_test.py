"""`ansible-test units` and `ansible-test integration`, run from the directory layout that ansible-test requires."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import faulty_gateway, session
from tests.support.faulty_gateway import TEMPLATE
from tests.support.roles import environment

_BIN = Path(sys.executable).parent
_MODULES = sorted(path.stem for path in (session.REPOSITORY / "plugins" / "modules").glob("*.py"))
_TARGETS = session.REPOSITORY / "tests" / "integration" / "targets"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files in a new repository, at the path where a collection has to be."""
    place = tmp_path_factory.mktemp("collections") / "ansible_collections" / "grove" / "sandbox"
    listed = subprocess.run(
        ["git", "-C", str(session.REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (session.REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.REPOSITORY / name, place / name)
    subprocess.run(["git", "init", "--quiet", str(place)], check=True, timeout=60)
    return place


@pytest.fixture
def gateway(place: Path) -> Iterator[str]:
    """Configure the targets for the gateway of SANDBOX_GATEWAY_URL, or else for one above a host in memory."""
    config = place / "tests" / "integration" / "integration_config.yml"
    template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        config.write_text(json.dumps({"gateway_url": url, "gateway_token": token, "gateway_template": template}))
        yield url
        return
    with faulty_gateway.serve() as faulty:
        faulty.token = "of-the-targets"
        settings = {"gateway_url": faulty.url, "gateway_token": faulty.token, "gateway_template": TEMPLATE}
        config.write_text(json.dumps(settings))
        yield faulty.url
        left = {kind: faulty.list_names(kind) for kind in ("sandboxes", "snapshots", "templates", "volumes")}
        wanted = {"sandboxes": [], "snapshots": [], "templates": [TEMPLATE], "volumes": []}
        assert left == wanted, "the targets remove what they made, captured and built"


def test_units(place: Path) -> None:
    said = _ansible_test(place, "units", "--local", "--python", "3.11", "tests/unit/plugins/")
    assert " passed" in said
    assert " skipped" not in said


def test_integration(place: Path, gateway: str) -> None:
    said = _ansible_test(place, "integration", "--local", "--allow-unsupported", "--color", "no")
    assert [name for name in _MODULES if f"Running {name} integration test role" not in said] == []


def test_every_module_has_an_integration_target() -> None:
    assert sorted(path.name for path in _TARGETS.iterdir()) == sorted([*_MODULES, "setup_gateway"])
    for name in _MODULES:
        assert (_TARGETS / name / "aliases").read_text().startswith("unsupported #")


def _ansible_test(place: Path, *argv: str) -> str:
    done = subprocess.run(
        [str(_BIN / "ansible-test"), *argv],
        cwd=place,
        env=environment(session.run_dir()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
