"""`./dev` rejects invalid arguments before it does anything."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import session


def run_dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(session.REPOSITORY / "dev"), *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_help_is_printed_to_standard_output() -> None:
    result = run_dev("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ./dev COMMAND")


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        ((), "missing command"),
        (("frobnicate",), "unknown command 'frobnicate'"),
        (("demo", "--quickly"), "unknown option of demo: '--quickly'"),
        (("demo", "--host"), "--host needs a kind of host"),
        (("demo", "--host", "bare_metal"), "unknown kind of host 'bare_metal'"),
        (("pins", "--quickly"), "unknown option of pins: '--quickly'"),
        (("test", "clients", "oldst"), "unknown set of clients 'oldst'"),
        (("molecule", "bare_metal"), "unknown scenario 'bare_metal'"),
    ],
)
def test_unknown_arguments_are_refused(arguments: tuple[str, ...], expected_message: str) -> None:
    result = run_dev(*arguments)
    assert result.returncode == 2
    assert expected_message in result.stderr
    assert result.stdout == ""
