"""Run FreeBSD's commands from coroutines. Each command runs to completion, so that its result is known."""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import CompletedProcess

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.tasks import finish_despite_cancellation

SECONDS = 60.0


class CommandRunner:
    """Runs commands with ``environment`` added to ``child_environment``."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})

    async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
        """Run a command that must succeed, and return its standard output. Raises BackendFailed with its message.

        ``silent``: a failure without a message means that the command found nothing.
        """
        done = await self._run(argv, input=input, check=not silent)
        if done.returncode != 0 and _message(done):
            raise _failure(argv, done)
        return done.stdout

    async def run_unless_absent(self, *argv: str, absent: tuple[str, ...]) -> bool:
        """Run a command that removes something.

        Returns False if its message contains one of ``absent``: nothing was there.
        """
        done = await self._run(argv, input=None, check=False)
        if done.returncode == 0:
            return True
        if any(words in _message(done) for words in absent):
            return False
        raise _failure(argv, done)

    async def _run(self, argv: tuple[str, ...], *, input: str | None, check: bool) -> CompletedProcess[str]:
        work = run_async(argv, timeout=SECONDS, input=input, check=check, env=self._environment)
        return await finish_despite_cancellation(work)


def _message(done: CompletedProcess[str]) -> str:
    return done.stderr.strip() or done.stdout.strip()


def _failure(argv: tuple[str, ...], done: CompletedProcess[str]) -> BackendFailed:
    return BackendFailed(f"{' '.join(argv)} failed ({done.returncode}): {_message(done)[-1000:] or 'no message'}")
