"""Translate the patterns of Dockerfiles and .dockerignore files to regular expressions, which clients apply to files.

The regular expressions are for Python's ``re.fullmatch``. They match paths relative to the context, or components of
such paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_gateway.errors import Invalid

_MAX_PATTERN_LENGTH = 4096
_MAX_LINES = 1000
_CHARACTER_CLASS = re.compile(r"\[\^?(?:(?:\\.|[^\\\]-])(?:-(?:\\.|[^\\\]-]))?)+\]", re.DOTALL)
_CLASS_PART = re.compile(r"\\(.)|(-)|([^\\-])", re.DOTALL)
_WILDCARDS = frozenset("*?[]\\")


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
    parts = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith("**", position):
            position += 3 if pattern.startswith("/", position + 2) else 2
            parts.append("(?:.*/)?" if position < len(pattern) else ".*")
            continue
        if character == "[":
            match = _CHARACTER_CLASS.match(pattern, position)
            if match is None:
                raise _create_malformed_error(description)
            parts.append(_translate_class(match[0]))
            position = match.end()
            continue
        if character == "\\":
            position += 1
            if position == len(pattern):
                raise _create_malformed_error(description)
            parts.append(re.escape(pattern[position]))
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(character) or re.escape(character))
        position += 1
    return "".join(parts)


def _translate_class(text: str) -> str:
    inner = text[1:-1]
    negation = "^" if inner.startswith("^") else ""
    parts = (
        "-" if dash else re.escape(escaped or plain)
        for escaped, dash, plain in _CLASS_PART.findall(inner[len(negation) :])
    )
    return f"[{negation}{''.join(parts)}]"
