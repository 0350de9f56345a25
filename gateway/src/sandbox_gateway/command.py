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

_TAIL = 2000
_DYING_SECONDS = 2.0
_KEPT = ("PATH", "TMPDIR")
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


def child_environment(**more: str) -> dict[str, str]:
    """Return the complete environment of a child process, including ``more``.

    It does not inherit the gateway's environment, which may contain keys and proxy passwords: a guest may take over a
    process that serves it.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "LC_ALL": "C", **more}


def proxy_settings() -> dict[str, str]:
    """Return the proxy variables of the gateway's environment, for a child that downloads packages."""
    names = [*_PROXIES, *map(str.upper, _PROXIES)]
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
    """Run ``argv`` (no shell) for at most ``timeout`` seconds; ``env`` is added to ``child_environment``.

    Raises BackendFailed if the program is not installed, times out, or (with ``check``) exits non-zero.
    """
    try:
        done = subprocess.run(
            argv,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=child_environment(**(env or {})),
            pass_fds=pass_fds,
            check=False,
        )
    except FileNotFoundError:
        raise BackendFailed(_missing_message(argv[0])) from None
    except subprocess.TimeoutExpired:
        raise BackendFailed(_timeout_message(argv, timeout)) from None
    return _check_status(argv, done, check)


async def run_async(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CompletedProcess[str]:
    """Run a command like ``run``, from a coroutine. If the caller is cancelled, no process remains."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(**(env or {})),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BackendFailed(_missing_message(argv[0])) from None
    try:
        out, err = await asyncio.wait_for(process.communicate(None if input is None else input.encode()), timeout)
    except (TimeoutError, asyncio.CancelledError) as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Do not wait for a process that hangs in the kernel, because the caller may hold a lock.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _DYING_SECONDS)
        if isinstance(error, TimeoutError):
            raise BackendFailed(_timeout_message(argv, timeout)) from None
        raise
    assert process.returncode is not None
    done = CompletedProcess(list(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    return _check_status(argv, done, check)


def _check_status(argv: Sequence[str], done: CompletedProcess[str], check: bool) -> CompletedProcess[str]:
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing")[-_TAIL:]
        raise BackendFailed(f"{argv[0]} {argv[1] if len(argv) > 1 else ''} failed ({done.returncode}): {said}")
    return done


def _missing_message(program: str) -> str:
    return f"{program} is not installed: install it, or run the host role of this collection"


def _timeout_message(argv: Sequence[str], timeout: float) -> str:
    return f"{argv[0]} {argv[1] if len(argv) > 1 else ''} did not end within {timeout:g} s and was stopped"
