"""What the agent's source may use: the sandbox's Python can be 3.9 and bare."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "gateway/src/sandbox_agent"
FILES = sorted(SOURCE.glob("**/*.py"))

# Newer than Python 3.9; an attribute of that name anywhere is suspicious enough.
NEWER = {"UTC", "StrEnum", "batched", "pairwise", "setns", "unshare", "anext", "aiter", "process_group"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_3_9(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert "from __future__ import annotations" in path.read_text() or path.name.startswith("__")
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.Match, getattr(ast, "TryStar", ast.Match))), f"line {node.lineno}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in NEWER, f"line {node.lineno}: {name}"
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            assert not keywords & {"strict", "slots", "kw_only", "process_group"}, f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_standard_library_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports do not work where the agent runs as a folder"
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top == "sandbox_agent" or top in sys.stdlib_module_names, name
