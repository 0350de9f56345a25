"""Run external commands with a timeout. Errors contain the command and its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from subprocess import CompletedProcess

from sandbox_gateway.errors import BackendFailed

_MAX_OUTPUT_LENGTH = 2000
_KILL_WAIT_SECONDS = 2.0
_INHERITED_VARIABLES = ("PATH", "TMPDIR")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


def build_child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process: a few inherited variables, the C locale, and ``variables``.

    The rest of the gateway's environment is not passed on, because it may contain keys and proxy passwords, and a
    guest may take over a process that serves it.
    """
    inherited = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    return {**inherited, "LC_ALL": "C", **variables}


def read_proxy_settings() -> dict[str, str]:
    """Return the proxy variables from the gateway's environment, for a child that downloads packages."""
    names = [*_PROXY_VARIABLES, *map(str.upper, _PROXY_VARIABLES)]
    return {name: os.environ[name] for name in names if name in os.environ}


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CompletedProcess[str]:
    """Run ``argv`` without a shell, for at most ``timeout`` seconds. ``env`` extends ``build_child_environment``.

    Raises BackendFailed if the program is not installed, times out, or (with ``check``) exits with a nonzero code.
    """
    try:
        result = subprocess.run(
            argv,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=build_child_environment(**(env or {})),
            pass_fds=pass_fds,
            check=False,
        )
    except FileNotFoundError:
        raise BackendFailed(missing_program_message(argv[0])) from None
    except subprocess.TimeoutExpired:
        raise BackendFailed(_format_timeout_message(argv, timeout)) from None
    return _check_status(argv, result, check)


async def run_async(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CompletedProcess[str]:
    """Run a command like ``run``, without blocking the event loop. If the caller is cancelled, kill the command."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=build_child_environment(**(env or {})),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BackendFailed(missing_program_message(argv[0])) from None
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate(None if input is None else input.encode())
    except (TimeoutError, asyncio.CancelledError) as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Do not wait for a process that hangs in the kernel, because the caller may hold a lock.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WAIT_SECONDS):
                await process.wait()
        if isinstance(error, TimeoutError):
            raise BackendFailed(_format_timeout_message(argv, timeout)) from None
        raise
    assert process.returncode is not None
    result = CompletedProcess(
        list(argv), process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace")
    )
    return _check_status(argv, result, check)


def _check_status(argv: Sequence[str], result: CompletedProcess[str], check: bool) -> CompletedProcess[str]:
    if check and result.returncode != 0:
        output = (result.stderr.strip() or result.stdout.strip() or "no output")[-_MAX_OUTPUT_LENGTH:]
        raise BackendFailed(f"{argv[0]} {argv[1] if len(argv) > 1 else ''} failed ({result.returncode}): {output}")
    return result


def missing_program_message(program: str) -> str:
    return f"{program} is not installed: install it, or run the host role of this collection"


def _format_timeout_message(argv: Sequence[str], timeout: float) -> str:
    return f"{argv[0]} {argv[1] if len(argv) > 1 else ''} did not finish within {timeout:g} s and was killed"
