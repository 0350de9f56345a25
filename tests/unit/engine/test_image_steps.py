"""Test how the steps of E2B's client become commands."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from sandbox_gateway.engine.image_steps import compile_steps
from sandbox_gateway.errors import GatewayError


def parse(command: str) -> dict[str, Any]:
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
        ]
    )
    first, second, third = map(parse, steps.commands)
    assert first == {"args": ["/bin/sh", "-c", "first"]}
    assert second == {
        "args": ["/bin/sh", "-c", "second; 'quoted'"],
        "env": {"A": "1", "B": "it's $HOME"},
        "cwd": "/srv",
        "user": "app",
    }
    assert third["env"] == {"A": "2", "B": "it's $HOME"}
    assert (third["cwd"], third["user"]) == ("/srv/below", "root")
    assert parse(steps.command("start"))["user"] == "app"


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("COPY", ["a", "/b"], "files cannot be copied"),
        ("EXPOSE", ["80"], "'EXPOSE' is not supported: use RUN, ENV, WORKDIR and USER"),
        ("RUN", [], "the step RUN has 0 arguments"),
        ("ENV", ["A"], "the step ENV has 1 arguments"),
        ("ENV", [], "the step ENV has 0 arguments"),
        ("USER", [""], "the step USER has 1 arguments"),
        ("WORKDIR", ["relative"], "use an absolute path first"),
    ],
)
def test_steps_that_cannot_be_carried_out_are_refused(kind: str, args: list[str], message: str) -> None:
    with pytest.raises(GatewayError, match=message):
        compile_steps([(kind, args)])
