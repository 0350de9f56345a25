"""Dockerfiles become steps as Docker defines them, or are refused with a sentence that names the line."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2b_dockerfile_utils import PatternMatcher
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_gateway.engine.build_context_patterns import translate_ignore_file, translate_source
from sandbox_gateway.engine.dockerfiles import MAX_LENGTH, parse_dockerfile
from sandbox_gateway.engine.image_steps import find_archive
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported

MAX_BYTES = 256 << 10
DIGEST = "0123456789abcdef" * 4


def compile_lines(*lines: str) -> tuple[list[dict[str, Any]], dict[str, Any] | str]:
    """Return the arguments of the launcher for the set-up commands and for the start command."""
    dockerfile = parse_dockerfile("\n".join(lines))
    commands, start_command = dockerfile.compile(dict.fromkeys(dockerfile.sources, DIGEST), MAX_BYTES)
    return [*map(read_settings, commands)], read_settings(start_command) if " " in start_command else start_command


def read_settings(command: str) -> dict[str, Any]:
    (argument,) = shlex.split(command.removeprefix("exec /opt/sandbox/start "))
    settings: dict[str, Any] = json.loads(argument)
    return settings


def test_run_has_a_shell_form_an_exec_form_and_here_documents() -> None:
    commands, _ = compile_lines(
        "FROM app",
        "RUN echo a \\",
        "  # comment",
        "  b",
        'RUN ["printf", "%s", "$A"]',
        "RUN <<EOF",
        "set -e",
        "RUN not an instruction",
        "EOF",
        "RUN cat <<-'A' > /x",
        "\t$y",
        "A",
    )
    assert [each["args"] for each in commands] == [
        ["/bin/sh", "-c", "echo a   b"],
        ["printf", "%s", "$A"],
        ["/bin/sh", "-c", "set -e\nRUN not an instruction\n"],
        ["/bin/sh", "-c", "cat <<-'A' > /x\n\t$y\nA\n"],
    ]
    assert all(each.keys() == {"args"} for each in commands)


def test_each_step_sees_what_earlier_steps_have_set() -> None:
    commands, start = compile_lines(
        "FROM app",
        "ARG VERSION=1 EMPTY",
        "RUN first",
        'ENV A="b c" D=$VERSION OLD=$A',
        "ENV LEGACY one two",
        "ARG A=argument",
        "WORKDIR /srv",
        "WORKDIR ${D}/x",
        "USER web",
        "RUN second",
        "CMD run $A",
    )
    env = {"A": "b c", "D": "1", "OLD": "${A}", "LEGACY": "one two"}
    assert commands[0] == {"args": ["/bin/sh", "-c", "first"], "env": {"VERSION": "1"}}
    settings = {"cwd": "/srv/1/x", "user": "web", "expand": ["env"]}
    assert commands[1] == {"args": ["/bin/sh", "-c", "second"], "env": {"VERSION": "1", **env}, **settings}
    assert start == {"cmd": ["/bin/sh", "-c", "run $A"], "env": env, **settings}


def test_variables_of_the_image_are_expanded_in_the_machine() -> None:
    commands, _ = compile_lines(
        "FROM app",
        "ENV PATH=/a:$PATH LITERAL='$PATH' ESCAPED=\\$x",
        "ENV PATH=/b:${PATH}",
        "WORKDIR $HOME_DIRECTORY/x",
        "USER ${OWNER}",
        "COPY --chown=$OWNER a $DESTINATION/",
        "RUN true",
    )
    env = {"PATH": "/b:/a:${PATH}", "LITERAL": "$$PATH", "ESCAPED": "$$x"}
    settings = {"env": env, "cwd": "${HOME_DIRECTORY}/x"}
    copy = ["/opt/sandbox/copy", f"/opt/sandbox/{DIGEST}.tar", "${DESTINATION}/", "${OWNER}", ""]
    assert commands == [
        {"args": copy, **settings, "user": "root", "expand": ["env", "cwd", "args"]},
        {"args": ["/bin/sh", "-c", "true"], **settings, "user": "${OWNER}", "expand": ["env", "cwd", "user"]},
    ]


def test_conditions_are_decided_if_the_variable_is_known() -> None:
    commands, _ = compile_lines(
        "FROM app", "ARG A=1 B", "ENV C=${A:-x}${B:-y}${B:+z}${A:+w}", "ARG D=${B-q}", "RUN true"
    )
    assert commands[0]["env"] == {"A": "1", "D": "q", "C": "1yw"}


def test_args_before_from_apply_to_it_and_to_stages_that_declare_them() -> None:
    lines = ["ARG REGISTRY=registry.test:5000 TAG=2", "FROM $REGISTRY/app:${TAG} AS main", "ARG TAG", "RUN true"]
    assert parse_dockerfile("\n".join(lines)).image == "registry.test:5000/app:2"
    assert compile_lines(*lines)[0][0]["env"] == {"TAG": "2"}


def test_each_source_has_an_archive() -> None:
    dockerfile = parse_dockerfile('FROM app\nCOPY a b*\\\n /x/\nCOPY --chmod=755 --link a y\nCOPY ["c d", "/z"]')
    assert dockerfile.sources == {"a": 2, "b*": 2, "c d": 5}
    digests = {"a": DIGEST, "b*": "b" * 64, "c d": "c" * 64}
    commands, _ = dockerfile.compile(digests, MAX_BYTES)
    assert [find_archive(command) for command in commands] == [DIGEST, "b" * 64, DIGEST, "c" * 64]
    assert [read_settings(command)["args"][2:] for command in commands] == [
        ["/x/", "", ""],
        ["/x/", "", ""],
        ["y", "", "755"],
        ["/z", "", ""],
    ]


@pytest.mark.parametrize(
    ("lines", "expected_start"),
    [
        ([], ""),
        (["EXPOSE 80", "LABEL a=b", "STOPSIGNAL SIGTERM", "MAINTAINER me"], ""),
        (["ENV A=1"], {"env": {"A": "1"}}),
        (['CMD ["a", "b"]'], {"cmd": ["a", "b"]}),
        (["CMD a b", "CMD c"], {"cmd": ["/bin/sh", "-c", "c"]}),
        (["CMD []"], {"cmd": []}),
        (['ENTRYPOINT ["e"]', 'CMD ["a"]'], {"args": ["e", "a"]}),
        (['CMD ["a"]', 'ENTRYPOINT ["e"]'], {"args": ["e", "a"]}),
        (['ENTRYPOINT ["e"]', "CMD a"], {"args": ["e", "/bin/sh", "-c", "a"]}),
        (["ENTRYPOINT e", 'CMD ["a"]'], {"args": ["/bin/sh", "-c", "e"]}),
        (["ENTRYPOINT []", 'CMD ["a"]'], {"args": ["a"]}),
        (["ENTRYPOINT []"], "true"),
    ],
)
def test_the_start_command_follows_docker(lines: list[str], expected_start: Any) -> None:
    assert compile_lines("FROM app", *lines) == ([], expected_start)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("FROM a\nADD https://example.com/x /x", 2, "ADD is not supported: use COPY for files of the context, and RUN"),
        ("FROM a\nHEALTHCHECK NONE", 2, "HEALTHCHECK is not supported: remove it, and set ready_probe"),
        ("FROM a\n\nONBUILD RUN x", 3, "ONBUILD is not supported"),
        ('FROM a\nSHELL ["bash", "-c"]', 2, "SHELL is not supported: remove it, and use the form RUN"),
        ("FROM a\nVOLUME /data", 2, "VOLUME is not supported: remove it, and attach volumes to the sandboxes"),
        ("FROM a AS b\nFROM c", 2, "a second FROM begins another stage"),
        ("FROM a\nCOPY --from=b /x /y", 2, "COPY has the flag --from, but files of other stages and images"),
        ("FROM a\nCOPY --parents x /y", 2, "COPY has the flag --parents, but it is not supported: remove it"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", 2, "RUN has the flag --mount, but it is not supported"),
        ("FROM --platform=linux/arm64 a", 1, "FROM has the flag --platform"),
        ("FROM scratch", 1, "scratch is an empty image, but a template needs a shell"),
        ("FROM a//b", 1, "the image 'a//b' is not valid: use docker://REGISTRY/NAME:TAG"),
        ("FROM a:$TAG\n", 1, "the image 'a:' is not valid"),
        ("FROM a b", 1, "FROM needs one image"),
        ("FROM", 1, "FROM needs one image"),
        ("RUN x\nFROM a", 1, "RUN comes before FROM"),
        ("FROM a\nRUNN x", 2, "unknown instruction: RUNN: correct it"),
        ("FROM a\nRUN", 2, "RUN needs a command"),
        ("FROM a\nRUN []", 2, "RUN needs a command"),
        ("FROM a\nRUN [1]", 2, "Only strings are supported in JSON arrays: correct it"),
        ("FROM a\nRUN x \\\n", 2, "the file ends after a continuation: complete the instruction, or remove the \\"),
        ("FROM a\nRUN x \\\n# end\n\n", 2, "the file ends after a continuation"),
        ("FROM a\nRUN x \\\n  y \\", 3, "the file ends after a continuation"),
        (
            "# escape=`\nFROM a\nRUN x `",
            3,
            "the file ends after a continuation: complete the instruction, or remove the `",
        ),
        ("# escape=x\nFROM a", 1, "invalid escape token"),
        ("FROM a\nRUN <<E\nx", 2, "unterminated heredoc"),
        ("FROM a\nRUN <<E\n#!/bin/x\nE", 2, "a here-document that names its interpreter is not supported"),
        ("FROM a\nCOPY <<E /x\ny\nE", 2, "COPY of a here-document is not supported: put the text into a file"),
        ("FROM a\nCOPY x", 2, "COPY needs a source and a destination"),
        ("FROM a\nCOPY x y z", 2, "COPY of several sources needs a directory as its destination: add a /"),
        ("FROM a\nCOPY --chmod=u+x x y", 2, "the mode 'u+x' is not valid: use an octal mode such as 0755"),
        ("FROM a\nCOPY /x y", 2, "the source '/x' is absolute"),
        ("FROM a\nCOPY x/../.. y", 2, "the source 'x/../..' leads outside the context"),
        ("FROM a\nCOPY $UP/x y", 2, "the source contains a variable that only the image may set"),
        ("FROM a\nCOPY x \\$y", 2, "the destination or the owner contains a dollar sign"),
        ("FROM a\nCOPY x[ y", 2, "the pattern 'x[' is malformed"),
        ("FROM a\nENV A", 2, "ENV must have two arguments: correct it"),
        ("FROM a\nENV =1", 2, "the name of a variable is empty"),
        ("FROM a\nENV A='1", 2, "looking for matching single-quote): correct it"),
        ("FROM a\nENV A=${B", 2, "'${B' is not valid (syntax error: missing '}'): correct it"),
        ("FROM a\nENV A=${B:-c}", 2, "${B:-…} depends on a variable that only the image may set: declare it"),
        ("FROM a\nARG B=1\nENV A=${B#1}", 3, "${B#…}: patterns in variables are not supported"),
        ("FROM a\nARG", 2, "ARG needs a name"),
        ("FROM a\nARG =1", 2, "ARG needs a name"),
        ("FROM a\nARG TARGETARCH", 2, "the gateway sets no ARG TARGETARCH: give it a default"),
        ("FROM a\nWORKDIR x", 2, "the working directory 'x' is relative: use an absolute path first"),
        ("FROM a\nWORKDIR", 2, "the argument of WORKDIR is missing or empty"),
        ("FROM a\nUSER ''", 2, "the argument of USER is missing or empty"),
        ("FROM a\nRUN \0", 2, "it contains a NUL character"),
        ("#" * 1001 + "\nFROM a", 1, "this comment has more than 1000 characters"),
    ],
)
def test_errors_name_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_dockerfile(text).compile({"x": DIGEST}, MAX_BYTES)
    assert type(caught.value) in (Invalid, Unsupported)
    assert caught.value.message.startswith(f"line {line} of the Dockerfile: ") and message in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nRUN " + "[" * 100_000,
        "FROM a\nENV A=" + "${A:-" * 20_000,
        "FROM a\n" + "RUN x\n" * 2000,
        "FROM a\n" + "".join(f"ARG A{number}=1\n" for number in range(500)),
        "FROM a\nARG A=" + "x" * 30_000 + "\nENV B=" + "$A" * 50_000,
        "FROM a\nENV A0=0123456789\n" + "".join(f"ENV A{n + 1}=$A{n}$A{n}$A{n}$A{n}\n" for n in range(30)),
        "FROM a\n" + "".join(f"ENV A{number}={'x' * 100}\n" for number in range(1000)),
        "FROM a\nENV " + " ".join(f"{number:x}=" for number in range(15_000)) + "\nCOPY " + "$a " * 60_000 + "/",
        "FROM a\nENV " + " ".join(f"{number:x}=$a" for number in range(25_000)),
        "# a=" + " " * 200_000 + "b\nFROM a",
        "FROM a\nCOPY " + "*a" * 50_000 + "[ /x",
        "x" * (MAX_LENGTH + 1),
    ],
)
def test_large_inputs_are_refused_quickly(text: str) -> None:
    start_time = time.process_time()
    with pytest.raises((Invalid, Unsupported)) as caught:
        parse_dockerfile(text).compile({}, MAX_BYTES)
    assert time.process_time() - start_time < 5
    assert len(caught.value.message) < 1000


_FRAGMENTS = st.sampled_from(
    [
        *("FROM a", "RUN x", "COPY a* b/ /c/", "ENV A=1", 'ENV B="$A', "ARG C", "CMD ", '["a", "b"]', "${A:-b}", "<<E"),
        *("E", "--chown=a", "USER ", "WORKDIR /", "\r\n", *"\\\n\t $'\"#=[]é"),
    ]
)


@given(st.lists(st.one_of(_FRAGMENTS, st.text(max_size=5)), max_size=30).map("".join), st.booleans())
@example("FROM a\nRUN \\\n\\", False)
def test_every_text_is_translated_or_refused_with_a_sentence(text: str, has_from: bool) -> None:
    try:
        dockerfile = parse_dockerfile("FROM a\n" + text if has_from else text)
        commands, start_command = dockerfile.compile(dict.fromkeys(dockerfile.sources, DIGEST), MAX_BYTES)
    except (Invalid, Unsupported) as error:
        assert re.search(r"Dockerfile.*: .|has no FROM", error.message, re.DOTALL)
        assert "\0" not in error.message
        return
    for command in (*commands, start_command):
        if command not in ("", "true"):
            assert "\0" not in json.dumps(read_settings(command), ensure_ascii=False)
    for source in dockerfile.sources:
        assert all(re.compile(component) for component in translate_source(source))


_VALUES = st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), max_size=10)


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,3}", fullmatch=True), _VALUES, min_size=1, max_size=4))
def test_quoted_values_arrive_unchanged(env: dict[str, str]) -> None:
    """Docker has no escape for a single quote inside single quotes."""
    pairs = " ".join(f"{name}='{value.replace(chr(39), '')}'" for name, value in env.items())
    commands, _ = compile_lines("FROM a", f"ENV {pairs}", "RUN x")
    expand: Callable[[str], str] = lambda value: value.replace("$$", "$")  # noqa: E731
    assert {name: expand(value) for name, value in commands[0]["env"].items()} == {
        name: value.replace("'", "") for name, value in env.items()
    }


_PATTERN_PARTS = st.sampled_from(
    [*"ab./*?!-^*", "*a", "*b/", "/**/", "**", "**/", "[ab]", "[^a]", "[a-b]", "\\a", "\\*", "[", "]", "x.y"]
)
_PATHS = st.lists(st.sampled_from(["a", "b", "ab", "a.b", "*", "-", "x.y", "^"]), min_size=1, max_size=4).map("/".join)


@given(st.lists(st.lists(_PATTERN_PARTS, max_size=6).map("".join), max_size=4), st.lists(_PATHS, max_size=8))
@example(["**a", "!**/b"], ["a", "ba", "b"])
def test_ignore_patterns_match_like_docker(lines: list[str], paths: list[str]) -> None:
    try:
        matcher = PatternMatcher(lines)
    except ValueError:
        with pytest.raises(Invalid, match=r"the \.dockerignore file is not valid"):
            translate_ignore_file("\n".join(lines))
        return
    try:
        patterns = translate_ignore_file("\n".join(lines))
    except Invalid as error:
        assert re.search("has .* wildcards, and", str(error)), error
        return
    for path in paths:
        assert _is_ignored(path, [(pattern.regex, pattern.is_exception) for pattern in patterns]) == matcher.matches(
            path
        )


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 99 + "b", "a" * 255),
        ("**/" * 99 + "x", "y/" * 1000),
        ("**/*a*a*a/**/*b*b*c", "aaaa/bbbb/" * 200),
    ],
)
def test_patterns_match_long_paths_without_trying_all_combinations(pattern: str, path: str) -> None:
    (translated,) = translate_ignore_file(pattern)
    assert re.fullmatch(translated.regex, path) is None


@pytest.mark.parametrize("pattern", ["a**b**c**d", "[^a]*b*c*d", "*a" * 101])
def test_patterns_that_would_try_too_many_combinations_are_refused(pattern: str) -> None:
    with pytest.raises(Invalid, match=r"has .* wildcards.*: use at most .*, or several patterns"):
        translate_ignore_file(pattern)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a\n" * 1001, "has 1002 lines: use at most 1000"), ("a\n" + "*a" * 3000, "line 2 .* is 6000 characters long")],
)
def test_large_ignore_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        translate_ignore_file(text)


def _is_ignored(path: str, patterns: list[tuple[str, bool]]) -> bool:
    from ansible_collections.grove.sandbox.plugins.module_utils._build_context import _Packer

    packer = _Packer("/", [{"regex": regex, "isException": is_exception} for regex, is_exception in patterns], 1)
    parts = path.split("/")
    is_ignored, matched_patterns = False, ()
    for depth in range(len(parts)):
        is_ignored, matched_patterns = packer._check_ignored("/".join(parts[: depth + 1]), matched_patterns)
    return is_ignored


@pytest.mark.parametrize(
    ("source", "name", "is_match"),
    [
        ("*.py", ".py", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("[^a-c]", "b", False),
        ("[^a-c]", "d", True),
        ("[]]", "]", False),
        (r"\*", "*", True),
        (r"\*", "x", False),
        ("**", "anything\n", True),
        ("a.b", "axb", False),
    ],
)
def test_sources_match_like_docker(source: str, name: str, is_match: bool) -> None:
    try:
        (component,) = translate_source(source)
    except ValueError:
        assert not is_match
    else:
        assert bool(re.fullmatch(component, name)) == is_match


def test_a_source_has_a_component_for_each_part_of_its_path() -> None:
    assert translate_source(".") == translate_source("./") == []
    assert len(translate_source("./a//b/*")) == 3
