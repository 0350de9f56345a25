"""The gateway role's pack.py creates identical packages from identical sources, and different ones otherwise."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import session

TOP_LEVEL_FILES = (
    "README.md",
    "pyproject.toml",
    "requirements-build.txt",
    "requirements-fleet.txt",
    "requirements-maturin.txt",
    "requirements-transfer-build.txt",
    "requirements-transfer.txt",
    "requirements.txt",
    "sbom.cdx.json",
)
GUEST_DIRECTORY = session.REPOSITORY / "gateway/src/sandbox_gateway/hosts/kvm_xfs/template/guest"
GUEST_FILES = {
    path.relative_to(session.REPOSITORY / "gateway").as_posix() for path in GUEST_DIRECTORY.rglob("*") if path.is_file()
}
PACK_SCRIPT = session.REPOSITORY / "roles" / "gateway" / "files" / "pack.py"


def run_pack_script(*arguments: object) -> str:
    argv = [sys.executable, str(PACK_SCRIPT), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "gateway"
    package = root / "src" / "thing"
    package.mkdir(parents=True)
    for name in TOP_LEVEL_FILES:
        (root / name).write_text(name)
    (package / "__init__.py").write_text("")
    (package / "thing.service").write_text("[Unit]")
    return root


def test_the_same_source_gives_the_same_package(source: Path, tmp_path: Path) -> None:
    run_pack_script(source, tmp_path / "one.tar.gz")
    (source / "src" / "thing" / "__init__.py").touch()
    run_pack_script(source, tmp_path / "two.tar.gz")
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


def test_build_artifacts_are_not_packed(source: Path, tmp_path: Path) -> None:
    digest_before = run_pack_script(source)
    for name in ("src/thing/__pycache__/a.cpython-311.pyc", "src/thing.egg-info/PKG-INFO", "build/lib/thing.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    assert run_pack_script(source) == digest_before


def test_the_digest_of_the_file_is_printed(source: Path, tmp_path: Path) -> None:
    package_file = tmp_path / "one.tar.gz"
    assert (
        run_pack_script(source, package_file)
        == hashlib.sha256(package_file.read_bytes()).hexdigest()
        != run_pack_script(source)
    )


def test_any_change_changes_the_digest(source: Path) -> None:
    digests = [run_pack_script(source)]
    (source / "src" / "thing" / "thing.service").write_text("[Service]")
    digests.append(run_pack_script(source))
    (source / "src" / "thing" / "new.py").write_text("")
    digests.append(run_pack_script(source))
    (source / "requirements.txt").write_text("other==1")
    digests.append(run_pack_script(source))
    assert len(set(digests)) == 4


def test_the_package_contains_files_that_the_daemon_reads(tmp_path: Path) -> None:
    run_pack_script(session.REPOSITORY / "gateway", tmp_path / "real.tar.gz")
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "real.tar.gz").read_bytes())) as archive:
        names = set(archive.getnames())
    assert "sandbox-gateway/pyproject.toml" in names
    assert "sandbox-gateway/sbom.cdx.json" in names
    assert "sandbox-gateway/src/sandbox_agent/sandbox-agent.service" in names
    assert "sandbox-gateway/src/sandbox_gateway/server/daemon.py" in names
    assert {f"sandbox-gateway/{name}" for name in GUEST_FILES} <= names


def test_a_wheel_contains_the_guest_files(tmp_path: Path) -> None:
    source = tmp_path / "gateway"
    shutil.copytree(session.REPOSITORY / "gateway", source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    argv = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q", str(source)]
    subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name.removeprefix("src/") for name in GUEST_FILES} <= set(archive.namelist())
