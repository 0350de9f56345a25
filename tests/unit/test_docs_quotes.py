"""Check that the error messages and paths that guides quote exist exactly as quoted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.session import REPOSITORY

ERRORS_PAGE = REPOSITORY / "docs" / "errors.md"
CODE_DIRECTORIES = ("gateway/src", "plugins")
PATH_PAGES = [REPOSITORY / name for name in ("CONTRIBUTING.md", "docs/architecture.md", "README.md")]
# Paths that commands create, or that exist only on a host.
GENERATED_PATHS = {".venv", "docs/_site", "sandboxes/ID"}


def find_quotes() -> list[str]:
    """Return the sentences that errors.md quotes, each on its own line."""
    return re.findall(r"^> (.+)$", ERRORS_PAGE.read_text(), re.MULTILINE)


@cache
def find_sentences() -> frozenset[str]:
    """Return all strings in the code and all messages in roles, with … in place of each value."""
    python_files = (path for directory in CODE_DIRECTORIES for path in (REPOSITORY / directory).rglob("*.py"))
    texts = {text for path in python_files for text in _list_texts(path)}
    for path in (REPOSITORY / "roles").rglob("*.yml"):
        texts |= set(_find_messages(yaml.load(path.read_text(), Loader=_Loader)))
    return frozenset(texts)


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads values with tags such as !unsafe as plain values."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: getattr(node, "value", ""))


def _list_texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            text = _format_literal(node)
            if " " in text:
                yield _normalize_text(text)


def _format_literal(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(each.value if isinstance(each, ast.Constant) else "…" for each in values)
        case ast.BinOp(left=left, right=right):
            return _format_literal(left) + _format_literal(right)
    return ""


def _find_messages(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "fail_msg":
                yield _normalize_text(re.sub(r"{{.*?}}", "…", str(value), flags=re.DOTALL))
            else:
                yield from _find_messages(value)
    elif isinstance(data, list):
        for each in data:
            yield from _find_messages(each)


def _normalize_text(text: str) -> str:
    return " ".join(text.split())


def test_the_guide_quotes_at_least_twenty_errors() -> None:
    numbers = re.findall(r"^### (\d+)\. ", ERRORS_PAGE.read_text(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 21)]


@pytest.mark.parametrize("quote", find_quotes())
def test_a_quoted_error_is_in_the_code(quote: str) -> None:
    assert any(quote in sentence for sentence in find_sentences()), (
        f"errors.md quotes an error that the code does not contain: {quote}"
    )


def test_an_invented_error_is_detected() -> None:
    assert not any("the moon is full: wait for … days" in sentence for sentence in find_sentences())


ROOTS = (REPOSITORY, REPOSITORY / "gateway" / "src" / "sandbox_gateway", REPOSITORY / "gateway" / "src")


def find_paths(page: Path) -> list[str]:
    """Return the files and directories that a page names in inline code."""
    page_text = page.read_text()
    code_spans = re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?)`", re.sub(r"^```.*?^```$", "", page_text, flags=re.M | re.S))
    return sorted({each.rstrip("/") for each in code_spans} - GENERATED_PATHS)


@pytest.mark.parametrize("page", PATH_PAGES, ids=lambda page: page.name)
def test_named_paths_exist(page: Path) -> None:
    """Paths may be relative to the repository or to one of the packages."""
    missing_paths = [each for each in find_paths(page) if not any(list(root.glob(each)) for root in ROOTS)]
    assert missing_paths == []


def test_a_missing_path_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See `engine/nothing.py` and `tests/unit`.\n")
    assert find_paths(page) == ["engine/nothing.py", "tests/unit"]


def find_missing_definitions(page_text: str) -> list[str]:
    """Return the functions and classes that a text names, as in "`engine/forks.py` (`fork`)", but that do not exist."""
    missing = []
    for path, parentheses in re.findall(r"`([\w./]+\.py)` \(([^)]*)\)", page_text):
        files = [root / path for root in ROOTS if (root / path).is_file()]
        definitions = {
            node.name
            for file in files
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        names = re.findall(r"`(\w+)`", parentheses)
        missing += [f"{path} ({name})" for name in names if name not in definitions]
    return missing


def test_named_functions_and_classes_exist() -> None:
    assert find_missing_definitions((REPOSITORY / "docs" / "architecture.md").read_text()) == []


def test_a_missing_function_is_detected() -> None:
    text = "See `engine/forks.py` (`fork`, `knife`), `engine/nothing.py` (`fork`)."
    assert find_missing_definitions(text) == ["engine/forks.py (knife)", "engine/nothing.py (fork)"]
