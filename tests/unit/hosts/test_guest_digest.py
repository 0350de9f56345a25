"""The digest of the files that every template contains regardless of its recipe."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sandbox_gateway.engine.templates import is_outdated
from sandbox_gateway.hosts import guest_digest
from sandbox_gateway.hosts.guest_digest import digest_guest
from sandbox_gateway.hosts.jail_zfs.jail import rootfs as jail_rootfs
from sandbox_gateway.hosts.kvm_xfs.network import addresses
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot, SnapshotKind
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


KINDS = {"jail_zfs": jail_rootfs, "kvm_xfs": guest_files}
SOURCE_DIRECTORY = session.REPOSITORY / "gateway/src"
BUILDERS = {
    "jail_zfs": "sandbox_gateway/hosts/jail_zfs/jail/rootfs.py",
    "kvm_xfs": "sandbox_gateway/hosts/kvm_xfs/template",
}
SHARED_INPUTS = ("sandbox_agent", "sandbox_gateway/hosts/rootfs_common.py")


class SourceCopy:
    """A copy of the gateway's sources, from which ``compute`` computes the digest of a kind of host."""

    def __init__(self, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(SOURCE_DIRECTORY, directory, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        self.directory = directory
        self.compute: Callable[[], str] = KINDS[kind].compute_guest_digest
        find_original_files = resources.files
        for module in (guest_digest, guest_files):
            stub = SimpleNamespace(files=lambda anchor: self._copy_of(find_original_files(anchor)))
            monkeypatch.setattr(module, "resources", stub)
        monkeypatch.setattr(jail_rootfs, "__file__", str(self._copy_of(jail_rootfs.__file__)))
        monkeypatch.setattr(guest_files, "_ROOT", self._copy_of(guest_files._ROOT))

    def _copy_of(self, path: object) -> Path:
        return self.directory / Path(str(path)).relative_to(SOURCE_DIRECTORY)

    def list_files(self) -> list[str]:
        return sorted(
            path.relative_to(self.directory).as_posix()
            for path in self.directory.rglob("*")
            if path.is_file() and path.name not in ("README.md", "ruff.toml")
        )

    def is_changed_by(self, name: str) -> bool:
        """Return whether a change to one file changes the digest."""
        path, digest_before = self.directory / name, self.compute()
        content = path.read_bytes()
        path.write_bytes(content + b"#")
        try:
            return self.compute() != digest_before
        finally:
            path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_the_builder_and_the_agent_change_the_digest_and_no_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = SourceCopy(kind, tmp_path / "src", monkeypatch)
    prefixes = (BUILDERS[kind], *SHARED_INPUTS)
    inputs = {name for name in sources.list_files() if name.startswith(tuple(prefixes))}
    assert {name for name in sources.list_files() if sources.is_changed_by(name)} == inputs
    assert "sandbox_agent/machine/identity.py" in inputs and len(inputs) > 30


CONSTANTS = [
    *((jail_rootfs, jail_rootfs, "IDENTITY"),),
    *((guest_files, addresses, name) for name in guest_files._CONSTANT_NAMES),
    *((guest_files, guest_files, name) for name in ("KERNEL_ARGUMENTS", "TCG_KERNEL_ARGUMENTS")),
]


@pytest.mark.parametrize(("host", "owner", "name"), CONSTANTS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_constant_of_another_module_makes_templates_outdated(
    host: ModuleType, owner: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe()
    template = Snapshot(
        kind=SnapshotKind.TEMPLATE,
        recipe=recipe.model_dump(mode="json"),
        recipe_digest=recipe.compute_digest(host.compute_guest_digest(), ""),
    )
    assert is_outdated(template, host.compute_guest_digest()) is False
    monkeypatch.setattr(owner, name, "changed")
    assert is_outdated(template, host.compute_guest_digest()) is True


UNCOVERED_CONSTANTS = {"PARTIAL_PREFIX"}
"""The prefix of files on the host."""


@pytest.mark.parametrize("kind", KINDS)
def test_builders_import_no_other_constants(kind: str) -> None:
    """A constant from a file that the digest does not cover must be one of its texts."""
    covered_modules = tuple(name.removesuffix(".py").replace("/", ".") for name in (BUILDERS[kind], *SHARED_INPUTS))
    files = [
        path
        for name in (BUILDERS[kind], SHARED_INPUTS[1])
        for path in [SOURCE_DIRECTORY / name, *(SOURCE_DIRECTORY / name).rglob("*.py")]
        if path.is_file()
    ]
    constants = {
        alias.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sandbox_")
        if not str(node.module).startswith(covered_modules)
        for alias in node.names
        if alias.name.isupper()
    }
    texts = {name for host, owner, name in CONSTANTS if owner in (jail_rootfs, guest_files) and host is KINDS[kind]}
    assert constants - UNCOVERED_CONSTANTS == texts


def test_the_digest_is_stable_and_differs_between_kinds_of_host() -> None:
    import_statement = f"from {guest_files.__name__} import compute_guest_digest"
    program = f"{import_statement}; print(compute_guest_digest())"
    argv = [sys.executable, "-c", program]
    outputs = [
        subprocess.run(
            argv, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert {text.strip() for text in outputs} == {guest_files.compute_guest_digest()}
    assert jail_rootfs.compute_guest_digest() != guest_files.compute_guest_digest()
