"""Translate the patterns of Dockerfiles and .dockerignore files to regular expressions, which clients apply to files.

The regular expressions are for Python's ``re.fullmatch``. They match paths relative to the context, or components of
such paths.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_gateway.errors import Invalid

_MAX_PATTERN_LENGTH = 4096
_MAX_LINES = 1000
_CHARACTER_CLASS = re.compile(r"\[\^?(?:(?:\\.|[^\\\]-])(?:-(?:\\.|[^\\\]-]))?)+\]", re.DOTALL)
_CLASS_PART = re.compile(r"\\(.)|(-)|([^\\-])", re.DOTALL)
_WILDCARDS = frozenset("*?[]\\")
_MAX_WILDCARDS = 100
_MAX_OTHER_WILDCARDS = 2
"""The maximum number of wildcards in a pattern for which all combinations of their lengths must be tried."""
_ANY_NAME, _ANY_PATH, _ANY_DIRECTORIES = "[^/]*", ".*", "(?:.*/)?"
"""The regular expressions for `*`, for `**` at the end of a pattern, and for other `**` and `**/`."""
_SHORTEST = {_ANY_PATH: ".*?", _ANY_DIRECTORIES: "(?:.*?/)??"}
_WILDCARD_REGEXES = frozenset((_ANY_NAME, _ANY_PATH, _ANY_DIRECTORIES))


@dataclass(frozen=True)
class IgnorePattern:
    """A line of a .dockerignore file. It applies to everything inside a directory that it matches."""

    regex: str
    is_exception: bool
    """Whether the line begins with ``!``, so that matching files are not ignored."""


def translate_source(source: str) -> list[str]:
    """Return a regular expression for each component of the source of a COPY instruction; none for the whole context.

    Raises ValueError if the pattern is malformed, or leads outside the context.
    """
    if len(source) > _MAX_PATTERN_LENGTH:
        raise ValueError(f"the source is {len(source)} characters long: use at most {_MAX_PATTERN_LENGTH}")
    if source.startswith("/"):
        raise ValueError(f"the source {source[:200]!r} is absolute: use a path relative to the context")
    components = [component for component in source.split("/") if component not in ("", ".")]
    if ".." in components:
        raise ValueError(f"the source {source[:200]!r} leads outside the context: copy the files into the context")
    return [_compile(component, source) for component in components]


def translate_ignore_file(text: str) -> list[IgnorePattern]:
    """Translate the contents of a .dockerignore file. Raises Invalid."""
    from e2b_dockerfile_utils import PatternMatcher

    lines = text.removeprefix("\ufeff").split("\n")
    if len(lines) > _MAX_LINES:
        raise Invalid(f"the .dockerignore file has {len(lines)} lines: use at most {_MAX_LINES}")
    for number, line in enumerate(lines, 1):
        if len(line) > _MAX_PATTERN_LENGTH:
            raise Invalid(
                f"line {number} of the .dockerignore file is {len(line)} characters long: use at most "
                f"{_MAX_PATTERN_LENGTH}"
            )
    try:
        patterns: Sequence[str] = PatternMatcher(lines).patterns
        return [
            IgnorePattern(_compile(pattern.removeprefix("!"), pattern), pattern.startswith("!")) for pattern in patterns
        ]
    except ValueError as error:
        raise Invalid(f"the .dockerignore file is not valid: {str(error)[:300]}: correct the pattern") from None


def _compile(pattern: str, description: str) -> str:
    regex = f"(?s:{_translate(pattern, description)})"
    try:
        re.compile(regex)
    except re.error:
        raise _create_malformed_error(description) from None
    return regex


def _create_malformed_error(pattern: str) -> ValueError:
    return ValueError(rf"the pattern {pattern[:200]!r} is malformed: escape a literal [, *, ? or \ with a backslash")


def _translate(pattern: str, description: str) -> str:
    if pattern.startswith("**") and not _WILDCARDS & {*pattern[2:]}:
        suffix = pattern[2:]
        return f"(?:.*/)?{re.escape(suffix[1:])}" if suffix.startswith("/") else f".*{re.escape(suffix)}"
    tokens = _tokenize(pattern, description)
    wildcard_count = sum(token in _WILDCARD_REGEXES for token in tokens)
    is_simple = _is_simple(tokens)
    max_count = _MAX_WILDCARDS if is_simple else _MAX_OTHER_WILDCARDS
    if wildcard_count > max_count:
        reason = "" if is_simple else ", and ** next to a name, or a character class that matches a slash"
        raise ValueError(
            f"the pattern {description[:200]!r} has {wildcard_count} wildcards{reason}: use at most {max_count}, or "
            "several patterns"
        )
    return _join_tokens(tokens) if is_simple else "".join(tokens)


def _is_simple(tokens: Sequence[str]) -> bool:
    """Return whether each `**` stands for whole directories, and each other wildcard for a part of a name."""
    for previous, token in zip(["/", *tokens], tokens, strict=False):
        if token == _ANY_DIRECTORIES and previous not in ("/", _ANY_DIRECTORIES):
            return False
        if token.startswith("[") and token != _ANY_NAME and re.fullmatch(token, "/"):
            return False
    return True


def _tokenize(pattern: str, description: str) -> list[str]:
    """Return a regular expression for each character, character class and wildcard of a pattern."""
    tokens: list[str] = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith("**", position):
            position += 3 if pattern.startswith("/", position + 2) else 2
            tokens.append(_ANY_DIRECTORIES if position < len(pattern) else _ANY_PATH)
            continue
        if character == "[":
            match = _CHARACTER_CLASS.match(pattern, position)
            if match is None:
                raise _create_malformed_error(description)
            tokens.append(_translate_class(match[0]))
            position = match.end()
            continue
        if character == "\\":
            position += 1
            if position == len(pattern):
                raise _create_malformed_error(description)
            tokens.append(re.escape(pattern[position]))
        else:
            tokens.append({"*": _ANY_NAME, "?": "[^/]"}.get(character) or re.escape(character))
        position += 1
    return tokens


def _join_tokens(tokens: Sequence[str]) -> str:
    """Return a regular expression that does not try every combination of the lengths of its wildcards.

    A wildcard that is followed by another one of its kind needs only its shortest match, because the next wildcard can
    match the rest. The expressions before the last wildcards are therefore atomic groups. ``tokens`` must be simple.
    """
    blocks: list[tuple[str, list[str]]] = [("", [""])]
    """For each wildcard that matches slashes: itself, and the expressions between the other wildcards after it."""
    for token in tokens:
        if token in (_ANY_PATH, _ANY_DIRECTORIES):
            blocks.append((token, [""]))
        elif token == _ANY_NAME:
            blocks[-1][1].append("")
        else:
            blocks[-1][1][-1] += token
    group_numbers = itertools.count()

    def make_atomic(regex: str) -> str:
        # Python 3.10 and older have no atomic groups, but a lookahead is never entered again.
        name = f"g{next(group_numbers)}"
        return f"(?=(?P<{name}>{regex}))(?P={name})"

    parts = []
    for wildcard, (first, *others) in blocks[:-1]:
        regex = first + "".join(make_atomic(f"{_ANY_NAME}?{each}") for each in others)
        parts.append(make_atomic(_SHORTEST[wildcard] + regex) if wildcard else regex)
    wildcard, (first, *others) = blocks[-1]
    parts += [wildcard, first, *(make_atomic(f"{_ANY_NAME}?{each}") for each in others[:-1])]
    parts += [f"{_ANY_NAME}{each}" for each in others[-1:]]
    return "".join(parts)


def _translate_class(text: str) -> str:
    inner = text[1:-1]
    negation = "^" if inner.startswith("^") else ""
    parts = (
        "-" if dash else re.escape(escaped or plain)
        for escaped, dash, plain in _CLASS_PART.findall(inner[len(negation) :])
    )
    return f"[{negation}{''.join(parts)}]"
