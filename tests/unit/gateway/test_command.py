"""Test that the gateway limits how much of a command's output it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from sandbox_gateway.command import CommandTimeout, run, run_async
from sandbox_gateway.errors import BackendFailed

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(params=[False, True], ids=["run", "run_async"])
def run_command(request: pytest.FixtureRequest) -> Run:
    def run_in_loop(*args: Any, **options: Any) -> CompletedProcess[str]:
        return asyncio.run(run_async(*args, **options))

    return run_in_loop if request.param else run


def test_only_the_end_of_endless_errors_is_kept(run_command: Run) -> None:
    script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo last >&2; echo output; exit 3"
    result = run_command(["sh", "-c", script], timeout=20, check=False)
    assert (result.returncode, result.stdout, len(result.stderr)) == (3, "output\n", 64 << 10)
    assert result.stderr.endswith("xlast\n")


def test_a_command_that_prints_without_end_is_killed(run_command: Run) -> None:
    with pytest.raises(BackendFailed, match="yes x produced too much output and was killed"):
        run_command(["yes", "x"], timeout=20, max_output_bytes=100_000)
    assert (
        len(run_command(["head", "-c", "100000", "/dev/zero"], timeout=20, max_output_bytes=100_000).stdout) == 100_000
    )


def test_a_command_reads_its_input_while_it_prints(run_command: Run) -> None:
    text = "0123456789" * 100_000
    assert run_command(["cat"], timeout=20, input=text).stdout == text
    assert run_command(["cat"], timeout=20, input="").stdout == ""
    assert run_command(["true"], timeout=20, input=text).returncode == 0


def test_a_command_that_does_not_end_is_killed(run_command: Run) -> None:
    with pytest.raises(CommandTimeout, match=r"sleep 60 did not finish within 0\.1 s and was killed"):
        run_command(["sleep", "60"], timeout=0.1)
    with pytest.raises(BackendFailed, match=r"sh -c failed \(1\): reason"):
        run_command(["sh", "-c", "echo reason >&2; exit 1"], timeout=20)
    with pytest.raises(BackendFailed, match="no-such-program is not installed"):
        run_command(["no-such-program"], timeout=20)
