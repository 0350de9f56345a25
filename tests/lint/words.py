"""Check the wording of guides, changelogs, docstrings, help texts, errors, log messages and module documentation.

`python -m tests.lint.words` prints each finding with its remedy, and exits with 1 if there are more findings than
`allowed.toml` permits. Guides have no allowance. `--update` lowers the allowances to the current counts.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml
from proselint.checks import __register__ as proselint_checks
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.support.session import REPOSITORY

DIRECTORY = Path(__file__).parent
ALLOWANCES_FILE = DIRECTORY / "allowed.toml"

GUIDE_PATHS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "benchmarks/README.md",
    "requirements/README.md",
    "changelogs/fragments",
    "CHANGELOG.rst",
    "gateway/README.md",
    "dev",
)
CODE_PATHS = ("gateway/src", "gateway/extras", "plugins", "roles", "playbooks", "benchmarks", "tests", "requirements")

# The checks of proselint that are useful for technical English. Its other checks concern typography, places and slang.
PROSELINT_CHECKS = {
    "archaism": True,
    "cliches": True,
    "hedging": True,
    "industrial_language": True,
    "malapropisms": True,
    "misc.phrasal_adjectives": True,
    "mixed_metaphors": True,
    "mondegreens": True,
    "nonwords": True,
    "oxymorons": True,
    "redundancy": True,
    "skunked_terms": True,
    "uncomparables": True,
    "weasel_words": True,
}


@dataclass(frozen=True)
class Rule:
    """A pattern that sentences must not contain, and the words to use instead."""

    name: str
    pattern: re.Pattern[str]
    remedy: str
    bad: tuple[str, ...] = ()
    good: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prose:
    """A piece of text and the line on which it begins."""

    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    remedy: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.remedy}\n    {textwrap.shorten(self.sentence, 160)}"


@cache
def load_rules() -> tuple[Rule, ...]:
    entries = tomllib.loads((DIRECTORY / "words.toml").read_text())["rule"]
    return tuple(
        Rule(each["name"], re.compile(each["pattern"]), each["remedy"], tuple(each["bad"]), tuple(each["good"]))
        for each in entries
    )


# --- extraction ------------------------------------------------------------------------------------------------------


def extract_markdown(text: str) -> Iterator[Prose]:
    """Yield paragraphs, list items, headings and table cells. Omits fenced code, and replaces inline code with CODE."""
    is_in_fence = False
    block: list[str] = []
    start_line = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_in_fence = not is_in_fence
            line = ""
        elif is_in_fence:
            continue
        is_block_start = re.match(r"\s*(?:[*-]|\d+\.|#+|>|\|)(?:\s|$)|\s*<!--", line)
        if block and (is_block_start or not line.strip()):
            yield Prose(start_line, _strip_markup(" ".join(block)))
            block = []
        if line.lstrip().startswith("|"):
            yield from (
                Prose(number, _strip_markup(cell)) for cell in re.split(r"(?<!\\)\|", line) if re.search(r"\w", cell)
            )
        elif line.strip() and not line.lstrip().startswith("<!--"):
            if not block:
                start_line = number
            block.append(re.sub(r"^\s*(?:[*-]|\d+\.|#+|>)\s+", "", line).strip())


def _strip_markup(text: str) -> str:
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]*`", "CODE", text)
    return re.sub(r"[*_]{1,2}(\w[^*]*?)[*_]{1,2}", r"\1", text).strip()


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
MESSAGE_FUNCTIONS = {
    "fail_json",
    "exit_json",
    "warn",
    "error",
    "usage_error",
    "add_argument",
    "add_parser",
    "add_subparsers",
}
MESSAGE_KEYWORDS = {"help", "description", "epilog", "short_help", "message", "msg", "metavar_help"}
ERRORS_FILE = REPOSITORY / "gateway/src/sandbox_gateway/errors.py"


@cache
def list_error_classes() -> frozenset[str]:
    """Return the names of the gateway's error classes, most of which do not end like those of an error."""
    classes = {node.name for node in ast.parse(ERRORS_FILE.read_text()).body if isinstance(node, ast.ClassDef)}
    return frozenset(classes | {"Refusal"})


def extract_python(text: str) -> Iterator[Prose]:
    """Yield docstrings, help texts, errors, log messages and the documentation of modules.

    An error is a call that is raised, or that creates an instance of an error class, for example to return it.
    """
    tree = ast.parse(text)
    raised_calls = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                yield from _split_paragraphs(node.body[0].lineno, ast.get_docstring(node) or "")
            yield from _extract_attribute_docstrings(node.body)
        elif isinstance(node, ast.Call):
            yield from _extract_call_texts(node, is_error=id(node) in raised_calls)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("DOCUMENTATION", "RETURN"):
            yield from (
                Prose(node.lineno, each) for each in _find_descriptions(yaml.safe_load(_read_literal(node.value)))
            )


def _extract_attribute_docstrings(body: Sequence[ast.stmt]) -> Iterator[Prose]:
    """Yield the strings that directly follow an assignment."""
    for assignment, statement in pairwise(body):
        if isinstance(assignment, (ast.Assign, ast.AnnAssign)) and isinstance(statement, ast.Expr):
            yield from _split_paragraphs(statement.lineno, inspect.cleandoc(_read_literal(statement.value)))


def _extract_call_texts(node: ast.Call, *, is_error: bool) -> Iterator[Prose]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for keyword in node.keywords:
        if keyword.arg in MESSAGE_KEYWORDS:
            yield from _extract_literal_text(keyword.value)
    if is_error or name in list_error_classes() or name.endswith(("Error", "Failed", "Failure")):
        yield from (prose for argument in node.args for prose in _extract_literal_text(argument))
    elif name in LOG_METHODS or name in MESSAGE_FUNCTIONS:
        yield from (prose for argument in node.args[:1] for prose in _extract_literal_text(argument))


def _extract_literal_text(node: ast.expr) -> Iterator[Prose]:
    """Yield the text of a literal, with CODE in place of interpolated values. Ignores texts of fewer than two words."""
    text = _read_literal(node)
    if text and " " in text.strip():
        yield from _split_paragraphs(node.lineno, text)


