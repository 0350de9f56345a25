"""`ansible-test units` and `ansible-test integration`, run from a place in a repository as ansible-test wants it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collection.conftest import TEMPLATE, seeded
from tests.collection.double_gateway import serve
from tests.support import session
from tests.support.roles import environment

_BIN = Path(sys.executable).parent
_MODULES = sorted(path.stem for path in (session.REPOSITORY / "plugins" / "modules").glob("*.py"))
_TARGETS = session.REPOSITORY / "tests" / "integration" / "targets"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository tracks, in a repository of its own, where a collection has to be."""
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
    """Configure the targets for the gateway that SANDBOX_GATEWAY_URL names, or else a stand-in. Gives its URL."""
    config = place / "tests" / "integration" / "integration_config.yml"
    template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        config.write_text(json.dumps({"gateway_url": url, "gateway_token": token, "gateway_template": template}))
        yield url
        return
    double = seeded(token="of-the-targets")
    with serve(double) as url:
        settings = {"gateway_url": url, "gateway_token": double.token, "gateway_template": TEMPLATE}
        config.write_text(json.dumps(settings))
        yield url
    captured = [each["names"] for each in double.snapshots.values()]
    assert captured == [[TEMPLATE]], "the targets remove what they captured and built"
    assert not double.sandboxes and not double.volumes, "the targets remove what they made"


def test_units(place: Path) -> None:
    said = _ansible_test(place, "units", "--local", "--python", "3.11", "tests/unit/plugins/")
    assert " passed" in said
    assert " skipped" not in said


def test_integration(place: Path, gateway: str) -> None:
    said = _ansible_test(place, "integration", "--local", "--allow-unsupported", "--color", "no")
    assert [name for name in _MODULES if f"Running {name} integration test role" not in said] == []


def test_every_module_has_a_target_and_says_what_it_needs() -> None:
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
