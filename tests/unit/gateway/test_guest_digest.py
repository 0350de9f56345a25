"""The digest of the files that every template contains regardless of its recipe."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_gateway.hosts.guest_digest import digest_guest
from sandbox_gateway.hosts.jail_zfs.jail import rootfs as jail_rootfs
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.recipes import Recipe
from tests.support import session

TEMPLATE_DIRECTORY = session.REPOSITORY / "gateway/src/sandbox_gateway/hosts/kvm_xfs/template"
INPUT_FILES = sorted(
    path.relative_to(TEMPLATE_DIRECTORY).as_posix()
    for path in TEMPLATE_DIRECTORY.rglob("*")
    if path.is_file() and path.name != "README.md" and path.suffix != ".pyc"
)


@pytest.fixture
def template_directory(tmp_path: Path) -> Path:
    shutil.copytree(TEMPLATE_DIRECTORY, tmp_path / "template", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "template"


@pytest.mark.parametrize("input_file", INPUT_FILES)
def test_a_change_to_any_input_changes_the_digest(template_directory: Path, input_file: str) -> None:
    digest_before = Recipe().compute_digest(digest_guest(template_directory))
    with (template_directory / input_file).open("a") as file:
        file.write("#")
    assert Recipe().compute_digest(digest_guest(template_directory)) != digest_before


def test_the_digest_ignores_times_modes_bytecode_and_readmes(template_directory: Path) -> None:
    digest_before = digest_guest(template_directory)
    (template_directory / "guest/packages.txt").touch(mode=0o600)
    (template_directory / "guest/packages.txt").chmod(0o755)
    (template_directory / "__pycache__").mkdir()
    (template_directory / "__pycache__/build.cpython-311.pyc").write_bytes(b"x")
    (template_directory / "guest/README.md").write_text("note")
    assert digest_guest(template_directory) == digest_before


def test_a_renamed_file_changes_the_digest(template_directory: Path) -> None:
    digest_before = digest_guest(template_directory)
    (template_directory / "guest/hosts").rename(template_directory / "guest/hosts2")
    assert digest_guest(template_directory) != digest_before


def test_the_digest_covers_the_constants_of_the_network_script() -> None:
    assert digest_guest(TEMPLATE_DIRECTORY, "address 1") != digest_guest(TEMPLATE_DIRECTORY, "address 2")
    assert "@" not in guest_files.render_network_script()


def test_the_digest_of_a_jail_covers_the_path_of_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    digest_before = jail_rootfs.guest_digest()
    monkeypatch.setattr(jail_rootfs, "IDENTITY", "/run/other")
    assert jail_rootfs.guest_digest() != digest_before


def test_the_digest_is_stable_and_differs_between_kinds_of_host() -> None:
    program = "from sandbox_gateway.hosts.kvm_xfs.template.guest_files import guest_digest; print(guest_digest())"
    argv = [sys.executable, "-c", program]
    outputs = [
        subprocess.run(
            argv, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert {text.strip() for text in outputs} == {guest_files.guest_digest()}
    assert jail_rootfs.guest_digest() != guest_files.guest_digest()
