"""Check that the agent's source runs on Python 3.9 without third-party packages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src/sandbox_agent"
SOURCE_FILES = sorted(SOURCE_DIRECTORY.glob("**/*.py"))

# The packages from which each package may import.
ALLOWED_IMPORTS = {
    "failure": set(),
    "http": {"failure"},
    "machine": {"failure", "http"},
    "files": {"failure", "http", "machine"},
    "processes": {"failure", "http", "machine"},
    "interpreter": {"failure", "http", "machine", "processes"},
    "agent": {"failure", "http", "machine", "files", "processes", "interpreter"},
    "__main__": {"agent"},
    "__init__": set(),
}

# Names that are newer than Python 3.9. Attributes with these names are not allowed.
NEWER_NAMES = {"UTC", "StrEnum", "batched", "pairwise", "setns", "unshare", "anext", "aiter", "process_group"}


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: str(path.relative_to(SOURCE_DIRECTORY)))
def test_the_source_is_valid_python_3_9(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert "from __future__ import annotations" in path.read_text() or path.name.startswith("__")
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.Match, getattr(ast, "TryStar", ast.Match))), f"line {node.lineno}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in NEWER_NAMES, f"line {node.lineno}: {name}"
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            assert not keywords & {"strict", "slots", "kw_only", "process_group"}, f"line {node.lineno}"


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: str(path.relative_to(SOURCE_DIRECTORY)))
def test_only_the_standard_library_is_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports do not work where the agent runs as a folder"
            names = [node.module or ""]
        for name in names:
            top_level_package = name.split(".")[0]
            assert top_level_package == "sandbox_agent" or top_level_package in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: str(path.relative_to(SOURCE_DIRECTORY)))
def test_packages_import_in_one_direction(path):
    importing_package = path.relative_to(SOURCE_DIRECTORY).with_suffix("").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            package, _, submodule = module.partition(".")
            if package == "sandbox_agent":
                assert submodule.split(".")[0] in {importing_package} | ALLOWED_IMPORTS[importing_package], module
