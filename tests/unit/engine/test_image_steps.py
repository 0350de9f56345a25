"""Test how the build steps of E2B's client are converted to commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sandbox_gateway.engine.image_steps import build_archive_path, compile_steps, find_archive
from sandbox_gateway.errors import GatewayError, Invalid

MAX_BYTES = 256 << 10


def parse_command(command: str) -> dict[str, Any]:
    program, launcher, settings = shlex.split(command)
    assert (program, launcher) == ("exec", "/opt/sandbox/start")
    value = json.loads(settings)
    assert isinstance(value, dict)
    return value


def test_each_command_sees_the_settings_of_the_steps_before_it() -> None:
    steps = compile_steps(
        [
            ("RUN", ["first"]),
            ("ENV", ["A", "1", "B", "it's $HOME"]),
            ("WORKDIR", ["/srv"]),
            ("USER", ["app"]),
            ("RUN", ["second; 'quoted'"]),
            ("WORKDIR", ["below"]),
            ("ENV", ["A", "2"]),
            ("RUN", ["third", "root"]),
        ],
        MAX_BYTES,
    )
    first_command, second_command, third_command = map(parse_command, steps.commands)
    assert first_command == {"args": ["/bin/sh", "-c", "first"]}
    assert second_command == {
        "args": ["/bin/sh", "-c", "second; 'quoted'"],
        "env": {"A": "1", "B": "it's $HOME"},
        "cwd": "/srv",
        "user": "app",
    }
    assert third_command["env"] == {"A": "2", "B": "it's $HOME"}
    assert (third_command["cwd"], third_command["user"]) == ("/srv/below", "root")
    assert parse_command(steps.build_command("start"))["user"] == "app"


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("COPY", ["a", "/b"], "the 'filesHash' of a COPY step must be 64 lower-case hexadecimal digits"),
        ("COPY", ["a"], "the step COPY has the wrong number of arguments, 1"),
        ("COPY", ["a", ""], "the step COPY has the wrong number of arguments, 2"),
        ("COPY", ["a", "/b", "", "", ""], "the step COPY has the wrong number of arguments, 5"),
        ("EXPOSE", ["80"], "'EXPOSE' is not supported: use COPY, RUN, ENV, WORKDIR and USER"),
        ("RUN", [], "the step RUN has the wrong number of arguments, 0"),
        ("ENV", ["A"], "the step ENV has the wrong number of arguments, 1"),
        ("ENV", [], "the step ENV has the wrong number of arguments, 0"),
        ("USER", [""], "the step USER has the wrong number of arguments, 1"),
        ("WORKDIR", ["relative"], "use an absolute path first"),
    ],
)
def test_steps_that_cannot_be_carried_out_are_refused(kind: str, args: list[str], message: str) -> None:
    with pytest.raises(GatewayError, match=message):
        compile_steps([(kind, args)], MAX_BYTES)


DIGEST = "0123456789abcdef" * 4


def test_a_copy_names_its_archive_and_runs_as_root_in_the_working_directory() -> None:
    steps = compile_steps(
        [
            ("ENV", ["APP", "/srv"]),
            ("WORKDIR", ["/work"]),
            ("USER", ["games"]),
            ("COPY", ["a b*", "it's $APP/", "app:app", "0755"], DIGEST),
            ("COPY", ["a", "."], DIGEST),
        ],
        MAX_BYTES,
    )
    copy, short_copy = map(parse_command, steps.commands)
    assert copy == {
        "args": ["/opt/sandbox/copy", build_archive_path(DIGEST), "it's $APP/", "app:app", "0755"],
        "env": {"APP": "/srv"},
        "cwd": "/work",
        "user": "root",
    }
    assert short_copy["args"][2:] == [".", "", ""]
    assert [find_archive(command) for command in steps.commands] == [DIGEST, DIGEST]


@pytest.mark.parametrize("digest", ["", DIGEST[:-1], DIGEST.upper(), f"{DIGEST}\n", f"../{DIGEST[3:]}", "é" * 64])
def test_an_invalid_digest_is_refused(digest: str) -> None:
    with pytest.raises(Invalid, match="filesHash"):
        compile_steps([("COPY", ["a", "/b"], digest)], MAX_BYTES)


@pytest.mark.parametrize("mode", ["755x", "u+x", "00755", "8", "-1"])
def test_a_non_octal_mode_is_refused(mode: str) -> None:
    with pytest.raises(Invalid, match="use an octal mode"):
        compile_steps([("COPY", ["a", "/b", "", mode], DIGEST)], MAX_BYTES)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "echo /opt/sandbox/copy",
        "exec /opt/sandbox/start /opt/sandbox/copy",
        "exec /opt/sandbox/start '/opt/sandbox/copy",
        """exec /opt/sandbox/start '["/opt/sandbox/copy"]'""",
        """exec /opt/sandbox/start '{"args": ["/opt/sandbox/copy", 1]}' more""",
        """exec /opt/sandbox/start '{"args": ["/opt/sandbox/copy", "/opt/sandbox/../../etc/shadow.tar"]}'""",
        f"""exec /opt/sandbox/start '{{"args": ["cat", "{build_archive_path(DIGEST)}", "/opt/sandbox/copy"]}}'""",
        compile_steps(
            [("RUN", [f'"args": ["/opt/sandbox/copy", "{build_archive_path(DIGEST)}"]'])], MAX_BYTES
        ).commands[0],
    ],
)
def test_other_commands_have_no_archive(command: str) -> None:
    assert find_archive(command) == ""


def test_commands_that_repeat_a_large_environment_are_refused_before_they_fill_the_memory() -> None:
    """A body of 65 KB once became 50 MB of commands."""
    compiled_count = 0

    def make_steps() -> Iterator[tuple[str, Sequence[str]]]:
        nonlocal compiled_count
        yield "ENV", ["A", "x" * 60_000]
        for _ in range(1000):
            compiled_count += 1
            yield "RUN", ["true"]

    with pytest.raises(
        Invalid, match="the commands are more than 256 KiB long in total, because each contains the var"
    ):
        compile_steps(make_steps(), MAX_BYTES)
    assert compiled_count == 5


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("ENV", [f"V{number}", "x" * 1000]) for number in range(100)], "take up more than 64 KiB in total"),
        ([("ENV", ["A", "x" * 40_000, "B", "x" * 40_000])], "take up more than 64 KiB in total"),
        (
            [("WORKDIR", ["/a"]), *[("WORKDIR", ["b" * 1000])] * 5],
            "the working directory '/a/bb.* is 5007 characters long",
        ),
        ([("USER", ["x" * 5000])], "the user 'xxx.* is 5000 characters long: use at most 4096"),
        ([("RUN", ["true", "x" * 5000])], "the user 'xxx.* is 5000 characters long"),
        ([("RUN", ["'" * 30_000])], "the command .* is 150.* bytes long with its environment: send at most 120 KiB"),
        (
            [("ENV", ["A", "\0" * 30_000]), ("RUN", ["true"])],
            "the command 'true' is 180.* bytes long with its environment",
        ),
    ],
)
def test_values_that_linux_would_refuse_are_refused(steps: list[tuple[str, list[str]]], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        compile_steps(steps, MAX_BYTES)


def test_a_start_command_that_linux_would_refuse_is_refused() -> None:
    steps = compile_steps([("ENV", ["A", "x" * 60_000])] * 100, MAX_BYTES)
    assert len(steps.build_command("x" * 60_000)) > 120_000
    with pytest.raises(Invalid, match="bytes long with its environment"):
        steps.build_command("x" * 64_000)
