"""Tests that each rule of the wording linter finds only its bad examples, and that every kind of text is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lint import words


@pytest.mark.parametrize("rule", words.load_rules(), ids=lambda rule: rule.name)
def test_a_rule_finds_only_its_bad_examples(rule: words.Rule) -> None:
    assert rule.bad and rule.good and rule.remedy
    for text in rule.bad:
        assert any(rule.pattern.search(each) for each in words.split_sentences(text)), text
    for text in rule.good:
        assert not any(rule.pattern.search(each) for each in words.split_sentences(text)), text


def test_rule_names_are_unique() -> None:
    names = [rule.name for rule in words.load_rules()]
    assert len(names) == len(set(names))


def extract_texts(read: Callable[[str], Iterator[words.Prose]], source: str) -> list[tuple[int, str]]:
    return [(each.line, each.text) for each in read(source)]


def test_markdown_is_split_into_paragraphs_items_and_cells() -> None:
    source = (
        "# Head\n\nOne\nparagraph with `code`.\n\n* an item\n  of two lines\n* [linked](to.md)\n\n| a | b |\n|--|--|\n"
    )
    assert extract_texts(words.extract_markdown, source) == [
        (1, "Head"),
        (3, "One paragraph with CODE."),
        (6, "an item of two lines"),
        (8, "linked"),
        (10, "a"),
        (10, "b"),
    ]


def test_fenced_code_is_not_prose() -> None:
    assert extract_texts(words.extract_markdown, "Before.\n```sh\nwhat shall it be\n```\nAfter.\n") == [
        (1, "Before."),
        (5, "After."),
    ]


def test_all_user_visible_python_text_is_read() -> None:
    source = '''"""Module docstring."""
def f(x):
    """Function docstring."""
    log.warning("log message here", sandbox=x)
    parser.add_argument("--x", help="help of argparse")
    option = Option(None, help="help of typer")
    module.fail_json(msg=f"module failed for {x}")
    raise Invalid(f"an error about {x}: " "do this")
    y = "not prose at all"
    z = ["what shall"]
'''
    assert sorted(text for _, text in extract_texts(words.extract_python, source)) == [
        "Function docstring.",
        "Module docstring.",
        "an error about CODE: do this",
        "help of argparse",
        "help of typer",
        "log message here",
        "module failed for CODE",
    ]


def test_errors_that_are_returned_are_read() -> None:
    source = """
def f(x):
    yield Refusal(409, f"a refusal about {x}")
    if x:
        return NotFound("template", x, message="text of the keyword")
    error = Failure("a failure of the command line", "unrelated words")
    raise create_error("raised indirectly")
    y = Sandbox("not an error")
"""
    assert sorted(text for _, text in extract_texts(words.extract_python, source)) == [
        "a failure of the command line",
        "a refusal about CODE",
        "raised indirectly",
        "text of the keyword",
        "unrelated words",
    ]


def test_docstrings_of_attributes_are_read() -> None:
    source = '''
SIZE = 1
"""Text about
a constant."""
"no docstring"
class A:
    x: int
    """Text about a field."""
    def f(self):
        self.y = 1
        """Text about an attribute."""
'''
    assert sorted(extract_texts(words.extract_python, source)) == [
        (3, "Text about a constant."),
        (8, "Text about a field."),
        (11, "Text about an attribute."),
    ]


def test_the_help_of_scripts_is_read_without_the_commands() -> None:
    source = """#!/bin/sh
cat <<'END'
usage: ./dev COMMAND

  one [OPTION|OPTION]
            first description
            of two lines
  two NAME  second; see below

A paragraph
of two lines.
END
echo "not this"
"""
    assert extract_texts(words.extract_script_help, source) == [
        (3, "usage: ./dev COMMAND"),
        (6, "first description of two lines"),
        (8, "second; see below"),
        (10, "A paragraph of two lines."),
    ]


def test_headings_and_entries_of_changelogs_are_read() -> None:
    source = ".. contents:: Topics\n\nv1\n==\n\n- An entry with ``code``.\n- Another.\n"
    assert extract_texts(words.extract_changelog, source) == [
        (3, "v1"),
        (6, "An entry with CODE."),
        (7, "Another."),
    ]


def test_documentation_of_modules_is_read() -> None:
    source = (
        'DOCUMENTATION = r"""\nshort_description: Short text\noptions:\n  a:\n    description: Text of C(a).\n"""\n'
    )
    assert [text for _, text in extract_texts(words.extract_python, source)] == ["Short text", "Text of CODE."]


def test_messages_of_roles_are_read() -> None:
    source = "- name: Check\n  assert:\n    that: x\n    fail_msg: '{{ x }} is wrong'\n  vars:\n    y: !unsafe z\n"
    assert [text for _, text in extract_texts(words.extract_yaml, source)] == ["CODE is wrong"]


def test_proselint_findings_have_the_line_of_their_text() -> None:
    pieces = [words.Prose(3, "Nothing is wrong here."), words.Prose(8, "This is very unique.")]
    findings = list(words.run_proselint("page.md", pieces))
    assert (8, "uncomparables") in [(each.line, each.rule.split(".")[0]) for each in findings]
    assert {each.line for each in findings} == {8}


@pytest.mark.parametrize("path", sorted(words.find_files(words.GUIDE_PATHS)), ids=lambda path: path.name)
def test_guides_have_no_findings(path: Path) -> None:
    assert [str(each) for each in words.check_file(path)] == []


@pytest.mark.parametrize("path", ["CHANGELOG.rst", "gateway/README.md", "dev"])
def test_a_file_outside_of_the_guides_directories_is_read(path: str) -> None:
    assert words.REPOSITORY / path in [*words.find_files(words.GUIDE_PATHS)]
    assert words.extract_prose(words.REPOSITORY / path)


def test_the_longest_matching_directory_is_used() -> None:
    assert words.find_directory("a/b/c.py", ["a", "a/b", "x"]) == "a/b"
    assert words.find_directory("ab/c.py", ["a"]) == ""
