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

from tests.support import session
from tests.support.faulty_gateway import TEMPLATE, FaultyHost
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.roles import make_environment

_BIN_DIR = Path(sys.executable).parent
_MODULE_NAMES = sorted(path.stem for path in (session.REPOSITORY / "plugins" / "modules").glob("*.py"))
_FEW_EXAMPLES = """
from hypothesis import settings
settings.register_profile("few", max_examples=3, deadline=None)
settings.load_profile("few")
"""
_TARGETS_DIR = session.REPOSITORY / "tests" / "integration" / "targets"


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new repository with all files that Git does not ignore, at the path that ansible-test requires."""
    collection = tmp_path_factory.mktemp("collections") / "ansible_collections" / "grove" / "sandbox"
    listing = subprocess.run(
        ["git", "-C", str(session.REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (session.REPOSITORY / name).is_file():
            (collection / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.REPOSITORY / name, collection / name)
    subprocess.run(["git", "init", "--quiet", str(collection)], check=True, timeout=60)
    return collection


@pytest.fixture
def gateway_url(collection: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of the gateway that the targets use. Without SANDBOX_GATEWAY_URL, the gateway has an in-memory host."""
    config_file = collection / "tests" / "integration" / "integration_config.yml"
    template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        config_file.write_text(json.dumps({"gateway_url": url, "gateway_token": token, "gateway_template": template}))
        yield url
        return
    gateway = MemoryGateway(tmp_path, FaultyHost(), log={"level": "warning"})
    try:
        gateway.build_template(TEMPLATE)
        integration_settings = {"gateway_url": gateway.url, "gateway_token": ADMIN_KEY, "gateway_template": TEMPLATE}
        config_file.write_text(json.dumps(integration_settings))
        yield gateway.url
        with gateway.client() as api:
            objects = {
                kind: [each for each in api.get(f"/{kind}").json() if each.get("buildStatus", "ready") == "ready"]
                for kind in ("sandboxes", "snapshots", "templates", "volumes")
            }
        remaining_counts = {kind: len(entries) for kind, entries in objects.items()}
        expected_counts = {"sandboxes": 0, "snapshots": 0, "templates": 1, "volumes": 0}
        assert remaining_counts == expected_counts, "the targets must remove all resources that they create"
    finally:
        gateway.end()


@pytest.mark.slow
def test_unit_tests_pass(collection: Path) -> None:
    unit_tests = collection / "tests" / "unit" / "plugins"
    # Generated tests take minutes. Here they only have to work: the run that contains this test repeats them often.
    (unit_tests / "test_whole_plays.py").unlink()
    with (unit_tests / "conftest.py").open("a") as conftest:
        conftest.write(_FEW_EXAMPLES)
    output = _run_ansible_test(collection, "units", "--local", "--python", "3.11", "tests/unit/plugins/")
    assert " passed" in output
    assert " skipped" not in output


def test_integration_targets_pass(collection: Path, gateway_url: str) -> None:
    output = _run_ansible_test(collection, "integration", "--local", "--allow-unsupported", "--color", "no")
    assert [name for name in _MODULE_NAMES if f"Running {name} integration test role" not in output] == []


def test_every_module_has_an_integration_target() -> None:
    assert sorted(path.name for path in _TARGETS_DIR.iterdir()) == sorted([*_MODULE_NAMES, "setup_gateway"])
    for name in _MODULE_NAMES:
        assert (_TARGETS_DIR / name / "aliases").read_text().startswith("unsupported #")


def _run_ansible_test(collection: Path, *argv: str) -> str:
    result = subprocess.run(
        [str(_BIN_DIR / "ansible-test"), *argv],
        cwd=collection,
        env=make_environment(session.get_run_dir()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout
