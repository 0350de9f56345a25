"""Run `ansible-test units` and `ansible-test integration` from the directory layout that ansible-test requires."""

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
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new repository with the tracked files, at the path that ansible-test requires for a collection."""
    collection = tmp_path_factory.mktemp("collections") / "ansible_collections" / "grove" / "sandbox"
    listed = subprocess.run(
        ["git", "-C", str(session.REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (session.REPOSITORY / name).is_file():
            (collection / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.REPOSITORY / name, collection / name)
    subprocess.run(["git", "init", "--quiet", str(collection)], check=True, timeout=60)
    return collection


@pytest.fixture
def gateway(collection: Path) -> Iterator[str]:
    """Configure the targets for the gateway at SANDBOX_GATEWAY_URL, or else for one backed by an in-memory host."""
    config = collection / "tests" / "integration" / "integration_config.yml"
    template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        config.write_text(json.dumps({"gateway_url": url, "gateway_token": token, "gateway_template": template}))
        yield url
        return
    with faulty_gateway.serve() as server:
        server.token = "of-the-targets"
        settings = {"gateway_url": server.url, "gateway_token": server.token, "gateway_template": TEMPLATE}
        config.write_text(json.dumps(settings))
        yield server.url
        remaining = {kind: server.list_names(kind) for kind in ("sandboxes", "snapshots", "templates", "volumes")}
        expected = {"sandboxes": [], "snapshots": [], "templates": [TEMPLATE], "volumes": []}
        assert remaining == expected, "the targets must remove all resources that they create"


def test_unit_tests_pass(collection: Path) -> None:
    output = _ansible_test(collection, "units", "--local", "--python", "3.11", "tests/unit/plugins/")
    assert " passed" in output
    assert " skipped" not in output


def test_integration_targets_pass(collection: Path, gateway: str) -> None:
    output = _ansible_test(collection, "integration", "--local", "--allow-unsupported", "--color", "no")
    assert [name for name in _MODULES if f"Running {name} integration test role" not in output] == []


def test_every_module_has_an_integration_target() -> None:
    assert sorted(path.name for path in _TARGETS.iterdir()) == sorted([*_MODULES, "setup_gateway"])
    for name in _MODULES:
        assert (_TARGETS / name / "aliases").read_text().startswith("unsupported #")


def _ansible_test(collection: Path, *argv: str) -> str:
    result = subprocess.run(
        [str(_BIN / "ansible-test"), *argv],
        cwd=collection,
        env=environment(session.run_dir()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout
