"""Check the wording of prose: guides, docstrings, help, error sentences, log messages, module documentation.

`python -m tests.lint.words` prints each finding with its remedy and exits with 1 if there are more than
`allowed.toml` permits; guides get no allowance. `--update` lowers the allowances to the present counts.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from proselint.checks import __register__ as proselint_checks
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.support.session import REPOSITORY

HERE = Path(__file__).parent
ALLOWED = HERE / "allowed.toml"

GUIDES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "benchmarks/README.md",
    "requirements/README.md",
    "changelogs/fragments",
)
CODE = ("gateway/src", "gateway/extras", "plugins", "roles", "playbooks", "benchmarks", "tests", "requirements")

# proselint's checks that are useful for technical English; the others are about typography, places and slang.
PROSELINT = {
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
    """A pattern that no sentence may contain, and the words to use instead."""

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
def rules() -> tuple[Rule, ...]:
    entries = tomllib.loads((HERE / "words.toml").read_text())["rule"]
    return tuple(
        Rule(each["name"], re.compile(each["pattern"]), each["remedy"], tuple(each["bad"]), tuple(each["good"]))
        for each in entries
    )


# --- extraction ------------------------------------------------------------------------------------------------------


def markdown(text: str) -> Iterator[Prose]:
    """Paragraphs, list items, headings and table cells; fenced code is left out, inline code becomes a word."""
    fenced = False
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        elif fenced:
            continue
        begins = re.match(r"\s*(?:[*-]|\d+\.|#+|>|\|)(?:\s|$)|\s*<!--", line)
        if block and (begins or not line.strip()):
            yield Prose(start, _plain(" ".join(block)))
            block = []
        if line.lstrip().startswith("|"):
            yield from (Prose(number, _plain(cell)) for cell in re.split(r"(?<!\\)\|", line) if re.search(r"\w", cell))
        elif line.strip() and not line.lstrip().startswith("<!--"):
            if not block:
                start = number
            block.append(re.sub(r"^\s*(?:[*-]|\d+\.|#+|>)\s+", "", line).strip())


def _plain(text: str) -> str:
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`]*`", "CODE", text)
    return re.sub(r"[*_]{1,2}(\w[^*]*?)[*_]{1,2}", r"\1", text).strip()


LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
SPEAKING = {"fail_json", "exit_json", "warn", "error", "usage_error", "add_argument", "add_parser", "add_subparsers"}
SPOKEN = {"help", "description", "epilog", "short_help", "msg", "metavar_help"}


def python(text: str) -> Iterator[Prose]:
    """Docstrings, help texts, sentences of errors, messages of logs, and the documentation of a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                yield from _paragraphs(node.body[0].lineno, ast.get_docstring(node) or "")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (prose for argument in node.exc.args for prose in _literal_text(argument))
        elif isinstance(node, ast.Call):
            yield from _function_name(node)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("DOCUMENTATION", "RETURN"):
            yield from (Prose(node.lineno, each) for each in _descriptions(yaml.safe_load(_literal(node.value))))


def _function_name(node: ast.Call) -> Iterator[Prose]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for keyword in node.keywords:
        if keyword.arg in SPOKEN:
            yield from _literal_text(keyword.value)
    if (name in LOGS or name in SPEAKING or name.endswith(("Error", "Failure"))) and node.args:
        yield from _literal_text(node.args[0])


def _literal_text(node: ast.expr) -> Iterator[Prose]:
    """The text of a literal, with CODE for its values; nothing if it has fewer than two words."""
    text = _literal(node)
    if text and " " in text.strip():
        yield from _paragraphs(node.lineno, text)


def _literal(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(each.value if isinstance(each, ast.Constant) else "CODE" for each in values)
        case ast.BinOp(left=left, right=right):
            return _literal(left) + _literal(right)
    return ""


def _paragraphs(line: int, text: str) -> Iterator[Prose]:
    for match in re.finditer(r"(?:[^\n]|\n(?!\s*\n|\s*[*-]\s))+", text):
        if re.search(r"\w", match[0]) and not match[0].lstrip().startswith((">>>", "$ ")):
            yield Prose(
                line + text.count("\n", 0, match.start()), _plain(re.sub(r"^\s*[*-]\s", "", " ".join(match[0].split())))
            )


SHOWN = {"description", "short_description", "notes", "fail_msg", "success_msg", "requirements", "details"}


def _descriptions(data: Any) -> Iterator[str]:
    """Texts under the keys that Ansible shows to readers."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in SHOWN or (key in ("msg", "name") and isinstance(value, str) and " " in value):
                yield from _texts(value)
            else:
                yield from _descriptions(value)
    elif isinstance(data, list):
        for each in data:
            yield from _descriptions(each)


def _texts(value: Any) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str):
            each = re.sub(r"{{.*?}}|{%.*?%}", "CODE", each, flags=re.DOTALL)
            yield " ".join(re.sub(r"\b[A-Z]\([^)]*\)", "CODE", each).split())
        else:
            yield from _descriptions(each)


class _Loader(yaml.SafeLoader):
    """Reads tags such as !unsafe and !vault as the plain values below them."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: getattr(node, "value", ""))


def yaml_file(text: str) -> Iterator[Prose]:
    """Descriptions of arguments, and names and messages of tasks."""
    for document in yaml.load_all(text, Loader=_Loader):
        yield from (Prose(1, each) for each in _descriptions(document))


def fragment(text: str) -> Iterator[Prose]:
    """The entries of a changelog fragment."""
    for entries in (yaml.safe_load(text) or {}).values():
        yield from (Prose(1, _plain(each)) for each in entries)


def prose_of(path: Path) -> list[Prose]:
    text = path.read_text()
    if path.suffix == ".md":
        return list(markdown(text))
    if path.suffix == ".py":
        return list(python(text))
    return list(fragment(text) if path.parent.name == "fragments" else yaml_file(text))


# --- findings --------------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?;])\s+", text) if each]


def findings_in(path: str, pieces: Iterable[Prose]) -> Iterator[Finding]:
    for piece in pieces:
        for sentence in sentences(piece.text):
            for rule in rules():
                if rule.pattern.search(sentence):
                    yield Finding(path, piece.line, rule.name, rule.remedy, sentence)


def proselint_findings(path: str, pieces: list[Prose]) -> Iterator[Finding]:
    """Checks all pieces of a file in one run, since each run is slow."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(proselint_checks)
    starts = list(accumulate((len(piece.text) + 2 for piece in pieces), initial=0))
    content = "\n\n".join(piece.text for piece in pieces)
    if not content:
        return
    for result in LintFile(path, content).lint({"max_errors": 1000, "checks": PROSELINT}):
        found = result.check_result
        # proselint puts a line break before the content.
        piece = pieces[bisect_right(starts, max(found.span[0] - 1, 0), hi=len(pieces)) - 1]
        yield Finding(path, piece.line, found.check_path, found.message, piece.text)


def files(places: Iterable[str]) -> Iterator[Path]:
    for place in places:
        root = REPOSITORY / place
        if root.is_file():
            yield root
        elif root.is_dir():
            yield from sorted(
                path
                for path in root.rglob("*")
                if path.suffix in (".md", ".py", ".yml")
                and "_site" not in path.parts
                and not path.parts[-1].startswith(".")
            )


def check(path: Path) -> list[Finding]:
    name = _name(path)
    pieces = prose_of(path)
    return [*findings_in(name, pieces), *proselint_findings(name, pieces)]


def allowances() -> dict[str, int]:
    """Findings that code may still have, by directory; the longest directory that contains a file counts."""
    return dict(tomllib.loads(ALLOWED.read_text())["allowed"]) if ALLOWED.exists() else {}


def directory_of(path: str, areas: Iterable[str]) -> str:
    """The directory of ``areas`` whose allowance a file uses; empty if there is none."""
    return max((each for each in areas if path.startswith(f"{each}/")), key=len, default="")


def main(arguments: list[str]) -> int:
    """``arguments``: --update, or paths, of which all findings are shown."""
    wanted = tuple(word for word in arguments if not word.startswith("-"))
    guides = {_name(path) for path in files(GUIDES)}
    paths = sorted({*files(GUIDES), *files(CODE)})
    if wanted:
        for path in paths:
            if _name(path).startswith(wanted):
                for each in check(path):
                    print(each)
        return 0
    allowed = allowances()
    found = [finding for path in paths for finding in check(path)]
    areas = {each.path: "" if each.path in guides else directory_of(each.path, allowed) for each in found}
    counts = Counter(areas[each.path] for each in found)
    if "--update" in arguments:
        lines = [f'"{each}" = {min(allowed[each], counts[each])}' for each in sorted(allowed)]
        ALLOWED.write_text(_HEAD + "\n".join(lines) + "\n")
        allowed = allowances()
    over = {each for each, count in counts.items() if count > allowed.get(each, 0)}
    for each in found:
        if areas[each.path] in over:
            print(each)
    for each in sorted(over):
        print(f"{each or 'guides'}: {counts[each]} findings, {allowed.get(each, 0)} allowed", file=sys.stderr)
    return 1 if over else 0


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


_HEAD = """# Findings of `python -m tests.lint.words` that code may still have, by directory. Numbers only shrink:
# `python -m tests.lint.words --update` lowers them. Guides have no allowance.
[allowed]
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
