"""Test the collection as users get it, by building and installing the artifact and running the demo from it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import session
from tests.support.roles import make_environment

_BIN_DIR = Path(sys.executable).parent
_FORK_NAMES = [f"fork-{number}" for number in range(1, 5)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact, built without the files that Git ignores, so that it cannot depend on them."""
    directory = tmp_path_factory.mktemp("artifact")
    source = directory / "source"
    file_list = _run("git", "-C", session.REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, file_list.split("\0")):
        if (session.REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.REPOSITORY / name, source / name)
    _run(_BIN_DIR / "ansible-galaxy", "collection", "build", source, "--output-path", directory)
    (archive,) = directory.glob("grove-sandbox-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def installed_collections_path(artifact: Path) -> Path:
    """A collections path that contains only the installed artifact."""
    path = artifact.parent / "collections"
    argv = (_BIN_DIR / "ansible-galaxy", "collection", "install", artifact, "--offline", "--collections-path", path)
    _run(*argv, collections=path)  # With the repository's collection on the path, nothing would be installed.
    return path


def test_the_artifact_contains_the_gateway_and_no_development_files(artifact: Path) -> None:
    with tarfile.open(artifact) as archive:
        names = set(archive.getnames())
    assert {"gateway/pyproject.toml", "gateway/src/sandbox_agent/__main__.py", "meta/runtime.yml", "README.md"} <= names
    guest_dir = "gateway/src/sandbox_gateway/hosts/kvm_xfs/template/guest"
    assert {f"{guest_dir}/{name}" for name in ("packages.txt", "initramfs-tools/hooks/sandbox", "network.sh")} <= names
    assert {f"gateway/{name}" for name in ("requirements.txt", "requirements-build.txt", "sbom.cdx.json")} <= names
    development_names = ("tests", "benchmarks", "requirements", "molecule", "dev", ".ci", ".git", ".venv", ".cache")
    assert not [name for name in names if name.split("/")[0] in development_names or "__pycache__" in name]


def test_every_plugin_of_the_artifact_is_documented(installed_collections_path: Path) -> None:
    for kind in ("module", "callback", "connection", "inventory"):
        directory = "plugins/modules" if kind == "module" else f"plugins/{kind}"
        expected_plugins = {f"grove.sandbox.{path.stem}" for path in (session.REPOSITORY / directory).glob("[a-z]*.py")}
        output = _run(
            _BIN_DIR / "ansible-doc", "--list", "--type", kind, "grove.sandbox", collections=installed_collections_path
        )
        assert expected_plugins == set(re.findall(r"^grove\.sandbox\.\w+", output, re.M)), kind


@pytest.fixture
def demo_state() -> Iterator[Path]:
    """The demo's state directory, with packages that other tests have already downloaded."""
    state_directory = session.get_run_dir() / "demo"
    (state_directory / "cache").mkdir(parents=True)
    for archive in session.get_cache_dir().glob("rootfs-*.tar"):
        shutil.copy(archive, state_directory / "cache")
    yield state_directory
    if state_directory.exists():
        _run_playbook("demo_clean", state_directory, session.COLLECTIONS)


@pytest.mark.slow
def test_the_installed_demo_is_idempotent(installed_collections_path: Path, demo_state: Path) -> None:
    _run_playbook("demo", demo_state, installed_collections_path)
    output = (demo_state / "demo.txt").read_text()
    rows = [
        line.split() for line in output.splitlines() if line.split()[:1] and line.split()[0] in ("source", *_FORK_NAMES)
    ]
    assert [row[0] for row in rows] == ["source", *_FORK_NAMES]
    assert len({row[1] for row in rows}) == len(rows), "each row is a different sandbox"
    assert len({row[2] for row in rows}) == 1, "all forks continue from the same count"
    assert all(row[4:6] == [rows[0][4], "same"] for row in rows), "all run the captured process"
    for row in rows:
        assert " ".join(row[6:]) == ("source" if row[0] == "source" else f"{row[0]}, source")
    assert _count_changes(_run_playbook("demo", demo_state, installed_collections_path)) == 0


@pytest.mark.slow
def test_the_fleet_demo_replaces_a_lost_host(installed_collections_path: Path) -> None:
    state_directory = session.get_run_dir() / "fleet"
    (state_directory / "cache").mkdir(parents=True)
    for archive in session.get_cache_dir().glob("rootfs-*.tar"):
        shutil.copy(archive, state_directory / "cache")
    try:
        for second_run in (False, True):
            _run_playbook("demo_fleet", state_directory, installed_collections_path)
            report = (state_directory / "demo.txt").read_text()
            rows = {line[:24].strip(): [*map(int, line[24:].split())] for line in report.splitlines()[1:3]}
            first_counts, counts = rows["after the first run"], rows["after the loss of h2"]
            assert sum(counts) == sum(first_counts) == len(_FORK_NAMES)
            assert all(first_counts) or second_run, "each host has forks"
            assert "second run   changed nothing" in report and "only-on-h2: no other host had a copy" in report
    finally:
        _run_playbook("demo_fleet_clean", state_directory, session.COLLECTIONS)


def _run_playbook(playbook: str, state_directory: Path, collections: Path) -> str:
    variables = json.dumps({"demo_state": str(state_directory), "demo_forks": len(_FORK_NAMES)})
    argv = (_BIN_DIR / "ansible-playbook", "-i", "localhost,", f"grove.sandbox.{playbook}", "-e", variables)
    return _run(*argv, collections=collections, seconds=900)


def _count_changes(output: str) -> int:
    match = re.search(r"changed=(\d+) +unreachable=0 +failed=0", output)
    assert match, output[-2000:]
    return int(match[1])


def _run(*argv: str | Path, collections: Path | None = None, seconds: float = 120) -> str:
    variables = make_environment(session.get_run_dir())
    if collections is not None:
        variables["ANSIBLE_COLLECTIONS_PATH"] = str(collections)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, env=variables, check=False)
    assert result.returncode == 0, f"{argv}: {(result.stdout + result.stderr)[-4000:]}"
    return result.stdout
