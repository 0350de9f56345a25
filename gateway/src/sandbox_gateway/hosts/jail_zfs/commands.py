"""Run FreeBSD's commands from coroutines. Cancelling the caller does not interrupt a command."""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import CompletedProcess

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.tasks import finish_despite_cancellation

TIMEOUT_SECONDS = 60.0


class CommandRunner:
    """Runs commands with the variables of ``child_environment`` and of ``environment``."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})

    async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
        """Run a command and return its standard output. Raises BackendFailed, with the command's message, if it fails.

        ``silent``: accept a failure without a message, which means that the command found nothing.
        """
        result = await self._run(argv, input=input, check=not silent)
        if result.returncode != 0 and _message(result):
            raise _failure(argv, result)
        return result.stdout

    async def run_unless_absent(self, *argv: str, absent: tuple[str, ...]) -> bool:
        """Run a command that removes something. Returns False if there was nothing to remove.

        That is the case if the command's message contains one of the texts in ``absent``.
        """
        result = await self._run(argv, input=None, check=False)
        if result.returncode == 0:
            return True
        if any(words in _message(result) for words in absent):
            return False
        raise _failure(argv, result)

    async def _run(self, argv: tuple[str, ...], *, input: str | None, check: bool) -> CompletedProcess[str]:
        command = run_async(argv, timeout=TIMEOUT_SECONDS, input=input, check=check, env=self._environment)
        return await finish_despite_cancellation(command)


def _message(result: CompletedProcess[str]) -> str:
    return result.stderr.strip() or result.stdout.strip()


def _failure(argv: tuple[str, ...], result: CompletedProcess[str]) -> BackendFailed:
    return BackendFailed(f"{' '.join(argv)} failed ({result.returncode}): {_message(result)[-1000:] or 'no message'}")