def _read_literal(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(each.value if isinstance(each, ast.Constant) else "CODE" for each in values)
        case ast.BinOp(left=left, right=right):
            return _read_literal(left) + _read_literal(right)
    return ""


def _split_paragraphs(line: int, text: str) -> Iterator[Prose]:
    for match in re.finditer(r"(?:[^\n]|\n(?!\s*\n|\s*[*-]\s))+", text):
        if re.search(r"\w", match[0]) and not match[0].lstrip().startswith((">>>", "$ ")):
            yield Prose(
                line + text.count("\n", 0, match.start()),
                _strip_markup(re.sub(r"^\s*[*-]\s", "", " ".join(match[0].split()))),
            )


DISPLAYED_KEYS = {"description", "short_description", "notes", "fail_msg", "success_msg", "requirements", "details"}


def _find_descriptions(data: Any) -> Iterator[str]:
    """Yield the texts under the keys that Ansible displays."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in DISPLAYED_KEYS or (key in ("msg", "name") and isinstance(value, str) and " " in value):
                yield from _extract_description_texts(value)
            else:
                yield from _find_descriptions(value)
    elif isinstance(data, list):
        for each in data:
            yield from _find_descriptions(each)


def _extract_description_texts(value: Any) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str):
            each = re.sub(r"{{.*?}}|{%.*?%}", "CODE", each, flags=re.DOTALL)
            yield " ".join(re.sub(r"\b[A-Z]\([^)]*\)", "CODE", each).split())
        else:
            yield from _find_descriptions(each)


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads values tagged with !unsafe, !vault and the like as plain values."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: getattr(node, "value", ""))


def extract_yaml(text: str) -> Iterator[Prose]:
    """Yield the descriptions of arguments, and the names and messages of tasks."""
    for document in yaml.load_all(text, Loader=_Loader):
        yield from (Prose(1, each) for each in _find_descriptions(document))


def extract_fragment(text: str) -> Iterator[Prose]:
    """Yield the entries of a changelog fragment."""
    for entries in (yaml.safe_load(text) or {}).values():
        yield from (Prose(1, _strip_markup(each)) for each in entries)


def extract_changelog(text: str) -> Iterator[Prose]:
    """Yield the headings and the entries of the changelog that antsibull-changelog generates."""
    lines = ("" if re.match(r"\.\. |(\W)\1+$", line) else line for line in text.splitlines())
    return extract_markdown("\n".join(lines))


def extract_script_help(text: str) -> Iterator[Prose]:
    """Yield the descriptions and the paragraphs of a shell script's usage, without the names of the commands.

    Commands are indented by two spaces, and descriptions are in a column on the right.
    """
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines, 1) if line.endswith("<<'END'"))
    usage = lines[start : lines.index("END")]
    column = min(len(line) - len(line.lstrip()) for line in usage if line.startswith(" " * 10))
    block: list[str] = []
    block_line = 0
    for number, line in enumerate([*usage, ""], start + 1):
        is_command = bool(re.match(r" {2}\S", line))
        if block and (is_command or not line.strip()):
            yield Prose(block_line, " ".join(block))
            block = []
        description = line[column:] if line[column - 1 : column] == " " else ""
        if words := (description if is_command else line).split():
            block_line = block_line if block else number
            block += words


def extract_prose(path: Path) -> list[Prose]:
    text = path.read_text()
    if path.name == "dev":
        return list(extract_script_help(text))
    if path.suffix == ".rst":
        return list(extract_changelog(text))
    if path.suffix == ".md":
        return list(extract_markdown(text))
    if path.suffix == ".py":
        return list(extract_python(text))
    return list(extract_fragment(text) if path.parent.name == "fragments" else extract_yaml(text))


# --- findings --------------------------------------------------------------------------------------------------------


def split_sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?;])\s+", text) if each]


def find_violations(path: str, pieces: Iterable[Prose]) -> Iterator[Finding]:
    for piece in pieces:
        for sentence in split_sentences(piece.text):
            for rule in load_rules():
                if rule.pattern.search(sentence):
                    yield Finding(path, piece.line, rule.name, rule.remedy, sentence)


def run_proselint(path: str, pieces: list[Prose]) -> Iterator[Finding]:
    """Run proselint once for all pieces of a file, because each run is slow, and yield its findings."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(proselint_checks)
    piece_offsets = list(accumulate((len(piece.text) + 2 for piece in pieces), initial=0))
    text = "\n\n".join(piece.text for piece in pieces)
    if not text:
        return
    for result in LintFile(path, text).lint({"max_errors": 1000, "checks": PROSELINT_CHECKS}):
        match = result.check_result
        # proselint puts a line break before the text.
        piece = pieces[bisect_right(piece_offsets, max(match.span[0] - 1, 0), hi=len(pieces)) - 1]
        yield Finding(path, piece.line, match.check_path, match.message, piece.text)


def find_files(paths: Iterable[str]) -> Iterator[Path]:
    for name in paths:
        file_or_directory = REPOSITORY / name
        if file_or_directory.is_file():
            yield file_or_directory
        elif file_or_directory.is_dir():
            yield from sorted(
                path
                for path in file_or_directory.rglob("*")
                if path.suffix in (".md", ".py", ".yml")
                and "_site" not in path.parts
                and not path.parts[-1].startswith(".")
            )


def check_file(path: Path) -> list[Finding]:
    relative_path = _get_path_in_repository(path)
    pieces = extract_prose(path)
    return [*find_violations(relative_path, pieces), *run_proselint(relative_path, pieces)]


def read_allowances() -> dict[str, int]:
    """Return {directory: allowed number of findings}. The longest matching directory applies to a file."""
    return dict(tomllib.loads(ALLOWANCES_FILE.read_text())["allowed"]) if ALLOWANCES_FILE.exists() else {}


def find_directory(path: str, directories: Iterable[str]) -> str:
    """Return the directory in ``directories`` whose allowance applies to a file, or "" if there is none."""
    return max((each for each in directories if path.startswith(f"{each}/")), key=len, default="")


def main(arguments: list[str]) -> int:
    """Check all files and return the exit code. Given path prefixes, print the findings of those files and return 0."""
    prefixes = tuple(argument for argument in arguments if not argument.startswith("-"))
    guides = {_get_path_in_repository(path) for path in find_files(GUIDE_PATHS)}
    paths = sorted({*find_files(GUIDE_PATHS), *find_files(CODE_PATHS)})
    if prefixes:
        for path in paths:
            if _get_path_in_repository(path).startswith(prefixes):
                for each in check_file(path):
                    print(each)
        return 0
    allowances = read_allowances()
    findings = [finding for path in paths for finding in check_file(path)]
    directory_by_path = {
        each.path: "" if each.path in guides else find_directory(each.path, allowances) for each in findings
    }
    counts = Counter(directory_by_path[each.path] for each in findings)
    if "--update" in arguments:
        lines = [f'"{each}" = {min(allowances[each], counts[each])}' for each in sorted(allowances)]
        ALLOWANCES_FILE.write_text(_HEADER + "\n".join(lines) + "\n")
        allowances = read_allowances()
    exceeded_directories = {each for each, count in counts.items() if count > allowances.get(each, 0)}
    for each in findings:
        if directory_by_path[each.path] in exceeded_directories:
            print(each)
    for each in sorted(exceeded_directories):
        print(f"{each or 'guides'}: {counts[each]} findings, {allowances.get(each, 0)} allowed", file=sys.stderr)
    return 1 if exceeded_directories else 0


def _get_path_in_repository(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


_HEADER = """# Findings of `python -m tests.lint.words` that code may still have, by directory. Numbers only shrink:
# `python -m tests.lint.words --update` lowers them. Guides have no allowance.
[allowed]
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
