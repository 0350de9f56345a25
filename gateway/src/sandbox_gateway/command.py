"""External commands: an argument list, a deadline, and a failure that says what was run and what it answered."""

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


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CompletedProcess[str]:
    """Run ``argv`` (no shell) for at most ``timeout`` seconds; ``env`` is added to ours, with LC_ALL=C.

    Raises BackendFailed when it is not installed, takes too long, or (with ``check``) exits non-zero.
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
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            pass_fds=pass_fds,
            check=False,
        )
    except FileNotFoundError:
        raise BackendFailed(_missing(argv[0])) from None
    except subprocess.TimeoutExpired:
        raise BackendFailed(_late(argv, timeout)) from None
    return _judged(argv, done, check)


async def arun(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CompletedProcess[str]:
    """``run`` for coroutines. A cancelled caller leaves no process behind."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BackendFailed(_missing(argv[0])) from None
    try:
        out, err = await asyncio.wait_for(process.communicate(None if input is None else input.encode()), timeout)
    except (TimeoutError, asyncio.CancelledError) as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise BackendFailed(_late(argv, timeout)) from None
        raise
    assert process.returncode is not None
    done = CompletedProcess(list(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    return _judged(argv, done, check)


def _judged(argv: Sequence[str], done: CompletedProcess[str], check: bool) -> CompletedProcess[str]:
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing")[-_TAIL:]
        raise BackendFailed(f"{argv[0]} {argv[1] if len(argv) > 1 else ''} failed ({done.returncode}): {said}")
    return done


def _missing(program: str) -> str:
    return f"{program} is not installed: install it, or run the host role of this collection"


def _late(argv: Sequence[str], timeout: float) -> str:
    return f"{argv[0]} {argv[1] if len(argv) > 1 else ''} did not end within {timeout:g} s and was stopped"
