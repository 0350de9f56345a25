"""FreeBSD's commands, for coroutines: each runs to its end, so that what it began is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from subprocess import CompletedProcess
from typing import Any

from sandbox_gateway.command import arun
from sandbox_gateway.errors import BackendFailed

SECONDS = 60.0


class Commands:
    """Runs commands with ``environment`` added to ``child_environment``."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})

    async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
        """Standard output of a command that must succeed. Raises BackendFailed with what it said.

        ``silent``: that it fails without a word only means that there is nothing.
        """
        done = await self._run(argv, input=input, check=not silent)
        if done.returncode != 0 and _said(done):
            raise _failed(argv, done)
        return done.stdout

    async def unless(self, *argv: str, absent: tuple[str, ...]) -> bool:
        """Run a command that takes something away; False if it says, in words of ``absent``, that it is not there."""
        done = await self._run(argv, input=None, check=False)
        if done.returncode == 0:
            return True
        if any(words in _said(done) for words in absent):
            return False
        raise _failed(argv, done)

    async def _run(self, argv: tuple[str, ...], *, input: str | None, check: bool) -> CompletedProcess[str]:
        work = arun(argv, timeout=SECONDS, input=input, check=check, env=self._environment)
        (done,) = await together(work)
        result: CompletedProcess[str] = done
        return result


def _said(done: CompletedProcess[str]) -> str:
    return done.stderr.strip() or done.stdout.strip()


def _failed(argv: tuple[str, ...], done: CompletedProcess[str]) -> BackendFailed:
    return BackendFailed(f"{' '.join(argv)} failed ({done.returncode}): {_said(done)[-1000:] or 'it said nothing'}")


async def together(*works: Awaitable[Any]) -> list[Any]:
    """Their results, when the last has ended; then the first error, if there was one.

    Nothing is broken off half-way: a caller that is cancelled waits for the end as well, and is cancelled then.
    """
    gathered = asyncio.gather(*works, return_exceptions=True)
    try:
        results = await asyncio.shield(gathered)
    except asyncio.CancelledError:
        await asyncio.wait([gathered])
        raise
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
