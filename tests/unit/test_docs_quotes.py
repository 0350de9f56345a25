"""Guides quote error messages and paths of files: each exists in the code exactly as quoted."""

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

ERRORS = REPOSITORY / "docs" / "errors.md"
CODE = ("gateway/src", "plugins")
PATHS = [REPOSITORY / name for name in ("CONTRIBUTING.md", "docs/architecture.md", "README.md")]
# Not in the repository: created by commands, or on a host.
MADE = {".venv", "docs/_site", "sandboxes/ID"}


def quotes() -> list[str]:
    """The sentences that errors.md quotes, each on its own line."""
    return re.findall(r"^> (.+)$", ERRORS.read_text(), re.MULTILINE)


@cache
def sentences() -> frozenset[str]:
    """All texts of the code and of the roles' messages, with … for each value."""
    python = (path for place in CODE for path in (REPOSITORY / place).rglob("*.py"))
    found = {text for path in python for text in _texts(path)}
    for path in (REPOSITORY / "roles").rglob("*.yml"):
        found |= set(_messages(yaml.load(path.read_text(), Loader=_Loader)))
    return frozenset(found)


class _Loader(yaml.SafeLoader):
    """Reads tags such as !unsafe as the plain values below them."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: getattr(node, "value", ""))


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            text = _literal(node)
            if " " in text:
                yield _normal(text)


def _literal(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(each.value if isinstance(each, ast.Constant) else "…" for each in values)
        case ast.BinOp(left=left, right=right):
            return _literal(left) + _literal(right)
    return ""


def _messages(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "fail_msg":
                yield _normal(re.sub(r"{{.*?}}", "…", str(value), flags=re.DOTALL))
            else:
                yield from _messages(value)
    elif isinstance(data, list):
        for each in data:
            yield from _messages(each)


def _normal(text: str) -> str:
    return " ".join(text.split())


def test_the_guide_quotes_at_least_twenty_errors() -> None:
    numbers = re.findall(r"^### (\d+)\. ", ERRORS.read_text(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 21)]


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_error_is_in_the_code(quote: str) -> None:
    assert any(quote in sentence for sentence in sentences()), f"errors.md quotes what no code says: {quote}"


def test_an_invented_error_is_detected() -> None:
    assert not any("the moon is full: wait for … days" in sentence for sentence in sentences())


def named_paths(page: Path) -> list[str]:
    """The files and directories of the repository that a page names in code or in links."""
    prose = page.read_text()
    code = re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?)`", re.sub(r"^```.*?^```$", "", prose, flags=re.M | re.S))
    return sorted({each.rstrip("/") for each in code} - MADE)


@pytest.mark.parametrize("page", PATHS, ids=lambda page: page.name)
def test_named_paths_exist(page: Path) -> None:
    """A path is relative to the repository or to one of the packages."""
    roots = (REPOSITORY, REPOSITORY / "gateway" / "src" / "sandbox_gateway", REPOSITORY / "gateway" / "src")
    missing = [each for each in named_paths(page) if not any(list(root.glob(each)) for root in roots)]
    assert missing == []


def test_a_wrong_path_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See `engine/nothing.py` and `tests/unit`.\n")
    assert named_paths(page) == ["engine/nothing.py", "tests/unit"]
