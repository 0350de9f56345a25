"""Test the collection as users get it: build and install the artifact, and run the demo from it."""

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
from tests.support.roles import environment

_BIN = Path(sys.executable).parent
_FORKS = [f"fork-{number}" for number in range(1, 5)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact, built from tracked files only, so that it cannot depend on a developer's untracked files."""
    directory = tmp_path_factory.mktemp("artifact")
    source = directory / "source"
    file_names = _run("git", "-C", session.REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, file_names.split("\0")):
        if (session.REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.REPOSITORY / name, source / name)
    _run(_BIN / "ansible-galaxy", "collection", "build", source, "--output-path", directory)
    (archive,) = directory.glob("grove-sandbox-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def installed_collections(artifact: Path) -> Path:
    """A collections path that contains only this collection."""
    path = artifact.parent / "collections"
    argv = (_BIN / "ansible-galaxy", "collection", "install", artifact, "--offline", "--collections-path", path)
    _run(*argv, collections=path)  # With the repository's collection on the path, nothing would be installed.
    return path


def test_the_artifact_contains_the_gateway_and_no_development_files(artifact: Path) -> None:
    with tarfile.open(artifact) as archive:
        names = set(archive.getnames())
    assert {"gateway/pyproject.toml", "gateway/src/sandbox_agent/__main__.py", "meta/runtime.yml", "README.md"} <= names
    guest = "gateway/src/sandbox_gateway/hosts/kvm_xfs/template/guest"
    assert {f"{guest}/{name}" for name in ("packages.txt", "initramfs-tools/hooks/sandbox", "network.sh")} <= names
    assert {f"gateway/{name}" for name in ("requirements.txt", "requirements-build.txt", "sbom.cdx.json")} <= names
    development_files = ("tests", "benchmarks", "requirements", "molecule", "dev", ".ci", ".git", ".venv", ".cache")
    assert not [name for name in names if name.split("/")[0] in development_files or "__pycache__" in name]


def test_every_plugin_of_the_artifact_is_documented(installed_collections: Path) -> None:
    for kind in ("module", "connection", "inventory"):
        directory = "plugins/modules" if kind == "module" else f"plugins/{kind}"
        expected = {f"grove.sandbox.{path.stem}" for path in (session.REPOSITORY / directory).glob("[a-z]*.py")}
        output = _run(
            _BIN / "ansible-doc", "--list", "--type", kind, "grove.sandbox", collections=installed_collections
        )
        assert expected == set(re.findall(r"^grove\.sandbox\.\w+", output, re.M)), kind


@pytest.fixture
def demo_state() -> Iterator[Path]:
    """The demo's directory, with packages that other tests have already downloaded."""
    state = session.run_dir() / "demo"
    (state / "cache").mkdir(parents=True)
    for archive in session.cache_dir().glob("rootfs-*.tar"):
        shutil.copy(archive, state / "cache")
    yield state
    if state.exists():
        _run_playbook("demo_clean", state, session.COLLECTIONS)


def test_the_installed_demo_is_idempotent(installed_collections: Path, demo_state: Path) -> None:
    _run_playbook("demo", demo_state, installed_collections)
    output = (demo_state / "demo.txt").read_text()
    rows = [line.split() for line in output.splitlines() if line.split()[:1] and line.split()[0] in ("source", *_FORKS)]
    assert [row[0] for row in rows] == ["source", *_FORKS]
    assert len({row[1] for row in rows}) == len(rows), "each row is a different sandbox"
    assert len({row[2] for row in rows}) == 1, "all forks continue from the same count"
    assert all(row[4:6] == [rows[0][4], "same"] for row in rows), "all run the captured process"
    for row in rows:
        assert " ".join(row[6:]) == ("source" if row[0] == "source" else f"{row[0]}, source")
    assert _count_changes(_run_playbook("demo", demo_state, installed_collections)) == 0


def _run_playbook(playbook: str, state: Path, collections: Path) -> str:
    variables = json.dumps({"demo_state": str(state), "demo_forks": len(_FORKS)})
    argv = (_BIN / "ansible-playbook", "-i", "localhost,", f"grove.sandbox.{playbook}", "-e", variables)
    return _run(*argv, collections=collections, seconds=900)


def _count_changes(output: str) -> int:
    match = re.search(r"changed=(\d+) +unreachable=0 +failed=0", output)
    assert match, output[-2000:]
    return int(match[1])


def _run(*argv: str | Path, collections: Path | None = None, seconds: float = 120) -> str:
    variables = environment(session.run_dir())
    if collections is not None:
        variables["ANSIBLE_COLLECTIONS_PATH"] = str(collections)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, env=variables, check=False)
    assert result.returncode == 0, f"{argv}: {(result.stdout + result.stderr)[-4000:]}"
    return result.stdout
