"""`./dev`: what it refuses, it refuses before it does anything."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import session


def dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(session.REPOSITORY / "dev"), *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_usage_is_on_standard_output_when_asked_for() -> None:
    done = dev("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ./dev COMMAND")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "what shall it do?"),
        (("frobnicate",), "'frobnicate' is no command"),
        (("demo", "--quickly"), "demo does not know '--quickly'"),
        (("demo", "--host"), "--host needs a kind of host"),
        (("demo", "--host", "bare_metal"), "'bare_metal' is no kind of host"),
        (("pins", "--quickly"), "pins does not know '--quickly'"),
        (("molecule", "bare_metal"), "there is no scenario 'bare_metal'"),
    ],
)
def test_what_it_does_not_know_it_refuses(arguments: tuple[str, ...], sentence: str) -> None:
    done = dev(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""
